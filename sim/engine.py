"""One engine in virtual time: a SimPy process that does what the pipeline asks and lets the time pass that it takes.

Lanes are FIFO and an operation's duration is known when it is enqueued, so when it ends is arithmetic: the later of its
lane, its waits and its enqueuing, plus its duration. SimPy carries what the host does and what the world does to
it; lanes need no events of their own. Order comes from the program alone.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray

from asyncsched.errors import AsyncschedError
from asyncsched.metrics import ServingMetrics
from asyncsched.pipeline import Collect, Deliver, Host, Idle, Inbox, Launch, pipeline
from asyncsched.plan import StepOutput, StepPlan, StepShape
from asyncsched.program import Event, Lane, Op, OpKind, StepProgram
from asyncsched.request import FinishReason, TokenArray
from asyncsched.scheduler import Scheduler
from asyncsched.timeline import LaneAccount, Span, StepTimes, Timeline
from sim.costs import CostModel, d2h_bytes, h2d_bytes

TEXT, END = 0, 1  # the simulated model's vocabulary: a token, and the token that ends a request


class StuckError(AsyncschedError):
    """Requests are left, nothing is in flight and nothing will arrive: a fault of the scheduler or of a policy."""


class SimEngine:
    """Interprets one scheduler's programs. `last_positions[i]` is where the last token of request i will stand."""

    def __init__(
        self,
        env: simpy.Environment,
        scheduler: Scheduler,
        costs: CostModel,
        last_positions: NDArray[np.int64],
        *,
        timeline: Timeline | None = None,
    ) -> None:
        self.env = env
        self.scheduler = scheduler
        self.costs = costs
        self.inbox = Inbox()
        self.metrics = ServingMetrics()
        self.account = LaneAccount()
        self.timeline = timeline
        self.steps = 0
        self.kv_peak = 0
        self.rejections: list[str] = []
        self._last_positions = last_positions
        self._wake: simpy.Event | None = None
        self._end: simpy.Event | None = None
        self._free_ns = dict.fromkeys(Lane, 0)
        self._recorded_ns: dict[Event, int] = {}
        self._gate_ns = 0  # no forward pass before this: exposed output synchronization
        self._idle_ns = 0  # time without work since the last launch
        self._shape = StepShape(0, 0, 0, 0, 0, 0, 0, 0)

    def notify(self) -> None:
        """Something was put into the inbox, or it was closed."""
        if self._wake is not None and not self._wake.triggered:
            self._wake.succeed()

    def next_end(self) -> simpy.Event:
        """Happens when users are told that some request has ended."""
        if self._end is None:
            self._end = self.env.event()
        return self._end

    def run(self) -> Generator[simpy.Event, Any, None]:
        """The engine's process. The host's time runs ahead of the clock, which catches up where the world may look."""
        env, free = self.env, self._free_ns
        loop = pipeline(self.scheduler, self.inbox)
        reply: object = None
        while True:
            try:
                effect = loop.send(reply)
            except StopIteration:
                break
            reply = None
            if isinstance(effect, Host):
                if effect.kind == "plan":
                    self._planned(effect.plan)
                self._host(effect.kind, effect.plan)
            elif isinstance(effect, Launch):
                self._launch(effect.program)
                reply = effect.program
                yield env.timeout(free[Lane.HOST] - env.now)
            elif isinstance(effect, Collect):
                reply = self._collect(effect)
            elif isinstance(effect, Deliver):
                if free[Lane.HOST] > env.now:
                    yield env.timeout(free[Lane.HOST] - env.now)
                self._deliver(effect.output)
            elif isinstance(effect, Idle):
                yield from self._idle()
        self.account.finish(free[Lane.HOST], self._idle_ns)

    def _planned(self, plan: StepPlan) -> None:
        self._shape = StepShape.of(plan, self.scheduler.config.sliding_window)
        self.steps += 1
        self.kv_peak = max(self.kv_peak, self.scheduler.residency.pool.num_held)

    def _host(self, kind: str, plan: StepPlan) -> None:
        """Host work: the host's clock advances by its price."""
        shape = self._shape if kind != "commit" else StepShape.of(plan, self.scheduler.config.sliding_window)
        start = self._free_ns[Lane.HOST]
        duration = self.costs.host_ns(kind, shape, plan.step)
        self._free_ns[Lane.HOST] = start + duration
        self.account.busy["host"] += duration
        self._span(Lane.HOST, kind, plan, start, start + duration, plan.num_seqs)

    def _launch(self, program: StepProgram) -> None:
        """Enqueues the program; launching is paid for where the first compute operation is enqueued."""
        free, recorded, costs = self._free_ns, self._recorded_ns, self.costs
        plan, shape = program.plan, self._shape
        step = plan.step
        launched = False
        for op in program.template.launched:
            lane, kind = op.lane, op.kind
            if lane is Lane.COMPUTE and not launched:
                launched = True
                self._host("launch", plan)
            if kind is OpKind.RECORD:
                recorded[op.event] = free[lane]  # type: ignore[index]  # records name an event
            elif kind is OpKind.WAIT:
                free[lane] = max(free[lane], recorded[op.event])  # type: ignore[index]  # waits name an event
            elif kind is OpKind.FILL:
                self._host("fill", plan)
            elif kind is OpKind.H2D:
                self._copy(op, costs.h2d_ns(shape, step), plan, h2d_bytes(shape))
            elif kind is OpKind.RESTORE:
                self._copy(op, costs.restore_ns(shape, step), plan, shape.restored_blocks)
            elif kind is OpKind.OFFLOAD:
                self._copy(op, costs.offload_ns(shape, step), plan, shape.offloaded_blocks)
            elif kind is OpKind.FORWARD:  # the price of the carry-over is in that of the forward pass
                self._forward(plan, costs.forward_ns(shape, step) if plan.num_tokens else 0)
            elif kind is OpKind.D2H:
                self._copy(op, costs.d2h_ns(shape, step), plan, d2h_bytes(shape))

    def _copy(self, op: Op, duration: int, plan: StepPlan, size: int) -> None:
        lane = op.lane
        start = max(self._free_ns[lane], self._free_ns[Lane.HOST])
        self._free_ns[lane] = start + duration
        self.account.busy[lane.value] += duration
        self._span(lane, op.kind.value, plan, start, start + duration, size)

    def _forward(self, plan: StepPlan, duration: int) -> None:
        enqueued, output_sync = self._free_ns[Lane.HOST], self.costs.output_sync_ns()
        start = max(enqueued, self._free_ns[Lane.COMPUTE], self._gate_ns)
        end = start + duration
        self._free_ns[Lane.COMPUTE] = end
        self.account.step(StepTimes(enqueued, start, end, self._idle_ns, output_sync))
        self._gate_ns = end + output_sync
        self._idle_ns = 0
        self._span(Lane.COMPUTE, "forward", plan, start, end, plan.num_tokens)

    def _collect(self, effect: Collect) -> TokenArray:
        """Blocks the host until the step's output is there, and reads it."""
        plan = effect.plan
        synchronize = effect.ticket.template.ops[-1]  # type: ignore[attr-defined]  # the ticket is the program
        start = self._free_ns[Lane.HOST]
        end = max(start, self._recorded_ns[synchronize.event])
        self._free_ns[Lane.HOST] = end
        self._span(Lane.HOST, "collect", plan, start, end, len(plan.sampled))
        return self._tokens(plan)

    def _tokens(self, plan: StepPlan) -> TokenArray:
        """What the simulated model samples: END where a request has generated all it will."""
        last = self._last_positions[self.scheduler.rows.request[plan.sampled]]
        return np.where(plan.sampled_ends >= last, END, TEXT).astype(np.int32)

    def _deliver(self, output: StepOutput) -> None:
        self.metrics.delivered(output, int(self.env.now))
        if output.finished and self._end is not None:
            self._end.succeed()
            self._end = None
        for notice in output.finished:
            if notice.reason is FinishReason.REJECTED:
                self.rejections.append(f"request {notice.request_id}: {notice.message}")

    def _idle(self) -> Generator[simpy.Event, Any, None]:
        if len(self.inbox):  # something came while notices were delivered
            return
        if self.inbox.closed:
            raise StuckError(f"{self.scheduler.counts} with {self.scheduler.residency.pool.available} blocks available")
        start = self._free_ns[Lane.HOST]
        self._wake = self.env.event()
        yield self._wake
        self._wake = None
        self._free_ns[Lane.HOST] = max(start, int(self.env.now))
        self._idle_ns += self._free_ns[Lane.HOST] - start

    def _span(self, lane: Lane, name: str, plan: StepPlan, start: int, end: int, size: int) -> None:
        if self.timeline is not None:
            self.timeline.spans.append(Span(lane.value, name, plan.step, plan.slot, start, end, size))
