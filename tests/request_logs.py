"""Logs of requests with known prices: the simulator's own runs, as somebody else would have recorded them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from asyncsched.config import EngineConfig
from asyncsched.runs import RequestLog
from sim.replay import Replayed, Workload
from sim.request_fit import StepPrices

TRUTH = StepPrices((0.012, 2e-5, 1.2e-7, 0.008, 3e-5, 2e-9))
CONFIG = EngineConfig(
    max_num_seqs=32, max_num_batched_tokens=1024, max_model_len=4096, num_blocks=4000, enable_prefix_caching=True
)
TIGHT = replace(CONFIG, num_blocks=700)


def workload(count: int = 60, *, seed: int = 0, rate: float = 6.0) -> Workload:
    random = np.random.default_rng(seed)
    arrival = np.concatenate(([0], np.cumsum(random.exponential(1e9 / rate, count - 1)))).astype(np.int64)
    return Workload(arrival, random.integers(50, 1500, count), random.integers(40, 300, count))


def log_of(work: Workload, replayed: Replayed, planned: bool = True) -> RequestLog:
    return RequestLog.from_outside(
        [str(number) for number in range(len(work.arrival_ns))],
        arrival_ns=work.arrival_ns,
        prompt_tokens=work.prompt_tokens,
        output_tokens=work.output_tokens,
        scheduled_ns=replayed.planned_ns[replayed.admitted] if planned else None,
        first_ns=replayed.first_ns,
        last_ns=replayed.last_ns,
    )
