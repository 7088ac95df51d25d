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
from simpy.events import EventPriority

from asyncsched.errors import AsyncschedError
from asyncsched.metrics import ServingMetrics
from asyncsched.pipeline import Collect, Deliver, Host, Idle, Inbox, Landed, Launch, Leap, Leaped, pipeline
from asyncsched.plan import StepOutput, StepPlan, StepShape
from asyncsched.program import Template, build_program
from asyncsched.request import FinishReason, TokenArray
from asyncsched.run_log import RunLog
from asyncsched.scheduler import Scheduler
from asyncsched.stretch import Stretch
from asyncsched.timeline import LaneAccount, Timeline
from sim.costs import CostModel
from sim.lanes import HOST, Lanes
from sim.measured import MeasuredCosts, MeasuredLanes

TEXT, END = 0, 1  # the simulated model's vocabulary: a token, and the token that ends a request
AFTER_THE_WORLD = EventPriority(2)  # of an engine's events; SimPy's own are 0 and 1


class StuckError(AsyncschedError):
    """Requests are left, nothing is in flight and nothing will arrive: a fault of the scheduler or of a policy."""


class Moment(simpy.Event):
    """Happens at `time_ns`, after all that the world does then."""

    def __init__(self, env: simpy.Environment, time_ns: int) -> None:
        super().__init__(env)
        self._ok, self._value = True, None
        env.schedule(self, AFTER_THE_WORLD, time_ns - env.now)


