"""How far from the truth is the simulator? A profile is fitted to some recorded runs and predicts all others.

    python experiments/validate_h200.py [--shape llama-8b] [--runs DIR] [--profile-out FILE.toml] [--plot FILE.png]
        [--json-out FILE.json] [--docs FILE.md] [--draws 50]

Runs come from `experiments/record_h200.py`; those of the H200 come along with the package. Only the groups
`fit` and `fit-tight` are learnt from: nothing of `heldout`, `delay` and `tight` is known to the profile that predicts
them. Needs no GPU. Every row is printed, whether the figure asked for is met or not.

A host works at one speed now and at another then, which nobody can foresee. What is judged is the prediction for a host
as quick as the probe says that was read during the run, or beside it where not all runs have that: a fixed piece of
work, which knows nothing of the run. Each run is predicted twice more: blindly, without the probe, and with one thing
of itself known, how slow its host was by its plans and commits. That tells errors of the model from those of the guess;
neither is what is judged.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from one_line import errors_in_one_line

from asyncsched.cli.files import PICTURES, check_output, write_output
from asyncsched.cli.tables import print_table
from asyncsched.errors import ConfigError
from asyncsched.run_files import ARCHIVE, read_runs
from asyncsched.runs import Run
from sim.calibrate import calibrate
from sim.predict import predict
from sim.profile import Profile, to_toml
from sim.validate import Validation, compare, host_speed, judge

PACKAGED = Path(__file__).parent.parent / "sim" / "profiles"
FIT = ("fit", "fit-tight")  # the second where it was recorded
GROUPS = ("heldout", "tight", "delay")
# What must be reached, in percent, and in points for shares.
LIMITS = {"makespan_s": 2.0, "output_throughput": 2.0, "tpot_ms.mean": 3.0, "ttft_ms.p50": 8.0, "gpu_active": 1.0}
DELAY_LIMITS = {"makespan_s": 3.0, "tpot_ms.mean": 3.0}
CROSSOVER_LIMIT = 5.0
COVERED = (0.85, 0.95)
SHOWN = ("ttft_ms.mean", "ttft_ms.p99", "tpot_ms.p99", "itl_ms.mean", "itl_ms.p99", "e2el_ms.mean", "idle.host")
SHOWN_COUNTS = ("steps", "preemptions")
WORDS = {"heldout": "held out", "tight": "too few KV blocks", "delay": "host delayed"}
IN_DOCS = {
    "makespan_s": "makespan",
    "output_throughput": "tokens/s",
    "tpot_ms.mean": "TPOT",
    "ttft_ms.p50": "TTFT p50",
    "ttft_ms.p99": "TTFT p99",
    "itl_ms.p99": "ITL p99",
    "e2el_ms.mean": "E2E",
    "gpu_active": "GPU active",
}


class Judgement(NamedTuple):
    """One figure of one run. `limit` None: no figure was asked for.

    low, high   what 5 and 95% of the predictions with jitter are below
    told_error  the error of a prediction that was told how slow the host was
    blind_error the error of one that did not look at the probe
    """

    group: str
    run: str
    figure: str
    measured: float
    predicted: float
    error: float
    unit: str
    limit: float | None
    low: float | None = None
    high: float | None = None
    told_error: float | None = None
    blind_error: float | None = None

    @property
    def verdict(self) -> str:
        return "" if self.limit is None else "met" if abs(self.error) <= self.limit else "NOT MET"

    @property
    def inside(self) -> bool | None:
        return None if self.low is None or self.high is None else self.low <= self.measured <= self.high


class Judged(NamedTuple):
    """A run, its validation, errors with the host's speed known and without a probe, and that speed."""

    run: Run
    validation: Validation
    told: dict[str, float]
    blind: dict[str, float]
    host: float


