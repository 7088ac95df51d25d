"""NVTX ranges for Nsight Systems: one per launch and collection of a step, and inside them one per operation's lane.

They wrap an executor and its lanes from outside, so an engine that does not ask for them runs none of this. A range is
the host's time; Nsight Systems projects it onto the streams that the work inside it went to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from asyncsched.errors import ConfigError
from asyncsched.plan import StepPlan
from asyncsched.program import Lane, StepProgram
from executors.executor import Executor, Lanes, Ticket


class Recorder(Protocol):
    """Takes nested ranges; torch.cuda.nvtx is one."""

    def range_push(self, msg: str) -> Any: ...

    def range_pop(self) -> Any: ...


def recorder(device: torch.device) -> Recorder:
    """Raises ConfigError where there is nothing that records ranges."""
    if device.type != "cuda":
        raise ConfigError("nvtx", True, "it marks CUDA streams: use it with device cuda, or leave it out")
    return torch.cuda.nvtx


class MarkedLanes:
    """Lanes whose operations are ranges named by their lane."""

    def __init__(self, lanes: Lanes, recorder: Recorder) -> None:
        self._lanes, self._recorder = lanes, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lanes, name)

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        with _range(self._recorder, lane.value), self._lanes.on(lane):
            yield


class MarkedExecutor:
    """An executor whose steps are ranges. Its lanes should be `MarkedLanes`."""

    def __init__(self, executor: Executor, recorder: Recorder) -> None:
        self._executor, self._recorder = executor, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def launch(self, program: StepProgram) -> Ticket:
        with _range(self._recorder, _name("launch", program.plan)):
            return self._executor.launch(program)

    def collect(self, ticket: Ticket) -> Any:
        with _range(self._recorder, _name("collect", ticket.program.plan)):
            return self._executor.collect(ticket)


def _name(work: str, plan: StepPlan) -> str:
    return f"{work} step {plan.step}: {plan.num_seqs} sequences, {plan.num_tokens} tokens, slot {plan.slot}"


@contextmanager
def _range(recorder: Recorder, name: str) -> Iterator[None]:
    recorder.range_push(name)
    try:
        yield
    finally:
        recorder.range_pop()
