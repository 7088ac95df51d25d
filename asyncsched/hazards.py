"""The hazard checker: proves that no two conflicting accesses of a run are unordered, or names the pair that is.

Give it what a driver of the pipeline sees, when it sees it: a plan is made, its program is launched, its step is
collected or fails. It reports

* two accesses to one slot buffer or KV position, at least one of them a write, that nothing orders (clocks.py says what
  orders);
* reads of what nobody wrote, or of what was written for another step, request or position (contents.py);
* waits for events that nobody recorded, or that a later step recorded again;
* which records, waits and synchronizes of the programs no conflict needs.

It judges programs, not timing: a race is found whether or not it would have been lost. Memory grows with the steps in
flight, never with the run.

    checker = HazardChecker(config)
    checker.planned(plan, scheduler.rows)
    checker.launched(program)
    checker.collected(program)
    assert not checker.num_findings, checker.findings[0]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial, reduce
from operator import or_
from typing import NamedTuple

from asyncsched import findings
from asyncsched.clocks import HOST, LANES, Clock, Edge, KvOp, Problem, Shape, Trouble, plus
from asyncsched.config import EngineConfig
from asyncsched.contents import Contents, Flaw, Snapshot
from asyncsched.findings import Finding, FindingKind
from asyncsched.flights import Flight, Race, kv_races, slot_race
from asyncsched.order import MAX_TEMPLATES, Move, Order
from asyncsched.plan import StepPlan
from asyncsched.program import BufferKind, StepProgram, Template
from asyncsched.rows import Rows

MAX_FINDINGS = 100  # kept; all are counted
MAX_IN_FLIGHT = 1024
MAX_DISORDERED = 64  # steps kept after they were collected, because the host was not told that they are over


class HazardChecker:
    """Checks one engine as it runs. Everything is called in the order in which the host does it.

    findings  the first MAX_FINDINGS
    counts    of all, by kind; beyond the first, an operation that races over a slot's buffer counts once
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._seats = config.max_num_seqs
        self._end = config.max_num_seqs * config.depth  # of all slots' rows
        self._shares = config.enable_prefix_caching
        self.findings: list[Finding] = []
        self.counts: Counter[FindingKind] = Counter()
        self._needed: dict[Edge, Callable[[], Finding]] = {}
        self._order = Order()
        self._contents = Contents(config)
        self._known: dict[int, _Known] = {}  # templates, by identity
        self._planned: dict[int, Snapshot] = {}
        self._in_flight: list[int] = []  # steps; their places are their tags
        self._window: list[Flight] = []  # steps that later operations may conflict with
        self._stuck: list[Flight] = []
        self._kv_lanes = 0  # of the window, a bit for each lane
        self._issued: Clock = (0,) * len(LANES)

    # ---- what happens ----------------------------------------------------------------------------------------------

    def planned(self, plan: StepPlan, rows: Rows) -> None:
        """A plan was made; `rows` holds the block tables that it means, now."""
        if len(self._planned) >= MAX_IN_FLIGHT:
            raise ValueError(f"{MAX_IN_FLIGHT} plans wait for their launch: launch them, or report that they failed")
        self._planned[plan.step] = self._contents.snapshot(plan, rows)

    def launched(self, program: StepProgram) -> None:
        """The host did and enqueued `program.template.launched`, in order."""
        template, plan = program
        _, shape, actions, _ = self._known.get(id(template)) or self._learn(template)
        snapshot = self._planned.pop(plan.step, None)
        if snapshot is None:
            raise ValueError(f"step {plan.step} is launched, but `planned` was not called for it")
        in_flight = self._in_flight
        if len(in_flight) >= MAX_IN_FLIGHT:
            raise ValueError(f"{MAX_IN_FLIGHT} steps are in flight: collect them, or report that they failed")
        sources = 0  # slots that the carry-over reads, a bit for each; those that do not exist are for contents.py
        for source in snapshot.carry:
            if 0 <= source < self._end:
                sources |= 1 << source // self._seats
        flight = Flight(snapshot, shape, self._issued, sources)
        move = self._order.launch(shape, sources, len(in_flight))
        self._issued = flight.end
        in_flight.append(plan.step)
        self._window.append(flight)
        if move.problems or move.needed:
            self._explain(flight, move)
        self._kv_lanes |= shape.kv_lanes
        if self._kv_lanes & (self._kv_lanes - 1):  # operations of one lane are ordered
            self._check_kv_order(flight, move)
        if self._stuck:
            self._check_quarantine(flight)
        contents = self._contents
        for place, action in actions:
            if flaws := action(contents, snapshot):
                self._report_flaws(flight, place, flaws)

    def collected(self, step: StepProgram | StepPlan) -> None:
        """The host passed the step's `synchronize` and read what it waited for."""
        flight, tag = self._flight(step)
        move = self._order.collect(flight.shape, tag)
        if move.problems or move.needed:
            self._explain(flight, move)
        if self._shares:
            self._contents.collected(flight.snapshot)
        self._land(flight, tag)

    def failed(self, step: StepProgram | StepPlan, *, stuck: bool = False) -> None:
        """The step failed, before or after its launch. Unless it is `stuck`, nothing of it runs any more.

        What a stuck step may write to is never to be used again.
        """
        plan = step if isinstance(step, StepPlan) else step.plan
        if self._planned.pop(plan.step, None) is not None:
            return
        flight, tag = self._flight(plan)
        if stuck:
            self._stuck.append(flight)
            return
        self._order.join(tuple(end - issued for end, issued in zip(flight.end, self._issued, strict=True)))
        self._order.forget(tag)
        self._contents.failed(flight.snapshot)
        self._land(flight, tag)

    # ---- answers ---------------------------------------------------------------------------------------------------

    @property
    def num_findings(self) -> int:
        return self.counts.total()

    def redundant_edges(self) -> tuple[Edge, ...]:
        """Records, waits and synchronizes that no conflict so far needed: each alone may go from every program.

        Two of them may stand in for one another, so take one out and check again. It says nothing about what did not
        occur, and little about programs with findings.
        """
        return tuple(edge for edge, _ in self._order.situation.what_ifs)

    def needed_edges(self) -> dict[Edge, Finding]:
        """Edges that order a conflict, each with a finding that there would be without it."""
        return {edge: make() for edge, make in self._needed.items()}

    @property
    def num_tracked(self) -> int:
        """Things remembered, beside arrays of fixed size."""
        held = (self._window, self._stuck, self._planned, self._in_flight, self._known, self.findings, self._needed)
        return sum(map(len, held)) + self._contents.num_digests

    # ---- conflicts -------------------------------------------------------------------------------------------------

    def _check_kv_order(self, flight: Flight, move: Move) -> None:
        met: dict[tuple[int, int, int], list[Race]] = {}  # without one edge or another it is mostly the same pairs
        races = list(self._kv_races(flight, move.kv, met))
        for race in races:
            self._report(FindingKind.UNORDERED, partial(findings.of_race, flight, race, self._found(move)))
        pairs = {(race.earlier.step, race.earlier_op, race.op) for race in races}
        for edge, ops in move.what_if_kv:
            for race in self._kv_races(flight, ops, met):
                if (race.earlier.step, race.earlier_op, race.op) not in pairs:
                    self._needed[edge] = partial(findings.of_race, flight, race, self._found(move))
                    self._order.answer(edge)
                    break

    def _kv_races(
        self, flight: Flight, ops: tuple[KvOp, ...], met: dict[tuple[int, int, int], list[Race]]
    ) -> Iterator[Race]:
        for op in ops:
            for earlier, place in _unordered(self._window, flight, op.op, self._absolute(flight, op)):
                if place in earlier.shape.kv_ops:
                    key = earlier.step, place, op.op
                    if key not in met:
                        met[key] = kv_races(earlier, place, flight, op.op, self.config)
                    yield from met[key]

    def _absolute(self, flight: Flight, op: KvOp | Problem) -> Clock:
        """The clock of an operation that is being enqueued, by numbers since the beginning."""
        start = flight.start if op.op < flight.shape.num_launched else self._issued
        return plus(start, op.clock)

    def _check_quarantine(self, flight: Flight) -> None:
        for stuck in self._stuck:
            if not flight.may_meet(stuck.written(self.config)):
                continue
            for place in range(stuck.shape.num_launched):
                for op in range(flight.shape.num_launched):
                    slots = [slot_race(stuck, place, flight, op, b) for b in stuck.shape.slot_writes[place]]
                    blocks = kv_races(stuck, place, flight, op, self.config, only_its_writes=True)
                    for race in (*(race for race in slots if race is not None), *blocks):
                        self._report(FindingKind.QUARANTINE, partial(findings.of_quarantine, flight, race))

    # ---- reports ---------------------------------------------------------------------------------------------------

    def _explain(self, flight: Flight, move: Move) -> None:
        """Reports what the order of a launch or collection is found to lack, and edges that turn out to be needed."""
        for problem in move.problems:
            if problem.trouble is not Trouble.RACE:
                kind = PROBLEMS.get(problem.trouble) or findings.misread_kind(problem)
                self._report(kind, partial(findings.of_problem, flight, problem, self._in_flight))
                continue
            races = []
            if len(self.findings) < MAX_FINDINGS:
                races = _slot_races(self._window, flight, problem, self._absolute(flight, problem))
            for race in races:
                self._report(FindingKind.UNORDERED, partial(findings.of_race, flight, race, self._found(move)))
            if not races:
                self._report(FindingKind.UNORDERED, partial(findings.of_old_race, flight, problem))
        for edge, problem in move.needed:  # told when somebody asks
            known, found = self._absolute(flight, problem), self._found(move)
            self._needed[edge] = partial(_newest_race, tuple(self._window), flight, problem, known, found)

    def _found(self, move: Move) -> dict[int, str]:
        return {place: findings.whose(tag, self._in_flight) for place, tag in move.captured.items()}

    def _report_flaws(self, flight: Flight, place: int, flaws: list[Flaw]) -> None:
        for flaw in flaws:
            writer = next((other for other in self._window if other.step == flaw.writer), None)
            self._report(FindingKind[flaw.kind.name], partial(findings.of_flaw, flight, place, flaw, writer))

    def _report(self, kind: FindingKind, make: Callable[[], Finding]) -> None:
        self.counts[kind] += 1
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(make())

    # ---- steps in flight -------------------------------------------------------------------------------------------

    def _learn(self, template: Template) -> _Known:
        if len(self._known) >= MAX_TEMPLATES:
            self._known.clear()
        known = _by_identity.get(id(template))
        if known is None:
            if len(_by_identity) >= MAX_TEMPLATES:
                _by_identity.clear()
            known = _by_identity[id(template)] = _known(template)._replace(template=template)
        self._known[id(template)] = known
        if known.num_slots > self.config.depth:
            raise ValueError(f"a program uses slot {known.num_slots - 1}, and depth is {self.config.depth}")
        self._order.question(known.shape.edges)
        return known

    def _flight(self, step: StepProgram | StepPlan) -> tuple[Flight, int]:
        number, in_flight = step.step if isinstance(step, StepPlan) else step.plan.step, self._in_flight
        for flight in self._window:
            if flight.step == number and flight.is_in_flight:
                return flight, in_flight.index(number)
        raise ValueError(f"step {number} is not in flight")

    def _land(self, flight: Flight, tag: int) -> None:
        """A step is no more in flight. Forgets steps with which nothing later can conflict."""
        flight.is_in_flight = False
        del self._in_flight[tag]
        known, window = plus(self._issued, self._order.situation.known), self._window
        if flight.is_over(known):
            window.remove(flight)
        if len(window) != len(self._in_flight):  # who was kept before may be over by now
            window[:] = [other for other in window if other.is_in_flight or not other.is_over(known)]
            if len(window) - len(self._in_flight) > MAX_DISORDERED:
                window.remove(next(other for other in window if not other.is_in_flight))
        if self._kv_lanes & (self._kv_lanes - 1):
            self._kv_lanes = reduce(or_, (other.shape.kv_lanes for other in window), 0)


