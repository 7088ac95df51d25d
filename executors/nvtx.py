"""NVTX ranges for Nsight Systems: one per launch and collection of a step, and inside them one per operation.

`mark` puts them around the methods of one executor, so an engine that does not ask for them runs none of this. A range
is the host's time; Nsight Systems projects it onto the streams that the work inside it went to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

from asyncsched.errors import ConfigError
from asyncsched.plan import StepPlan
from asyncsched.program import StepProgram
from executors.executor import Executor


class Recorder(Protocol):
    """Takes nested ranges; torch.cuda.nvtx is one."""

    def range_push(self, msg: str) -> Any: ...

    def range_pop(self) -> Any: ...


def recorder(device: torch.device) -> Recorder:
    """Raises ConfigError where there is nothing that records ranges."""
    if device.type != "cuda":
        raise ConfigError("nvtx", True, "it marks CUDA streams: use it with device cuda, or leave it out")
    return torch.cuda.nvtx


def mark(executor: Executor, recorder: Recorder) -> None:
    """Before its first launch."""

    def ranged(work: Callable[..., Any], name: str) -> Callable[..., Any]:
        return lambda *arguments: _inside(recorder, name, work, arguments)

    compute = executor.compute
    compute.carry = ranged(compute.carry, "compute: carry")  # type: ignore[method-assign]
    compute.forward = ranged(compute.forward, "compute: forward")  # type: ignore[method-assign]
    compute.offload = ranged(compute.offload, "d2h: offload")  # type: ignore[method-assign]
    compute.restore = ranged(compute.restore, "h2d: restore")  # type: ignore[method-assign]
    for slot in executor.slots:
        slot.copy_in = ranged(slot.copy_in, "h2d: inputs")  # type: ignore[method-assign]
        slot.copy_out = ranged(slot.copy_out, "d2h: outputs")  # type: ignore[method-assign]

    launch, collect, launched = executor.launch, executor.collect, deque[StepPlan]()

    def marked_launch(program: StepProgram) -> Any:
        launched.append(program.plan)
        return _inside(recorder, _name("launch", program.plan), launch, (program,))

    def marked_collect(ticket: Any) -> Any:
        return _inside(recorder, _name("collect", launched.popleft()), collect, (ticket,))

    executor.launch, executor.collect = marked_launch, marked_collect  # type: ignore[method-assign]


def _name(work: str, plan: StepPlan) -> str:
    return f"{work} step {plan.step}: {plan.num_seqs} sequences, {plan.num_tokens} tokens, slot {plan.slot}"


def _inside(recorder: Recorder, name: str, work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    recorder.range_push(name)
    try:
        return work(*arguments)
    finally:
        recorder.range_pop()
