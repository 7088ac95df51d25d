"""Prices by a profile, and lanes that take them: what real hosts and devices do beside the plain model of `lanes.py`.

A real host works at another speed while the device computes; a launch has a part that the device need not wait for; a
step that is launched kernel by kernel cannot end before its launch does; taking over tokens and delivering them takes
time. Order still comes from the program alone.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from asyncsched.plan import StepPlan, StepShape
from asyncsched.program import Event, Lane, OpKind, Template
from asyncsched.timeline import LANES as NAMES
from asyncsched.timeline import LaneAccount, Span, StepTimes, Timeline
from sim.draws import FloatArray, Stream, generator
from sim.lanes import COMPUTE, D2H, H2D, HOST
from sim.profile import HOT_TOKENS, LARGE_SEQS, QUANTILES, HostPrice, JitterProfile, PrefillPrice, Profile, splits

BLOCK = 1024  # multipliers drawn at a time

_LANES = {Lane.HOST: HOST, Lane.H2D: H2D, Lane.COMPUTE: COMPUTE, Lane.D2H: D2H}

_STREAMS = {
    "plan": Stream.PLAN,
    "fill": Stream.FILL,
    "launch": Stream.LAUNCH,
    "eager_launch": Stream.LAUNCH,
    "commit": Stream.COMMIT,
    "deliver": Stream.DELIVER,
    "decode": Stream.FORWARD,
    "decode_hot": Stream.FORWARD,
    "decode_large": Stream.FORWARD,
    "eager": Stream.FORWARD,
    "eager_prefill": Stream.FORWARD,
    "padded": Stream.FORWARD,
    "padded_prefill": Stream.FORWARD,
    "padded_hot": Stream.FORWARD,
}


def step_kind(shape: StepShape) -> str:
    """decode, mixed or prefill."""
    if not shape.num_prefill_tokens:
        return "decode"
    return "mixed" if shape.num_decodes else "prefill"


def padded_seqs(shape: StepShape) -> int:
    """Sequences that a decode step computes."""
    return shape.bucket or shape.num_seqs


def jitter_of(jitter: JitterProfile, shape: StepShape, heat: float) -> tuple[str, str]:
    """The names of the tables of a step and of what its run has in common, "" where that is in the first."""
    if shape.num_prefill_tokens:
        launched = "padded" if shape.mixed_bucket else "eager"
        if heat and launched == "padded" and jitter.padded_hot:
            return "padded_hot", ""
        alone = f"{launched}_prefill"
        return (launched if shape.num_decodes or not getattr(jitter, alone) else alone), ""
    if padded_seqs(shape) < LARGE_SEQS:
        return "decode_hot" if heat and jitter.decode_hot else "decode", "run"
    return "decode_large" if jitter.decode_large else "decode", "run_large" if jitter.run_large else "run"


class Heat:
    """What share of the last `hot_ms` the compute lane spent in prefills of HOT_TOKENS and more: these draw more power
    than the device may for long, and lower its clock. Asked for times that never fall, in nanoseconds."""

    def __init__(self, hot_ms: float) -> None:
        self._window = hot_ms * 1e6
        self._prefills: deque[tuple[int, int]] = deque()

    def computed(self, num_prefill_tokens: int, start: int, end: int) -> None:
        """A step was."""
        if num_prefill_tokens >= HOT_TOKENS and self._window:
            self._prefills.append((start, end))

    def at(self, now: int) -> float:
        since = now - self._window
        while self._prefills and self._prefills[0][1] <= since:
            self._prefills.popleft()
        if not self._prefills:
            return 0.0
        return sum(end - max(start, since) for start, end in self._prefills) / self._window


class MeasuredCosts:
    """Nanoseconds of each operation. `seed` draws jitter from the profile's tables; None is no jitter. `seats`: of the
    engine, and so of a captured step that prefills."""

    def __init__(self, profile: Profile, *, depth: int, seats: int, seed: int | None, replica: int = 0) -> None:
        host, gpu = profile.host, profile.gpu
        self.profile = profile
        self.inline = host.inline
        self._seats = seats
        self._seed = seed
        self._replica = replica
        self._host = {
            kind: _linear(getattr(host, kind), host.scale)
            for kind in ("plan", "fill", "launch", "eager_launch", "commit", "deliver")
        }
        self._busy = {kind: getattr(host, kind).busy_factor for kind in self._host}
        wait = host.delay_us / (host.delay_us + host.cold_us) if host.delay_us else 0.0
        cold = {"fill": 1 + host.cold_fill * wait, "launch": 1 + host.cold_launch * wait}
        for kind, factor in cold.items():
            base, per_seq, per_token = self._host[kind]
            self._host[kind] = base * factor, per_seq * factor, per_token * factor
        scale = 1e3 * host.scale
        self._heads = host.launch_head_us * scale * cold["launch"], host.eager_head_us * scale
        self.eager_tail_ns = round(host.eager_tail_us * 1e3)
        self._collect, self._wake = host.collect_us * scale, host.wake_us * scale
        self._submit = host.submit_us * scale
        self.delay_ns = round(host.delay_us * 1e3)
        contention = gpu.contention if depth > 1 else 1.0
        self._factor = 1e3 * gpu.scale * contention
        self._decode = np.array(gpu.decode_seqs, dtype=float), np.array(gpu.decode_us)
        self._kv = np.array(gpu.kv_tokens, dtype=float), np.array(gpu.kv_us)
        self._prefill = {padded: _Prefill(price) for padded, price in ((False, gpu.eager), (True, gpu.padded))}
        self._idle_start = gpu.idle_start_us * 1e3
        self.gap_ns = round(gpu.gap_us * 1e3)
        self._tables = {name: np.array(getattr(profile.jitter, name)) for name in _STREAMS}
        self._draws: dict[Stream, tuple[int, list[float]]] = {}
        self._speed = _Speed(profile, seed, replica)
        draw = 0.5 if seed is None else generator(seed, Stream.RUN, 0, replica).random()
        self._run = {"": 1.0}  # a run is slow in all its steps, as far as each kind of them goes
        for name in ("run", "run_large"):
            table = getattr(profile.jitter, name)
            self._run[name] = float(np.interp(draw, QUANTILES, table)) if seed is not None and table else 1.0

    def host_ns(self, kind: str, shape: StepShape, step: int, busy: bool, now: int = 0) -> int:
        """Host work that begins at `now`; `busy`: the compute lane computes beside it."""
        base, per_seq, per_token = self._host[kind]
        price = base + per_seq * shape.num_seqs + per_token * shape.num_prefill_tokens
        if busy:
            price *= self._busy[kind]
        return round(price * self._multiplier(kind, step) * self._speed.at(now))

    def launch_ns(self, shape: StepShape, step: int, busy: bool, now: int = 0) -> tuple[int, int]:
        """A launch: until the compute lane can start, and the rest."""
        eager = not shape.bucket and not shape.mixed_bucket
        whole = self.host_ns("eager_launch" if eager else "launch", shape, step, busy, now)
        head = min(round(self._heads[eager] * self._speed.at(now)), whole)
        return head, whole - head

    def collect_ns(self, waited: bool, now: int = 0) -> int:
        return round((self._collect + (self._wake if waited else 0.0)) * self._speed.at(now))

    def submit_ns(self, count: int) -> int:
        return round(self._submit * count)

    def forward_ns(self, shape: StepShape, longest: int, step: int, idle: bool, heat: float) -> int:
        """Carry-over, forward pass and sampling; `idle`: the lane had nothing to do before. `longest`: KV positions of
        the longest decode. `heat`: as `Heat` says."""
        kind = step_kind(shape)
        gpu = self.profile.gpu
        padded = shape.mixed_bucket > 0
        if kind == "decode":
            size = padded_seqs(shape)
            price = _between(size, *self._decode) + _between(shape.kv_tokens, *self._kv)
            price += gpu.us_per_longest * longest / splits(gpu.whole_seqs, size)
        else:
            rows = min(shape.mixed_bucket, self._seats) if padded else shape.num_decodes
            price = self._prefill[padded].us(shape, longest / splits(gpu.whole_seqs, rows))
        price *= 1 + heat * (gpu.hot_decode if kind == "decode" else gpu.hot_padded if padded else 0.0)
        table, of_run = jitter_of(self.profile.jitter, shape, heat)
        price *= self._factor * self._run[of_run] * self._multiplier(table, step)
        return round(price + (self._idle_start if idle else 0.0))

    def copy_ns(self, kind: OpKind, shape: StepShape) -> int:
        copies = self.profile.copies
        if kind is OpKind.H2D:
            us = copies.h2d_us + copies.h2d_us_per_token * shape.num_tokens + copies.h2d_us_per_seq * shape.num_seqs
        elif kind is OpKind.D2H:
            us = copies.d2h_us + copies.d2h_us_per_sample * shape.num_samples
        elif kind is OpKind.RESTORE:
            us = copies.h2d_us + copies.restore_us_per_block * shape.restored_blocks
        else:
            us = copies.d2h_us + copies.offload_us_per_block * shape.offloaded_blocks
        return round(us * 1e3)

    def _multiplier(self, name: str, step: int) -> float:
        table = self._tables[name]
        if self._seed is None or not len(table):
            return 1.0
        stream = _STREAMS[name]
        wanted, offset = divmod(step, BLOCK)
        block, draws = self._draws.get(stream, (-1, []))
        if block != wanted:
            draws = generator(self._seed, stream, wanted, self._replica).random(BLOCK).tolist()
            self._draws[stream] = (wanted, draws)
        return float(np.interp(draws[offset], QUANTILES, table))


class _Prefill:
    """What steps that prefill take, in microseconds."""

    def __init__(self, price: PrefillPrice) -> None:
        self._price = price
        self._line = np.array(price.tokens, dtype=float), np.array(price.tokens_us)

    def us(self, shape: StepShape, longest: float) -> float:
        price, tokens = self._price, shape.mixed_bucket or shape.num_tokens
        us = _between(tokens, *self._line) + price.us_per_attn_pair * shape.attn_pairs
        us += price.us_per_context_token * context_tokens(shape.kv_tokens, shape.num_prefill_tokens)
        us += price.us_per_longest * longest
        return us + (price.us_per_token_and_decode * tokens if shape.num_decodes else 0.0)


class _Speed:
    """How slow the host is: it keeps a speed for some time, then takes another. Asked for times that never fall."""

    def __init__(self, profile: Profile, seed: int | None, replica: int) -> None:
        self._table = np.array(profile.jitter.host)
        self._hold = profile.host.hold_ms * 1e6
        self._until, self._ratio = 0.0, 1.0
        if seed is None or not len(self._table) or not self._hold:
            self._until = math.inf
        else:
            self._random = generator(seed, Stream.HOST_SPEED, 0, replica)

    def at(self, now: int) -> float:
        while now >= self._until:
            draw, hold = self._random.random(2).tolist()
            self._ratio = float(np.interp(draw, QUANTILES, self._table))
            self._until += 2 * self._hold * hold  # uniform: logarithms differ between machines
        return self._ratio


def context_tokens(kv_tokens: int, num_prefill_tokens: int) -> int:
    """KV positions that a step reads and does not compute itself."""
    return max(kv_tokens - num_prefill_tokens, 0)


def longest_context(plan: StepPlan, sliding_window: int | None = None) -> int:
    """KV positions of the longest decode of a step."""
    longest = int(plan.ends[: plan.num_decodes].max(initial=0))
    return longest if sliding_window is None else min(longest, sliding_window)


def _linear(price: HostPrice, scale: float) -> tuple[float, float, float]:
    ns = 1e3 * scale
    return price.us * ns, price.us_per_seq * ns, price.us_per_prefill_token * ns


def _between(size: int, sizes: FloatArray, durations: FloatArray) -> float:
    """On the line through the corners; beyond the last one it goes on as between the last two, never below zero."""
    if len(sizes) < 2:
        return float(durations[0]) if len(sizes) else 0.0
    if size <= sizes[-1]:
        return float(np.interp(size, sizes, durations))
    slope = (durations[-1] - durations[-2]) / (sizes[-1] - sizes[-2])
    return float(durations[-1] + max(slope, 0.0) * (size - sizes[-1]))


class MeasuredLanes:
    """`Lanes` for measured prices: the same questions, answered with what real lanes do. Nanoseconds."""

    def __init__(self, costs: MeasuredCosts, timeline: Timeline | None, sliding_window: int | None = None) -> None:
        self.costs = costs
        self._window = sliding_window
        self.timeline = timeline
        self.account = LaneAccount()
        self.free = [0, 0, 0, 0]
        self._recorded: dict[Event, int] = {}
        self.idle = 0  # time without work since the last launch
        self._heat = Heat(costs.profile.gpu.hot_ms)

    def host(self, kind: str, plan: StepPlan, shape: StepShape) -> None:
        """Host work of a step; after its plan comes the delay, if there is one."""
        self._work(kind, plan, shape, self.costs.host_ns(kind, shape, plan.step, self._busy, self.free[HOST]))
        if kind == "plan" and self.costs.delay_ns:
            self._work("delay", plan, shape, self.costs.delay_ns)

    def submitted(self, count: int) -> None:
        """So many requests were taken in."""
        self.free[HOST] += self.costs.submit_ns(count)

    def launch(self, template: Template, plan: StepPlan, shape: StepShape) -> None:
        """Enqueues a program, up to its `synchronize`."""
        free, costs, step = self.free, self.costs, plan.step
        rest, started, launched = 0, 0, False
        for op in template.launched:
            lane, kind = _LANES[op.lane], op.kind
            if kind is OpKind.FILL:
                self._work("fill", plan, shape, costs.host_ns("fill", shape, step, self._busy, free[HOST]))
                started = free[HOST]
                continue
            if lane == COMPUTE and not launched:
                launched = True
                head, rest = costs.launch_ns(shape, step, self._busy, free[HOST])
                free[HOST] += head
                self.account.busy["host"] += head + rest
            if kind is OpKind.RECORD:
                self._recorded[op.event] = free[lane]  # type: ignore[index]  # records name an event
            elif kind is OpKind.WAIT:
                free[lane] = max(free[lane], self._recorded[op.event])  # type: ignore[index]  # waits name an event
            elif kind is OpKind.FORWARD:
                self._forward(plan, shape, rest)
            elif kind is not OpKind.CARRY:  # its price is in that of the forward pass
                self._copy(lane, kind, plan, shape)
        free[HOST] += rest
        self._span("host", "launch", plan, started, free[HOST], shape.num_seqs)

    def synchronize(self, template: Template, plan: StepPlan) -> None:
        """Blocks the host until the step's output has reached it, and takes it over."""
        start = self.free[HOST]
        ready = self._recorded[template.ops[-1].event]  # type: ignore[index]  # synchronize names an event
        end = max(start, ready)
        self._span("host", "collect", plan, start, end, len(plan.sampled))
        price = self.costs.collect_ns(ready > start, end)
        self.free[HOST] = end + price
        self.account.busy["host"] += price

    def rest(self, until_ns: int) -> None:
        """The host had nothing to do until then."""
        start = self.free[HOST]
        self.free[HOST] = end = max(start, until_ns)
        self.idle += end - start

    @property
    def _busy(self) -> bool:
        return self.account.last_end_ns > self.free[HOST]

    def _work(self, kind: str, plan: StepPlan, shape: StepShape, duration: int) -> None:
        start = self.free[HOST]
        self.free[HOST] = start + duration
        self.account.busy["host"] += duration
        self._span("host", kind, plan, start, start + duration, shape.num_seqs)

    def _copy(self, lane: int, kind: OpKind, plan: StepPlan, shape: StepShape) -> None:
        start = max(self.free[lane], self.free[HOST])
        self._end(lane, kind.value, plan, start, start + self.costs.copy_ns(kind, shape), shape.num_seqs)

    def _forward(self, plan: StepPlan, shape: StepShape, rest: int) -> None:
        """`rest`: what is left of the launch when its first operation is enqueued."""
        free, costs = self.free, self.costs
        enqueued, before = free[HOST], free[COMPUTE]
        start = max(enqueued, before)
        if self.account.busy["compute"] and enqueued <= self.account.last_end_ns:  # queued behind a step
            start = max(start, self.account.last_end_ns + costs.gap_ns)
        end = start
        if plan.num_tokens:
            idle = enqueued >= self.account.last_end_ns
            longest = longest_context(plan, self._window)
            end += costs.forward_ns(shape, longest, plan.step, idle, self._heat.at(start))
            if not shape.bucket and not shape.mixed_bucket and not costs.inline:
                end = max(end, enqueued + rest + costs.eager_tail_ns)
            self._heat.computed(shape.num_prefill_tokens, start, end)
        self.account.step(StepTimes(enqueued, start, end, self.idle, costs.gap_ns))
        self.idle = 0
        busy = self.account.busy["compute"]
        self._end(COMPUTE, "forward", plan, start, end, plan.num_tokens)
        self.account.busy["compute"] = busy  # the account has counted it

    def _end(self, lane: int, name: str, plan: StepPlan, start: int, end: int, size: int) -> None:
        """An operation of a lane ends; where lanes run in the host's thread, so does the host's wait for it."""
        self.free[lane] = end
        self.account.busy[NAMES[lane]] += end - start
        if self.costs.inline:
            self.free[HOST] = end
        self._span(NAMES[lane], name, plan, start, end, size)

    def _span(self, lane: str, name: str, plan: StepPlan, start: int, end: int, size: int) -> None:
        if self.timeline is not None:
            self.timeline.spans.append(Span(lane, name, plan.step, plan.slot, start, end, size))
