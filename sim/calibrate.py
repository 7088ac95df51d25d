"""Learns a profile from recorded runs: what each lane takes for which sizes, how well that fits, and what varies.

Every step is a sample of every lane. Host work is cut where the next begins, so that nothing falls between: a launch
counts from the end of the fill, a delivery until the loop goes on. Clocks of host and device may be off by microseconds
against each other; only sums over both of them matter to a prediction, and those are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncsched.errors import ConfigError
from asyncsched.runs import UNKNOWN, IntArray, Run
from sim.cold import COLD_KINDS, NOT_COLD, Cold, fit_cold
from sim.compute_fit import FEW, HOT_MS, ComputeSteps, Mask, fit_compute, workloads_of
from sim.compute_jitter import compute_jitter
from sim.fitting import FloatArray, fit, quality, ratios
from sim.host_speed import SLOWEST, SPEED_KINDS, all_during, fit_probe, fit_speed, probe_us, probing_ns
from sim.predict import heats, longest_contexts, seats
from sim.profile import (
    SCHEMA,
    STEP_KINDS,
    CopyProfile,
    FitItem,
    GpuProfile,
    HostPrice,
    HostProfile,
    JitterProfile,
    Profile,
)
from sim.subject import differing_facts

TAIL_NS = 300_000  # a step that ends so soon after its launch may have waited for it


def calibrate(runs: Sequence[Run], description: str = "") -> Profile:
    """A profile fitted to all runs together. Raises ConfigError for runs that cannot be learnt from."""
    samples = _gather(runs)
    host, host_items, host_jitter = _host(samples)
    gpu, gpu_items, gpu_jitter = _gpu(samples)
    first = runs[0].info
    return Profile(
        schema=SCHEMA,
        description=description,
        runs=tuple(run.info.name for run in runs),
        device=dict(first.device),
        model=dict(first.model),
        versions=dict(first.versions),
        engine={key: list(v) if isinstance(v, tuple) else v for key, v in first.engine.items() if v is not None},
        host=host,
        copy=_copies(samples),
        gpu=gpu,
        jitter=JitterProfile(**{**host_jitter, **gpu_jitter}),
        fit={**host_items, **gpu_items},
    )


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """All steps of all runs, one entry per step and name. Durations and times are in microseconds.

    run       which run the step is of, and `workload` which workload the run was of
    probe     of each run, 0 without one, read during runs or beside them (`during`)
    submit    of each run that began with many requests
    overlap   the run had several steps in flight
    busy      the compute lane was computing when this kind of host work began
    idle      the compute lane had nothing to do when the step was enqueued
    heat      as in ComputeSteps; `seats` of its run's engine
    delay     how long the host was kept busy in each step of the run
    """

    sizes: dict[str, IntArray]
    host: dict[str, FloatArray]
    busy: dict[str, Mask]
    lanes: dict[str, FloatArray]
    has: dict[str, Mask]
    kind: NDArray[np.str_]
    run: IntArray
    overlap: Mask
    idle: Mask
    eager: Mask
    head: FloatArray
    tail: FloatArray
    planned: FloatArray
    context: IntArray
    longest: IntArray
    heat: FloatArray
    seats: IntArray
    gap: FloatArray
    workload: IntArray
    collect: FloatArray
    waited: Mask
    submit: FloatArray
    probe: FloatArray
    during: bool
    delay: FloatArray
    inline: bool

    def __len__(self) -> int:
        return len(self.run)


# ---- samples ---------------------------------------------------------------------------------------------------------


def _gather(runs: Sequence[Run]) -> Samples:
    if not runs:
        raise ConfigError("runs", None, "name at least one run to learn from")
    for run in runs:
        if not len(run.steps):
            raise ConfigError("runs", run.info.name, "nobody saw its steps: there is nothing to learn from")
        for what in ("device", "model"):
            mine, first = getattr(run.info, what).get("name"), getattr(runs[0].info, what).get("name")
            if mine != first:
                raise ConfigError(
                    what, mine, f"runs of one profile have one {what}, and {runs[0].info.name} had {first!r}"
                )
        for fact, size, once in differing_facts(run.info.model, runs[0].info.model) or ():
            allowed = f"runs of one profile have one model, and {runs[0].info.name} had {once}"
            raise ConfigError(f"model.{fact}", size, allowed)
    keys = [(tuple(run.requests.prompt_tokens.tolist()), tuple(run.requests.output_tokens.tolist())) for run in runs]
    during = all_during(runs)
    workloads = enumerate(zip(runs, workloads_of(keys), strict=True))
    parts = [_samples(run, number, of, during) for number, (run, of) in workloads]
    merged: dict[str, Any] = {}
    for name in Samples.__slots__:
        values = [getattr(part, name) for part in parts]
        if isinstance(values[0], dict):
            merged[name] = {key: np.concatenate([value[key] for value in values]) for key in values[0]}
        else:
            merged[name] = values[0] if name in ("inline", "during") else np.concatenate(values)
    return Samples(**merged)


def _samples(run: Run, number: int, workload: int, during: bool) -> Samples:
    steps, count = run.steps, len(run.steps)
    inline = bool(run.info.device.get("inline", False))
    compute_end = steps.end("compute")
    before = np.concatenate(([0], np.maximum.accumulate(compute_end)[:-1]))  # end of the step before
    planned = np.where(steps.has("delay"), steps.end("delay"), steps.end("plan"))
    filled = steps.end("fill")
    launched = steps.end("launch")
    ready = np.maximum(steps.end("d2h"), compute_end)
    collecting, delivering = steps.start("collect"), _before(run, steps.start("deliver"))
    waited = ready > collecting
    following = _following(run)
    host = {
        "plan": steps.duration("plan"),
        "fill": filled - planned,
        "launch": launched - filled,
        "commit": steps.duration("commit"),
        "deliver": np.where(
            following == UNKNOWN, UNKNOWN, following - delivering - probing_ns(run, delivering, following)
        ),
    }
    if inline:
        for lane in ("h2d", "restore", "compute", "offload", "d2h"):
            host["launch"] = host["launch"] - steps.duration(lane)
    begins = {"plan": steps.start("plan"), "fill": planned, "launch": filled, "commit": steps.start("commit")}
    begins["deliver"] = delivering
    in_flight = np.searchsorted(np.sort(steps.start("compute")), np.stack(list(begins.values())))
    ends = np.concatenate(([0], np.maximum.accumulate(compute_end)))
    busy = {name: (ends[in_flight[row]] > begins[name]) & (not inline) for row, name in enumerate(begins)}
    head = steps.start("compute") - filled
    idle = filled + np.maximum(head, 0) >= before if inline else before <= filled
    has = {lane: steps.has(lane) for lane in ("h2d", "compute", "d2h", "restore", "offload")}
    has |= {"deliver": following != UNKNOWN}
    return Samples(
        sizes={name: steps[name] for name in _SIZES},
        host={name: _us(values) for name, values in host.items()},
        busy=busy,
        lanes={lane: _us(steps.duration(lane)) for lane in ("h2d", "compute", "d2h", "restore", "offload")},
        has=has,
        kind=steps.kind,
        run=np.full(count, number),
        overlap=np.full(count, run.info.engine.get("depth", 2) > 1),
        idle=np.asarray(idle),
        eager=(steps["bucket"] == 0) & (steps["mixed_bucket"] == 0),
        head=_us(head),
        tail=_us(compute_end - launched),
        planned=_us(steps.start("plan")),
        context=np.maximum(steps["kv_tokens"] - steps["num_prefill_tokens"], 0),
        longest=longest_contexts(run),
        heat=np.stack([heats(run, hot_ms) for hot_ms in HOT_MS], axis=1),
        seats=np.full(count, seats(run)),
        gap=_us(steps.start("compute") - before),
        workload=np.full(count, workload),
        collect=_us(steps.start("commit") - np.maximum(collecting, ready)),
        waited=waited,
        submit=_submits(run),
        probe=np.array([probe_us(run, during=during)]),
        during=during,
        delay=np.full(count, run.info.host_delay_us),
        inline=inline,
    )


def _us(nanoseconds: IntArray) -> FloatArray:
    return np.asarray(nanoseconds, dtype=np.float64) / 1e3


_SIZES = (
    "num_seqs",
    "num_decodes",
    "num_prefill_tokens",
    "num_samples",
    "kv_tokens",
    "attn_pairs",
    "bucket",
    "mixed_bucket",
    "restored_blocks",
    "offloaded_blocks",
)


def _before(run: Run, times: IntArray) -> IntArray:
    """When the host's last launch or commit before each of these times was over."""
    ends = np.sort(np.concatenate((run.steps.end("launch"), run.steps.end("commit"))))
    return np.asarray(ends[np.maximum(np.searchsorted(ends, times, side="right") - 1, 0)])


