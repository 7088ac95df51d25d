"""`asyncsched fuzz`: whole-system episodes from seeds, with every check on, and what they exercised."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncsched.cli.inputs import AsJson, print_json
from asyncsched.cli.progress import progress_bar
from asyncsched.errors import ConfigError

if TYPE_CHECKING:
    from asyncsched.fuzz import Failure, Finding, FuzzReport
    from asyncsched.fuzz_scenario import Scenario

FAILED = 1
DEFAULT_STEPS = 100_000
MOST_DEPTH = 16


def fuzz(
    episodes: Annotated[str | None, typer.Option(metavar="N", help="Run so many episodes.")] = None,
    minutes: Annotated[str | None, typer.Option(metavar="M", help="Run for so long.")] = None,
    steps: Annotated[
        str | None, typer.Option(metavar="N", help=f"Run so many steps. Without a limit: {DEFAULT_STEPS}.")
    ] = None,
    seed: Annotated[str, typer.Option(metavar="S", help="The first episode's seed; the next has S + 1.")] = "0",
    depth: Annotated[str, typer.Option(metavar="D,...", help="Depths to draw from.")] = "1,2,3,4",
    faults: Annotated[str, typer.Option(metavar="none|all|NAME,...", help="Faults to draw from.")] = "all",
    replay: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Run the scenario that a failure wrote, and nothing else.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Look for faults of the scheduler: random episodes, adversarial order, injected faults, every check on."""
    from asyncsched.fuzz import fuzz as run
    from asyncsched.fuzz import run_scenario
    from asyncsched.fuzz_draw import FuzzOptions

    if replay is not None:
        _check_alone({"--episodes": episodes, "--minutes": minutes, "--steps": steps})
        episode = run_scenario(_read(replay))
        _print_replay(replay, episode.steps, episode.finding, as_json)
        if episode.finding is not None:
            raise typer.Exit(FAILED)
        return
    limits = _limits(episodes, minutes, steps)
    options = FuzzOptions(depths=_parse_depths(depth), faults=_parse_faults(faults))
    first = _parse_count("--seed", seed, least=0)
    passed = passed_steps = 0
    with progress_bar("fuzzing") as bar:

        def progress(done: int, total: int, elapsed: float) -> None:
            nonlocal passed, passed_steps
            passed, passed_steps = done, total
            if bar is not None:
                share = {"episodes": done, "steps": total, "seconds": elapsed}
                ((name, limit),) = limits.items()
                bar(int(1000 * share[name] / limit), 1000)

        try:
            report = run(first, options, progress=progress, **limits)  # type: ignore[arg-type]  # one limit by name
        except KeyboardInterrupt:
            found = (
                f"{passed} episodes, {passed_steps} steps without a finding; --seed {first + passed} goes on from there"
            )
            raise KeyboardInterrupt(f"interrupted; {found}") from None
    command = f"asyncsched fuzz --seed {{}} --episodes 1 --depth {depth} --faults {faults}"
    if as_json:
        print_json(_report_json(report, command))
    else:
        _print_report(report, command)
    if report.failure is not None:
        raise typer.Exit(FAILED)


# ---- input -----------------------------------------------------------------------------------------------------------


def _limits(episodes: str | None, minutes: str | None, steps: str | None) -> dict[str, float]:
    given = {"--episodes": episodes, "--minutes": minutes, "--steps": steps}
    named = [(option, value) for option, value in given.items() if value is not None]
    if not named:
        return {"steps": DEFAULT_STEPS}
    (option, value), *others = named
    if others:
        raise ConfigError(others[0][0], others[0][1], f"{option} is given too; use one of the two")
    if option == "--minutes":
        return {"seconds": 60 * _parse_minutes(value)}
    return {option[2:]: _parse_count(option, value, least=1)}


def _parse_count(option: str, text: str, *, least: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 15 and int(text) >= least):
        raise ConfigError(option, text, f"use a whole number of at least {least}")
    return int(text)


