"""Lanes that run step programs in any order that FIFO and events allow, as an adversary chooses.

A wait captures, when it is enqueued, the newest record of its event enqueued before it, and passes at once if there is
none: CUDA's rule. What an operation does is its owner's business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from asyncsched.adversary import LANES, UPSTREAM_FIRST, Adversary, Order
from asyncsched.errors import AsyncschedError
from asyncsched.pipeline import StepFailure
from asyncsched.plan import StepPlan
from asyncsched.program import Lane, Op, OpKind, Template

Recording = tuple[list[bool], int]  # one recording of an event: the records of its step, and its place among them
NO_WAIT: tuple[None, int] = (None, 0)


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
    """

    __slots__ = ("bad_token", "broken", "enqueued", "epoch", "failure", "num_words", "plan", "records", "synchronize")

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


Run = Callable[[Ticket], None]
# One entry of a lane: what to run, if anything; for whom; once what is executed; and which records to execute then.
Entry = tuple[Run | None, Ticket, list[bool] | None, int, tuple[int, ...]]


class Lanes:
    """All lanes but the host's. `runs` says what each kind of operation does; `num_run` counts what ran."""

    def __init__(self, adversary: Adversary, runs: Mapping[OpKind, Run]) -> None:
        self.adversary = adversary
        self.num_run = 0
        self._runs = runs
        self._lanes: list[deque[Entry]] = [deque() for _ in LANES]
        self._events: dict[object, int] = {}
        self._newest: dict[int, Recording] = {}  # by event
        self._compiled: dict[int, _Compiled] = {}  # by identity of the template
        self._stalls: list[tuple[int, list[bool]]] = []  # when each goes on
        self._clock = 0  # calls of `advance`

    # ---- what the host does ----------------------------------------------------------------------------------------

    def enqueue(self, template: Template, ticket: Ticket) -> None:
        """Does the operations of the host and enqueues the others, in order."""
        compiled = self._compiled.get(id(template))
        if compiled is None:
            compiled = self._compiled[id(template)] = self._compile(template)
        newest, lanes = self._newest, self._lanes
        records = ticket.records = [False] * len(compiled.events)
        for lane, run, own, event, executes in compiled.parts:
            if own >= 0:
                entry: Entry = (run, ticket, records, own, executes)
            else:
                entry = (run, ticket, *newest.get(event, NO_WAIT), executes)
            if lane >= 0:
                lanes[lane].append(entry)
            else:
                self._on_host(entry)
        for place, event in enumerate(compiled.events):
            newest[event] = records, place
        ticket.synchronize = newest.get(compiled.synchronize)

    def advance(self) -> None:
        """The host is about to do something that lanes may see: they run as far as the adversary lets them."""
        self._clock += 1
        if self._stalls:
            self._resume()
        order = self.adversary.order
        while (lanes := order(False)) is not None and self._run_one(lanes):
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

    # ---- stalls ----------------------------------------------------------------------------------------------------

    def stall(self, place: int, duration: int, ticket: Ticket) -> None:
        """One lane runs nothing that is enqueued from now on, for so many calls of `advance`."""
        record = [False]
        self._stalls.append((self._clock + duration, record))
        self._lanes[place].append((None, ticket, record, 0, ()))

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
            lane = lanes[place]
            if lane:
                run, ticket, wait, awaited, executes = lane[0]
                if wait is None or wait[awaited]:
                    lane.popleft()
                    if run is not None:
                        run(ticket)
                    for record in executes:
                        ticket.records[record] = True
                    self.num_run += 1
                    return True
        return False

    def _on_host(self, entry: Entry) -> None:
        run, ticket, wait, place, executes = entry
        if wait is not None and not self.wait_for((wait, place)):
            raise DeadlockError(f"step {ticket.plan.step} waits at its launch for an event that nothing will record")
        if run is not None:
            run(ticket)
        for record in executes:
            ticket.records[record] = True

    def _compile(self, template: Template) -> _Compiled:
        """Joins each operation with the wait before it and the records behind it, where nothing comes between."""
        ops = template.ops
        synchronizes = ops[-1].kind is OpKind.SYNCHRONIZE
        events: list[int] = []
        parts: list[_Part] = []
        for op in ops[:-1] if synchronizes else ops:
            lane = -1 if op.lane is Lane.HOST else LANES.index(op.lane)
            last = parts[-1] if parts and parts[-1].lane == lane else None
            if op.kind is OpKind.RECORD:
                record = (len(events),)
                events.append(self._event(op))
                if last is not None:
                    parts[-1] = last._replace(records=last.records + record)
                else:
                    parts.append(_Part(lane, None, -1, -1, record))
            elif op.kind is OpKind.WAIT or op.kind is OpKind.SYNCHRONIZE:
                event = self._event(op)
                own = len(events) - 1 - events[::-1].index(event) if event in events else -1
                parts.append(_Part(lane, None, own, event, ()))
            elif last is not None and last.run is None and not last.records:
                parts[-1] = last._replace(run=self._runs[op.kind])
            else:
                parts.append(_Part(lane, self._runs[op.kind], -1, -1, ()))
        return _Compiled(template, tuple(parts), tuple(events), self._event(ops[-1]) if synchronizes else -1)

    def _event(self, op: Op) -> int:
        return self._events.setdefault(op.event, len(self._events))


class _Part(NamedTuple):
    """A wait, an operation and its records, as far as they follow each other on one lane (-1: the host).

    own, event  the wait: for a recording of the same step, by its place; else for the newest of an event; else -1, -1
    """

    lane: int
    run: Run | None
    own: int
    event: int
    records: tuple[int, ...]


class _Compiled(NamedTuple):
    """A template made cheap to enqueue. `events`: what each recording records. `synchronize`: an event, or -1."""

    template: Template  # kept, so that its identity stays its own
    parts: tuple[_Part, ...]
    events: tuple[int, ...]
    synchronize: int
