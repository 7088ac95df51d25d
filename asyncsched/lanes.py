"""Lanes that run step programs in any order that FIFO and events allow, as an adversary chooses.

A wait captures, when it is enqueued, the newest record of its event enqueued before it, and passes at once if there is
none: CUDA's rule. What an operation does is its owner's business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from asyncsched.adversary import LANES, UPSTREAM_FIRST, Adversary, Order
from asyncsched.errors import AsyncschedError
from asyncsched.pipeline import StepFailure
from asyncsched.plan import StepPlan
from asyncsched.program import EventKind, Lane, Op, OpKind, Template

HOST = -1  # in place of a lane's number
NOTHING = -1  # in place of an operation's
NO_EVENT = -1
KINDS = tuple(OpKind)
EVENTS = tuple(EventKind)
MAX_TEMPLATES = 1024
Recording = tuple[list[bool], int]  # one recording of an event: the records of its step, and its place among them


class DeadlockError(AsyncschedError):
    """The host waits, and no lane can run: an event that nobody will record."""


class Ticket:
    """One launched step.

    epoch        which parameters the model has
    records      which of its recordings have been executed, in the order of the program
    synchronize  the recording that Collect waits for, if any
    failure      what Collect answers, where a fault was planted
    bad_token    a sampled row, and the token it gets
    num_words    of the host inputs that the copy to the device moves
    broken       the operation that raises
    enqueued     whether anything was
    found        by event: the recording that a wait for one of an earlier step found when it was enqueued, if any
    """

    __slots__ = (
        "bad_token",
        "broken",
        "enqueued",
        "epoch",
        "failure",
        "found",
        "num_words",
        "plan",
        "records",
        "synchronize",
    )

    def __init__(self, plan: StepPlan, epoch: int) -> None:
        self.plan = plan
        self.epoch = epoch
        self.records: list[bool] = []
        self.synchronize: Recording | None = None
        self.failure: StepFailure | None = None
        self.bad_token: tuple[int, int] | None = None
        self.num_words = 0
        self.broken: OpKind | None = None
        self.enqueued = True
        self.found: Mapping[int, Recording | None] = NONE_FOUND


NONE_FOUND: Mapping[int, Recording | None] = {}
Run = Callable[[Ticket], None]
Part = tuple[int, int, int, tuple[int, ...]]


class Lanes:
    """All lanes but the host's. `runs` says what each kind of operation does."""

    def __init__(self, adversary: Adversary, runs: Mapping[OpKind, Run]) -> None:
        self.adversary = adversary
        self._runs = {KINDS.index(kind): run for kind, run in runs.items()}
        self._lanes: list[deque[tuple[Ticket, Part]]] = [deque() for _ in LANES]
        self._newest: dict[int, Recording] = {}  # by event
        self._stalls: list[tuple[int, list[bool]]] = []  # when each goes on
        self._clock = 0  # calls of `advance`

    # ---- what the host does ----------------------------------------------------------------------------------------

    def enqueue(self, template: Template, ticket: Ticket) -> None:
        """Does the operations of the host and enqueues the others, in order."""
        compiled = _compiled.get(id(template)) or _compile(template)
        lanes, newest, records = self._lanes, self._newest, [False] * len(compiled.events)
        ticket.records = records
        if compiled.awaited:
            ticket.found = {event: newest.get(event) for event in compiled.awaited}
        for on_host, on_lanes in compiled.stages:
            for part in on_host:
                self._on_host(ticket, part)
            for place, part in on_lanes:
                lanes[place].append((ticket, part))
        for place, event in enumerate(compiled.events):
            newest[event] = records, place
        ticket.synchronize = newest.get(compiled.synchronize)

    def advance(self) -> None:
        """The host is about to do something that lanes may see: they run as far as the adversary lets them."""
        self._clock += 1
        if self._stalls:
            self._resume()
        order, run_one = self.adversary.order, self._run_one
        while (lanes := order(False)) is not None and run_one(lanes):
            pass

    def wait_for(self, recording: Recording) -> bool:
        """The host is blocked until a recording is executed; False when no lane can run any more."""
        records, place = recording
        while not records[place]:
            if not self._run_one(self.adversary.order(True) or UPSTREAM_FIRST):
                return False
        return True

    def drain(self) -> None:
        """Runs everything that can run."""
        while self._run_one(UPSTREAM_FIRST):
            pass

    def close(self) -> None:
        """Nothing is enqueued any more: lets go of who owns these lanes."""
        self._runs.clear()

    # ---- stalls ----------------------------------------------------------------------------------------------------

    def stall(self, place: int, duration: int, ticket: Ticket) -> None:
        """One lane runs nothing that is enqueued from now on, for so many calls of `advance`."""
        record = [False]
        self._stalls.append((self._clock + duration, record))
        blocker = Ticket(ticket.plan, ticket.epoch)
        blocker.found = {0: (record, 0)}
        self._lanes[place].append((blocker, (NOTHING, -1, 0, ())))

    def end_stalls(self) -> None:
        for _, record in self._stalls:
            record[0] = True
        self._stalls.clear()

    @property
    def is_stalled(self) -> bool:
        return bool(self._stalls)

    def _resume(self) -> None:
        for when, record in self._stalls:
            record[0] = when <= self._clock
        self._stalls = [stall for stall in self._stalls if not stall[1][0]]

    # ---- running ---------------------------------------------------------------------------------------------------

    def _run_one(self, order: Order) -> bool:
        """Runs the next operation of the first lane that can run; False where none can."""
        lanes = self._lanes
        for place in order:
            if lane := lanes[place]:
                ticket, (run, own, event, records) = lane[0]
                if own >= 0:
                    if not ticket.records[own]:
                        continue
                elif event >= 0 and not _is_executed(ticket.found[event]):
                    continue
                lane.popleft()
                if run != NOTHING:
                    self._runs[run](ticket)
                for record in records:
                    ticket.records[record] = True
                return True
        return False

    def _on_host(self, ticket: Ticket, part: Part) -> None:
        run, own, event, records = part
        wait = (ticket.records, own) if own >= 0 else ticket.found.get(event)
        if wait is not None and not self.wait_for(wait):
            raise DeadlockError(f"step {ticket.plan.step} waits at its launch for an event that nothing will record")
        if run != NOTHING:
            self._runs[run](ticket)
        for record in records:
            ticket.records[record] = True


