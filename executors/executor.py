"""Interprets step programs on real lanes: each operation becomes work on the lane that the program names.

It adds no order of its own. A program's template is resolved once into the calls that its operations mean, one after
the other; a step makes these calls. Where carry-over, forward pass and sampling are captured in one CUDA graph,
replaying it is the forward operation, and the carry-over operation before it has nothing left to do.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from asyncsched.pipeline import StepFailure
from asyncsched.plan import StepPlan
from asyncsched.program import Event, Lane, Op, OpKind, StepProgram, Template
from asyncsched.request import TokenArray
from asyncsched.timeline import Span, Timeline
from executors.errors import one_line
from executors.sampling_layout import Features
from executors.slots import Slot
from executors.streams import Stream

Call = Callable[[], object]
OfPlan = Callable[[StepPlan], object]


class Lanes(Protocol):
    """Where operations run. See executors/cpu.py and executors/cuda.py.

    `recorder` and `waiter` answer calls that may be made many times. While `timed`, `bracket` answers the calls around
    an operation that measure its span; `take` gives what they noted, for `read` once the step was collected.
    """

    device: torch.device
    pinned: bool
    graphs: bool
    timed: bool

    def stream(self, lane: Lane) -> Stream: ...

    def recorder(self, event: Event, lane: Lane) -> Call: ...

    def waiter(self, event: Event, lane: Lane) -> Call: ...

    def bracket(self, lane: Lane) -> tuple[Call, Call] | None: ...

    def synchronize(self, event: Event) -> None: ...

    def drain(self) -> None: ...

    def take(self) -> Any: ...

    def read(self, taken: Any) -> list[tuple[int, int]]: ...

    def clock_error_ns(self) -> int: ...


class Compute(Protocol):
    """What runs on the compute lane: see executors/compute.py."""

    def carry(self, stream: Stream, slot: Slot, plan: StepPlan) -> None: ...

    def forward(self, stream: Stream, slot: Slot, plan: StepPlan) -> None: ...

    def offload(self, stream: Stream, plan: StepPlan) -> None: ...

    def restore(self, stream: Stream, plan: StepPlan) -> None: ...


OnLogprobs = Callable[[StepPlan, NDArray[np.int32]], None]


class _Measured(NamedTuple):
    """An operation whose span is measured."""

    lane: str
    name: str
    size: Callable[[StepPlan], int]


class _Resolved(NamedTuple):
    """A template as calls in order; those of the second kind get the plan.

    synchronize  the event that Collect waits for
    """

    template: Template  # kept, so that its identity stays its own
    calls: tuple[tuple[Call, None] | tuple[None, OfPlan], ...]
    measured: tuple[_Measured, ...]
    synchronize: Event


@dataclass(slots=True)
class Ticket:
    """A launched step. `spans` is what the lanes noted; `cause` says why a launch broke off, maybe without program."""

    plan: StepPlan
    program: _Resolved | None = None
    spans: Any = None
    cause: str = ""


class Executor:
    """One engine's slots on one device. `on_logprobs` gets the plan and the words of its sampled tokens, if any ask."""

    def __init__(
        self, lanes: Lanes, compute: Compute, slots: list[Slot], *, on_logprobs: OnLogprobs, timeline: Timeline | None
    ) -> None:
        self.lanes = lanes
        self.compute = compute
        self.slots = slots
        self.on_logprobs = on_logprobs
        self._resolved: dict[int, _Resolved] = {}  # by identity of the template
        self._in_flight = 0  # steps whose copies may still be on their way
        self._since = 0  # start of the host work that the next span records
        self.record(timeline)

    def __del__(self) -> None:
        """Nobody but the slots keeps the memory that copies on their way touch, and it is about to be given back."""
        if self._in_flight:
            with suppress(RuntimeError):  # a device that does not answer touches nothing
                self.lanes.drain()

    def record(self, timeline: Timeline | None, *, devices: bool = True) -> None:
        """From the next launch on, spans go to `timeline`; without `devices`, those of the host alone, which cost less.

        None ends it.
        """
        self.timeline = timeline
        self.lanes.timed = timeline is not None and devices
        self._resolved.clear()

    def launch(self, program: StepProgram) -> Ticket:
        """Enqueues everything up to `synchronize`. A step that cannot be enqueued fails when it is collected."""
        self._since = time.perf_counter_ns()
        template, plan = program
        ticket = Ticket(plan)
        self._in_flight += 1
        try:
            resolved = ticket.program = self._resolved.get(id(template)) or self._resolve(template)
            for call, of_plan in resolved.calls:
                if call is not None:
                    call()
                else:
                    of_plan(plan)  # type: ignore[misc]  # one of the two
        except Exception as error:  # out of memory, a kernel or a model that refuses: the fault of the step alone
            ticket.cause = f"{type(error).__name__}: {one_line(error)}"
        if self.timeline is not None:
            ticket.spans = self.lanes.take()
        self._host_span("launch", plan)
        return ticket

    def collect(self, ticket: Ticket) -> TokenArray | StepFailure:
        """Waits for the step and copies its tokens out of the slot."""
        plan, program = ticket.plan, ticket.program
        slot = self.slots[plan.slot]
        self._since = time.perf_counter_ns()
        if ticket.cause or program is None:
            return self._failed(slot, ticket.cause)
        try:
            self.lanes.synchronize(program.synchronize)
        except RuntimeError as error:
            return self._failed(slot, f"{type(error).__name__}: {one_line(error)}")
        self._in_flight -= 1
        self._host_span("collect", plan)
        tokens = slot.take_tokens(len(plan.sampled))
        if slot.features & Features.LOGPROBS:
            self.on_logprobs(plan, slot.host_logprobs[: len(plan.sampled)].numpy().copy())
        if self.timeline is not None and ticket.spans:
            for (lane, name, size), (start, end) in zip(program.measured, self.lanes.read(ticket.spans), strict=True):
                self.timeline.spans.append(Span(lane, name, plan.step, plan.slot, start, end, size(plan)))
        return tokens

    def _failed(self, slot: Slot, cause: str) -> StepFailure:
        """Once what was enqueued has run, the slot is free again; where nobody can tell, the step is stuck."""
        try:
            self.lanes.drain()
        except RuntimeError as error:
            return StepFailure(f"{cause}; the device does not answer any more: {one_line(error)}", stuck=True)
        self._in_flight -= 1
        slot.inputs.resend()
        return StepFailure(cause)

    def _resolve(self, template: Template) -> _Resolved:
        """The calls that the operations mean, in their order; nothing is added but what measures them."""
        calls: list[tuple[Call, None] | tuple[None, OfPlan]] = []
        measured: list[_Measured] = []
        for op in template.launched:
            if op.kind is OpKind.RECORD or op.kind is OpKind.WAIT:
                make = self.lanes.recorder if op.kind is OpKind.RECORD else self.lanes.waiter
                calls.append((make(op.event, op.lane), None))  # type: ignore[arg-type]  # names an event
                continue
            work, size = self._work(op, self.slots[template.slot])
            if op.lane is Lane.HOST:
                calls.append((None, work))
                continue
            bracket = self.lanes.bracket(op.lane)
            if bracket is None:
                calls.append((None, work))
            else:
                calls += ((bracket[0], None), (None, work), (bracket[1], None))
                measured.append(_Measured(op.lane.value, op.kind.value, size))
        resolved = _Resolved(template, tuple(calls), tuple(measured), template.ops[-1].event)  # type: ignore[arg-type]
        self._resolved[id(template)] = resolved
        return resolved

    def _work(self, op: Op, slot: Slot) -> tuple[OfPlan, Callable[[StepPlan], int]]:
        """What an operation does, and its size: bytes, tokens, or KV blocks."""
        compute, kind = self.compute, op.kind
        if kind is OpKind.FILL:
            return partial(_fill, weakref.ref(self), slot), lambda plan: plan.num_seqs
        stream = self.lanes.stream(op.lane)
        if kind is OpKind.CARRY:
            return partial(compute.carry, stream, slot), lambda plan: plan.num_decodes
        if kind is OpKind.FORWARD:
            return partial(compute.forward, stream, slot), lambda plan: plan.num_tokens
        if kind is OpKind.H2D:
            return partial(slot.copy_in, stream), lambda plan: slot.input_bytes
        if kind is OpKind.D2H:
            return partial(slot.copy_out, stream), lambda plan: 4 * len(plan.sampled)
        if kind is OpKind.OFFLOAD:
            return partial(compute.offload, stream), lambda plan: len(plan.offload.host)
        if kind is OpKind.RESTORE:
            return partial(compute.restore, stream), lambda plan: len(plan.restore.host)
        raise NotImplementedError(f"the program has an operation that this executor does not know: {kind}")

    def _host_span(self, name: str, plan: StepPlan) -> None:
        """Records host work since the last span, or since launch or collect began."""
        if self.timeline is not None:
            now = time.perf_counter_ns()
            self.timeline.spans.append(Span("host", name, plan.step, plan.slot, self._since, now, len(plan.rows)))
            self._since = now


def _fill(executor: weakref.ref[Executor], slot: Slot, plan: StepPlan) -> None:
    """What an executor calls must not keep it: then only the collector would give up the memory of one that is gone."""
    slot.fill(plan)
    executor()._host_span("fill", plan)  # type: ignore[union-attr]  # it calls this
