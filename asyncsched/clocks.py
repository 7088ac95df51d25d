"""Happens-before of step programs: vector clocks over lanes and events, and what they say about the buffers of slots.

What orders two operations, and nothing else does:

* operations of one lane run in the order in which they were enqueued;
* an operation of a device lane starts after everything the host did before it enqueued it;
* `wait` and `synchronize` stand behind the newest `record` of their event that was enqueued before them, as on CUDA.

So the clock of an operation is final when it is enqueued, and a conflict is always with an earlier one.

Order depends on programs and on when they are collected, never on the arrays of a plan (but for the slots that a
carry-over reads). A `State` is all that matters about the past: clocks, events and slot buffers, as ages relative to
the newest operation of each lane, without what the host knows to be over. order.py remembers them.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from itertools import count
from typing import NamedTuple

from asyncsched.accesses import OF_BLOCKS, OF_SLOT
from asyncsched.program import Buffer, BufferKind, Event, EventKind, Lane, OpKind, Template

LANES = tuple(Lane)
HOST = LANES.index(Lane.HOST)
SETTLED = -(2**62)  # an access that the host knows to be over: before everything to come
COLLECTED = -1  # tag: by a step that was collected
NEVER = -2  # tag: by nobody

Clock = tuple[int, ...]  # by lane: the newest operation that is known to be over, 0 for the newest enqueued


def plus(one: Clock, other: Clock) -> Clock:
    """Lane by lane, and spelled out: every launch and every collection needs it."""
    (a, b, c, d), (e, f, g, h) = one, other
    return a + e, b + f, c + g, d + h


def is_within(one: Clock, other: Clock) -> bool:
    """Whether `other` knows all that `one` knows."""
    (a, b, c, d), (e, f, g, h) = one, other
    return a <= e and b <= f and c <= g and d <= h


class Edge(NamedTuple):
    """A record, wait or synchronize of programs: the `nth` of its kind in a program, in any slot."""

    lane: Lane
    kind: OpKind
    event: EventKind
    nth: int = 0

    def __str__(self) -> str:
        ordinal = f" (number {self.nth + 1} of its kind)" if self.nth else ""
        return f"{self.kind.value} {self.event.value} on lane {self.lane.value}{ordinal}"


class Trouble(Enum):
    RACE = auto()
    MISREAD = auto()
    NEVER_RECORDED = auto()
    RECORDED_AGAIN = auto()


class Problem(NamedTuple):
    """What is wrong with operation `op` of a program.

    RACE            it conflicts over `buffer` with operations that are newer than its clock
    MISREAD         it reads from `buffer` of its own slot what the step with `tag` wrote, and not its own
    NEVER_RECORDED  it waits for `event`, which nobody recorded
    RECORDED_AGAIN  it waits for `event`, which the step with `tag` recorded after its own program had
    """

    trouble: Trouble
    op: int
    clock: Clock
    buffer: Buffer | None = None
    event: Event | None = None
    tag: int = NEVER


class KvOp(NamedTuple):
    """An operation that touches KV: where it is in its program, and its clock, relative to the start of the launch."""

    op: int
    clock: Clock


class State(NamedTuple):
    """Tags say whose an event or a content is: the place of a step among those in flight, COLLECTED or NEVER."""

    clocks: tuple[Clock, ...]
    events: tuple[tuple[Event, Clock, int], ...]
    buffers: tuple[tuple[Buffer, Clock, Clock, int], ...]  # newest read and newest write by lane


NOTHING = (SETTLED,) * len(LANES)
IDLE = State(((0,) * len(LANES),) * len(LANES), (), ())


_serials = count()


class Shape:
    """What matters about a template. Raises ValueError where Collect's part of it is not the host's alone.

    numbers  of each operation, on its lane, from 1; `counts` are how many each lane has
    edges    of each operation, None for those that are none
    kv_lanes a bit for each lane that touches KV
    slot_buffers  all that operations name, but for the sources of a carry-over
    """

    def __init__(self, template: Template) -> None:
        self.serial = next(_serials)
        self.template = template
        self.ops = template.ops
        self.num_launched = len(template.launched)
        if any(op.lane is not Lane.HOST for op in self.ops[self.num_launched :]):
            raise ValueError("after the launch a program may have host operations only")
        self.lanes = [LANES.index(op.lane) for op in self.ops]
        self.numbers: list[int] = []
        counts = [0] * len(LANES)
        for place, lane in enumerate(self.lanes):
            self.numbers.append(counts[lane] + 1)
            if place < self.num_launched:
                counts[lane] += 1
        self.counts: Clock = tuple(counts)
        self.slot_reads = [[b for b in op.reads if b.kind in OF_SLOT] for op in self.ops]
        self.slot_writes = [[b for b in op.writes if b.kind in OF_SLOT] for op in self.ops]
        self.slot_buffers = {b for buffers in (*self.slot_reads, *self.slot_writes) for b in buffers}
        self.carries = [any(b.kind is BufferKind.CARRY_SOURCES for b in op.reads) for op in self.ops]
        self.kv_ops = [
            place for place, op in enumerate(self.ops) if any(b.kind in OF_BLOCKS for b in (*op.reads, *op.writes))
        ]
        self.kv_lanes = sum(1 << lane for lane in {self.lanes[place] for place in self.kv_ops})
        self.edges: list[Edge | None] = []
        for op in self.ops:
            edge = Edge(op.lane, op.kind, op.event.kind) if op.event else None
            while edge in self.edges and edge is not None:
                edge = edge._replace(nth=edge.nth + 1)
            self.edges.append(edge)


class Run:
    """Some operations of one program, enqueued one after the other. The newest one before has the number 0."""

    def __init__(self, state: State, shape: Shape, places: range, sources: int, own: int, without: Edge | None) -> None:
        self.clocks = [list(clock) for clock in state.clocks]
        self.events = {event: (clock, tag) for event, clock, tag in state.events}
        self.buffers = {buffer: (list(reads), list(writes), tag) for buffer, reads, writes, tag in state.buffers}
        self.own = own
        self.shape = shape
        self.problems: list[Problem] = []
        self.kv: list[KvOp] = []
        self.captured: dict[int, int] = {}
        self._newest = [0] * len(LANES)
        self._sources = [Buffer(BufferKind.DEV_OUT, s) for s in range(sources.bit_length()) if sources >> s & 1]
        for place in places:
            self._enqueue(place, is_out=without is not None and shape.edges[place] == without)

    def _enqueue(self, place: int, *, is_out: bool) -> None:
        shape, lane = self.shape, self.shape.lanes[place]
        op, clock = shape.ops[place], self.clocks[lane]
        if lane != HOST:
            _join(clock, self.clocks[HOST])
        self._newest[lane] += 1
        number = self._newest[lane]
        if op.event is not None and not is_out:
            if op.kind is OpKind.RECORD:
                self.events[op.event] = (*clock[:lane], number, *clock[lane + 1 :]), self.own
            else:
                self._wait(place, op.event, clock)
        for buffer in shape.slot_reads[place]:
            tag = self._access(place, buffer, number, clock, writes=False)
            if tag == NEVER or (tag != self.own and buffer.slot == shape.template.slot):
                self.problems.append(Problem(Trouble.MISREAD, place, tuple(clock), buffer, tag=tag))
        if shape.carries[place]:
            for buffer in self._sources:
                self._access(place, buffer, number, clock, writes=False)
        for buffer in shape.slot_writes[place]:
            self._access(place, buffer, number, clock, writes=True)
        if place in shape.kv_ops:
            self.kv.append(KvOp(place, tuple(clock)))
        clock[lane] = number

    def _wait(self, place: int, event: Event, clock: list[int]) -> None:
        stamp, tag = self.events.get(event, (NOTHING, NEVER))
        self.captured[place] = tag
        _join(clock, stamp)
        if tag == NEVER:
            self.problems.append(Problem(Trouble.NEVER_RECORDED, place, tuple(clock), event=event))
        elif tag != self.own and any(o.kind is OpKind.RECORD and o.event == event for o in self.shape.ops[:place]):
            self.problems.append(Problem(Trouble.RECORDED_AGAIN, place, tuple(clock), event=event, tag=tag))

    def _access(self, place: int, buffer: Buffer, number: int, clock: list[int], *, writes: bool) -> int:
        """Notes an access and its race, if it has one. Returns whose content it found."""
        lane = self.shape.lanes[place]
        read_at, written_at, tag = self.buffers.get(buffer, (list(NOTHING), list(NOTHING), NEVER))
        against = map(max, read_at, written_at) if writes else written_at
        if any(at > clock[other] for other, at in enumerate(against) if other != lane):
            race = Problem(Trouble.RACE, place, tuple(clock), buffer)
            if race not in self.problems:
                self.problems.append(race)
        (written_at if writes else read_at)[lane] = number
        self.buffers[buffer] = read_at, written_at, self.own if writes else tag
        return tag

    def result(self) -> State:
        """The state afterwards, relative to the newest operations again.

        Of a clock it keeps what the host knows too, as every later operation does; of accesses what the host doesn't.
        """
        newest, host = self._newest, self.clocks[HOST]

        def clock(at: Iterable[int]) -> Clock:
            return tuple(max(a, known) - last for a, known, last in zip(at, host, newest, strict=True))

        def still_open(at: Iterable[int]) -> Clock:
            return tuple(a - last if a > known else SETTLED for a, known, last in zip(at, host, newest, strict=True))

        events = sorted(self.events.items(), key=lambda item: (item[0].kind.value, item[0].slot))
        buffers = sorted(self.buffers.items(), key=lambda item: (item[0].kind.value, item[0].slot))
        return State(
            tuple(clock(at) for at in self.clocks),
            tuple((event, clock(at), tag) for event, (at, tag) in events),
            tuple((buffer, still_open(reads), still_open(writes), tag) for buffer, (reads, writes, tag) in buffers),
        )


def _join(clock: list[int], other: Iterable[int]) -> None:
    clock[:] = map(max, clock, other)


def without_tag(state: State, gone: int) -> State:
    """Tags after one that is gone move up."""

    def moved(tag: int) -> int:
        return tag if tag < gone else COLLECTED if tag == gone else tag - 1

    return State(
        state.clocks,
        tuple((event, clock, moved(tag)) for event, clock, tag in state.events),
        tuple((buffer, reads, writes, moved(tag)) for buffer, reads, writes, tag in state.buffers),
    )


def joined(state: State, upto: Clock) -> State:
    clocks = tuple(tuple(map(max, clock, upto)) for clock in state.clocks)
    host = clocks[HOST]

    def still_open(at: Clock) -> Clock:
        return tuple(a if a > known else SETTLED for a, known in zip(at, host, strict=True))

    return State(
        clocks,
        tuple((event, tuple(map(max, at, host)), tag) for event, at, tag in state.events),
        tuple((buffer, still_open(reads), still_open(writes), tag) for buffer, reads, writes, tag in state.buffers),
    )
