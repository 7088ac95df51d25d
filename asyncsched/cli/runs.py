"""Runs and profiles that commands name: files, or what comes along with the package."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from asyncsched.errors import MISSING, ConfigError
from asyncsched.run_files import ARCHIVE, IN_ARCHIVE, read_run, read_runs

if TYPE_CHECKING:
    from asyncsched.runs import Run
    from sim.profile import Profile

Found = TypeVar("Found")
RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="A folder, ARCHIVE.tar.xz::NAME, or a run that comes along.")
]
ProfileName = Annotated[
    str | None,
    typer.Option("--profile", metavar="FILE.toml|NAME", help="A profile, or the name of one that comes along."),
]


def is_run(name: str) -> bool:
    """Whether it names a run rather than a scenario file."""
    path, packaged = Path(name), _packaged_run(name)
    return packaged != name or IN_ARCHIVE in name or name.endswith(ARCHIVE) or path.is_dir()


def load_run(name: str) -> Run:
    """Raises ConfigError."""
    return _read(name, read_run)


def load_runs(names: list[str]) -> list[Run]:
    """Every run of every name. Raises ConfigError, also for a name that is there twice."""
    for place, name in enumerate(names):
        if name in names[:place]:
            raise ConfigError("RUN", name, "it is named twice; a run counts once")
    return [run for name in names for run in _read(name, read_runs)]


def load_profile_data(name: str) -> dict[str, Any]:
    """A profile as it is written, unchecked but for its sections. Raises ConfigError."""
    from sim.profile import read_profile_data

    packaged = _folder() / f"{name}.toml"
    if not packaged.is_file() and not Path(name).exists():
        there = ", ".join(sorted(path.stem for path in _folder().glob("*.toml")))
        raise ConfigError("profile", name, f"it cannot be read, there is no such file; use a TOML file or {there}")
    data = read_profile_data(name if Path(name).exists() else packaged)
    for section in ("host", "gpu", *(["fit"] if data.get("runs") else [])):  # the last of what was learnt from runs
        if section not in data:  # what is left out costs nothing, so a file that was cut off would give figures too
            raise ConfigError(f"profile.{section}", MISSING, f"`asyncsched calibrate` writes it; is {name} whole?")
    return data


def load_profile(name: str | None) -> Profile:
    """Raises ConfigError."""
    from sim.profile import Profile

    if name is None:
        raise ConfigError("--profile", MISSING, "name a profile; `asyncsched calibrate` makes one")
    return Profile.from_dict(load_profile_data(name))


def check_subject(profile: Profile, run: Run) -> list[str]:
    """Warnings, which are printed too: the profile is of another model or device than the run, or of another kind of
    probe."""
    from sim.host_speed import probe_warning
    from sim.subject import of_profile, of_run, warning

    notes = [warning(of_profile(profile), of_run(run), "run"), probe_warning(profile, run)]
    notes = [said for said in notes if said]
    for said in notes:
        print("warning:", said, file=sys.stderr)
    return notes


def _read(name: str, read: Callable[[str], Found]) -> Found:
    """What is there under that name. Raises ConfigError, which names it as it was named and not by where it lies."""
    found = _found_run(name)
    try:
        return read(found)
    except ConfigError as error:
        if error.value != found:
            raise
        ours, theirs = (one.partition(IN_ARCHIVE)[0] for one in (name, found))
        raise ConfigError(error.field, name, error.allowed.replace(theirs, ours)) from None


def _found_run(name: str) -> str:
    """Where it is. Raises ConfigError where nothing has that name."""
    found, archive = _packaged_run(name), name.partition(IN_ARCHIVE)[0]
    if found == name and not os.path.lexists(archive):
        there = ", ".join(sorted(path.name.removesuffix(ARCHIVE) for path in _folder().glob(f"*{ARCHIVE}")))
        allowed = f"there is no such file; use the folder of a run, an archive that ends in {ARCHIVE}, or {there}"
        raise ConfigError("run", name, allowed)
    return found


def _packaged_run(name: str) -> str:
    archive, separator, run = name.partition(IN_ARCHIVE)
    packaged = _folder() / f"{archive.removesuffix(ARCHIVE)}{ARCHIVE}"
    if not Path(archive).exists() and packaged.is_file():
        return f"{packaged}{separator}{run}"
    return name


def _folder() -> Path:
    import sim

    return Path(str(sim.__file__)).parent / "profiles"
