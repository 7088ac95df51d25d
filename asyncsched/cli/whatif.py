"""`asyncsched whatif`: what a recorded run would have been, had something been different."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncsched.cli.figures import FIGURES, number
from asyncsched.cli.inputs import MODES, AsJson, print_json
from asyncsched.cli.runs import ProfileName, RunName, check_subject, load_profile_data, load_run
from asyncsched.cli.validate import label
from asyncsched.config import FIELD_NAMES
from asyncsched.errors import MISSING, ConfigError

if TYPE_CHECKING:
    from asyncsched.runs import Run

PROFILE_SECTIONS = ("host", "copy", "gpu")
SHOWN = ("makespan_s", "output_throughput", "ttft_ms.mean", "ttft_ms.p99", "tpot_ms.mean", "itl_ms.p99", "e2el_ms.mean")
SHOWN_MORE = ("gpu_active", "idle.host", "idle.no_work", "steps", "preemptions")


def whatif(
    run: RunName,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="host.scale=2, depth=1, max_num_seqs=64, host.delay_us=1000, gpu.scale=0.5, ... Repeatable.",
        ),
    ] = None,
    profile: ProfileName = None,
    as_json: AsJson = False,
) -> None:
    """What would this run have been? Without a profile, prices are learnt from the run itself."""
    if not changes:
        raise ConfigError("--set", MISSING, "say what is different, as in host.scale=2 or depth=1")
    of_engine, of_profile = sort_changes(changes)
    recorded = load_run(run)
    from sim.calibrate import calibrate
    from sim.host_speed import probed
    from sim.predict import predict
    from sim.profile import Profile
    from sim.scenario import override_values
    from sim.validate import figures

    data = load_profile_data(profile) if profile is not None else calibrate([recorded]).to_dict()
    as_it_was = probed(Profile.from_dict(data), recorded)  # its host, as in `validate` and `advise`
    changed = probed(Profile.from_dict(override_values(data, of_profile)), recorded)
    notes = check_subject(as_it_was, recorded)
    other = predict(recorded, changed, **of_engine)
    notes += _check_rejections(other, changes)
    rows = {
        "measured": figures(recorded),
        "predicted": figures(predict(recorded, as_it_was)),
        "what if": figures(other),
    }
    if as_json:
        print_json({"run": recorded.info.name, "set": changes, "notes": notes, **rows})
    else:
        _print_rows(recorded.info.name, changes, rows)


def _check_rejections(changed: Run, changes: Sequence[str]) -> list[str]:
    """A warning, which is printed too, where some requests could never run. Raises ConfigError where none could."""
    rejected, requests = changed.requests.finish.count("rejected"), len(changed.requests.finish)
    if not rejected:
        return []
    if rejected == requests:
        raise ConfigError("--set", " ".join(changes), f"with it none of the run's {requests} requests can ever run")
    said = f"with {' '.join(changes)} {rejected} of {requests} requests can never run; they are in no figure"
    print("warning:", said, file=sys.stderr)
    return [said]


def sort_changes(changes: Sequence[str]) -> tuple[dict[str, Any], dict[str, object]]:
    """Changes of the engine, and of the profile."""
    from sim.scenario import parse_value, split_overrides

    engine: dict[str, Any] = {}
    prices: dict[str, object] = {}
    for key, text in split_overrides(changes, "host.scale=2").items():
        value = parse_value(text)
        name = "depth" if key == "mode" else key.removeprefix("engine.")
        if name in engine:
            raise ConfigError("--set", f"{key}={text}", f"{name} is set already; set it once")
        if key == "mode":
            if value not in MODES:
                raise ConfigError("mode", value, "use sync or async, or give a depth")
            engine[name] = MODES[str(value)]
        elif name in FIELD_NAMES:
            engine[name] = tuple(value) if isinstance(value, list) else value
        elif key.split(".")[0] in PROFILE_SECTIONS and "." in key:
            prices[key] = float(value) if isinstance(value, int) and not isinstance(value, bool) else value
        else:
            allowed = f"use a setting of the engine ({', '.join(FIELD_NAMES)}) or a key under host, copy or gpu"
            raise ConfigError("--set", f"{key}={text}", allowed)
    return engine, prices


def _print_rows(name: str, changes: Sequence[str], rows: Mapping[str, Mapping[str, float]]) -> None:
    from asyncsched.cli.tables import print_table

    table = []
    for figure in (*SHOWN, *SHOWN_MORE):
        before, after = rows["predicted"].get(figure), rows["what if"].get(figure)
        if before is None or after is None:
            continue
        measured = rows["measured"].get(figure)
        shift = f"{100 * (after / before - 1):+.1f}%" if before and figure in SHOWN else ""
        cells = ["-" if value is None else _write(figure, value) for value in (measured, before, after)]
        table.append((label(figure), *cells, shift))
    columns = ("figure", "measured", "predicted", "what if", "change")
    print_table(f"{name}, {', '.join(changes)}", columns, table, numbers=columns[1:])


def _write(figure: str, value: float) -> str:
    if figure == "gpu_active" or figure.startswith("idle."):
        return f"{value:.1%}"
    if figure in ("steps", "preemptions"):
        return f"{value:,.0f}"
    known = FIGURES.get(figure)
    return f"{number(float(value))} {known.unit if known is not None else ''}".strip()
