"""What an operation of a program touches, down to slots and KV positions.

A program names some of its buffers by symbol (KV_READ, CARRY_SOURCES, ...), because what they are is in the arrays of
the plan and in block tables. Here they are expanded. Nothing on an engine's hot path does that; checkers do, on demand.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncsched.config import EngineConfig
from asyncsched.kv import NULL_BLOCK
from asyncsched.plan import NO_SOURCE, IndexArray, StepPlan
from asyncsched.program import Buffer, BufferKind, Op, StepProgram

Table = NDArray[np.int32] | IndexArray


class Memory(Enum):
    """Where an access goes: a buffer of one slot, the KV blocks of the device, or those of the host."""

    HOST_IN = "host_in"
    DEV_IN = "dev_in"
    DEV_OUT = "dev_out"
    HOST_OUT = "host_out"
    KV = "kv"
    HOST_KV = "host_kv"


class Access(NamedTuple):
    """One access to some units of a memory.

    units        int64[k]  slots, or KV blocks; a block that several rows touch occurs several times
    first, stop  int64[k]  offsets first..stop-1 of each unit are touched; a slot's buffer has the one offset 0
    """

    memory: Memory
    writes: bool
    units: IndexArray
    first: IndexArray
    stop: IndexArray


class Spot(NamedTuple):
    """One element of a memory: a KV position by block and offset, or the buffer of a slot."""

    memory: Memory
    unit: int
    offset: int = 0

    def __str__(self) -> str:
        if self.memory in (Memory.KV, Memory.HOST_KV):
            return f"{self.memory.value} block {self.unit} offset {self.offset}"
        return f"{self.memory.value}[{self.unit}]"


OF_SLOT = {
    BufferKind.HOST_IN: Memory.HOST_IN,
    BufferKind.DEV_IN: Memory.DEV_IN,
    BufferKind.DEV_OUT: Memory.DEV_OUT,
    BufferKind.HOST_OUT: Memory.HOST_OUT,
}
OF_BLOCKS = {
    BufferKind.KV_READ: Memory.KV,
    BufferKind.KV_WRITTEN: Memory.KV,
    BufferKind.KV_OFFLOADED: Memory.KV,
    BufferKind.KV_RESTORED: Memory.KV,
    BufferKind.HOST_KV_OFFLOADED: Memory.HOST_KV,
    BufferKind.HOST_KV_RESTORED: Memory.HOST_KV,
}


def accesses(program: StepProgram, op: Op, table: Table, config: EngineConfig) -> list[Access]:
    """Reads, then writes, of one operation. `table` is int[num_seqs, width], the block table of each row of the plan.

    A forward pass reads the positions that some query of the row sees: all up to the row's end, or a sliding window.
    What padding rows do to the null block is left out: nobody ever reads it.
    """
    return [
        expand(program.plan, buffer, writes, table, config)
        for writes, buffers in ((False, op.reads), (True, op.writes))
        for buffer in buffers
    ]


def expand(plan: StepPlan, buffer: Buffer, writes: bool, table: Table, config: EngineConfig) -> Access:
    """One buffer of an operation as slots or KV positions; arguments as in `accesses`."""
    size = config.block_size
    match buffer.kind:
        case BufferKind.CARRY_SOURCES:
            return _whole(Memory.DEV_OUT, writes, np.array(source_slots(plan, config), dtype=np.int64), 1)
        case BufferKind.KV_READ:
            return _positions(table, first_visible(plan, config), plan.ends, size, writes)
        case BufferKind.KV_WRITTEN:
            return _positions(table, plan.starts, plan.ends, size, writes)
        case BufferKind.KV_OFFLOADED:
            return _whole(Memory.KV, writes, plan.offload.device, size)
        case BufferKind.HOST_KV_OFFLOADED:
            return _whole(Memory.HOST_KV, writes, plan.offload.host, size)
        case BufferKind.KV_RESTORED:
            return _whole(Memory.KV, writes, plan.restore.device, size)
        case BufferKind.HOST_KV_RESTORED:
            return _whole(Memory.HOST_KV, writes, plan.restore.host, size)
    return _whole(OF_SLOT[buffer.kind], writes, np.array([buffer.slot], dtype=np.int64), 1)


def source_slots(plan: StepPlan, config: EngineConfig) -> list[int]:
    """Slots whose sampled tokens the carry-over mask names."""
    return sorted({source // config.max_num_seqs for source in plan.carry.tolist() if source != NO_SOURCE})


def first_visible(plan: StepPlan, config: EngineConfig) -> IndexArray:
    """The first KV position that some query of each row sees, int64[num_seqs]."""
    if config.sliding_window is None:
        return np.zeros_like(plan.starts)
    return np.maximum(plan.starts - config.sliding_window + 1, 0)


def overlap(one: Access, other: Access) -> tuple[int, Spot] | None:
    """How many units two accesses have in common, and the first element that they do; None where they do not meet."""
    if one.memory is not other.memory:
        return None
    common = sorted(set(one.units.tolist()).intersection(other.units.tolist()))
    spots = [Spot(one.memory, unit, at) for unit in common if (at := _meeting(one, other, unit)) is not None]
    return (len(spots), spots[0]) if spots else None


def _meeting(one: Access, other: Access, unit: int) -> int | None:
    """The first offset of `unit` that both touch."""
    ranges = [
        list(zip(a.first[a.units == unit].tolist(), a.stop[a.units == unit].tolist(), strict=True))
        for a in (one, other)
    ]
    starts = [max(a, c) for a, b in ranges[0] for c, d in ranges[1] if max(a, c) < min(b, d)]
    return min(starts, default=None)


def _whole(memory: Memory, writes: bool, units: IndexArray, size: int) -> Access:
    return Access(memory, writes, units, np.zeros_like(units), np.full_like(units, size))


def _positions(table: Table, first: IndexArray, stop: IndexArray, size: int, writes: bool) -> Access:
    """Positions first..stop-1 of each row, through its block table."""
    columns = first // size
    counts = np.maximum(-(-stop // size) - columns, 0)
    rows = np.repeat(np.arange(len(counts)), counts)
    column = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts - columns, counts)
    start = np.maximum(first[rows] - column * size, 0)
    end = np.minimum(stop[rows] - column * size, size)
    blocks = table[rows, column].astype(np.int64)
    real = blocks != NULL_BLOCK
    return Access(Memory.KV, writes, blocks[real], start[real], end[real])
