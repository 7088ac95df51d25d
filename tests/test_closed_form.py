"""Simulated times against formulas that know nothing of the simulator.

`makespan` is a max-plus recurrence: every operation starts when the last of those it must follow has ended. Who must
follow whom is read from the design, not from the programs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import simpy
from harness import Ask, Entry, Run
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncsched.config import EngineConfig
from asyncsched.pipeline import Submit
from asyncsched.plan import StepShape
from asyncsched.request import SamplingParams
from asyncsched.scheduler import Scheduler
from asyncsched.timeline import LANES, Timeline
from sim.costs import Around, DecodePricer, DecodePrices
from sim.engine import SimEngine
from sim.run import Result, simulate
from sim.scenario import Scenario

KINDS = ("plan", "fill", "h2d", "launch", "forward", "d2h", "commit")
DEPTHS = (1, 2, 3, 4)


class Times(NamedTuple):
    """How long each operation of a step takes, in nanoseconds."""

    plan: int
    fill: int
    h2d: int
    launch: int
    forward: int
    d2h: int
    commit: int


def makespan(steps: list[Times], depth: int, output_sync: int = 0) -> int:
    """When the last step is committed. `output_sync` holds the compute lane after each step.

    The host plans, fills and launches step k once step k - depth is committed, and commits a step as soon as no further
    step may be launched before it. Each lane takes its operations in order.
    """
    never = 0
    count = len(steps)
    filled, launched, copied, computed, returned, committed = ([never] * count for _ in range(6))
    for k in range(count + depth):
        if 0 <= k < count:
            host_free = max(launched[k - 1] if k else never, committed[k - depth] if k >= depth else never)
            t = steps[k]
            filled[k] = host_free + t.plan + t.fill
            copied[k] = max(filled[k], copied[k - 1] if k else never) + t.h2d
            launched[k] = filled[k] + t.launch
            lane_free = computed[k - 1] + output_sync if k else never
            computed[k] = max(copied[k], launched[k], lane_free) + t.forward
            returned[k] = max(computed[k], launched[k], returned[k - 1] if k else never) + t.d2h
        oldest = k - depth + 1
        if 0 <= oldest < count:
            host_free = max(launched[min(k, count - 1)], committed[oldest - 1] if oldest else never)
            committed[oldest] = max(host_free, returned[oldest]) + steps[oldest].commit
    return committed[-1]


class TableCosts:
    """Prices by step number, whatever the step's shape."""

    def __init__(self, steps: list[Times], output_sync: int = 0) -> None:
        self.steps = steps
        self.output_sync = output_sync

    def host_ns(self, kind: str, shape: StepShape, step: int) -> int:
        return int(getattr(self.steps[step], kind))

    def h2d_ns(self, shape: StepShape, step: int) -> int:
        return self.steps[step].h2d

    def d2h_ns(self, shape: StepShape, step: int) -> int:
        return self.steps[step].d2h

    def forward_ns(self, shape: StepShape, step: int) -> int:
        return self.steps[step].forward

    def output_sync_ns(self) -> int:
        return self.output_sync

    def decode_pricer(self, shape: StepShape) -> DecodePricer:
        return self.decode_prices

    def decode_prices(self, kv_tokens: int, step: int, count: int) -> DecodePrices:
        steps = self.steps[step : step + count]
        around = [Around(*[getattr(times, kind) for kind in Around._fields]) for times in steps]
        return DecodePrices(around[:1] if len(set(around)) == 1 else around, [times.forward for times in steps])


def simulated(steps: list[Times], depth: int, batch: int = 1, output_sync: int = 0) -> tuple[int, SimEngine, list[str]]:
    """Makespan of `batch` requests of one prompt token that take as many steps as there are times for."""
    env, log = simpy.Environment(), []
    config = EngineConfig(depth=depth, max_num_seqs=batch, max_model_len=len(steps) + 1, num_blocks=64)
    costs = TableCosts(steps, output_sync)
    engine = SimEngine(env, Scheduler(config, log=log), costs, timeline=Timeline())
    for number in range(batch):
        engine.arrived(len(steps))
        engine.inbox.put(Submit(str(number), np.zeros(1, dtype=np.int32), SamplingParams(max_tokens=len(steps))))
    engine.inbox.close()
    env.run(env.process(engine.run()))
    assert engine.steps == len(steps)
    return int(env.now), engine, log


def constant(times: Times, count: int) -> list[Times]:
    return [times] * count


def critical_path(times: Times) -> int:
    """From plan to commit; the launch and the copy of the inputs run side by side."""
    return times.plan + times.fill + max(times.h2d, times.launch) + times.forward + times.d2h + times.commit


