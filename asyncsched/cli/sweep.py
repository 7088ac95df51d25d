"""`asyncsched sweep`: many scenarios, as a table, a CSV file, a curve or a heat map."""

from __future__ import annotations

import csv
import difflib
import io
import json
import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from asyncsched.cli.figures import FIGURES, write
from asyncsched.cli.files import PICTURES, check_distinct, check_output, write_output
from asyncsched.cli.inputs import (
    AllRejectedError,
    AsJson,
    Goodput,
    Jobs,
    Overrides,
    Preset,
    ScenarioFile,
    Strict,
    check_rejections,
    parse_count,
    parse_jobs,
    print_json,
    scenario_data,
    scenario_name,
    trace_file,
)
from asyncsched.cli.progress import progress_bar
from asyncsched.errors import MISSING, AsyncschedError, ConfigError

Row = dict[str, Any]

SHOWN = ("makespan_s", "output_throughput", "gpu_active", "ttft_ms.p50", "tpot_ms.p50", "limiting_lane")
REJECTION_COLUMNS = ("requests", "rejected", "rejections")


def sweep(
    scenario: ScenarioFile = None,
    preset: Preset = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V1,V2,...", help="Values of a key, as in host.scale=1,2,4. Repeat for a grid."),
    ] = None,
    ranges: Annotated[
        list[str] | None,
        typer.Option("--range", metavar="KEY=LOW:HIGH[:log]", help="Draw values of a key. Needs --sample. Repeatable."),
    ] = None,
    sample: Annotated[
        str | None,
        typer.Option(metavar="N", help="Points drawn at random from --range and --vary, instead of the whole grid."),
    ] = None,
    sample_seed: Annotated[
        str | None, typer.Option(metavar="SEED", help="Of the points that are drawn; without it, 0.")
    ] = None,
    overrides: Overrides = None,
    strict: Strict = False,
    goodput: Goodput = None,
    jobs: Jobs = "1",
    backend: Annotated[str, typer.Option(metavar="NAME", help="Where they run: local, ray, dask.")] = "local",
    results: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl", help="Keep each point there as soon as it is done; what is there is not run again."
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.csv", help="Write all columns, one row per run.")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw a curve or, for two keys with numbers, a heat map: .png, .svg, .pdf."),
    ] = None,
    metric: Annotated[str, typer.Option(metavar="NAME", help="The figure to draw.")] = "output_throughput",
    as_json: AsJson = False,
) -> None:
    """Simulate a scenario once per combination of varied keys, or at points drawn at random.

    A value that no point can have is bad input. Points that fail keep their row; the exit status is then 1.
    """
    check_output("--out", out, (".csv",))
    check_output("--plot", plot, PICTURES)
    _check_results(results)
    _check_metric(metric)
    processes = parse_jobs(jobs)

    from asyncsched.cli.cluster import cluster
    from sim.results import ResultFile
    from sim.sweep import COLUMNS, build_points, run_sweep

    varied, points = _design(vary or [], ranges or [], sample, sample_seed)
    if plot is not None:
        _check_drawable(plot, varied, sample)
    _check_fixed(overrides or [], varied)
    base = scenario_data(scenario, preset, overrides, strict=strict, goodput=goodput)
    for workload in (base.get("workload"), *({"trace": one} for one in varied.get("workload.trace", ()))):
        inputs = {"the scenario": scenario, "workload.trace": trace_file(workload)}
        check_distinct({**inputs, "--results": results, "--out": out, "--plot": plot})
    build_points(base, points)  # refuses what is wrong with them before anything is written
    columns = tuple(dict.fromkeys((*COLUMNS, metric, *REJECTION_COLUMNS)))
    with (
        ResultFile("--results", results) if results is not None else nullcontext() as kept,
        progress_bar("sweeping") as progress,
        cluster(backend, processes) as where,
    ):
        if kept is not None and kept.cut:
            print(f"warning: --results: {results} ended in half a line, which was cut off", file=sys.stderr)
        rows = run_sweep(base, points, jobs=processes, backend=where, results=kept, columns=columns, progress=progress)
    failures = _judge(rows)
    if out is not None:
        write_output("--out", out, _csv(rows))
    if plot is not None:
        _plot(rows, varied, metric, plot, scenario_name(scenario, preset))
    if as_json:
        print_json({"vary": _plain(varied), "scenario": _plain(base), "points": _plain(rows)})
    else:
        _print_rows(rows, varied, metric, scenario_name(scenario, preset))
    if failures:
        raise AsyncschedError(failures)


def _check_metric(name: str) -> None:
    if name in FIGURES and name != "limiting_lane":
        return
    near = difflib.get_close_matches(name, FIGURES) or ["output_throughput", "makespan_s", "gpu_active", "tpot_ms.p50"]
    raise ConfigError("--metric", name, f"use the key of a figure, such as {', '.join(near)}")


def _check_results(path: Path | None) -> None:
    if path is not None and path.suffix != ".jsonl":
        raise ConfigError("--results", str(path), "its name must end in .jsonl")