def _unordered(window: Iterable[Flight], flight: Flight, op: int, known: Clock) -> Iterator[tuple[Flight, int]]:
    """Operations of other lanes that were enqueued before `op` of `flight`, but are not in its clock `known`."""
    lane = flight.shape.lanes[op]
    for earlier in window:
        for place in range(min(op, flight.shape.num_launched) if earlier is flight else earlier.shape.num_launched):
            other = earlier.shape.lanes[place]
            if other not in (lane, HOST) and earlier.number(place) > known[other]:
                yield earlier, place


def _slot_races(window: Iterable[Flight], flight: Flight, problem: Problem, known: Clock) -> list[Race]:
    assert problem.buffer is not None
    pairs = _unordered(window, flight, problem.op, known)
    races = [slot_race(earlier, place, flight, problem.op, problem.buffer) for earlier, place in pairs]
    return [race for race in races if race is not None]


def _newest_race(
    window: Iterable[Flight], flight: Flight, problem: Problem, known: Clock, found: dict[int, str]
) -> Finding:
    races = _slot_races(window, flight, problem, known)
    return findings.of_race(flight, races[-1], found) if races else findings.of_old_race(flight, problem)


# ---- a run as data -------------------------------------------------------------------------------------------------


class Planned(NamedTuple):
    plan: StepPlan
    rows: Rows


