"""`asyncsched validate`: a recorded run beside what the simulator makes of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncsched.cli.figures import FIGURES, number
from asyncsched.cli.files import PICTURES, check_output
from asyncsched.cli.inputs import AsJson, print_json
from asyncsched.cli.runs import ProfileName, RunName, check_subject, load_profile, load_run
from asyncsched.errors import ConfigError

if TYPE_CHECKING:
    from asyncsched.runs import Run
    from sim.validate import Difference, Row, Validation

LABELS = {
    "idle.host": "GPU idle: host",
    "idle.h2d": "GPU idle: input copy",
    "idle.back_to_back": "GPU idle: between steps",
    "idle.no_work": "GPU idle: no work",
}
PANELS = {
    "ttft_ms": "time to first token (ms)",
    "tpot_ms": "time per output token (ms)",
    "e2el_ms": "end-to-end latency (ms)",
}


def validate(
    run: RunName,
    profile: ProfileName = None,
    draws: Annotated[str, typer.Option(metavar="N", help="Predictions with jitter, for intervals.")] = "10",
    as_json: AsJson = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw both over one another: .png, .svg or .pdf.")
    ] = None,
) -> None:
    """Predict a recorded run from its arrivals and lengths, and show every error."""
    check_output("--plot", plot, PICTURES)
    count = _draws(draws)
    known = load_profile(profile)
    recorded = load_run(run)
    notes = [*check_subject(known, recorded), *recorded.info.notes]
    from sim.validate import judge

    judged = judge(recorded, known, draws=count)
    if plot is not None:
        draw(judged.measured, judged.predicted, plot)
    if as_json:
        print_json({**judged.validation.to_dict(), "notes": notes})
    else:
        print_validation(judged.validation)
        for note in recorded.info.notes:
            typer.echo(f"note: {note}")


def draw(measured: Run, predicted: Run, path: Path) -> None:
    """The picture of a validation."""
    from asyncsched.plotting_runs import Side, plot_validation
    from sim.validate import latencies, occupancy

    def side(run: Run) -> Side:
        found = latencies(run)
        return Side(occupancy(run), {label: found[name] for name, label in PANELS.items()})

    title = f"{measured.info.name}: measured, and predicted from its arrivals and lengths"
    plot_validation(side(measured), side(predicted), path, title=title)


def print_validation(validation: Validation) -> None:
    from asyncsched.cli.tables import print_table

    rows = [
        (label(row.figure), _value(row, row.measured), _value(row, row.predicted), error(row), _drawn(row))
        for row in validation.rows
    ]
    columns = ("figure", "measured", "predicted", "error", "with jitter (90%)")
    print_table(f"{validation.run}: measured and predicted", columns, rows, numbers=columns[1:])
    for one in validation.coverage:
        typer.echo(f"{one.kind} steps within their 90% interval: {one.share:.1%} of {one.count}")
    if validation.decisions:
        _print_difference("arrivals by the clock", validation.timed, validation.decisions)
        _print_difference("arrivals before the same plans", validation.replayed, validation.decisions)


def label(figure: str) -> str:
    """What a figure is called in tables."""
    known = FIGURES.get(figure)
    return LABELS.get(figure) or (known.label if known is not None else figure)


def error(row: Row) -> str:
    return f"{row.error:+.2f} {row.unit}" if row.unit != "count" else f"{row.error:+.0f}"


def _value(row: Row, value: float) -> str:
    known = FIGURES.get(row.figure)
    unit = known.unit if known is not None and row.unit not in ("points", "count") else ""
    return f"{_number(row, value)} {unit}".strip()


def _number(row: Row, value: float) -> str:
    if row.unit == "points":
        return f"{value:.2%}"
    return f"{value:,.0f}" if row.unit == "count" else number(float(value))


def _drawn(row: Row) -> str:
    """The median of the predictions with jitter, and where nine in ten are."""
    if row.low is None or row.middle is None or row.high is None:
        return "-"
    middle, low, high = (_number(row, value) for value in (row.middle, row.low, row.high))
    return f"{middle} ({low} to {high})"


def _print_difference(how: str, difference: Difference | None, count: int) -> None:
    if difference is None:
        typer.echo(f"decisions, {how}: all {count} equal")
        return
    typer.echo(f"decisions, {how}: the first that differs is number {difference.number} of {count}")
    typer.echo(f"  measured:  {_cut(difference.measured)}")
    typer.echo(f"  predicted: {_cut(difference.predicted)}")


def _cut(line: str, width: int = 160) -> str:
    return (line if len(line) <= width else line[: width - 4] + " ...") or "none"


def _draws(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 4):
        raise ConfigError("--draws", text, "use a whole number from 0 to 9999")
    return int(text)
