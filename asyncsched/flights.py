"""Steps that were launched, as a checker remembers them, and where two of their operations conflict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from asyncsched.accesses import OF_BLOCKS, OF_SLOT, Access, Memory, Spot, expand, overlap
from asyncsched.clocks import Clock, Shape, is_within, plus
from asyncsched.config import EngineConfig
from asyncsched.contents import Snapshot
from asyncsched.program import Buffer, BufferKind, Event, Lane, OpKind

WORDS = {OpKind.H2D: "h2d copy", OpKind.D2H: "d2h copy", OpKind.CARRY: "carry-over"}


class Where(NamedTuple):
    """One operation of one step. `slot` is -1 and `kind` None where the checker has forgotten all but the step."""

    step: int
    slot: int = -1
    lane: Lane | None = None
    kind: OpKind | None = None

    def __str__(self) -> str:
        what = "" if self.kind is None else f"{WORDS.get(self.kind, self.kind.value)} of "
        return f"{what}step {self.step}"


class Units(NamedTuple):
    """Buffers of slots, KV blocks and host KV blocks."""

    slots: set[Buffer]
    kv: set[int]
    host_kv: set[int]


class Flight:
    """A launched step. `start` and `end` count the operations of each lane before it and with it.

    `sources` has a bit for each slot that it carries over from.
    """

    __slots__ = ("_expanded", "_written", "end", "is_in_flight", "shape", "snapshot", "sources", "start", "step")

    def __init__(self, snapshot: Snapshot, shape: Shape, start: Clock, sources: int) -> None:
        self.snapshot = snapshot
        self.shape = shape
        self.step = snapshot.plan.step
        self.start = start
        self.end = plus(start, shape.counts)
        self._written: Units | None = None
        self.sources = sources
        self.is_in_flight = True
        self._expanded: dict[tuple[Buffer, bool], Access] | None = None

    def is_over(self, known: Clock) -> bool:
        return is_within(self.end, known)

    def where(self, place: int) -> Where:
        op = self.shape.ops[place]
        return Where(self.step, self.shape.template.slot, op.lane, op.kind)

    def number(self, place: int) -> int:
        """Of an operation, on its lane, since the beginning."""
        return self.start[self.shape.lanes[place]] + self.shape.numbers[place]

    def touches(self, place: int, buffer: Buffer) -> tuple[bool, bool]:
        """Whether an operation reads, and whether it writes, a buffer of a slot."""
        op = self.shape.ops[place]
        is_source = buffer.kind is BufferKind.DEV_OUT and bool(self.sources >> buffer.slot & 1)
        return buffer in op.reads or (is_source and self.shape.carries[place]), buffer in op.writes

    def kv(self, place: int) -> Iterator[tuple[Buffer, bool]]:
        """Buffers of KV blocks that an operation reads (False), then those that it writes (True)."""
        op = self.shape.ops[place]
        for writes, buffers in ((False, op.reads), (True, op.writes)):
            yield from ((buffer, writes) for buffer in buffers if buffer.kind in OF_BLOCKS)

    def blocks(self, buffer: Buffer) -> set[int]:
        """KV blocks of a buffer: quick, and some more than an operation touches of them."""
        plan = self.snapshot.plan
        match buffer.kind:
            case BufferKind.KV_OFFLOADED:
                return set(plan.offload.device.tolist())
            case BufferKind.HOST_KV_OFFLOADED:
                return set(plan.offload.host.tolist())
            case BufferKind.KV_RESTORED:
                return set(plan.restore.device.tolist())
            case BufferKind.HOST_KV_RESTORED:
                return set(plan.restore.host.tolist())
        return {block for *_, blocks in self.snapshot.parts for block in blocks}

    def expanded(self, buffer: Buffer, writes: bool, config: EngineConfig) -> Access:
        if self._expanded is None:
            self._expanded = {}
        access = self._expanded.get((buffer, writes))
        if access is None:
            access = expand(self.snapshot.plan, buffer, writes, self.snapshot.table, config)
            self._expanded[buffer, writes] = access
        return access

    def written(self, config: EngineConfig) -> Units:
        """What its operations write."""
        if self._written is None:
            slots = {buffer for buffers in self.shape.slot_writes for buffer in buffers}
            blocks: dict[Memory, set[int]] = {Memory.KV: set(), Memory.HOST_KV: set()}
            for place in range(self.shape.num_launched):
                for buffer, writes in self.kv(place):
                    if writes:
                        blocks[OF_BLOCKS[buffer.kind]].update(self.expanded(buffer, True, config).units.tolist())
            self._written = Units(slots, blocks[Memory.KV], blocks[Memory.HOST_KV])
        return self._written

    def may_meet(self, units: Units) -> bool:
        """Whether it may touch any of these: quick, and true a little too often."""
        sources = self.sources and any(b.kind is BufferKind.DEV_OUT and self.sources >> b.slot & 1 for b in units.slots)
        if sources or not units.slots.isdisjoint(self.shape.slot_buffers):
            return True
        plan, kv = self.snapshot.plan, units.kv
        if kv and not all(map(kv.isdisjoint, (blocks for *_, blocks in self.snapshot.parts))):
            return True
        if not len(plan.offload.host) and not len(plan.restore.host):
            return False
        copied = {*plan.offload.device.tolist(), *plan.restore.device.tolist()}
        on_host = {*plan.offload.host.tolist(), *plan.restore.host.tolist()}
        return not (kv.isdisjoint(copied) and units.host_kv.isdisjoint(on_host))

    def event_after(self, place: int) -> Event | None:
        """What the program records next on the lane of an operation."""
        lane = self.shape.lanes[place]
        later = range(place, self.shape.num_launched)
        ops = (self.shape.ops[other] for other in later if self.shape.lanes[other] == lane)
        return next((op.event for op in ops if op.kind is OpKind.RECORD), None)

    def writer_of(self, spot: Spot) -> Where | None:
        """The operation that writes to such memory, its last one."""
        for place in reversed(range(len(self.shape.ops))):
            for buffer in self.shape.ops[place].writes:
                if spot.memory in (OF_SLOT.get(buffer.kind), OF_BLOCKS.get(buffer.kind)):
                    return self.where(place)
        return None


class Race(NamedTuple):
    """Operation `op` of one step and an earlier operation meet in `units`, first of all at `spot`."""

    op: int
    earlier: Flight
    earlier_op: int
    spot: Spot
    units: int
    earlier_writes: bool
    writes: bool


def kv_races(
    earlier: Flight, earlier_op: int, later: Flight, op: int, config: EngineConfig, *, only_its_writes: bool = False
) -> list[Race]:
    """How two operations conflict over KV, or an operation with the writes of an earlier one: one race per memory."""
    races: dict[Memory, Race] = {}
    for one, earlier_writes in earlier.kv(earlier_op):
        if only_its_writes and not earlier_writes:
            continue
        for other, writes in later.kv(op):
            memory = OF_BLOCKS[one.kind]
            if memory is not OF_BLOCKS[other.kind] or memory in races or not (earlier_writes or writes):
                continue
            if not earlier.blocks(one).isdisjoint(later.blocks(other)):
                met = overlap(earlier.expanded(one, earlier_writes, config), later.expanded(other, writes, config))
                if met is not None:
                    races[memory] = Race(op, earlier, earlier_op, met[1], met[0], earlier_writes, writes)
    return list(races.values())


def slot_race(earlier: Flight, earlier_op: int, later: Flight, op: int, buffer: Buffer) -> Race | None:
    """How two operations conflict over the buffer of a slot, if they do."""
    reads, writes = later.touches(op, buffer)
    earlier_reads, earlier_writes = earlier.touches(earlier_op, buffer)
    if not (earlier_writes and (reads or writes)) and not (earlier_reads and writes):
        return None
    return Race(op, earlier, earlier_op, Spot(OF_SLOT[buffer.kind], buffer.slot), 1, earlier_writes, writes)
