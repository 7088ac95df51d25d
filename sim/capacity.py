"""The highest rate of requests, or the fewest replicas, with which enough requests meet their service levels.

Found by bisection, once for each of several seeds. The median over all seeds there could be lies between the lowest and
the highest found with a probability of 1 - 2**(1 - n), whatever the distribution.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import joblib

from asyncsched.errors import MISSING, AsyncschedError, ConfigError
from sim.rates import at_rate, depends_on_seed, offered_rate
from sim.run import simulate
from sim.scenario import Scenario

MOST_DOUBLINGS = 20
MOST_REPLICAS = 1024
LOWEST_RATE = 0.01  # requests/s; what fails there fails with nobody else in the system
FIGURES = ("output_throughput", "gpu_active", "ttft_ms.p50", "ttft_ms.p99", "tpot_ms.p50", "tpot_ms.p99")


class Search(NamedTuple):
    """What is asked.

    attainment  share of the requests that must be good, rejected ones counting as not good
    tolerance   the rate found and one too high are at most this share apart
    seeds       how many, from the scenario's own on
    find        "rate": the highest that the scenario's replicas serve, or "replicas": the fewest that serve its rate
    """

    attainment: float
    tolerance: float
    seeds: int
    find: Literal["rate", "replicas"] = "rate"


class Found(NamedTuple):
    """What met the levels with one seed; where nothing did there are no figures, and what was searched for is 0.

    share    of the requests that met them, in that run or in the last one tried
    figures  of that run: those of FIGURES, its duration and its mean tokens per request
    """

    seed: int
    rate_per_s: float
    replicas: int
    share: float
    figures: Mapping[str, float]


class Capacity(NamedTuple):
    """Of one scenario."""

    scenario: Scenario
    found: tuple[Found, ...]

    @property
    def rates(self) -> list[float]:
        return [found.rate_per_s for found in self.found]

    @property
    def confidence(self) -> float | None:
        """Of the interval from the lowest to the highest rate; None where the seed changes nothing."""
        return 1 - 2.0 ** (1 - len(self.found)) if len(self.found) > 1 else None

    def summary(self) -> dict[str, Any]:
        """Medians over the seeds and the ends of the interval; as many replicas as the most demanding seed needs."""
        figures = {}
        replicas = [found.replicas for found in self.found]
        if all(found.figures for found in self.found):
            figures = {
                key: statistics.median(found.figures[key] for found in self.found) for key in self.found[0].figures
            }
        return {
            "mode": self.scenario.mode,
            "rate_per_s": statistics.median(self.rates),
            "rate_low_per_s": min(self.rates),
            "rate_high_per_s": max(self.rates),
            "replicas": max(replicas),
            "replicas_low": min(replicas),
            "confidence": self.confidence,
            "seeds": len(self.found),
            "share": statistics.median(found.share for found in self.found),
            "figures": figures,
        }


def find_capacity(
    scenarios: Sequence[Scenario],
    search: Search,
    *,
    jobs: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> list[Capacity]:
    """One Capacity per scenario, each with the same seeds. Raises ConfigError where one has no levels or no rate.

    progress  called with searches done and searches in all, a search being one scenario with one seed
    """
    tasks = []
    for scenario in scenarios:
        if scenario.levels() is None:
            raise ConfigError("goodput", MISSING, "name the service levels, as in --goodput ttft:500 tpot:50")
        offered_rate(at_rate(scenario, 1.0))  # refuses what has no rate, before the work
        count = search.seeds if depends_on_seed(scenario) else 1
        seeded = [scenario.model_copy(update={"seed": scenario.seed + number}) for number in range(count)]
        run = _rate if search.find == "rate" else _replicas
        tasks.append([joblib.delayed(run)(one, search) for one in seeded])
    flat = [task for group in tasks for task in group]
    found = []
    for one in joblib.Parallel(n_jobs=jobs, return_as="generator")(flat):
        found.append(one)
        if progress is not None:
            progress(len(found), len(flat))
    rest = iter(found)
    return [
        Capacity(scenario, tuple(next(rest) for _ in group)) for scenario, group in zip(scenarios, tasks, strict=True)
    ]


def _rate(scenario: Scenario, search: Search) -> Found:
    """One seed's highest rate: doubled or halved until it is between two, then by their geometric mean."""
    base = offered_rate(scenario)
    best: Mapping[str, Any] = {}
    share = 0.0

    def meets(scale: float) -> bool:
        nonlocal best, share
        summary = simulate(at_rate(scenario, scale)).summary()
        share = summary["goodput"]["share"]
        enough = bool(share >= search.attainment)
        best = summary if enough else best
        return enough

    low, high = 1.0, 1.0
    if meets(1.0):
        while meets(high * 2):
            high *= 2
            if high >= 2**MOST_DOUBLINGS:
                raise AsyncschedError(f"capacity: the levels are met at any rate, even at {base * high:.3g} requests/s")
        low, high = high, high * 2
    else:
        while not meets(low / 2):
            low /= 2
            if base * low < LOWEST_RATE:
                return Found(scenario.seed, 0.0, scenario.replicas.count, share, {})
        low, high = low / 2, low
    while high / low > 1 + search.tolerance:
        middle = (low * high) ** 0.5
        if meets(middle):
            low = middle
        else:
            high = middle
    share, figures = best["goodput"]["share"], _figures(best, base * low)
    return Found(scenario.seed, base * low, scenario.replicas.count, share, figures)


def _replicas(scenario: Scenario, search: Search) -> Found:
    """The fewest replicas for one seed: doubled until there are enough, then the middle between enough and too few."""
    rate = offered_rate(scenario)
    best: Mapping[str, Any] = {}
    share = 0.0

    def enough(count: int) -> bool:
        nonlocal best, share
        replicas = scenario.replicas.model_copy(update={"count": count})
        summary = simulate(scenario.model_copy(update={"replicas": replicas})).summary()
        share = summary["goodput"]["share"]
        met = bool(share >= search.attainment)
        best = summary if met else best
        return met

    too_few, count = 0, 1
    while not enough(count):
        if count >= MOST_REPLICAS:
            return Found(scenario.seed, rate, 0, share, {})
        too_few, count = count, count * 2
    while count - too_few > 1:
        middle = (count + too_few) // 2
        if enough(middle):
            count = middle
        else:
            too_few = middle
    return Found(scenario.seed, rate, count, best["goodput"]["share"], _figures(best, rate))


def _figures(summary: Mapping[str, Any], rate: float) -> dict[str, float]:
    figures: dict[str, float] = {}
    for key in FIGURES:
        parent, _, name = key.partition(".")
        value = summary[parent][name] if name and summary[parent] is not None else summary[parent]
        figures[key] = 0.0 if value is None else value
    figures["duration_s"] = (summary["requests"] - 1) / rate
    figures["output_tokens"] = summary["output_tokens"] / summary["requests"]
    figures["prompt_tokens"] = summary["prompt_tokens"] / summary["requests"]
    return figures


def usd_per_million(gpu_hour_usd: float, gpus: int, tokens_per_s: float) -> float:
    """What a million tokens cost when GPUs that cost so much give so many of them a second."""
    return gpu_hour_usd * gpus / (tokens_per_s * 3600) * 1e6
