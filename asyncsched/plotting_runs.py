"""A measured run and its prediction in one picture: who ran and waited when, and how latencies are distributed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from asyncsched.plotting import SERIES_COLOURS, _figure, _save, _set_title, _style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEASURED, PREDICTED = SERIES_COLOURS[0], SERIES_COLOURS[1]


class Side(NamedTuple):
    """What is drawn of one run. occupancy: `running` and `waiting`, each times (s) and counts from then on.
    latencies: values (ms) by the name of their panel."""

    occupancy: Mapping[str, tuple[Any, Any]]
    latencies: Mapping[str, Any]


def plot_validation(measured: Side, predicted: Side, path: Path, *, title: str) -> None:
    """Draws both over one another."""
    from matplotlib.ticker import MaxNLocator

    panels = [name for name, values in measured.latencies.items() if len(values)][:3]
    with _style():
        figure = _figure(11.0, 6.4, layout="constrained")
        grid = figure.add_gridspec(2, 6)
        for place, name in enumerate(("running", "waiting")):
            axes = figure.add_subplot(grid[0, 3 * place : 3 * place + 3])
            for side, colour, style, label in _sides(measured, predicted):
                times, counts = side.occupancy[name]
                if len(times):
                    axes.step(times, counts, where="post", color=colour, linestyle=style, linewidth=1.6, label=label)
            axes.set(xlabel="time (s)", ylabel=f"requests {name}")
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_locator(MaxNLocator("auto", integer=True))
            # Above the frame: requests come and go all over it.
            axes.legend(frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1.0, 0.97))
        width = 6 // max(len(panels), 1)
        for place, name in enumerate(panels):
            axes = figure.add_subplot(grid[1, width * place : width * (place + 1)])
            for side, colour, style, label in _sides(measured, predicted):
                _draw_distribution(axes, side.latencies[name], color=colour, linestyle=style, label=label)
            axes.set(xlabel=name, ylabel="share of requests" if place == 0 else "")
            axes.set_ylim(0, 1.02)
            axes.xaxis.set_major_locator(MaxNLocator(4))  # a number like 1247.5 is as wide as a quarter of the panel
            axes.grid(color="#E5E5E5", linewidth=0.8)
        _set_title(figure, title)
        _save(figure, path)


def plot_errors(
    names: Sequence[str],
    groups: Mapping[str, Sequence[Mapping[str, float]]],
    path: Path,
    *,
    title: str,
    limits: Mapping[str, float],
    widest: float = 12.0,
) -> None:
    """Signed errors in percent: a row per figure, with a dot for each run of each group. `limits` shades what is
    allowed; errors beyond `widest` stand at the edge with their value beside them."""
    with _style():
        figure = _figure(9.5, 0.5 * len(names) + 1.8, layout="constrained")
        axes = figure.subplots()
        apart = 0.56 / max(len(groups) - 1, 1)
        for row, name in enumerate(names):
            if name in limits:
                axes.fill_betweenx([row - 0.4, row + 0.4], -limits[name], limits[name], color="#EAF0E6", linewidth=0)
            for place, (group, errors) in enumerate(groups.items()):
                height = row + (place * apart - 0.28 if len(groups) > 1 else 0)
                values = np.array([one[name] for one in errors if name in one])
                near = values[np.abs(values) <= widest]
                style: dict[str, Any] = {"color": SERIES_COLOURS[place], "markersize": 5, "alpha": 0.7, "linestyle": ""}
                axes.plot(near, [height] * len(near), marker="o", label=group if row == 0 else None, **style)
                _draw_far(axes, values[np.abs(values) > widest], height, widest, **style)
        axes.axvline(0, color="#777777", linewidth=1)
        axes.set_yticks(range(len(names)), list(names))
        axes.invert_yaxis()
        axes.set_xlim(-1.25 * widest, 1.25 * widest)
        axes.grid(axis="x", color="#E5E5E5", linewidth=0.8)
        axes.set(xlabel="predicted over measured (%; points for shares); shaded: what was asked for")
        axes.legend(frameon=False, ncols=len(groups), loc="lower center", bbox_to_anchor=(0.5, 1.0))
        _set_title(figure, title)
        _save(figure, path)


def _draw_far(axes: Axes, values: Any, height: float, widest: float, **style: Any) -> None:
    """One marker for each side, and how far off those beyond it are."""
    for sign, marker in ((-1, "<"), (1, ">")):
        far = sorted(values[np.sign(values) == sign].tolist(), key=abs)
        if far:
            axes.plot([sign * 1.04 * widest], [height], marker=marker, **style)  # beside a dot that is just within
            text = ", ".join(f"{value:+.0f}" for value in far)
            side = "left" if sign > 0 else "right"
            axes.text(sign * 1.06 * widest, height, text, fontsize=7, va="center", ha=side, color=style["color"])


def _sides(measured: Side, predicted: Side) -> tuple[tuple[Side, str, str, str], ...]:
    return (measured, MEASURED, "-", "measured"), (predicted, PREDICTED, "--", "predicted")


def _draw_distribution(axes: Axes, values: Any, **line: Any) -> None:
    ordered = np.sort(np.asarray(values))
    if len(ordered):
        shares = np.arange(1, len(ordered) + 1) / len(ordered)
        axes.step(ordered, shares, where="post", linewidth=1.6, **line)
