"""Engines of one scenario in one SimPy environment, and the requests that come to them, through a router if there are
several. Engines know nothing of each other.

At one moment requests arrive and are routed first, then engines act; a client that waited for an end asks again a
nanosecond later. So engines never affect each other at one moment, and the order in which they were made is nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator, Iterable, Sequence
from functools import lru_cache, partial

import simpy

from asyncsched.metrics import MOST_REQUESTS, ServingMetrics
from asyncsched.pipeline import Submit
from asyncsched.request import Finished, SamplingParams
from asyncsched.scheduler import Scheduler
from asyncsched.timeline import Timeline
from sim.engine import END, SimEngine
from sim.prompts import prompt_of
from sim.routers import Replica, Routed, ask, load_router
from sim.scenario import Scenario
from sim.workload import Arrival, Workload

MOST_GAPS = 1 << 20  # entries about inter-token latencies, per run


class Fleet:
    """One engine per replica of the scenario. `order` is the order in which they are made, by number."""

    def __init__(
        self,
        env: simpy.Environment,
        scenario: Scenario,
        *,
        leaps: bool = True,
        spans: bool = False,
        decisions: bool = False,
        order: Iterable[int] | None = None,
    ) -> None:
        count = scenario.replicas.count
        self._env = env
        self._scenario = scenario
        self._router = load_router(scenario.replicas.router)
        self._loads = _Loads(count)
        # Of each replica's requests, in the workload; None when there are too many.
        self.numbers: list[array[int]] | None = [array("q") for _ in range(count)]
        watched = scenario.workload.max_concurrency is not None
        watched |= count > 1 and getattr(self._router, "sees_load", True)
        self._is_watched = watched
        levels = scenario.levels()
        self.logs: list[list[str]] | None = [[] for _ in range(count)] if decisions else None
        config = scenario.engine_config()
        engines = {
            number: SimEngine(
                env,
                Scheduler(config, log=None if self.logs is None else self.logs[number]),
                scenario.costs(number),
                timeline=Timeline() if spans else None,
                leaps=leaps,
                alone=count == 1,
                on_end=partial(self._loads.ended, number) if watched else None,
                metrics=ServingMetrics(
                    most_requests=MOST_REQUESTS, most_gaps=max(MOST_GAPS // count, 1 << 14), levels=levels
                ),
            )
            for number in (range(count) if order is None else order)
        }
        self._runs = {number: env.process(engine.run()) for number, engine in engines.items()}
        self.engines = [engines[number] for number in range(count)]

    def start(self, workload: Workload) -> simpy.Event:
        """Lets the workload arrive. The event happens when all of it has ended."""
        self._env.process(self._arrive(workload))
        if len(self.engines) == 1:
            return self._runs[0]
        return simpy.AllOf(self._env, [self._runs[number] for number in range(len(self.engines))])

    def _arrive(self, workload: Workload) -> Generator[simpy.Event, None, None]:
        """Submits the workload, in order: request i is the i-th to come. In a closed loop clients wait for others."""
        env, most = self._env, self._scenario.workload.max_concurrency
        for number, arrival in enumerate(workload.arrivals):
            if arrival.arrival_ns > env.now:
                yield env.timeout(arrival.arrival_ns - env.now)
            while most is not None and number - self._loads.num_ended >= most:
                yield self._loads.next_end(env)
                yield env.timeout(1)
            self._submit(number, arrival)
        for engine in self.engines:
            engine.inbox.close()
            engine.notify()

    def _submit(self, number: int, arrival: Arrival) -> None:
        scenario = self._scenario
        stop = (END,) if scenario.workload.stop == "eos" else ()
        params = _params(arrival.max_tokens, stop)
        prompt = prompt_of(arrival, scenario.seed, number, scenario.engine["enable_prefix_caching"])
        chosen = 0
        if len(self.engines) > 1:
            routed = Routed(number, int(self._env.now), prompt, arrival.max_tokens, arrival.priority)
            chosen = ask(self._router, routed, self._loads.replicas)
        request = Submit(str(number), prompt, params, arrival.priority)
        if self._is_watched:
            self._loads.came(chosen, request.request_id, arrival.prompt_tokens + arrival.max_tokens)
        if number == MOST_REQUESTS:
            self.numbers = None
            for engine in self.engines:
                engine.metrics.let_go()
        if self.numbers is not None:
            self.numbers[chosen].append(number)
        self.engines[chosen].submit(request, arrival.prompt_tokens + arrival.output_tokens - 1)


class _Loads:
    """What the router sees of each replica, and how many requests have ended. Engines tell it, and it knows none, so
    that the memory of a run is free as soon as nobody looks at the run."""

    def __init__(self, count: int) -> None:
        self.replicas = [Replica(number) for number in range(count)]
        self.num_ended = 0
        self._sizes: dict[str, int] = {}  # prompt and max_tokens of each request that has not ended
        self._next_end: simpy.Event | None = None

    def came(self, number: int, request_id: str, size: int) -> None:
        replica = self.replicas[number]
        replica.num_requests += 1
        replica.num_tokens += size
        self._sizes[request_id] = size

    def ended(self, number: int, notices: Sequence[Finished]) -> None:
        replica = self.replicas[number]
        for notice in notices:
            replica.num_requests -= 1
            replica.num_tokens -= self._sizes.pop(notice.request_id)
        self.num_ended += len(notices)
        if self._next_end is not None:
            self._next_end.succeed()
            self._next_end = None

    def next_end(self, env: simpy.Environment) -> simpy.Event:
        self._next_end = env.event()
        return self._next_end


@lru_cache(maxsize=1 << 16)
def _params(max_tokens: int, stop: tuple[int, ...]) -> SamplingParams:
    """Checking them takes longer than a step."""
    return SamplingParams(max_tokens=max_tokens, stop_token_ids=stop)
