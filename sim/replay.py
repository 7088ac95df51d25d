"""A workload that is known request by request, run through the simulator, and which steps each request was in.

The scheduler, the pool and the loop are the project's own; only the price of a step comes from outside. Steps and times
belong to the simulation, and nothing measured enters it but arrivals and lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import numpy as np
import simpy
from numpy.typing import NDArray

from asyncsched.config import EngineConfig
from asyncsched.errors import ConfigError
from asyncsched.metrics import ServingMetrics
from asyncsched.pipeline import Submit
from asyncsched.plan import StepPlan, StepShape
from asyncsched.request import SamplingParams
from asyncsched.runs import UNKNOWN, IntArray
from asyncsched.scheduler import Scheduler
from sim.costs import CostModel
from sim.engine import SimEngine
from sim.prompts import prompt_of
from sim.workload import Arrival

NO_STEP = -1


class Workload(NamedTuple):
    """Requests in order of arrival, int64[n] each."""

    arrival_ns: IntArray
    prompt_tokens: IntArray
    output_tokens: IntArray


class Replayed(NamedTuple):
    """Per request: admitted, first and last are numbers of steps, NO_STEP where it never came to that; first_ns and
    last_ns are UNKNOWN then. Per step: its shape, when it was planned, when its forward pass ended."""

    first_ns: IntArray
    last_ns: IntArray
    admitted: IntArray
    first: IntArray
    last: IntArray
    shapes: list[StepShape]
    planned_ns: IntArray
    ended_ns: IntArray
    preemptions: int
    kv_peak: int


def replay(
    workload: Workload, config: EngineConfig, costs: CostModel, *, until: NDArray[np.int64] | None = None
) -> Replayed:
    """Runs the workload to its end, or until request i has got `until[i]` tokens for every i. Raises ConfigError for a
    request that can never run."""
    scheduler = Scheduler(config)
    count = len(workload.arrival_ns)
    env = simpy.Environment(initial_time=0)
    steps = _Steps(workload)
    metrics = ServingMetrics(most_requests=count)  # which are all there in the end
    engine = SimEngine(env, scheduler, costs, metrics=metrics, leaps=False, on_plan=steps.note)
    steps.host_ns = lambda: engine.host_ns
    env.process(_arrive(env, engine, workload, config.enable_prefix_caching))
    process = env.process(engine.run())
    if until is None:
        env.run(process)
    else:
        for number in np.flatnonzero(until > 0).tolist():
            while not process.processed and not _has(engine, number, int(until[number])):
                env.step()
    if engine.rejections:
        raise ConfigError("num_blocks", config.num_blocks, engine.rejections[0])
    requests = metrics.requests
    first_ns, last_ns = (np.full(count, UNKNOWN, dtype=np.int64) for _ in range(2))
    first_ns[: requests.count] = requests.first_ns[: requests.count]
    done = np.flatnonzero(requests.num_tokens[: requests.count] == workload.output_tokens[: requests.count])
    last_ns[done] = requests.last_ns[done]
    planned_ns = np.array(steps.planned_ns, dtype=np.int64)
    return Replayed(
        first_ns,
        last_ns,
        steps.admitted,
        steps.first,
        steps.last,
        steps.shapes,
        planned_ns,
        _ended(planned_ns, [costs.forward_ns(shape, step) for step, shape in enumerate(steps.shapes)]),
        scheduler.preemptions,
        engine.kv_peak,
    )


class _Steps:
    """Notes of every plan which requests it admits, and whose first or last token it samples."""

    host_ns: Callable[[], int]
    """The host's own time, which may run ahead of the environment's."""

    def __init__(self, workload: Workload) -> None:
        count = len(workload.arrival_ns)
        self.admitted, self.first, self.last = (np.full(count, NO_STEP, dtype=np.int64) for _ in range(3))
        self.shapes: list[StepShape] = []
        self.planned_ns: list[int] = []
        self._prompt = workload.prompt_tokens
        self._end = workload.prompt_tokens + workload.output_tokens - 1

    def note(self, plan: StepPlan) -> None:
        self.shapes.append(StepShape.of(plan))
        self.planned_ns.append(self.host_ns())
        chunks = plan.requests[plan.num_decodes :]
        self.admitted[chunks[self.admitted[chunks] == NO_STEP]] = plan.step
        sampled, ends = plan.requests[plan.sampled_at], plan.sampled_ends
        self.first[sampled[ends == self._prompt[sampled]]] = plan.step
        self.last[sampled[ends == self._end[sampled]]] = plan.step


def _ended(planned_ns: IntArray, forward_ns: list[int]) -> IntArray:
    """Where nothing but forward passes takes time, one starts when it is planned or when the one before it ends."""
    ended, free = np.zeros(len(planned_ns), dtype=np.int64), 0
    for step, (planned, forward) in enumerate(zip(planned_ns.tolist(), forward_ns, strict=True)):
        ended[step] = free = max(planned, free) + forward
    return ended


def _has(engine: SimEngine, number: int, tokens: int) -> bool:
    requests = engine.metrics.requests
    return number < requests.count and int(requests.num_tokens[number]) >= tokens


def _arrive(
    env: simpy.Environment, engine: SimEngine, workload: Workload, caching: bool
) -> Generator[simpy.Event, Any, None]:
    rows = zip(*(column.tolist() for column in workload), strict=True)
    for number, (arrival_ns, prompt_tokens, output_tokens) in enumerate(rows):
        if arrival_ns > env.now:
            yield env.timeout(arrival_ns - env.now)
        arrival = Arrival(arrival_ns, prompt_tokens, output_tokens, output_tokens, 0)
        prompt = prompt_of(arrival, 0, number, caching)  # no two share a prefix; who was preempted finds its own blocks
        request = Submit(str(number), prompt, SamplingParams(max_tokens=output_tokens))
        engine.submit(request, prompt_tokens + output_tokens - 1)
    engine.inbox.close()
    engine.notify()
