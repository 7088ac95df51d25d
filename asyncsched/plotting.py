"""Pictures: lanes over time, curves, heat maps. The only module that knows matplotlib, and loads it when it draws.

Each function writes one file, whole or not at all; its suffix decides the format: .png, .svg or .pdf. Equal inputs give
equal files. Colours are from Okabe and Ito's palette, which colour-blind readers can tell apart.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncsched.cli.files import write_output
from asyncsched.timeline import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]

STEP_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")  # blue, orange, green, purple
WAITING = "#EDEDED"
IDLE_FACE, IDLE_LINES = "#FBE3D6", "#D55E00"  # vermilion lines: time lost
TEXT = "#333333"
STYLE = {
    "font.size": 11,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "axes.edgecolor": "#999999",
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.8,
    "svg.hashsalt": "asyncsched",  # ids in SVG files would be random
    "svg.fonttype": "path",
}
DPI = 160
LOG_DECADES = 1.5  # values that span more get a logarithmic axis

# Lane -> what it is called, from its centre to the top of the row, half its height. Copies are short: half a row is enough.
LANES = {
    "host": ("host (CPU)", 0.5, 0.42),
    "h2d": ("copy in (h2d)", 1.28, 0.18),
    "compute": ("compute (GPU)", 2.06, 0.42),
    "d2h": ("copy out (d2h)", 2.84, 0.18),
}
ROWS_HEIGHT = 3.1


class _View(NamedTuple):
    """What one panel shows: spans that touch [start, start + length], and where the compute lane is idle in there."""

    label: str
    spans: list[Span]
    start_ns: int
    length_ns: int
    idle: list[tuple[int, int]]

    @property
    def idle_share(self) -> float:
        return sum(end - start for start, end in self.idle) / self.length_ns

    @property
    def steps_computed(self) -> float:
        """Forward passes in the window, counting parts."""
        end_ns = self.start_ns + self.length_ns
        return sum(
            (min(span.end_ns, end_ns) - max(span.start_ns, self.start_ns)) / (span.end_ns - span.start_ns)
            for span in self.spans
            if span.lane == "compute" and span.end_ns > span.start_ns
        )


def plot_timeline(
    timelines: Sequence[tuple[str, Timeline]], path: Path, *, steps: tuple[int, int], title: str | None = None
) -> None:
    """Lanes over time, one panel per (label, timeline), all with the same time axis.

    The first timeline's steps first..last decide how long the window is. Each panel begins with the planning of its own
    step first, and shows whatever ran in that time: a faster timeline gets further. Raises ValueError for steps
    that a timeline does not have.
    """
    first, last = steps
    length_ns = _extent(timelines[0][1], first, last)[1]
    views = [_view(label, timeline, _extent(timeline, first, last)[0], length_ns) for label, timeline in timelines]
    figure = _figure(11.0, 1.0 + 2.35 * len(views))
    with _style():
        panels = figure.subplots(len(views), 1, sharex=True, squeeze=False)[:, 0]
        for axes, view in zip(panels, views, strict=True):
            _draw_lanes(axes, view)
        panels[-1].set_xlabel("time (ms)")
        figure.suptitle(title or _timeline_title(views), x=0.015, ha="left", fontsize=14, fontweight="bold")
        _draw_legend(figure, max(_num_colours(view.spans) for view in views))
        _save(figure, path)


def plot_curve(
    rows: Sequence[Row],
    x: str,
    y: str,
    path: Path,
    *,
    series: str | None = None,
    x_label: str | None = None,
    y_label: str | None = None,
    title: str = "",
    marks: Sequence[tuple[float, str]] = (),
) -> None:
    """Column y over column x, one line per value of column `series`; `marks` are vertical lines, with what they say.

    An x of words is drawn as evenly spaced points. Rows without a value of y are left out.
    """
    shown = [row for row in rows if row[y] is not None]
    figure = _figure(7.5, 4.5)
    with _style():
        axes = figure.subplots()
        words = not all(_is_number(row[x]) for row in shown)
        names = list(dict.fromkeys(_word(row[x]) for row in shown))
        for number, value in enumerate(dict.fromkeys(_word(row[series]) if series else "" for row in shown)):
            line = [row for row in shown if series is None or _word(row[series]) == value]
            points = [(names.index(_word(row[x])) if words else row[x], row[y]) for row in line]
            xs, ys = zip(*(points if words else sorted(points)), strict=True)
            axes.plot(xs, ys, marker="osD^"[number % 4], markersize=5, color=_series_colour(number), label=value)
        if words:
            axes.set_xticks(range(len(names)), names)
            axes.margins(x=0.15)
        else:
            _scale(axes, "x", [row[x] for row in shown])
        _scale(axes, "y", [row[y] for row in shown])
        for position, text in marks:
            axes.axvline(position, color="#999999", linestyle="--", linewidth=1)
            axes.annotate(
                text,
                (position, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(-4, -4),
                textcoords="offset points",
                ha="right",
                va="top",
                fontsize=9.5,
            )
        if series:
            axes.legend(title=series, frameon=False)
        axes.grid(color="#E5E5E5", linewidth=0.8)
        axes.set(xlabel=x_label or axis_label(x), ylabel=y_label or axis_label(y))
        axes.set_title(title, loc="left", fontweight="bold", fontsize=12)
        _save(figure, path)


def plot_heatmap(
    rows: Sequence[Row],
    x: str,
    y: str,
    z: str,
    path: Path,
    *,
    x_label: str | None = None,
    y_label: str | None = None,
    z_label: str | None = None,
    title: str = "",
) -> None:
    """Column z over the grid of columns x and y, with its value in every cell. Cells without a value are left white."""
    import numpy as np

    columns, lines = (list(dict.fromkeys(_word(row[key]) for row in rows)) for key in (x, y))
    cells = np.full((len(lines), len(columns)), math.nan)
    for row in rows:
        cells[lines.index(_word(row[y])), columns.index(_word(row[x]))] = math.nan if row[z] is None else row[z]
    figure = _figure(2.6 + max(0.75 * len(columns), 3.5), 1.6 + max(0.5 * len(lines), 2.2))
    with _style():
        axes = figure.subplots()
        image = axes.pcolormesh(cells, cmap="viridis", edgecolors="white", linewidth=1)
        middle = (np.nanmin(cells) + np.nanmax(cells)) / 2
        for (line, column), value in np.ndenumerate(cells):
            if not math.isnan(value):
                colour = "white" if value < middle else "black"
                axes.text(column + 0.5, line + 0.5, _short(value), ha="center", va="center", color=colour, fontsize=9)
        axes.set_xticks(np.arange(len(columns)) + 0.5, columns)
        axes.set_yticks(np.arange(len(lines)) + 0.5, lines)
        axes.tick_params(length=0)
        axes.set(xlabel=x_label or axis_label(x), ylabel=y_label or axis_label(y))
        axes.set_title(title, loc="left", fontweight="bold", fontsize=12)
        figure.colorbar(image, label=z_label or axis_label(z)).outline.set_visible(False)  # type: ignore[operator]
        _save(figure, path)
