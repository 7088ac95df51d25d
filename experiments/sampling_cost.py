"""What sampling costs per step beyond taking the largest logit, for each feature a request may ask for.

    python experiments/sampling_cost.py --batch 32 --step-ms 5.5 --json

On a GPU steps are captured as in decoding; a graph holds a few, at positions that follow one another, so that each
draws tokens of its own. Before a replay, counts for penalties are what they were: 128 tokens of a prompt, no more.
Logits are bf16, as models give them, and random: "flat" ones have a standard deviation of 1, as of random weights,
"peaked" ones of 4. `--kernels` lists what runs in a step with everything on. Takes about half a minute.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Annotated, Any

import numpy as np
import torch
import typer

from asyncsched.plan import NO_SOURCE, StepPlan
from asyncsched.request import SamplingParams
from executors.compute import variant
from executors.sampling import sample
from executors.sampling_layout import NUM_WORDS, Features
from executors.sampling_rows import SamplingRows
from executors.sampling_state import SamplerState

SPREADS = {"flat": 1.0, "peaked": 4.0}
STEPS = 20  # in a graph
PROMPT = 128
EVERYTHING = "+ top_p, penalties, logprobs"
TOP_P = {"seed": 1, "temperature": 0.8, "top_p": 0.9}
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1}
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(seed=1, temperature=0.8),
    "+ top_p": SamplingParams(**TOP_P),
    "+ top_k": SamplingParams(seed=1, temperature=0.8, top_k=50),
    "+ top_p, penalties": SamplingParams(**TOP_P, **PENALTIES),
    EVERYTHING: SamplingParams(**TOP_P, **PENALTIES, logprobs=5),
    "greedy, logprobs": SamplingParams(temperature=0.0, logprobs=5),
}


class Steps:
    """Sampling of STEPS steps, one after the other: `batch` rows with the same parameters and prompts of their own."""

    def __init__(self, params: SamplingParams, batch: int, logits: torch.Tensor) -> None:
        vocab_size, device = logits.shape[1], logits.device
        rows, self.state = SamplingRows(batch, vocab_size), SamplerState(batch, vocab_size, device)
        random = np.random.default_rng(0)
        nothing = np.zeros(0, dtype=np.int32)
        for row in range(batch):
            rows.seat(row, row, params, random.integers(0, vocab_size, PROMPT, dtype=np.int32), nothing)
        at, carry = np.arange(batch), np.full(batch, NO_SOURCE)
        words = np.zeros((STEPS, batch, NUM_WORDS), dtype=np.int32)
        features = Features.NONE
        for step in range(STEPS):
            end = at * 0 + PROMPT + 1 + step
            look = rows.look(plan := StepPlan(0, 0, at, at, end - 1, end, batch, carry, at, end, at, batch, batch))
            rows.pack(plan, look, words[step])
            features |= look.features
        self.logits, self.words = logits, torch.from_numpy(words).to(device)
        self.features = variant(features)
        self.state.allocate(self.features)
        self._resets = rows.take_resets()
        self._reset_words = torch.from_numpy(self._resets.words).to(device)

    def begin(self) -> None:
        """What rows have counted is their prompt."""
        if len(self._resets.words):
            self.state.reset(self._reset_words, self._resets)

    def run(self, count: int = STEPS) -> None:
        for words in self.words[:count]:
            sample(self.logits, words, self.state, self.features)


def per_step_us(steps: Steps, rounds: int) -> float:
    """Median time of one step's sampling."""
    if steps.logits.is_cuda:
        return _replayed_us(steps, rounds)
    times = []
    for _ in range(3):
        steps.begin()
        started = time.perf_counter()
        steps.run(1)
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times)


def _replayed_us(steps: Steps, rounds: int) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph = _captured(steps, stream)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        times = []
        for _ in range(rounds):
            steps.begin()
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(1e3 * begin.elapsed_time(end) / STEPS)
    return statistics.median(times[len(times) // 4 :])


def _captured(steps: Steps, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    steps.begin()
    steps.run(1)  # compiles, and sets up whatever the first use does
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        steps.run()
    return graph


@torch.no_grad()
def kernels_us(steps: Steps) -> dict[str, float]:
    """Microseconds of a step by kernel."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph = _captured(steps, stream)
        steps.begin()
        stream.synchronize()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
            graph.replay()
            torch.cuda.synchronize()
    spent: dict[str, float] = {}
    for event in profiled.events():
        if event.device_type == DeviceType.CUDA:
            spent[event.name] = spent.get(event.name, 0.0) + event.time_range.elapsed_us() / STEPS
    return dict(sorted(spent.items(), key=lambda item: -item[1]))


def random_logits(batch: int, vocab_size: int, deviation: float) -> torch.Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    return (torch.randn(batch, vocab_size, generator=generator, device=device) * deviation).bfloat16()


@torch.no_grad()
def measure(batch: int, vocab_size: int, rounds: int) -> list[dict[str, Any]]:
    """One row per kind of logits and of parameters."""
    rows = []
    for spread, deviation in SPREADS.items():
        logits, greedy = random_logits(batch, vocab_size, deviation), None
        for name, params in KINDS.items():
            spent = per_step_us(Steps(params, batch, logits), rounds)
            greedy = spent if greedy is None else greedy
            rows.append({"logits": spread, "sampling": name, "us": spent, "over_greedy_us": spent - greedy})
    return rows


def main(
    batch: Annotated[int, typer.Option(min=1)] = 32,
    vocab_size: Annotated[int, typer.Option(min=64)] = 128_256,
    step_ms: Annotated[float, typer.Option(help="A whole greedy step, to relate the cost to.")] = 5.5,
    rounds: Annotated[int, typer.Option(min=4, help="Medians are over so many; GPU only.")] = 30,
    kernels: Annotated[bool, typer.Option(help="The kernels of a step with everything on; GPU only.")] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Microseconds per step, and the share of a step that sampling adds to greedy."""
    if kernels and not torch.cuda.is_available():
        raise SystemExit("error: --kernels needs a CUDA device")
    rows = measure(batch, vocab_size, rounds)
    all_on = Steps(KINDS[EVERYTHING], batch, random_logits(batch, vocab_size, 1.0)) if kernels else None
    by_kernel = {} if all_on is None else kernels_us(all_on)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    if as_json:
        setting = {"device": device, "torch": torch.__version__, "batch": batch, "vocab_size": vocab_size}
        print(json.dumps({**setting, "step_ms": step_ms, "rows": rows, "kernels_us": by_kernel}))
        return
    print(f"{device}, batch {batch}, vocabulary {vocab_size}; of a step of {step_ms:g} ms")
    for row in rows:
        us, over = row["us"], row["over_greedy_us"]
        print(f"{row['logits']:7s} {row['sampling']:30s} {us:9.1f} us   {over:+9.1f} us {over / step_ms / 10:+6.1f}%")
    for name, us in by_kernel.items():
        print(f"{us:9.1f} us  {name[:100]}")


if __name__ == "__main__":
    typer.run(main)
