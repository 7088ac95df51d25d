"""The lanes of one engine in virtual time, as arithmetic.

Lanes are FIFO and an operation's duration is known when it is enqueued, so when it ends is the later of its lane, its
waits and its enqueuing, plus its duration. Order comes from the program alone: a template is translated once into
small integers, which the interpreter below runs for every step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from asyncsched.plan import StepPlan, StepShape
from asyncsched.program import Event, EventKind, Lane, OpKind, Template
from asyncsched.stretch import Stretch
from asyncsched.timeline import LaneAccount, Span, StepTimes, Timeline
from sim.costs import CostModel, DecodePrices, d2h_bytes, h2d_bytes

HOST, H2D, COMPUTE, D2H = range(4)  # lanes
FILL, LAUNCH, RECORD, WAIT, COPY_IN, RESTORE, FORWARD, OFFLOAD, COPY_OUT = range(9)  # what the interpreter does

_LANES = {Lane.HOST: HOST, Lane.H2D: H2D, Lane.COMPUTE: COMPUTE, Lane.D2H: D2H}
_EVENTS = {kind: place for place, kind in enumerate(EventKind)}
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


class Course(NamedTuple):
    """When, in each of several iterations of the pipeline's loop, the launch and the commit ended."""

    launched: list[int]
    committed: list[int]


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
        self, stretch: Stretch, in_flight: Sequence[StepPlan], prices: DecodePrices, commits: list[int], until: float
    ) -> Course:
        """Launches the steps of a stretch one after the other and commits the oldest each time, as long as a plan is
        made before `until`.

        prices   of the stretch's steps
        commits  of the steps that are committed, those in flight first

        It is what `launch`, `synchronize` and `host` do for the operations of a decode step, with all state in local
        variables: a change to the step program is a change to be made here.
        """
        account, sync = self.account, self.costs.output_sync_ns()
        host, h2d, compute, d2h = self.free
        gate, idle, last = self.gate, self.idle, account.last_end_ns
        host_wait = h2d_wait = sync_wait = no_work = 0
        flying = deque([self.recorded[self._returned(plan.slot)] for plan in in_flight])
        details: list[tuple[int, ...]] | None = None if self.timeline is None else []
        launches: list[int] = []
        times: list[int] = []
        for plan, fill, launch, copy_in, forward, copy_out, commit in zip(*prices[:6], commits, strict=False):
            if host >= until:
                break
            begun = host
            host += plan + fill
            filled = host
            copied = host if host > h2d else h2d
            h2d = copied + copy_in
            host += launch
            launched = host
            launches.append(host)
            start = gate if gate > compute else compute
            if h2d > start:
                start = h2d
            if host > start:
                start = host
            if start > last:  # as LaneAccount.step has it
                free = min(last + sync, start)
                ready = min(max(free, host), start)
                unused = min(idle, ready - free)
                sync_wait += free - last
                no_work += unused
                host_wait += ready - free - unused
                h2d_wait += start - ready
            idle = 0
            last = compute = start + forward
            gate = compute + sync
            read = compute if compute > d2h else d2h
            d2h = read + copy_out
            flying.append(d2h)
            done = flying.popleft()
            if done > host:
                host = done
            if details is not None:
                details.append((begun, begun + plan, filled, copied, h2d, launched, start, compute, read, d2h, host))
            host += commit
            times.append(host)
        count = len(times)
        self.free[:] = host, h2d, compute, d2h
        self.gate, self.idle = gate, idle
        for place, returned in enumerate(flying, count - len(in_flight)):
            slot = in_flight[place].slot if place < 0 else stretch.slots[place % self.depth]
            self.recorded[self._returned(slot)] = returned
        account.last_end_ns = last
        account.busy["host"] += sum([sum(x[:count]) for x in (prices.plan, prices.fill, prices.launch, commits)])
        account.busy["h2d"] += sum(prices.h2d[:count])
        account.busy["compute"] += sum(prices.forward[:count])
        account.busy["d2h"] += sum(prices.d2h[:count])
        account.idle["host"] += host_wait
        account.idle["h2d"] += h2d_wait
        account.idle["output_sync"] += sync_wait
        account.idle["no_work"] += no_work
        if details:
            self._decode_spans(stretch, in_flight, details, times)
        return Course(launches, times)

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

    def _decode_spans(
        self, stretch: Stretch, in_flight: Sequence[StepPlan], details: list[tuple[int, ...]], times: list[int]
    ) -> None:
        """The spans that stepping would have recorded, in its order."""
        for place, (detail, end) in enumerate(zip(details, times, strict=True)):
            begun, planned, filled, copied, h2d, launched, start, compute, read, d2h, collected = detail
            plan = stretch.plan(place)
            shape = StepShape.of(plan)
            old = in_flight[place] if place < len(in_flight) else stretch.plan(place - len(in_flight))
            self._span("host", "plan", plan, begun, planned, plan.num_seqs)
            self._span("host", "fill", plan, planned, filled, plan.num_seqs)
            self._span("h2d", "h2d", plan, copied, h2d, h2d_bytes(shape))
            self._span("host", "launch", plan, filled, launched, plan.num_seqs)
            self._span("compute", "forward", plan, start, compute, plan.num_tokens)
            self._span("d2h", "d2h", plan, read, d2h, d2h_bytes(shape))
            self._span("host", "collect", old, launched, collected, len(old.sampled))
            self._span("host", "commit", old, collected, end, old.num_seqs)

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
        return _EVENTS[EventKind.D2H_DONE] * self.depth + slot

    def _place(self, event: Event | None) -> int:
        """Of an event in `recorded`."""
        return -1 if event is None else _EVENTS[event.kind] * self.depth + event.slot