def _design(
    vary: Sequence[str], ranges: Sequence[str], sample: str | None, seed: str | None
) -> tuple[dict[str, list[object]], list[dict[str, object]]]:
    """The values of each key, those that were drawn too, and the points in order."""
    from sim.design import Range, grid, parse_range, parse_vary, random_points
    from sim.scenario import dotted_key

    if not vary and not ranges:
        raise ConfigError("--vary", MISSING, "name at least one key and its values, as in host.scale=1,2,4")
    varied: dict[str, list[object]] = {}
    drawn: dict[str, Range] = {}
    for option, text in [*(("--vary", text) for text in vary), *(("--range", text) for text in ranges)]:
        key, values = parse_vary(text) if option == "--vary" else parse_range(text)
        if dotted_key(key) in map(dotted_key, (*varied, *drawn)):
            raise ConfigError(option, text, f"{key} is varied already; give all its values at once")
        if isinstance(values, list):
            varied[key] = values
        else:
            drawn[key] = values
    if sample is None:
        if ranges:
            raise ConfigError("--range", ranges[0], "say with --sample how many points to draw")
        if seed is not None:
            raise ConfigError("--sample-seed", seed, "say with --sample how many points to draw")
        return varied, grid(varied)
    number = 0 if seed is None else parse_count("--sample-seed", seed, 0)
    points = random_points(drawn, varied, parse_count("--sample", sample, 1), number)
    return {key: [point[key] for point in points] for key in points[0]}, points


def _check_fixed(overrides: Sequence[str], varied: Mapping[str, object]) -> None:
    """What is varied has no other value."""
    from sim.scenario import dotted_key, split_overrides

    keys = {_one_choice(dotted_key(key)): key for key in varied}
    for key, text in split_overrides(overrides, "host.scale=4").items():
        if (name := _one_choice(dotted_key(key))) in keys:
            raise ConfigError("--set", f"{key}={text}", f"{keys[name]} is varied; leave one of the two out")


def _one_choice(key: str) -> str:
    return "depth" if key == "mode" else key


def _check_drawable(plot: Path, varied: Mapping[str, Sequence[object]], sample: str | None) -> None:
    if sample is not None:
        raise ConfigError("--plot", str(plot), "a grid can be drawn, not points drawn at random; use --out")
    if len(varied) > 2:
        raise ConfigError("--plot", str(plot), f"one or two varied keys can be drawn, not {len(varied)}; use --out")


def _judge(rows: list[Row]) -> str:
    """Points in which no request could run get an error like other failures. Raises if all failed.

    Returns how many failed, in words; "" for none.
    """
    partly, never = 0, 0
    for row in rows:
        try:
            partly += bool(not row["error"] and check_rejections(row))
        except AllRejectedError as error:
            row["error"] = str(error)
            never += 1
        del row["rejections"]  # a column of texts, one per request
    failed = [row["error"] for row in rows if row["error"]]
    if len(failed) == len(rows):
        message = f"all {len(rows)} runs failed; the first: {failed[0]}"
        raise AllRejectedError(message) if never == len(rows) else AsyncschedError(message)
    if partly:
        print(f"warning: some requests were rejected in {partly} of {len(rows)} runs; see 'rejected'", file=sys.stderr)
    return f"{len(failed)} of {len(rows)} runs failed; the first: {failed[0]}" if failed else ""


def _csv(rows: list[Row]) -> bytes:
    """Tables and lists are written as JSON."""
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({key: json.dumps(item) if isinstance(item, dict | list) else item for key, item in row.items()})
    return text.getvalue().encode()


def _plot(rows: list[Row], varied: Mapping[str, Sequence[object]], metric: str, path: Path, name: str) -> None:
    from asyncsched.plotting import is_number, plot_curve, plot_heatmap

    label = FIGURES[metric].axis_label
    drawn = [row for row in rows if row[metric] is not None and not row["error"]]
    if not drawn:
        raise ConfigError("--metric", metric, "no run has a value of it; name another figure to draw")
    title = f"{name}: {FIGURES[metric].label}"
    numeric = [key for key, values in varied.items() if all(is_number(value) for value in values)]
    words = [key for key in varied if key not in numeric]
    if len(numeric) == 2:
        plot_heatmap(drawn, numeric[0], numeric[1], metric, path, z_label=label, title=title)
    elif len(varied) == 2:
        x, series = (numeric[0], words[0]) if numeric else (words[0], words[1])
        plot_curve(drawn, x, metric, path, series=series, y_label=label, title=title)
    else:
        plot_curve(drawn, next(iter(varied)), metric, path, y_label=label, title=title)


def _print_rows(rows: list[Row], varied: Mapping[str, object], metric: str, name: str) -> None:
    from asyncsched.cli.tables import print_table

    levels = ("goodput.per_s",) if any(row["goodput.per_s"] is not None for row in rows) else ()
    keys = [key for key in dict.fromkeys((*SHOWN, *levels, metric)) if key not in varied]
    table = [
        [*(_short(row[key]) for key in varied), *(write(key, row[key]) if not row["error"] else "-" for key in keys)]
        for row in rows
    ]
    headers = [FIGURES[key].label for key in keys]
    print_table(f"{name}: {len(rows)} runs (simulated)", [*varied, *headers], table, numbers=headers)


def _short(value: object) -> str:
    """A varied value as the table shows it: numbers that were drawn have many digits, which --out keeps."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _plain(value: object) -> Any:
    """`value` as JSON can say it: TOML has dates and NaN, which a point that failed may have been asked for."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)
