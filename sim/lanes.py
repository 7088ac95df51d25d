"""The lanes of one engine in virtual time, as arithmetic.

Lanes are FIFO and an operation's duration is known when it is enqueued, so when it ends is the later of its lane, its
waits and its enqueuing, plus its duration. Order comes from the program alone: a template is translated once into
small integers, which the interpreter below runs for every step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from asyncsched.plan import StepPlan, StepShape
from asyncsched.program import Event, EventKind, Lane, OpKind, Template
from asyncsched.stretch import Stretch
from asyncsched.timeline import LaneAccount, Span, StepTimes, Timeline
from sim.costs import CostModel, DecodePricer, d2h_bytes, h2d_bytes
from sim.course import Course, StepMoments

HOST, H2D, COMPUTE, D2H = range(4)  # lanes
FILL, LAUNCH, RECORD, WAIT, COPY_IN, RESTORE, FORWARD, OFFLOAD, COPY_OUT = range(9)  # what the interpreter does

_LANES = {Lane.HOST: HOST, Lane.H2D: H2D, Lane.COMPUTE: COMPUTE, Lane.D2H: D2H}
_EVENTS = {kind: place for place, kind in enumerate(EventKind)}
_RETURNED = _EVENTS[EventKind.D2H_DONE]
_CODES = {
    OpKind.FILL: FILL,
    OpKind.RECORD: RECORD,
    OpKind.WAIT: WAIT,
    OpKind.H2D: COPY_IN,
    OpKind.RESTORE: RESTORE,
    OpKind.FORWARD: FORWARD,
    OpKind.OFFLOAD: OFFLOAD,
    OpKind.D2H: COPY_OUT,
}


class Translated(NamedTuple):
    """A template for the interpreter: (code, lane, place of the event) of each operation that is launched, and the
    place of the event that `synchronize` waits for."""

    template: Template
    launched: tuple[tuple[int, int, int], ...]
    synchronized: int


class LaneState(NamedTuple):
    """What changes in `Lanes`, and how many spans there were."""

    free: list[int]
    recorded: list[int]
    gate: int
    idle: int
    busy: dict[str, int]
    idle_by_cause: dict[str, int]
    last_end_ns: int
    spans: int


class Lanes:
    """When each lane is free and each event was recorded, in nanoseconds; and what the lanes were busy with."""

    def __init__(self, costs: CostModel, depth: int, timeline: Timeline | None) -> None:
        self.costs = costs
        self.depth = depth
        self.timeline = timeline
        self.account = LaneAccount()
        self.free = [0, 0, 0, 0]
        self.recorded = [0] * (len(_EVENTS) * depth)
        self.gate = 0  # no forward pass before this: exposed output synchronization
        self.idle = 0  # time without work since the last launch
        self._pace_ns = 1  # of the newest step of a stretch
        self._pricers: dict[int, DecodePricer] = {}  # by sequences
        self._known: dict[int, Translated] = {}

    def host(self, kind: str, plan: StepPlan, shape: StepShape) -> None:
        """Host work: the host's clock advances by its price."""
        start = self.free[HOST]
        duration = self.costs.host_ns(kind, shape, plan.step)
        self.free[HOST] = start + duration
        self.account.busy["host"] += duration
        if self.timeline is not None:
            self._span("host", kind, plan, start, start + duration, shape.num_seqs)

    def launch(self, template: Template, plan: StepPlan, shape: StepShape) -> None:
        """Enqueues a program, up to its `synchronize`."""
        free, recorded, costs, step = self.free, self.recorded, self.costs, plan.step
        for code, lane, event in self._translated(template).launched:
            if code == WAIT:
                if recorded[event] > free[lane]:
                    free[lane] = recorded[event]
            elif code == RECORD:
                recorded[event] = free[lane]
            elif code == FILL:
                self.host("fill", plan, shape)
            elif code == LAUNCH:
                self.host("launch", plan, shape)
            elif code == COPY_IN:
                self._copy(lane, "h2d", "h2d", plan, costs.h2d_ns(shape, step), h2d_bytes(shape))
            elif code == FORWARD:  # the price of the carry-over is in that of the forward pass
                self._forward(plan, costs.forward_ns(shape, step) if plan.num_tokens else 0)
            elif code == COPY_OUT:
                self._copy(lane, "d2h", "d2h", plan, costs.d2h_ns(shape, step), d2h_bytes(shape))
            elif code == RESTORE:
                self._copy(lane, "h2d", "restore", plan, costs.restore_ns(shape, step), shape.restored_blocks)
            else:
                self._copy(lane, "d2h", "offload", plan, costs.offload_ns(shape, step), shape.offloaded_blocks)

    def synchronize(self, template: Template, plan: StepPlan) -> None:
        """Blocks the host until the step's output has reached it."""
        start = self.free[HOST]
        end = max(start, self.recorded[self._translated(template).synchronized])
        self.free[HOST] = end
        if self.timeline is not None:
            self._span("host", "collect", plan, start, end, len(plan.sampled))

    def decode(
        self, stretch: Stretch, steps: int, in_flight: Sequence[StepPlan], commits: Sequence[int], until: float
    ) -> list[int]:
        """Launches `steps` steps of a stretch one after the other and commits the oldest each time, as long as a plan
        is made before `until`: what `launch`, `synchronize` and `host` do for the operations of a decode step. When
        each launch ended.

        commits  what committing each of the steps in flight takes
        """
        account, ahead, sync = self.account, len(in_flight), self.costs.output_sync_ns()
        returns = [self.recorded[self._returned(plan.slot)] for plan in in_flight]
        times: list[StepMoments] | None = None if self.timeline is None else []
        flying = zip(returns, commits, strict=True)
        course = Course(self.free, self.gate, self.idle, account.last_end_ns, sync, flying, times)
        launches = course.launches
        for first, end, n, starts in stretch.parts(steps):
            if course.host >= until:
                break
            pricer = self._pricers.get(n) or self._pricer(stretch, n)
            while first < end and course.host < until:
                count = end - first
                if until != math.inf:  # about as many as there is time for; there is another round if it was more
                    time_ns = int(until) - max(course.host, course.compute)
                    count = min(count, max(time_ns, 0) // self._pace_ns + ahead + 2)
                prices = pricer(starts + n * (first + 1), stretch.step + first, count)
                self._pace_ns = max(prices.forward[-1] + sync, 1)
                before = len(launches)
                course.take(prices, until)
                first += len(launches) - before
        self.free[:] = course.host, course.h2d, course.compute, course.d2h
        self.gate, self.idle, account.last_end_ns = course.gate, course.idle, course.last
        for place, (returned, _) in enumerate(course.flying, len(launches) - ahead):
            slot = in_flight[place].slot if place < 0 else stretch.slots[place % self.depth]
            self.recorded[self._returned(slot)] = returned
        account.add(course.busy, course.waited)
        if times:
            self._decode_spans(stretch, in_flight, times)
        return launches

    def state(self) -> LaneState:
        """For `restore`."""
        account = self.account
        spans = 0 if self.timeline is None else len(self.timeline.spans)
        return LaneState(
            [*self.free],
            [*self.recorded],
            self.gate,
            self.idle,
            {**account.busy},
            {**account.idle},
            account.last_end_ns,
            spans,
        )

    def restore(self, state: LaneState) -> None:
        """Undoes everything since `state` was asked for."""
        account = self.account
        self.free[:], self.recorded[:], self.gate, self.idle, busy, idle, account.last_end_ns, spans = state
        account.busy.update(busy)
        account.idle.update(idle)
        if self.timeline is not None:
            del self.timeline.spans[spans:]

    def rest(self, until_ns: int) -> None:
        """The host had nothing to do until then."""
        start = self.free[HOST]
        self.free[HOST] = end = max(start, until_ns)
        self.idle += end - start

    def _copy(self, lane: int, lane_name: str, name: str, plan: StepPlan, duration: int, size: int) -> None:
        free = self.free
        start = max(free[lane], free[HOST])
        free[lane] = start + duration
        self.account.busy[lane_name] += duration
        if self.timeline is not None:
            self._span(lane_name, name, plan, start, start + duration, size)

    def _forward(self, plan: StepPlan, duration: int) -> None:
        enqueued, output_sync = self.free[HOST], self.costs.output_sync_ns()
        start = max(enqueued, self.free[COMPUTE], self.gate)
        end = start + duration
        self.free[COMPUTE] = end
        self.account.step(StepTimes(enqueued, start, end, self.idle, output_sync))
        self.gate = end + output_sync
        self.idle = 0
        if self.timeline is not None:
            self._span("compute", "forward", plan, start, end, plan.num_tokens)

    def _decode_spans(self, stretch: Stretch, in_flight: Sequence[StepPlan], moments: Sequence[StepMoments]) -> None:
        """The spans that stepping would have recorded, in its order."""
        for place, at in enumerate(moments):
            plan = stretch.plan(place)
            shape = StepShape.of(plan)
            old = in_flight[place] if place < len(in_flight) else stretch.plan(place - len(in_flight))
            self._span("host", "plan", plan, at.begun, at.planned, plan.num_seqs)
            self._span("host", "fill", plan, at.planned, at.filled, plan.num_seqs)
            self._span("h2d", "h2d", plan, at.copied, at.h2d, h2d_bytes(shape))
            self._span("host", "launch", plan, at.filled, at.launched, plan.num_seqs)
            self._span("compute", "forward", plan, at.started, at.computed, plan.num_tokens)
            self._span("d2h", "d2h", plan, at.read, at.d2h, d2h_bytes(shape))
            self._span("host", "collect", old, at.launched, at.collected, len(old.sampled))
            self._span("host", "commit", old, at.collected, at.committed, old.num_seqs)

    def _pricer(self, stretch: Stretch, n: int) -> DecodePricer:
        bucket, mixed_bucket = stretch.padded(n)
        shape = StepShape(n, n, 0, n, n, n, n, bucket, 0, 0, mixed_bucket)
        pricer = self._pricers[n] = self.costs.decode_pricer(shape)
        return pricer

    def _span(self, lane: str, name: str, plan: StepPlan, start: int, end: int, size: int) -> None:
        assert self.timeline is not None  # spans are kept
        self.timeline.spans.append(Span(lane, name, plan.step, plan.slot, start, end, size))

    def _translated(self, template: Template) -> Translated:
        """Templates are made once, so their identity is their name; keeping the template keeps the name its own."""
        known = self._known.get(id(template))
        if known is None:
            known = self._known[id(template)] = self._translate(template)
        return known

    def _translate(self, template: Template) -> Translated:
        """Launching is paid for where the first compute operation is enqueued."""
        ops: list[tuple[int, int, int]] = []
        launched = False
        for op in template.launched:
            if op.lane is Lane.COMPUTE and not launched:
                launched = True
                ops.append((LAUNCH, HOST, -1))
            if op.kind is not OpKind.CARRY:
                ops.append((_CODES[op.kind], _LANES[op.lane], self._place(op.event)))
        return Translated(template, tuple(ops), self._place(template.ops[-1].event))

    def _returned(self, slot: int) -> int:
        """The place of the event that says that a step's output has reached the host."""
        return _RETURNED * self.depth + slot

    def _place(self, event: Event | None) -> int:
        """Of an event in `recorded`."""
        return -1 if event is None else _EVENTS[event.kind] * self.depth + event.slot