def _following(run: Run) -> IntArray:
    """When the loop went on after each delivery: the next plan or collection. UNKNOWN where it had nothing to do, or
    requests were taken in."""
    steps = run.steps
    begins = np.sort(np.concatenate((steps.start("plan"), steps.start("collect"))))
    delivered = steps.end("deliver")
    following = np.append(begins, UNKNOWN)[np.searchsorted(begins, delivered)]
    arrivals = np.sort(run.requests.arrival_ns)
    since = np.concatenate(([0], np.maximum.accumulate(delivered)[:-1]))  # requests are taken in behind a delivery
    came = np.searchsorted(arrivals, following) > np.searchsorted(arrivals, since)
    return np.asarray(np.where(came | ~steps.has("deliver"), UNKNOWN, following))


def _submits(run: Run) -> FloatArray:
    """Time per request that was there at the start, until the first plan; one entry, or none."""
    at_start = int(np.count_nonzero(run.requests.arrival_ns == 0))
    if at_start < FEW:
        return np.zeros(0)
    return _us(run.steps.start("plan")[:1]) / at_start


# ---- host ------------------------------------------------------------------------------------------------------------


def _host(samples: Samples) -> tuple[HostProfile, dict[str, FitItem], dict[str, Any]]:
    prices: dict[str, Any] = {}
    items: dict[str, FitItem] = {}
    work: dict[str, tuple[Mask, FloatArray, FloatArray]] = {}
    rows = {
        "plan": np.ones(len(samples), dtype=bool),
        "fill": np.ones(len(samples), dtype=bool),
        "launch": ~samples.eager,
        "eager_launch": samples.eager,
        "commit": np.ones(len(samples), dtype=bool),
        "deliver": samples.has["deliver"],
    }
    cold = NOT_COLD
    for last in (False, True):  # what a wait does to the work behind it is seen once prices are known
        for kind, chosen in rows.items():
            if not chosen.any():
                continue
            measured = samples.host["launch" if kind == "eager_launch" else kind][chosen]
            busy = samples.busy["launch" if kind == "eager_launch" else kind][chosen]
            sizes = {size: samples.sizes[size][chosen] for size in ("num_seqs", "num_prefill_tokens")}
            slower = cold.of(kind, samples.delay[chosen])
            prices[kind], predicted = _host_price(measured / slower, busy, sizes)
            predicted = predicted * slower
            items[f"host.{kind}"] = quality(measured, predicted, sizes)
            work[kind] = chosen, measured, predicted
        if last or not samples.delay.any():
            break
        cold = _cold(work, samples.delay)
    followed = [one for kind, one in work.items() if kind in SPEED_KINDS]
    speed = fit_speed(followed, samples.planned, samples.run)
    usual_probe, power = fit_probe(samples.probe, _speeds_of_runs(followed, samples.run, len(samples.probe)))
    jitter = {
        kind: ratios(measured, predicted * speed.of_step[chosen])
        for kind, (chosen, measured, predicted) in work.items()
    }
    jitter["host"] = speed.table
    quick, waited = samples.collect[~samples.waited], samples.collect[samples.waited]
    collect = _middle(quick) if len(quick) >= FEW else _middle(waited)
    heads = samples.idle & (samples.lanes["compute"] > 0) & ~np.array(samples.inline)
    bound = samples.tail[samples.eager & (samples.tail < TAIL_NS / 1e3) & (samples.tail > 0)]
    bound = bound[:0] if samples.inline else bound
    profile = HostProfile(
        inline=samples.inline,
        **prices,
        launch_head_us=_middle(samples.head[heads & ~samples.eager]),
        eager_head_us=_middle(samples.head[heads & samples.eager]),
        eager_tail_us=float(np.median(bound)) if len(bound) else 0.0,
        collect_us=collect,
        wake_us=max(_middle(waited) - collect, 0.0),
        submit_us=_middle(samples.submit),
        hold_ms=speed.hold_ms,
        probe_us=usual_probe,
        probe_during=samples.during and usual_probe > 0,
        probe_power=power,
        cold_fill=cold.factors.get("fill", 0.0),
        cold_launch=cold.factors.get("launch", 0.0),
        cold_us=cold.half_us,
    )
    return profile, items, jitter


