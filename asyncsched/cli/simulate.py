"""`asyncsched simulate`: one scenario, its figures, trace and picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncsched.cli.figures import FIGURES, look_up, write
from asyncsched.cli.files import PICTURES, check_distinct, check_output, write_output
from asyncsched.cli.inputs import (
    AsJson,
    Goodput,
    Overrides,
    Preset,
    ScenarioFile,
    Strict,
    check_rejections,
    print_json,
    scenario_data,
    scenario_name,
    trace_file,
)
from asyncsched.cli.progress import progress_bar
from asyncsched.cli.runs import ProfileName, load_profile_data
from asyncsched.errors import ConfigError

if TYPE_CHECKING:
    from asyncsched.timeline import Timeline

PLOTTED_STEPS = 6  # from the middle of the run, where no choice is made
MOST_PLOTTED = 100
SHOWN = (
    "makespan_s",
    "output_throughput",
    "gpu_active",
    "idle_s.host",
    "idle_s.h2d",
    "idle_s.output_sync",
    "idle_s.no_work",
    "limiting_lane",
    "ttft_ms.p50",
    "ttft_ms.p99",
    "tpot_ms.p50",
    "tpot_ms.p99",
    "itl_ms.p99",
    "e2el_ms.p50",
    "steps",
    "output_tokens",
    "completed",
    "rejected",
    "preemptions",
    "overshoot_tokens",
    "kv_peak",
)
SHOWN_IF_ANY = (
    "goodput.share",
    "goodput.per_s",
    "prefix_cache.hit_rate",
    "prefix_cache.ideal_hit_rate",
    "prefix_cache.ideal_block_rate",
)

OF_REPLICAS = ("requests", "output_throughput", "gpu_active", "ttft_ms.p50", "ttft_ms.p99", "itl_ms.p99", "kv_peak")
MOST_LISTED = 16  # replicas, each in a row of its own


def simulate(
    scenario: ScenarioFile = None,
    preset: Preset = None,
    overrides: Overrides = None,
    strict: Strict = False,
    goodput: Goodput = None,
    profile: ProfileName = None,
    as_json: AsJson = False,
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Write a trace; open it at https://ui.perfetto.dev.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the lanes over a few steps: .png, .svg or .pdf.")
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST:LAST", help="Steps in the trace and the plot. Without it: all, and six from the middle."
        ),
    ] = None,
    replicas: Annotated[
        str | None, typer.Option(metavar="N", help="So many engines behind a router: replicas.count.")
    ] = None,
    router: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The router: round-robin, least-loaded, prefix-aware or module:Class; replicas.router.",
        ),
    ] = None,
    leaps: Annotated[
        bool, typer.Option(help="Pass stretches in which nothing is decided at once: the same results, sooner.")
    ] = True,
) -> None:
    """Simulate one scenario."""
    overrides = [
        *(overrides or ()),
        *([] if replicas is None else [f"replicas.count={replicas}"]),
        *([] if router is None else [f"replicas.router={router}"]),
    ]
    check_output("--trace", trace, (".json",))
    check_output("--plot", plot, PICTURES)
    check_distinct({"the scenario": scenario, "--trace": trace, "--plot": plot})
    if steps is not None and trace is None and plot is None:
        raise ConfigError("--steps", steps, "it says what --trace and --plot show; give one of them too")
    window = None if steps is None else _parse_steps(steps)
    if plot is not None and window is not None and window[1] - window[0] >= MOST_PLOTTED:
        raise ConfigError("--steps", steps, f"at most {MOST_PLOTTED} steps can be drawn")

    from sim.run import simulate as run
    from sim.scenario import Scenario

    data = scenario_data(scenario, preset, overrides, strict=strict, goodput=goodput)
    said = ""
    if profile is not None:
        data, said = _at_prices_of(profile, data, overrides or [])
    check_distinct({"workload.trace": trace_file(data.get("workload")), "--trace": trace, "--plot": plot})
    checked = Scenario.from_dict(data)
    several = checked.replicas.count > 1
    if several and (trace is not None or steps is not None):
        option = "--trace" if trace is not None else "--steps"
        raise ConfigError(
            option, str(trace or steps), f"it is about one engine, and there are {checked.replicas.count}"
        )
    with progress_bar("simulating") as progress:
        result = run(
            checked, spans=not several and (trace is not None or plot is not None), leaps=leaps, progress=progress
        )
    summary = result.summary()
    summary["notes"] = [*([said] if said else []), *summary["notes"]]
    name = _name(scenario_name(scenario, preset), summary)
    warning = check_rejections(summary)
    for line in (*summary["notes"], *([warning] if warning else [])):
        print("warning:", line, file=sys.stderr)
    if result.timeline is not None:
        _write_timeline(result.timeline, summary, window, trace, plot, name)
    if several and plot is not None:
        from asyncsched.plotting_fleet import plot_replicas

        plot_replicas(f"{name}, {summary['router']}", summary["replicas"], plot)
    if as_json:
        print_json(summary)
    else:
        _print_summary(summary, name)
        if several:
            _print_replicas(summary)


def _at_prices_of(profile: str, data: dict[str, Any], overrides: list[str]) -> tuple[dict[str, Any], str]:
    """The scenario with a profile's prices; overrides of prices change the profile's, those of jitter stay. And a
    warning where the profile is of something else than the scenario."""
    from sim.profile import Profile
    from sim.scenario import apply_overrides, with_profile
    from sim.subject import of_profile, of_scenario, warning

    of_prices = [one for one in overrides if one.partition("=")[0].strip().split(".")[0] in ("host", "copy", "gpu")]
    of_jitter = [one for one in overrides if one.partition("=")[0].strip().split(".")[0] == "jitter"]
    prices = apply_overrides(load_profile_data(profile), of_prices)
    said = warning(of_profile(Profile.from_dict(prices)), of_scenario(data), "scenario")
    return apply_overrides(with_profile(data, prices), of_jitter), said


def _name(scenario: str, summary: dict[str, Any]) -> str:
    mode, depth = summary["mode"], summary["depth"]
    return f"{scenario}, depth {depth}" if mode.startswith("depth") else f"{scenario}, {mode} (depth {depth})"


def _parse_steps(text: str) -> tuple[int, int]:
    first, separator, last = text.partition(":")
    digits = all(part.isascii() and part.isdigit() and len(part) < 10 for part in (first, last))
    if not separator or not digits or int(first) > int(last):
        raise ConfigError("--steps", text, "use FIRST:LAST, two step numbers in order, as in 100:105")
    return int(first), int(last)


def _write_timeline(
    timeline: Timeline,
    summary: dict[str, Any],
    window: tuple[int, int] | None,
    trace: Path | None,
    plot: Path | None,
    name: str,
) -> None:
    count = summary["steps"]
    if window is not None and window[0] >= count:
        raise ConfigError("--steps", "{}:{}".format(*window), f"the run had steps 0 to {count - 1}")
    if trace is not None:
        part = timeline if window is None else timeline.window(*window)
        write_output("--trace", trace, json.dumps(part.to_perfetto(), allow_nan=False).encode())
    if plot is not None:
        from asyncsched.plotting import plot_timeline

        first = max(count // 2 - PLOTTED_STEPS // 2, 0)
        steps = window or (first, first + PLOTTED_STEPS - 1)
        plot_timeline([(name, timeline)], plot, steps=steps)


def _print_summary(summary: dict[str, Any], name: str) -> None:
    from asyncsched.cli.tables import print_table

    keys = (*SHOWN, *(key for key in SHOWN_IF_ANY if look_up(summary, key) is not None))
    rows = [(FIGURES[key].label, write(key, look_up(summary, key)), FIGURES[key].meaning) for key in keys]
    print_table(f"{name}, seed {summary['seed']}: simulated", ("what", "figure", "meaning"), rows, numbers=("figure",))


def _print_replicas(summary: dict[str, Any]) -> None:
    """Each replica, or where they are many, how far they lie apart."""
    from asyncsched.cli.tables import print_table

    replicas = summary["replicas"]
    title = f"{len(replicas)} replicas, {summary['router']}"
    if len(replicas) <= MOST_LISTED:
        columns = ("replica", *(FIGURES[key].label for key in OF_REPLICAS))
        rows = [
            (str(replica["replica"]), *(write(key, look_up(replica, key)) for key in OF_REPLICAS))
            for replica in replicas
        ]
        print_table(title, columns, rows, numbers=columns)
        return
    rows = []
    for key in OF_REPLICAS:
        values = sorted(value for replica in replicas if (value := look_up(replica, key)) is not None)
        spread = (values[0], values[len(values) // 2], values[-1]) if values else (None,) * 3
        rows.append((FIGURES[key].label, *(write(key, value) for value in spread)))
    columns = ("what", "least", "median", "most")
    print_table(title, columns, rows, numbers=columns[1:])