def main(
    shape: Annotated[str, typer.Option(help="A model shape that was recorded.")] = "llama-8b",
    runs: Annotated[Path, typer.Option(help="Folder of the archives.")] = PACKAGED,
    device: Annotated[str, typer.Option(help="What archives' names begin with.")] = "h200",
    profile_out: Annotated[Path | None, typer.Option(help="Write the profile there.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    json_out: Annotated[Path | None, typer.Option(help="Write the JSON object there.")] = None,
    docs: Annotated[Path | None, typer.Option(help="Replace the table in that file.")] = None,
    draws: Annotated[int, typer.Option(min=0, max=1000, help="Predictions with jitter per run.")] = 50,
    plot: Annotated[Path | None, typer.Option(help="Draw the errors: .png, .svg or .pdf.")] = None,
) -> None:
    """Fit, predict, compare."""
    with errors_in_one_line():
        check_output("--plot", plot, PICTURES)
        check_output("--profile-out", profile_out, (".toml",))
        check_output("--json-out", json_out, (".json",))
        around_table(docs, "validate_h200")
        archives = {group: runs / f"{device}-{shape}-{group}{ARCHIVE}" for group in (*FIT, *GROUPS)}
        learnt = " and ".join(group for group in FIT if archives[group].exists())
        profile = calibrate(_fit_runs(archives), f"{shape} on {device}, fitted to the runs of the groups {learnt}")
        validations = {
            group: [_judged(run, profile, draws) for run in read_runs(archives[group])]
            for group in GROUPS
            if archives[group].exists()
        }
        report = _report(profile, validations)
        if profile_out is not None:
            write_output("--profile-out", profile_out, to_toml(profile).encode())
        if plot is not None:
            _plot(report["rows"], plot, shape)
    text = publish(report, json_out, docs, "validate_h200", _markdown)
    if as_json:
        print(text)
    else:
        _print(shape, report)


def _fit_runs(archives: dict[str, Path]) -> list[Run]:
    """Of the group that must be there, and of the one that may be."""
    needed, more = (archives[group] for group in FIT)
    return [*read_runs(needed), *(read_runs(more) if more.exists() else [])]


def _judged(run: Run, profile: Profile, draws: int) -> Judged:
    print(f"predicting {run.info.name}", file=sys.stderr)
    speed = host_speed(run, profile)
    told = profile.model_copy(update={"host": profile.host.model_copy(update={"scale": speed})})
    told_errors, blind_errors = (
        {row.figure: row.error for row in compare(run, predict(run, one))} for one in (told, profile)
    )
    return Judged(run, judge(run, profile, draws=draws).validation, told_errors, blind_errors, speed)


def _report(profile: Profile, validations: dict[str, list[Judged]]) -> dict[str, Any]:
    rows: list[Judgement] = []
    for group, judged in validations.items():
        limits = DELAY_LIMITS if group == "delay" else LIMITS
        for one in judged:
            rows += _rows(group, one, limits)
    if "delay" in validations:
        rows += _crossover(validations["delay"])
    everybody = [one.validation for judged in validations.values() for one in judged]
    decisions = [
        {
            "run": validation.run,
            "decisions": validation.decisions,
            "replayed": "all equal" if validation.replayed is None else f"differs at {validation.replayed.number}",
            "by the clock": "all equal" if validation.timed is None else f"differs at {validation.timed.number}",
        }
        for validation in everybody
    ]
    fits = {name: item.model_dump(mode="json") for name, item in profile.fit.items()}
    hosts = {one.run.info.name: one.host for judged in validations.values() for one in judged}
    met = [row.verdict == "met" for row in rows if row.limit is not None]
    told = [abs(row.told_error) <= row.limit for row in rows if row.limit is not None and row.told_error is not None]
    blind = [abs(row.blind_error) <= row.limit for row in rows if row.limit is not None and row.blind_error is not None]
    summary = {
        "met": sum(met),
        "limits": len(met),
        "met_blind": sum(blind),
        "met_host_known": sum(told),
        "limits_host_known": len(told),
    }
    coverage = {"coverage": _coverage(validations), "figures_inside": _inside(rows)}
    return {**summary, "rows": rows, **coverage, "decisions": decisions, "host_speed": hosts, "fit": fits}


def _rows(group: str, judged: Judged, limits: dict[str, float]) -> Iterator[Judgement]:
    for row in judged.validation.rows:
        if row.figure in (*limits, *SHOWN, *SHOWN_COUNTS):
            values = row.figure, row.measured, row.predicted, row.error, row.unit, limits.get(row.figure)
            told, blind = judged.told[row.figure], judged.blind[row.figure]
            yield Judgement(group, judged.run.info.name, *values, row.low, row.high, told, blind)


def _inside(rows: Sequence[Judgement]) -> list[dict[str, Any]]:
    """Of the figures with a limit, how many lie within 90% of the predictions."""
    found = []
    for group in GROUPS:
        inside = [row.inside for row in rows if row.group == group and row.limit is not None and row.inside is not None]
        if inside:
            found.append({"group": group, "figures": len(inside), "share": sum(inside) / len(inside)})
    return found


def _coverage(validations: dict[str, list[Judged]]) -> list[dict[str, Any]]:
    """Over all runs of a group, and over all runs, per kind of step."""
    counted: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for group, judged in validations.items():
        for each in judged:
            for one in each.validation.coverage:
                for of in (group, "all"):
                    counted[of, one.kind][0] += one.share * one.count
                    counted[of, one.kind][1] += one.count
    low, high = COVERED
    return [
        {
            "group": group,
            "kind": kind,
            "steps": int(count),
            "share": inside / count,
            "verdict": "met" if low <= inside / count <= high else "NOT MET",
        }
        for (group, kind), (inside, count) in counted.items()
    ]


def _crossover(judged: Sequence[Judged]) -> Iterator[Judgement]:
    """Where the host's work is as long as the device's: the time of a step there, and the delay that leads there.

    The asynchronous engine's step is level while the device limits it, and grows with the delay, one to one, once the
    host does: it is level before the point where the two lines cross.
    """
    points = [
        (one.run.info.host_delay_us / 1e3, one.validation.row("itl_ms.p50"))
        for one in judged
        if one.run.info.engine.get("depth", 2) > 1
    ]
    points.sort(key=lambda point: point[0])
    if len(points) < 3:
        return
    delays = [delay for delay, _ in points]
    found = {}
    for side in ("measured", "predicted"):
        steps = [float(getattr(row, side)) for _, row in points]
        level, grown = steps[0], [(d, s) for d, s in zip(delays, steps, strict=True) if s > 1.1 * steps[0]]
        if not grown:
            return
        offset = float(np.mean([s - d for d, s in grown]))  # the host's own work: a step is that and the delay
        found[side] = level, level - offset
    names = ("step at the crossover (ms)", "delay at the crossover (ms)")
    for place, name in enumerate(names):
        measured, predicted = found["measured"][place], found["predicted"][place]
        error = 100 * (predicted / measured - 1)
        limit = CROSSOVER_LIMIT if place == 0 else None
        yield Judgement("delay", "asynchronous", name, measured, predicted, error, "%", limit)


def _print(shape: str, report: dict[str, Any]) -> None:
    for group in GROUPS:
        rows = [row for row in report["rows"] if row.group == group]
        if not rows:
            continue
        table = [
            (
                row.run,
                row.figure,
                f"{row.measured:.4g}",
                f"{row.predicted:.4g}",
                f"{row.error:+.2f} {'' if row.unit == 'count' else row.unit}".strip(),
                "" if row.limit is None else f"{row.limit:g}",
                row.verdict,
                "" if row.told_error is None else f"{row.told_error:+.2f}",
            )
            for row in rows
        ]
        columns = ("run", "figure", "measured", "predicted", "error", "limit", "", "host known")
        print_table(f"{shape}, {group}", columns, table, numbers=(*columns[2:6], *columns[7:]))
    table = [
        (one["group"], one["kind"], str(one["steps"]), f"{one['share']:.1%}", one["verdict"])
        for one in report["coverage"]
    ]
    print_table("90% intervals of step durations, 85 to 95% wanted", ("group", "kind", "steps", "inside", ""), table)
    table = [tuple(map(str, one.values())) for one in report["decisions"]]
    print_table("decisions", ("run", "decisions", "same plans", "by the clock"), table)
    for one in report["figures_inside"]:
        print(f"{one['group']}: {one['share']:.0%} of {one['figures']} figures within 90% of the predictions")
    print(_summary(report))


def _summary(report: dict[str, Any]) -> str:
    told = f"{report['met_host_known']} of {report['limits_host_known']} had the speed of each run's host been known"
    blind = f"{report['met_blind']} of {report['limits_host_known']} without the probes"
    return f"{report['met']} of {report['limits']} figures met; {blind}; {told}"


def _markdown(report: dict[str, Any]) -> str:
    """All runs, a row each; misses are bold."""
    lines = [_summary(report) + ".", ""]
    names = [*IN_DOCS.values(), "host", "makespan, host known", "TPOT, host known"]
    lines += ["| run | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    runs = {(row.group, row.run): {} for row in report["rows"] if row.run in report["host_speed"]}
    for row in report["rows"]:
        if (row.group, row.run) in runs:
            runs[row.group, row.run][row.figure] = row
    for (group, run), rows in runs.items():
        cells = [_cell(rows.get(figure)) for figure in IN_DOCS]
        cells.append(f"{report['host_speed'][run]:.2f}")
        for figure in ("makespan_s", "tpot_ms.mean"):
            row = rows[figure]
            cells.append(_cell(row._replace(error=row.told_error)))
        lines.append(f"| {run if group != 'tight' else f'tight: {run}'} | " + " | ".join(cells) + " |")
    lines += ["", "| asynchronous, delayed | measured | predicted | error |", "|---|---|---|---|"]
    for row in report["rows"]:
        if row.run not in report["host_speed"]:
            lines.append(f"| {row.figure} | {row.measured:.3f} | {row.predicted:.3f} | {_cell(row)} |")
    lines += ["", "| 90% intervals of steps | steps | inside |", "|---|---|---|"]
    for one in report["coverage"]:
        share = f"{one['share']:.1%}"
        share = share if one["verdict"] == "met" else f"**{share}**"
        lines.append(f"| {one['group']}, {one['kind']} | {one['steps']} | {share} |")
    lines += ["", "| 90% intervals of a run's figures | figures with a limit | inside |", "|---|---|---|"]
    lines += [f"| {one['group']} | {one['figures']} | {one['share']:.1%} |" for one in report["figures_inside"]]
    equal = sum(one["replayed"] == "all equal" for one in report["decisions"])
    lines += ["", f"Decisions, entering before the same plans: equal in {equal} of {len(report['decisions'])} runs."]
    return "\n".join(lines)


def _cell(row: Judgement | None) -> str:
    if row is None:
        return ""
    text = f"{row.error:+.1f}"
    return f"**{text}**" if row.verdict == "NOT MET" else text


def publish(
    report: dict[str, Any],
    json_out: Path | None,
    docs: Path | None,
    name: str,
    markdown: Callable[[dict[str, Any]], str],
) -> str:
    """The report as JSON, also in a file where one is named; its tables between the markers `name` of a document."""
    text = json.dumps({**report, "rows": [row._asdict() for row in report["rows"]]}, indent=1, allow_nan=False)
    if json_out is not None:
        write_output("--json-out", json_out, text.encode() + b"\n")
    if docs is not None:
        into_docs(docs, name, markdown(report))
    return text


def into_docs(path: Path, name: str, table: str) -> None:
    """Replaces what is between the lines `<!-- name: begin -->` and `<!-- name: end -->` of a file."""
    before, after = around_table(path, name)
    write_output("--docs", path, f"{before}\n{table}\n{after}".encode())


def around_table(path: Path | None, name: str) -> tuple[str, str]:
    """A file up to the first of these lines and from the second on. Raises ConfigError where it has not one of each."""
    if path is None:
        return "", ""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--docs", str(path), f"it cannot be read: {error}") from None
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ConfigError("--docs", str(path), f"it needs the lines {begin} and {end}")
    return text.split(begin)[0] + begin, end + text.split(end)[1]


def _plot(rows: Sequence[Judgement], path: Path, shape: str) -> None:
    from asyncsched.plotting_runs import plot_errors

    names = {**IN_DOCS, "idle.host": "GPU idle: host"}
    groups: dict[str, dict[str, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        if row.figure in names:
            groups[row.group][row.run][names[row.figure]] = row.error
    runs = {WORDS[group]: list(one.values()) for group, one in groups.items()}
    limits = {names[figure]: limit for figure, limit in LIMITS.items()}
    title = f"{shape}: signed errors of {sum(map(len, runs.values()))} runs that the profile had not seen"
    plot_errors(list(names.values()), runs, path, title=title, limits=limits)


if __name__ == "__main__":
    typer.run(main)
