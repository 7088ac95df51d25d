"""Drives the pipeline over the token-faithful device and checks the invariants of the design at every effect.

A script says which command enters when, counted in effects of the pipeline; when the engine is idle the clock jumps
to the next command. What happened is kept, so that a test about a scenario can assert that it occurred.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from faithful import FaithfulDevice, StopPattern, Story, tell

from asyncsched.config import EngineConfig
from asyncsched.pipeline import (
    Abort,
    Collect,
    Command,
    Deliver,
    Effect,
    Host,
    Idle,
    Inbox,
    Launch,
    Pause,
    Resume,
    StepFailure,
    Submit,
    pipeline,
)
from asyncsched.plan import StepOutput, StepPlan
from asyncsched.program import StepProgram
from asyncsched.request import Finished, FinishReason, Request, SamplingParams, TokenArray
from asyncsched.scheduler import Scheduler

NATURAL = (FinishReason.LENGTH, FinishReason.STOP)


class Ask(NamedTuple):
    """A request as data, so that it can be submitted again and again."""

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    pattern: tuple[int, ...] | None = None

    def command(self) -> Submit:
        prompt = np.array(self.prompt, dtype=np.int32)
        matcher = StopPattern(self.pattern) if self.pattern else None
        return Submit(self.request_id, prompt, self.params, self.priority, matcher)

    def story(self, config: EngineConfig) -> Story:
        return tell(self.prompt, self.params, self.pattern, config.sliding_window)


class Entry(NamedTuple):
    """`command` enters before the pipeline is resumed for the `at`-th time."""

    at: int
    command: Ask | Abort | Pause | Resume


Script = Sequence[Entry]


class Eviction(NamedTuple):
    """One preemption: who, before which plan, in what state, and how many blocks it made available.

    in_flight  steps in flight that name the request
    outputs    its settled output tokens
    cleared    a pause asked for it
    """

    request_id: str
    plan: int
    in_flight: int
    prefilling: bool
    outputs: int
    freed: int
    cleared: bool


class Admission(NamedTuple):
    request_id: str
    plan: int
    cached: int


class Reuse(NamedTuple):
    """A block that `step` uses for one request while a step in flight still writes it for another, ended or evicted."""

    step: int
    block: int
    former: str
    latter: str


def is_rejected(ask: Ask, config: EngineConfig) -> bool:
    """Whether a request can never run, derived from the most KV blocks it needs at one time when it is alone."""
    size, window = config.block_size, config.sliding_window
    total = len(ask.prompt) + ask.params.max_tokens
    if not ask.prompt or total > config.max_model_len:
        return True
    last = total - 2  # the newest token's KV is never written
    if not config.enable_chunked_prefill:  # after a preemption all of it may have to be computed in one step
        return last + 1 > config.max_num_batched_tokens or last // size + 1 > config.num_blocks
    firsts = [0 if window is None else max(0, position - window + 1) for position in range(last + 1)]
    needed = max(position // size - first // size + 1 for position, first in enumerate(firsts))
    return needed > config.num_blocks


@dataclass(slots=True)
class Life:
    """What is known about one submission."""

    ask: Ask
    story: Story
    delivered: list[int]
    sampled: int = 0  # tokens committed while it was alive
    overshoot: int = 0
    notice: Finished | None = None
    aborted: bool = False
    failed: bool = False


class Invariants:
    """Checks of a scheduler's state and of what leaves it. `lives` is by submission number."""

    def __init__(self, config: EngineConfig, scheduler: Scheduler) -> None:
        self.config = config
        self.scheduler = scheduler
        self.lives: list[Life] = []
        self.evictions: list[Eviction] = []
        self.reuses: list[Reuse] = []
        self.overshoot = 0
        self.in_flight: deque[StepPlan] = deque()
        self._written: dict[int, dict[int, int]] = {}  # by step in flight: blocks, and for which request
        self._evict = scheduler._evict
        self._clearing = False
        scheduler._evict = self._spy_on_evict

    # ---- inputs ----------------------------------------------------------------------------------------------------

    def submitted(self, ask: Ask) -> None:
        self.lives.append(Life(ask, ask.story(self.config), []))

    def aborted(self, request_id: str) -> None:
        for life in self.lives:
            if life.ask.request_id == request_id and life.notice is None:
                life.aborted = True

    def check_aborted(self) -> None:
        """Once an abort has entered, the request has ended."""
        assert all(life.notice is not None for life in self.lives if life.aborted)

    # ---- I2, I3 ----------------------------------------------------------------------------------------------------

    def check_state(self) -> None:
        scheduler, rows, pool = self.scheduler, self.scheduler.rows, self.scheduler.residency.pool
        c = scheduler.counts
        assert c.submitted == c.rejected + c.waiting + c.running + c.finished + c.aborted, c  # I2
        assert min(c) >= 0, c
        assert c.waiting == scheduler.num_waiting
        held: Counter[int] = Counter()
        for row in np.flatnonzero(rows.num_blocks).tolist():
            held.update(rows.blocks_of(row))
        assert held.keys() <= set(range(1, pool.num_blocks + 1)), "the null block is owned"
        owners = {block: pool.owners(block) for block in range(pool.num_blocks + 1)}
        assert held == {block: count for block, count in owners.items() if count}  # I3
        assert sorted([*pool._free, *pool._cached, *pool._fenced, *held]) == list(range(1, pool.num_blocks + 1))
        assert pool.num_held == len(held)
        assert pool.available == pool.num_free + pool.num_cached
        named = {row for plan in self.in_flight for row in plan.rows.tolist()}
        free = set(rows._free)
        assert len(free) == len(rows._free)
        assert not free & named, "a row is free while a step in flight names it"
        owned = {row for row, owner in enumerate(rows.owner) if owner is not None}
        assert not free & owned
        assert len(free) + len(owned) == rows.capacity
        assert np.all(rows.computed[list(owned)] <= rows.planned[list(owned)])
        for request in scheduler._waiting:
            assert request.row < 0 or not rows.num_blocks[request.row], "a waiting request holds blocks"
        if self.config.sliding_window is not None:  # freed on the settled count only
            visible = np.maximum(rows.computed - self.config.sliding_window + 1, 0) // rows.block_size
            assert np.all((rows.freed <= visible) | (rows.num_blocks == 0))

    def check_idle(self) -> None:
        """Nothing leaks when everything has ended."""
        pool, rows = self.scheduler.residency.pool, self.scheduler.rows
        assert not self.in_flight
        assert pool.available == pool.num_blocks
        assert pool.num_held == 0
        assert rows.num_free == rows.capacity
        assert not self.scheduler.has_requests
        assert self.scheduler.counts.waiting == self.scheduler.counts.running == 0

    # ---- I5, I7 ----------------------------------------------------------------------------------------------------

    def planned(self, plan: StepPlan) -> None:
        config = self.config
        lengths = plan.ends - plan.starts
        assert plan.num_seqs > 0
        assert plan.num_seqs <= config.max_num_seqs  # I7
        assert plan.num_tokens == int(lengths.sum()) <= config.max_num_batched_tokens
        assert np.all(lengths > 0)
        assert len(set(plan.rows.tolist())) == plan.num_seqs
        assert np.all(lengths[: plan.num_decodes] == 1)
        assert plan.bucket == 0 or (plan.bucket in config.decode_buckets and plan.bucket >= plan.num_seqs)
        assert plan.bucket == 0 or (plan.num_decodes == plan.num_seqs and plan.mixed_bucket == 0)
        fits = [bucket for bucket in config.mixed_buckets if bucket >= plan.num_tokens > 0]
        assert plan.bucket or plan.mixed_bucket == min(fits, default=0)
        samples = dict(zip(plan.sampled.tolist(), plan.sampled_ends.tolist(), strict=True))
        numbers = zip(plan.rows.tolist(), plan.requests.tolist(), plan.starts.tolist(), plan.ends.tolist(), strict=True)
        for index, (row, number, _, end) in enumerate(numbers):
            life = self.lives[number]
            assert life.notice is None, "a request that ended is planned"
            assert end <= len(life.story.tokens) - 1  # I5: the last token is never an input
            if row in samples:
                assert samples[row] == end
            if index >= plan.num_decodes and not config.enable_chunked_prefill:
                assert row in samples, "a chunk with chunked prefill off"
        evicted = {e.request_id for e in self.evictions if e.plan == self.scheduler.plans and not e.cleared}
        assert not evicted & {self.lives[number].ask.request_id for number in plan.requests.tolist()}
        self._note_reuse(plan)
        self.in_flight.append(plan)
        assert len(self.in_flight) <= config.depth
        assert len({p.slot for p in self.in_flight}) == len(self.in_flight)

    def _note_reuse(self, plan: StepPlan) -> None:
        rows, size = self.scheduler.rows, self.config.block_size
        pending = {block: number for step in self._written.values() for block, number in step.items()}
        written = self._written[plan.step] = {}
        for row, number, start, end in zip(
            plan.rows.tolist(), plan.requests.tolist(), plan.starts.tolist(), plan.ends.tolist(), strict=True
        ):
            for block in rows.table[row, start // size : (end - 1) // size + 1].tolist():
                assert written.setdefault(block, number) == number, "two requests write one block in one step"
                former = pending.get(block, number)
                if former != number:
                    names = (self.lives[former].ask.request_id, self.lives[number].ask.request_id)
                    self.reuses.append(Reuse(plan.step, block, *names))

    def nothing_planned(self) -> None:
        """I7: `plan` answered None with a step slot open; then nobody may have been able to run."""
        scheduler, rows, pool = self.scheduler, self.scheduler.rows, self.scheduler.residency.pool
        if scheduler.is_paused:
            return
        for row, request in scheduler._seated.items():
            room = int(rows.num_blocks[row]) * rows.block_size > int(rows.planned[row])
            assert not room, f"{request.request_id} has a block to run in"
            assert not pool.available, f"{request.request_id} could get a block to run in"
        if not scheduler._seated and scheduler._waiting and rows.num_free:
            head = scheduler._waiting.head
            tokens = {"optimistic": len(head.tokens), "worst-case": head.max_total_tokens - 1}
            wanted = tokens.get(self.config.reservation)  # a user's policy may want all there is
            blocks = pool.num_usable if wanted is None else -(-wanted // rows.block_size)
            assert head.row >= 0 or blocks > pool.available, f"{head.request_id} could be admitted"
        if not self.in_flight:
            assert not scheduler.has_requests, f"idle with {scheduler.counts} and {pool.available} blocks available"

    # ---- I1, I5, I6 ------------------------------------------------------------------------------------------------

    def collected(self, failed: bool) -> StepPlan:
        """The oldest step is about to be committed."""
        plan = self.in_flight.popleft()
        del self._written[plan.step]
        requests = dict(zip(plan.rows.tolist(), plan.requests.tolist(), strict=True))
        for row in plan.sampled.tolist():
            life = self.lives[requests[row]]
            if life.notice is None:
                life.sampled += not failed
            elif life.notice.reason is FinishReason.STOP and not failed:
                life.overshoot += 1
                assert life.overshoot < self.config.depth  # I5
        if failed:
            for number in plan.requests.tolist():
                self.lives[number].failed = True
        return plan

    def delivered(self, output: StepOutput) -> None:
        for number, token in zip(output.requests.tolist(), output.tokens.tolist(), strict=True):
            life = self.lives[number]
            assert life.notice is None, "a token after the last notice"  # I6
            life.delivered.append(token)
        for number in set(output.requests.tolist()):
            life = self.lives[number]
            assert tuple(life.delivered) == life.story.outputs[: len(life.delivered)]  # I1
            assert len(life.delivered) == life.story.released[life.sampled - 1]
        for notice in output.finished:
            self._noticed(notice)
        self.overshoot += output.overshoot
        assert self.overshoot == sum(life.overshoot for life in self.lives)

    def _noticed(self, notice: Finished) -> None:
        life = self.lives[notice.number]
        assert life.notice is None, "a second last notice"  # I6
        life.notice = notice
        outputs, delivered = tuple(notice.token_ids.tolist()), tuple(life.delivered)
        assert notice.request_id == life.ask.request_id
        assert outputs == life.story.outputs[: len(outputs)]
        assert outputs == delivered  # what a matcher held back is in no notice
        if notice.reason in NATURAL:
            assert notice.reason is life.story.reason
            assert outputs == delivered == life.story.outputs
        elif notice.reason is FinishReason.ABORT:
            assert life.aborted
        elif notice.reason is FinishReason.ERROR:
            assert life.failed
        else:
            assert notice.reason is FinishReason.REJECTED
            assert not delivered
            assert notice.message
            in_use = any(
                other.ask.request_id == notice.request_id and other.notice is None
                for other in self.lives[: notice.number]
            )
            assert in_use or is_rejected(life.ask, self.config), notice.message

    def check_all_ended(self) -> None:
        for life in self.lives:
            assert life.notice is not None, f"{life.ask.request_id} never ended"
            if not is_rejected(life.ask, self.config) and life.notice.reason is FinishReason.REJECTED:
                assert "in use" in life.notice.message
        reasons = Counter(life.notice.reason for life in self.lives if life.notice)
        c = self.scheduler.counts
        assert c.submitted == len(self.lives)
        assert c.rejected == reasons[FinishReason.REJECTED]
        assert c.aborted == reasons[FinishReason.ABORT]
        assert c.finished == sum(reasons[reason] for reason in (*NATURAL, FinishReason.ERROR))

    # ---- eviction --------------------------------------------------------------------------------------------------

    def clearing(self, value: bool) -> None:
        """Between these calls evictions are asked for, not chosen."""
        self._clearing = value

    def _spy_on_evict(self, request: Request, *, may_offload: bool = True) -> None:
        scheduler = self.scheduler
        row, before = request.row, scheduler.residency.pool.available
        in_flight = sum(row in plan.rows for plan in self.in_flight)
        prefilling = request in scheduler._prefilling
        outputs = int(scheduler.rows.known[row]) - request.num_prompt_tokens
        seated = list(scheduler._seated.values())
        self._evict(request, may_offload=may_offload)
        freed = scheduler.residency.pool.available - before
        cleared = self._clearing or scheduler.is_paused
        self.evictions.append(
            Eviction(request.request_id, scheduler.plans, in_flight, prefilling, outputs, freed, cleared)
        )
        if cleared:
            return
        assert len(seated) > 1, "the last one was evicted"
        if not freed:  # all blocks are shared, so nobody frees one alone
            assert not self.in_flight, "evicted for nothing, though a step in flight may free blocks"
            assert self.config.enable_prefix_caching, "evicted for nothing"
        assert self.config.reservation != "worst-case", "worst-case reservation preempted"


class Run(Invariants):
    """One run of the pipeline. `failing` are steps that fail, after they did harm to what they wrote."""

    def __init__(self, config: EngineConfig, script: Script, *, failing: Collection[int] = ()) -> None:
        self.log: list[str] = []
        super().__init__(config, Scheduler(config, log=self.log))
        self.plans: list[StepPlan] = []
        self.deliveries: list[StepOutput] = []
        self.flight_sizes: list[int] = []  # steps in flight after each launch
        self.idle_slots: list[tuple[int, int]] = []  # nothing planned though one was open: next step, steps in flight
        self.failing = failing
        self.device = FaithfulDevice(config, self.scheduler.rows, failing)
        self._script = deque(sorted(script, key=lambda entry: entry.at))
        self._inbox = Inbox()
        self._clock = 0
        tokens = sum(len(e.command.prompt) + e.command.params.max_tokens for e in script if isinstance(e.command, Ask))
        self._patience = 1000 + 20 * tokens

    def run(self) -> Run:
        loop = pipeline(self.scheduler, self._inbox)
        reply: object = None
        while True:
            self._let_in()
            self.clearing(any(isinstance(command, Pause) for command in self._inbox._commands))
            try:
                effect = loop.send(reply)
            except StopIteration:
                break
            self.clearing(False)
            reply = self._answer(effect)
            self.check_state()
            if not len(self._inbox):
                self.check_aborted()
            self._clock += 1
            assert self._clock < self._patience, "no progress"  # I8
        self.check_idle()
        self.check_all_ended()
        if self.config.batching == "static":
            check_static_batches(self.log)
        return self

    def life(self, request_id: str) -> Life:
        return next(life for life in self.lives if life.ask.request_id == request_id)

    def admissions(self, request_id: str | None = None) -> list[Admission]:
        """From the decision log, in order."""
        words = [line.split() for line in self.log if " admit " in line]
        found = [Admission(w[4], int(w[2].rstrip(":")), int(w[5].removeprefix("start="))) for w in words]
        return [admission for admission in found if request_id in (None, admission.request_id)]

    def _let_in(self) -> None:
        while self._script and self._script[0].at <= self._clock:
            self._put(self._script.popleft().command)

    def _put(self, command: Ask | Abort | Pause | Resume) -> None:
        entering: Command = command.command() if isinstance(command, Ask) else command
        self._inbox.put(entering)
        if isinstance(command, Ask):
            self.submitted(command)
        elif isinstance(command, Abort):
            self.aborted(command.request_id)

    def _answer(self, effect: Effect) -> object:
        match effect:
            case Launch(program):
                self._launch(program)
                return program
            case Collect(ticket, plan):
                return self._collect(ticket, plan)
            case Deliver(output):
                self.deliveries.append(output)
                self.delivered(output)
            case Idle():
                self._idle()
            case Host(kind, _):
                assert kind in ("plan", "commit")
        return None

    def _launch(self, program: StepProgram) -> None:
        self.plans.append(program.plan)
        self.planned(program.plan)
        self.flight_sizes.append(len(self.in_flight))
        self.device.launch(program)
        self._check_entries(program.plan)

    def _check_entries(self, plan: StepPlan) -> None:
        """I1, sharper than by tokens: the newest KV entry of every row is the reference's, overshoot included."""
        size, rows = self.config.block_size, self.scheduler.rows
        spoilt = {number for p in (*self.in_flight, plan) if p.step in self.failing for number in p.requests.tolist()}
        for row, number, end in zip(plan.rows.tolist(), plan.requests.tolist(), plan.ends.tolist(), strict=True):
            if number not in spoilt:
                block, offset = int(rows.table[row, (end - 1) // size]), (end - 1) % size
                assert int(self.device.kv[block, offset]) == self.lives[number].story.entries[end - 1]

    def _collect(self, ticket: object, plan: StepPlan) -> TokenArray | StepFailure:
        assert isinstance(ticket, StepProgram)
        if len(self.in_flight) < self.config.depth:
            self.idle_slots.append((len(self.plans), len(self.in_flight) - 1))
            self.nothing_planned()
        tokens = self.device.collect(ticket)
        failed = plan.step in self.failing
        assert self.collected(failed) is plan
        return StepFailure("a fault") if failed else tokens

    def _idle(self) -> None:
        assert not self.in_flight
        if not len(self._inbox):
            self.nothing_planned()
        if self._script:
            self._clock = max(self._clock, self._script[0].at)
            return
        if self.scheduler.is_paused:
            self._inbox.put(Resume())
        assert not self._inbox.closed
        self._inbox.close()


def check_static_batches(log: Sequence[str]) -> None:
    """Nobody joins a static batch that was not waiting when it opened, nor one that somebody was evicted from."""
    running: set[str] = set()
    waiting: set[str] = set()
    members: set[str] = set()
    for words in (line.split() for line in log if line.startswith("before plan")):
        match words[3:]:
            case ["submit", request_id, *_]:
                waiting.add(request_id)
            case ["admit", request_id, *_]:
                if not running:
                    members = set(waiting)
                assert request_id in members, f"{request_id} joins a batch that opened without it"
                waiting.discard(request_id)
                members.discard(request_id)
                running.add(request_id)
            case ["evict", request_id, *_]:
                waiting.add(request_id)
                running.discard(request_id)
                members = set()
            case ["end", request_id, *_]:
                running.discard(request_id)
                waiting.discard(request_id)
