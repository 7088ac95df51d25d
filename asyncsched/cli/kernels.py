"""How much of the time the GPU's kernels ran, from a profile. Stricter than events, which count gaps inside a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

NO_KERNELS = ("Memcpy", "Memset")  # how the profiler names what the copy engines do
MIDDLE = (0.25, 0.75)  # the part of the profile that is looked at: no prefill, no end


def kernel_share(work: Callable[[], object]) -> float | None:
    """Runs `work` under the profiler. The share of its middle in which some kernel ran; None where none did."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        work()
        torch.cuda.synchronize()
    return busy_share(_kernels(profiled.events()))


def busy_share(intervals: Iterable[tuple[float, float]]) -> float | None:
    """The share of the middle of all intervals that at least one of them covers; None where there is no interval."""
    ordered = sorted(intervals)
    if not ordered:
        return None
    first, last = ordered[0][0], max(end for _, end in ordered)
    begin, end = (first + part * (last - first) for part in MIDDLE)
    busy, free = 0.0, begin
    for start, stop in ordered:
        start, stop = max(start, free), min(stop, end)
        if stop > start:
            busy += stop - start
            free = stop
    return busy / (end - begin) if end > begin else None


def _kernels(events: Iterable[Any]) -> list[tuple[float, float]]:
    from torch.autograd import DeviceType

    return [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA and not event.name.startswith(NO_KERNELS)
    ]
