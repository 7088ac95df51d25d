"""Many scenarios: the grid of varied keys, run in processes, one row per point in grid order whatever the processes.

A point that fails keeps its place and says why in its `error`; the others go on.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import joblib

from asyncsched.errors import AsyncschedError, ConfigError
from sim.run import simulate as simulate_scenario
from sim.scenario import Scenario, override_values, parse_value

Simulate = Callable[[Scenario], Mapping[str, Any]]
"""Runs one scenario and returns its summary."""

COLUMNS = (
    "mode",
    "depth",
    "makespan_s",
    "steps",
    "gpu_active",
    "exposed_host_s",
    "limiting_lane",
    "output_tokens",
    "output_throughput",
    "ttft_ms.p50",
    "tpot_ms.p50",
    "itl_ms.p99",
    "e2el_ms.p50",
    "preemptions",
    "overshoot_tokens",
    "kv_peak",
)


def parse_vary(text: str) -> tuple[str, list[object]]:
    """`host.scale=0.5,1,2` or `mode=sync,async`: the key and its values. Raises ConfigError."""
    key, separator, values = text.partition("=")
    if not separator or not key.strip() or not values.strip():
        raise ConfigError("--vary", text, "use key=value,value,... as in host.scale=0.5,1,2")
    try:
        parsed = tomllib.loads(f"values = [{values}]")
    except tomllib.TOMLDecodeError:  # bare words such as sync,async
        return key.strip(), [parse_value(value) for value in values.split(",")]
    return key.strip(), parsed["values"]


def grid(vary: Mapping[str, Sequence[object]]) -> list[dict[str, object]]:
    """Every combination of the varied keys' values; the last key varies fastest."""
    return [dict(zip(vary, values, strict=True)) for values in itertools.product(*vary.values())]


def simulated(scenario: Scenario) -> Mapping[str, Any]:
    return simulate_scenario(scenario).summary()


def run_sweep(
    base: Mapping[str, Any],
    vary: Mapping[str, Sequence[object]],
    *,
    simulate: Simulate = simulated,
    jobs: int = 1,
    columns: Sequence[str] = COLUMNS,
    progress: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """One row per grid point: varied keys, `columns` of the summary (dotted for nested ones), and `error`, "" if none.

    base      unchecked scenario data, as `read_scenario` gives
    simulate  must reach other processes: a function of a module, or one that cloudpickle can carry
    jobs      processes; -1 is one per core
    progress  called with points done and points in all, in grid order

    Raises ConfigError when not one point is a valid scenario: the fault then lies with what all of them share.
    """
    if jobs == 0:
        raise ConfigError("jobs", jobs, "use a number of processes, or -1 for one per core")
    points = grid(vary)
    built = [_build(base, point) for point in points]
    if built and isinstance(built[0], ConfigError) and all(isinstance(item, ConfigError) for item in built):
        raise built[0]
    tasks = (
        joblib.delayed(_run)(simulate, item if isinstance(item, Scenario) else str(item), columns) for item in built
    )
    rows = []
    for point, metrics in zip(points, joblib.Parallel(n_jobs=jobs, return_as="generator")(tasks), strict=True):
        rows.append({**point, **metrics, **point})  # a key both varied and a column keeps the value asked for
        if progress is not None:
            progress(len(rows), len(points))
    return rows


def _build(base: Mapping[str, Any], point: Mapping[str, object]) -> Scenario | ConfigError:
    try:
        return Scenario.from_dict(override_values(base, point))
    except ConfigError as error:
        return error


def _run(simulate: Simulate, scenario: Scenario | str, columns: Sequence[str]) -> dict[str, Any]:
    """The columns of one point and its error, which may be all there is. Runs in a worker process."""
    failed = dict.fromkeys(columns)
    if isinstance(scenario, str):
        return {**failed, "error": scenario}
    try:
        summary = simulate(scenario)
    except AsyncschedError as error:
        return {**failed, "error": str(error)}
    except Exception as error:  # a user's policy may raise anything, and must not take the other points with it
        return {**failed, "error": f"{type(error).__name__}: {error}"}
    return {**{column: _look_up(summary, column) for column in columns}, "error": ""}


def _look_up(summary: Mapping[str, Any], column: str) -> Any:
    value: Any = summary
    for key in column.split("."):
        value = None if value is None else value[key]  # a latency that nobody had
    return value
