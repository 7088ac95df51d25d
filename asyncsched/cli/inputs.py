"""Options that several commands share, and the scenario that they name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from asyncsched.errors import MISSING, AsyncschedError, ConfigError

ScenarioFile = Annotated[
    Path | None, typer.Argument(metavar="SCENARIO.toml", help="A scenario file; or use --preset.", show_default=False)
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
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def scenario_data(
    scenario: Path | None, preset: str | None, overrides: list[str] | None, *, strict: bool = False
) -> dict[str, Any]:
    """The scenario as written plus overrides, unchecked. Raises ConfigError."""
    from sim.scenario import apply_overrides, read_preset, read_scenario

    if scenario is not None and preset is not None:
        raise ConfigError("--preset", preset, f"the scenario file {str(scenario)!r} is given too; leave one out")
    if scenario is not None:
        data = read_scenario(scenario)
    elif preset is not None:
        data = read_preset(preset)
    else:
        raise ConfigError("scenario", MISSING, "name a scenario file or a --preset; `asyncsched presets` lists them")
    return apply_overrides(data, [*(overrides or ()), *(["workload.strict=true"] if strict else [])])


def scenario_name(scenario: Path | None, preset: str | None) -> str:
    return preset or str(scenario)


class BadInputError(AsyncschedError):
    """What the user named or asked for cannot be used: exit status 2."""


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


def print_json(value: object) -> None:
    """One JSON object on stdout. A float that is no number is a fault of ours, so it raises."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))
