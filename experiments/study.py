"""What the studies share: options, runs, and a table at the end. Each study is a script; start it without options."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from one_line import at_least_one, errors_in_one_line, processes

from asyncsched.cli.files import PICTURES, check_output
from asyncsched.cli.tables import print_table
from sim.design import grid
from sim.run import Result, simulate
from sim.scenario import load_preset, override_values, read_preset
from sim.sweep import run_sweep
from sim.trace import read_trace

Row = dict[str, Any]


def options(description: str | None) -> argparse.Namespace:
    """--json prints the results as one JSON object instead of a table, --plot draws them."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the result: .png, .svg or .pdf")
    chosen = parser.parse_args()
    if chosen.plot:
        check(chosen.plot)
    return chosen


def trace_options(description: str | None) -> argparse.Namespace:
    """--json, --trace for a file instead of the packaged slice, --requests to draw from it, --jobs for processes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--trace", default="azure-conv-500", help="a packaged trace or a file; see docs/scenarios.md")
    parser.add_argument(
        "--requests", type=at_least_one, default=1500, help="drawn from the trace, where arrivals are drawn"
    )
    parser.add_argument("--jobs", type=processes, default=-1, help="processes; all cores without it")
    chosen = parser.parse_args()
    with errors_in_one_line():
        read_trace(chosen.trace)
    return chosen


def check(*paths: Path) -> None:
    """Exits with one line when a file could not be written after the work."""
    with errors_in_one_line():
        for path in paths:
            check_output("file", path, (*PICTURES, ".json"))


def run(preset: str, *overrides: str, spans: bool = False) -> Result:
    """One preset with `key=value` overrides."""
    return simulate(load_preset(preset, overrides), spans=spans)


def sweep(
    preset: str, vary: Mapping[str, Sequence[object]], columns: Sequence[str], fixed: Mapping[str, object] | None = None
) -> list[Row]:
    """A grid over a preset with the keys in `fixed` changed, on all cores. Every run must succeed."""
    rows = run_sweep(override_values(read_preset(preset), fixed or {}), grid(vary), jobs=-1, columns=columns)
    failed = [row["error"] for row in rows if row["error"]]
    if failed:
        raise RuntimeError(failed[0])
    return rows


def report(
    as_json: bool,
    title: str,
    rows: Sequence[Row],
    columns: Mapping[str, str | Callable[[Any], str]],
    notes: Mapping[str, Any],
) -> None:
    """A table of `rows`, whose `columns` map a key to a format such as "{:.1f}" or a function, and what follows.

    With `as_json`: the same as one object, unrounded.
    """
    if as_json:
        print(json.dumps({"rows": rows, **notes}, indent=2, allow_nan=False))
        return
    words = {name for name, form in columns.items() if form == "{}"}
    table = [
        [form.format(row[name]) if isinstance(form, str) else form(row[name]) for name, form in columns.items()]
        for row in rows
    ]
    print_table(title, list(columns), table, numbers=columns.keys() - words)
    for name, value in notes.items():
        print(f"{name.replace('_', ' ')}: {value:.4g}" if isinstance(value, float) else f"{name}: {value}")
