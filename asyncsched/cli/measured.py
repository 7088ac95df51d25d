"""Timelines that were measured: a trace, and a picture of a few steps from the middle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from asyncsched.cli.files import write_output
from asyncsched.timeline import Timeline

ON_CPU = "Measured on a CPU: one thread prepares the steps and computes them"
PLOTTED_STEPS = 6  # from the middle of the run, where no choice is made


def write_timelines(timelines: Mapping[str, Timeline], *, trace: Path | None, plot: Path | None, on_cpu: bool) -> None:
    """Writes what is asked for of these timelines, by label. Of timelines without a step there is nothing to write."""
    timelines = {label: _from_zero(timeline) for label, timeline in timelines.items() if timeline.spans}
    if not timelines:
        return
    if trace is not None:
        write_output("--trace", trace, json.dumps(_side_by_side(timelines), allow_nan=False).encode())
    if plot is not None:
        from asyncsched.plotting import GPU, plot_timeline

        count = min(1 + max(span.step for span in timeline.spans) for timeline in timelines.values())
        first = max(count // 2 - PLOTTED_STEPS // 2, 0)
        steps = (first, min(first + PLOTTED_STEPS, count) - 1)
        title, device = (ON_CPU, "compute lane") if on_cpu else (None, GPU)
        plot_timeline(list(timelines.items()), plot, steps=steps, title=title, device=device)


def _from_zero(timeline: Timeline) -> Timeline:
    """Time and steps count from the first span: a warm-up may have come before."""
    start = min(span.start_ns for span in timeline.spans)
    step = min(span.step for span in timeline.spans)
    return Timeline(
        [
            span._replace(step=span.step - step, start_ns=span.start_ns - start, end_ns=span.end_ns - start)
            for span in timeline.spans
        ]
    )


def _side_by_side(timelines: Mapping[str, Timeline]) -> dict[str, object]:
    """One trace with a process per timeline."""
    events: list[object] = []
    for process, (label, timeline) in enumerate(timelines.items()):
        trace = timeline.to_perfetto()
        assert isinstance(trace["traceEvents"], list)
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": label}})
        events += [{**event, "pid": process} for event in trace["traceEvents"]]
    return {"traceEvents": events, "displayTimeUnit": "ms"}
