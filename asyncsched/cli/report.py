"""`asyncsched report`: results as one self-contained page, to read, to zoom and to pass on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from asyncsched import __version__
from asyncsched.cli.files import check_output, write_output
from asyncsched.cli.results import Result, read_result
from asyncsched.errors import MISSING, BadInputError, ConfigError

QUESTIONS = {
    "run": "How does this engine serve these requests, and what limits it?",
    "sweep": "What changes when these settings change?",
    "capacity": "What rate of requests keeps the service levels, and what does it cost?",
    "advise": "How many steps in flight are worth it?",
    "trace": "Where does the time go, step by step?",
}


def report(
    results: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RESULT...",
            help="The --json of simulate, sweep, capacity or advise, the --results of sweep, the --trace of simulate.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", metavar="FILE.html", help="The page.")] = None,
    title: Annotated[str, typer.Option(metavar="TEXT", help="What the page is called.")] = "asyncsched report",
    question: Annotated[str | None, typer.Option(metavar="TEXT", help="What was asked; it stands first.")] = None,
) -> None:
    """Write one page from results: what limits each run in words, timelines, latencies, sweep maps.

    The page holds everything it needs and loads nothing. It has a dark mode and can be used from the keyboard.
    """
    if not results:
        raise ConfigError("RESULT", MISSING, "name result files, such as the --json of simulate")
    for place, path in enumerate(results):
        if path in results[:place]:
            raise ConfigError("RESULT", str(path), "it is named twice; name each result once")
    if out is None:
        raise ConfigError("--out", MISSING, "name the page, as in -o report.html")
    check_output("--out", out, (".html",))
    read = _named([read_result(path) for path in results])
    try:
        import plotly  # noqa: F401  # the page is written with it; say so before the work
    except ImportError:
        text = "plotly is not installed, and the page's charts need it: pip install 'asyncsched[report]'"
        raise BadInputError(text) from None
    asked = question or " ".join(QUESTIONS[kind] for kind in dict.fromkeys(result.kind for result in read))
    write_output("--out", out, page_of(read, title, asked).encode())


def page_of(results: list[Result], title: str, question: str) -> str:
    """The page: answers first, settings last."""
    from asyncsched.cli.pages import (
        Page,
        add_advice,
        add_capacity,
        add_runs,
        add_settings,
        add_sweep,
        add_trace,
    )

    page = Page()
    runs = [result for result in results if result.kind == "run"]
    for result in results:
        if result.kind == "advise":
            add_advice(page, result)
        elif result.kind == "capacity":
            add_capacity(page, result)
    if runs:
        add_runs(page, runs)
    for result in results:
        if result.kind == "trace":
            add_trace(page, result)
        elif result.kind == "sweep":
            add_sweep(page, result)
    add_settings(page, results)
    return page.html(title, question, __version__)


def _named(results: list[Result]) -> list[Result]:
    """Results of one name get a number."""
    named: list[Result] = []
    for result in results:
        same = sum(one.name.partition(" (")[0] == result.name for one in named)
        named.append(result._replace(name=f"{result.name} ({same + 1})") if same else result)
    return named
