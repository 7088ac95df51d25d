"""One scenario, simulated: build the engine, let the workload arrive, report what happened."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy

from asyncsched.errors import PolicyError
from asyncsched.metrics import ServingMetrics
from asyncsched.request import FinishReason
from asyncsched.timeline import LaneAccount, Timeline
from sim.engine import SimEngine
from sim.fleet import Fleet
from sim.prompts import ideal_reuse
from sim.scenario import Scenario
from sim.workload import Workload

Progress = Callable[[int, int], None]
"""Called with output tokens delivered and output tokens in all."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a simulated run gave. `wall_s` is this machine's time; everything else is virtual and repeatable."""

    scenario: Scenario
    workload: Workload
    metrics: ServingMetrics
    account: LaneAccount
    timeline: Timeline | None
    log: list[str] | None
    makespan_ns: int
    steps: int
    preemptions: int
    kv_peak: int
    prefix_hits: int
    prefix_queries: int
    rejections: tuple[str, ...]
    wall_s: float
    replicas: tuple[dict[str, Any], ...] = ()  # a short summary of each, where there are several

    def summary(self) -> dict[str, Any]:
        """The object that `--json` prints. Keys end in their unit; shares are of the makespan, of all replicas."""
        makespan_s = self.makespan_ns / 1e9
        lanes_ns = self.makespan_ns * self.scenario.replicas.count
        busy, idle = self.account.busy, self.account.idle
        ended = self.metrics.ended
        return {
            "mode": self.scenario.mode,
            "depth": self.scenario.depth,
            "makespan_s": makespan_s,
            "steps": self.steps,
            "gpu_active": busy["compute"] / lanes_ns if lanes_ns else 0.0,
            "idle_s": {cause: ns / 1e9 for cause, ns in idle.items()},
            "exposed_host_s": idle["host"] / 1e9,
            "busy_s": {lane: ns / 1e9 for lane, ns in busy.items()},
            "limiting_lane": self.account.limiting_lane,
            "requests": self.metrics.num_requests,
            "completed": ended[FinishReason.LENGTH] + ended[FinishReason.STOP],
            "rejected": ended[FinishReason.REJECTED],
            "rejections": list(self.rejections),
            "goodput": self._goodput(makespan_s),
            "prompt_tokens": int(self.workload.arrivals.prompt_tokens.sum()),
            "output_tokens": self.metrics.output_tokens,
            "output_throughput": self.metrics.output_tokens / makespan_s if makespan_s else 0.0,
            **self.metrics.summary(),
            "quantiles_ms": self.metrics.quantiles_ms(),
            "preemptions": self.preemptions,
            "overshoot_tokens": self.metrics.overshoot_tokens,
            "kv_peak": self.kv_peak / self.scenario.engine_config().num_blocks,
            "prefix_cache": self._prefix_cache(),
            "notes": [*self.workload.notes, *self.metrics.notes],
            **({"router": self.scenario.replicas.router, "replicas": list(self.replicas)} if self.replicas else {}),
            "wall_s": self.wall_s,
            "seed": self.scenario.seed,
            "scenario": self.scenario.to_dict(),
        }

    def _goodput(self, makespan_s: float) -> dict[str, float] | None:
        """None without service levels. The share is of all requests that arrived."""
        if self.scenario.levels() is None:
            return None
        good = self.metrics.num_good
        return {
            "requests": good,
            "share": good / self.metrics.num_requests,
            "per_s": good / makespan_s if makespan_s else 0.0,
        }

    def _prefix_cache(self) -> dict[str, float | None] | None:
        """None where it is off. Rates are shares of the prompt tokens, of requests as they were first admitted."""
        if not self.scenario.engine["enable_prefix_caching"]:
            return None
        ideal = ideal_reuse(self.workload.arrivals, self.scenario.engine["block_size"])
        return {
            "hit_tokens": self.prefix_hits,
            "hit_rate": self.prefix_hits / self.prefix_queries if self.prefix_queries else 0.0,
            "ideal_hit_rate": ideal.tokens,
            "ideal_block_rate": ideal.blocks,
        }


