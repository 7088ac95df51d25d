"""In which part of a steady decode step a kernel runs, by torch's profiler: what GPU active by events cannot tell."""

from __future__ import annotations

import torch
from peers import Load, Ours

ANCHOR = "attend_decodes"  # runs once per layer of a decode step, and in no other step of a load whose prompts fit one
EDGE = 12  # steps left out at either end


def kernel_share(engine: Ours, load: Load) -> float | None:
    """Kernel time per step, from a run under the profiler, over the period of a step in a run without it.

    The profiler makes gaps longer, not kernels. None where there are no kernels, or too few steps.
    """
    if not torch.cuda.is_available():
        return None
    period_ms = engine.profile(load)["ms_per_step"]
    busy_ms = _busy_ms(engine, load)
    return None if period_ms is None or busy_ms is None else busy_ms / period_ms


def _busy_ms(engine: Ours, load: Load) -> float | None:
    """Time in which some kernel runs, per decode step."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        engine.generate(load)
        torch.cuda.synchronize()
    kernels = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiled.events()
        if event.device_type == DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
    )
    steps = [start for start, _, name in kernels if ANCHOR in name][:: engine.llm.model.num_layers]
    if len(steps) < 2 * EDGE + 8:
        return None
    first, last = steps[EDGE], steps[-EDGE]
    busy, until = 0.0, first
    for start, end, _ in kernels:
        if first <= start < last:
            busy += max(0.0, min(end, last) - max(start, until))
            until = max(until, end)
    return busy / 1e3 / (len(steps) - 2 * EDGE)
