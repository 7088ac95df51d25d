"""Planted faults of programs, slots and the loop: edges that are gone, late or of another slot, slots reused early."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import Any

from asyncsched.inputs import SlotInputs
from asyncsched.program import Buffer, BufferKind, Event, EventKind, Lane, Op, OpKind, Template
from mutants.catalogue import Mutant, around, rewrite
from mutants.patching import Around

Ops = tuple[Op, ...]
OVERLAPS = "plan is not None and slots:"
DEPTH = 2  # of the cases that these mutants run on, but where a slot more is needed


def programs(change: Callable[[Ops], Iterable[Op]]) -> Around:
    """Every program is changed."""

    def make(template: Callable[..., Template]) -> Callable[..., Template]:
        @cache
        def changed(*args: Any) -> Template:
            original = template(*args)
            return replace(original, ops=tuple(change(original.ops)))

        return changed

    return around("program.template", make)


def without(kind: OpKind, event: EventKind) -> Around:
    """An edge is gone. A synchronize still reads, but waits for nothing."""

    def change(ops: Ops) -> Iterable[Op]:
        for op in ops:
            if op.kind is not kind or op.event is None or op.event.kind is not event:
                yield op
            elif kind is OpKind.SYNCHRONIZE:
                yield replace(op, event=None)

    return programs(change)


def moved(kind: OpKind, lane: Lane, before: OpKind | None = None, after: OpKind | None = None) -> Around:
    """An operation of a lane comes before or after another one."""

    def change(ops: Ops) -> Iterable[Op]:
        moving = next((op for op in ops if op.kind is kind and op.lane is lane), None)
        for op in ops:
            if op.kind is before and moving:
                yield moving
            if op is not moving:
                yield op
            if op.kind is after and moving:
                yield moving

    return programs(change)


def on_lane(kind: OpKind, lane: Lane) -> Around:
    return programs(lambda ops: (replace(op, lane=lane) if op.kind is kind else op for op in ops))


def of_next_slot(kind: OpKind, event: EventKind) -> Around:
    """An edge names the event of another slot."""

    def change(ops: Ops) -> Iterable[Op]:
        for op in ops:
            if op.kind is kind and op.event is not None and op.event.kind is event:
                op = replace(op, event=Event(event, (op.event.slot + 1) % DEPTH))
            yield op

    return programs(change)


def buffer_of_next_slot(on: OpKind, buffer: BufferKind) -> Around:
    def other(buffers: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
        return tuple(b._replace(slot=(b.slot + 1) % DEPTH) if b.kind is buffer else b for b in buffers)

    return programs(
        lambda ops: (replace(op, reads=other(op.reads), writes=other(op.writes)) if op.kind is on else op for op in ops)
    )


def synchronize_with_compute(ops: Ops) -> Iterable[Op]:
    *launched, last = ops
    assert last.event is not None
    return (*launched, replace(last, event=Event(EventKind.COMPUTE_DONE, last.event.slot)))


def carry_over_is_gone(ops: Ops) -> Iterable[Op]:
    return (op for op in ops if op.kind is not OpKind.CARRY)


def one_host_buffer(init: Callable[..., None]) -> Callable[..., None]:
    """All slots are filled in the same pinned memory."""

    def changed(self: Any, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self.host_in = self.host_in[:1] * len(self.host_in)

    return changed


def always_slot_0(plan: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, slot: plan(self, 0)


def shared_journal(journal: Callable[..., Any]) -> Callable[..., Any]:
    """Whoever fills first takes the changes away from the other slots: each gets the delta since step N-1, not N-d."""

    def changed(self: Any) -> Any:
        return self._journals[0] if self._journals else journal(self)

    return changed


def applied_late(fill: Callable[..., None]) -> Callable[..., None]:
    """Changes of block tables reach a slot one fill late."""
    late: dict[int, list[Any]] = {}

    def changed(self: SlotInputs, plan: Any) -> None:
        now, self._changes[:] = list(self._changes), late.get(id(self), [])
        late[id(self)] = now
        fill(self, plan)

    return changed


EDGES = (
    *(
        Mutant(f"no {kind.value} of {event.value}", (without(kind, event),), "plain")
        for kind, event in (
            (OpKind.RECORD, EventKind.H2D_DONE),
            (OpKind.RECORD, EventKind.COMPUTE_DONE),
            (OpKind.RECORD, EventKind.D2H_DONE),
            (OpKind.WAIT, EventKind.H2D_DONE),
            (OpKind.WAIT, EventKind.COMPUTE_DONE),
            (OpKind.SYNCHRONIZE, EventKind.D2H_DONE),
        )
    ),
    *(
        Mutant(f"{kind.value} of {event.value} names another slot", (of_next_slot(kind, event),), "alone in flight")
        for kind, event in (
            (OpKind.RECORD, EventKind.H2D_DONE),
            (OpKind.WAIT, EventKind.H2D_DONE),
            (OpKind.WAIT, EventKind.COMPUTE_DONE),
            (OpKind.SYNCHRONIZE, EventKind.D2H_DONE),
        )
    ),
    Mutant("nothing is carried over", (programs(carry_over_is_gone),), "plain"),
    Mutant("h2d is recorded before the copy", (moved(OpKind.RECORD, Lane.H2D, before=OpKind.H2D),), "plain"),
    Mutant(
        "compute is recorded before the forward pass",
        (moved(OpKind.RECORD, Lane.COMPUTE, before=OpKind.FORWARD),),
        "plain",
    ),
    Mutant("d2h is recorded before the copy", (moved(OpKind.RECORD, Lane.D2H, before=OpKind.D2H),), "plain"),
    Mutant(
        "the wait for h2d comes after the carry-over",
        (moved(OpKind.WAIT, Lane.COMPUTE, after=OpKind.CARRY),),
        "plain",
    ),
    Mutant(
        "the wait for compute is enqueued before its record",
        (moved(OpKind.WAIT, Lane.D2H, before=OpKind.FORWARD),),
        "plain",
    ),
    Mutant("Collect waits for compute, not for d2h", (programs(synchronize_with_compute),), "plain"),
    Mutant("a restore is not covered by h2d_done", (moved(OpKind.RESTORE, Lane.H2D, before=OpKind.CARRY),), "offload"),
    Mutant("a restore runs on d2h", (on_lane(OpKind.RESTORE, Lane.D2H),), "offload"),
    Mutant("an offload runs on h2d", (on_lane(OpKind.OFFLOAD, Lane.H2D),), "offload"),
    Mutant(
        "the h2d copy reads the inputs of the next slot",
        (buffer_of_next_slot(OpKind.H2D, BufferKind.HOST_IN),),
        "plain",
    ),
    Mutant(
        "the d2h copy reads the tokens of the next slot",
        (buffer_of_next_slot(OpKind.D2H, BufferKind.DEV_OUT),),
        "plain",
    ),
    Mutant("every step uses slot 0", (around("scheduler.Scheduler.plan", always_slot_0),), "plain", 11),
    Mutant(
        "a slot is refilled before its step is collected",
        (
            rewrite(
                "pipeline.pipeline",
                ("slots.append(plan.slot)", "slots.append((plan.slot + 1) % scheduler.config.depth)"),
            ),
        ),
        "deep",
        11,
    ),
    Mutant(
        "one step more is in flight than there are slots",
        (
            rewrite(
                "pipeline.pipeline",
                ("deque(range(scheduler.config.depth))", "deque([*range(scheduler.config.depth), 0])"),
            ),
        ),
        "plain",
        11,
    ),
    Mutant(
        "all slots share one pinned input buffer",
        (around("faithful.FaithfulExecutor.__init__", one_host_buffer),),
        "11-table-rewritten-before-its-copy",
        11,
    ),
    Mutant(
        "the newest step is collected first",
        (rewrite("pipeline.pipeline", ("in_flight.popleft()", "in_flight.pop()")),),
        "deep",
    ),
    Mutant("overlap is off", (rewrite("pipeline.pipeline", (OVERLAPS, "False:")),), "plain", 23),
    Mutant(
        "stop matchers turn overlap off",
        (
            rewrite(
                "pipeline.pipeline", (OVERLAPS, f"{OVERLAPS[:-1]} and not scheduler.rows.scrutinise[plan.rows].any():")
            ),
        ),
        "23-overlap-stays-on",
        23,
    ),
    Mutant("block tables change since step N-1", (around("rows.Rows.journal", shared_journal),), "plain", 11),
    Mutant("block tables change a fill late", (around("inputs.SlotInputs.fill", applied_late),), "plain", 11),
)