def random_times(random: np.random.Generator) -> Times:
    """Each operation from nothing to a millisecond; a third of them free, so that ties happen."""
    times = random.integers(0, 1_000_000, len(KINDS)) * (random.integers(0, 3, len(KINDS)) > 0)
    return Times(*times.tolist())


# ---- the recurrence ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
def test_simulated_makespan_equals_the_recurrence_for_1000_constant_lane_times(depth):
    random = np.random.default_rng(depth)
    for _ in range(1000):
        steps = constant(random_times(random), int(random.integers(1, 11)))
        assert simulated(steps, depth)[0] == makespan(steps, depth), steps


@pytest.mark.parametrize("depth", DEPTHS)
def test_simulated_makespan_equals_the_recurrence_when_every_step_differs(depth):
    random = np.random.default_rng(10 + depth)
    for _ in range(100):
        steps = [random_times(random) for _ in range(int(random.integers(1, 16)))]
        held = int(random.integers(0, 2) * random.integers(0, 1_000_000))
        assert simulated(steps, depth, batch=3, output_sync=held)[0] == makespan(steps, depth, held), steps


def test_the_recurrence_by_hand():
    """Two steps of 1 + 1 host, 2 up, 1 launch, 5 forward, 3 down, 1 commit: 13 alone."""
    step = Times(1, 1, 2, 1, 5, 3, 1)
    assert makespan([step], 1) == makespan([step], 3) == 13
    assert makespan([step] * 2, 1) == 26
    assert makespan([step] * 2, 2) == 18  # the second forward follows the first at once


@settings(max_examples=60)
@given(
    times=st.builds(Times, *(st.integers(0, 1000) for _ in KINDS)),
    count=st.integers(1, 40),
    depth=st.sampled_from(DEPTHS),
)
def test_the_period_is_that_of_the_slowest_lane_or_of_a_slot(times, count, depth):
    """In the long run a step takes what the slowest lane takes, or a `depth`-th of its way from plan to commit."""
    host = times.plan + times.fill + times.launch + times.commit
    period = max(host, times.h2d, times.forward, times.d2h, critical_path(times) / depth)
    total = simulated(constant(times, count), depth)[0]
    assert count * period <= total + 1e-6
    assert total <= count * period + critical_path(times)


# ---- I10 -------------------------------------------------------------------------------------------------------------

durations = st.builds(Times, *(st.integers(0, 1000) for _ in KINDS))


@settings(max_examples=60)
@given(times=durations, count=st.integers(2, 12), depth=st.sampled_from(DEPTHS))
def test_a_step_takes_at_least_as_long_as_the_slowest_lane(times, count, depth):
    total, engine, _ = simulated(constant(times, count), depth)
    host = times.plan + times.fill + times.launch + times.commit
    assert total >= count * max(host, times.h2d, times.forward, times.d2h)
    assert engine.account.limiting_lane in {
        lane for lane, busy in engine.account.busy.items() if busy == max(engine.account.busy.values())
    }


@settings(max_examples=60)
@given(times=durations, count=st.integers(1, 12))
def test_a_synchronous_step_takes_all_of_the_critical_path(times, count):
    assert simulated(constant(times, count), 1)[0] == count * critical_path(times)


@settings(max_examples=60)
@given(steps=st.lists(durations, min_size=1, max_size=12))
def test_more_depth_is_never_slower_over_equal_plans(steps):
    totals, logs = [], []
    for depth in DEPTHS:
        total, _, log = simulated(steps, depth)
        totals.append(total)
        logs.append([line.partition(": ")[2].partition(" carry ")[0] for line in log if line.startswith("step")])
    assert all(log == logs[0] for log in logs)
    assert totals == sorted(totals, reverse=True)


# ---- where the time goes ---------------------------------------------------------------------------------------------


def scenario(**changes: object) -> Scenario:
    data: dict[str, object] = {
        "mode": "async",
        "engine": {"max_num_seqs": 8, "max_num_batched_tokens": 64, "num_blocks": 40, "max_model_len": 128},
        "host": {"plan_us": 20.0, "plan_us_per_seq": 1.0, "fill_us": 10.0, "launch_us": 15.0, "commit_us": 9.0},
        "copy": {"h2d_latency_us": 5.0, "d2h_latency_us": 4.0, "h2d_gb_s": 0.5},
        "gpu": {"kind": "constant", "step_us": 60.0, "us_per_prefill_token": 1.5, "us_per_kv_token": 0.02},
        "workload": {
            "kind": "synthetic",
            "num_requests": 24,
            "prompt": {"kind": "uniform", "min_tokens": 1, "max_tokens": 40},
            "output": {"kind": "uniform", "min_tokens": 1, "max_tokens": 30},
            "arrivals": {"kind": "poisson", "rate_per_s": 3000.0},
        },
    }
    return Scenario.from_dict({**data, **changes})