class Launched(NamedTuple):
    program: StepProgram


class Collected(NamedTuple):
    step: StepProgram | StepPlan


class Failed(NamedTuple):
    step: StepProgram | StepPlan
    stuck: bool = False


RunEvent = Planned | Launched | Collected | Failed


@dataclass(frozen=True, slots=True)
class Report:
    """What `check` found: the first findings, how many of each kind there are, and which edges no conflict needs."""

    findings: tuple[Finding, ...]
    counts: dict[FindingKind, int]
    redundant: tuple[Edge, ...]
    needed: dict[Edge, Finding]

    def __str__(self) -> str:
        lines = [str(finding) for finding in self.findings]
        left = sum(self.counts.values()) - len(self.findings)
        lines += [f"and {left} more"] if left else []
        lines += [f"needed: {edge}; without it {finding.text}" for edge, finding in self.needed.items()]
        lines += [f"redundant: {edge}" for edge in self.redundant]
        return "\n".join(lines)


def check(events: Iterable[RunEvent], config: EngineConfig) -> Report:
    """Checks a run of your own programs. Block tables are read from a `Planned` when its turn comes."""
    checker = HazardChecker(config)
    for event in events:
        match event:
            case Planned(plan, rows):
                checker.planned(plan, rows)
            case Launched(program):
                checker.launched(program)
            case Collected(step):
                checker.collected(step)
            case Failed(step, stuck):
                checker.failed(step, stuck=stuck)
    return Report(tuple(checker.findings), dict(checker.counts), checker.redundant_edges(), checker.needed_edges())


