"""Pictures: lanes over time, curves, heat maps. The only module that knows matplotlib, and loads it when it draws.

Each function writes one file, whole or not at all; its suffix decides the format: .png, .svg or .pdf. Equal inputs give
equal files. Colours are from Okabe and Ito's palette, which colour-blind readers can tell apart.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from asyncsched.cli.files import write_output
from asyncsched.timeline import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]

STEP_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7")  # blue, orange, green, purple
SERIES_COLOURS = (*STEP_COLOURS, "#56B4E9", "#D55E00", "#000000")  # sky blue, vermilion, black
MARKERS = "osD^vPX"
WAITING = "#EDEDED"
IDLE_FACE, IDLE_LINES, HATCH = "#FFFFFF", "#D55E00", "////"  # vermilion: time lost
TEXT = "#333333"
STYLE: dict[Any, Any] = {
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
NARROW_PIXELS = 4
BEHIND_TEXT = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}  # on hatching
UNITS = {
    **{unit: unit for unit in ("s", "ms", "us", "ns", "tokens")},
    "per_s": "1/s",
    "gb_s": "GB/s",
    "tb_s": "TB/s",
    "tflop_s": "TFLOP/s",
}
LOG_DECADES = 1.5  # values that span more get a logarithmic axis
FEW_TICKS = 10  # so many values are named on a logarithmic axis instead of powers of ten
MARK_SIZE = 9.5  # of what vertical lines say, in points


class _Row(NamedTuple):
    """Where a lane is drawn, downwards from the top of its panel; copies are short, so half a row is enough."""

    label: str
    centre: float
    height: float


ROWS = {
    "host": _Row("host (CPU)", 0.50, 0.84),
    "h2d": _Row("copy in (h2d)", 1.26, 0.36),
    "compute": _Row("compute (GPU)", 2.02, 0.84),
    "d2h": _Row("copy out (d2h)", 2.78, 0.36),
}
PANEL_ROWS = 3.06
GPU = "GPU"
MOST_LABEL = 50  # characters of a panel's label, beside its figures; of a longer one the end is kept
TIMELINE_WIDTH, TIMELINE_LEFT, TIMELINE_RIGHT = 11.0, 0.125, 0.985  # inches; parts of it


class _View(NamedTuple):
    """What one panel shows: spans that touch [start, start + length], and where the compute lane is idle in there."""

    label: str
    spans: list[Span]
    start_ns: int
    length_ns: int
    idle: list[tuple[int, int]]

    @property
    def num_colours(self) -> int:
        """One per slot, so that steps in flight together differ; at least two, so that neighbours do."""
        slots = 1 + max(span.slot for span in self.spans)
        return min(max(slots, 2), len(STEP_COLOURS))

    def colour(self, step: int) -> str:
        return STEP_COLOURS[step % self.num_colours]

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
            if span.name == "forward" and span.end_ns > span.start_ns
        )


def plot_timeline(
    timelines: Sequence[tuple[str, Timeline]],
    path: Path,
    *,
    steps: tuple[int, int],
    title: str | None = None,
    device: str = GPU,
) -> None:
    """Lanes over time, one panel per (label, timeline), all with the same time axis.

    The first timeline's steps first..last decide how long the window is. Each panel begins with the planning of its own
    step first, and shows whatever ran in that time: a faster timeline gets further. `device` is what computes. Raises
    ValueError when a timeline has not one of the steps.
    """
    start_ns, end_ns = _extent(timelines[0][1], steps)
    length_ns = max(end_ns - start_ns, 1)  # where all is free, nothing takes time
    views = [_view(label, timeline, _extent(timeline, steps)[0], length_ns) for label, timeline in timelines]
    with _style():
        height = 1.45 + 2.3 * len(views)
        figure = _figure(TIMELINE_WIDTH, height)
        figure.subplots_adjust(
            left=TIMELINE_LEFT, right=TIMELINE_RIGHT, top=1 - 0.82 / height, bottom=0.85 / height, hspace=0.22
        )
        panels = figure.subplots(len(views), 1, sharex=True, squeeze=False)[:, 0]
        for axes, view in zip(panels, views, strict=True):
            _draw_panel(axes, view, device)
        panels[-1].set_xlabel("time since the window began (ms)")
        figure.suptitle(title or _timeline_title(views), x=0.012, y=1 - 0.1 / height, ha="left", va="top", fontsize=15)
        _draw_timeline_legend(figure, views, device)
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
    words = not all(is_number(row[x]) for row in shown)
    places = _places(row[x] for row in shown)
    with _style():
        figure = _figure(7.5, 4.5, layout="constrained")
        axes = figure.subplots()
        for number, name in enumerate(_places(row[series] if series else "" for row in shown)):
            line = [row for row in shown if series is None or _word(row[series]) == name]
            points = sorted((places[_word(row[x])] if words else row[x], row[y]) for row in line)
            xs, ys = zip(*points, strict=True)
            turn = number % len(SERIES_COLOURS)
            (drawn,) = axes.plot(xs, ys, color=SERIES_COLOURS[turn], marker=MARKERS[turn], markersize=6, label=name)
            drawn.set_linestyle("none" if words else "-")
        if words:
            axes.set_xticks(list(places.values()), [_wrap(place, 72 // len(places)) for place in places])
            axes.margins(x=0.15)
        else:
            _scale_axis(axes, "x", [row[x] for row in shown])
        _scale_axis(axes, "y", [row[y] for row in shown])
        _draw_marks(figure, axes, marks)
        if series:
            axes.legend(title=series, frameon=False)
        axes.grid(color="#E5E5E5", linewidth=0.8)
        axes.set(xlabel=x_label or axis_label(x), ylabel=y_label or axis_label(y))
        _set_title(figure, title)
        _save(figure, path)


def _draw_marks(figure: Figure, axes: Axes, marks: Sequence[tuple[float, str]]) -> None:
    """What they say stands above the frame, where no line can cross it; one row higher where the text before it would
    reach that far."""
    taken, raised = -math.inf, False  # points from the left, and whether the text before stands there
    for position, text in sorted(marks):
        begin = axes.get_xaxis_transform().transform((position, 0))[0] * 72 / figure.dpi
        raised = begin < taken and not raised
        taken = begin + MARK_SIZE * 0.6 * len(text)
        axes.axvline(position, color="#777777", linestyle="--", linewidth=1)
        axes.annotate(
            text,
            (position, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3 + 1.3 * MARK_SIZE * raised),
            textcoords="offset points",
            fontsize=MARK_SIZE,
        )


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

    columns, lines = (_places(row[key] for row in rows) for key in (x, y))
    cells = np.full((len(lines), len(columns)), math.nan)
    for row in rows:
        if row[z] is not None:
            cells[lines[_word(row[y])], columns[_word(row[x])]] = row[z]
    with _style():
        figure = _figure(2.6 + max(0.8 * len(columns), 3.5), 1.6 + max(0.5 * len(lines), 2.2), layout="constrained")
        axes = figure.subplots()
        image = axes.pcolormesh(cells, cmap="viridis", edgecolors="white", linewidth=1)
        middle = (np.nanmin(cells) + np.nanmax(cells)) / 2
        for (line, column), value in np.ndenumerate(cells):
            if not math.isnan(value):
                colour = "white" if value <= middle else "black"
                axes.text(column + 0.5, line + 0.5, _short(value), ha="center", va="center", color=colour, fontsize=9.5)
        axes.set_xticks([place + 0.5 for place in columns.values()], list(columns))
        axes.set_yticks([place + 0.5 for place in lines.values()], list(lines))
        axes.tick_params(length=0)
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)
        axes.set(xlabel=x_label or axis_label(x), ylabel=y_label or axis_label(y))
        _set_title(figure, title)
        figure.colorbar(image, label=z_label or axis_label(z))
        _save(figure, path)


def axis_label(key: str) -> str:
    """A key with its unit in brackets: `host.plan_us` -> `host.plan (us)`, `ttft_ms.p50` -> `ttft.p50 (ms)`."""
    match = re.fullmatch(rf"(.+?)_({'|'.join(UNITS)})(\..+)?", key)
    if match is None:
        return key
    name, unit, rest = match.groups(default="")
    return f"{name}{rest} ({UNITS[unit]})"


def is_number(value: object) -> bool:
    """Whether an axis can place it; false and true are words."""
    return isinstance(value, int | float) and not isinstance(value, bool)


# ---- lanes ---------------------------------------------------------------------------------------------------------


def _extent(timeline: Timeline, steps: tuple[int, int]) -> tuple[int, int]:
    """From the first to the last moment of these steps, in ns."""
    spans = timeline.window(*steps).spans
    if not spans:
        raise ValueError(f"the timeline has none of the steps {steps[0]} to {steps[1]}")
    return min(span.start_ns for span in spans), max(span.end_ns for span in spans)


def _view(label: str, timeline: Timeline, start_ns: int, length_ns: int) -> _View:
    end_ns = start_ns + length_ns
    spans = _merged(span for span in timeline.spans if span.end_ns >= start_ns and span.start_ns <= end_ns)
    idle, free_ns = [], start_ns
    for span in spans:
        if span.lane == "compute":
            if span.start_ns > free_ns:
                idle.append((free_ns, span.start_ns))
            free_ns = max(free_ns, span.end_ns)
    if free_ns < end_ns:
        idle.append((free_ns, end_ns))
    return _View(label, spans, start_ns, length_ns, idle)


def _merged(spans: Iterable[Span]) -> list[Span]:
    """Plan, delay, fill and launch of a step, which follow each other, as one span: "prepare"."""
    merged: list[Span] = []
    prepared: dict[int, int] = {}  # step -> its place in `merged`
    for span in spans:
        if span.name not in ("plan", "delay", "fill", "launch"):
            merged.append(span)
        elif span.step in prepared:
            place = prepared[span.step]
            merged[place] = merged[place]._replace(end_ns=span.end_ns)
        else:
            prepared[span.step] = len(merged)
            merged.append(span._replace(name="prepare"))
    return merged


def _draw_panel(axes: Axes, view: _View, device: str) -> None:
    axes.set_xlim(0, view.length_ns / 1e6)
    axes.set_ylim(PANEL_ROWS, 0)
    names = [row.label if device == GPU else row.label.removesuffix(f" ({GPU})") for row in ROWS.values()]
    axes.set_yticks([row.centre for row in ROWS.values()], names)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    for row in ROWS.values():
        axes.axhspan(row.centre - row.height / 2, row.centre + row.height / 2, color="#F6F6F6", linewidth=0, zorder=0)
    for start_ns, end_ns in view.idle:
        idle = _Box(view, "compute", start_ns, end_ns)
        idle.draw(axes, IDLE_FACE, hatch=HATCH, edgecolor=IDLE_LINES, linewidth=0)
        idle.write(axes, (f"idle {(end_ns - start_ns) / 1e6:.1f} ms", "idle"), TEXT, bbox=BEHIND_TEXT)
    for span in view.spans:
        _draw_span(axes, view, span)
    label = view.label if len(view.label) <= MOST_LABEL else f"...{view.label[3 - MOST_LABEL :]}"
    axes.set_title(label, loc="left", fontsize=12, fontweight="bold", pad=5)
    figures = (
        f"{device} active {1 - view.idle_share:.1%}, idle {view.idle_share:.1%}; {view.steps_computed:.1f} steps done"
    )
    axes.set_title(figures, loc="right", fontsize=11, pad=5)


def _draw_span(axes: Axes, view: _View, span: Span) -> None:
    box, step, colour = _Box(view, span.lane, span.start_ns, span.end_ns), span.step, view.colour(span.step)
    texts: tuple[str, ...] = (f"step {step}", f"{step}")
    if span.name == "collect":
        colour, texts = WAITING, (f"waits for step {step}", f"waits for {step}", "waits")
    elif span.name in ("commit", "deliver"):
        colour, texts = _lighter(colour), (f"{span.name} {step}",)
    elif span.name == "prepare":
        texts = (f"prepare {step}", f"{step}")
    if span.end_ns > span.start_ns:
        narrow = box.width_in * DPI < NARROW_PIXELS  # an edge would hide all of it
        box.draw(axes, colour, edgecolor=colour if narrow else "white", linewidth=0.7)
        box.write(axes, texts, _ink(colour))
    elif span.lane != "host":  # a copy that the scenario gives no time: a tick says when it was
        box.draw(axes, colour, edgecolor=colour, linewidth=1.5)


class _Box(NamedTuple):
    """A time on a lane of a panel."""

    view: _View
    lane: str
    start_ns: int
    end_ns: int

    @property
    def width_in(self) -> float:
        """Of what is visible of it, in inches."""
        start_ns, end_ns = self._visible_ns()
        return TIMELINE_WIDTH * (TIMELINE_RIGHT - TIMELINE_LEFT) * (end_ns - start_ns) / self.view.length_ns

    def draw(self, axes: Axes, face: str, **style: Any) -> None:
        row = ROWS[self.lane]
        left, width = (self.start_ns - self.view.start_ns) / 1e6, (self.end_ns - self.start_ns) / 1e6
        axes.barh(row.centre, width, left=left, height=row.height, color=face, **style)

    def write(self, axes: Axes, texts: Sequence[str], colour: str, **style: Any) -> None:
        """The first of `texts` that fits."""
        row = ROWS[self.lane]
        size = 10 if row.height > 0.5 else 8
        for text in texts:
            if len(text) * 0.62 * size / 72 + 0.04 < self.width_in:
                middle = sum(self._visible_ns()) / 2 - self.view.start_ns
                axes.text(middle / 1e6, row.centre, text, ha="center", va="center", size=size, color=colour, **style)
                return

    def _visible_ns(self) -> tuple[int, int]:
        return max(self.start_ns, self.view.start_ns), min(self.end_ns, self.view.start_ns + self.view.length_ns)


def _timeline_title(views: Sequence[_View]) -> str:
    if len(views) == 1:
        return f"Where the time goes: the GPU is idle for {views[0].idle_share:.1%} of this time"
    *others, last = (f"{view.steps_computed:.1f}" for view in views)
    return f"In the same time the GPU computes {', '.join(others)} and {last} steps; hatched, it waits"


def _draw_timeline_legend(figure: Figure, views: Sequence[_View], device: str) -> None:
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    colours = STEP_COLOURS[: max(view.num_colours for view in views)]
    steps = tuple(Patch(facecolor=colour) for colour in colours)
    commits = tuple(Patch(facecolor=_lighter(colour)) for colour in colours)
    idle = Patch(facecolor=IDLE_FACE, hatch=HATCH, edgecolor=IDLE_LINES, linewidth=0)
    entries: dict[str, Any] = {
        "a step: prepared, copied, computed": steps,
        "committed": commits,
        "host waits for output": Patch(facecolor=WAITING),
        f"{device} idle": idle,
    }
    figure.legend(
        list(entries.values()),
        list(entries),
        handler_map={tuple: HandlerTuple(ndivide=None, pad=0)},
        loc="lower center",
        ncols=len(entries),
        frameon=False,
        fontsize=10,
    )


def _lighter(colour: str) -> str:
    """Half way to white."""
    channels = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{(channel + 255) // 2:02X}" for channel in channels)


def _ink(colour: str) -> str:
    """Black or white, whichever reads better on the colour."""
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 127 else "white"


# ---- axes ----------------------------------------------------------------------------------------------------------


def _places(values: Iterable[object]) -> dict[str, int]:
    """Where each distinct value stands: numbers in order, words as they come. Keys are what is written there."""
    distinct = {_word(value): value for value in values}
    if all(is_number(value) for value in distinct.values()):
        distinct = dict(sorted(distinct.items(), key=lambda item: item[1]))  # type: ignore[arg-type, return-value]
    return {word: place for place, word in enumerate(distinct)}


def _word(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _wrap(text: str, width: int) -> str:
    return textwrap.fill(text, max(width, 5))


def _scale_axis(axes: Axes, which: Literal["x", "y"], values: Sequence[float]) -> None:
    """Logarithmic where the values span many decades, else with zero in sight on y."""
    low, high = min(values), max(values)
    set_scale, set_limit = (axes.set_xscale, axes.set_xlim) if which == "x" else (axes.set_yscale, axes.set_ylim)
    if low > 0 and math.log10(high / low) > LOG_DECADES:
        set_scale("log")
        axis = axes.xaxis if which == "x" else axes.yaxis
        axis.set_major_formatter("{x:g}")
        if which == "x" and len(set(values)) <= FEW_TICKS:
            axes.set_xticks(sorted(set(values)))
            axes.minorticks_off()
    elif which == "y":
        below, above = min(low, 0), max(high, 0)
        room = 0.08 * (above - below)
        set_limit(below - room if below else 0, above + room if above else 0 if below else 1)
        if below and above:
            axes.axhline(0, color="#777777", linewidth=1, zorder=1.6)  # above the grid, behind lines


def _short(value: float) -> str:
    """Three or four digits."""
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _set_title(figure: Figure, title: str) -> None:
    width = int(figure.get_figwidth() * 9.5)
    figure.suptitle(_wrap(title, width), x=0.015, ha="left", fontsize=12, fontweight="bold")


# ---- files ---------------------------------------------------------------------------------------------------------


def _style() -> AbstractContextManager[None]:
    import matplotlib

    return matplotlib.rc_context(STYLE)


def _figure(width_in: float, height_in: float, **options: Any) -> Figure:
    """A figure of its own: pyplot would keep it, and might want a screen."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in), facecolor="white", **options)


def _save(figure: Figure, path: Path) -> None:
    """The picture is drawn in memory first; without a date in it, equal pictures are equal files."""
    form = path.suffix.lower().removeprefix(".")
    date = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form)
    picture = io.BytesIO()
    figure.savefig(picture, format=form, dpi=DPI, metadata=date)
    write_output("--plot", path, picture.getvalue())
