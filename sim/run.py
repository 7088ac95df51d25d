"""One scenario, simulated: build the engine, let the workload arrive, report what happened."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy

from asyncsched.errors import PolicyError
from asyncsched.metrics import ServingMetrics
from asyncsched.pipeline import Submit
from asyncsched.request import FinishReason, SamplingParams
from asyncsched.scheduler import Scheduler
from asyncsched.timeline import LaneAccount, Timeline
from sim.engine import END, SimEngine
from sim.prompts import ideal_reuse, prompt_of
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

    def summary(self) -> dict[str, Any]:
        """The object that `--json` prints. Keys end in their unit; shares are of the makespan."""
        makespan_s = self.makespan_ns / 1e9
        busy, idle = self.account.busy, self.account.idle
        ended = self.metrics.ended
        return {
            "mode": self.scenario.mode,
            "depth": self.scenario.depth,
            "makespan_s": makespan_s,
            "steps": self.steps,
            "gpu_active": busy["compute"] / self.makespan_ns if self.makespan_ns else 0.0,
            "idle_s": {cause: ns / 1e9 for cause, ns in idle.items()},
            "exposed_host_s": idle["host"] / 1e9,
            "busy_s": {lane: ns / 1e9 for lane, ns in busy.items()},
            "limiting_lane": self.account.limiting_lane,
            "requests": self.metrics.num_requests,
            "completed": ended[FinishReason.LENGTH] + ended[FinishReason.STOP],
            "rejected": ended[FinishReason.REJECTED],
            "rejections": list(self.rejections),
            "goodput": self._goodput(makespan_s),
            "prompt_tokens": sum(arrival.prompt_tokens for arrival in self.workload.arrivals),
            "output_tokens": self.metrics.output_tokens,
            "output_throughput": self.metrics.output_tokens / makespan_s if makespan_s else 0.0,
            **self.metrics.summary(),
            "preemptions": self.preemptions,
            "overshoot_tokens": self.metrics.overshoot_tokens,
            "kv_peak": self.kv_peak / self.scenario.engine_config().num_blocks,
            "prefix_cache": self._prefix_cache(),
            "notes": list(self.workload.notes),
            "wall_s": self.wall_s,
            "seed": self.scenario.seed,
            "scenario": self.scenario.to_dict(),
        }

    def _goodput(self, makespan_s: float) -> dict[str, float] | None:
        """None without service levels. The share is of all requests that arrived."""
        levels = self.scenario.levels()
        if levels is None:
            return None
        good = int(np.count_nonzero(levels.met(self.metrics)))
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
    """Runs a scenario to its end. `spans` keeps a timeline, `decisions` the decision log. Without `leaps` it goes
    step by step, to the same results.

    Raises ConfigError, and PolicyError where a policy failed: what it was replaced by is not what was asked about.
    """
    started = time.perf_counter()
    config = scenario.engine_config()
    workload = scenario.build_workload()
    arrivals = workload.arrivals
    log: list[str] | None = [] if decisions else None
    scheduler = Scheduler(config, log=log)
    timeline = Timeline() if spans else None
    last_positions = np.array([a.prompt_tokens + a.output_tokens - 1 for a in arrivals], dtype=np.int64)
    env = simpy.Environment(initial_time=0)
    engine = SimEngine(env, scheduler, scenario.costs(), last_positions, timeline=timeline, leaps=leaps)
    env.process(_arrive(env, engine, workload, scenario))
    run = env.process(engine.run())
    if progress is None:
        env.run(run)
    else:
        _run_with_progress(env, run, engine, sum(a.output_tokens for a in arrivals), progress)
    if scheduler.policies.faults:
        raise PolicyError(f"the run is void: {scheduler.policies.faults[0]}")
    return Result(
        scenario,
        workload,
        engine.metrics,
        engine.account,
        timeline,
        log,
        int(env.now),
        engine.steps,
        scheduler.preemptions,
        engine.kv_peak,
        scheduler.prefix_hits,
        scheduler.prefix_queries,
        tuple(engine.rejections),
        time.perf_counter() - started,
    )


def _arrive(
    env: simpy.Environment, engine: SimEngine, workload: Workload, scenario: Scenario
) -> Generator[simpy.Event, Any, None]:
    """Submits the workload, in order; request i is the i-th to arrive. In a closed loop clients wait for each other."""
    caching = scenario.engine_config().enable_prefix_caching
    stop = (END,) if scenario.workload.stop == "eos" else ()
    most = scenario.workload.max_concurrency
    for number, arrival in enumerate(workload.arrivals):
        if arrival.arrival_ns > env.now:
            yield env.timeout(arrival.arrival_ns - env.now)
        while most is not None and number - sum(engine.metrics.ended.values()) >= most:
            yield engine.next_end()
        params = SamplingParams(max_tokens=arrival.max_tokens, stop_token_ids=stop)
        prompt = prompt_of(arrival, scenario.seed, number, caching)
        engine.metrics.arrived(number, int(env.now))
        engine.inbox.put(Submit(str(number), prompt, params, arrival.priority))
        engine.notify()
    engine.inbox.close()
    engine.notify()


def _run_with_progress(
    env: simpy.Environment, run: simpy.Process, engine: SimEngine, total: int, progress: Progress
) -> None:
    """Steps the clock, and reports whenever another hundredth of the tokens is out."""
    shown, stride = 0, max(total // 100, 1)
    while not run.processed:
        env.step()
        if engine.metrics.output_tokens - shown >= stride:
            shown = engine.metrics.output_tokens
            progress(shown, total)
    progress(total, total)
