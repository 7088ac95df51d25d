"""Many scenarios, run in processes: one row per point in the order of the design, whatever the processes.

A value that no point can have is refused before anything runs. A point that fails keeps its place and says why in its
`error`, as does one whose values are good for others but not together; the others go on. What is found in a result file
is not run again, except what had failed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import joblib

from asyncsched.errors import AsyncschedError, ConfigError
from sim.design import Point
from sim.results import Record, ResultFile, point_key
from sim.run import simulate as simulate_scenario
from sim.scenario import Scenario, override_values
from sim.trace import Slice, read_trace
from sim.workload import TraceWorkload

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
    "goodput.share",
    "goodput.per_s",
    "preemptions",
    "overshoot_tokens",
    "kv_peak",
)
RUNS_PER_LIST = 8  # per process: so many are lost when a sweep is killed, and waited for by those that are done
FIRST_REQUEST = Slice(limit=1)
LEFT_OUT = ("scenario", "quantiles_ms", "wall_s")  # of what is kept of a summary: said by the point, long, no result


def simulated(scenario: Scenario) -> Mapping[str, Any]:
    return simulate_scenario(scenario).summary()


def run_sweep(
    base: Mapping[str, Any],
    points: Sequence[Point],
    *,
    simulate: Simulate = simulated,
    jobs: int = 1,
    backend: str | None = None,
    results: ResultFile | None = None,
    columns: Sequence[str] = COLUMNS,
    progress: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """One row per point: its keys, `columns` of the summary (dotted for nested ones), and `error`, "" if none.

    base      unchecked scenario data, as `read_scenario` gives
    simulate  must reach other processes: a function of a module, or one that cloudpickle can carry
    jobs      processes; -1 is one per core, or all that the backend has
    backend   of joblib; None is its processes on this machine
    results   where points are kept, and found
    progress  called with points done and points in all

    Equal scenarios are run once. Raises ConfigError as `build_points` does.
    """
    if jobs == 0:
        raise ConfigError("jobs", jobs, "use a number of processes, or -1 for one per core")
    built = build_points(base, points)
    keys = [point_key(item) if isinstance(item, Scenario) else "" for item in built]
    found = dict(results.records) if results is not None else {}
    records = {key: found[key] for key in keys if key in found and not found[key].error}
    waiting = {
        key: (item, point)
        for key, item, point in zip(keys, built, points, strict=True)
        if isinstance(item, Scenario) and key not in records
    }
    done = sum(key in records or not key for key in keys)
    if progress is not None:
        progress(done, len(points))
    for key, summary, error in _run_all(simulate, {key: item for key, (item, _) in waiting.items()}, jobs, backend):
        records[key] = Record(waiting[key][1], summary, error)
        if results is not None:
            results.add(key, records[key])
        done += keys.count(key)
        if progress is not None:
            progress(done, len(points))
    return [
        _row(point, records[key] if key else Record(point, {}, str(item)), columns)
        for point, key, item in zip(points, keys, built, strict=True)
    ]


def build_points(base: Mapping[str, Any], points: Sequence[Point]) -> list[Scenario | ConfigError]:
    """The scenario of each point; an error where its values do not go together. Takes no time beside the runs.

    Raises ConfigError where not one point is a scenario, as the fault then lies with what they share, and for a value
    with which no point is one.
    """
    built = [_build(base, point) for point in points]
    good = [point for point, item in zip(points, built, strict=True) if isinstance(item, Scenario)]
    possible = {(key, repr(value)) for point in good for key, value in point.items()}
    for point, item in zip(points, built, strict=True):
        if isinstance(item, Scenario):
            continue
        if not good:
            raise item
        for key, value in point.items():
            if (key, repr(value)) not in possible:
                _check_value(base, good, key, value)
                possible.add((key, repr(value)))
    return built


def _check_value(base: Mapping[str, Any], good: Sequence[Point], key: str, value: object) -> None:
    """Raises ConfigError where none of the good points would be one with this value: values that were drawn stand in
    one point only, which others may have spoilt."""
    first: ConfigError | None = None
    for point in good:
        item = _build(base, {**point, key: value})
        if isinstance(item, Scenario):
            return
        first = first or item
    if first is not None:
        raise first


def _build(base: Mapping[str, Any], point: Mapping[str, object]) -> Scenario | ConfigError:
    try:
        scenario = Scenario.from_dict(override_values(base, point))
        workload = scenario.workload
        if isinstance(workload, TraceWorkload):  # whether it is one; of what is in it, a run tells
            read_trace(workload.trace, workload.format, FIRST_REQUEST, strict=workload.strict)
    except ConfigError as error:
        return error
    return scenario


def _run_all(
    simulate: Simulate, scenarios: Mapping[str, Scenario], jobs: int, backend: str | None
) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Each as soon as it is done; where a backend only gives whole lists, a few at a time."""
    tasks = (joblib.delayed(_run)(simulate, key, scenario) for key, scenario in scenarios.items())
    with nullcontext() if backend is None else joblib.parallel_config(backend):
        if joblib.parallel.get_active_backend()[0].supports_return_generator:
            yield from joblib.Parallel(n_jobs=jobs, return_as="generator_unordered")(tasks)
            return
        size = RUNS_PER_LIST * joblib.effective_n_jobs(jobs)
        while part := list(itertools.islice(tasks, size)):
            yield from joblib.Parallel(n_jobs=jobs)(part)


def _run(simulate: Simulate, key: str, scenario: Scenario) -> tuple[str, dict[str, Any], str]:
    """The key, what the run gave, and its error. Runs in a worker process."""
    try:
        summary = simulate(scenario)
    except AsyncschedError as error:
        return key, {}, str(error)
    except Exception as error:  # a user's policy may raise anything, and must not take the other points with it
        return key, {}, f"{type(error).__name__}: {error}"
    kept = {name: value for name, value in summary.items() if name not in LEFT_OUT}
    if "rejections" in kept:  # a text per request
        kept["rejections"] = kept["rejections"][:1]
    return key, kept, ""


def _row(point: Point, record: Record, columns: Sequence[str]) -> dict[str, Any]:
    """A key both varied and a column keeps the value asked for."""
    values = {column: None if record.error else _look_up(record.summary, column) for column in columns}
    return {**point, **values, **point, "error": record.error}


def _look_up(summary: Mapping[str, Any], column: str) -> Any:
    value: Any = summary
    for key in column.split("."):
        value = None if value is None else value[key]  # a latency that nobody had
    return value
