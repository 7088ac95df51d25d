"""Options that several commands share, and the scenario that they name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from asyncsched.errors import MISSING, BadInputError, ConfigError

LEVELS = ("ttft", "tpot", "e2el")
MODES = {"sync": 1, "async": 2}
"""Depths that have a name."""

ScenarioFile = Annotated[
    Path | None, typer.Argument(metavar="SCENARIO", help="A scenario file, or the --json of a run; or use --preset.")
]
Preset = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="A scenario that comes along; `asyncsched presets` lists them."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the scenario, as in host.scale=4. Repeatable."),
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Stop at the first line of a trace that is no request, instead of leaving it out."),
]
Goodput = Annotated[
    list[str] | None,
    typer.Option("--goodput", metavar="NAME:MS ...", help="Service levels, as in ttft:500 tpot:50 (and e2el), in ms."),
]
Jobs = Annotated[str, typer.Option(metavar="N", help="Processes; -1 is one per core.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def scenario_data(
    scenario: Path | None,
    preset: str | None,
    overrides: list[str] | None,
    *,
    strict: bool = False,
    goodput: list[str] | None = None,
) -> dict[str, Any]:
    """The scenario as written plus overrides, unchecked. Raises ConfigError."""
    from sim.scenario import apply_overrides, read_preset, read_scenario

    if scenario is not None and preset is not None:
        raise ConfigError("--preset", preset, f"the scenario file {str(scenario)!r} is given too; leave one out")
    if scenario is not None:
        data = _of_result(scenario) if scenario.suffix == ".json" else read_scenario(scenario)
    elif preset is not None:
        data = read_preset(preset)
    else:
        raise ConfigError("scenario", MISSING, "name a scenario file or a --preset; `asyncsched presets` lists them")
    more = ["workload.strict=true"] if strict else []
    return apply_overrides(data, [*(overrides or ()), *more, *_levels(goodput or ())])


def trace_file(workload: object) -> Path | None:
    """The file that a scenario's workload is read from, as far as it names one; unchecked."""
    from sim.trace import path_of

    trace = workload.get("trace") if isinstance(workload, Mapping) else None
    return path_of(trace) if isinstance(trace, str) else None


def _of_result(path: Path) -> dict[str, Any]:
    """The scenario of a run whose `--json` was kept."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError("scenario", str(path), f"it cannot be read as JSON ({reason})") from None
    if not isinstance(data, dict) or not isinstance(data.get("scenario"), dict):
        raise ConfigError("scenario", str(path), "it holds no scenario; use a TOML file, or the --json of a run")
    return dict(data["scenario"])


def _levels(texts: Sequence[str]) -> list[str]:
    names = [text.partition(":")[0] for text in texts]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise ConfigError("--goodput", texts[place], f"{name} has a level already; give each once")
    return [_level(text) for text in texts]


def _level(text: str) -> str:
    """`ttft:500` as an override of the scenario."""
    name, _, value = text.partition(":")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if name not in LEVELS or not 0 < number < math.inf:
        raise ConfigError("--goodput", text, f"use NAME:MS with a name of {', '.join(LEVELS)}, as in ttft:500 tpot:50")
    return f"goodput.{name}_ms={number!r}"


def scenario_name(scenario: Path | None, preset: str | None) -> str:
    return preset or str(scenario)


class AllRejectedError(BadInputError):
    """No request of the workload can ever run, so there is nothing to report."""


def check_rejections(summary: dict[str, Any]) -> str:
    """A warning if some requests were rejected, "" if none was. Raises AllRejectedError."""
    rejected, requests = summary["rejected"], summary["requests"]
    if not rejected:
        return ""
    first = summary["rejections"][0]
    if rejected == requests:
        raise AllRejectedError(f"workload: none of {requests} requests can ever run; {first}")
    return f"workload: {rejected} of {requests} requests can never run and were rejected; {first}"


def parse_jobs(text: str) -> int:
    try:
        jobs = int(text)
    except ValueError:
        jobs = 0
    if jobs < 1 and jobs != -1:
        raise ConfigError("--jobs", text, "use a number of processes, or -1 for one per core")
    return jobs


def parse_count(option: str, text: str, least: int) -> int:
    digits = text.isascii() and text.isdigit()
    if not digits or int(text[:20]) < least:
        raise ConfigError(option, text, f"use a whole number of at least {least}")
    if len(text) >= 10:
        raise ConfigError(option, text, "use a whole number of at most 999,999,999")
    return int(text)


def print_json(value: object) -> None:
    """One JSON object on stdout. A float that is no number is a fault of ours, so it raises."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))
