"""Episodes of the fuzzer, watched: what the scheduler decided and when, so that a test can say that something occurred.

`play` runs a scenario with every check of the fuzzer on: tokens against each request alone, the hazard checker, the
accounts of blocks and rows, all invariants. What it returns also tells what happened, in order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NamedTuple, TypeVar
from unittest import mock

from asyncsched.config import EngineConfig
from asyncsched.faithful import FaithfulExecutor
from asyncsched.fuzz import Episode, run_scenario
from asyncsched.fuzz_scenario import Scenario
from asyncsched.hazards import HazardChecker
from asyncsched.lanes import Ticket
from asyncsched.oracle import PatternMatcher
from asyncsched.plan import StepOutput, StepPlan
from asyncsched.request import Finished, FinishReason, Match, Request, Status
from asyncsched.scheduler import Scheduler


class Planned(NamedTuple):
    """A plan was made with the steps `before` in flight.

    blocks           by request: its block table up to the end of its row
    evicted          how many requests were evicted for it
    waiting, seated  requests, after it
    available, fenced, held   KV blocks, after it
    """

    plan: StepPlan
    before: tuple[int, ...]
    blocks: dict[int, list[int]]
    evicted: int
    waiting: int
    seated: int
    available: int
    fenced: int
    held: int


class Starved(NamedTuple):
    """No plan could be made, for want of blocks: how many rows decode, and how many blocks are fenced for now."""

    decoding: int
    coming: int
    before: tuple[int, ...]


class Committed(NamedTuple):
    """A step was committed or failed with the steps `behind` it in flight.

    optimist  blocks that would leave their windows now if what is planned were settled
    """

    plan: StepPlan
    output: StepOutput
    behind: tuple[int, ...]
    optimist: int
    failed: bool = False


class Evicted(NamedTuple):
    """`late`: a step in flight names its row; `samples`: one samples for it; `delivered`: tokens its user has.

    last    the newest step that names its row
    coming  blocks that are fenced and will be available once steps are collected
    """

    request: int
    late: bool
    samples: bool
    last: int
    known: int
    prompt: int
    planned: int
    delivered: int
    blocks: list[int]
    coming: int
    by_pause: bool


class Chosen(NamedTuple):
    """A victim was looked for, with `taken` rows in the plan already. `preferred`: whom the policy wants; rows."""

    taken: frozenset[int]
    preferred: int
    chosen: int | None


class Ended(NamedTuple):
    """`late`: a step in flight names its row."""

    notice: Finished
    late: bool
    row: int
    blocks: list[int]
    fenced: int


class Returning(NamedTuple):
    """A host copy could come back: how many blocks it needs, how many are available and quiet, and whether it does."""

    request: int
    blocks: int
    available: int
    quiet: int
    is_restored: bool


class Refused(NamedTuple):
    """A request was rejected."""

    notice: Finished


class Commanded(NamedTuple):
    """abort, pause, clear or resume; whether it had an effect, and the steps in flight."""

    kind: str
    effect: bool
    before: tuple[int, ...]


class Filled(NamedTuple):
    """The host wrote the inputs of a step; `padding`: where its padding rows write, and which tables they have."""

    step: int
    padding: tuple[tuple[int, int], ...]


class Copied(NamedTuple):
    """The h2d copy of a step ran."""

    step: int


class Fed(NamedTuple):
    """A stop matcher was given a token. Matchers are numbered as they enter."""

    matcher: int
    token: int
    match: Match


Happening = (
    Planned | Starved | Committed | Evicted | Chosen | Ended | Returning | Refused | Commanded | Filled | Copied | Fed
)
T = TypeVar("T", bound=tuple[Any, ...])


@dataclass(frozen=True)
class Played:
    """A scenario, what came of it, what happened on the way, and the hazard checker after it."""

    scenario: Scenario
    episode: Episode
    happened: list[Happening]
    hazards: HazardChecker

    def all(self, kind: type[T]) -> list[T]:
        return [event for event in self.happened if isinstance(event, kind)]

    @property
    def plans(self) -> list[StepPlan]:
        return [event.plan for event in self.all(Planned)]

    def after(self, event: Happening, kind: type[T]) -> Iterator[T]:
        """Events of a kind that came later."""
        place = next(at for at, other in enumerate(self.happened) if other is event)
        return (other for other in self.happened[place + 1 :] if isinstance(other, kind))

    def notices(self) -> dict[int, Finished]:
        """The last word about each request."""
        finished = [notice for event in self.all(Committed) for notice in event.output.finished]
        aborted = [event.notice for event in self.all(Ended) if event.notice.reason is FinishReason.ABORT]
        refused = [event.notice for event in self.all(Refused)]
        return {notice.number: notice for notice in (*finished, *aborted, *refused)}

    def rows_of(self, request: int) -> list[tuple[int, int, int]]:
        """Step, start and end of each row of a request."""
        return [
            (plan.step, start, end)
            for plan in self.plans
            for number, start, end in zip(plan.requests.tolist(), plan.starts.tolist(), plan.ends.tolist(), strict=True)
            if number == request
        ]


def play(scenario: Scenario, adversary: str = "") -> Played:
    """Runs a scenario against its own adversary, or "eager", "lazy", or the number of a seeded one."""
    if adversary in ("eager", "lazy"):
        scenario = replace(scenario, adversary=adversary)
    elif adversary:
        scenario = replace(scenario, adversary="seeded", adversary_seed=int(adversary))
    happened: list[Happening] = []
    hazards: list[HazardChecker] = []

    def checker(config: EngineConfig) -> HazardChecker:
        hazards.append(HazardChecker(config))
        return hazards[-1]

    class Scheduling(WatchedScheduler):
        events = happened

    class Executing(WatchedExecutor):
        events = happened

    class Matching(WatchedMatcher):
        events = happened
        numbers = count()

    with (
        mock.patch("asyncsched.fuzz.Scheduler", Scheduling),
        mock.patch("asyncsched.fuzz.FaithfulExecutor", Executing),
        mock.patch("asyncsched.fuzz.PatternMatcher", Matching),
        mock.patch("asyncsched.fuzz.HazardChecker", checker),
    ):
        episode = run_scenario(scenario)
    return Played(scenario, episode, happened, hazards[-1])


class WatchedScheduler(Scheduler):
    events: list[Happening]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.in_flight: list[int] = []
        self.delivered: dict[int, int] = {}
        self.clearing = False

    def submit(self, *args: Any, **options: Any) -> Finished | None:
        notice = super().submit(*args, **options)
        if notice is not None:
            self.events.append(Refused(notice))
        return notice

    def abort(self, request_id: str) -> Finished | None:
        notice = super().abort(request_id)
        self.events.append(Commanded("abort", notice is not None, tuple(self.in_flight)))
        return notice

    def pause(self, *, clear: bool = False) -> None:
        self.clearing = clear
        super().pause(clear=clear)
        self.clearing = False
        self.events.append(Commanded("clear" if clear else "pause", True, tuple(self.in_flight)))

    def resume(self) -> None:
        super().resume()
        self.events.append(Commanded("resume", True, tuple(self.in_flight)))

    def plan(self, slot: int) -> StepPlan | None:
        evictions = self.preemptions
        plan = super().plan(slot)
        pool = self.residency.pool
        if plan is None and not self.is_paused and len(self._decode):
            self.events.append(Starved(len(self._decode), pool.num_coming, tuple(self.in_flight)))
        if plan is not None:
            rows, size = self.rows, self.config.block_size
            spans = zip(plan.requests.tolist(), plan.rows.tolist(), plan.ends.tolist(), strict=True)
            blocks = {number: rows.table[row, : -(-end // size)].tolist() for number, row, end in spans}
            self.events.append(
                Planned(
                    plan,
                    tuple(self.in_flight),
                    blocks,
                    self.preemptions - evictions,
                    len(self._waiting),
                    len(self._seated),
                    pool.available,
                    pool.num_fenced,
                    pool.num_held,
                )
            )
            self.in_flight.append(plan.step)
        return plan

    def commit(self, plan: StepPlan, tokens: Any) -> StepOutput:
        self.in_flight.remove(plan.step)
        optimist = self._optimist(plan)
        output = super().commit(plan, tokens)
        self.events.append(Committed(plan, output, tuple(self.in_flight), optimist))
        for number in output.requests.tolist():
            self.delivered[number] = self.delivered.get(number, 0) + 1
        return output

    def fail(self, plan: StepPlan, cause: str, *, stuck: bool = False) -> StepOutput:
        self.in_flight.remove(plan.step)
        output = super().fail(plan, cause, stuck=stuck)
        self.events.append(Committed(plan, output, tuple(self.in_flight), 0, failed=True))
        return output

    def _optimist(self, plan: StepPlan) -> int:
        window, rows, size = self.config.sliding_window, self.rows, self.config.block_size
        if window is None:
            return 0
        early = 0
        for row, end in zip(plan.rows.tolist(), plan.ends.tolist(), strict=True):
            if rows.num_blocks[row]:
                early += max(int(rows.planned[row]) - window + 1, 0) // size - max(end - window + 1, 0) // size
        return early

    def _choose_victim(self, taken: set[int]) -> Request | None:
        victim = super()._choose_victim(taken)
        seated = list(self._seated.values())
        preferred = seated[self.policies.choose_victim([self._view(request) for request in seated])] if seated else None
        self.events.append(
            Chosen(
                frozenset(taken),
                preferred.row if preferred is not None else -1,
                victim.row if victim is not None else None,
            )
        )
        return victim

    def _evict(self, request: Request, **options: Any) -> None:
        row, rows = request.row, self.rows
        self.events.append(
            Evicted(
                request.number,
                int(rows.last_step[row]) > self._settled,
                int(rows.sampled_at[row]) > self._settled,
                int(rows.last_step[row]),
                int(rows.known[row]),
                request.num_prompt_tokens,
                int(rows.planned[row]),
                self.delivered.get(request.number, 0),
                rows.blocks_of(row),
                self.residency.pool.num_coming,
                self.clearing,
            )
        )
        super()._evict(request, **options)

    def _end(self, request: Request, *args: Any, **options: Any) -> Finished:
        row = request.row
        late = row >= 0 and int(self.rows.last_step[row]) > self._settled
        blocks = self.rows.blocks_of(row) if row >= 0 and request.status is Status.RUNNING else []
        notice = super()._end(request, *args, **options)
        self.events.append(Ended(notice, late, row, blocks, self.residency.pool.num_fenced))
        return notice

    def _admit(self, request: Request, budget: int) -> Any:
        copy, residency = request.host_copy, self.residency
        quiet = residency.pool.num_quiet(residency._collected) if copy else 0
        available = residency.pool.available
        chunk = super()._admit(request, budget)
        if copy is not None:
            self.events.append(Returning(request.number, len(copy.blocks), available, quiet, chunk is not None))
        return chunk


class WatchedExecutor(FaithfulExecutor):
    events: list[Happening]

    def _fill(self, ticket: Ticket) -> None:
        super()._fill(ticket)
        plan, arrays = ticket.plan, self.host_in[ticket.plan.slot]
        padding = range(plan.num_seqs, plan.bucket)
        self.events.append(
            Filled(plan.step, tuple((int(arrays.kv_positions[at]), int(arrays.rows[at])) for at in padding))
        )

    def _h2d(self, ticket: Ticket) -> None:
        super()._h2d(ticket)
        self.events.append(Copied(ticket.plan.step))


class WatchedMatcher(PatternMatcher):
    events: list[Happening]
    numbers: Iterator[int]

    def __init__(self, pattern: tuple[int, ...]) -> None:
        super().__init__(pattern)
        self.number = next(self.numbers)

    def feed(self, token: int) -> Match:
        match = super().feed(token)
        self.events.append(Fed(self.number, token, match))
        return match