def simulate(
    scenario: Scenario,
    *,
    spans: bool = False,
    decisions: bool = False,
    leaps: bool = True,
    progress: Progress | None = None,
) -> Result:
    """Runs a scenario to its end. `spans` keeps a timeline, of one engine only; `decisions` the decision log. Without
    `leaps` it goes step by step, to the same results.

    Raises ConfigError, and PolicyError where a policy or router failed: what it was replaced by is not what was asked
    about.
    """
    started = time.perf_counter()
    workload = scenario.build_workload()
    env = simpy.Environment(initial_time=0)
    fleet = Fleet(env, scenario, leaps=leaps, spans=spans, decisions=decisions)
    run = fleet.start(workload)
    if progress is None:
        env.run(run)
    else:
        _run_with_progress(env, run, fleet, int(workload.arrivals.output_tokens.sum()), progress)
    return report(scenario, workload, fleet, started)


def report(scenario: Scenario, workload: Workload, fleet: Fleet, started: float) -> Result:
    """What a fleet that has ended gave. `started` is this machine's time. Raises PolicyError where a policy failed."""
    engines = fleet.engines
    for engine in engines:
        if engine.scheduler.policies.faults:
            raise PolicyError(f"the run is void: {engine.scheduler.policies.faults[0]}")
    makespan_ns = max(engine.ended_ns for engine in engines)
    first = engines[0]
    metrics, account = first.metrics, first.account
    replicas: tuple[dict[str, Any], ...] = ()
    log = None if fleet.logs is None else fleet.logs[0]
    if len(engines) > 1:
        numbers = None if fleet.numbers is None else [np.array(each, dtype=np.int64) for each in fleet.numbers]
        metrics = ServingMetrics.merged([engine.metrics for engine in engines], numbers)
        account = _summed([engine.account for engine in engines], makespan_ns)
        replicas = tuple(_describe(engine, number, makespan_ns) for number, engine in enumerate(engines))
        if fleet.logs is not None:
            log = [f"replica {number}: {line}" for number, lines in enumerate(fleet.logs) for line in lines]
    return Result(
        scenario,
        workload,
        metrics,
        account,
        first.timeline if len(engines) == 1 else None,
        log,
        makespan_ns,
        sum(engine.steps for engine in engines),
        sum(engine.scheduler.preemptions for engine in engines),
        max(engine.kv_peak for engine in engines),
        sum(engine.scheduler.prefix_hits for engine in engines),
        sum(engine.scheduler.prefix_queries for engine in engines),
        tuple(line for engine in engines for line in engine.rejections),
        time.perf_counter() - started,
        replicas,
    )


def _summed(accounts: Sequence[LaneAccount], makespan_ns: int) -> LaneAccount:
    """All engines' lanes as one account; who ends early has no work for the rest of the time."""
    whole = LaneAccount(last_end_ns=makespan_ns)
    for account in accounts:
        for lane, ns in account.busy.items():
            whole.busy[lane] += ns
        for cause, ns in account.idle.items():
            whole.idle[cause] += ns
        whole.idle["no_work"] += makespan_ns - account.last_end_ns
    return whole


def _describe(engine: SimEngine, number: int, makespan_ns: int) -> dict[str, Any]:
    """A replica in the words of a summary; shares are of the whole run's makespan."""
    metrics, ended = engine.metrics, engine.metrics.ended
    seconds = makespan_ns / 1e9
    return {
        "replica": number,
        "requests": metrics.num_requests,
        "completed": ended[FinishReason.LENGTH] + ended[FinishReason.STOP],
        "rejected": ended[FinishReason.REJECTED],
        "steps": engine.steps,
        "output_tokens": metrics.output_tokens,
        "output_throughput": metrics.output_tokens / seconds if seconds else 0.0,
        "gpu_active": engine.account.busy["compute"] / makespan_ns if makespan_ns else 0.0,
        **metrics.summary(),
        "preemptions": engine.scheduler.preemptions,
        "overshoot_tokens": metrics.overshoot_tokens,
        "kv_peak": engine.kv_peak / engine.scheduler.config.num_blocks,
    }


def _run_with_progress(env: simpy.Environment, run: simpy.Event, fleet: Fleet, total: int, progress: Progress) -> None:
    """Steps the clock, and reports whenever another hundredth of the tokens is out."""
    shown, stride = 0, max(total // 100, 1)
    events = 0
    while not run.processed:
        env.step()
        events += 1
        if events % len(fleet.engines) == 0:  # looking at all of them takes as long as a few events
            done = sum(engine.metrics.output_tokens for engine in fleet.engines)
            if done - shown >= stride:
                shown = done
                progress(shown, total)
    progress(total, total)
