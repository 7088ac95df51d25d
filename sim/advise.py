"""Which depth pays for a scenario or a recorded run, by how much, from which host cost on, and what it costs.

A deeper pipeline is worth it when it makes the metric better by at least a given share than the depth chosen so far. It
can do so only where host work is exposed, most where the host takes as long as the GPU: there the search begins, and
goes down to the smallest host cost at which the gain is worth it. Beyond that point the host itself is the limit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import joblib

from asyncsched.errors import ConfigError
from asyncsched.runs import Run
from sim.host_speed import probed
from sim.predict import delayed, predicted_summary
from sim.profile import Profile
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
    """`runs` are summaries by depth; `gains` are over the depth that was chosen before, None for the first.

    only_lengths  every request ends by its length limit, so that nothing is computed in vain
    """

    question: Question
    runs: dict[int, Mapping[str, Any]]
    gains: dict[int, float | None]
    chosen: int
    thresholds: tuple[Threshold, ...]
    host_us_per_step: float
    only_lengths: bool


SummaryAt = Callable[[int, float], Mapping[str, Any]]
"""The summary at a depth, with so many times the host cost."""
Progress = Callable[[int, int], None]
"""Called with tasks done and tasks in all."""


def advise(base: Mapping[str, Any], question: Question, *, jobs: int = 1, progress: Progress | None = None) -> Advice:
    """Runs the scenario data at every depth and, for each depth against the one below, over host costs. Raises
    ConfigError."""
    _check(question)
    for depth in question.depths:
        scenario = _scenario(base, depth, 1.0)  # refuses what is wrong with it, before the work
    return _advise(partial(_summary, base), question, scenario.workload.stop == "length", jobs, progress)


def advise_run(
    run: Run,
    profile: Profile,
    question: Question,
    changes: Mapping[str, Any] | None = None,
    *,
    jobs: int = 1,
    progress: Progress | None = None,
) -> Advice:
    """Serves the run's requests at the profile's prices, arriving when they did, as `advise` does with a scenario's.
    Where the run has a probe of the profile's kind, its host is as quick as that says. The host cost that is scaled has
    the run's host delay in it. `changes` are of the engine's settings.

    Raises ConfigError where the run does not say what the engine had.
    """
    _check(question)
    for depth in question.depths:
        run.info.engine_config(**{**(changes or {}), "depth": depth})
    at = partial(_predicted, run, delayed(probed(profile, run), run), dict(changes or {}))
    only_lengths = all(finish in ("length", "rejected") for finish in run.requests.finish)
    return _advise(at, question, only_lengths, jobs, progress)


def _advise(at: SummaryAt, question: Question, only_lengths: bool, jobs: int, progress: Progress | None) -> Advice:
    depths = question.depths
    total = 2 * len(depths) - 1
    runs: dict[int, Mapping[str, Any]] = {}
    tasks = [joblib.delayed(at)(depth, 1.0) for depth in depths]
    for depth, summary in zip(depths, joblib.Parallel(n_jobs=jobs, return_as="generator")(tasks), strict=True):
        runs[depth] = summary
        if progress is not None:
            progress(len(runs), total)
    first = runs[depths[0]]
    host, gpu = first["busy_s"]["host"], first["busy_s"]["compute"]
    balanced = gpu / host if host else None
    pairs = [
        joblib.delayed(_threshold)(at, question, below, depth, balanced) for below, depth in itertools.pairwise(depths)
    ]
    thresholds = []
    for threshold in joblib.Parallel(n_jobs=jobs, return_as="generator")(pairs):
        thresholds.append(threshold)
        if progress is not None:
            progress(len(depths) + len(thresholds), total)
    chosen, gains = _choose(runs, question)
    host_us = 1e6 * host / max(first["steps"], 1)
    return Advice(question, runs, gains, chosen, tuple(thresholds), host_us, only_lengths)


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
        if isinstance(value, Mapping) and key in value and value[key] is None:
            raise ConfigError("--metric", metric, "no request of the run has one; use output_throughput")
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError("--metric", metric, "the run has no such figure; use e2el_ms.mean or output_throughput")
    return float(value)


def _scenario(base: Mapping[str, Any], depth: int, scale: float) -> Scenario:
    scenario = Scenario.from_dict(override_values(base, {"depth": depth}))
    if scenario.mode == "static":
        raise ConfigError("mode", "static", "it has no depth to choose; use sync or async")
    return scenario.model_copy(update={"host": scenario.host.model_copy(update={"scale": scenario.host.scale * scale})})


def _check(question: Question) -> None:
    depths = question.depths
    if len(depths) < 2 or list(depths) != sorted(set(depths)):
        raise ConfigError("--depths", ",".join(map(str, depths)), "name at least two depths in increasing order")


def _predicted(run: Run, profile: Profile, changes: Mapping[str, Any], depth: int, scale: float) -> dict[str, Any]:
    host = profile.host
    scaled = host.model_copy(update={"scale": host.scale * scale, "delay_us": host.delay_us * scale})
    return predicted_summary(run, profile.model_copy(update={"host": scaled}), **{**changes, "depth": depth})


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


def _threshold(at: SummaryAt, question: Question, below: int, depth: int, balanced: float | None) -> Threshold:
    """Bisection by factors, between a cost at which the depth does not pay and one at which it does."""
    if balanced is None:
        return Threshold(depth, below, None, None, 0.0)

    def gained(scale: float) -> float:
        return gain(at(below, scale), at(depth, scale), question.metric)

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
