"""`asyncsched advise`: which depth pays, by how much, from which host cost on, and what it costs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncsched.cli.capacity import parse_share
from asyncsched.cli.figures import FIGURES, number, percent, write
from asyncsched.cli.inputs import (
    AsJson,
    Goodput,
    Jobs,
    Overrides,
    Preset,
    Strict,
    check_rejections,
    parse_jobs,
    print_json,
    scenario_data,
    scenario_name,
)
from asyncsched.cli.progress import progress_bar
from asyncsched.cli.runs import ProfileName, check_subject, is_run, load_profile_data, load_run
from asyncsched.cli.whatif import sort_changes
from asyncsched.errors import ConfigError

if TYPE_CHECKING:
    from asyncsched.runs import Run
    from sim.advise import Advice, Question, Threshold

SHOWN = ("output_throughput", "gpu_active", "ttft_ms.p50", "tpot_ms.p50", "overshoot_tokens")


def advise(
    scenario: Annotated[
        str | None,
        typer.Argument(
            metavar="SCENARIO|RUN",
            help="A scenario file or the --json of a simulated run; or a recorded run: a folder, ARCHIVE.tar.xz::NAME, "
            "or one that comes along.",
        ),
    ] = None,
    preset: Preset = None,
    overrides: Overrides = None,
    profile: ProfileName = None,
    strict: Strict = False,
    goodput: Goodput = None,
    depths: Annotated[str, typer.Option(metavar="K,...", help="Depths to compare.")] = "1,2,3",
    metric: Annotated[
        str, typer.Option(metavar="NAME", help="What must get better: a latency, makespan_s or output_throughput.")
    ] = "e2el_ms.mean",
    worth: Annotated[str, typer.Option(metavar="SHARE", help="Smallest gain that is worth more depth.")] = "0.02",
    jobs: Jobs = "1",
    as_json: AsJson = False,
) -> None:
    """Say which depth pays for a scenario, or for a recorded run, at the prices of a profile or at its own."""
    from sim.advise import Question
    from sim.advise import advise as ask

    _check_metric(metric)
    question = Question(_parse_depths(depths), metric, parse_share("--worth", worth))
    processes = parse_jobs(jobs)
    if scenario is not None and (profile is not None or is_run(scenario)):
        _refuse(preset=preset, strict=strict, goodput=goodput)
        _advise_run(scenario, profile, overrides or [], question, processes, as_json=as_json)
        return
    if profile is not None:
        raise ConfigError("--profile", profile, "it goes with a recorded run; name one")
    for change in overrides or []:
        if change.partition("=")[0].strip() in ("depth", "mode"):
            raise ConfigError("--set", change, "depths are what is compared; use --depths")
    path = None if scenario is None else Path(scenario)
    if path is not None and not path.suffix and not path.exists():  # it may have been meant as a run
        raise ConfigError("SCENARIO|RUN", str(path), "it cannot be read: no such file or folder, and none comes along")
    base = scenario_data(path, preset, overrides, strict=strict, goodput=goodput)
    with progress_bar("comparing") as progress:
        advice = ask(base, question, jobs=processes, progress=progress)
    first = advice.runs[question.depths[0]]
    warning = check_rejections(dict(first))
    for line in (*first["notes"], *([warning] if warning else [])):
        print("warning:", line, file=sys.stderr)
    words = in_words(advice)
    if as_json:
        print_json({**_as_json(advice, words), "scenario": first["scenario"]})
        return
    _print(advice, scenario_name(path, preset))
    for line in words:
        print(line)


def _advise_run(
    name: str, profile: str | None, changes: Sequence[str], question: Question, processes: int, *, as_json: bool
) -> None:
    """Without a profile, prices are learnt from the run itself."""
    from sim.advise import advise_run
    from sim.calibrate import calibrate
    from sim.profile import Profile
    from sim.scenario import override_values

    of_engine, of_profile = sort_changes(changes)
    if "depth" in of_engine:
        raise ConfigError("--set", f"depth={of_engine['depth']}", "depths are what is compared; use --depths")
    recorded = load_run(name)
    data = load_profile_data(profile) if profile is not None else calibrate([recorded]).to_dict()
    prices = Profile.from_dict(override_values(data, of_profile))
    notes = check_subject(prices, recorded)
    with progress_bar("comparing") as progress:
        advice = advise_run(recorded, prices, question, of_engine, jobs=processes, progress=progress)
    warning = check_rejections(dict(advice.runs[question.depths[0]]))
    if warning:
        print("warning:", warning, file=sys.stderr)
    words = [*([] if changes else _as_measured(recorded, advice)), *in_words(advice)]
    if as_json:
        about = {"run": recorded.info.name, "profile": profile, "notes": notes}
        print_json({**_as_json(advice, words), **about, "scenario": {"engine": {**recorded.info.engine, **of_engine}}})
        return
    _print(advice, recorded.info.name)
    for line in words:
        print(line)


def _as_measured(run: Run, advice: Advice) -> list[str]:
    """How far off the prediction is where it can be seen."""
    from sim.advise import value_of
    from sim.validate import figures

    metric, depth = advice.question.metric, run.info.engine_config().depth
    measured = figures(run).get(metric)
    if not measured or depth not in advice.runs:
        return []
    predicted = value_of(advice.runs[depth], metric)
    was = f"The run at depth {depth}: {FIGURES[metric].label} {write(metric, measured)} measured"
    return [f"{was}, {write(metric, predicted)} predicted ({predicted / measured - 1:+.1%})."]


def _refuse(**options: object) -> None:
    for name, value in options.items():
        if value:
            shown = " ".join(value) if isinstance(value, list) else value
            raise ConfigError(f"--{name}", shown, "it goes with a scenario, and a run is named")


def in_words(advice: Advice) -> list[str]:
    """A sentence on each depth, and on the host cost from which on it pays."""
    question, lines = advice.question, []
    before = question.depths[0]
    for depth, gained in advice.gains.items():
        if gained is None:
            continue
        pays = gained >= question.worth
        lines.append(_verdict(advice, before, depth, gained, pays))
        before = depth if pays else before
    lines += [_threshold(advice, threshold) for threshold in advice.thresholds]
    lines += _aborts(advice)
    if advice.only_lengths:
        scenario = "scenario" in advice.runs[question.depths[0]]
        hint = "; workload.stop = eos prices what ends by itself" if scenario else ""
        lines.append(f"Overshoot: none, as requests end by length{hint}.")
    lines.append(f"Advice: {_name(advice.chosen)}.")
    return lines


def _aborts(advice: Advice) -> list[str]:
    aborted = max(run.get("aborted", 0) for run in advice.runs.values())
    if not aborted:
        return []
    lost = ", ".join(f"{run['aborted_tokens']:,} at depth {depth}" for depth, run in advice.runs.items())
    who = "One request was aborted" if aborted == 1 else f"{aborted} requests were aborted"
    return [f"Aborts: {who}, here with as many tokens as in the run; computed in vain were {lost}."]


def _verdict(advice: Advice, before: int, depth: int, gained: float, pays: bool) -> str:
    from sim.advise import value_of

    metric = advice.question.metric
    old, new = advice.runs[before], advice.runs[depth]
    label = FIGURES[metric].label
    change = f"{label} {write(metric, value_of(old, metric))} -> {write(metric, value_of(new, metric))}"
    text = f"Depth {depth} {'pays' if pays else 'does not pay'}: {gained:+.1%} over depth {before} ({change})"
    return f"{text}. {_costs(old, new)}."


def _costs(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    cost = []
    if old["ttft_ms"] is not None and new["ttft_ms"] is not None:
        ttft = new["ttft_ms"]["p50"] - old["ttft_ms"]["p50"]
        cost.append(f"the median TTFT {'rises' if ttft >= 0 else 'falls'} by {number(abs(ttft))} ms")
    vain = new["overshoot_tokens"] + new.get("aborted_tokens", 0)
    share = vain / ((new["output_tokens"] + vain) or 1)
    aborts = " or of aborted requests" if new.get("aborted_tokens") else ""
    cost.append(f"{percent(share)} of the tokens computed are overshoot{aborts}")
    text = " and ".join(cost)
    return text[0].upper() + text[1:]


def _threshold(advice: Advice, threshold: Threshold) -> str:
    pair = f"depth {threshold.depth} over depth {threshold.below}"
    if threshold.balanced is None:
        return f"Host cost: there is no host work, so nothing can be hidden by {pair}."
    where = f"where the host takes as long as the GPU, {_scale(advice, threshold.balanced)}"
    if threshold.pays_from is None:
        does = "gains" if threshold.gain_balanced >= 0 else "costs"
        return f"Host cost: {pair} is never worth it; it {does} {percent(abs(threshold.gain_balanced))} {where}."
    begins = f"Host cost: {pair} is worth it from {_scale(advice, threshold.pays_from)} on"
    return f"{begins}, and gains {percent(threshold.gain_balanced)} {where}; beyond that the host is the limit."


def _scale(advice: Advice, scale: float) -> str:
    times = f"{scale:.2g}" if scale < 99.5 else f"{scale:,.0f}"
    return f"{times} times yours ({number(scale * advice.host_us_per_step)} us/step)"


def _name(depth: int) -> str:
    return {1: "sync (depth 1)", 2: "async (depth 2)"}.get(depth, f"depth {depth}")


def _check_metric(metric: str) -> None:
    parent = metric.partition(".")[0]
    latency = parent in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")
    if metric not in FIGURES or not (latency or metric in ("makespan_s", "output_throughput")):
        raise ConfigError("--metric", metric, "use a latency such as e2el_ms.mean, or makespan_s or output_throughput")


def _parse_depths(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isascii() and part.strip().isdigit() and len(part.strip()) < 4 for part in parts):
        raise ConfigError("--depths", text, "use depths in increasing order, as in 1,2,3")
    return tuple(int(part) for part in parts)


def _as_json(advice: Advice, words: list[str]) -> dict[str, Any]:
    return {
        "asyncsched": "advise",
        **advice.question._asdict(),
        "chosen": advice.chosen,
        "gains": {str(depth): value for depth, value in advice.gains.items()},
        "thresholds": [threshold._asdict() for threshold in advice.thresholds],
        "host_us_per_step": advice.host_us_per_step,
        "words": words,
        "runs": [dict(run) for run in advice.runs.values()],
    }


def _print(advice: Advice, name: str) -> None:
    from asyncsched.cli.tables import print_table
    from sim.advise import value_of

    metric = advice.question.metric
    keys = [metric, *(key for key in SHOWN if key != metric)]
    rows = []
    for depth, run in advice.runs.items():
        gained = advice.gains[depth]
        cells = [write(key, value_of(run, key)) if key != "overshoot_tokens" else f"{run[key]:,}" for key in keys]
        rows.append([str(depth), *cells, "" if gained is None else f"{gained:+.1%}"])
    heads = ["depth", *(FIGURES[key].label for key in keys), "gain"]
    print_table(f"{name}: depths compared (simulated)", heads, rows, numbers=heads[1:])
