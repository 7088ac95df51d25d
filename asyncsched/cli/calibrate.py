"""`asyncsched calibrate`: learn from recorded runs what each lane takes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from asyncsched.cli.files import check_output, write_output
from asyncsched.cli.inputs import AsJson, print_json
from asyncsched.cli.runs import load_runs

if TYPE_CHECKING:
    from sim.profile import Profile


def calibrate(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Folders, archives, ARCHIVE.tar.xz::NAME.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE.toml", help="Write the profile there.")],
    description: Annotated[str, typer.Option(help="What the profile is of.")] = "",
    as_json: AsJson = False,
) -> None:
    """Fit a profile to recorded runs: prices per lane, how well they fit, and how much they vary."""
    check_output("--out", out, (".toml",))
    from sim.calibrate import calibrate as fit
    from sim.profile import to_toml

    profile = fit(load_runs(runs), description)
    write_output("--out", out, to_toml(profile).encode())
    if as_json:
        print_json(profile.to_dict())
    else:
        _print_fit(profile, out)


def _print_fit(profile: Profile, out: Path) -> None:
    from asyncsched.cli.tables import print_table

    rows = [
        (name, f"{item.count:,}", f"{item.rms_pct:.2f}", f"{item.p05_pct:+.2f} to {item.p95_pct:+.2f}")
        for name, item in profile.fit.items()
    ]
    columns = ("price", "samples", "rms error (%)", "middle 90% (%)")
    runs = f"{len(profile.runs)} run" + "s" * (len(profile.runs) != 1)
    print_table(f"{out}: fitted to {runs}", columns, rows, numbers=columns[1:])
