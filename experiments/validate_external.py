"""Runs of vLLM that others measured: learn what a step costs before a cut in time, simulate, and compare after it.

    python experiments/validate_external.py FOLDER... [--cut 0.5] [--json FILE] [--plot FILE.png]
    python experiments/validate_external.py FOLDER... --learn-from FOLDER

Each folder is one run (`sim/importers.py` says which formats), or holds such folders. The cut is a share of the time
from the first arrival to the last token; nothing that happened after it is looked at before the comparison. The
simulator is given the arrivals and lengths of all requests, as they are the question, and starts at the first arrival:
the state at the cut is its own, nothing of it is copied from the measurement. Held out are requests whose last token
(for time to first token: whose first token) came after the cut. With --learn-from everything of one run is learned
from, and everything of the others is held out.

One method for all runs: there is no option that tunes it, and no figure in it that comes from these runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from study import report

from asyncsched.cli.files import PICTURES, check_output, write_output
from asyncsched.errors import ConfigError
from asyncsched.runs import IntArray, RequestLog, Run
from sim.importers import META, import_run
from sim.replay import Replayed, replay
from sim.request_fit import fit, kv_per_weight, seen_before, workload_of
from sim.scenario import parse_value

Row = dict[str, Any]

LIMITS = {("TPOT", "mean"): 2.0, ("E2E", "mean"): 2.0, ("TTFT", "mean"): 6.0}  # percent
STATISTICS = ("mean", "p50", "p90", "p99")
NOTHING = -1  # a cut before the first arrival
CUTS = (0.3, 0.4, 0.5, 0.6, 0.7)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=__doc__)
def main(
    runs: Annotated[list[Path], typer.Argument(help="folders of runs, or result files of vllm bench serve")],
    cut: Annotated[list[float] | None, typer.Option(help=f"share of the run's time; may be repeated ({CUTS})")] = None,
    learn_from: Annotated[Path | None, typer.Option(help="learn from this whole run and predict the others")] = None,
    engine: Annotated[list[str] | None, typer.Option(help="key=value, a setting the files do not hold")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the result here")] = None,
    plot: Annotated[Path | None, typer.Option(help="draw the errors of the means here")] = None,
    overlay: Annotated[Path | None, typer.Option(help="draw who finished when, measured and predicted, here")] = None,
) -> None:
    try:
        check_output("--json", json_file, (".json",))
        check_output("--plot", plot, PICTURES)
        check_output("--overlay", overlay, PICTURES)
        settings = dict(_setting(text) for text in engine or ())
        found = [import_run(path, settings) for given in runs for path in _folders(given)]
        results = list(_results(found, cut or CUTS, import_run(learn_from, settings) if learn_from else None))
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    rows = [row for result in results for row in result["rows"]]
    columns = {
        "run": "{}",
        "cut": "{}",
        "figure": "{}",
        "requests": "{}",
        "measured": "{:.4g}",
        "predicted": "{:.4g}",
        "error %": "{:+.2f}",
        "limit %": "{}",
        "": "{}",
    }
    report(False, "Predicted and measured, held out", rows, columns, {})
    judged = [row for row in rows if row["limit %"]]
    print(f"{sum(row[''] == 'pass' for row in judged)} of {len(judged)} limits kept")
    for result in results:
        for note in result["notes"]:
            print(f"{result['run']}, cut {result['cut']}: {note}")
    if json_file:
        limits = {" ".join(key): limit for key, limit in LIMITS.items()}
        kept = [{key: value for key, value in result.items() if key != "finished_s"} for result in results]
        text = json.dumps({"limits_percent": limits, "results": kept}, indent=1, allow_nan=False)
        write_output("--json", json_file, f"{text}\n".encode())
    if plot:
        _plot_errors(judged, plot)
    if overlay:
        _plot_overlay(results, overlay)


def _plot_errors(judged: list[Row], path: Path) -> None:
    from asyncsched.plotting import plot_curve

    plot_curve(
        [{**row, "mean of": f"{row['run'].partition('__')[0]} {row['figure'].partition(',')[0]}"} for row in judged],
        "cut",
        "error %",
        path,
        series="mean of",
        x_label="share of the run's time that was learned from",
        y_label="error of what came after it (%)",
        title="Runs of vLLM that others measured, predicted from their first part",
    )


def _plot_overlay(results: list[Row], path: Path) -> None:
    """Requests finished over time, for the first cut of each run."""
    from asyncsched.plotting import plot_curve

    points, marks = [], {}
    for result in {result["run"]: result for result in reversed(results)}.values():
        name = result["run"].partition("__")[0]
        for side in ("measured", "predicted"):
            for place, second in enumerate(sorted(result["finished_s"][side]), 1):
                if place % 15 == 0:
                    points.append({"s": second, "finished": place, "run": f"{name} {side}"})
        marks[result["cut_s"]] = f"cut, {name}"
    plot_curve(
        points,
        "s",
        "finished",
        path,
        series="run",
        x_label="seconds since the first arrival",
        y_label="requests finished",
        title="Predicted from what happened before the cut, and measured",
        marks=sorted(marks.items()),
    )


def _results(found: list[Run], cuts: list[float] | tuple[float, ...], teacher: Run | None) -> Iterator[Row]:
    for run in found:
        for cut in [0.0] if teacher else cuts:
            if not 0 < cut < 1 and not teacher:
                raise ConfigError("--cut", cut, "use a share above 0 and below 1")
            source = teacher or run
            cut_ns = NOTHING if teacher else round(cut * run.info.makespan_ns)
            seen = seen_before(source.requests, source.info.makespan_ns if teacher else cut_ns)
            fitted = fit(seen, source.info.engine, kv_per_weight=kv_per_weight(source))
            config = fitted.engine
            if teacher:  # prices were learned, and what the run does not say; what it says are its own settings
                config = replace(config, **run.info.engine)
            replayed = replay(workload_of(run), config, fitted.prices)
            name = {"run": run.info.name, "cut": cut}
            yield {
                **name,
                "learned from": source.info.name if teacher else f"the first {cut:.0%} of the time",
                "source": run.info.source,
                "engine": {key: getattr(config, key) for key in dict.fromkeys((*run.info.engine, "num_blocks"))},
                "fit": fitted.to_dict(),
                "preemptions": replayed.preemptions,
                "kv_peak_blocks": replayed.kv_peak,
                "notes": [*run.info.notes, *fitted.notes],
                "rows": [{**name, **row} for row in held_out(run.requests, replayed, cut_ns)],
                "cut_s": max(cut_ns, 0) / 1e9,
                "finished_s": {
                    "measured": (run.requests.last_ns / 1e9).tolist(),
                    "predicted": (replayed.last_ns / 1e9).tolist(),
                },
            }


def held_out(log: RequestLog, replayed: Replayed, cut_ns: int) -> list[Row]:
    """One row per figure, over requests that ended (for TTFT: started) after the cut. Waiting that a request had behind
    it at the cut is known by then; figures "from the cut on" leave it out."""
    last, first = log.last_ns > cut_ns, log.first_ns > cut_ns
    many = log.output_tokens > 1
    begun = np.maximum(log.arrival_ns, cut_ns)

    def figures(first_ns: IntArray, last_ns: IntArray) -> dict[str, NDArray[np.float64]]:
        return {
            "TTFT": (first_ns - log.arrival_ns) / 1e9,
            "TPOT": (last_ns - first_ns) / np.maximum(log.output_tokens - 1, 1) / 1e6,
            "E2E": (last_ns - log.arrival_ns) / 1e9,
            "TTFT from the cut on": (first_ns - begun) / 1e9,
            "E2E from the cut on": (last_ns - begun) / 1e9,
        }

    pair = figures(log.first_ns, log.last_ns), figures(replayed.first_ns, replayed.last_ns)
    groups = [("TTFT", "", first, "s"), ("TPOT", "", last & many, "ms"), ("E2E", "", last, "s")]
    if cut_ns >= 0:
        groups += [("TTFT from the cut on", "", first, "s"), ("E2E from the cut on", "", last, "s")]
        groups += [("TPOT", ", all after the cut", first & many, "ms")]
    rows: list[Row] = []
    for figure, which, chosen, unit in groups:
        for statistic in STATISTICS if (figure, "mean") in LIMITS and not which else ("mean",):
            if chosen.any():
                values = [_statistic(side[figure][chosen], statistic) for side in pair]
                limit = None if which else LIMITS.get((figure, statistic))
                rows.append(_row(f"{figure}{which}, {statistic} ({unit})", int(chosen.sum()), *values, limit))
    tokens, start = int(log.output_tokens[last].sum()), max(cut_ns, 0)
    ends = [int(times.max()) for times in (log.last_ns, replayed.last_ns)]
    rates = [tokens / ((end - start) / 1e9) for end in ends]
    rows.append(_row("throughput after the cut (tokens/s)", int(last.sum()), *rates, None))
    rows.append(_row("last token (s)", int(last.sum()), *(end / 1e9 for end in ends), None))
    return rows


def _row(figure: str, count: int, measured: float, predicted: float, limit: float | None) -> Row:
    error = 100 * (predicted / measured - 1)
    verdict = "" if limit is None else "pass" if abs(error) <= limit else "FAIL"
    return {
        "figure": figure,
        "requests": count,
        "measured": measured,
        "predicted": predicted,
        "error %": error,
        "limit %": "" if limit is None else f"{limit:g}",
        "": verdict,
    }


def _statistic(values: NDArray[np.float64], name: str) -> float:
    return float(values.mean() if name == "mean" else np.percentile(values, int(name[1:])))


def _folders(path: Path) -> list[Path]:
    """The run itself, or the runs in a folder of runs, by name."""
    if path.is_dir() and not (path / META).exists():
        inside = sorted(child for child in path.iterdir() if (child / META).exists())
        if inside:
            return inside
    return [path]


def _setting(text: str) -> tuple[str, object]:
    key, separator, value = text.partition("=")
    if not separator:
        raise ConfigError("--engine", text, "use key=value, as in max_num_seqs=128")
    return key, parse_value(value)


if __name__ == "__main__":
    app()
