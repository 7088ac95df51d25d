"""What must hold while an episode runs.

After every step: counts of requests (I2), token and sequence budgets, the length limit and each position sampled once
and in order (I5, I7), every token and notice handed out against the request alone (I1, I6), overshoot rows, no use of
what a step that never came back may touch, no read of what nobody wrote (I11), the accounts of blocks and rows (I3);
the caller adds the hazard checker (I4). At every eviction: the step does not fit without it. At the end: one notice for
each request, and nothing held but what is in quarantine.
"""

from __future__ import annotations

from asyncsched.faithful import FaithfulExecutor
from asyncsched.fuzz_accounts import Accounts, Quarantine, check_eviction, fail
from asyncsched.fuzz_requests import Requests
from asyncsched.fuzz_scenario import Scenario, Submission
from asyncsched.lanes import Ticket
from asyncsched.pipeline import StepFailure
from asyncsched.plan import StepOutput, StepPlan
from asyncsched.request import FinishReason, Request, Status, TokenArray
from asyncsched.scheduler import Scheduler
from asyncsched.stops import fault_of

# What an episode may exercise; a report counts each.
COUNTED = (
    "requests",
    "rejected",
    "delivered_tokens",
    "length_stops",
    "content_stops",
    "overshoot_rows",
    "prefill_chunks",
    "padded_steps",
    "padded_mixed_steps",
    "carried_tokens",
    "prefix_hits",
    "evictions",
    "evictions_in_flight",
    "offloaded_blocks",
    "restored_blocks",
    "copy_only_steps",
    "aborts",
    "aborts_in_flight",
    "pauses",
    "clears",
    "failed_steps",
    "stuck_steps",
    "bad_tokens",
    "failed_requests",
    "quarantined_blocks",
    "policy_faults",
    "engine_losses",
)


