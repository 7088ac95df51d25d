"""The scheduler: who runs in the next step, and what a collected step means.

Rules of this file, and of nothing else:

* It knows no time, does no I/O and holds no device object. Arrivals, aborts and pauses enter before the next plan.
* `plan` and `commit` alternate in any pattern as long as at most `depth` plans are uncommitted and plans are
  committed in order. Each plan is all or nothing per request.
* Settled quantities (known, computed) change in `commit`, optimistic ones (planned) in `plan`. See rows.py.
* A row is given up when the last step that names it is collected; KV blocks have rules of their own, in residency.py.
* An evicted request keeps its row until its late token is in; only then can it be admitted again.

The decode path costs a fixed number of array operations per step, however many requests there are. Python loops run
over what changed: admissions, prefill chunks, evictions, finishes, block boundaries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

import numpy as np

from asyncsched import room, stops
from asyncsched.config import EngineConfig, smallest_bucket
from asyncsched.decisions import describe
from asyncsched.plan import NO_SOURCE, IndexArray, StepOutput, StepPlan
from asyncsched.policy_set import PolicySet
from asyncsched.queue import WaitingQueue
from asyncsched.request import (
    NO_TOKENS,
    Counts,
    Finished,
    FinishReason,
    Request,
    RequestView,
    SamplingParams,
    Status,
    StopMatcher,
    TokenArray,
)
from asyncsched.residency import Residency
from asyncsched.rows import NEVER, NO_TOKEN, Rows

NO_ROWS: IndexArray = np.zeros(0, dtype=np.int64)
NO_SOURCES: IndexArray = np.array(NO_SOURCE, dtype=np.int64)  # numpy takes it faster than a Python int
UINT32 = np.dtype(np.uint32)


class Chunk(NamedTuple):
    """A prefill: positions start..end-1 of one row."""

    row: int
    start: int
    end: int


class Scheduler:
    """Plans steps over `config.num_blocks` KV blocks and `config.max_num_seqs` seats.

    `log`, when given, receives one line per decision: equal inputs give equal lines, whatever executes the plans.
    `observer`, where there is one, is told of each eviction that makes room, before it takes place.
    """

    def __init__(self, config: EngineConfig, *, log: list[str] | None = None) -> None:
        self.config = config
        self.rows = Rows(config)
        self.residency = Residency(config, self.rows)
        self.policies = PolicySet(config)
        self.plans = 0  # calls of plan, the clock that arrivals and aborts are recorded by
        self.preemptions = 0
        self.prefix_queries = 0  # tokens that were looked up in the prefix cache, when their request was first admitted
        self.prefix_hits = 0  # and those found
        self.observer: Callable[[Request], None] | None = None
        self._log = log
        self._active: dict[str, Request] = {}
        self._waiting = WaitingQueue(self.policies)
        self._seated: dict[int, Request] = {}  # by row, in order of admission
        self._decode = NO_ROWS  # seated rows whose next query is one token, in order of admission
        self._prefilling: list[Request] = []
        self._finishing: dict[int, Request] = {}  # without a seat: every step they may have is planned
        self._draining: list[Request] = []  # gave up their blocks while a step names their row
        self._lost: set[int] = set()  # rows of steps that never came back
        self._reserved = np.zeros(self.rows.capacity, dtype=np.int64)  # blocks promised at admission
        self._paused = False
        self._static_batch: deque[Request] = deque()  # who may still join the static batch, in order
        self._next_step = 0
        self._settled = NEVER  # the newest committed step
        self._totals = dict.fromkeys(Status, 0)
        self._num_submitted = 0
        self._vocab_size = np.array(config.vocab_size, dtype=np.uint32)
        self._arange = np.arange(max(config.max_num_seqs, 1), dtype=np.int64)
        self._slot_base = [slot * config.max_num_seqs + self._arange for slot in range(config.depth)]

    # ---- what enters before a plan ---------------------------------------------------------------------------------

    def submit(
        self,
        request_id: str,
        prompt: TokenArray,
        params: SamplingParams,
        *,
        priority: int = 0,
        matcher: StopMatcher | None = None,
    ) -> Finished | None:
        """Queues a request. Returns the notice of rejection, with the numbers, when it can never run."""
        number = self._num_submitted
        self._num_submitted += 1
        problem = f"request_id {request_id!r} is in use" if request_id in self._active else ""
        problem = problem or room.why_never(self.residency, len(prompt), params)
        if problem:
            self._totals[Status.REJECTED] += 1
            self._note("reject {} {}", request_id, problem)
            return Finished(request_id, number, FinishReason.REJECTED, NO_TOKENS, problem)
        request = Request(
            request_id, number, params, priority, prompt, len(prompt), len(prompt) + params.max_tokens, matcher
        )
        self._active[request_id] = request
        self._totals[Status.WAITING] += 1
        self._waiting.push(request, self._view(request))
        self._note("submit {}", request_id)
        return None

    def abort(self, request_id: str) -> Finished | None:
        """Ends a request from any state; nothing of it is delivered afterwards. None when there is nothing to end."""
        request = self._active.get(request_id)
        if request is None:
            return None
        self._note("abort {}", request_id)
        return self._end(request, FinishReason.ABORT)

    def pause(self, *, clear: bool = False) -> None:
        """No step is planned until `resume`. `clear` evicts everybody and forgets all KV (for new weights)."""
        self._note("pause clear={}", clear)
        self._paused = True
        if clear:
            for request in list(self._seated.values()):
                self._evict(request, may_offload=False)
            for request in self._waiting:
                self.residency.drop_host_copy(request, self._settled)
            self.residency.forget_prefixes(self._next_step)

    def resume(self) -> None:
        self._note("resume")
        self._paused = False

    # ---- the loop: plan, then commit or fail -----------------------------------------------------------------------

    def plan(self, slot: int) -> StepPlan | None:
        """Decides the next step, to run in I/O slot `slot`; None when nothing can run before something is collected."""
        self.plans += 1
        if self._paused:
            return None
        preemptions = self.preemptions
        rows, starts = self._plan_decodes()
        chunks: list[Chunk] = []
        if self._prefilling or self._waiting:
            chunks = self._plan_prefills(rows, preemptions)
        if not len(rows) and not chunks and not self.residency.has_copies:
            return None
        return self._seal(slot, rows, starts, chunks)

    def commit(self, plan: StepPlan, tokens: TokenArray) -> StepOutput:
        """Takes the tokens of the oldest uncommitted plan, int32[len(plan.sampled)], and settles what they mean."""
        if len(tokens) != len(plan.sampled):
            raise ValueError(f"step {plan.step} sampled {len(plan.sampled)} tokens, not {len(tokens)}")
        self._settled = plan.step
        r = self.rows
        r.computed[plan.rows] = plan.ends
        self.residency.committed(plan)
        rows, ends = plan.sampled, plan.sampled_ends
        overshoot = 0
        live = r.live[rows]
        if False in live.tobytes():
            overshoot = r.stopped[rows].tobytes().count(True)
            rows, ends, tokens = rows[live], ends[live], tokens[live]
        finished: tuple[Finished, ...] = ()
        valid = tokens.view(UINT32) < self._vocab_size  # a negative token is a large number
        if False in valid.tobytes():
            finished = stops.fail_tokens(r, rows[~valid], tokens[~valid], self.config.vocab_size, self._end)
            rows, ends, tokens = rows[valid], ends[valid], tokens[valid]
        r.flat_tokens[r.token_base[rows] + ends] = tokens
        r.known[rows] = r.after[ends]
        requests = r.request[rows]
        ended = tokens == r.stop_token[rows]
        if self._finishing:  # nobody else is at its length limit
            ended = ended | (ends >= r.last_end[rows])
        if True in r.scrutinise[rows].tobytes():
            requests, tokens, stopped = stops.commit_one_by_one(r, rows, ends, tokens, self._end)
            finished += stopped
        elif True in ended.tobytes():
            pairs = zip(rows[ended].tolist(), ends[ended].tolist(), strict=True)
            finished += tuple(self._end_of(row, end) for row, end in pairs)
        self._release_drained()
        return StepOutput(plan.step, requests, tokens, finished, overshoot)

    def fail(self, plan: StepPlan, cause: str, *, stuck: bool = False) -> StepOutput:
        """The oldest uncommitted plan failed: its requests end with the cause, and so do their rows in later steps.

        `stuck` says that the step may still run: its rows, and the blocks it writes, are never used again.
        """
        self._settled = plan.step
        self._note("fail step {} stuck={} {}", plan.step, stuck, cause)
        if stuck:
            self._lost.update(plan.rows.tolist())
        owners = [self.rows.owner[row] for row in plan.rows[self.rows.live[plan.rows]].tolist()]
        finished = [self._end(request, FinishReason.ERROR, cause) for request in owners if request is not None]
        if stuck:
            for row in self.residency.stuck(plan, self._waiting):
                if row in self._seated:  # it got blocks that the step may still write: it starts over on others
                    self._evict(self._seated[row], may_offload=False)
            finished += self._end_unfit()
        else:
            self.residency.failed(plan, self._waiting)
        self._release_drained()
        return StepOutput.of_notices(tuple(finished), plan.step)

    def fail_all(self, cause: str) -> StepOutput:
        """The engine cannot run any more: every request ends with the cause. For when no step is in flight."""
        finished = tuple(self._end(request, FinishReason.ERROR, cause) for request in list(self._active.values()))
        return StepOutput.of_notices(finished)

    # ---- questions -------------------------------------------------------------------------------------------------

    @property
    def counts(self) -> Counts:
        t, s = self._totals, Status
        return Counts(self._num_submitted, t[s.REJECTED], t[s.WAITING], t[s.RUNNING], t[s.FINISHED], t[s.ABORTED])

    @property
    def has_requests(self) -> bool:
        return bool(self._active)

    @property
    def is_paused(self) -> bool:
        return self._paused

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_seated(self) -> int:
        return len(self._seated)

    # ---- planning --------------------------------------------------------------------------------------------------

    def _plan_decodes(self) -> tuple[IndexArray, IndexArray]:
        """Every decoding row the budget allows, each with a block for its next position.

        Evicts until the rest have their blocks, unless enough are on their way. Rows left without sit this step out.
        """
        pool = self.residency.pool
        while True:
            rows = self._decode  # the same array as long as the same rows decode: then less of it is new
            if len(rows) > self.config.max_num_batched_tokens:
                rows = rows[: self.config.max_num_batched_tokens]
            if not len(rows):
                return rows, rows
            starts = self.rows.planned[rows]
            lacks = self.residency.lacks_block(rows, starts)
            if True not in lacks.tobytes():
                return rows, starts
            lacking = lacks.tobytes().count(True)
            if lacking <= pool.available:
                break
            victim = None
            if len(self._seated) > 1 and lacking > pool.available + pool.num_coming:
                victim = self._choose_victim(set())
            if victim is None:
                has_block = ~lacks | (np.cumsum(lacks) <= pool.available)
                rows, starts, lacks = rows[has_block], starts[has_block], lacks[has_block]
                break
            self._evict(victim)
        self.residency.grow(rows[lacks])
        return rows, starts

    def _plan_prefills(self, decodes: IndexArray, preemptions: int) -> list[Chunk]:
        """Chunks for rows that still prefill, then for new admissions, within what the decodes left of the budget."""
        budget = self.config.max_num_batched_tokens - len(decodes)
        chunks: list[Chunk] = []
        for request in list(self._prefilling):
            if budget <= 0:
                return chunks
            if request.status is Status.RUNNING:  # it may have been evicted for one before it
                chunk = self._continue_prefill(request, budget, decodes, chunks)
                if chunk is not None:
                    chunks.append(chunk)
                    budget -= chunk.end - chunk.start
        if self.preemptions > preemptions:  # whoever was just evicted must not come straight back
            return chunks
        self._open_static_batch()
        while budget > 0 and (head := self._next_in_line()) is not None:
            chunk = self._admit(head, budget)
            if chunk is None and head.host_copy is not None and self._is_standing_still:
                # Nothing that may still happen makes room for its copy: it computes again.
                self.residency.drop_host_copy(head, self._settled)
                chunk = self._admit(head, budget)
            if chunk is None:
                self._static_batch.clear()  # it is complete when the next in line does not fit
                break
            chunks.append(chunk)
            budget -= chunk.end - chunk.start
        return chunks

    def _continue_prefill(
        self, request: Request, budget: int, decodes: IndexArray, chunks: list[Chunk]
    ) -> Chunk | None:
        """As long a chunk as there are blocks for; evicts only where there is not one."""
        r, pool, row = self.rows, self.residency.pool, request.row
        start = r.planned.item(row)
        end = min(r.known.item(row), start + budget)
        if r.missing_blocks(row, start + 1) > pool.available + pool.num_coming:
            taken = {row, *decodes.tolist(), *(chunk.row for chunk in chunks)}
            victim = self._choose_victim(taken)
            while victim is not None and r.missing_blocks(row, start + 1) > pool.available + pool.num_coming:
                self._evict(victim)
                victim = self._choose_victim(taken)
        end = self.residency.extend(row, end)
        return Chunk(row, start, end) if end > start else None

    @property
    def _is_standing_still(self) -> bool:
        """Nobody has a seat and no step is in flight: only an admission changes anything."""
        return not self._seated and not self._is_in_flight

    @property
    def _is_in_flight(self) -> bool:
        return self._settled < self._next_step - 1

    def _open_static_batch(self) -> None:
        """The first `max_num_seqs` that wait, once the batch before is all admitted and all gone."""
        if self.config.batching == "static" and not self._seated and not self._finishing and not self._next_in_line():
            self._static_batch = deque(islice(self._waiting, self.config.max_num_seqs))

    def _next_in_line(self) -> Request | None:
        """The head of the queue; with static batching, of those who waited when the batch was opened."""
        if self.config.batching == "continuous":
            return self._waiting.head if self._waiting else None
        while self._static_batch and self._static_batch[0].status is not Status.WAITING:
            self._static_batch.popleft()  # it has a seat by now, or was aborted
        return self._static_batch[0] if self._static_batch else None

    def _admit(self, request: Request, budget: int) -> Chunk | None:
        """Seats the head of the queue with its first chunk, or leaves everything as it was."""
        if request.row >= 0:  # evicted, and its late token is not in yet
            return None
        if len(self._seated) >= self.config.max_num_seqs or not self.rows.num_free:
            return None
        if not self.residency.pool.available:
            return None
        known, size = len(request.tokens), self.config.block_size
        shared = self.residency.match_prefix(request)
        copy = request.host_copy
        start = copy.end if copy else len(shared) * size
        if not self.config.enable_chunked_prefill and known - start > budget:
            return None
        least = -(-(start + 1) // size) - (copy.freed if copy else 0)
        reserved = self.policies.reserved_tokens(self._view(request))
        promised = max(room.wanted_blocks(self.residency, reserved, known), least)
        needed = promised - len(shared) + self.residency.pool.num_unowned(shared)
        available = self.residency.pool.available
        if needed > available:
            return None
        if needed + room.outstanding_promises(self.rows, self._reserved, self._seated) > available:
            return None
        if not self.residency.can_restore(request):
            return None
        self._waiting.remove(request)
        if not request.num_preemptions:
            self.prefix_queries += known
            self.prefix_hits += len(shared) * size
        row = self._seat(request, start)
        self.residency.share(row, shared)
        self.residency.restore(request, row, self._next_step)
        self._reserved[row] = promised
        end = self.residency.extend(row, min(known, start + budget))
        self._note("admit {} start={} restored={}", request.request_id, start, copy is not None)
        return Chunk(row, start, end)

    def _seat(self, request: Request, start: int) -> int:
        """A row for the request, without blocks."""
        r = self.rows
        row = r.take()
        known = len(request.tokens)
        params = request.params
        r.tokens[row, :known] = request.tokens
        r.known[row] = known
        r.computed[row] = r.planned[row] = start
        r.last_step[row] = r.sampled_at[row] = NEVER
        r.request[row] = request.number
        r.last_end[row] = request.max_total_tokens - 1
        r.stop_token[row] = params.stop_token_ids[0] if params.stop_token_ids else NO_TOKEN
        r.scrutinise[row] = bool(params.min_tokens or len(params.stop_token_ids) > 1 or request.matcher)
        r.live[row], r.stopped[row] = True, False
        r.num_blocks[row] = r.freed[row] = 0
        r.owner[row] = request
        request.row = row
        self._seated[row] = request
        self._prefilling.append(request)
        self._set_status(request, Status.RUNNING)
        return row

    def _seal(self, slot: int, rows: IndexArray, starts: IndexArray, chunks: list[Chunk]) -> StepPlan:
        """Makes the plan final: arrays, carry-over mask, optimistic state, and who decodes next time."""
        r = self.rows
        step = self._next_step
        self._next_step += 1
        num_decodes = len(rows)
        carry = r.source[rows]
        carry[r.sampled_at[rows] <= np.array(self._settled)] = NO_SOURCES
        ends = r.after[starts]
        sampled, sampled_ends, sampled_at = rows, ends, self._arange[:num_decodes]
        num_tokens = num_decodes
        if chunks:
            num_tokens += sum([chunk.end - chunk.start for chunk in chunks])
            completes = [place for place, chunk in enumerate(chunks) if chunk.end == r.known.item(chunk.row)]
            added = np.array(chunks, dtype=np.int64).transpose().copy()
            rows, starts, ends = _joined(rows, added[0]), _joined(starts, added[1]), _joined(ends, added[2])
            if completes:
                completed = np.array(completes, dtype=np.int64) + num_decodes
                sampled_at = _joined(sampled_at, completed)
                sampled, sampled_ends = rows[sampled_at], ends[sampled_at]
                self._decode = _joined(self._decode, rows[completed])
        r.planned[rows] = ends
        r.last_step[rows] = step
        r.sampled_at[sampled] = step
        r.source[sampled] = self._slot_base[slot][: len(sampled)]
        if chunks:
            self._prefilling = [q for q in self._prefilling if r.planned[q.row] < r.known[q.row]]
        self._give_up_seats(sampled, sampled_ends)
        offload, restore = self.residency.take_copies()
        bucket = 0 if chunks else smallest_bucket(self.config.decode_buckets, num_decodes)
        mixed_bucket = 0 if bucket else smallest_bucket(self.config.mixed_buckets, num_tokens)
        plan = StepPlan(
            step,
            slot,
            rows,
            r.request[rows],
            starts,
            ends,
            num_decodes,
            carry,
            sampled,
            sampled_ends,
            sampled_at,
            num_tokens,
            bucket,
            offload,
            restore,
            mixed_bucket,
        )
        if self._log is not None:
            self._log.append(describe(plan))
        return plan

    def _give_up_seats(self, sampled: IndexArray, ends: IndexArray) -> None:
        """Rows whose last step by length is planned need none any more."""
        r = self.rows
        at_limit = ends >= r.last_end[sampled]
        if True in at_limit.tobytes():
            for row in sampled[at_limit].tolist():
                self._finishing[row] = self._seated.pop(row)
            self._decode = self._decode[r.planned[self._decode] < r.last_end[self._decode]]

    # ---- eviction and reservations ---------------------------------------------------------------------------------

    def _choose_victim(self, taken: set[int]) -> Request | None:
        """The seated request the policy gives up first, among those not in the plan that would make room now."""
        candidates = [request for row, request in self._seated.items() if row not in taken]
        freeing = room.who_frees(self.rows, self.residency.pool, candidates, is_last_resort=not self._is_in_flight)
        if not freeing:
            return None
        return freeing[self.policies.choose_victim([self._view(request) for request in freeing])]

    def _evict(self, request: Request, *, may_offload: bool = True) -> None:
        """Takes seat and blocks; the request waits again, and goes on from the tokens it has by then."""
        if self.observer is not None and may_offload:  # otherwise KV is lost: that is no matter of room
            self.observer(request)
        row = request.row
        self._static_batch.clear()  # whoever is evicted from a static batch waits for the next
        self.preemptions += 1
        request.num_preemptions += 1
        offloaded = (
            may_offload
            and self.policies.offloads(self._view(request))
            and self.residency.offload(request, self._next_step)
        )
        if not offloaded:
            self.residency.give_up(row)
        self._note("evict {} offloaded={}", request.request_id, offloaded)
        self._leave(request)
        self._set_status(request, Status.WAITING)
        self._waiting.push(request, self._view(request))
        if self.rows.last_step[row] > self._settled:
            self._draining.append(request)
        else:
            self._unseat(request)

    # ---- settling --------------------------------------------------------------------------------------------------

    def _end_of(self, row: int, end: int) -> Finished:
        """Ends a request whose stops one comparison decides: the last token the limit allows, or the stop token."""
        request = self.rows.owner[row]
        assert request is not None  # the row is live
        is_stop = int(self.rows.tokens[row, end]) == int(self.rows.stop_token[row])
        return self._end(request, FinishReason.STOP if is_stop else FinishReason.LENGTH)

    def _end(self, request: Request, reason: FinishReason, message: str = "") -> Finished:
        """Ends an active request from any state and gives up what it owns, its row once no step names it."""
        row = request.row
        status = Status.ABORTED if reason is FinishReason.ABORT else Status.FINISHED
        if request.status is Status.WAITING:
            self._waiting.remove(request)
            self.residency.drop_host_copy(request, self._settled)
        outputs = request.tokens[request.num_prompt_tokens :]
        if row >= 0:
            outputs = self.rows.tokens[row, request.num_prompt_tokens : self.rows.known[row]].copy()
            self.residency.give_up(row)
            self._leave(request)
            self.rows.live[row] = False
            self.rows.stopped[row] = reason is FinishReason.STOP
            if request not in self._draining:
                if self.rows.last_step[row] > self._settled:
                    self._draining.append(request)
                else:
                    self._unseat(request)
        if request.matcher is not None and reason in (FinishReason.ABORT, FinishReason.ERROR):
            outputs = outputs[: request.num_released]  # what was held back is never handed out
        self._set_status(request, status)
        del self._active[request.request_id]
        self._note("end {} {}", request.request_id, reason.value)
        return Finished(request.request_id, request.number, reason, outputs, message)

    def _leave(self, request: Request) -> None:
        """Takes a request out of the running batch."""
        row = request.row
        if self._seated.pop(row, None) is None:
            self._finishing.pop(row, None)
            return
        if request in self._prefilling:
            self._prefilling.remove(request)
        else:
            self._decode = self._decode[self._decode != row]

    def _end_unfit(self) -> list[Finished]:
        """Ends requests that blocks in quarantine leave no room for."""
        usable, unfit = self.residency.pool.num_usable, room.unfit(self.residency, self._active.values())
        message = f"its KV does not fit the {usable} blocks that are left after steps that never came back"
        return [self._end(request, FinishReason.ERROR, message) for request in unfit]

    def _release_drained(self) -> None:
        if self._draining:
            drained = [q for q in self._draining if self.rows.last_step[q.row] <= self._settled]
            if drained:
                self._draining = [q for q in self._draining if q not in drained]
                for request in drained:
                    self._unseat(request)

    def _unseat(self, request: Request) -> None:
        """Gives the row back; what it knew goes with the request, in case it is admitted again."""
        row = request.row
        request.tokens = self.rows.tokens[row, : self.rows.known[row]].copy()
        self.rows.live[row] = False
        self.rows.owner[row] = None
        request.row = -1
        if row not in self._lost:
            self.rows.give_back(row)

    # ---- small things ----------------------------------------------------------------------------------------------

    def _view(self, request: Request) -> RequestView:
        row = request.row
        return RequestView(
            request.request_id,
            request.number,
            request.priority,
            request.num_prompt_tokens,
            self.rows.known.item(row) if row >= 0 else len(request.tokens),
            request.params.max_tokens,
            self.rows.num_blocks.item(row) if row >= 0 else 0,
        )

    def _set_status(self, request: Request, status: Status) -> None:
        self._totals[request.status] -= 1
        self._totals[status] += 1
        request.status = status

    def _note(self, line: str, *values: object) -> None:
        if self._log is not None:
            self._log.append(f"before plan {self.plans}: " + line.format(*values))


def _joined(one: IndexArray, other: IndexArray) -> IndexArray:
    return np.concatenate((one, other)) if len(one) else other
