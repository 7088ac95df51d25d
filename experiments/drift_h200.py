"""How far off is a profile for another version of the code? Its predictions beside a table of runs.

    python experiments/drift_h200.py [--table experiments/results/h200-llama-8b-campaign.csv]
        [--profile experiments/results/h200-llama-8b-first-profile.toml]
        [--json] [--json-out FILE.json] [--docs docs/fidelity.md]

The table has a row per run of `record_h200.py`: steps, seconds (two decimals), tokens/s (whole ones). Requests are made
again from the run's name. Two figures can be judged, makespan and tokens/s, as finely as the table has them.

Each run is predicted three times: at the profile's prices as they are; with all host work times one factor; and with
steps on the GPU times another factor too. Factors are those with the least squares of relative errors over the group
`fit`; they know nothing of the other groups. Needs no GPU.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from h200_workloads import EARLIER, ENGINE, MODES, ON_TIGHT, TIGHT, Spec
from numpy.typing import NDArray
from one_line import errors_in_one_line
from validate_h200 import DELAY_LIMITS, LIMITS, around_table, publish

from asyncsched.cli.files import check_output
from asyncsched.cli.runs import load_profile
from asyncsched.cli.tables import print_table
from asyncsched.errors import ConfigError
from asyncsched.runs import UNKNOWN, RequestLog, Run, RunInfo
from sim.predict import predict
from sim.profile import Profile
from sim.workload import build_workload

RESULTS = Path(__file__).parent / "results"
TABLE, PROFILE = RESULTS / "h200-llama-8b-campaign.csv", RESULTS / "h200-llama-8b-first-profile.toml"
GROUPS = ("heldout", "tight", "delay", "fit")
HALF_SECONDS, HALF_TOKENS = 0.005, 0.5
"""The most that rounding has changed seconds and tokens/s by."""
VARIANTS: dict[str, tuple[str, ...]] = {"as it is": (), "host factor": ("host",), "both factors": ("host", "gpu")}
ROUNDS = 6
NUDGE = 0.02


class Measured(NamedTuple):
    """A row of the table and the run that was asked for. The makespan lies within `seconds` -+ `half_width`."""

    group: str
    run: Run
    steps: int
    seconds: float
    half_width: float

    @property
    def tokens(self) -> int:
        return int(self.run.requests.output_tokens.sum())


class Drift(NamedTuple):
    """Errors of one run, in percent, by variant; `resolution`: what the measured makespan is good for, in percent."""

    group: str
    run: str
    measured_tokens_per_s: float
    resolution: float
    makespan: dict[str, float]
    tokens_per_s: dict[str, float]

    def met(self, variant: str) -> list[bool]:
        """For each figure that has a limit in this group."""
        if self.group == "delay":
            return [abs(self.makespan[variant]) <= DELAY_LIMITS["makespan_s"]]
        limits = LIMITS["makespan_s"], LIMITS["output_throughput"]
        errors = self.makespan[variant], self.tokens_per_s[variant]
        return [abs(error) <= limit for error, limit in zip(errors, limits, strict=True)]


def main(
    table: Annotated[Path, typer.Option(help="A row per run: run, steps, seconds, tokens_per_s.")] = TABLE,
    profile: Annotated[str, typer.Option(help="A profile, packaged or a file.")] = str(PROFILE),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    json_out: Annotated[Path | None, typer.Option(help="Write the JSON object there.")] = None,
    docs: Annotated[Path | None, typer.Option(help="Replace the table in that file.")] = None,
) -> None:
    """Predict, compare."""
    with errors_in_one_line():
        check_output("--json-out", json_out, (".json",))
        around_table(docs, "drift_h200")
        prices = load_profile(profile)
        measured = _measured(table, prices)
        report = _report(prices, measured)
    text = publish(report, json_out, docs, "drift_h200", _markdown)
    if as_json:
        print(text)
    else:
        _print(report)


# ---- what was measured -----------------------------------------------------------------------------------------------


def _measured(table: Path, profile: Profile) -> list[Measured]:
    """Of the groups that are compared, in their order. Raises ConfigError."""
    try:
        with table.open(encoding="utf-8", newline="") as file:
            rows = {row["run"]: row for row in csv.DictReader(file)}
    except (OSError, UnicodeDecodeError, KeyError) as error:
        raise ConfigError("--table", str(table), f"use a table with a column run ({error})") from None
    found = []
    for group in GROUPS:
        for name, run in _asked(group, profile):
            if name not in rows:
                raise ConfigError("--table", str(table), f"it has no run {name}")
            found.append(_row(group, run, rows[name]))
    return found


def _asked(group: str, profile: Profile) -> Iterator[tuple[str, Run]]:
    """The runs of a group, by name, as they were asked for."""
    engine = {**profile.engine, **(TIGHT if group in ON_TIGHT else ENGINE)}
    engine["num_host_blocks"] = engine["num_blocks"]
    engine["decode_buckets"] = tuple(one for one in engine["decode_buckets"] if one <= engine["max_num_seqs"])
    for number, spec in enumerate(EARLIER[group]):
        for delay in spec.delays_us:
            for mode, depth in MODES.items():
                name = spec.run_name(mode, delay)
                info = RunInfo(
                    name=name,
                    source="planned",
                    engine={**engine, "depth": depth},
                    device=profile.device,
                    host_delay_us=delay,
                    seed=number,
                    makespan_ns=0,
                )
                yield name, Run(info=info, requests=_requests(spec, number))


def _requests(spec: Spec, seed: int) -> RequestLog:
    arrivals = build_workload(spec.workload(), seed).arrivals
    column = lambda name: np.array([getattr(one, name) for one in arrivals], dtype=np.int64)  # noqa: E731
    nothing = np.full(len(arrivals), UNKNOWN, dtype=np.int64)
    return RequestLog(
        request_id=tuple(f"{spec.name}-{number}" for number in range(len(arrivals))),
        arrival_ns=column("arrival_ns"),
        prompt_tokens=column("prompt_tokens"),
        max_tokens=column("output_tokens"),
        output_tokens=column("output_tokens"),
        priority=np.zeros(len(arrivals), dtype=np.int64),
        scheduled_ns=nothing,
        first_ns=column("arrival_ns"),
        last_ns=column("arrival_ns"),
        entered_plan=nothing,
        entered_commits=nothing,
        aborted_plan=nothing,
        aborted_commits=nothing,
        finish=("length",) * len(arrivals),
    )


def _row(group: str, run: Run, row: dict[str, str]) -> Measured:
    """Seconds and tokens/s say the same thing, each rounded: the makespan is where both can be right."""
    try:
        steps, seconds, rate = int(row["steps"]), float(row["seconds"]), float(row["tokens_per_s"])
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            f"run {run.info.name}", row, "use a number each for steps, seconds and tokens_per_s"
        ) from None
    tokens = int(run.requests.output_tokens.sum())
    low = max(seconds - HALF_SECONDS, tokens / (rate + HALF_TOKENS))
    high = min(seconds + HALF_SECONDS, tokens / max(rate - HALF_TOKENS, 1e-9))
    if not 0 < low <= high:
        raise ConfigError(f"run {run.info.name}", row, f"its {tokens} tokens do not take these seconds at this rate")
    return Measured(group, run, steps, (low + high) / 2, (high - low) / 2)


# ---- what is predicted -----------------------------------------------------------------------------------------------


def _report(profile: Profile, measured: Sequence[Measured]) -> dict[str, Any]:
    learnt = [one for one in measured if one.group == "fit"]
    factors = {variant: _factors(profile, learnt, names) for variant, names in VARIANTS.items()}
    seconds = {variant: _predicted(profile, measured, found) for variant, found in factors.items()}
    rows = []
    for place, one in enumerate(measured):
        ratios = {variant: float(values[place] / one.seconds) for variant, values in seconds.items()}
        rows.append(
            Drift(
                one.group,
                one.run.info.name,
                one.tokens / one.seconds,
                100 * one.half_width / one.seconds,
                {variant: 100 * (ratio - 1) for variant, ratio in ratios.items()},
                {variant: 100 * (1 / ratio - 1) for variant, ratio in ratios.items()},
            )
        )
    return {"factors": factors, "groups": list(_groups(rows)), "rows": rows}


def _factors(profile: Profile, learnt: Sequence[Measured], names: Sequence[str]) -> dict[str, float]:
    """By which to multiply the work of host and GPU; Gauss-Newton on their logarithms."""
    found = np.zeros(len(names))
    truth = np.log([one.seconds for one in learnt])

    def errors(logs: NDArray[np.float64]) -> NDArray[np.float64]:
        factors = dict(zip(names, np.exp(logs).tolist(), strict=True))
        return np.asarray(np.log(_predicted(profile, learnt, factors)) - truth)

    best, least = found, np.inf
    for _ in range(ROUNDS if names else 0):
        here = errors(found)
        if here @ here < least:  # a run that takes other decisions jumps, so that a round may lead away
            best, least = found, here @ here
        nudges = NUDGE * np.eye(len(names))
        slopes = np.stack([(errors(found + nudge) - here) / NUDGE for nudge in nudges], axis=1)
        found = found - np.linalg.lstsq(slopes, here, rcond=None)[0]
    return dict(zip(names, np.exp(best).tolist(), strict=True))


def _predicted(profile: Profile, measured: Sequence[Measured], factors: dict[str, float]) -> NDArray[np.float64]:
    """Makespans in seconds."""
    scaled = {lane: getattr(profile, lane).model_copy(update={"scale": scale}) for lane, scale in factors.items()}
    prices = profile.model_copy(update=scaled)
    return np.array([predict(one.run, prices).info.makespan_ns / 1e9 for one in measured])


def _groups(rows: Sequence[Drift]) -> Iterator[dict[str, Any]]:
    for group in GROUPS:
        mine = [row for row in rows if row.group == group]
        for variant in VARIANTS:
            makespan, rate = ([getattr(row, name)[variant] for row in mine] for name in ("makespan", "tokens_per_s"))
            met = [one for row in mine for one in row.met(variant)]
            yield {
                "group": group,
                "prices": variant,
                "runs": len(mine),
                "makespan_mean": float(np.mean(makespan)),
                "makespan_rms": float(np.sqrt(np.mean(np.square(makespan)))),
                "makespan_worst": max(makespan, key=abs),
                "tokens_per_s_mean": float(np.mean(rate)),
                "tokens_per_s_worst": max(rate, key=abs),
                "met": sum(met),
                "limits": len(met),
            }


# ---- how it is shown -------------------------------------------------------------------------------------------------

OF_GROUPS = ("group", "prices", "runs", "makespan: mean", "rms", "worst", "tokens/s: mean", "worst", "limits met")
OF_RUNS = ("run", "tokens/s", "known to", *VARIANTS)


def _group_cells(one: dict[str, Any]) -> tuple[str, ...]:
    learnt = " (learnt from)" if one["group"] == "fit" and VARIANTS[one["prices"]] else ""
    names = ("makespan_mean", "makespan_rms", "makespan_worst", "tokens_per_s_mean", "tokens_per_s_worst")
    errors = (f"{one[name]:.1f}" if name.endswith("rms") else f"{one[name]:+.1f}" for name in names)
    return one["group"] + learnt, one["prices"], str(one["runs"]), *errors, f"{one['met']} of {one['limits']}"


def _run_cells(row: Drift) -> tuple[str, ...]:
    errors = [f"{error:+.1f}" for error in row.makespan.values()]
    return row.run, f"{row.measured_tokens_per_s:.0f}", f"{row.resolution:.2f}", *errors


def _said(report: dict[str, Any]) -> str:
    said = [
        f"{variant}: {', '.join(f'{name} {value:.3f}' for name, value in factors.items())}"
        for variant, factors in report["factors"].items()
        if factors
    ]
    return "Factors, from the group fit alone: " + "; ".join(said)


def _print(report: dict[str, Any]) -> None:
    cells = [_group_cells(one) for one in report["groups"]]
    print_table("signed errors, percent", OF_GROUPS, cells, numbers=OF_GROUPS[2:])
    cells = [_run_cells(row) for row in report["rows"]]
    print_table("makespan, signed errors, percent", OF_RUNS, cells, numbers=OF_RUNS[1:])
    print(_said(report))


def _markdown(report: dict[str, Any]) -> str:
    """Groups; the JSON has every run."""
    lines = [OF_GROUPS, ("---",) * len(OF_GROUPS), *(_group_cells(one) for one in report["groups"])]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{_said(report)}.\n\n{table}"


if __name__ == "__main__":
    typer.run(main)
