"""The rate of a scenario's arrivals: what it is, and the same scenario at another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncsched.errors import ConfigError
from sim.scenario import Scenario

_KEYS = {"poisson": ("rate_per_s",), "gamma": ("rate_per_s",), "ramp": ("start_rate_per_s", "end_rate_per_s")}


def at_rate(scenario: Scenario, scale: float) -> Scenario:
    """Requests come `scale` times as fast. Raises ConfigError where their times are no question of a rate."""
    data = scenario.to_dict()
    workload = data["workload"]
    if workload["max_concurrency"] is not None:
        allowed = "in a closed loop requests come when others end; leave it out to ask about a rate"
        raise ConfigError("workload.max_concurrency", workload["max_concurrency"], allowed)
    arrivals: Mapping[str, Any] | None = workload.get("arrivals")
    if arrivals is None:
        workload["rate_scale"] *= scale
    elif arrivals["kind"] in _KEYS:
        workload["arrivals"] = {**arrivals, **{key: arrivals[key] * scale for key in _KEYS[arrivals["kind"]]}}
    else:
        raise ConfigError("workload.arrivals.kind", arrivals["kind"], f"they have no rate; use {', '.join(_KEYS)}")
    return Scenario.from_dict(data)


def offered_rate(scenario: Scenario) -> float:
    """Requests per second, from the first to the last."""
    arrivals = scenario.workload_arrivals()
    span_ns = arrivals[-1].arrival_ns - arrivals[0].arrival_ns
    if not span_ns:
        raise ConfigError("workload", len(arrivals), "requests that all come at once have no rate")
    return (len(arrivals) - 1) / (span_ns / 1e9)


def depends_on_seed(scenario: Scenario) -> bool:
    """Whether another seed changes anything: lengths, times, priorities or jitter."""
    other = scenario.model_copy(update={"seed": (scenario.seed + 1) % 2**63})
    return scenario.jitter.kind != "none" or scenario.build_workload() != other.build_workload()
