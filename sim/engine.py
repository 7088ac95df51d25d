"""One engine in virtual time: a SimPy process that does what the pipeline asks and lets the time pass that it takes.

The host's time runs ahead of SimPy's clock, which catches up where the world may look: before commands are taken and
when something is delivered. Whatever the world does at a moment comes before what an engine does at that moment, so
a command that arrives just when a plan is made is in that plan.
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
from asyncsched.request import FinishReason, TokenArray
from asyncsched.scheduler import Scheduler
from asyncsched.timeline import LaneAccount, Timeline
from sim.costs import CostModel
from sim.lanes import HOST, Lanes

TEXT, END = 0, 1  # the simulated model's vocabulary: a token, and the token that ends a request
AFTER_THE_WORLD = 2  # priority of an engine's events; SimPy's own are 0 and 1


class StuckError(AsyncschedError):
    """Requests are left, nothing is in flight and nothing will arrive: a fault of the scheduler or of a policy."""


class Moment(simpy.Event):
    """Happens at `time_ns`, after all that the world does then."""

    def __init__(self, env: simpy.Environment, time_ns: int) -> None:
        super().__init__(env)
        self._ok, self._value = True, None
        env.schedule(self, AFTER_THE_WORLD, time_ns - env.now)


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
        self.inbox = Inbox()
        self.metrics = ServingMetrics()
        self.lanes = Lanes(costs, scheduler.config.depth, timeline)
        self.steps = 0
        self.kv_peak = 0
        self.rejections: list[str] = []
        self._last_positions = last_positions
        self._wake: simpy.Event | None = None
        self._end: simpy.Event | None = None
        self._shapes = [StepShape(0, 0, 0, 0, 0, 0, 0, 0)] * scheduler.config.depth  # of the steps in flight, by slot
        self._in_flight = 0

    @property
    def account(self) -> LaneAccount:
        return self.lanes.account

    @property
    def timeline(self) -> Timeline | None:
        return self.lanes.timeline

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
        """The engine's process."""
        env, lanes, free = self.env, self.lanes, self.lanes.free
        depth = self.scheduler.config.depth
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
                lanes.host(effect.kind, effect.plan, self._shapes[effect.plan.slot])
            elif isinstance(effect, Launch):
                template, plan = effect.program
                reply = template
                lanes.launch(template, plan, self._shapes[plan.slot])
                self._in_flight += 1
                if self._in_flight < depth:  # another plan is made before anything is collected
                    yield Moment(env, free[HOST])
            elif isinstance(effect, Collect):
                self._in_flight -= 1
                lanes.synchronize(effect.ticket, effect.plan)  # type: ignore[arg-type]  # as Launch was answered
                reply = self._tokens(effect.plan)
            elif isinstance(effect, Deliver):
                if free[HOST] > env.now:
                    yield Moment(env, free[HOST])
                self._deliver(effect.output)
            elif isinstance(effect, Idle):
                yield from self._idle()
        lanes.account.finish(free[HOST], lanes.idle)

    def _planned(self, plan: StepPlan) -> None:
        self._shapes[plan.slot] = StepShape.of(plan, self.scheduler.config.sliding_window)
        self.steps += 1
        self.kv_peak = max(self.kv_peak, self.scheduler.residency.pool.num_held)

    def _tokens(self, plan: StepPlan) -> TokenArray:
        """What the simulated model samples: END where a request has generated all it will."""
        last = self._last_positions[self.scheduler.rows.request[plan.sampled]]
        return (plan.sampled_ends >= last).astype(np.int32)  # END is 1 and TEXT is 0

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
        self._wake = self.env.event()
        yield self._wake
        self._wake = None
        yield Moment(self.env, int(self.env.now))  # what else arrives at this moment
        self.lanes.rest(int(self.env.now))
