"""Host work of one decode step in the core: plan + carry-over mask + host arrays + commit, without any executor.

    python experiments/bench_core.py --json

Every request decodes, one step in flight, blocks and prompts at random phases, so blocks are allocated all the time.
A figure is the median over steps; steps in which nothing but decoding happens are the only ones counted.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections import deque
from typing import Annotated

import numpy as np
import typer

from asyncsched.config import EngineConfig
from asyncsched.inputs import SlotInputs
from asyncsched.plan import StepPlan
from asyncsched.request import SamplingParams
from asyncsched.scheduler import Scheduler

DEPTH = 2
WARM_UP = 64


def decode_step_us(batch: int, steps: int, *, enable_prefix_caching: bool = False) -> list[float]:
    """Microseconds of host work of each measured step, prefill and warm-up left out."""
    config = EngineConfig(
        depth=DEPTH,
        max_num_seqs=batch,
        max_num_batched_tokens=batch * 600,
        num_blocks=batch * 512,
        max_model_len=8192,
        enable_prefix_caching=enable_prefix_caching,
    )
    scheduler = Scheduler(config)
    slots = [SlotInputs(config, scheduler.rows) for _ in range(DEPTH)]
    random = np.random.default_rng(0)
    params = SamplingParams(max_tokens=steps + WARM_UP + 8, stop_token_ids=(1,))
    for number in range(batch):
        prompt = random.integers(2, 32000, int(random.integers(64, 512)), dtype=np.int32)
        scheduler.submit(str(number), prompt, params)
    sampled = random.integers(2, 32000, batch, dtype=np.int32)
    in_flight: deque[StepPlan] = deque()
    times = []
    for step in range(steps + WARM_UP):
        start = time.perf_counter_ns()
        plan = scheduler.plan(step % DEPTH)
        assert plan is not None
        slots[plan.slot].fill(plan)
        in_flight.append(plan)
        if len(in_flight) == DEPTH:
            scheduler.commit(in_flight.popleft(), sampled)
        times.append((time.perf_counter_ns() - start) / 1000)
    return times[WARM_UP:]


def main(
    batch: Annotated[list[int] | None, typer.Option(min=1, max=4096, help="Batch sizes; default 32 and 256.")] = None,
    steps: Annotated[int, typer.Option(min=100)] = 4000,
    prefix_caching: Annotated[bool, typer.Option(help="Also hash and register the blocks that fill up.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """Medians, in microseconds per decode step."""
    rows = []
    for size in batch or [32, 256]:
        times = decode_step_us(size, steps, enable_prefix_caching=prefix_caching)
        rows.append(
            {
                "batch": size,
                "median_us": round(statistics.median(times), 2),
                "p99_us": round(float(np.percentile(times, 99)), 2),
                "steps": steps,
                "prefix_caching": prefix_caching,
                "python": platform.python_version(),
                "numpy": np.__version__,
            }
        )
    if as_json:
        print(json.dumps(rows))
        return
    for row in rows:
        print(f"batch {row['batch']:>4}: {row['median_us']:7.1f} us per step (99th percentile {row['p99_us']:.1f})")


if __name__ == "__main__":
    typer.run(main)
