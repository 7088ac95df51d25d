"""`asyncsched capacity`: the highest rate, or the fewest replicas, that meets the service levels, and what it costs."""

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
    from sim.capacity import Capacity, Search

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
    find: Annotated[
        str, typer.Option(metavar="WHAT", help="rate: the highest; replicas: the fewest that serve the rate there is.")
    ] = "rate",
    attainment: Annotated[
        str, typer.Option(metavar="SHARE", help="Of the requests that must meet every level.")
    ] = "0.99",
    tolerance: Annotated[str, typer.Option(metavar="SHARE", help="How close to the highest rate to come.")] = "0.02",
    seeds: Annotated[str, typer.Option(metavar="N", help="Searches with a seed each; 6 give 97% confidence.")] = "6",
    rate: Annotated[
        str | None, typer.Option(metavar="PER_S", help="Requests/s to serve: how many GPUs do that?")
    ] = None,
    gpu_hour: Annotated[
        str | None, typer.Option(metavar="USD", help="Price of a GPU for an hour: what do tokens cost?")
    ] = None,
    jobs: Jobs = "1",
    as_json: AsJson = False,
) -> None:
    """Find the highest rate of requests, or the fewest replicas, that meets the service levels.

    The workload's arrivals are scaled until just enough requests meet every level, once for each seed. With --find
    replicas it is the number of replicas that is varied, behind the scenario's router, and --rate sets the arrivals.
    """
    from sim.capacity import Search, find_capacity
    from sim.rates import at_rate, offered_rate
    from sim.scenario import Scenario, override_values

    if find not in ("rate", "replicas"):
        raise ConfigError("--find", find, "use rate or replicas")
    search = Search(
        parse_share("--attainment", attainment),
        _number("--tolerance", tolerance, 1e-4, 1),
        parse_count("--seeds", seeds, 1),
        "rate" if find == "rate" else "replicas",
    )
    price = None if gpu_hour is None else _number("--gpu-hour", gpu_hour, 0, 1e6)
    target = None if rate is None else _number("--rate", rate, 0, 1e9)
    processes = parse_jobs(jobs)
    compared = _modes(modes, overrides or [])
    base = scenario_data(scenario, preset, overrides, strict=strict, goodput=goodput)
    chosen = [base] if not compared else [override_values(base, {"mode": mode}) for mode in compared]
    scenarios = [Scenario.from_dict(data) for data in chosen]
    if find == "replicas" and target is not None:
        scenarios = [at_rate(one, target / offered_rate(one)) for one in scenarios]
    for note in scenarios[0].build_workload().notes:
        print("warning:", note, file=sys.stderr)
    with progress_bar("searching") as progress:
        found = find_capacity(scenarios, search, jobs=processes, progress=progress)
    rows = [_row(one, price, target, find) for one in found]
    if all(not row["figures"] for row in rows):
        share = max(row["share"] for row in rows)
        what = (
            "rate meets these levels; at the lowest"
            if find == "rate"
            else "number of replicas is enough; with the most"
        )
        raise BadInputError(f"goodput: no {what} {percent(share)} of the requests do")
    _warn(rows)
    if as_json:
        print_json({"asyncsched": "capacity", **search._asdict(), "capacity": rows, "scenario": scenarios[0].to_dict()})
    else:
        _print(rows, scenario_name(scenario, preset), found[0], search)


def _modes(text: str | None, overrides: Sequence[str]) -> list[str]:
    """What is compared; nothing where it is what the scenario says."""
    modes = text.split(",") if text else []
    for place, mode in enumerate(modes):
        if mode in modes[:place]:
            raise ConfigError("--mode", text, f"{mode!r} is there twice; name each mode once")
    for change in overrides:
        if modes and change.partition("=")[0].strip() in ("depth", "mode"):
            raise ConfigError("--set", change, "modes are what is compared; use --mode, as in --mode depth=3")
    return modes


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


def _row(capacity: Capacity, price: float | None, target: float | None, find: str) -> dict[str, Any]:
    """Costs and GPUs are reckoned with the lowest rate found: what every seed can serve."""
    from sim.capacity import usd_per_million

    row = capacity.summary()
    figures, rate = row["figures"], row["rate_low_per_s"]
    replicas = row["replicas"]
    if price is not None and figures:
        outputs = rate * figures["output_tokens"]
        row["usd_per_million_output_tokens"] = usd_per_million(price, replicas, outputs)
        row["usd_per_million_tokens"] = usd_per_million(price, replicas, outputs + rate * figures["prompt_tokens"])
    if target is not None and figures:
        row["gpus"] = replicas if find == "replicas" else math.ceil(target / rate) * replicas
    return row


def _warn(rows: Sequence[dict[str, Any]]) -> None:
    shortest = min(row["figures"]["duration_s"] for row in rows if row["figures"])
    if shortest < SHORT_S:
        text = f"at that rate the workload lasts {shortest:.0f} s; a longer one may show that the queue grows"
        print(f"warning: {text}", file=sys.stderr)


def _print(rows: Sequence[dict[str, Any]], name: str, first: Capacity, search: Search) -> None:
    from asyncsched.cli.tables import print_table

    levels = first.scenario.goodput
    said = ", ".join(
        f"{label} {value:g} ms"
        for label, value in (("TTFT", levels.ttft_ms), ("TPOT", levels.tpot_ms), ("E2EL", levels.e2el_ms))
        if value is not None
    )
    rates = search.find == "rate"
    searched = "requests/s" if rates else "replicas"
    heads = ["mode", searched, "between", "tokens/s", "GPU active", "TTFT, p99", "TPOT, p99"]
    extra = {
        "gpus": ("GPUs", "{:,}"),
        "usd_per_million_output_tokens": ("$ per 1M output tokens", "{:.3f}"),
        "usd_per_million_tokens": ("$ per 1M tokens", "{:.4f}"),
    }
    shown = [key for key in extra if any(key in row for row in rows) and (rates or key != "gpus")]
    table = []
    for row in rows:
        if not row["figures"]:
            table.append([row["mode"], "none", *["-"] * (len(heads) + len(shown) - 2)])
            continue
        figures = row["figures"]
        between = f"{row['rate_low_per_s']:.2f} to {row['rate_high_per_s']:.2f}"
        cells = [row["mode"], f"{row['rate_per_s']:.2f}", between]
        if not rates:
            cells[1:] = [str(row["replicas"]), f"{row['replicas_low']} to {row['replicas']}"]
        if row["confidence"] is None:
            cells[2] = "-"
        cells += [number(figures["output_throughput"]), percent(figures["gpu_active"])]
        cells += [f"{number(figures[key])} ms" for key in ("ttft_ms.p99", "tpot_ms.p99")]
        table.append([*cells, *(extra[key][1].format(row[key]) if key in row else "-" for key in shown)])
    what = "highest rate at which" if rates else f"fewest replicas for {rows[0]['rate_per_s']:.4g} requests/s, so that"
    heads += [extra[key][0] for key in shown]
    title = f"{name}: {what} {search.attainment:.4g} of the requests keep {said} (simulated)"
    print_table(title, heads, table, numbers=heads[1:])
    if first.confidence is None and search.seeds > 1:
        print("The seed changes nothing in this scenario, so there was one search.")
    elif first.confidence is None:
        print("One seed was tried; --seeds 6 says how much hangs on it.")
    elif rates:
        sure = f"{first.confidence:.1%} confidence"
        print(f"{len(first.found)} seeds: the median of all is between the two rates with {sure}.")
    else:
        print(f"{len(first.found)} seeds: so many replicas are enough for every one of them.")