class Checker:
    """Watches one episode. Raises FindingError where a check fails.

    digest  of plans and tokens, equal for equal runs
    """

    def __init__(self, scenario: Scenario, scheduler: Scheduler, executor: FaithfulExecutor) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.counts = dict.fromkeys(COUNTED, 0)
        self.steps = 0
        self.digest = 0
        config = self._config = scenario.config
        self._most_tokens, self._most_seqs = config.max_num_batched_tokens, config.max_num_seqs
        self._vocab_size, self._depth = config.vocab_size, config.depth
        self._lost = Quarantine(config, scheduler)
        self._accounts = Accounts(scheduler, self._lost.rows)
        self._requests = Requests(config, self.counts, self._lost, lambda: scheduler.residency.pool.num_usable)
        self._tracks = self._requests.tracks
        self._aborting = False
        self._in_flight: dict[int, tuple[StepPlan, list[int]]] = {}  # by step: request of each sampled row
        self._settling: tuple[StepPlan, list[int]] | None = None
        self._causes: dict[int, str] = {}  # of requests that must end with the step being settled
        self._failed = False  # that step
        self._preemptions = 0
        work = sum(len(c.prompt) + c.max_tokens for c in scenario.commands if isinstance(c, Submission))
        self._most_steps = 200 + 40 * work
        scheduler.observer = self.evicting

    # ---- what enters -----------------------------------------------------------------------------------------------

    def submitted(self, spec: Submission) -> None:
        self._requests.submitted(spec)

    def aborting(self, request_id: str) -> None:
        self._aborting = True
        self._requests.aborting(request_id)
        request = self.scheduler._active.get(request_id)
        if request is not None:
            row = request.row
            self.counts["aborts"] += 1
            self.counts["aborts_in_flight"] += row >= 0 and int(self.scheduler.rows.last_step[row]) in self._in_flight

    def evicting(self, request: Request) -> None:
        check_eviction(self.scheduler)

    # ---- one step --------------------------------------------------------------------------------------------------

    def planned(self, plan: StepPlan, epoch: int) -> None:
        self.steps += 1
        if self.steps > self._most_steps:
            fail("I8", f"{self._most_steps} steps, and still requests: {self.scheduler.counts}")
        if self._aborting:
            self._aborting = False
            self._requests.check_aborted()
        rows, numbers, starts, ends = (
            plan.rows.tolist(),
            plan.requests.tolist(),
            plan.starts.tolist(),
            plan.ends.tolist(),
        )
        self.digest = hash((self.digest, *numbers, *ends))
        num_tokens, num_seqs = sum(ends) - sum(starts), len(rows)
        if num_tokens != plan.num_tokens or num_tokens > self._most_tokens or num_seqs > self._most_seqs:
            fail("I7", f"step {plan.step} has {num_tokens} tokens in {num_seqs} rows, announced {plan.num_tokens}")
        if num_seqs > 1 and len(set(rows)) != num_seqs:
            fail("I7", f"step {plan.step} names a row twice: {rows}")
        if plan.sampled is plan.rows:
            sampled, sampled_ends = numbers, ends
        else:
            by_row = dict(zip(rows, numbers, strict=True))
            sampled, sampled_ends = [by_row[row] for row in plan.sampled.tolist()], plan.sampled_ends.tolist()
        self._count_plan(plan, rows, numbers, starts)
        tracks, step = self._tracks, plan.step
        for number, start, end in zip(numbers, starts, ends, strict=True):
            track = tracks[number]
            if track.notice is not None:
                fail("I5", f"step {step} computes request {number}, which has ended")
            if not 0 <= start < end <= track.most_end:
                fail("I5", f"step {step} computes positions {start}..{end - 1} of request {number}: {track.spec}")
            track.end = end
        for number, end in zip(sampled, sampled_ends, strict=True):
            track = tracks[number]
            if end - track.prompt != len(track.sampled):
                fail("I6", f"step {step} samples position {end} of request {number} out of turn")
            track.sampled.append(epoch)
        self._in_flight[step] = plan, sampled
        if len(self._in_flight) > self._depth:
            fail("I7", f"{len(self._in_flight)} steps in flight at depth {self._depth}")
        if self._lost.slots:
            self._lost.check(plan)

    def collected(self, ticket: Ticket, result: TokenArray | StepFailure) -> None:
        """What the step's requests must become, before the scheduler sees the result."""
        plan, sampled = self._settling = self._in_flight.pop(ticket.plan.step)
        self._failed = isinstance(result, StepFailure)
        if isinstance(result, StepFailure):
            self.counts["failed_steps"] += 1
            self._hit(plan.requests.tolist(), result.cause)
            if result.stuck:
                self._lost.add(plan)
                self.counts["stuck_steps"] += 1
        else:
            tokens = result.tolist()
            self.digest = hash((self.digest, *tokens))
            if len(tokens) != len(sampled):
                fail("fault", f"step {plan.step} samples for {len(sampled)} rows and gives {len(tokens)} tokens")
            if self._requests.some_match:
                self._feed(sampled, tokens)
            if tokens and (min(tokens) < 0 or max(tokens) >= self._vocab_size):
                self._hit_by_tokens(sampled, tokens)
        if self.executor.unwritten:
            self._check_reads(plan.step)

    def delivered(self, output: StepOutput) -> None:
        requests, counts = self._requests, self.counts
        settling = self._settling if output.step >= 0 else None
        if settling is not None:
            overshoot, tracks = 0, self._tracks
            for number in settling[1]:
                notice = tracks[number].notice
                if notice is not None and notice.reason is FinishReason.STOP:
                    overshoot += 1
            if overshoot != output.overshoot and not self._failed:
                fail("I5", f"step {output.step} has {overshoot} overshoot rows and reports {output.overshoot}")
            counts["overshoot_rows"] += overshoot
        tokens = output.tokens.tolist()
        for number, token in zip(output.requests.tolist(), tokens, strict=True):
            requests.token(number, token)
        counts["delivered_tokens"] += len(tokens)
        for finished in output.finished:
            requests.notice(finished, self._causes)
        if settling is not None:
            if self._requests.some_match:
                self._check_held_back(settling[1])
            self._settled(output.step)

    def idle(self, inbox: int) -> None:
        scheduler = self.scheduler
        if scheduler.has_requests and not scheduler.is_paused and not inbox:
            fail("I8", f"nothing can be planned with nothing in flight: {scheduler.counts}")

    def finish(self) -> None:
        """The pipeline has returned, and every lane has run dry."""
        for track in self._tracks:
            if track.notice is None:
                fail("I2", f"request {track.number} never got a notice")
        if self._in_flight:
            fail("I8", f"steps {list(self._in_flight)} were never collected")
        self._accounts.check(self._in_flight)
        residency, rows, lost = self.scheduler.residency, self.scheduler.rows, self._lost
        for name, pool, losable in (
            ("KV", residency.pool, lost.losable),
            ("host", residency.host_pool, lost.host_blocks),
        ):
            if pool.num_held or pool.num_coming:
                fail("I3", f"at the end {pool.num_held} {name} blocks are held and {pool.num_coming} fenced")
            if not pool._fenced <= losable:
                fail("I3", f"{name} blocks {sorted(pool._fenced - losable)} are in quarantine without a reason")
        if rows.num_free + len(lost.rows) != rows.capacity:
            fail("I3", f"at the end {rows.num_free} of {rows.capacity} rows are free, {len(lost.rows)} lost")
        self.counts["quarantined_blocks"] = len(residency.pool._fenced)
        self.counts["policy_faults"] = len(self.scheduler.policies.faults)
        self.scheduler.observer = None

    # ---- parts -----------------------------------------------------------------------------------------------------

    def _count_plan(self, plan: StepPlan, rows: list[int], numbers: list[int], starts: list[int]) -> None:
        counts, n = self.counts, plan.num_decodes
        if n:
            counts["carried_tokens"] += n - plan.carry.tolist().count(-1)
        elif not rows:
            if not len(plan.offload.host):
                fail("I7", f"step {plan.step} is empty")
            counts["copy_only_steps"] += 1
        if n < len(starts):
            counts["prefill_chunks"] += len(starts) - n
            for number, row, start in zip(numbers[n:], rows[n:], starts[n:], strict=True):
                if start and start != self._tracks[number].end:  # it did not begin at 0, and does not go on
                    blocks = self.scheduler.rows.blocks_of(row)
                    counts["prefix_hits"] += not set(blocks).intersection(plan.restore.device.tolist())
        if plan.bucket > n:
            counts["padded_steps"] += 1
        if plan.mixed_bucket > plan.num_tokens:
            counts["padded_mixed_steps"] += 1
        if plan.offload is not plan.restore:  # the empty ones are one
            counts["offloaded_blocks"] += len(plan.offload.host)
            counts["restored_blocks"] += len(plan.restore.host)
        preemptions = self.scheduler.preemptions
        if preemptions != self._preemptions:
            counts["evictions"] += preemptions - self._preemptions
            self._preemptions = preemptions
            waiting = sum(request.status is Status.WAITING for request in self.scheduler._draining)
            counts["evictions_in_flight"] += waiting

    def _feed(self, sampled: list[int], tokens: list[int]) -> None:
        for number, token in zip(sampled, tokens, strict=True):
            track = self._tracks[number]
            if track.matcher is not None and track.notice is None:
                track.feed(token)

    def _check_held_back(self, numbers: list[int]) -> None:
        """What may still become a stop string is held back, and nothing else is."""
        for number in numbers:
            track = self._tracks[number]
            if track.matcher is not None and track.notice is None and track.got != track.safe:
                fail("hold-back", f"request {number} got {track.got} of {track.settled} tokens; {track.safe} are safe")

    def _hit_by_tokens(self, sampled: list[int], tokens: list[int]) -> None:
        for number, token in zip(sampled, tokens, strict=True):
            if not 0 <= token < self._vocab_size and self._tracks[number].notice is None:
                self.counts["bad_tokens"] += 1
                self._hit([number], fault_of(token, self._vocab_size))

    def _hit(self, numbers: list[int], cause: str) -> None:
        """A fault hits these requests, as far as they have not ended."""
        for number in numbers:
            track = self._tracks[number]
            if track.notice is None:
                track.cause = self._causes[number] = cause

    def _check_reads(self, step: int) -> None:
        """Reads of what nobody wrote, by rows that no fault has ended. Called when `step` is collected."""
        for read in self.executor.unwritten:
            if read.step <= step:
                track = self._tracks[read.request]
                if track.cause is None and track.notice is None:
                    what = f"position {read.position} of request {read.request}"
                    fail("I11", f"step {read.step} reads {what}, and nobody wrote it")
        self.executor.unwritten[:] = [read for read in self.executor.unwritten if read.step > step]

    def _settled(self, step: int) -> None:
        if self._causes:
            for number, cause in self._causes.items():
                if self._tracks[number].notice is None:
                    fail("fault", f"request {number} was in step {step} ({cause}), and goes on")
            self._causes.clear()
        self._settling = None
        scheduler = self.scheduler
        if scheduler._num_submitted != sum(scheduler._totals.values()) or scheduler._num_submitted > len(self._tracks):
            fail("I2", f"{self.scheduler.counts}, {len(self._tracks)} submitted")
        self._accounts.check(self._in_flight)
