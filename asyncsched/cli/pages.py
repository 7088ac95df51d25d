"""A report as one HTML page that needs nothing else: styles, scripts and charts are in it, and it may load nothing.

Sections come with what they say in words first, then charts, then tables with the numbers of the charts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from typing import Any

from asyncsched.cli import charts
from asyncsched.cli.figures import FIGURES, look_up, percent, write
from asyncsched.cli.results import Result
from asyncsched.cli.simulate import SHOWN, SHOWN_IF_ANY
from asyncsched.cli.words import explain

Data = Mapping[str, Any]

# The page may not load anything, from anywhere.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
MOVES = (("in", "zoom in"), ("out", "zoom out"), ("left", "left"), ("right", "right"), ("reset", "reset"))
MOST_ROWS = 200  # of a table of points
POINT_FIGURES = (*charts.SWEPT, "limiting_lane")


class Page:
    """Collects sections and the charts in them."""

    def __init__(self) -> None:
        self._sections: list[tuple[str, str, str]] = []
        self._charts: dict[str, charts.Chart] = {}

    def section(self, title: str, *parts: str) -> None:
        self._sections.append((f"section-{len(self._sections) + 1}", title, "".join(parts)))

    def chart(self, chart: charts.Chart, said: str, *, moves: bool = True) -> str:
        """A figure with its caption; `moves` gives it buttons and keys to zoom."""
        name = f"chart-{len(self._charts) + 1}"
        self._charts[name] = chart
        buttons = "".join(
            f'<button type="button" data-chart="{name}" data-move="{move}">{label}</button>' for move, label in MOVES
        )
        controls = (
            f'<div class="controls" role="group" aria-label="Zoom: {escape(said)}">{buttons}</div>' if moves else ""
        )
        label = f"{said}. Keys: + and - zoom, arrows move, 0 resets." if moves else said
        box = f'<div class="chart" id="{name}" tabindex="0" role="img" aria-label="{escape(label)}"></div>'
        return f"<figure>{controls}{box}<figcaption>{escape(said)}</figcaption></figure>"

    def html(self, title: str, question: str, version: str) -> str:
        from plotly.offline import get_plotlyjs

        links = "".join(f'<a href="#{name}">{escape(heading)}</a>' for name, heading, _ in self._sections)
        body = "".join(
            f'<section id="{name}"><h2>{escape(heading)}</h2>{content}</section>'
            for name, heading, content in self._sections
        )
        data = json.dumps(self._charts, allow_nan=False).replace("<", "\\u003c")
        return (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">'
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(title)}</title><style>{_asset('page.css')}</style></head><body>"
            f"<header><h1>{escape(title)}</h1>"
            f'<p>{escape(question)}</p><nav aria-label="Sections">{links}</nav></header><main>{body}</main>'
            f"<footer>Simulated by asyncsched {escape(version)}. Every figure here is simulated unless its trace was "
            "measured; the same seed gives the same page.</footer>"
            f'<script type="application/json" id="charts">{data}</script>'
            f"<script>{get_plotlyjs()}</script><script>{_asset('page.js')}</script></body></html>\n"
        )


def add_runs(page: Page, runs: Sequence[Result]) -> None:
    """What limited each run, how fast requests were served, all figures side by side."""
    for run in runs:
        told = "".join(f"<p>{escape(line)}</p>" for line in explain(run.data))
        page.section(f"{run.name}: what limits it", f'<div class="answer">{told}</div>', _notes(run))
    distributions = charts.distributions([(run.name, run.data) for run in runs])
    if distributions:
        said = "share of the requests served at least as fast"
        parts = [f"<h3>{escape(label)}</h3>" + page.chart(chart, f"{label}: {said}") for label, chart in distributions]
        page.section("Latencies", *parts)
    rows = []
    for key in (*SHOWN, *SHOWN_IF_ANY):
        values = [look_up(run.data, key) if key.partition(".")[0] in run.data else None for run in runs]
        if any(value is not None for value in values):
            rows.append([FIGURES[key].label, *(write(key, value) for value in values), FIGURES[key].meaning])
    heads = ["figure", *(run.name for run in runs), "meaning"]
    page.section("Figures", table(heads, rows, numbers=range(1, len(runs) + 1)))


def add_trace(page: Page, trace: Result) -> None:
    events = trace.data["traceEvents"]
    names = {
        event.get("pid", 0): event["args"]["name"]
        for event in events
        if event.get("ph") == "M" and event.get("name") == "process_name"
    }
    parts = []
    for process in sorted({event.get("pid", 0) for event in events if event.get("ph") == "X"}):
        chart, part = charts.timeline(events, process)
        said = f"Lanes over time, a colour per step; grey is the host waiting. {part}".strip()
        parts.append((f"<h3>{escape(names[process])}</h3>" if process in names else "") + page.chart(chart, said))
    page.section(f"{trace.name}: timeline", *parts)


def add_sweep(page: Page, swept: Result) -> None:
    points, keys = swept.data["points"], list(swept.data["vary"])
    failed = [point["error"] for point in points if point["error"]]
    parts = [f"<p>{len(points):,} runs over {escape(', '.join(keys))}.</p>"]
    if failed:
        parts.append(f"<p>{len(failed):,} of them failed; the first: {escape(failed[0])}</p>")
    drawn = charts.sweep(points, keys)
    if drawn:
        group = f"sweep-{escape(swept.name)}"
        options = "".join(f'<option value="{figure.key}">{escape(figure.label)}</option>' for figure, _ in drawn)
        choice = f'<select data-group="{group}">{options}</select>'
        parts.append(f'<p class="controls"><label>Figure: {choice}</label></p>')
        for number, (figure, chart) in enumerate(drawn):
            hidden = " hidden" if number else ""
            said = f"{figure.label}: {figure.meaning}"
            parts.append(f'<div data-of="{group}" data-value="{figure.key}"{hidden}>{page.chart(chart, said)}</div>')
    figures = [key for key in POINT_FIGURES if any(_point_value(point, key) is not None for point in points)]
    rows = [
        [*(_plain(point.get(key)) for key in keys), *(write(key, _point_value(point, key)) for key in figures)]
        for point in points[:MOST_ROWS]
    ]
    heads = [*keys, *(FIGURES[key].label for key in figures)]
    more = f"the first {MOST_ROWS} of " if len(points) > MOST_ROWS else ""
    parts.append(details(f"Table: {more}{len(points):,} runs", table(heads, rows, range(len(keys), len(heads)))))
    page.section(_heading(swept), *parts)


def add_capacity(page: Page, found: Result) -> None:
    rows = found.data["capacity"]
    levels = found.data["scenario"]["goodput"]
    said = ", ".join(f"{key.removesuffix('_ms').upper()} {value:g} ms" for key, value in levels.items() if value)
    best = max((row for row in rows if row["figures"]), key=lambda row: row["rate_low_per_s"], default=None)
    told = f"{percent(found.data['attainment'])} of the requests must keep {said}."
    if best is not None:
        told += f" {best['mode']} serves the most: {best['rate_low_per_s']:.2f} requests/s with every seed tried"
        told += f", {best['rate_per_s']:.2f} in the median."
    table_rows = [
        [
            row["mode"],
            f"{row['rate_per_s']:.2f}",
            f"{row['rate_low_per_s']:.2f} to {row['rate_high_per_s']:.2f}",
            f"{row['confidence']:.1%}" if row["confidence"] else "-",
            str(row.get("gpus", "-")),
            f"{row['usd_per_million_output_tokens']:.3f}" if "usd_per_million_output_tokens" in row else "-",
        ]
        for row in rows
    ]
    heads = ["mode", "requests/s, median", "lowest to highest", "confidence", "GPUs", "$ per 1M output tokens"]
    chart = page.chart(charts.capacities(rows), "Highest rate of requests that meets the service levels", moves=False)
    page.section(
        _heading(found),
        f'<div class="answer"><p>{escape(told)}</p></div>',
        chart,
        table(heads, table_rows, range(1, len(heads))),
    )


def add_advice(page: Page, advice: Result) -> None:
    told = "".join(f"<p>{escape(line)}</p>" for line in advice.data["words"])
    page.section(_heading(advice), f'<div class="answer">{told}</div>', _notes(advice))


def add_settings(page: Page, results: Sequence[Result]) -> None:
    """Every setting of every scenario; those that differ are first."""
    flat = [(result.name, _flat(result.data.get("scenario") or {})) for result in results]
    flat = [(name, settings) for name, settings in flat if settings]
    if not flat:
        return
    keys = list(dict.fromkeys(key for _, settings in flat for key in settings))
    rows = [(key, [_plain(settings.get(key)) for _, settings in flat]) for key in keys]
    differ = [(key, values) for key, values in rows if len(set(values)) > 1]
    same = [(key, values) for key, values in rows if len(set(values)) == 1]
    heads = ["setting", *(name for name, _ in flat)]
    parts = []
    if differ:
        parts += ["<h3>What differs</h3>", table(heads, [[key, *values] for key, values in differ])]
    shared = table(["setting", "value"], [[key, values[0]] for key, values in same])
    parts.append(details(f"{len(same)} settings{' that all share' if len(flat) > 1 else ''}", shared))
    page.section("Settings", *parts)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> str:
    right = set(numbers)

    def cell(tag: str, column: int, text: str) -> str:
        return f"<{tag}{' class=number' if column in right else ''}>{escape(text)}</{tag}>"

    head = "".join(cell("th", column, text) for column, text in enumerate(heads))
    body = "".join(
        "<tr>" + "".join(cell("td", column, text) for column, text in enumerate(row)) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def details(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def _notes(result: Result) -> str:
    """What a reader must know of it: a trace that was cut, a profile of something else."""
    return "".join(f'<p class="dim">{escape(note)}</p>' for note in result.data.get("notes", ()))


def _heading(result: Result) -> str:
    word = {"advise": "advice"}.get(result.kind, result.kind)
    return word if result.name == result.kind else f"{result.name}: {word}"


def _point_value(point: Data, key: str) -> Any:
    if key in point:
        return point[key]
    try:
        return look_up(point, key)
    except (KeyError, TypeError):
        return None


def _flat(data: Data, before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{before}{key}.")
        else:
            flat[f"{before}{key}"] = value
    return flat


def _plain(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _asset(name: str) -> str:
    return resources.files("asyncsched.cli").joinpath("page", name).read_text(encoding="utf-8")
