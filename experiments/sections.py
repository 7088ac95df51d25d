"""Sections of `compare_peers.py` that measure this project alone, each against a limit of the same device.

A section is a function of `Setup` that returns rows, dictionaries of figures.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np
import torch
from kernel_time import kernel_share
from limits import copy_bandwidth, dense_flops, prefill_flops, weight_bytes
from peers import Load, Ours, Tokens
from transformers import PretrainedConfig

from asyncsched.request import SamplingParams
from asyncsched.timeline import Span, Timeline
from executors.host_probe import read_host_speed
from executors.llm import LLM
from executors.models import Model
from executors.outputs import StreamPiece

DEPTHS = {"sync": 1, "async": 2}
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """shrink divides every length and batch, for a dry run on a CPU. models is what its sections have loaded."""

    shape: PretrainedConfig
    device: str
    rounds: int
    shrink: int = 1
    models: dict[str, Any] = field(default_factory=dict)

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    def less(self, count: int, least: int = 1) -> int:
        return max(least, count // self.shrink)


@contextmanager
def ours(setup: Setup, depth: int, loads: list[Load], **settings: Any) -> Iterator[Ours]:
    engine = Ours(setup.shape, depth, loads, setup.device, setup.models, **settings)
    try:
        yield engine
    finally:
        engine.close()


# ---- a decode step against the memory floor --------------------------------------------------------------------------


def decode(setup: Setup) -> list[Row]:
    """Decode steps at three contexts against weights + KV over the copy bandwidth. About 40 s at 8B."""
    batch, new_tokens = setup.less(32, 2), 96
    contexts = [setup.less(context, 64) for context in (512, 4096, 8192)]
    bandwidth = copy_bandwidth(setup.torch_device)
    loads = [Load(batch, context - new_tokens // 2, new_tokens) for context in contexts]
    rows = []
    with ours(setup, 2, loads) as engine:
        for context, load in zip(contexts, loads, strict=True):
            engine.prepare(load)
            figures = engine.profile(load)
            beside = against_floor(engine.llm.model, batch, context, figures["ms_per_step"], bandwidth)
            rows.append({"context": context, "batch": batch, "compute_ms": figures["compute_ms"], **beside})
    return rows


def against_floor(model: Model, batch: int, context: int, ms_per_step: float, bandwidth: float) -> Row:
    """A decode step beside reading all weights and the KV once, at that bandwidth (bytes/s)."""
    read = weight_bytes(model) + batch * context * model.kv_bytes_per_token
    floor_ms = 1e3 * read / bandwidth
    return {
        "ms_per_step": ms_per_step,
        "floor_ms": floor_ms,
        "times_floor": ms_per_step / floor_ms,
        "copy_tb_s": bandwidth / 1e12,
        "read_gb": read / 1e9,
    }


# ---- the seeds' workload ---------------------------------------------------------------------------------------------


def seeds(setup: Setup, modes: tuple[str, ...], rounds: int) -> list[Row]:
    """32 requests of 8,192 new tokens; every run is recorded. About 75 s per mode and round at 8B.

    gpu_active   of all steps from the first to the last, by events
    kernel_share of a steady step at a short context: the time in which a kernel runs over the step's period
    at_N         steady steps around that context
    """
    load = Load(setup.less(32, 2), setup.less(128, 8), setup.less(8192, 128))
    contexts = [setup.less(context, 64) for context in (512, 4096, 8192)]
    bandwidth = copy_bandwidth(setup.torch_device)
    rows = []
    for mode in modes:
        with ours(setup, DEPTHS[mode], [load]) as engine:
            engine.prepare(load)
            for _ in range(rounds):
                result, spans = engine.recorded(load)
                compute = [span for span in spans if span.lane == "compute"]
                window = max(span.end_ns for span in compute) - min(span.start_ns for span in compute)
                rows.append(
                    {
                        "mode": mode,
                        **load._asdict(),
                        "wall_s": result.wall_s,
                        "tokens_per_s": result.output_throughput,
                        "floor_s": load.new_tokens * _mean_floor_s(engine.llm.model, load, bandwidth),
                        "gpu_active": sum(span.end_ns - span.start_ns for span in compute) / window,
                        "kernel_share": None,
                        **{
                            f"at_{context}": against_floor(
                                engine.llm.model, load.requests, context, _ms_at(spans, load, context), bandwidth
                            )
                            for context in contexts
                        },
                        "host_us": result.host_us,
                    }
                )
            rows[-1]["kernel_share"] = kernel_share(engine, load._replace(new_tokens=setup.less(96, 64)))
    return rows


def _mean_floor_s(model: Model, load: Load, bandwidth: float) -> float:
    context = load.prompt_tokens + load.new_tokens / 2
    return (weight_bytes(model) + load.requests * context * model.kv_bytes_per_token) / bandwidth


def _ms_at(spans: list[Span], load: Load, context: int, around: int = 48) -> float:
    """Median period of the decode steps with about so much context."""
    ends = sorted(span.end_ns for span in spans if span.name == "forward" and span.size == load.requests)
    middle = context - load.prompt_tokens
    periods = np.diff(ends[max(0, middle - around) : middle + around])
    return float(np.median(periods)) / 1e6


# ---- batch-invariant mode --------------------------------------------------------------------------------------------


def invariant(setup: Setup) -> list[Row]:
    """The usual engine and the batch-invariant one, which computes decodes as prefills, async. About 25 s at 8B.

    alike  of the smallest batch's sequences, those that are the same in this batch
    """
    sizes = sorted({setup.less(8, 2), setup.less(32, 4), setup.less(256, 8)})
    loads = [Load(size, setup.less(128, 8), setup.less(256, 64)) for size in sizes]
    rows = []
    modes: dict[str, dict[str, Any]] = {"usual": {}, "batch-invariant": {"batch_invariant": True}}
    for name, settings in modes.items():
        if settings and setup.device != "cuda":
            continue  # it needs kernels of a GPU
        with ours(setup, DEPTHS["async"], loads, **settings) as engine:
            alone: Tokens | None = None
            for load in loads:
                engine.prepare(load)
                run = engine.generate(load)
                tokens = run.tokens or ()
                alone = alone or tokens
                rows.append(
                    {
                        "engine": name,
                        **load._asdict(),
                        "tokens_per_s": load.requests * load.new_tokens / run.wall_s,
                        "alike": sum(one == other for one, other in zip(alone, tokens, strict=False)),
                    }
                )
    return rows


# ---- prefill against dense products ----------------------------------------------------------------------------------


def prefill(setup: Setup) -> list[Row]:
    """32 prompts of 2,048 tokens against dense bfloat16 products. About 15 s at 8B."""
    load = Load(setup.less(32, 2), setup.less(2048, 32), 1)
    peak = dense_flops(setup.torch_device)
    walls, busy = [], []
    with ours(setup, 2, [load]) as engine:
        flops = prefill_flops(engine.llm.model, load.requests, load.prompt_tokens)
        budget = engine.llm.config.max_num_batched_tokens
        engine.prepare(load)
        for _ in range(setup.rounds):
            walls.append(engine.generate(load).wall_s)
            timeline = Timeline()
            engine.llm.engine.executor.record(timeline)
            engine.generate(load)
            engine.llm.engine.executor.record(None)
            busy.append(sum(s.end_ns - s.start_ns for s in timeline.spans if s.lane == "compute") / 1e9)
    wall, gpu = statistics.median(walls), statistics.median(busy)
    tokens = load.requests * load.prompt_tokens
    return [
        {
            "prompts": load.requests,
            "prompt_tokens": load.prompt_tokens,
            "budget": budget,
            "tokens_per_s": tokens / wall,
            "wall_s": wall,
            "compute_s": gpu,
            "tflop_s": flops / wall / 1e12,
            "peak_tflop_s": peak / 1e12,
            "of_peak": flops / wall / peak,
            "of_peak_on_compute_lane": flops / gpu / peak,
        }
    ]


# ---- where the host's time goes --------------------------------------------------------------------------------------


def host(setup: Setup) -> list[Row]:
    """Host time per steady decode step by kind; only the host's spans are recorded. About 45 s at 8B.

    probe_us  how quick the host was around the run (executors/host_probe.py): hosts of one kind differ by half
    """
    rows = []
    for batch in sorted({setup.less(32, 2), setup.less(256, 4)}):
        load = Load(batch, setup.less(128, 8), 192)
        for mode, depth in DEPTHS.items():
            with ours(setup, depth, [load]) as engine:
                engine.prepare(load)
                timeline, before = Timeline(), read_host_speed().step_us
                engine.llm.engine.executor.record(timeline, devices=False)
                engine.generate(load)
                engine.llm.engine.executor.record(None)
                probe = (before + read_host_speed().step_us) / 2
            rows.append({"batch": batch, "mode": mode, **host_breakdown(timeline.spans, batch), "probe_us": probe})
    return rows


def host_breakdown(spans: list[Span], batch: int) -> Row:
    """Microseconds per step. Means add up to the wall: `rest` is what lies between spans, the callers' loops above all.

    p50_us   by kind; `collect` is the wait for the device. p10_us, p90_us beside it
    mean_us  by kind, with `rest`
    host_us  the p50s of plan, fill, launch and commit together
    """
    plans = sorted(span.start_ns for span in spans if span.name == "plan" and span.size == batch)[16:-8]
    first, last, steps = plans[0], plans[-1], len(plans) - 1
    kinds: dict[str, list[int]] = defaultdict(list)
    for span in spans:
        if span.lane == "host" and first <= span.start_ns < last:
            kinds[span.name].append(span.end_ns - span.start_ns)
    spread = {kind: np.percentile(times, (10, 50, 90)).tolist() for kind, times in kinds.items()}
    p10, p50, p90 = ({kind: of_kind[at] / 1e3 for kind, of_kind in spread.items()} for at in range(3))
    mean = {kind: sum(times) / steps / 1e3 for kind, times in kinds.items()}
    wall = (last - first) / steps / 1e3
    mean["rest"] = wall - sum(mean.values())
    return {
        "steps": steps,
        "wall_us": wall,
        "wall_p50_us": statistics.median(np.diff(plans).tolist()) / 1e3,
        "host_us": sum(p50[kind] for kind in ("plan", "fill", "launch", "commit")),
        "p50_us": p50,
        "p10_us": p10,
        "p90_us": p90,
        "mean_us": mean,
    }


# ---- prefill and decode together -------------------------------------------------------------------------------------


def mixed(setup: Setup, budgets: tuple[int, ...] = (320, 512)) -> list[Row]:
    """64 requests in flight, prompts of 512 to 2,048 tokens, one arrival per 20 steps. About 25 s per row at 8B."""
    rows = []
    in_flight, interval = setup.less(64, 8), 20
    prompts = setup.less(512, 16), setup.less(2048, 64)
    for budget in budgets:
        tokens = in_flight + setup.less(budget - 64, 16)
        for mode, depth in DEPTHS.items():
            longest = Load(in_flight + 8, prompts[1], 3 * interval * in_flight)
            with ours(
                setup, depth, [longest], max_num_batched_tokens=tokens, warm_up=[SamplingParams(temperature=0.0)]
            ) as engine:
                figures = _Arrivals(engine.llm, in_flight, prompts, interval).run(steps=setup.less(1000, 200))
            rows.append({"mode": mode, "budget": tokens, **figures})
    return rows


class _Arrivals:
    """Keeps `in_flight` requests running: every `interval` steps one comes, and whoever is there longest leaves."""

    def __init__(self, llm: LLM, in_flight: int, prompts: tuple[int, int], interval: int) -> None:
        self.llm = llm
        self.in_flight = in_flight
        self.prompts = prompts
        self.interval = interval
        self.random = np.random.default_rng(0)
        self.running: dict[str, list[float]] = {}  # when each got its tokens, in order of arrival
        self.gaps: list[float] = []
        self.count = 0

    def run(self, steps: int) -> Row:
        """Fills up, waits until all prompts are through, then measures so many steps."""
        for _ in range(self.in_flight):
            self._submit()
        while any(not times for times in self.running.values()):
            self._step()
        self._go_on(8 * self.interval)  # arrivals too
        timeline = Timeline()
        self.llm.engine.executor.record(timeline)
        self._go_on(4)
        self.gaps.clear()
        timeline.spans.clear()
        started, first = perf_counter(), self.llm.engine.steps
        self._go_on(steps)
        wall, steps = perf_counter() - started, self.llm.engine.steps - first
        gaps = np.array(self.gaps)
        self.llm.engine.executor.record(None)
        for name in self.running:
            self.llm.abort(name)
        while self.llm.run() is not None:
            pass
        compute = [span for span in timeline.spans if span.lane == "compute"]
        window = max(span.end_ns for span in compute) - min(span.start_ns for span in compute)
        forwards = [span for span in compute if span.name == "forward"]
        p50, p99 = np.percentile(gaps, 50), np.percentile(gaps, 99)
        return {
            "in_flight": self.in_flight,
            "steps": steps,
            "ms_per_step": 1e3 * wall / steps,
            "itl_p50_ms": 1e3 * float(p50),
            "itl_p99_ms": 1e3 * float(p99),
            "itl_max_ms": 1e3 * float(gaps.max()),
            "p99_over_p50": float(p99 / p50),
            "tokens_per_s": len(gaps) / wall,
            "gpu_active": sum(span.end_ns - span.start_ns for span in compute) / window,
            "share_of_mixed_steps": sum(span.size > self.in_flight for span in forwards) / len(forwards),
        }

    def _go_on(self, steps: int) -> None:
        """So many steps, with arrivals."""
        end = self.llm.engine.steps + steps
        arrival = self.llm.engine.steps + self.interval
        while self.llm.engine.steps < end:
            if self.llm.engine.steps >= arrival:
                arrival += self.interval
                self._submit()
                oldest = next(iter(self.running))
                self.llm.abort(oldest)
                del self.running[oldest]
            self._step()

    def _submit(self) -> None:
        length = int(self.random.integers(*self.prompts, endpoint=True))
        prompt = self.random.integers(0, self.llm.model.vocab_size, length).tolist()
        name = str(self.count)
        self.count += 1
        self.running[name] = []
        new_tokens = self.llm.config.max_model_len - self.prompts[1]
        self.llm.submit(name, prompt, SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True))

    def _step(self) -> None:
        results = self.llm.run()
        now = perf_counter()
        for result in results or ():
            times = self.running.get(result.request_id)  # None: it has left
            if isinstance(result, StreamPiece) and result.token_ids and times is not None:
                times.append(now)
                self.gaps += [late - early for early, late in pairwise(times[-2:])]
