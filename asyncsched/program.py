"""Step programs: what one step does, on which lanes, touching what, ordered by which events.

A program is data. It is built here, once per (slot, bucket), and interpreted elsewhere: on CUDA streams, in virtual
time, or by a checker. All ordering is in it: operations of one lane run in order, `wait` orders a lane behind a
`record` of another, `synchronize` orders the host. An interpreter that needs more has found a missing operation.

The host enqueues operations in the order of the list; the last one, `synchronize`, belongs to Collect.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import NamedTuple

from asyncsched.plan import StepPlan


class Lane(Enum):
    __hash__ = object.__hash__  # as quick as can be, where that of Enum is a function in Python

    HOST = "host"
    H2D = "h2d"
    COMPUTE = "compute"
    D2H = "d2h"


class OpKind(Enum):
    __hash__ = object.__hash__

    FILL = "fill"
    H2D = "h2d"
    CARRY = "carry"
    FORWARD = "forward"
    D2H = "d2h"
    RESTORE = "restore"
    OFFLOAD = "offload"
    RECORD = "record"
    WAIT = "wait"
    SYNCHRONIZE = "synchronize"


class BufferKind(Enum):
    """What an operation touches. What the step's arrays decide is derived from the plan by checkers, on demand.

    HOST_IN, DEV_IN, DEV_OUT, HOST_OUT   the buffers of one slot
    CARRY_SOURCES                        DEV_OUT of the slots the carry-over mask names
    KV_READ                              KV positions up to the end of each row
    KV_WRITTEN                           KV positions of each row's query tokens
    KV_OFFLOADED, HOST_KV_OFFLOADED      device and host blocks of `plan.offload`
    KV_RESTORED, HOST_KV_RESTORED        device and host blocks of `plan.restore`
    """

    __hash__ = object.__hash__

    HOST_IN = "host_in"
    DEV_IN = "dev_in"
    DEV_OUT = "dev_out"
    HOST_OUT = "host_out"
    CARRY_SOURCES = "carry_sources"
    KV_READ = "kv_read"
    KV_WRITTEN = "kv_written"
    KV_OFFLOADED = "kv_offloaded"
    HOST_KV_OFFLOADED = "host_kv_offloaded"
    KV_RESTORED = "kv_restored"
    HOST_KV_RESTORED = "host_kv_restored"


class EventKind(Enum):
    __hash__ = object.__hash__

    H2D_DONE = "h2d_done"
    COMPUTE_DONE = "compute_done"
    D2H_DONE = "d2h_done"


class Buffer(NamedTuple):
    kind: BufferKind
    slot: int


class Event(NamedTuple):
    kind: EventKind
    slot: int


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. `event` is what RECORD records, what WAIT and SYNCHRONIZE wait for, and None otherwise."""

    lane: Lane
    kind: OpKind
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()
    event: Event | None = None


@dataclass(frozen=True, slots=True)
class Template:
    """The operations of every step of one slot and bucket (0: not padded, not captured)."""

    slot: int
    bucket: int
    ops: tuple[Op, ...]

    @property
    def launched(self) -> tuple[Op, ...]:
        """What Launch interprets; the rest is Collect's."""
        return self.ops[:-1]


class StepProgram(NamedTuple):
    """A template and the step that supplies its arrays."""

    template: Template
    plan: StepPlan


def build_program(plan: StepPlan) -> StepProgram:
    return StepProgram(
        template(plan.slot, plan.bucket, bool(len(plan.offload.host)), bool(len(plan.restore.host))), plan
    )


@cache
def template(slot: int, bucket: int, offload: bool = False, restore: bool = False) -> Template:
    """Copy in, carry over, compute, copy out: the same for every step, one that samples nothing too.

    Carrying over completes the inputs on the device: with tokens that no host knows yet, and with the changes of block
    tables, which stay in dev_in from step to step.
    An offload reads what earlier steps wrote: their `wait compute_done` stands before it on d2h. It goes before this
    step's own wait, so it overlaps the forward pass; the blocks it reads stay fenced until the step is collected. A
    restore goes to blocks that no step in flight touches, and h2d_done covers it.
    """
    host_in, dev_in = Buffer(BufferKind.HOST_IN, slot), Buffer(BufferKind.DEV_IN, slot)
    dev_out, host_out = Buffer(BufferKind.DEV_OUT, slot), Buffer(BufferKind.HOST_OUT, slot)
    sources = Buffer(BufferKind.CARRY_SOURCES, slot)
    kv_read, kv_written = Buffer(BufferKind.KV_READ, slot), Buffer(BufferKind.KV_WRITTEN, slot)
    h2d_done, compute_done = Event(EventKind.H2D_DONE, slot), Event(EventKind.COMPUTE_DONE, slot)
    d2h_done = Event(EventKind.D2H_DONE, slot)
    offloads = Op(
        Lane.D2H,
        OpKind.OFFLOAD,
        reads=(Buffer(BufferKind.KV_OFFLOADED, slot),),
        writes=(Buffer(BufferKind.HOST_KV_OFFLOADED, slot),),
    )
    restores = Op(
        Lane.H2D,
        OpKind.RESTORE,
        reads=(Buffer(BufferKind.HOST_KV_RESTORED, slot),),
        writes=(Buffer(BufferKind.KV_RESTORED, slot),),
    )
    ops = (
        Op(Lane.HOST, OpKind.FILL, writes=(host_in,)),
        *((restores,) if restore else ()),
        Op(Lane.H2D, OpKind.H2D, reads=(host_in,), writes=(dev_in,)),
        Op(Lane.H2D, OpKind.RECORD, event=h2d_done),
        Op(Lane.COMPUTE, OpKind.WAIT, event=h2d_done),
        Op(Lane.COMPUTE, OpKind.CARRY, reads=(sources, dev_in), writes=(dev_in,)),
        Op(Lane.COMPUTE, OpKind.FORWARD, reads=(dev_in, kv_read), writes=(kv_written, dev_out)),
        Op(Lane.COMPUTE, OpKind.RECORD, event=compute_done),
        *((offloads,) if offload else ()),
        Op(Lane.D2H, OpKind.WAIT, event=compute_done),
        Op(Lane.D2H, OpKind.D2H, reads=(dev_out,), writes=(host_out,)),
        Op(Lane.D2H, OpKind.RECORD, event=d2h_done),
        Op(Lane.HOST, OpKind.SYNCHRONIZE, reads=(host_out,), event=d2h_done),
    )
    return Template(slot, bucket, ops)
