"""What sampling costs per step beyond taking the largest logit, for each feature a request may ask for.

    python experiments/sampling_cost.py --batch 32 --step-ms 5.5 --json

On a GPU a step's sampling runs as in a captured decode step: one graph, replayed. Logits are random: "flat" ones have a
standard deviation of 1, as of random weights, "peaked" ones of 4. Takes about half a minute.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import torch
import typer

from asyncsched.plan import NO_SOURCE, StepPlan
from asyncsched.request import SamplingParams
from executors.compute import variant
from executors.sampling import sample
from executors.sampling_layout import NUM_WORDS
from executors.sampling_rows import SamplingRows
from executors.sampling_state import SamplerState

SPREADS = {"flat": 1.0, "peaked": 4.0}
TOP_P = {"seed": 1, "temperature": 0.8, "top_p": 0.9}
PENALTIES = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.1}
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(seed=1, temperature=0.8),
    "+ top_p": SamplingParams(**TOP_P),
    "+ top_k": SamplingParams(seed=1, temperature=0.8, top_k=50),
    "+ top_p, penalties": SamplingParams(**TOP_P, **PENALTIES),
    "+ top_p, penalties, logprobs": SamplingParams(**TOP_P, **PENALTIES, logprobs=5),
    "greedy, logprobs": SamplingParams(temperature=0.0, logprobs=5),
}


class Step:
    """One step's sampling: `batch` rows with the same parameters, each with a prompt of 128 tokens."""

    def __init__(self, params: SamplingParams, batch: int, logits: torch.Tensor) -> None:
        vocab_size, device = logits.shape[1], logits.device
        rows, self.state = SamplingRows(batch, vocab_size), SamplerState(batch, vocab_size, device)
        random = np.random.default_rng(0)
        nothing = np.zeros(0, dtype=np.int32)
        for row in range(batch):
            rows.seat(row, row, params, random.integers(0, vocab_size, 128, dtype=np.int32), nothing)
        at = np.arange(batch)
        carry = np.full(batch, NO_SOURCE)
        plan = StepPlan(0, 0, at, at, at + 128, at + 129, batch, carry, at, at + 129, at, batch, batch)
        look = rows.look(plan)
        words = np.zeros((batch, NUM_WORDS), dtype=np.int32)
        rows.pack(plan, look, words)
        self.logits, self.words = logits, torch.from_numpy(words).to(device)
        self.features = variant(look.features)
        self.state.allocate(self.features)
        resets = rows.take_resets()
        if len(resets.words):
            self.state.reset(torch.from_numpy(resets.words).to(device), resets)

    def __call__(self) -> object:
        return sample(self.logits, self.words, self.state, self.features)


def per_step_us(step: Step, rounds: int) -> float:
    """Median time of one step's sampling."""
    if step.logits.is_cuda:
        return _replayed_us(step, rounds)
    times = []
    for _ in range(3):
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times)


def _replayed_us(step: Callable[[], object], rounds: int, per_round: int = 20) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()  # compiles, and sets up whatever the first use does
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            step()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        times = []
        for _ in range(rounds):
            begin.record(stream)
            for _ in range(per_round):
                graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(1e3 * begin.elapsed_time(end) / per_round)
    return statistics.median(times[len(times) // 4 :])


@torch.no_grad()
def measure(batch: int, vocab_size: int, rounds: int) -> list[dict[str, Any]]:
    """One row per kind of logits and of parameters."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for spread, deviation in SPREADS.items():
        generator = torch.Generator(device).manual_seed(0)
        logits = torch.randn(batch, vocab_size, generator=generator, device=device) * deviation
        greedy = None
        for name, params in KINDS.items():
            spent = per_step_us(Step(params, batch, logits), rounds)
            greedy = spent if greedy is None else greedy
            rows.append({"logits": spread, "sampling": name, "us": spent, "over_greedy_us": spent - greedy})
    return rows


def main(
    batch: Annotated[int, typer.Option(min=1)] = 32,
    vocab_size: Annotated[int, typer.Option(min=64)] = 128_256,
    step_ms: Annotated[float, typer.Option(help="A whole greedy step, to relate the cost to.")] = 5.5,
    rounds: Annotated[int, typer.Option(min=4, help="Medians are over so many; GPU only.")] = 30,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Microseconds per step, and the share of a step that sampling adds to greedy."""
    rows = measure(batch, vocab_size, rounds)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    if as_json:
        setting = {"device": device, "torch": torch.__version__, "batch": batch, "vocab_size": vocab_size}
        print(json.dumps({**setting, "step_ms": step_ms, "rows": rows}))
        return
    print(f"{device}, batch {batch}, vocabulary {vocab_size}; of a step of {step_ms:g} ms")
    for row in rows:
        us, over = row["us"], row["over_greedy_us"]
        print(f"{row['logits']:7s} {row['sampling']:30s} {us:9.1f} us   {over:+9.1f} us {over / step_ms / 10:+6.1f}%")


if __name__ == "__main__":
    typer.run(main)
