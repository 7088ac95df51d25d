"""How quick is the host just now? A fixed piece of the core's own work, timed: no device, no model, no workload.

Hosts change their speed by factors of two from one second to the next. A recorder reads the probe before and after a
run, so that whoever predicts the run may know the host that it met, and nothing of what came out.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from asyncsched.config import EngineConfig
from asyncsched.inputs import SlotInputs
from asyncsched.request import SamplingParams
from asyncsched.scheduler import Scheduler

SEQS = 32
STEPS = 800  # a tenth of a second on a slow host
WARM_UP = 40
_FIELDS_BEFORE_CPU = 36  # in /proc/thread-self/stat, behind the name in brackets


class Reading(NamedTuple):
    """`step_us`: of one step of the core, plan to commit, on average. `thread_share`: of that time, how much the thread
    had a CPU: less than 1 means that somebody else ran there. `cpu`: which one it was at the end, -1 where nobody says.
    """

    step_us: float
    thread_share: float
    cpu: int


def read_host_speed() -> Reading:
    """Decode steps of one scheduler, always the same ones. Needs the thread to itself for a tenth of a second."""
    config = EngineConfig(
        depth=1, max_num_seqs=SEQS, max_num_batched_tokens=SEQS * 64, num_blocks=SEQS * 64, max_model_len=1024
    )
    scheduler = Scheduler(config)
    inputs = SlotInputs(config, scheduler.rows)
    sampled = np.full(SEQS, 7, dtype=np.int32)
    for number in range(SEQS):
        params = SamplingParams(max_tokens=STEPS + WARM_UP + 8, ignore_eos=True)
        scheduler.submit(str(number), np.full(32 + number % 16, 5, dtype=np.int32), params)
    began = on_cpu = 0
    for step in range(STEPS + WARM_UP):
        if step == WARM_UP:
            began, on_cpu = time.perf_counter_ns(), time.thread_time_ns()
        plan = scheduler.plan(0)
        assert plan is not None  # nobody has ended
        inputs.fill(plan)
        scheduler.commit(plan, sampled)
    took, on_cpu = time.perf_counter_ns() - began, time.thread_time_ns() - on_cpu
    return Reading(took / 1e3 / STEPS, on_cpu / took, _cpu())


def _cpu() -> int:
    try:
        stat = Path("/proc/thread-self/stat").read_text(encoding="ascii")
        return int(stat.rpartition(")")[2].split()[_FIELDS_BEFORE_CPU])
    except (OSError, ValueError, IndexError):
        return -1