def _cold(work: Mapping[str, tuple[Mask, FloatArray, FloatArray]], delay: FloatArray) -> Cold:
    def slowness(*kinds: str) -> FloatArray:
        took, usual = np.zeros(len(delay)), np.zeros(len(delay))
        for kind in kinds:
            chosen, measured, predicted = work[kind]
            took[chosen] += measured
            usual[chosen] += predicted
        return np.asarray(np.where(usual > 0, took / np.maximum(usual, 1e-9), np.nan))

    return fit_cold({kind: slowness(kind) for kind in COLD_KINDS if kind in work}, slowness("plan", "commit"), delay)


def _speeds_of_runs(work: Sequence[tuple[Mask, FloatArray, FloatArray]], run: IntArray, count: int) -> FloatArray:
    """How long the host took in each run, over what is usual."""
    took, usual = np.zeros(count), np.zeros(count)
    for chosen, measured, predicted in work:
        capped = np.minimum(measured, SLOWEST * predicted)
        took += np.bincount(run[chosen], weights=capped, minlength=count)
        usual += np.bincount(run[chosen], weights=predicted, minlength=count)
    return took / np.maximum(usual, 1e-12)


def _host_price(measured: FloatArray, busy: Mask, sizes: dict[str, IntArray]) -> tuple[HostPrice, FloatArray]:
    """A line in the sizes, times a factor while the device is busy: found in turns."""
    ones = np.ones(len(measured))
    terms = [ones, sizes["num_seqs"].astype(float), sizes["num_prefill_tokens"].astype(float)]
    factor = 1.0
    both = min(np.count_nonzero(busy), np.count_nonzero(~busy)) >= FEW
    for _ in range(6 if both else 1):
        found = fit(terms, measured / np.where(busy, factor, 1.0))
        if not both:
            break
        plain = np.maximum(found.predicted, 1e-9)
        idle_ratio = measured[~busy].sum() / plain[~busy].sum()
        factor = float(np.clip(measured[busy].sum() / plain[busy].sum() / idle_ratio, 0.05, 20))
    us, per_seq, per_token = found.coefficients.tolist()
    price = HostPrice(us=us, us_per_seq=per_seq, us_per_prefill_token=per_token, busy_factor=factor)
    return price, found.predicted * np.where(busy, factor, 1.0)


