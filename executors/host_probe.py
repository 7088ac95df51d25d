"""How quick is the host just now? A fixed piece of the core's own work, timed: no device, no model, no workload.

Hosts change their speed by factors of two from one second to the next. A recorder reads the probe before, during and
after a run, so that whoever predicts the run may know the host that it met, and nothing of what came out. Readings
during a run are larger than those beside it: in between others have used the caches.
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
LASTS = 8000  # steps, then a probe is made anew: minutes of a recording, and 2 ms to make
_BLOCK = 16  # tokens
_FIELDS_BEFORE_CPU = 36  # in /proc/thread-self/stat, behind the name in brackets


class Reading(NamedTuple):
    """`step_us`: of one step of the core, plan to commit, on average. `thread_share`: of that time, how much the thread
    had a CPU: less than 1 means that somebody else ran there. `cpu`: which one it was at the end, -1 where nobody says.
    """

    step_us: float
    thread_share: float
    cpu: int


class Probe:
    """The piece of work, kept ready: `step_ns` does one decode step of a scheduler of its own, plan to commit, and says
    how long that took. It never ends: after `lasts` steps it begins anew, before the time is taken."""

    def __init__(self, lasts: int = LASTS) -> None:
        self._lasts = lasts
        self._begin()

    def step_ns(self) -> int:
        if not self._left:
            self._begin()
        self._left -= 1
        began = time.perf_counter_ns()
        self._step()
        return time.perf_counter_ns() - began

    def _begin(self) -> None:
        """The prompts, and some steps, so that none is the first of its kind."""
        steps = self._lasts + WARM_UP
        length = 1 << (steps + 63).bit_length()  # prompts are of fewer than 48 tokens
        config = EngineConfig(
            depth=1,
            max_num_seqs=SEQS,
            max_num_batched_tokens=SEQS * 64,
            block_size=_BLOCK,
            num_blocks=SEQS * length // _BLOCK,
            max_model_len=length,
        )
        self._scheduler = Scheduler(config)
        self._inputs = SlotInputs(config, self._scheduler.rows)
        self._sampled = np.full(SEQS, 7, dtype=np.int32)
        for number in range(SEQS):
            params = SamplingParams(max_tokens=steps + 8, ignore_eos=True)
            self._scheduler.submit(str(number), np.full(32 + number % 16, 5, dtype=np.int32), params)
        for _ in range(WARM_UP):
            self._step()
        self._left = self._lasts

    def _step(self) -> None:
        plan = self._scheduler.plan(0)
        assert plan is not None  # nobody has ended
        self._inputs.fill(plan)
        self._scheduler.commit(plan, self._sampled)


def read_host_speed() -> Reading:
    """Steps of a probe, one after the other. Needs the thread to itself for a tenth of a second."""
    probe = Probe(STEPS)
    took, on_cpu = time.perf_counter_ns(), time.thread_time_ns()
    for _ in range(STEPS):
        probe._step()
    took, on_cpu = time.perf_counter_ns() - took, time.thread_time_ns() - on_cpu
    return Reading(took / 1e3 / STEPS, on_cpu / took, _cpu())


def _cpu() -> int:
    try:
        stat = Path("/proc/thread-self/stat").read_text(encoding="ascii")
        return int(stat.rpartition(")")[2].split()[_FIELDS_BEFORE_CPU])
    except (OSError, ValueError, IndexError):
        return -1