# ---- templates -----------------------------------------------------------------------------------------------------

Action = Callable[[Contents, Snapshot], list[Flaw] | None]

PROBLEMS = {
    Trouble.NEVER_RECORDED: FindingKind.NEVER_RECORDED,
    Trouble.RECORDED_AGAIN: FindingKind.RECORDED_AGAIN,
}


class _Known(NamedTuple):
    """A template: its shape, what it does to contents, by place of its operations, and the slots it needs."""

    template: Template
    shape: Shape
    actions: tuple[tuple[int, Action], ...]
    num_slots: int


_by_identity: dict[int, _Known] = {}  # each keeps its template, so that the identity stays its own


@lru_cache(maxsize=MAX_TEMPLATES)
def _shape(template: Template) -> Shape:
    return Shape(template)


@lru_cache(maxsize=MAX_TEMPLATES)
def _known(template: Template) -> _Known:
    slots = [buffer.slot for op in template.ops for buffer in (*op.reads, *op.writes)]
    shape = _shape(replace(template, bucket=0))  # the bucket changes nothing here
    return _Known(template, shape, tuple(_actions(shape)), max(template.slot, *slots) + 1)


def _actions(shape: Shape) -> Iterator[tuple[int, Action]]:
    """What a program does to contents, in the order in which it is enqueued."""
    is_carried = False
    for place, op in enumerate(shape.ops[: shape.num_launched]):
        reads, writes = {buffer.kind for buffer in op.reads}, {buffer.kind for buffer in op.writes}
        if BufferKind.KV_RESTORED in writes:
            yield place, Contents.restore
        if BufferKind.CARRY_SOURCES in reads:
            yield place, Contents.carry
            is_carried = True
        if BufferKind.KV_READ in reads:
            if not is_carried:
                yield place, Contents.not_carried
            yield place, _reading(own_too=BufferKind.KV_WRITTEN not in writes)
        if BufferKind.KV_WRITTEN in writes:
            yield place, _writing(is_checked=BufferKind.KV_READ in reads)
        for buffer in op.writes:
            if buffer.kind is BufferKind.DEV_OUT:
                yield place, _sampling(buffer.slot)
        if BufferKind.KV_OFFLOADED in reads:
            yield place, Contents.offload


def _reading(*, own_too: bool) -> Action:
    return lambda contents, snapshot: contents.read(snapshot, own_too)


def _writing(*, is_checked: bool) -> Action:
    return lambda contents, snapshot: contents.write(snapshot, is_checked)


def _sampling(slot: int) -> Action:
    return lambda contents, snapshot: contents.sampled(snapshot, slot)
