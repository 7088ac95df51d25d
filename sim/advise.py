"""Which depth pays for a scenario, by how much, from which host cost on, and what it costs.

A deeper pipeline is worth it when it makes the metric better by at least a given share than the depth chosen so far. It
can do so only where host work is exposed, most where the host takes as long as the GPU: there the search begins, and
goes down to the smallest host cost at which the gain is worth it. Beyond that point the host itself is the limit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import joblib

from asyncsched.errors import ConfigError
from sim.run import simulate
from sim.scenario import Scenario, override_values

HIGHER_IS_BETTER = ("output_throughput",)
SMALLEST = 2.0**-10  # of the host cost at which host and GPU take equally long: nothing is gained below
CLOSENESS = 1.05  # of the host cost found to one at which it does not pay


class Question(NamedTuple):
    """Depths in increasing order; `metric` is a dotted key of a summary; `worth` is a share of it."""

    depths: tuple[int, ...]
    metric: str
    worth: float


class Threshold(NamedTuple):
    """From which host cost on `depth` beats `below`, in times the scenario's own; None where it never does.

    balanced       where the host takes as long as the GPU, None without host work
    gain_balanced  what the depth gains there
    """

    depth: int
    below: int
    pays_from: float | None
    balanced: float | None
    gain_balanced: float


class Advice(NamedTuple):
    """`runs` are summaries by depth; `gains` are over the depth that was chosen before, None for the first."""

    question: Question
    runs: dict[int, Mapping[str, Any]]
    gains: dict[int, float | None]
    chosen: int
    thresholds: tuple[Threshold, ...]
    host_us_per_step: float


def advise(
    base: Mapping[str, Any], question: Question, *, jobs: int = 1, progress: Callable[[int, int], None] | None = None
) -> Advice:
    """Runs the scenario data at every depth and, for each depth against the one below, over host costs.

    Raises ConfigError. progress  called with tasks done and tasks in all
    """
    depths = question.depths
    if len(depths) < 2 or list(depths) != sorted(set(depths)):
        raise ConfigError("--depths", ",".join(map(str, depths)), "name at least two depths in increasing order")
    for depth in depths:
        _scenario(base, depth, 1.0)  # refuses what is wrong with it, before the work
    total = 2 * len(depths) - 1
    runs: dict[int, Mapping[str, Any]] = {}
    tasks = [joblib.delayed(_summary)(base, depth, 1.0) for depth in depths]
    for depth, summary in zip(depths, joblib.Parallel(n_jobs=jobs, return_as="generator")(tasks), strict=True):
        runs[depth] = summary
        if progress is not None:
            progress(len(runs), total)
    first = runs[depths[0]]
    host, gpu = first["busy_s"]["host"], first["busy_s"]["compute"]
    balanced = gpu / host if host else None
    pairs = [
        joblib.delayed(_threshold)(base, question, below, depth, balanced)
        for below, depth in itertools.pairwise(depths)
    ]
    thresholds = []
    for threshold in joblib.Parallel(n_jobs=jobs, return_as="generator")(pairs):
        thresholds.append(threshold)
        if progress is not None:
            progress(len(depths) + len(thresholds), total)
    chosen, gains = _choose(runs, question)
    return Advice(question, runs, gains, chosen, tuple(thresholds), 1e6 * host / first["steps"])


def gain(before: Mapping[str, Any], after: Mapping[str, Any], metric: str) -> float:
    """By what share `after` is better: 0.25 is a quarter more throughput, or a latency 1.25 times as long before."""
    old, new = value_of(before, metric), value_of(after, metric)
    if metric in HIGHER_IS_BETTER:
        old, new = new, old
    return old / new - 1 if new else 0.0


def value_of(summary: Mapping[str, Any], metric: str) -> float:
    """Raises ConfigError where nobody has the latency, or the summary no such figure."""
    value: Any = summary
    for key in metric.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError("--metric", metric, "the run has no such figure; use e2el_ms.mean or output_throughput")
    return float(value)


def _scenario(base: Mapping[str, Any], depth: int, scale: float) -> Scenario:
    scenario = Scenario.from_dict(override_values(base, {"depth": depth}))
    if scenario.mode == "static":
        raise ConfigError("mode", "static", "it has no depth to choose; use sync or async")
    return scenario.model_copy(update={"host": scenario.host.model_copy(update={"scale": scenario.host.scale * scale})})


def _summary(base: Mapping[str, Any], depth: int, scale: float) -> dict[str, Any]:
    summary = simulate(_scenario(base, depth, scale)).summary()
    return {key: value for key, value in summary.items() if key != "wall_s"}


def _choose(runs: Mapping[int, Mapping[str, Any]], question: Question) -> tuple[int, dict[int, float | None]]:
    chosen = question.depths[0]
    gains: dict[int, float | None] = {chosen: None}
    for depth in question.depths[1:]:
        gained = gain(runs[chosen], runs[depth], question.metric)
        gains[depth] = gained
        if gained >= question.worth:
            chosen = depth
    return chosen, gains


def _threshold(
    base: Mapping[str, Any], question: Question, below: int, depth: int, balanced: float | None
) -> Threshold:
    """Bisection by factors, between a cost at which the depth does not pay and one at which it does."""
    if balanced is None:
        return Threshold(depth, below, None, None, 0.0)

    def gained(scale: float) -> float:
        return gain(_summary(base, below, scale), _summary(base, depth, scale), question.metric)

    most = gained(balanced)
    if most < question.worth:
        return Threshold(depth, below, None, balanced, most)
    low, high = balanced * SMALLEST, balanced
    if gained(low) >= question.worth:
        return Threshold(depth, below, low, balanced, most)
    while high / low > CLOSENESS:
        middle = (low * high) ** 0.5
        if gained(middle) >= question.worth:
            high = middle
        else:
            low = middle
    return Threshold(depth, below, high, balanced, most)