def _copies(samples: Samples) -> CopyProfile:
    copies: dict[str, float] = {}
    ones = np.ones(len(samples))
    tokens = (samples.sizes["num_decodes"] + samples.sizes["num_prefill_tokens"]).astype(float)
    h2d, d2h = samples.has["h2d"], samples.has["d2h"]
    if h2d.any():
        terms = [ones[h2d], tokens[h2d], samples.sizes["num_seqs"][h2d].astype(float)]
        names = ("h2d_us", "h2d_us_per_token", "h2d_us_per_seq")
        copies |= dict(zip(names, fit(terms, samples.lanes["h2d"][h2d]).coefficients.tolist(), strict=True))
    if d2h.any():
        terms = [ones[d2h], samples.sizes["num_samples"][d2h].astype(float)]
        found = fit(terms, samples.lanes["d2h"][d2h]).coefficients.tolist()
        copies |= dict(zip(("d2h_us", "d2h_us_per_sample"), found, strict=True))
    for name, blocks in (("restore", "restored_blocks"), ("offload", "offloaded_blocks")):
        if samples.has[name].any():
            rows = samples.has[name]
            per_block = samples.lanes[name][rows] / np.maximum(samples.sizes[blocks][rows], 1)
            copies[f"{name}_us_per_block"] = _middle(per_block)
    return CopyProfile(**copies)


