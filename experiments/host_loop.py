"""Host work of a whole decode step around a model that does nothing: plan, fill, launch, collect, commit and delivery.

    OMP_NUM_THREADS=1 python experiments/host_loop.py --json

On CPU lanes, so launching costs what Python costs; what CUDA calls add is in the section host of compare_peers.py.
"""

from __future__ import annotations

import json
import statistics
import time
from typing import Annotated

import numpy as np
import torch
import typer

from asyncsched.config import EngineConfig
from asyncsched.plan import StepOutput, StepPlan
from asyncsched.request import SamplingParams
from asyncsched.scheduler import Scheduler
from executors.cpu import CpuLanes
from executors.engine import Engine
from executors.executor import Executor
from executors.frontend import Frontend
from executors.sampling_rows import SamplingRows
from executors.slots import Slot
from executors.streams import Stream

DEPTH, VOCAB, WARM_UP = 2, 128_256, 40


class NoModel:
    """A compute lane on which nothing happens: every token is 0."""

    def carry(self, stream: Stream, slot: Slot, plan: StepPlan) -> None: ...

    def forward(self, stream: Stream, slot: Slot, plan: StepPlan) -> None: ...

    def offload(self, stream: Stream, plan: StepPlan) -> None: ...

    def restore(self, stream: Stream, plan: StepPlan) -> None: ...


def step_us(batch: int, steps: int, *, is_streamed: bool, is_random: bool) -> float:
    """Median over decode steps; prompts at random phases."""
    config = EngineConfig(
        depth=DEPTH, max_num_seqs=batch, num_blocks=batch * 256, vocab_size=VOCAB, decode_buckets=(batch,)
    )
    scheduler = Scheduler(config)
    rows = scheduler.rows
    sampling = SamplingRows(rows.capacity, VOCAB)
    tokens = torch.zeros(DEPTH, batch, dtype=torch.int32)
    slots = [Slot(index, config, rows, sampling, tokens[index], pinned=False) for index in range(DEPTH)]
    executor = Executor(CpuLanes(), NoModel(), slots, on_logprobs=lambda plan, words: None, timeline=None)
    frontend = Frontend(None, ())

    def deliver(output: StepOutput) -> None:
        frontend.deliver(output)

    engine = Engine(scheduler, executor, deliver)
    random = np.random.default_rng(0)
    params = SamplingParams(temperature=float(is_random), seed=1, max_tokens=steps + 2 * WARM_UP, ignore_eos=True)
    for number in range(batch):
        prompt = random.integers(0, VOCAB, int(random.integers(64, 200))).tolist()
        for command in frontend.requests(str(number), prompt, params, is_streamed=is_streamed):
            engine.inbox.put(command)
    times = []
    for _ in range(WARM_UP + steps):
        started = time.perf_counter_ns()
        engine.run()
        times.append((time.perf_counter_ns() - started) / 1e3)
    return statistics.median(times[WARM_UP:])


def main(
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Batch sizes; default 32 and 256.")] = None,
    steps: Annotated[int, typer.Option(min=100)] = 800,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Microseconds per step: greedy or random, with and without pieces for a stream."""
    rows = [
        {
            "batch": size,
            "sampling": "random" if is_random else "greedy",
            "streamed": is_streamed,
            "us": round(step_us(size, steps, is_streamed=is_streamed, is_random=is_random), 1),
        }
        for size in batch or [32, 256]
        for is_random in (False, True)
        for is_streamed in (False, True)
    ]
    if as_json:
        print(json.dumps(rows))
        return
    for row in rows:
        streamed = "streamed" if row["streamed"] else ""
        print(f"batch {row['batch']:>4}, {row['sampling']}: {row['us']:7.1f} us per step {streamed}")


if __name__ == "__main__":
    typer.run(main)
