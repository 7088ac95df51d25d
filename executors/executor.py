"""Interprets step programs on real lanes: each operation becomes work on the lane that the program names.

It adds no order of its own. Where carry-over, forward pass and sampling are captured in one CUDA graph, replaying it is
the forward operation, and the carry-over operation before it has nothing left to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from asyncsched.pipeline import StepFailure
from asyncsched.plan import StepPlan
from asyncsched.program import Event, Lane, Op, OpKind, StepProgram
from asyncsched.request import TokenArray
from asyncsched.timeline import Span, Timeline
from executors.errors import one_line
from executors.sampling_layout import Features
from executors.slots import Slot


class Lanes(Protocol):
    """Where operations run. See executors/cpu.py and executors/cuda.py."""

    device: torch.device
    pinned: bool
    graphs: bool

    def on(self, lane: Lane) -> Any: ...

    def record(self, event: Event, lane: Lane) -> None: ...

    def wait(self, event: Event, lane: Lane) -> None: ...

    def synchronize(self, event: Event) -> None: ...

    def drain(self) -> None: ...

    def take(self) -> Any: ...

    def read(self, taken: Any) -> list[tuple[int, int]]: ...


class Compute(Protocol):
    """What runs on the compute lane: see executors/compute.py."""

    def carry(self, slot: Slot, plan: StepPlan) -> None: ...

    def forward(self, slot: Slot, plan: StepPlan) -> None: ...

    def offload(self, plan: StepPlan) -> None: ...

    def restore(self, plan: StepPlan) -> None: ...


OnLogprobs = Callable[[StepPlan, NDArray[np.int32]], None]


@dataclass(slots=True)
class Ticket:
    """A launched step. `names` and `spans` belong together; `cause` says why a launch broke off."""

    program: StepProgram
    names: list[tuple[Lane, str, int]] = field(default_factory=list)
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
        self.timeline = timeline

    def launch(self, program: StepProgram) -> Ticket:
        """Enqueues everything up to `synchronize`. A step that cannot be enqueued fails when it is collected."""
        ticket = Ticket(program)
        started = time.perf_counter_ns()
        try:
            for op in program.template.launched:
                if op.kind is OpKind.FILL:
                    self.slots[program.plan.slot].fill(program.plan)
                    started = self._host_span("fill", program.plan, started)
                else:
                    self._interpret(op, program.plan, ticket)
        except Exception as error:  # out of memory, a kernel or a model that refuses: the fault of the step alone
            ticket.cause = f"{type(error).__name__}: {one_line(error)}"
        ticket.spans = self.lanes.take()
        self._host_span("launch", program.plan, started)
        return ticket

    def collect(self, ticket: Ticket) -> TokenArray | StepFailure:
        """Waits for the step and copies its tokens out of the slot."""
        plan = ticket.program.plan
        slot = self.slots[plan.slot]
        started = time.perf_counter_ns()
        if ticket.cause:
            return self._failed(ticket.cause)
        try:
            self.lanes.synchronize(ticket.program.template.ops[-1].event)  # type: ignore[arg-type]  # names an event
        except RuntimeError as error:
            return self._failed(f"{type(error).__name__}: {one_line(error)}")
        tokens: TokenArray = slot.host_tokens[: len(plan.sampled)].numpy().copy()
        if slot.features & Features.LOGPROBS:
            self.on_logprobs(plan, slot.host_logprobs[: len(plan.sampled)].numpy().copy())
        self._host_span("collect", plan, started)
        if self.timeline is not None:
            for (lane, name, size), (start, end) in zip(ticket.names, self.lanes.read(ticket.spans), strict=True):
                self.timeline.spans.append(Span(lane.value, name, plan.step, plan.slot, start, end, size))
        return tokens

    def _failed(self, cause: str) -> StepFailure:
        """Once what was enqueued has run, the slot is free again; where nobody can tell, the step is stuck."""
        try:
            self.lanes.drain()
        except RuntimeError as error:
            return StepFailure(f"{cause}; the device does not answer any more: {one_line(error)}", stuck=True)
        return StepFailure(cause)

    def _interpret(self, op: Op, plan: StepPlan, ticket: Ticket) -> None:
        lanes, slot, kind = self.lanes, self.slots[plan.slot], op.kind
        if kind is OpKind.RECORD:
            lanes.record(op.event, op.lane)  # type: ignore[arg-type]  # names an event
        elif kind is OpKind.WAIT:
            lanes.wait(op.event, op.lane)  # type: ignore[arg-type]  # names an event
        elif kind is OpKind.CARRY:
            self._enqueue(op, ticket, plan.num_decodes, lambda: self.compute.carry(slot, plan))
        elif kind is OpKind.FORWARD:
            self._enqueue(op, ticket, plan.num_tokens, lambda: self.compute.forward(slot, plan))
        elif kind is OpKind.H2D:
            self._enqueue(op, ticket, slot.input_bytes, slot.copy_in)
        elif kind is OpKind.D2H:
            self._enqueue(op, ticket, 4 * len(plan.sampled), lambda: slot.copy_out(plan))
        elif kind is OpKind.OFFLOAD:
            self._enqueue(op, ticket, len(plan.offload.host), lambda: self.compute.offload(plan))
        elif kind is OpKind.RESTORE:
            self._enqueue(op, ticket, len(plan.restore.host), lambda: self.compute.restore(plan))
        else:
            raise NotImplementedError(f"the program has an operation that this executor does not know: {kind}")

    def _enqueue(self, op: Op, ticket: Ticket, size: int, work: Any) -> None:
        ticket.names.append((op.lane, op.kind.value, size))
        with self.lanes.on(op.lane):
            work()

    def _host_span(self, name: str, plan: StepPlan, started: int) -> int:
        """Records host work since `started`; returns now."""
        now = time.perf_counter_ns()
        if self.timeline is not None:
            self.timeline.spans.append(Span("host", name, plan.step, plan.slot, started, now, plan.num_seqs))
        return now
