"""NVTX ranges for Nsight Systems: one per launch and collection of a step, and inside them one per operation.

`mark` puts them around the methods of one executor, so an engine that does not ask for them runs none of this. A range
is the host's time; Nsight Systems projects it onto the streams that the work inside it went to.
"""

from __future__ import annotations

import weakref
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
    """Before its first launch. What is put into a part does not keep it, or only the collector frees its memory."""

    def put(part: object, method: str, name: Callable[..., str]) -> None:
        work, itself = getattr(type(part), method), weakref.ref(part)

        def ranged(*arguments: Any) -> Any:
            recorder.range_push(name(*arguments))
            try:
                return work(itself(), *arguments)
            finally:
                recorder.range_pop()

        setattr(part, method, ranged)

    launched = deque[StepPlan]()

    def launch(program: StepProgram) -> str:
        launched.append(program.plan)
        return _name("launch", program.plan)

    compute = executor.compute
    put(compute, "carry", lambda *_: "compute: carry")
    put(compute, "forward", lambda *_: "compute: forward")
    put(compute, "offload", lambda *_: "d2h: offload")
    put(compute, "restore", lambda *_: "h2d: restore")
    for slot in executor.slots:
        put(slot, "copy_in", lambda *_: "h2d: inputs")
        put(slot, "copy_out", lambda *_: "d2h: outputs")
    put(executor, "launch", launch)
    put(executor, "collect", lambda ticket: _name("collect", launched.popleft()))


def _name(work: str, plan: StepPlan) -> str:
    return f"{work} step {plan.step}: {plan.num_seqs} sequences, {plan.num_tokens} tokens, slot {plan.slot}"
