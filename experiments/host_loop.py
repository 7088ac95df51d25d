"""Host work of a whole decode step around a model that does nothing: plan, fill, launch, collect, commit and delivery.

    OMP_NUM_THREADS=1 python experiments/host_loop.py [--wait-ms 3] --json

On CPU lanes, so launching costs what Python costs; what CUDA calls add is in the section host of compare_peers.py. A
real host waits for its device in every step, and comes back to caches that have gone cold: `--wait-ms` waits too.
Waiting is not counted. The probe (executors/host_probe.py) says how quick the host was, so that runs may be compared.
"""

from __future__ import annotations

import json
import time
from itertools import product
from typing import Annotated

import numpy as np
import torch
import typer

from asyncsched.config import EngineConfig
from asyncsched.plan import StepOutput, StepPlan
from asyncsched.program import Event
from asyncsched.request import SamplingParams
from asyncsched.scheduler import Scheduler
from executors.cpu import CpuLanes
from executors.engine import Engine
from executors.executor import Executor
from executors.frontend import Frontend
from executors.host_probe import read_host_speed
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


class WaitingLanes(CpuLanes):
    """Lanes whose steps take `wait_s`. `waited_ns` is what has been spent on that."""

    def __init__(self, wait_s: float) -> None:
        super().__init__()
        self._wait_s = wait_s
        self.waited_ns = 0

    def synchronize(self, event: Event) -> None:
        if self._wait_s:
            started = time.perf_counter_ns()
            time.sleep(self._wait_s)
            self.waited_ns += time.perf_counter_ns() - started
        super().synchronize(event)


def steps_us(batch: int, steps: int, *, is_streamed: bool, is_random: bool, wait_s: float = 0.0) -> list[float]:
    """Of decode steps, one by one; prompts at random phases."""
    config = EngineConfig(
        depth=DEPTH, max_num_seqs=batch, num_blocks=batch * 256, vocab_size=VOCAB, decode_buckets=(batch,)
    )
    scheduler = Scheduler(config)
    rows = scheduler.rows
    sampling = SamplingRows(rows.capacity, VOCAB)
    tokens = torch.zeros(DEPTH, batch, dtype=torch.int32)
    slots = [Slot(index, config, rows, sampling, tokens[index], pinned=False) for index in range(DEPTH)]
    lanes = WaitingLanes(wait_s)
    executor = Executor(lanes, NoModel(), slots, on_logprobs=lambda plan, words: None, timeline=None)
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
        started, lanes.waited_ns = time.perf_counter_ns(), 0
        engine.run()
        times.append((time.perf_counter_ns() - started - lanes.waited_ns) / 1e3)
    return times[WARM_UP:]


def main(
    batch: Annotated[list[int] | None, typer.Option(min=1, help="Batch sizes; default 32 and 256.")] = None,
    steps: Annotated[int, typer.Option(min=100)] = 800,
    wait_ms: Annotated[float, typer.Option(min=0.0, max=1000.0, help="What a step takes on the device.")] = 0.0,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Microseconds per step: greedy or random, with and without pieces for a stream."""
    rows = []
    for size, is_random, is_streamed in product(batch or [32, 256], (False, True), (False, True)):
        before = read_host_speed().step_us
        times = steps_us(size, steps, is_streamed=is_streamed, is_random=is_random, wait_s=wait_ms / 1e3)
        p10, p50, p90 = np.percentile(times, (10, 50, 90))
        rows.append(
            {
                "batch": size,
                "sampling": "random" if is_random else "greedy",
                "streamed": is_streamed,
                "wait_ms": wait_ms,
                "us": round(p50, 1),
                "p10_us": round(p10, 1),
                "p90_us": round(p90, 1),
                "probe_us": round((before + read_host_speed().step_us) / 2, 1),
            }
        )
    if as_json:
        print(json.dumps(rows))
        return
    for row in rows:
        streamed = "streamed" if row["streamed"] else ""
        spread = f"p10 {row['p10_us']:.1f}, p90 {row['p90_us']:.1f}, probe {row['probe_us']:.1f}"
        print(f"batch {row['batch']:>4}, {row['sampling']}: {row['us']:7.1f} us per step ({spread}) {streamed}")


if __name__ == "__main__":
    typer.run(main)
