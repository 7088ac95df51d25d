"""`asyncsched capacity`: the highest rate that meets the service levels, in several modes, and what it costs."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncsched.cli.figures import number, percent
from asyncsched.cli.inputs import (
    AsJson,
    Goodput,
    Jobs,
    Overrides,
    Preset,
    ScenarioFile,
    Strict,
    parse_count,
    parse_jobs,
    print_json,
    scenario_data,
    scenario_name,
)
from asyncsched.cli.progress import progress_bar
from asyncsched.errors import BadInputError, ConfigError

if TYPE_CHECKING:
    from sim.capacity import Capacity

SHORT_S = 60.0  # runs shorter than that end before a queue that grows would show


def capacity(
    scenario: ScenarioFile = None,
    preset: Preset = None,
    goodput: Goodput = None,
    overrides: Overrides = None,
    strict: Strict = False,
    modes: Annotated[
        str | None,
        typer.Option("--mode", metavar="MODE,...", help="Compared, as in sync,async,depth=3."),
    ] = "sync,async",
    attainment: Annotated[
        str, typer.Option(metavar="SHARE", help="Of the requests that must meet every level.")
    ] = "0.99",
    tolerance: Annotated[str, typer.Option(metavar="SHARE", help="How close to the highest rate to come.")] = "0.02",
    seeds: Annotated[str, typer.Option(metavar="N", help="Searches with a seed each; 6 give 97% confidence.")] = "6",
    rate: Annotated[
        str | None, typer.Option(metavar="PER_S", help="Requests/s to serve: how many such GPUs do that?")
    ] = None,
    gpu_hour: Annotated[
        str | None, typer.Option(metavar="USD", help="Price of a GPU for an hour: what do tokens cost?")
    ] = None,
    jobs: Jobs = "1",
    as_json: AsJson = False,
) -> None:
    """Find the highest rate of requests that meets the service levels.

    The workload's arrivals are scaled until just enough requests meet every level, once for each seed.
    """
    from sim.capacity import Search, find_capacity
    from sim.scenario import Scenario, override_values

    search = Search(
        parse_share("--attainment", attainment),
        _number("--tolerance", tolerance, 1e-4, 1),
        parse_count("--seeds", seeds, 1),
    )
    price = None if gpu_hour is None else _number("--gpu-hour", gpu_hour, 0, 1e6)
    target = None if rate is None else _number("--rate", rate, 0, 1e9)
    processes = parse_jobs(jobs)
    base = scenario_data(scenario, preset, overrides, strict=strict, goodput=goodput)
    chosen = [base] if not modes else [override_values(base, {"mode": mode}) for mode in modes.split(",")]
    scenarios = [Scenario.from_dict(data) for data in chosen]
    for note in scenarios[0].build_workload().notes:
        print("warning:", note, file=sys.stderr)
    with progress_bar("searching") as progress:
        found = find_capacity(scenarios, search, jobs=processes, progress=progress)
    rows = [_row(one, price, target) for one in found]
    if all(not row["figures"] for row in rows):
        share = max(row["share"] for row in rows)
        raise BadInputError(f"goodput: no rate meets these levels; at the lowest {percent(share)} of the requests do")
    _warn(rows)
    if as_json:
        levels = scenarios[0].goodput.model_dump()
        print_json(
            {
                "goodput": levels,
                **search._asdict(),
                "capacity": rows,
                "scenario": scenarios[0].to_dict(),
                "asyncsched": "capacity",
            }
        )
    else:
        _print(rows, scenario_name(scenario, preset), found[0], search.attainment)


def parse_share(option: str, text: str) -> float:
    return _number(option, text, 0, 1)


def _number(option: str, text: str, above: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not above < value <= most:
        raise ConfigError(option, text, f"use a number above {above:g} and up to {most:g}")
    return value


def _row(capacity: Capacity, price: float | None, target: float | None) -> dict[str, Any]:
    """Costs and GPUs are reckoned with the lowest rate found: what every seed can serve."""
    from sim.capacity import usd_per_million

    row = capacity.summary()
    figures, rate = row["figures"], row["rate_low_per_s"]
    if price is not None and figures:
        outputs = rate * figures["output_tokens"]
        row["usd_per_million_output_tokens"] = usd_per_million(price, 1, outputs)
        row["usd_per_million_tokens"] = usd_per_million(price, 1, outputs + rate * figures["prompt_tokens"])
    if target is not None and figures:
        row["gpus"] = math.ceil(target / rate)
    return row


def _warn(rows: Sequence[dict[str, Any]]) -> None:
    shortest = min(row["figures"]["duration_s"] for row in rows if row["figures"])
    if shortest < SHORT_S:
        text = f"at that rate the workload lasts {shortest:.0f} s; a longer one may show that the queue grows"
        print(f"warning: {text}", file=sys.stderr)


def _print(rows: Sequence[dict[str, Any]], name: str, first: Capacity, attainment: float) -> None:
    from asyncsched.cli.tables import print_table

    levels = first.scenario.goodput
    said = ", ".join(
        f"{label} {value:g} ms"
        for label, value in (("TTFT", levels.ttft_ms), ("TPOT", levels.tpot_ms), ("E2EL", levels.e2el_ms))
        if value is not None
    )
    heads = ["mode", "requests/s", "between", "tokens/s", "GPU active", "TTFT, p99", "TPOT, p99"]
    extra = {
        "gpus": ("GPUs", "{:,}"),
        "usd_per_million_output_tokens": ("$ per 1M output tokens", "{:.3f}"),
        "usd_per_million_tokens": ("$ per 1M tokens", "{:.4f}"),
    }
    shown = [key for key in extra if any(key in row for row in rows)]
    table = []
    for row in rows:
        if not row["figures"]:
            table.append([row["mode"], "none", *["-"] * (len(heads) + len(shown) - 2)])
            continue
        figures = row["figures"]
        between = f"{row['rate_low_per_s']:.2f} to {row['rate_high_per_s']:.2f}" if row["confidence"] else "-"
        cells = [row["mode"], f"{row['rate_per_s']:.2f}", between, number(figures["output_throughput"])]
        cells += [percent(figures["gpu_active"])]
        cells += [f"{number(figures[key])} ms" for key in ("ttft_ms.p99", "tpot_ms.p99")]
        table.append([*cells, *(extra[key][1].format(row[key]) if key in row else "-" for key in shown)])
    title = f"{name}: highest rate at which {attainment:.4g} of the requests keep {said} (simulated)"
    print_table(
        title, [*heads, *(extra[key][0] for key in shown)], table, numbers=heads[1:] + [extra[key][0] for key in shown]
    )
    confidence = first.confidence
    if confidence is None:
        print("The seed changes nothing in this scenario, so there was one search.")
    else:
        print(f"{len(first.found)} seeds: the median of all is between the two rates with {confidence:.1%} confidence.")
