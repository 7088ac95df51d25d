"""A picture of replicas side by side: what each got, how busy it was, and how long its users waited."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asyncsched.plotting import STEP_COLOURS, _figure, _save, _set_title, _style


def plot_replicas(title: str, replicas: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Three panels over the replicas' numbers. `replicas` are those of a summary."""
    numbers = [replica["replica"] for replica in replicas]
    served = [replica for replica in replicas if replica["ttft_ms"] is not None]
    with _style():
        figure = _figure(9.0, 6.4, layout="constrained")
        requests, active, waits = figure.subplots(3, sharex=True)
        requests.bar(numbers, [replica["requests"] for replica in replicas], color=STEP_COLOURS[0])
        requests.set_ylabel("requests")
        active.bar(numbers, [100 * replica["gpu_active"] for replica in replicas], color=STEP_COLOURS[0])
        active.set(ylabel="GPU active (%)", ylim=(0, 100))
        for key, name, marker, colour in (
            ("p50", "median", "o", STEP_COLOURS[0]),
            ("p99", "99th percentile", "^", STEP_COLOURS[1]),
        ):
            waits.plot(
                [replica["replica"] for replica in served],
                [replica["ttft_ms"][key] for replica in served],
                marker,
                color=colour,
                label=name,
                markersize=5,
            )
        waits.set(xlabel="replica", ylabel="time to first token (ms)", xlim=(-0.6, len(numbers) - 0.4))
        waits.set_ylim(bottom=0)
        waits.xaxis.get_major_locator().set_params(integer=True)
        waits.legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1.0, 0.97))  # above every point
        for axes in (requests, active, waits):
            axes.grid(axis="y", color="#E5E5E5", linewidth=0.8)
            axes.set_axisbelow(True)
        _set_title(figure, title)
        _save(figure, path)