VARIANTS = {
    "async": {},
    "sync": {"mode": "sync"},
    "static": {"mode": "static"},
    "depth 4": {"mode": "depth=4"},
    "rare arrivals": {"workload": "slow"},
    "jitter": {"jitter": {"kind": "lognormal", "host_sigma": 0.5, "copy_sigma": 1.0, "gpu_sigma": 0.3}},
    "exposed output": {"overlap": {"gpu_contention": 1.1, "exposed_output_sync_us": 25.0}},
    "free host": {"host": {}},
    "free gpu": {"gpu": {"kind": "constant", "step_us": 0.0}},
    "everything free": {"gpu": {"kind": "constant", "step_us": 0.0}, "host": {}, "copy": {}},
    "few blocks": {"engine": {"max_num_seqs": 8, "max_num_batched_tokens": 16, "num_blocks": 6, "max_model_len": 128}},
}


def variant(name: str, seed: int) -> Scenario:
    changes = dict(VARIANTS[name])
    if changes.get("workload") == "slow":
        changes["workload"] = {**scenario().to_dict()["workload"], "arrivals": {"kind": "poisson", "rate_per_s": 200.0}}
    return scenario(seed=seed, **changes)


def account_of(result: Result) -> int:
    return result.account.busy["compute"] + sum(result.account.idle.values())


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_active_and_idle_time_add_up_to_the_makespan(name, seed):
    result = simulate(variant(name, seed), spans=True)
    assert account_of(result) == result.makespan_ns
    assert all(idle >= 0 for idle in result.account.idle.values())
    assert result.timeline is not None
    ends = dict.fromkeys(LANES, 0)
    busy = dict.fromkeys(LANES, 0)
    for span in result.timeline.spans:
        assert span.start_ns >= ends[span.lane], "two spans of a lane overlap"
        assert span.end_ns >= span.start_ns
        ends[span.lane] = span.end_ns
        if span.name != "collect":  # the host waits
            busy[span.lane] += span.end_ns - span.start_ns
    assert busy == result.account.busy
    assert max(ends.values()) <= result.makespan_ns
    assert result.metrics.output_tokens == sum(a.output_tokens for a in result.scenario.workload_arrivals())


def test_the_variants_show_every_cause_of_idling():
    idle = {name: simulate(variant(name, 0)).account.idle for name in VARIANTS}
    assert idle["sync"]["host"] > idle["async"]["host"] > idle["free host"]["host"]
    assert idle["exposed output"]["output_sync"] > 0 == idle["async"]["output_sync"]
    assert idle["rare arrivals"]["no_work"] > 1000 * 1000
    assert idle["free host"]["h2d"] > 0
    assert simulate(variant("few blocks", 0)).preemptions > 0


def test_an_account_of_one_step_names_every_cause():
    """Host 3 + launch 1, copy until 7: the first 4 ns wait for the host, 3 for the copy, the last for collect."""
    _, engine, _ = simulated([Times(1, 2, 4, 1, 5, 2, 3)], 2)
    assert engine.account.idle == {"host": 4 + 5, "h2d": 3, "output_sync": 0, "no_work": 0}
    assert engine.account.busy == {"host": 7, "h2d": 4, "compute": 5, "d2h": 2}


# ---- I9, I12 ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["async", "jitter", "few blocks"])
def test_a_simulated_run_is_repeatable(name):
    first, second = (simulate(variant(name, 5), decisions=True) for _ in range(2))
    assert first.log == second.log
    assert {**first.summary(), "wall_s": 0} == {**second.summary(), "wall_s": 0}


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_simulator_and_the_faithful_device_take_the_same_decisions(depth):
    """Requests that all come at once and end by length: what the tokens are decides nothing."""
    everything = {"kind": "uniform", "min_tokens": 1, "max_tokens": 20}
    workload = {
        "kind": "synthetic",
        "num_requests": 12,
        "prompt": everything,
        "output": everything,
        "arrivals": {"kind": "all-at-once"},
    }
    engine = {"max_num_seqs": 5, "max_num_batched_tokens": 16, "num_blocks": 14, "block_size": 4, "max_model_len": 48}
    simulation = simulate(scenario(mode=f"depth={depth}", workload=workload, engine=engine), decisions=True)
    asks = [
        Ask(str(number), (0,) * arrival.prompt_tokens, SamplingParams(max_tokens=arrival.max_tokens))
        for number, arrival in enumerate(simulation.scenario.workload_arrivals())
    ]
    run = Run(simulation.scenario.engine_config(), [Entry(0, ask) for ask in asks]).run()
    assert simulation.preemptions > 0
    assert simulation.log == run.log