class _Part(NamedTuple):
    """What a lane does, or the HOST: a wait, an operation and its records, as far as they follow each other.

    own, event  the wait: for a recording of the same step, by its place; else for the newest of an event; else -1, -1
    """

    lane: int
    run: int = NOTHING
    own: int = -1
    event: int = -1
    records: tuple[int, ...] = ()


Stage = tuple[list[Part], list[tuple[int, Part]]]


@dataclass(frozen=True, slots=True, eq=False)
class _Compiled:
    """A template made cheap to enqueue.

    stages       what the host does first, and what it enqueues then, by lane
    events       what each recording records
    awaited      events of which a recording of an earlier step is waited for
    synchronize  an event, or -1
    """

    template: Template  # kept, so that its identity stays its own
    stages: list[Stage]
    events: tuple[int, ...]
    awaited: tuple[int, ...]
    synchronize: int


_compiled: dict[int, _Compiled] = {}  # by identity of the template, for all lanes of the process


def _compile(template: Template) -> _Compiled:
    """Joins each operation with the wait before it and the records behind it, where nothing comes between."""
    ops = template.ops
    synchronizes = ops[-1].kind is OpKind.SYNCHRONIZE
    events: list[int] = []
    parts: list[_Part] = []
    for op in ops[:-1] if synchronizes else ops:
        lane = HOST if op.lane is Lane.HOST else LANES.index(op.lane)
        last = parts[-1] if parts and parts[-1].lane == lane else None
        if op.kind is OpKind.RECORD:
            record = (len(events),)
            events.append(_event(op))
            if last is not None:
                parts[-1] = last._replace(records=last.records + record)
            else:
                parts.append(_Part(lane, records=record))
        elif op.kind is OpKind.WAIT or op.kind is OpKind.SYNCHRONIZE:
            event = _event(op)
            own = len(events) - 1 - events[::-1].index(event) if event in events else -1
            parts.append(_Part(lane, NOTHING, own, event))
        elif last is not None and last.run == NOTHING and not last.records:
            parts[-1] = last._replace(run=KINDS.index(op.kind))
        else:
            parts.append(_Part(lane, KINDS.index(op.kind)))
    awaited = {part.event for part in parts if part.own < 0 <= part.event}
    synchronize = _event(ops[-1]) if synchronizes else -1
    if len(_compiled) >= MAX_TEMPLATES:
        _compiled.clear()
    compiled = _Compiled(template, _stages(parts), tuple(events), tuple(awaited), synchronize)
    _compiled[id(template)] = compiled
    return compiled


def _event(op: Op) -> int:
    return NO_EVENT if op.event is None else op.event.slot * len(EVENTS) + EVENTS.index(op.event.kind)


def _stages(parts: list[_Part]) -> list[Stage]:
    stages: list[Stage] = [([], [])]
    for lane, run, own, event, records in parts:
        part: Part = run, own, event, records
        on_host, on_lanes = stages[-1]
        if lane != HOST:
            on_lanes.append((lane, part))
        elif on_lanes:
            stages.append(([part], []))
        else:
            on_host.append(part)
    return stages


def _is_executed(recording: Recording | None) -> bool:
    return recording is None or recording[0][recording[1]]