# ---- compute lane ----------------------------------------------------------------------------------------------------


def _gpu(samples: Samples) -> tuple[GpuProfile, dict[str, FitItem], dict[str, Any]]:
    computed = samples.has["compute"]
    behind = computed & ~samples.idle & (samples.run == np.concatenate(([-1], samples.run[:-1])))
    gap = _middle(samples.gap[behind]) if not samples.inline else 0.0
    decode = samples.kind == "decode"
    mixed = samples.sizes["mixed_bucket"]
    bucket = samples.sizes["bucket"]
    tokens = np.where(mixed > 0, mixed, samples.sizes["num_decodes"] + samples.sizes["num_prefill_tokens"])
    size = np.where(decode, np.where(bucket > 0, bucket, samples.sizes["num_seqs"]), tokens)
    free = decode | samples.inline | ~samples.eager | (samples.tail >= TAIL_NS / 1e3)
    steps = ComputeSteps(
        duration=samples.lanes["compute"][computed],
        decode=decode[computed],
        size=size[computed],
        padded=(bucket + mixed > 0)[computed],
        kv_tokens=samples.sizes["kv_tokens"][computed],
        context=samples.context[computed],
        longest=samples.longest[computed],
        rows=np.where(decode, size, np.minimum(mixed, samples.seats))[computed],
        heat=samples.heat[computed],
        attn_pairs=samples.sizes["attn_pairs"][computed],
        overlap=samples.overlap[computed],
        idle=samples.idle[computed],
        free=free[computed],
        beside=(~decode & (samples.sizes["num_decodes"] > 0))[computed],
        run=samples.run[computed],
        workload=samples.workload[computed],
        inline=samples.inline,
    )
    found = fit_compute(steps)
    items: dict[str, FitItem] = {}
    for kind in STEP_KINDS:
        rows = (samples.kind[computed] == kind) & steps.free
        if rows.any():
            sizes = {
                name: samples.sizes[name][computed][rows] for name in ("num_seqs", "num_prefill_tokens", "kv_tokens")
            }
            items[f"gpu.{kind}"] = quality(steps.duration[rows], found.predicted[rows], sizes)
    gpu = GpuProfile(**found.values, gap_us=max(gap, 0.0))
    return gpu, items, compute_jitter(steps, found, gpu)


def _middle(values: FloatArray) -> float:
    """The mean of the middle nine tenths: a few outliers are somebody else's work. 0 without values."""
    if not len(values):
        return 0.0
    low, high = np.quantile(values, (0.05, 0.95))
    middle = values[(values >= low) & (values <= high)]
    return max(float((middle if len(middle) else values).mean()), 0.0)  # of two, neither is in the middle
