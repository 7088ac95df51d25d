"""What a stretch of asynchronous decoding must not ask of the CUDA runtime, found in a profile of torch's profiler.

Launches and collections of steps are ranges in the profile (executors/nvtx.py, written by `ProfilerRanges`), so the
stretch is cut out by its steps: the profiler itself synchronises and allocates before and after.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

BLOCKS = ("Synchronize",)  # parts of the names of calls that make the host wait
ALLOCATES = ("Malloc", "Alloc", "Free", "HostRegister", "HostUnregister", "MemCreate", "GraphInstantiate")
BLOCKING_COPIES = (
    "cudaMemcpy",
    "cudaMemcpy2D",
    "cudaMemcpyToSymbol",
    "cudaMemset",
    "cuMemcpyHtoD_v2",
    "cuMemcpyDtoH_v2",
)
ALLOWED_IN_COLLECT = ("cudaEventSynchronize", "cuEventSynchronize")


class Call(NamedTuple):
    """An event of a profile; times in microseconds. `on_device`: a kernel or a copy, not a call of the host."""

    name: str
    start: float
    end: float
    on_device: bool = False


class ProfilerRanges:
    """Takes ranges as torch.cuda.nvtx does and writes them into the profile that runs. `at_push` gets each name."""

    def __init__(self, at_push: Callable[[str], object] = lambda name: None) -> None:
        self._open: list[Any] = []
        self._at_push = at_push

    def range_push(self, msg: str) -> None:
        self._open.append(torch.profiler.record_function(msg))
        self._open[-1].__enter__()
        self._at_push(msg)

    def range_pop(self) -> None:
        self._open.pop().__exit__(None, None, None)


def calls_of(events: Iterable[Any]) -> list[Call]:
    """A profiler's `events()`, in order of their start."""
    calls = [
        Call(
            event.name,
            event.time_range.start,
            event.time_range.end,
            event.device_type != torch.autograd.DeviceType.CPU,
        )
        for event in events
    ]
    return sorted(calls, key=lambda call: call.start)


def faults(calls: Sequence[Call], first_step: int, last_step: int) -> list[str]:
    """Names of what must not be there, from the launch of the first step to the collection of the last one."""
    launches, collects = (_ranges(calls, work) for work in ("launch", "collect"))
    begin, end = launches[first_step].start, collects[last_step].end
    inside = [call for call in calls if begin <= call.start <= end]
    waits = list(collects.values())
    return [call.name for call in inside if _is_fault(call, waits)]


def waits_of(calls: Sequence[Call]) -> list[Call]:
    """The calls in which the host waits for an event."""
    return [call for call in calls if call.name in ALLOWED_IN_COLLECT and not call.on_device]


def calls_of_step(calls: Sequence[Call], step: int) -> dict[str, int]:
    """How often the host makes which call of the runtime, or runs which operator of torch, from launch to launch."""
    launches = _ranges(calls, "launch")
    begin, end = launches[step].start, launches[step + 1].start
    names = [call.name for call in calls if begin <= call.start < end and not call.on_device]
    return dict(Counter(name for name in names if name.startswith(("cu", "aten::"))))


def _ranges(calls: Sequence[Call], work: str) -> dict[int, Call]:
    """The ranges of launches or collections by step."""
    start = f"{work} step "
    ranges = [call for call in calls if call.name.startswith(start) and not call.on_device]
    return {int(call.name.removeprefix(start).split(":")[0]): call for call in ranges}


def _is_fault(call: Call, collects: Sequence[Call]) -> bool:
    if call.on_device:
        return call.name.startswith("Memcpy") and "Pageable" in call.name
    if not call.name.startswith("cu"):  # cuda... or cu...: other names are torch's operators, and ranges
        return False
    if call.name in ALLOWED_IN_COLLECT:
        return not any(collect.start <= call.start and call.end <= collect.end for collect in collects)
    return call.name in BLOCKING_COPIES or any(part in call.name for part in (*BLOCKS, *ALLOCATES))
