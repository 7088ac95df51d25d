"""One engine in virtual time: a SimPy process that does what the pipeline asks and lets the time pass that it takes.

The host's time runs ahead of SimPy's clock, which catches up where the world may look: before commands are taken, if
anything happens until then, and when somebody who waits is told of an end. Whatever the world does at a moment comes
before what an engine does at that moment, so a command that arrives just when a plan is made is in that plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import simpy
from simpy.events import EventPriority

from asyncsched.errors import AsyncschedError
from asyncsched.metrics import ServingMetrics
from asyncsched.pipeline import Collect, Deliver, Host, Idle, Inbox, Landed, Launch, Leap, Leaped, Submit, pipeline
from asyncsched.plan import StepOutput, StepPlan, StepShape
from asyncsched.program import Template, build_program
from asyncsched.request import Finished, FinishReason, TokenArray
from asyncsched.run_log import RunLog
from asyncsched.scheduler import Scheduler
from asyncsched.timeline import LaneAccount, Timeline
from sim.costs import CostModel
from sim.lanes import HOST, Lanes
from sim.measured import MeasuredCosts, MeasuredLanes

TEXT, END = 0, 1  # the simulated model's vocabulary: a token, and the token that ends a request
AFTER_THE_WORLD = EventPriority(2)  # of an engine's events; SimPy's own are 0 and 1
MOST_AHEAD = 64  # steps of a leap that the world may cut short
MOST_UNWATCHED = 64  # steps or leaps between two events of an engine
MOST_REJECTIONS = 1_000  # whose reasons are kept; `ServingMetrics` counts all


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

    metrics         where the run is written down; none is an empty one
    leaps           pass stretches in which nothing is decided at once: the same results, sooner
    alone           nothing else in the environment happens often: a leap may end where anything does
    on_end          is told of notices at the moment they are delivered; it must not submit anything at that moment
    on_delivery     is called behind every delivery at measured prices: may hand over what has arrived since
    on_plan         is shown every plan that is made, before its host work is paid for; a leap makes none
    on_collect      is shown every plan whose tokens are there, before they are committed; a leap shows none
    """

    def __init__(
        self,
        env: simpy.Environment,
        scheduler: Scheduler,
        costs: CostModel | MeasuredCosts,
        *,
        metrics: ServingMetrics | None = None,
        timeline: Timeline | None = None,
        leaps: bool = True,
        alone: bool = True,
        on_end: Callable[[Sequence[Finished]], None] | None = None,
        on_plan: Callable[[StepPlan], None] | None = None,
        on_collect: Callable[[StepPlan], None] | None = None,
        on_delivery: Callable[[], None] | None = None,
    ) -> None:
        self.env = env
        self.scheduler = scheduler
        self.on_plan = on_plan
        self._on_collect = on_collect
        self._on_delivery = on_delivery
        self.inbox = Inbox()
        self.metrics = metrics or ServingMetrics()
        self.lanes: Lanes | MeasuredLanes = (
            MeasuredLanes(costs, timeline, scheduler.config.sliding_window)
            if isinstance(costs, MeasuredCosts)
            else Lanes(costs, scheduler.config.depth, timeline)
        )
        self.log: RunLog | None = None  # is told what happens, where somebody wants a record of the run
        self.steps = 0
        self.leaped = 0  # of these, in leaps
        self.kv_peak = 0
        self.rejections: list[str] = []
        self.ended_ns = 0
        self._alone = alone
        self._on_end = on_end
        self._leaps = leaps and not isinstance(costs, MeasuredCosts)  # measured lanes are stepped
        self._wake: simpy.Event | None = None
        self._leaping: simpy.Process | None = None  # ourselves, while a leap may be cut short
        # Where the last token of a request stands: of each that has not ended, by number; and by row of the scheduler.
        self._last_of: dict[int, int] = {}
        self._last_positions = np.zeros(scheduler.rows.capacity, dtype=np.int64)
        self._shapes = [StepShape(0, 0, 0, 0, 0, 0, 0, 0)] * scheduler.config.depth  # of the steps in flight, by slot
        self._in_flight = 0
        self._submitted = 0
        self._unwatched = 0

    @property
    def account(self) -> LaneAccount:
        return self.lanes.account

    @property
    def timeline(self) -> Timeline | None:
        return self.lanes.timeline

    def submit(self, request: Submit, last_position: int) -> None:
        """A request arrives now; the last token it will get stands at `last_position`."""
        self.arrived(last_position)
        self.inbox.put(request)
        self.notify()

    def arrived(self, last_position: int) -> None:
        """A request arrives now, and is put into the inbox by the caller."""
        number = self.metrics.num_requests
        self._last_of[number] = last_position
        self.metrics.arrived(number, int(self.env.now))

    @property
    def host_ns(self) -> int:
        """The time of what the host does next."""
        return max(self.lanes.free[HOST], int(self.env.now))

    def notify(self) -> None:
        """Something was put into the inbox, or it was closed."""
        if self._wake is not None and not self._wake.triggered:
            self._wake.succeed()
        elif self._leaping is not None:
            process, self._leaping = self._leaping, None
            process.interrupt()

    def run(self) -> Generator[simpy.Event, Any, None]:
        """The engine's process."""
        env, lanes, free = self.env, self.lanes, self.lanes.free
        depth = self.scheduler.config.depth
        loop = pipeline(self.scheduler, self.inbox, can_leap=self._leaps)
        reply: object = None
        launched: list[int] = []  # when the launches of a leap ended
        settled: tuple[StepPlan, StepShape] | None = None  # collected, and not delivered
        yield Moment(env, int(env.now))  # what arrives when it starts is in its first plan
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
                if effect.kind == "commit" and self._is_watched(free[HOST]):  # commands are taken next
                    yield Moment(env, free[HOST])
            elif isinstance(effect, Launch):
                template, plan = effect.program
                reply = template
                lanes.launch(template, plan, self._shapes[plan.slot])
                self._in_flight += 1
                if self._in_flight < depth and self._is_watched(free[HOST]):  # another plan is made at once
                    yield Moment(env, free[HOST])
            elif isinstance(effect, Collect):
                self._in_flight -= 1
                settled = effect.plan, self._shapes[effect.plan.slot]
                lanes.synchronize(effect.ticket, effect.plan)  # type: ignore[arg-type]  # as Launch was answered
                reply = self._tokens(effect.plan)
                if self._on_collect is not None:
                    self._on_collect(effect.plan)
            elif isinstance(effect, Deliver):
                if self._on_end is not None and effect.output.finished and free[HOST] > env.now:
                    yield Moment(env, free[HOST])
                self._deliver(effect.output, free[HOST])
                if isinstance(lanes, MeasuredLanes) and settled is not None and settled[0].step == effect.output.step:
                    lanes.host("deliver", *settled)
                    settled = None
                    yield Moment(env, free[HOST])
                    if self._on_delivery is not None:
                        self._on_delivery()
                    self._take_in()
            elif isinstance(effect, Leap):
                launched = yield from self._leap(effect)
                reply = self._leaped(effect, len(launched))
            elif isinstance(effect, Landed):
                reply = self._land(effect, launched)
            elif isinstance(effect, Idle):
                yield from self._idle()
        if free[HOST] > env.now:
            yield Moment(env, free[HOST])
        lanes.account.finish(free[HOST], lanes.idle)
        self.ended_ns = free[HOST]

    def _is_watched(self, time_ns: int) -> bool:
        """Whether anything happens until then; now and then also if not, for whoever steps the environment."""
        self._unwatched += 1
        if self._unwatched < MOST_UNWATCHED and self.env.peek() > time_ns:
            return False
        self._unwatched = 0
        return True

    def _planned(self, plan: StepPlan) -> None:
        self._shapes[plan.slot] = StepShape.of(plan, self.scheduler.config.sliding_window)
        self.steps += 1
        if plan.num_decodes < len(plan.rows):  # who gets a row begins with a prefill
            numbers = plan.requests[plan.num_decodes :].tolist()
            self._last_positions[plan.rows[plan.num_decodes :]] = [self._last_of[number] for number in numbers]
        if self.log is not None:
            self.log.planned(plan)
        if self.on_plan is not None:
            self.on_plan(plan)
        self._take_in()
        self.kv_peak = max(self.kv_peak, self.scheduler.residency.pool.num_held)

    def _take_in(self) -> None:
        """The host takes requests in when it comes by: behind a delivery, and before the first plan."""
        arrived = self.metrics.num_requests
        if isinstance(self.lanes, MeasuredLanes) and arrived > self._submitted:
            self.lanes.submitted(arrived - self._submitted)
        self._submitted = arrived

    def _tokens(self, plan: StepPlan) -> TokenArray:
        """What the simulated model samples: END where a request has generated all it will."""
        return (plan.sampled_ends >= self._last_positions[plan.sampled]).astype(np.int32)  # END is 1 and TEXT is 0

    def _deliver(self, output: StepOutput, now_ns: int) -> None:
        self.metrics.delivered(output, now_ns)
        if self.log is not None:
            self.log.delivered(now_ns, output)
        for notice in output.finished:
            del self._last_of[notice.number]
            if notice.reason is FinishReason.REJECTED and len(self.rejections) < MOST_REJECTIONS:
                self.rejections.append(f"request {notice.request_id}: {notice.message}")
        if output.finished and self._on_end is not None:
            self._on_end(output.finished)

    def _leap(self, effect: Leap) -> Generator[simpy.Event, Any, list[int]]:
        """Advances the lanes over as many steps as begin before the world does anything, or a request stops, and lets
        that time pass. When each launch ended; nothing for no leap."""
        stretch, in_flight, output = effect
        assert isinstance(self.lanes, Lanes)  # others do not leap
        lanes, costs = self.lanes, self.lanes.costs
        until = self.env.peek() if self._alone else math.inf
        # Of the tokens that are collected none must be END but where a row reaches its length limit.
        steps, ahead = stretch.steps, len(in_flight)
        until_end = self._last_positions[stretch.rows] - stretch.starts
        by_content = until_end < stretch.left
        if True in by_content.tobytes():
            steps = min(steps, int(np.minimum.reduce(until_end[by_content])) + ahead - 1)
        if not self._alone:
            steps = min(steps, MOST_AHEAD)
        if self._on_end is not None:  # they are told when it happens, which is not in a leap
            if output is not None and output.finished:
                return []
            steps = min(steps, stretch.together + ahead - 1)
            ending = (place for place, plan in enumerate(in_flight) if END in self._tokens(plan))
            steps = min(steps, next(ending, steps) + 1)
        if steps < 2:
            return []
        commits = [costs.host_ns("commit", self._shapes[plan.slot], plan.step) for plan in in_flight]
        before = None if self._alone else lanes.state()
        launched = lanes.decode(stretch, steps, in_flight, commits, until)
        if before is not None:
            self._leaping = self.env.active_process
            try:
                yield Moment(self.env, lanes.free[HOST])
                self._leaping = None
                return launched
            except simpy.Interrupt:
                lanes.restore(before)
                launched = lanes.decode(stretch, steps, in_flight, commits, self.env.now)
        if launched and self._is_watched(lanes.free[HOST]):
            yield Moment(self.env, lanes.free[HOST])
        return launched

    def _land(self, effect: Landed, launched: list[int]) -> list[Template]:
        """Hands out what a leap gave, each output behind the launch after its commit. The tickets of what is in flight
        now."""
        stretch, passed, output = effect
        self.steps += len(launched)
        self.leaped += len(launched)
        self.kv_peak = max(self.kv_peak, passed.most_held)
        if output is not None:
            self._deliver(output, launched[0])
        early, metrics = len(passed.outputs), self.metrics
        for one, time_ns in zip(passed.outputs, launched[1:], strict=False):
            self._deliver(one, time_ns)
        if passed.repeated:
            times = launched[1 + early : 1 + early + passed.repeated]
            together = passed.repeated <= stretch.together + passed.behind
            metrics.delivered_each(stretch.requests, times, None if together else stretch.left + passed.behind)
            metrics.finished(passed.finished)
            for notice in passed.finished:
                del self._last_of[notice.number]
        for plan in passed.in_flight:
            if plan.step >= stretch.step:
                self._shapes[plan.slot] = StepShape.of(plan)
        return [build_program(plan).template for plan in passed.in_flight]

    def _leaped(self, effect: Leap, steps: int) -> Leaped:
        """What the steps of a leap sampled."""
        stretch = effect.stretch
        tokens = [self._tokens(plan) for plan in effect.in_flight[:steps]]
        last = self._last_positions[stretch.rows]
        return Leaped(steps, tokens, TEXT, (stretch.starts + stretch.left >= last).astype(np.int32))

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
