"""Predicts a recorded run: its arrivals and lengths in the simulator, at a profile's prices; or replays its decisions.

Both give a `Run` of their own, so that whatever is asked of a recorded run is asked of a predicted one in the same way.

A request that was aborted is aborted when it has got as many tokens as it had: nobody knows whether its user had waited
long enough or read enough, and so every engine has the same work. What is in flight for it then is computed in vain.
Who had got nothing yet is aborted at the time it was, and as it arrives where the run does not tell the time.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray

from asyncsched.errors import ConfigError
from asyncsched.pipeline import Abort, Command, Inbox, Submit
from asyncsched.plan import StepPlan
from asyncsched.request import FinishReason, SamplingParams
from asyncsched.run_log import Entry, RunLog
from asyncsched.runs import UNKNOWN, IntArray, RequestLog, Run
from asyncsched.scheduler import Scheduler
from asyncsched.timeline import Timeline
from sim.engine import END, TEXT, SimEngine
from sim.measured import Heat, MeasuredCosts, longest_context
from sim.profile import Profile

NOWHERE = 2**40  # the position of an END that is never reached


def predict(run: Run, profile: Profile, *, seed: int | None = None, depth: int | None = None, **engine: Any) -> Run:
    """The run's requests, arriving when they did, on an engine with its settings, or others.

    seed   draws jitter from the profile's tables; None is none

    Raises ConfigError where the run does not say what the engine had (the KV block count, say).
    """
    changes = engine if depth is None else {**engine, "depth": depth}
    timeline = Timeline()
    simulated, _ = _simulated(run, delayed(profile, run), changes, timeline, seed)
    return _as_run(run, simulated, timeline, (*run.info.engine, *changes))


def predicted_summary(run: Run, profile: Profile, **engine: Any) -> dict[str, Any]:
    """The run's requests on an engine with its settings, or others, in the words of a scenario's summary. The profile
    has the run's host delay already. `aborted_tokens` were computed for requests that had been aborted. Raises
    ConfigError as `predict` does."""
    simulated, aborted_tokens = _simulated(run, profile, engine, None, None)
    metrics, account, log = simulated.metrics, simulated.account, simulated.log
    assert log is not None  # `_simulated` gave it one
    seconds = (log.last_delivery_ns or 0) / 1e9
    return {
        "depth": simulated.scheduler.config.depth,
        "makespan_s": seconds,
        "steps": simulated.steps,
        "gpu_active": account.busy["compute"] / 1e9 / seconds if seconds else 0.0,
        "busy_s": {lane: ns / 1e9 for lane, ns in account.busy.items()},
        "requests": metrics.num_requests,
        "rejected": metrics.ended[FinishReason.REJECTED],
        "rejections": list(simulated.rejections),
        "aborted": metrics.ended[FinishReason.ABORT],
        "output_tokens": metrics.output_tokens,
        "output_throughput": metrics.output_tokens / seconds if seconds else 0.0,
        **metrics.summary(),
        "preemptions": simulated.scheduler.preemptions,
        "overshoot_tokens": metrics.overshoot_tokens,
        "aborted_tokens": aborted_tokens,
        "notes": list(metrics.notes),
    }


def delayed(profile: Profile, run: Run) -> Profile:
    """The profile with the busy-wait that the run's host had in each step."""
    delay_us = run.info.host_delay_us + profile.host.delay_us
    return profile.model_copy(update={"host": profile.host.model_copy(update={"delay_us": delay_us})})


def _simulated(
    run: Run, profile: Profile, settings: dict[str, Any], timeline: Timeline | None, seed: int | None
) -> tuple[SimEngine, int]:
    """The engine that has served the run's requests, and how many tokens it computed for those that had been aborted.
    `settings` are those in which it differs from the run's."""
    config = run.info.engine_config(**settings)
    scheduler = Scheduler(config)
    env = simpy.Environment(initial_time=0)
    driver = _Driver(run)
    costs = MeasuredCosts(profile, depth=config.depth, seats=config.max_num_seqs, seed=seed)
    simulated = SimEngine(
        env,
        scheduler,
        costs,
        timeline=timeline,
        on_delivery=driver.hand_over,
        on_collect=driver.collected if "abort" in run.requests.finish else None,
    )
    simulated.log = log = RunLog(scheduler)
    simulated.inbox.observer = log.entered
    env.process(driver.serve(env, simulated))
    env.run(env.process(simulated.run()))
    return simulated, driver.aborted_tokens


