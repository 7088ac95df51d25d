"""How far from the truth is the simulator? A profile is fitted to some recorded runs and predicts all others.

    python experiments/validate_h200.py [--shape llama-8b] [--runs DIR] [--profile-out FILE.toml] [--plot FILE.png]

Runs come from `experiments/record_h200.py`; those of the H200 come along with the package. Only the group `fit` is
learnt from: nothing of the groups `heldout`, `delay` and `tight` is known to the profile that predicts them. Needs no
GPU. Every row is printed, whether the figure asked for is met or not.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from asyncsched.cli.files import PICTURES, check_output, write_output
from asyncsched.cli.tables import print_table
from asyncsched.errors import AsyncschedError, ConfigError
from asyncsched.run_files import ARCHIVE, read_runs
from asyncsched.runs import Run
from sim.calibrate import calibrate
from sim.profile import Profile, to_toml
from sim.validate import Validation, judge

PACKAGED = Path(__file__).parent.parent / "sim" / "profiles"
GROUPS = ("heldout", "tight", "delay")
# What must be reached, in percent, and in points for shares.
LIMITS = {"makespan_s": 2.0, "output_throughput": 2.0, "tpot_ms.mean": 3.0, "ttft_ms.p50": 8.0, "gpu_active": 1.0}
DELAY_LIMITS = {"makespan_s": 3.0, "tpot_ms.mean": 3.0}
CROSSOVER_LIMIT = 5.0
COVERED = (0.85, 0.95)
SHOWN = ("ttft_ms.mean", "ttft_ms.p99", "tpot_ms.p99", "itl_ms.mean", "itl_ms.p99", "e2el_ms.mean", "idle.host")
SHOWN_COUNTS = ("steps", "preemptions")


class Judgement(NamedTuple):
    """One figure of one run. `limit` None: no figure was asked for."""

    group: str
    run: str
    figure: str
    measured: float
    predicted: float
    error: float
    unit: str
    limit: float | None

    @property
    def verdict(self) -> str:
        return "" if self.limit is None else "met" if abs(self.error) <= self.limit else "NOT MET"


def main(
    shape: Annotated[str, typer.Option(help="A model shape that was recorded.")] = "llama-8b",
    runs: Annotated[Path, typer.Option(help="Folder of the archives.")] = PACKAGED,
    device: Annotated[str, typer.Option(help="What archives' names begin with.")] = "h200",
    profile_out: Annotated[Path | None, typer.Option(help="Write the profile there.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw the errors: .png, .svg or .pdf.")] = None,
) -> None:
    """Fit, predict, compare."""
    try:
        check_output("--plot", plot, PICTURES)
        check_output("--profile-out", profile_out, (".toml",))
        archives = {group: runs / f"{device}-{shape}-{group}{ARCHIVE}" for group in ("fit", *GROUPS)}
        profile = calibrate(read_runs(archives["fit"]), f"{shape} on {device}, fitted to the runs of the group fit")
        validations = {
            group: [(run, judge(run, profile).validation) for run in read_runs(archives[group])]
            for group in GROUPS
            if archives[group].exists()
        }
        report = _report(profile, validations)
        if profile_out is not None:
            write_output("--profile-out", profile_out, to_toml(profile).encode())
        if plot is not None:
            _plot(report["rows"], plot, shape)
    except (ConfigError, AsyncschedError) as error:
        raise SystemExit(f"error: {error}") from None
    if as_json:
        print(json.dumps({**report, "rows": [row._asdict() for row in report["rows"]]}, indent=1))
    else:
        _print(shape, report)


def _report(profile: Profile, validations: dict[str, list[tuple[Run, Validation]]]) -> dict[str, Any]:
    rows: list[Judgement] = []
    for group, judged in validations.items():
        limits = DELAY_LIMITS if group == "delay" else LIMITS
        for _, validation in judged:
            rows += _rows(group, validation, limits)
    if "delay" in validations:
        rows += _crossover(validations["delay"])
    everybody = [pair for judged in validations.values() for pair in judged]
    decisions = [
        {
            "run": validation.run,
            "decisions": validation.decisions,
            "replayed": "all equal" if validation.replayed is None else f"differs at {validation.replayed.number}",
            "by the clock": "all equal" if validation.timed is None else f"differs at {validation.timed.number}",
        }
        for _, validation in everybody
    ]
    fits = {name: item.model_dump(mode="json") for name, item in profile.fit.items()}
    return {"rows": rows, "coverage": _coverage(validations), "decisions": decisions, "fit": fits}


def _rows(group: str, validation: Validation, limits: dict[str, float]) -> Iterator[Judgement]:
    for row in validation.rows:
        if row.figure in (*limits, *SHOWN, *SHOWN_COUNTS):
            limit = limits.get(row.figure)
            yield Judgement(group, validation.run, row.figure, row.measured, row.predicted, row.error, row.unit, limit)


def _coverage(validations: dict[str, list[tuple[Run, Validation]]]) -> list[dict[str, Any]]:
    """Over all runs of a group, per kind of step."""
    counted: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for group, judged in validations.items():
        for _, validation in judged:
            for one in validation.coverage:
                counted[group, one.kind][0] += one.share * one.count
                counted[group, one.kind][1] += one.count
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


def _crossover(judged: Sequence[tuple[Run, Validation]]) -> Iterator[Judgement]:
    """Where the host's work is as long as the device's: the time of a step there, and the delay that leads there.

    The asynchronous engine's step is level while the device limits it, and grows with the delay, one to one, once the
    host does: it is level before the point where the two lines cross.
    """
    points = [
        (run.info.host_delay_us / 1e3, validation.row("itl_ms.p50"))
        for run, validation in judged
        if run.info.engine.get("depth", 2) > 1
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
            )
            for row in rows
        ]
        columns = ("run", "figure", "measured", "predicted", "error", "limit", "")
        print_table(f"{shape}, {group}", columns, table, numbers=columns[2:6])
    table = [
        (one["group"], one["kind"], str(one["steps"]), f"{one['share']:.1%}", one["verdict"])
        for one in report["coverage"]
    ]
    print_table("90% intervals of step durations, 85 to 95% wanted", ("group", "kind", "steps", "inside", ""), table)
    table = [tuple(map(str, one.values())) for one in report["decisions"]]
    print_table("decisions", ("run", "decisions", "same plans", "by the clock"), table)
    limited = [row for row in report["rows"] if row.limit is not None]
    print(f"{sum(row.verdict == 'met' for row in limited)} of {len(limited)} figures met")


def _plot(rows: Sequence[Judgement], path: Path, shape: str) -> None:
    from asyncsched.plotting_runs import plot_bars

    names = [*LIMITS, "ttft_ms.mean", "itl_ms.p99", "e2el_ms.mean", "idle.host"]
    by_run: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row.figure in names:
            by_run[row.group, row.run][row.figure] = row.error
    title = f"{shape}: signed errors of {len(by_run)} runs that the profile had not seen"
    plot_bars(names, list(by_run.values()), path, title=title)


if __name__ == "__main__":
    typer.run(main)
