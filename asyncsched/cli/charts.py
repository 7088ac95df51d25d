"""The charts of a report, as plotly figures in plain data: timelines, latency distributions, sweep maps, capacities.

Nothing here knows HTML, nor plotly itself: a figure is {"data": [...], "layout": {...}}, plotly's own format. Colours
are Okabe and Ito's, which colour-blind readers can tell apart; text and grid take the page's.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from asyncsched.cli.figures import FIGURES, Figure, look_up
from asyncsched.timeline import LANES

Chart = dict[str, Any]
Data = Mapping[str, Any]

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
WAITING = "rgba(128, 128, 128, 0.3)"  # the host has nothing to do until a step is done
DASHES = ("solid", "dash", "dot", "dashdot")
LANE_NAMES = {"host": "host", "h2d": "copy in", "compute": "GPU", "d2h": "copy out"}
LATENCIES = {"ttft": "time to first token", "tpot": "time per output token", "e2el": "end-to-end latency"}
MOST_SPANS = 4000  # a browser draws so many bars without effort
MOST_SERIES = 12
SWEPT = ("output_throughput", "makespan_s", "gpu_active", "ttft_ms.p50", "tpot_ms.p50", "e2el_ms.p50", "goodput.per_s")


def timeline(events: Sequence[Data], process: int) -> tuple[Chart, str]:
    """Spans of one process of a trace, a bar each, and what part of them is shown."""
    spans = [event for event in events if event.get("ph") == "X" and event.get("pid", 0) == process]
    names = {
        event["tid"]: event["args"]["name"]
        for event in events
        if event.get("ph") == "M" and event.get("name") == "thread_name" and event.get("pid", 0) == process
    }
    shown = _middle(spans)
    data = []
    for number, lane in enumerate(LANES):
        here = [span for span in shown if names.get(span["tid"]) == lane]
        steps = [span.get("args", {}).get("step", 0) for span in here]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": LANE_NAMES[lane],
                "y": [LANE_NAMES[lane]] * len(here),
                "base": [span["ts"] / 1e3 for span in here],
                "x": [span["dur"] / 1e3 for span in here],
                "marker": {
                    "color": [
                        WAITING if span["name"] == "collect" else COLOURS[step % len(COLOURS)]
                        for span, step in zip(here, steps, strict=True)
                    ],
                    "line": {"width": 0},
                },
                "customdata": [
                    [span["name"], step, span["ts"] / 1e3, span["dur"] / 1e3]
                    for span, step in zip(here, steps, strict=True)
                ],
                "hovertemplate": "%{customdata[0]}, step %{customdata[1]}<br>from %{customdata[2]:.3f} ms, "
                "%{customdata[3]:.3f} ms long<extra></extra>",
                "width": 0.8 if number % 2 == 0 else 0.5,
            }
        )
    layout = {
        "barmode": "overlay",
        "showlegend": False,
        "height": 300,
        "xaxis": {"title": {"text": "time (ms)"}, "range": _window(shown), "tickformat": ",.9~r"},
        "yaxis": {
            "categoryorder": "array",
            "categoryarray": [LANE_NAMES[lane] for lane in reversed(LANES)],
            "fixedrange": True,
        },
    }
    part = "" if len(shown) == len(spans) else f"{len(shown):,} of {len(spans):,} spans, from the middle of the run."
    return {"data": data, "layout": layout}, part


def distributions(runs: Sequence[tuple[str, Data]]) -> list[tuple[str, Chart]]:
    """Per latency: the share of requests served at least as fast, a line per run."""
    charts = []
    for key, label in LATENCIES.items():
        data = []
        for number, (name, run) in enumerate(runs):
            quantiles = (run.get("quantiles_ms") or {}).get(key)
            if quantiles:
                shares = [share / (len(quantiles) - 1) for share in range(len(quantiles))]
                data.append({**_line(number, name), "x": quantiles, "y": shares, "line": _style(number, shape="vh")})
        if data:
            layout = {
                "height": 340,
                "xaxis": {"title": {"text": f"{label} (ms)"}, "type": _scale([x for line in data for x in line["x"]])},
                "yaxis": {"title": {"text": "share of requests"}, "tickformat": ".0%", "range": [0, 1.02]},
                "showlegend": len(data) > 1,
            }
            charts.append((label, {"data": data, "layout": layout}))
    return charts


def sweep(points: Sequence[Data], keys: Sequence[str]) -> list[tuple[Figure, Chart]]:
    """Per figure: a map over two numeric keys, lines over one, or a cloud for points drawn at random."""
    done = [point for point in points if not point["error"]]
    charts = []
    for metric in SWEPT:
        with_value = [(point, value) for point in done if (value := _value(point, metric)) is not None]
        if len(with_value) > 1:
            figure = FIGURES[metric]
            charts.append((figure, _sweep_chart(with_value, keys, figure)))
    return charts


def capacities(rows: Sequence[Data]) -> Chart:
    """The highest rate of each mode, with the interval over the seeds."""
    shown = [row for row in rows if row["figures"]]
    rates = [row["rate_per_s"] for row in shown]
    data = [
        {
            "type": "bar",
            "x": [row["mode"] for row in shown],
            "y": rates,
            "marker": {"color": [COLOURS[number % len(COLOURS)] for number in range(len(shown))]},
            "error_y": {
                "type": "data",
                "symmetric": False,
                "color": "#808080",
                "array": [row["rate_high_per_s"] - row["rate_per_s"] for row in shown],
                "arrayminus": [row["rate_per_s"] - row["rate_low_per_s"] for row in shown],
            },
            "hovertemplate": "%{x}: %{y:.2f} requests/s<extra></extra>",
        }
    ]
    layout = {"height": 340, "yaxis": {"title": {"text": "highest rate (requests/s)"}, "rangemode": "tozero"}}
    return {"data": data, "layout": layout}


def _sweep_chart(points: Sequence[tuple[Data, float]], keys: Sequence[str], figure: Figure) -> Chart:
    numeric = [key for key in keys if all(_is_number(point.get(key)) for point, _ in points)]
    words = [key for key in keys if key not in numeric]
    distinct = {key: {str(point.get(key)) for point, _ in points} for key in keys}
    combinations = 1
    for values in distinct.values():
        combinations *= len(values)
    is_grid = combinations == len(points)
    if not is_grid and numeric:
        return _cloud(points, numeric, words, figure)
    if len(numeric) == 2 and not words:
        return _map(points, numeric[0], numeric[1], figure)
    x = numeric[0] if numeric else keys[0]
    return _lines(points, x, [key for key in keys if key != x], figure)


def _map(points: Sequence[tuple[Data, float]], x: str, y: str, figure: Figure) -> Chart:
    xs, ys = sorted({point[x] for point, _ in points}), sorted({point[y] for point, _ in points})
    values = {(point[x], point[y]): value for point, value in points}
    data = {
        "type": "heatmap",
        "x": [str(value) for value in xs],
        "y": [str(value) for value in ys],
        "z": [[values.get((column, row)) for column in xs] for row in ys],
        "colorscale": "Viridis",
        "colorbar": {"title": {"text": figure.unit or figure.label}},
        "texttemplate": "%{z:,.4~r}" if len(xs) * len(ys) <= 150 else "",
        "hovertemplate": f"{x} %{{x}}, {y} %{{y}}: %{{z:,.5~r}}<extra></extra>",
    }
    axes = {"xaxis": {"title": {"text": x}, "type": "category"}, "yaxis": {"title": {"text": y}, "type": "category"}}
    return {"data": [data], "layout": {"height": 420, **axes}}


def _lines(points: Sequence[tuple[Data, float]], x: str, others: Sequence[str], figure: Figure) -> Chart:
    series: dict[str, list[tuple[Any, float]]] = {}
    for point, value in points:
        series.setdefault(_label(point, others), []).append((point[x], value))
    data = []
    for number, (name, pairs) in enumerate(itertools.islice(series.items(), MOST_SERIES)):
        ordered = sorted(pairs) if all(_is_number(pair[0]) for pair in pairs) else pairs
        line = {**_line(number, name), "mode": "lines+markers", "line": _style(number)}
        data.append({**line, "x": [pair[0] for pair in ordered], "y": [pair[1] for pair in ordered]})
    xs = [value for line in data for value in line["x"]]
    axis = {"title": {"text": x}, "type": _scale(xs) if all(map(_is_number, xs)) else "category"}
    return {"data": data, "layout": {"height": 400, "xaxis": axis, "yaxis": _axis(figure), "showlegend": len(data) > 1}}


def _cloud(points: Sequence[tuple[Data, float]], numeric: Sequence[str], words: Sequence[str], figure: Figure) -> Chart:
    """A panel per numeric key, side by side over one value axis; a colour per combination of the other keys."""
    groups = list(Counter(_label(point, words) for point, _ in points))[:MOST_SERIES]
    data, layout = [], {"height": 400, "yaxis": _axis(figure), "showlegend": len(groups) > 1}
    width = 1 / len(numeric)
    for column, key in enumerate(numeric):
        suffix = "" if column == 0 else str(column + 1)
        values = [point[key] for point, _ in points]
        domain = [column * width, (column + 1) * width - (0.04 if column + 1 < len(numeric) else 0)]
        layout[f"xaxis{suffix}"] = {"title": {"text": key}, "type": _scale(values), "domain": domain}
        for number, group in enumerate(groups):
            here = [(point[key], value) for point, value in points if _label(point, words) == group]
            data.append(
                {
                    **_line(number, group),
                    "mode": "markers",
                    "showlegend": column == 0,
                    "legendgroup": group,
                    "marker": {"color": COLOURS[number % len(COLOURS)], "size": 6},
                    "x": [pair[0] for pair in here],
                    "y": [pair[1] for pair in here],
                    "xaxis": f"x{suffix}",
                }
            )
    return {"data": data, "layout": layout}


def _middle(spans: Sequence[Data]) -> list[Data]:
    """As many spans as can be drawn, around the middle of the run."""
    ordered = sorted(spans, key=lambda span: float(span["ts"]))
    first = max((len(ordered) - MOST_SPANS) // 2, 0)
    return ordered[first : first + MOST_SPANS]


def _window(spans: Sequence[Data]) -> list[float]:
    """What is seen at first: about eight steps, from the middle on."""
    if not spans:
        return [0.0, 1.0]
    middle = spans[len(spans) // 2 :]
    first = middle[0].get("args", {}).get("step", 0)
    end = max(
        (span["ts"] + span["dur"] for span in middle if span.get("args", {}).get("step", 0) <= first + 8),
        default=middle[-1]["ts"] + middle[-1]["dur"],
    )
    return [middle[0]["ts"] / 1e3, end / 1e3]


def _line(number: int, name: str) -> Chart:
    return {"type": "scatter", "mode": "lines", "name": name}


def _style(number: int, shape: str = "linear") -> Chart:
    return {
        "color": COLOURS[number % len(COLOURS)],
        "dash": DASHES[number // len(COLOURS) % len(DASHES)],
        "shape": shape,
    }


def _label(point: Data, keys: Sequence[str]) -> str:
    return ", ".join(str(point.get(key)) if key == "mode" else f"{key} {point.get(key)}" for key in keys) or "all"


def _value(point: Data, metric: str) -> float | None:
    """Points have dotted keys, or nested ones in a result file."""
    if metric in point:
        value = point[metric]
    else:
        try:
            value = look_up(point, metric)
        except (KeyError, TypeError):
            return None
    return float(value) if _is_number(value) else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _scale(values: Sequence[float]) -> str:
    """Logarithmic where values span more than a factor of thirty."""
    positive = [value for value in values if value > 0]
    wide = len(positive) == len(values) > 0 and max(positive) / min(positive) > 30
    return "log" if wide else "linear"


def _axis(figure: Figure) -> Chart:
    axis: Chart = {"title": {"text": figure.axis_label if figure.unit != "share" else figure.label}}
    if figure.unit == "share":
        axis["tickformat"] = ".0%"
    return {**axis, "rangemode": "tozero"}