def replay(run: Run, on_plan: Callable[[StepPlan], None] | None = None) -> tuple[str, ...]:
    """The decisions of a scheduler into which everything enters before the same plans as in the run. `on_plan` is shown
    the plans."""
    entered = run.requests.entered_plan
    if len(entered) and (entered == UNKNOWN).any():
        raise ConfigError("requests.entered_plan", None, f"run {run.info.name} does not say when requests entered")
    config = run.info.engine_config()
    scheduler = Scheduler(config)
    env = simpy.Environment(initial_time=0)
    costs = MeasuredCosts(Profile(), depth=config.depth, seats=config.max_num_seqs, seed=None)
    engine = SimEngine(env, scheduler, costs, on_plan=on_plan)
    engine.log = log = RunLog(scheduler)
    engine.inbox = _ReplayInbox(_commands(run.requests), lambda: Entry(scheduler.plans, log.commits))
    for last_position in _last_positions(run.requests).tolist():
        engine.arrived(last_position)
    env.run(env.process(engine.run()))
    return log.decisions()


def longest_contexts(run: Run) -> IntArray:
    """KV positions of the longest decode of each step, from a replay. Where the run cannot be replayed, or not to the
    same decisions, the mean over the step's sequences, which is the least that it can be; 0 without decodes."""
    steps, window = run.steps, run.info.engine.get("sliding_window")
    mean = np.where(steps["num_decodes"] > 0, -(-steps["kv_tokens"] // np.maximum(steps["num_seqs"], 1)), 0)
    if not run.decisions or (run.requests.entered_plan == UNKNOWN).any():
        return mean
    longest: list[int] = []
    same = replay(run, lambda plan: longest.append(longest_context(plan, window))) == run.decisions
    return np.array(longest, dtype=np.int64) if same and len(longest) == len(steps) else mean


def heats(run: Run, hot_ms: float) -> NDArray[np.float64]:
    """What `Heat` says when each step began; 0 of steps that computed nothing."""
    steps, heat = run.steps, Heat(hot_ms)
    found = np.zeros(len(steps))
    starts, ends = steps.start("compute").tolist(), steps.end("compute").tolist()
    prefilled = steps["num_prefill_tokens"].tolist()
    for row in np.flatnonzero(steps.has("compute")).tolist():
        found[row] = heat.at(starts[row])
        heat.computed(prefilled[row], starts[row], ends[row])
    return found


def seats(run: Run) -> int:
    """How many decodes a captured step of the run may have."""
    return int(run.info.engine.get("max_num_seqs") or run.steps["num_seqs"].max(initial=1))


class _ReplayInbox(Inbox):
    """Hands out each command when as many plans and commits have been made as it entered after."""

    def __init__(self, commands: list[tuple[Entry, Command]], now: Callable[[], Entry]) -> None:
        super().__init__()
        self._due = commands[::-1]
        self._now = now
        self.closed = True

    def take(self) -> Command | None:
        if self._due and self._due[-1][0] <= self._now():
            return self._due.pop()[1]
        return None

    def __len__(self) -> int:
        return len(self._due)


def _commands(requests: RequestLog) -> list[tuple[Entry, Command]]:
    """What entered, in order; requests before aborts that entered at the same point."""
    commands: list[tuple[Entry, Command]] = []
    for number, request_id in enumerate(requests.request_id):
        entry = Entry(int(requests.entered_plan[number]), int(requests.entered_commits[number]))
        commands.append((entry, _submit(requests, number)))
        if requests.aborted_plan[number] != UNKNOWN:
            entry = Entry(int(requests.aborted_plan[number]), int(requests.aborted_commits[number]))
            commands.append((entry, Abort(request_id)))
    return sorted(commands, key=lambda one: (one[0], isinstance(one[1], Abort)))


def _submit(requests: RequestLog, number: int) -> Submit:
    """A request that ends after as many tokens as it did."""
    stopped = requests.finish[number] not in ("length", "rejected")
    params = SamplingParams(max_tokens=int(requests.max_tokens[number]), stop_token_ids=(END,) if stopped else ())
    prompt = np.broadcast_to(np.int32(TEXT), (int(requests.prompt_tokens[number]),))
    return Submit(requests.request_id[number], prompt, params, int(requests.priority[number]))


def _aborted(requests: RequestLog) -> NDArray[np.bool_]:
    return np.array([finish == "abort" for finish in requests.finish], dtype=np.bool_)


def _last_positions(requests: RequestLog) -> IntArray:
    """Where the last token of each request stands. One that was aborted ends by that."""
    last = requests.prompt_tokens + np.maximum(requests.output_tokens, 1) - 1
    return np.where(_aborted(requests), NOWHERE, last)


def _early_aborts(run: Run, submitted: IntArray) -> list[tuple[int, int]]:
    """When each request was aborted that had got nothing, and its number: before the plan that came next."""
    requests, plans = run.requests, run.steps["plan"]
    early = []
    for number in np.flatnonzero(_aborted(requests) & (requests.output_tokens == 0)).tolist():
        plan, at = int(requests.aborted_plan[number]), 0
        if plan != UNKNOWN and len(plans):
            row = int(np.searchsorted(plans, plan))
            at = int(run.steps.start("plan")[row]) if row < len(plans) else run.info.makespan_ns
        early.append((max(at, int(submitted[number])), number))
    return early


class _Driver:
    """Who submits requests and aborts them, in the thread that runs the engine, as a recorder does: what arrives while
    the engine works is handed over when something is delivered, which is behind the launch of the next step."""

    def __init__(self, run: Run) -> None:
        requests = run.requests
        self._requests = requests
        self._arrived: list[Submit | Abort] = []
        submitted = np.maximum.accumulate(
            requests.arrival_ns
        )  # in the order of the log, whose numbers the core has too
        submits = [(at, False, number) for number, at in enumerate(submitted.tolist())]
        self._events = sorted([*submits, *((at, True, number) for at, number in _early_aborts(run, submitted))])
        last = requests.prompt_tokens + requests.output_tokens - 1
        self._until = np.where(_aborted(requests) & (requests.output_tokens > 0), last, NOWHERE)
        self._coming = True
        self.aborted_tokens = 0

    def serve(self, env: simpy.Environment, engine: SimEngine) -> Generator[simpy.Event, Any, None]:
        self._engine = engine
        last_positions = _last_positions(self._requests).tolist()
        for at, aborted, number in self._events:
            if at > env.now:
                yield env.timeout(at - env.now)
            if aborted:
                self._arrived.append(Abort(self._requests.request_id[number]))
            else:
                engine.arrived(last_positions[number])
                self._arrived.append(_submit(self._requests, number))
            if not engine.scheduler.has_requests:
                self.hand_over()
        self._coming = False
        if not self._arrived:
            self.hand_over()

    def collected(self, plan: StepPlan) -> None:
        """Aborts whose request has got its last token now: they enter when that is committed."""
        rows, sampled = self._engine.scheduler.rows, plan.sampled
        live = rows.live[sampled]
        self.aborted_tokens += int(np.count_nonzero(~live & ~rows.stopped[sampled]))
        numbers = rows.request[sampled[live]]
        for number in numbers[plan.sampled_ends[live] >= self._until[numbers]].tolist():
            self._engine.inbox.put(Abort(self._requests.request_id[number]))

    def hand_over(self) -> None:
        for command in self._arrived:
            self._engine.inbox.put(command)
        self._arrived.clear()
        if not self._coming:
            self._engine.inbox.close()
        self._engine.notify()


def _as_run(run: Run, engine: SimEngine, timeline: Timeline, settings: Iterable[str]) -> Run:
    log = engine.log
    assert log is not None  # `predict` gave it one
    last = log.last_delivery_ns
    graphs = bool(len(run.steps) and run.steps["captured"].any())
    info = replace(
        run.info,
        source="simulated",
        engine={name: getattr(engine.scheduler.config, name) for name in settings},
        makespan_ns=0 if last is None else last,
        preemptions=log.preemptions,
        notes=(),
    )
    return Run(
        info=info,
        requests=log.requests(run.requests.arrival_ns.tolist(), timeline.spans, 0),
        steps=log.steps(timeline.spans, 0, lambda plan: graphs and plan.bucket + plan.mixed_bucket > 0),
        decisions=log.decisions(),
    )