def _parse_minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < 1e6:
        raise ConfigError("--minutes", text, "use a number above 0")
    return minutes


def _parse_depths(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and 1 <= int(part[:3]) <= MOST_DEPTH for part in parts):
        raise ConfigError("--depth", text, f"use depths from 1 to {MOST_DEPTH}, as in 1,2")
    return tuple(int(part) for part in parts)


def _parse_faults(text: str) -> tuple[str, ...]:
    from asyncsched.fuzz_draw import FAULT_NAMES

    if text == "all":
        return FAULT_NAMES
    if text == "none":
        return ()
    names = tuple(dict.fromkeys(text.split(",")))
    unknown = [name for name in names if name not in FAULT_NAMES]
    if unknown:
        raise ConfigError("--faults", unknown[0], f"use none, all, or names of {', '.join(FAULT_NAMES)}")
    return names


def _check_alone(options: dict[str, str | None]) -> None:
    for option, value in options.items():
        if value is not None:
            raise ConfigError(option, value, "--replay runs one scenario as it is written; leave the option out")


def _read(path: Path) -> Scenario:
    from asyncsched.fuzz_scenario import Scenario

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("--replay", str(path), f"it cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ConfigError("--replay", str(path), f"it is not JSON ({error})") from None
    try:
        return Scenario.from_dict(data)
    except ConfigError as error:
        raise ConfigError("--replay", str(path), f"use a file that a failure wrote ({error})") from None


# ---- output ----------------------------------------------------------------------------------------------------------


def _print_replay(path: Path, steps: int, finding: Finding | None, as_json: bool) -> None:
    if as_json:
        print_json({"replay": str(path), "steps": steps, "finding": None if finding is None else asdict(finding)})
    else:
        typer.echo(f"{path}: {steps} steps, " + ("no finding" if finding is None else f"FAILED: {finding}"))


def _report_json(report: FuzzReport, command: str) -> dict[str, Any]:
    failure = report.failure
    result: dict[str, Any] = {
        "episodes": report.episodes,
        "steps": report.steps,
        "seconds": round(report.seconds, 3),
        "steps_per_s": round(report.steps / report.seconds),
        "cpu_seconds": round(report.cpu_seconds, 3),
        "steps_per_cpu_s": round(report.steps / report.cpu_seconds),
        "exercised": report.counts,
        "failure": None,
    }
    if failure is not None:
        result["failure"] = {
            "seed": failure.seed,
            "finding": asdict(failure.finding),
            "replay": command.format(failure.seed),
            "shrunk_finding": asdict(failure.shrunk_finding),
            "shrunk": failure.shrunk.to_dict(),
        }
    return result


def _print_report(report: FuzzReport, command: str) -> None:
    from asyncsched.cli.tables import print_table

    rate, cpu_rate = report.steps / report.seconds, report.steps / report.cpu_seconds
    typer.echo(
        f"{report.episodes} episodes, {report.steps} steps, {rate:.0f} steps/s, {cpu_rate:.0f} per second of CPU time"
    )
    rows = [(name.replace("_", " "), str(count)) for name, count in report.counts.items()]
    print_table("exercised", ("what", "times"), rows, numbers=("times",))
    if report.failure is not None:
        _print_failure(report.failure, command)


def _print_failure(failure: Failure, command: str) -> None:
    path = Path(f"fuzz-{failure.seed}.json")
    typer.echo(f"\nFAILED: seed {failure.seed}: {failure.finding}")
    typer.echo(f"replay: {command.format(failure.seed)}")
    text = json.dumps(failure.shrunk.to_dict())
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        typer.echo(f"shrunk: {failure.shrunk_finding}")
        typer.echo(f"{path} cannot be written ({error.strerror}); its content is\n{text}")
        return
    count = len(failure.shrunk.commands)
    typer.echo(f"shrunk to {count} commands: {failure.shrunk_finding}\nreplay: asyncsched fuzz --replay {path}")
