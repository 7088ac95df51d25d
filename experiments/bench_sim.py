"""How fast the simulator is: a trace with leaps and without, and many replicas.

    python experiments/bench_sim.py [TRACE] --json

TRACE is a file that `workload.trace` takes, or `azure-conv-500`, which comes along. The two ways of simulating take
turns, and must report the same. Times are those of the processor, since another job may share it; "times real time"
is simulated time over that. Loading the trace is not counted.
"""

from __future__ import annotations

import json
import platform
import resource
import statistics
import sys
import time
from typing import Annotated, Any

import numpy as np
import typer

from asyncsched.cli.tables import print_table
from asyncsched.errors import ConfigError
from sim.run import Result, simulate
from sim.scenario import Scenario, load_preset

PRESET = "h200-llama-8b"
OVERRIDES = ("max_num_seqs=256", "max_num_batched_tokens=8192")
# Lengths like those of the Azure conversation trace in the mean, and its rate per replica.
FLEET_WORKLOAD = {
    "kind": "synthetic",
    "prompt": {"kind": "lognormal", "mean_tokens": 1155.0, "sigma": 1.0, "max_tokens": 14_000},
    "output": {"kind": "lognormal", "mean_tokens": 211.0, "sigma": 0.8, "max_tokens": 1_000},
}
RATE_PER_REPLICA = 5.5


def timed(scenario: Scenario, *, leaps: bool) -> tuple[float, Result]:
    """Seconds of the processor, and what came out."""
    start = time.process_time()
    result = simulate(scenario, leaps=leaps)
    return time.process_time() - start, result


def trace_rows(trace: str, rounds: int) -> list[dict[str, Any]]:
    """Leaps and no leaps, alternately; the best of the rounds each, as others can only make it slower."""
    scenario = load_preset(PRESET, [*OVERRIDES, f"workload.trace={trace}"])
    start = time.process_time()
    scenario.build_workload()
    load_s = time.process_time() - start
    times: dict[bool, list[float]] = {True: [], False: []}
    reports = {}
    for _ in range(rounds):
        for leaps, seconds in times.items():
            cpu_s, result = timed(scenario, leaps=leaps)
            seconds.append(cpu_s - load_s)
            reports[leaps] = {**result.summary(), "wall_s": 0}
    if reports[True] != reports[False]:
        raise SystemExit("error: leaps changed the result")
    return [
        {
            "what": "leaps" if leaps else "step by step",
            "requests": reports[leaps]["requests"],
            "steps": reports[leaps]["steps"],
            "simulated_s": reports[leaps]["makespan_s"],
            "cpu_s": min(seconds),
            "median_cpu_s": statistics.median(seconds),
            "times_real_time": reports[leaps]["makespan_s"] / min(seconds),
        }
        for leaps, seconds in times.items()
    ]


def fleet_row(replicas: int, requests: int, router: str) -> dict[str, Any]:
    """A fleet. `peak_mib` is the most memory this process has ever had."""
    base = load_preset(PRESET, OVERRIDES).to_dict()
    arrivals = {"kind": "poisson", "rate_per_s": RATE_PER_REPLICA * replicas}
    base["workload"] = {**FLEET_WORKLOAD, "num_requests": requests, "arrivals": arrivals}
    base["replicas"] = {"count": replicas, "router": router}
    cpu_s, result = timed(Scenario.from_dict(base), leaps=True)
    summary = result.summary()
    return {
        "what": f"{replicas} replicas, {router}",
        "requests": summary["completed"],
        "steps": summary["steps"],
        "simulated_s": summary["makespan_s"],
        "cpu_s": cpu_s,
        "times_real_time": summary["makespan_s"] / cpu_s,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def bench(
    trace: Annotated[str, typer.Argument(help="A trace file, or one that comes along.")] = "azure-conv-500",
    rounds: Annotated[int, typer.Option(min=1, help="Runs of the trace, each way.")] = 3,
    replicas: Annotated[int, typer.Option(min=1, help="Replicas of the fleet.")] = 100,
    requests: Annotated[int, typer.Option(min=0, help="Requests to the fleet; 0 leaves it out.")] = 20_000,
    router: Annotated[str, typer.Option(help="The fleet's router.")] = "least-loaded",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
) -> None:
    try:
        rows = trace_rows(trace, rounds)
        if requests:  # a quarter first: what memory grows by after that is what finished requests leave behind
            rows += [fleet_row(replicas, max(requests // 4, 1), router), fleet_row(replicas, requests, router)]
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    if as_json:
        machine = {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine()}
        print(json.dumps({"rows": rows, **machine}, indent=2, allow_nan=False))
        return
    columns = ("what", "requests", "steps", "simulated s", "CPU s", "times real time", "peak MiB")
    table = [
        [
            row["what"],
            f"{row['requests']:,}",
            f"{row['steps']:,}",
            f"{row['simulated_s']:,.1f}",
            f"{row['cpu_s']:.2f}",
            f"{row['times_real_time']:,.0f}",
            f"{row['peak_mib']:,.0f}" if "peak_mib" in row else "",
        ]
        for row in rows
    ]
    print_table("simulator", columns, table, numbers=columns[1:])


if __name__ == "__main__":
    typer.run(bench)
