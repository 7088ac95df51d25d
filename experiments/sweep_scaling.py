"""A sweep of random points on one process and on several: how much faster, and whether the rows are the same.

Preset h200-llama-8b with the first requests of its trace; host cost, rate, mode and seats are drawn. Other work on the
machine slows either run, so its load is reported too.
"""

from __future__ import annotations

import argparse
import json
import os
import time

from one_line import at_least_one, processes

from asyncsched.cli.tables import print_table
from sim.design import Range, random_points
from sim.scenario import override_values, read_preset
from sim.sweep import run_sweep

RANGES = {"host.scale": Range(0.1, 10.0, True), "workload.rate_scale": Range(0.5, 2.0, True)}
CHOICES = {"mode": ["sync", "async"], "max_num_seqs": [64, 256]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=at_least_one, default=1000)
    parser.add_argument("--requests", type=at_least_one, default=100, help="of the trace, per point")
    parser.add_argument("--jobs", type=processes, default=2)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    chosen = parser.parse_args()
    base = override_values(read_preset("h200-llama-8b"), {"workload.limit": chosen.requests})
    points = random_points(RANGES, CHOICES, chosen.points, 0)
    taken, rows = {}, {}
    for jobs in (chosen.jobs, 1):
        started = time.perf_counter()
        rows[jobs] = run_sweep(base, points, jobs=jobs)
        taken[jobs] = time.perf_counter() - started
    result = {
        "points": chosen.points,
        "seconds": {str(jobs): seconds for jobs, seconds in sorted(taken.items())},
        "times_faster": taken[1] / taken[chosen.jobs],
        "rows_equal": rows[1] == rows[chosen.jobs],
        "load_average": os.getloadavg()[0],
    }
    if chosen.json:
        print(json.dumps(result, indent=2))
        return
    table = [[str(jobs), f"{seconds:.1f}", f"{taken[1] / seconds:.2f}"] for jobs, seconds in sorted(taken.items())]
    print_table(f"{chosen.points} points", ["processes", "s", "times faster"], table, numbers=("s", "times faster"))
    print(f"rows equal: {result['rows_equal']}; load average at the end: {result['load_average']:.1f}")


if __name__ == "__main__":
    main()
