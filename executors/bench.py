"""One measured run of real generation: random prompts, all at once, a fixed number of new tokens each."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from asyncsched.errors import AsyncschedError, ConfigError
from asyncsched.request import SamplingParams
from asyncsched.room import why_never
from asyncsched.timeline import Span, Timeline
from executors.llm import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """Steady decode is the longest stretch of steps in which a whole batch decodes, without the first and last few.

    wall_s             from submission to the last token
    ms_per_step        median period of steady decode steps, from one collection to the next
    gpu_active         share of the time of steady decode in which the compute lane runs a step; None without a timeline
    compute_ms         median time of a step on the compute lane
    host_us            median host time of a steady step by kind, blocking in collect not counted
    """

    depth: int
    requests: int
    prompt_tokens: int
    new_tokens: int
    wall_s: float
    steps: int
    output_tokens: int
    output_throughput: float
    ms_per_step: float | None
    gpu_active: float | None
    compute_ms: float | None
    host_us: dict[str, float]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class BenchRun:
    """The figures, and the tokens they were measured on, to compare runs by."""

    result: BenchResult
    token_ids: tuple[tuple[int, ...], ...]


def run_bench(llm: LLM, *, requests: int, prompt_tokens: int, new_tokens: int, seed: int = 0) -> BenchRun:
    """Greedy, end-of-sequence ignored, prompts drawn from `seed`. Warm an LLM up with a short run first."""
    check_sizes(llm, prompt_tokens, new_tokens)
    random = np.random.default_rng(seed)
    prompts = [random.integers(0, llm.model.vocab_size, prompt_tokens).tolist() for _ in range(requests)]
    params = _params(new_tokens)
    timeline = llm.engine.executor.timeline
    first_step, first_span = llm.engine.steps, len(timeline.spans) if timeline is not None else 0
    started = time.perf_counter()
    outputs = llm.generate(prompts, params)
    wall_s = time.perf_counter() - started
    for output in outputs:
        (ended,) = output.outputs
        if len(ended.token_ids) < new_tokens:
            raise AsyncschedError(f"request {output.request_id} broke off: {ended.finish_reason}; {ended.message}")
    spans = Timeline(timeline.spans[first_span:]) if timeline is not None else Timeline()
    tokens = tuple(output.outputs[0].token_ids for output in outputs)
    count = sum(map(len, tokens))
    result = BenchResult(
        depth=llm.config.depth,
        requests=requests,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        wall_s=wall_s,
        steps=llm.engine.steps - first_step,
        output_tokens=count,
        output_throughput=count / wall_s,
        **steady_decode(spans, min(requests, llm.config.max_num_seqs)),
    )
    return BenchRun(result, tokens)


def check_sizes(llm: LLM, prompt_tokens: int, new_tokens: int) -> None:
    """Raises ConfigError for requests that the engine would reject."""
    why = why_never(llm.scheduler.residency, prompt_tokens, _params(new_tokens))
    if why:
        raise ConfigError("new_tokens", new_tokens, why)


def _params(new_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)


def steady_decode(timeline: Timeline, batch: int) -> dict[str, Any]:
    """Figures over the longest stretch in which a whole batch decodes; a simulated timeline will do too."""
    forwards = [span for span in timeline.spans if span.name == "forward" and span.size == batch]
    forwards = _longest_stretch(forwards)[8:-8]
    if len(forwards) < 8:
        return {"ms_per_step": None, "gpu_active": None, "compute_ms": None, "host_us": {}}
    steps = {span.step for span in forwards}
    compute = [span for span in timeline.spans if span.lane == "compute" and span.step in steps]
    begin, end = min(span.start_ns for span in compute), max(span.end_ns for span in compute)
    ends = sorted(span.end_ns for span in forwards)
    return {
        "ms_per_step": statistics.median(np.diff(ends).tolist()) / 1e6,
        "gpu_active": sum(span.end_ns - span.start_ns for span in compute) / (end - begin),
        "compute_ms": statistics.median(span.end_ns - span.start_ns for span in forwards) / 1e6,
        "host_us": _host_us(timeline, steps),
    }


def _longest_stretch(spans: list[Span]) -> list[Span]:
    """The longest run of spans whose steps follow one another: with more requests than seats there are several."""
    cuts = [place for place in range(1, len(spans)) if spans[place].step != spans[place - 1].step + 1]
    stretches = [spans[first:last] for first, last in pairwise((0, *cuts, len(spans)))]
    return max(stretches, key=len)


def _host_us(timeline: Timeline, steps: set[int]) -> dict[str, float]:
    kinds: dict[str, list[Span]] = {}
    for span in timeline.spans:
        if span.lane == "host" and span.name != "collect" and span.step in steps:
            kinds.setdefault(span.name, []).append(span)
    return {
        name: statistics.median(span.end_ns - span.start_ns for span in spans) / 1e3 for name, spans in kinds.items()
    }