class SimEngine:
    """Interprets one scheduler's programs.

    last_positions  where the last token of each request will stand, by number
    leaps           pass stretches in which nothing is decided at once: the same results, sooner
    """

    def __init__(
        self,
        env: simpy.Environment,
        scheduler: Scheduler,
        costs: CostModel | MeasuredCosts,
        last_positions: NDArray[np.int64],
        *,
        timeline: Timeline | None = None,
        leaps: bool = True,
    ) -> None:
        self.env = env
        self.scheduler = scheduler
        self.inbox = Inbox()
        self.metrics = ServingMetrics()
        self.lanes: Lanes | MeasuredLanes = (
            MeasuredLanes(costs, timeline)
            if isinstance(costs, MeasuredCosts)
            else Lanes(costs, scheduler.config.depth, timeline)
        )
        self.log: RunLog | None = None  # is told what happens, where somebody wants a record of the run
        self.steps = 0
        self.leaped = 0  # of these, in leaps
        self.kv_peak = 0
        self.rejections: list[str] = []
        self._last_positions = last_positions
        self._leaps = leaps and not isinstance(costs, MeasuredCosts)  # measured lanes are stepped
        self._stops = True
        self._pace_ns = 1  # of a step in the last leap: how many prices the next one may need
        self._wake: simpy.Event | None = None
        self._end: simpy.Event | None = None
        self._shapes = [StepShape(0, 0, 0, 0, 0, 0, 0, 0)] * scheduler.config.depth  # of the steps in flight, by slot
        self._in_flight = 0
        self._submitted = 0

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
        loop = pipeline(self.scheduler, self.inbox, leaps=self._leaps)
        reply: object = None
        times: list[int] = []  # of the commits of a leap
        settled: StepPlan | None = None  # collected, and not delivered
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
                settled = effect.plan
                lanes.synchronize(effect.ticket, effect.plan)  # type: ignore[arg-type]  # as Launch was answered
                reply = self._tokens(effect.plan)
            elif isinstance(effect, Deliver):
                if free[HOST] > env.now:
                    yield Moment(env, free[HOST])
                self._deliver(effect.output, free[HOST])
                if isinstance(lanes, MeasuredLanes) and settled is not None:
                    lanes.host("deliver", settled, self._shapes[settled.slot])
                    settled = None
                    yield Moment(env, free[HOST])
            elif isinstance(effect, Leap):
                times, reply = self._leap(effect)
                if times:
                    yield Moment(env, times[-1])
            elif isinstance(effect, Landed):
                reply = self._land(effect, times)
            elif isinstance(effect, Idle):
                yield from self._idle()
        lanes.account.finish(free[HOST], lanes.idle)

    def _planned(self, plan: StepPlan) -> None:
        self._shapes[plan.slot] = StepShape.of(plan, self.scheduler.config.sliding_window)
        self.steps += 1
        if self.log is not None:
            self.log.planned(plan)
        if isinstance(self.lanes, MeasuredLanes):
            submitted = self.scheduler.counts.submitted
            self.lanes.submitted(submitted - self._submitted)
            self._submitted = submitted
        self.kv_peak = max(self.kv_peak, self.scheduler.residency.pool.num_held)

    def _tokens(self, plan: StepPlan) -> TokenArray:
        """What the simulated model samples: END where a request has generated all it will."""
        last = self._last_positions[self.scheduler.rows.request[plan.sampled]]
        return (plan.sampled_ends >= last).astype(np.int32)  # END is 1 and TEXT is 0

    def _deliver(self, output: StepOutput, now_ns: int) -> None:
        self.metrics.delivered(output, now_ns)
        if self.log is not None:
            self.log.delivered(now_ns, output)
        if output.finished and self._end is not None:
            self._end.succeed()
            self._end = None
        for notice in output.finished:
            if notice.reason is FinishReason.REJECTED:
                self.rejections.append(f"request {notice.request_id}: {notice.message}")

    def _leap(self, effect: Leap) -> tuple[list[int], Leaped]:
        """Advances the lanes over as many steps as begin before the world does anything, or a request stops."""
        stretch, in_flight = effect
        assert isinstance(self.lanes, Lanes)  # others do not leap
        lanes, costs, until = self.lanes, self.lanes.costs, self.env.peek()
        steps = stretch.steps
        if self._stops:  # END must not be among the tokens that are collected
            left = self._last_positions[stretch.requests] - stretch.starts
            steps = min(steps, int(left.min()) + len(in_flight) - 1)
        if until < float("inf"):  # a guess, which costs another leap if it is too low
            steps = min(steps, int(until - lanes.free[HOST]) // self._pace_ns + 2)
        if self._end is not None:  # whoever waits for an end is told when it happens
            ending = (place for place, plan in enumerate(in_flight) if END in self._tokens(plan))
            steps = min(steps, next(ending, steps) + 1)
        if steps < 2:
            return [], Leaped(0)
        prices = costs.decode_prices(self._decode_shape(stretch, 0), stretch.step, steps)
        commits = [costs.host_ns("commit", self._shapes[plan.slot], plan.step) for plan in in_flight]
        begun = lanes.free[HOST]
        times = lanes.decode(stretch, in_flight, prices, commits + prices.commit, until)
        if not times:
            return [], Leaped(0)
        self._pace_ns = max((times[-1] - begun) // len(times), 1)
        return times, Leaped(len(times), [self._tokens(plan) for plan in in_flight[: len(times)]], TEXT)

    def _land(self, effect: Landed, times: list[int]) -> list[Template]:
        """Hands out what a leap gave, at the times it was ready; the tickets of what is in flight now."""
        stretch, passed = effect
        self.steps += len(times)
        self.leaped += len(times)
        self.kv_peak = max(self.kv_peak, passed.most_held)
        for output, time_ns in zip(passed.outputs, times, strict=False):
            self._deliver(output, time_ns)
        if passed.commits:
            self.metrics.delivered_each(stretch.requests, times[len(passed.outputs) :])
        for plan in passed.in_flight:
            if plan.step >= stretch.step:
                self._shapes[plan.slot] = self._decode_shape(stretch, plan.step - stretch.step)
        return [build_program(plan).template for plan in passed.in_flight]

    def _decode_shape(self, stretch: Stretch, place: int) -> StepShape:
        n = len(stretch.rows)
        kv_tokens = int(np.add.reduce(stretch.starts)) + n * (place + 1)
        return StepShape(n, n, 0, n, n, kv_tokens, kv_tokens, stretch.bucket, 0, 0, stretch.mixed_bucket)

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
