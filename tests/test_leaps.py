"""Leaps against stepping one by one: equal to the nanosecond, to the decision, and to the block in the pool.

Durations are whole microseconds, and commands arrive at the very moments at which a run has something ending, or a
nanosecond beside them, so the boundary between what a plan has seen and what it has not is where the tests look.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import simpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutants.patching import Rewrite

import asyncsched.leaps
import asyncsched.metrics
import asyncsched.stretch
import sim.costs
import sim.course
import sim.engine
import sim.lanes
from asyncsched.config import EngineConfig
from asyncsched.pipeline import (
    Abort,
    Collect,
    Command,
    Deliver,
    Inbox,
    Landed,
    Leap,
    Leaped,
    Pause,
    Resume,
    Submit,
    pipeline,
)
from asyncsched.request import SamplingParams
from asyncsched.scheduler import Scheduler
from asyncsched.timeline import Timeline
from sim.costs import CostModel
from sim.engine import END, SimEngine
from sim.run import simulate
from sim.scenario import Scenario, load_preset


class Entry(NamedTuple):
    """A command and when it arrives. `last` is where the last token of a submitted request will stand."""

    time_ns: int
    command: Command
    last: int = 0


class Case(NamedTuple):
    config: EngineConfig
    scenario: Scenario  # for its prices
    script: tuple[Entry, ...]


def run(case: Case, *, leaps: bool) -> tuple[dict[str, Any], SimEngine]:
    """Everything that a run leaves behind."""
    env, log = simpy.Environment(), []
    scheduler = Scheduler(case.config, log=log)
    scheduler.rows.tokens[:] = 77  # what nobody wrote is seen where it is read
    ended, end = [], scheduler._end
    scheduler._end = lambda *args: ended.append(end(*args)) or ended[-1]
    engine = SimEngine(env, scheduler, prices(case), timeline=Timeline(), leaps=leaps)
    env.process(_world(env, engine, case.script))
    env.run(env.process(engine.run()))
    metrics, rows, pool = engine.metrics, scheduler.rows, scheduler.residency.pool
    table = metrics.requests
    return {
        "log": log,
        "spans": engine.timeline.spans,
        "end": env.now,
        "busy": engine.account.busy,
        "idle": engine.account.idle,
        "steps": engine.steps,
        "kv_peak": engine.kv_peak,
        "counts": scheduler.counts,
        "plans": scheduler.plans,
        "preemptions": scheduler.preemptions,
        "tokens": (metrics.output_tokens, metrics.overshoot_tokens, metrics.ended, engine.rejections),
        "requests": [
            values[: table.count].tolist()
            for values in (table.arrival_ns, table.first_ns, table.last_ns, table.num_tokens, table.completed)
        ],
        "gaps": metrics.gaps().tolist(),
        "ended": [(notice.request_id, notice.reason, notice.token_ids.tolist()) for notice in ended],
        "free": (pool._free, list(pool._cached), pool._block_of, pool._last_use, rows._free),
        "table": rows.table.tolist(),
    }, engine


def prices(case: Case) -> CostModel:
    return case.scenario.costs()


def _world(env: simpy.Environment, engine: SimEngine, script: tuple[Entry, ...]):
    for time_ns, command, last in script:
        if time_ns > env.now:
            yield env.timeout(time_ns - env.now)
        if isinstance(command, Submit):
            engine.arrived(last)
        engine.inbox.put(command)
        engine.notify()
    engine.inbox.close()
    engine.notify()
    yield env.timeout(0)


def check(case: Case) -> SimEngine:
    """Both ways give the same; the engine that leaped."""
    one_by_one, stepped = run(case, leaps=False)
    at_once, leaping = run(case, leaps=True)
    assert not stepped.leaped
    for key, value in one_by_one.items():
        assert at_once[key] == value, key
    return leaping


MICROSECONDS = st.integers(0, 40).map(float)
OFFSETS = [0, 0, 0, -1, 1]


@st.composite
def submissions(draw: st.DrawFn, number: int, block_size: int) -> tuple[Submit, int]:
    """A request with a prompt that others share the start of; it may be ended by its content."""
    prompt = draw(st.integers(1, 24))
    shared = draw(st.integers(0, prompt))
    tokens = np.concatenate((np.arange(10, 10 + shared), np.full(prompt - shared, 100 + number))).astype(np.int32)
    most = draw(st.integers(1, 60))
    stop = draw(st.sampled_from([(), (), (), (END,), (END,), (END, 7)]))
    output = draw(st.integers(1, most)) if stop else most
    params = SamplingParams(max_tokens=most, stop_token_ids=stop)
    return Submit(str(number), tokens, params, draw(st.integers(0, 2))), prompt + output - 1


@st.composite
def scenarios(draw: st.DrawFn, config: EngineConfig) -> Scenario:
    host = {f"{kind}_us": draw(MICROSECONDS) for kind in ("plan", "fill", "launch", "commit")}
    host |= {f"{kind}_us_per_seq": draw(st.sampled_from([0.0, 1.0, 1.3])) for kind in ("plan", "fill", "commit")}
    gpu = draw(
        st.sampled_from(
            [
                {"kind": "constant", "step_us": 0.0},
                {"kind": "constant", "step_us": 30.0, "us_per_decode_seq": 2.0},
                {"kind": "constant", "step_us": 100.0, "us_per_kv_token": 0.7, "us_per_prefill_token": 3.0},
                {"kind": "roofline", "model": "llama-1b", "device": "h200", "memory_efficiency": 0.7},
            ]
        )
    )
    jitter = {"kind": "lognormal", "host_sigma": 0.4, "copy_sigma": 0.3, "gpu_sigma": 0.2}
    return Scenario.from_dict(
        {
            "depth": config.depth,
            "seed": draw(st.integers(0, 3)),
            "host": host,
            "copy": {"h2d_latency_us": draw(MICROSECONDS), "d2h_latency_us": draw(MICROSECONDS), "h2d_gb_s": 0.1},
            "gpu": gpu,
            "overlap": {"gpu_contention": 1.05, "exposed_output_sync_us": draw(st.sampled_from([0.0, 0.0, 7.0]))},
            "jitter": draw(st.sampled_from([{"kind": "none"}, {"kind": "none"}, jitter])),
            "workload": {  # its prices are what is used of it
                "kind": "synthetic",
                "num_requests": 1,
                "prompt": {"kind": "fixed", "tokens": 1},
                "output": {"kind": "fixed", "tokens": 1},
                "arrivals": {"kind": "all-at-once"},
            },
        }
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block_size = draw(st.sampled_from([1, 2, 3, 4, 16]))
    asked = [draw(submissions(number, block_size)) for number in range(draw(st.integers(1, 6)))]
    largest = max(-(-(len(ask.prompt) + ask.params.max_tokens) // block_size) for ask, _ in asked)
    depth = draw(st.integers(1, 4))
    most = draw(st.sampled_from([6, 4, 3, 2, 1]))
    config = EngineConfig(
        depth=depth,
        batching=draw(st.sampled_from(["continuous", "static"])) if depth == 1 else "continuous",
        max_num_seqs=most,
        max_num_batched_tokens=draw(st.sampled_from([64, 64, 16, 5, 2])),
        max_model_len=100,
        block_size=block_size,
        num_blocks=largest * draw(st.sampled_from([1, 1, 2, 6])) + draw(st.integers(0, 3)),
        enable_prefix_caching=draw(st.booleans()),
        enable_chunked_prefill=draw(st.sampled_from([True, True, False])),
        sliding_window=draw(st.sampled_from([None, None, None, 9])),
        decode_buckets=draw(st.sampled_from([(), tuple(b for b in (1, 2, 4) if b <= most)])),
        admission=draw(st.sampled_from(["fcfs", "priority", "shortest-prompt"])),
        victim=draw(st.sampled_from(["latest-arrival", "lowest-priority", "least-progress"])),
        reservation=draw(st.sampled_from(["optimistic", "optimistic", "worst-case"])),
        preemption=draw(st.sampled_from(["recompute", "offload"])),
        num_host_blocks=draw(st.sampled_from([100, 4])),
    )
    scenario = draw(scenarios(config))
    early = draw(st.integers(1, len(asked)))
    script = [Entry(0, *ask) for ask in asked[:early]]
    _, engine = run(Case(config, scenario, tuple(script)), leaps=False)
    ends = sorted({span.end_ns for span in engine.timeline.spans}) or [0]
    for ask in asked[early:]:
        script.append(Entry(_moment(draw, ends), *ask))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        script.append(Entry(_moment(draw, ends), Abort(str(draw(st.integers(0, 6))))))
    if draw(st.integers(0, 5)) == 0:
        moment = _moment(draw, ends)
        script += [Entry(moment, Pause(draw(st.booleans()))), Entry(moment + draw(st.integers(0, 300_000)), Resume())]
    return Case(config, scenario, tuple(sorted(script, key=lambda entry: entry.time_ns)))


def _moment(draw: st.DrawFn, ends: list[int]) -> int:
    return max(ends[draw(st.integers(0, 400)) % len(ends)] + draw(st.sampled_from(OFFSETS)), 0)


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(cases())
def test_leaps_change_nothing(case: Case) -> None:
    check(case)


# ---- fixed runs, and faults planted into leaps ----------------------------------------------------------------------


def fixed_case(
    depth: int,
    *,
    requests: int = 12,
    stop: bool = False,
    jitter: bool = False,
    pause: bool = False,
    abort: bool = False,
    blocks: int = 200,
    parts: int = 9,
    step_us: float = 16.0,
    long_first: bool = False,
    **engine: Any,
) -> Case:
    """Requests of different lengths. The later ones arrive when the earlier ones have something ending, or a
    nanosecond before or after, the first ones after a `parts`-th of what happens, and so on."""
    settings = {"max_num_seqs": 8, "max_model_len": 128, "block_size": 4, "num_blocks": blocks}
    config = EngineConfig(depth=depth, **{**settings, **engine})
    data = {
        "depth": depth,
        "host": {"plan_us": 5.0, "fill_us": 3.0, "launch_us": 2.0, "commit_us": 4.0, "commit_us_per_seq": 0.5},
        "copy": {"h2d_latency_us": 6.0, "d2h_latency_us": 5.0},
        "gpu": {"kind": "constant", "step_us": step_us, "us_per_kv_token": 0.1},
        "overlap": {"exposed_output_sync_us": 1.0},
        "workload": load_preset("h200-llama-8b").to_dict()["workload"],
    }
    if jitter:
        data["jitter"] = {"kind": "lognormal", "host_sigma": 0.8, "copy_sigma": 0.5, "gpu_sigma": 0.5}
    scenario = Scenario.from_dict(data)
    asks = []
    for number in range(requests):
        more = number % 3 + 30 * (long_first and number < 5)
        prompt = np.concatenate((np.arange(9), np.full(more, 50 + number))).astype(np.int32)
        output = 20 + 37 * number % 50
        params = SamplingParams(max_tokens=output + 15 * stop, stop_token_ids=(END,) if stop else ())
        asks.append((Submit(str(number), prompt, params), len(prompt) + output - 1))
    script = [Entry(0, *ask) for ask in asks[:5]]
    _, engine_before = run(Case(config, scenario, tuple(script)), leaps=False)
    ends = sorted({span.end_ns for span in engine_before.timeline.spans if span.lane == "host"})
    for place, ask in enumerate(asks[5:]):
        script.append(Entry(ends[(place + 1) * len(ends) // parts] + (0, 0, -1, 1)[place % 4], *ask))
    if pause:
        script += [Entry(ends[len(ends) // 2], Pause()), Entry(ends[-1] * 2, Resume())]
    if abort:
        script.append(Entry(ends[len(ends) // 2], Abort("1")))
    return Case(config, scenario, tuple(sorted(script, key=lambda entry: entry.time_ns)))


CASES = {
    "sync": lambda: fixed_case(1),
    "sync, paused for a while": lambda: fixed_case(1, requests=5, pause=True),
    "async, one is aborted": lambda: fixed_case(2, requests=5, abort=True),
    "one request": lambda: fixed_case(2, requests=1),
    "async": lambda: fixed_case(2),
    "async, the GPU is the limit": lambda: fixed_case(2, step_us=60.0),
    "three in flight, the GPU is the limit": lambda: fixed_case(3, step_us=60.0, enable_prefix_caching=True),
    "async, content stops, jitter": lambda: fixed_case(2, stop=True, jitter=True),
    "three in flight, jitter, prefixes": lambda: fixed_case(3, jitter=True, enable_prefix_caching=True),
    "four in flight, content stops": lambda: fixed_case(4, stop=True),
    "few seats, a queue": lambda: fixed_case(2, max_num_seqs=3),
    "few blocks, offload": lambda: fixed_case(2, blocks=45, preemption="offload", enable_prefix_caching=True),
    "few blocks, cached ones reused": lambda: fixed_case(2, blocks=60, enable_prefix_caching=True, max_num_seqs=3),
    "few blocks, offload, no prefixes": lambda: fixed_case(2, blocks=45, preemption="offload"),
    "three in flight, few seats": lambda: fixed_case(3, max_num_seqs=3),
    "short prompts behind long ones": lambda: fixed_case(2, max_num_seqs=4, long_first=True),
    "padded, many end": lambda: fixed_case(2, requests=5, decode_buckets=(1, 2, 4, 8)),
    "sync, many end": lambda: fixed_case(1, requests=5, jitter=True),
    "three in flight, many end": lambda: fixed_case(3, requests=6),
    "four in flight": lambda: fixed_case(4, requests=9, parts=10, max_num_seqs=16),
    "static": lambda: fixed_case(1, batching="static"),
}


@pytest.mark.parametrize("name", CASES)
def test_fixed_runs_leap_and_stay_equal(name: str) -> None:
    engine = check(CASES[name]())
    assert engine.leaped > 0.3 * engine.steps


class Fault(NamedTuple):
    """`old` is `new` in the source of `owner.name`."""

    what: str
    owner: Any
    name: str
    old: str
    new: str


LANES, COURSE, ENGINE = sim.lanes.Lanes, sim.course.Course, sim.engine.SimEngine
LEAPS, PASSAGE = asyncsched.leaps, asyncsched.leaps._Passage
STRETCH, METRICS = asyncsched.stretch.Stretch, asyncsched.metrics.ServingMetrics
FAULTS = (
    Fault("a plan at the moment of an arrival leaps over it", COURSE, "step", "host >= until", "host > until"),
    Fault("and so it does where many are passed", COURSE, "glide", "begins, until,", "begins, until + 1,"),
    Fault("input copies do not queue", COURSE, "step", "host if host > h2d else h2d", "host"),
    Fault(
        "the compute lane is not held for the output", COURSE, "step", "gate if gate > compute else compute", "compute"
    ),
    Fault("output copies do not queue", COURSE, "step", "compute if compute > d2h else d2h", "compute"),
    Fault("the host does not wait for the step", COURSE, "step", "if done > host:", "if False:"),
    Fault("idle time is counted again", COURSE, "step", "idle = 0", "pass"),
    Fault("waiting for input counts as the host's", COURSE, "step", "start - ready", "start - free"),
    Fault("the end of a step is forgotten", LANES, "decode", ", course.last", ", account.last_end_ns"),
    Fault(
        "steps land with their slots exchanged", LANES, "decode", "stretch.slots[place %", "stretch.slots[(place + 1) %"
    ),
    Fault("a step lands without its output", LANES, "decode", "returned(slot)] = returned", "returned(slot)] += 0"),
    Fault("prices of the step before", LANES, "decode", "stretch.step + first", "stretch.step + first - 1"),
    Fault("KV read starts a step early", LANES, "decode", "n * (first + 1)", "n * first"),
    Fault("commits of others", ENGINE, "_leap", "self._shapes[plan.slot], plan.step)", "self._shapes[0], plan.step)"),
    Fault(
        "leaps over the end of a request", ENGINE, "_leap", "[by_content])) + ahead - 1", "[by_content])) + ahead + 1"
    ),
    Fault("KV peak is not looked at", ENGINE, "_land", "max(self.kv_peak, passed.most_held)", "self.kv_peak"),
    Fault("tokens at the times before", ENGINE, "_land", "[1 + early : 1 + early +", "[early : early +"),
    Fault("who ends on the way is not counted", ENGINE, "_land", "metrics.finished(passed.finished)", "pass"),
    Fault("the last token is like the others", ENGINE, "_leaped", ">= last)", "> last)"),
    Fault("what waits is handed over with the rest", ENGINE, "_land", "output, launched[0])", "output, launched[-1])"),
    Fault("early outputs a launch too soon", ENGINE, "_land", "launched[1:]", "launched"),
    Fault("the last output is of nobody", PASSAGE, "commit", "requests[there]", "requests[:0]"),
    Fault("shapes of landed steps are stale", ENGINE, "_land", "plan.step >= stretch.step", "plan.step < stretch.step"),
    Fault(
        "KV read does not grow",
        sim.costs.LaneCosts,
        "decode_pricer",
        "range(kv_tokens, kv_tokens + n * count, n)",
        "[kv_tokens] * count",
    ),
    Fault("one draw for a stretch", sim.costs.JitteredCosts, "decode_pricer", "step + place", "step"),
    Fault("a length limit is passed", LEAPS, "stretch", "r.last_end[rows] - starts", "r.last_end[rows] - starts + 1"),
    Fault("a last token is not waited for", LEAPS, "stretch", "min(together, together - 1 + ahead)", "together + 1"),
    Fault("the queue is not looked at", LEAPS, "_may_admit", "< scheduler.config.max_num_seqs", "< 0"),
    Fault("nobody gets the seat that is left", LEAPS, "stretch", " or scheduler._waiting", ""),
    Fault("ends are passed where blocks are named", LEAPS, "stretch", "config.enable_prefix_caching or ", ""),
    Fault("seats are kept", PASSAGE, "leave", "if self.steps >= stretch.together:", "if self.steps < 0:"),
    Fault("tokens lie where they lay", PASSAGE, "leave", "sources[: len(newest)]", "r.source[newest]"),
    Fault("who is about to end counts as a source", PASSAGE, "leave", "rows[self.left >= self.steps]", "rows"),
    Fault("blocks are given back early", PASSAGE, "_end_rows", "_plan_until(limit + self.ahead)", "_plan_until(limit)"),
    Fault("who ends keeps a row", PASSAGE, "_end_rows", "scheduler._settled = step", "step"),
    Fault("the last token is not written", PASSAGE, "_end_rows", "self.last_tokens[who]", "self.token"),
    Fault("another token is written", PASSAGE, "_end_rows", "end] = self.token", "end] = 7"),
    Fault("who ended is still there", PASSAGE, "commit", "stay = stretch.left > commits", "stay = stretch.left > 0"),
    Fault("most blocks were held at the end", PASSAGE, "_plan_until", "max(self.most_held, ", "max(0, "),
    Fault("tables are longer than they are", PASSAGE, "leave", "column_of[ends - 1] + 1", "column_of[ends - 1] + 9"),
    Fault("blocks for steps that are not made", PASSAGE, "commit", "np.minimum(stretch.left, steps)", "stretch.left"),
    Fault("the first mask carries nothing", LEAPS, "stretch", "<= scheduler._settled", "<= scheduler._next_step"),
    Fault("early steps take no blocks", PASSAGE, "commit_early", "starts + place if place", "starts - 999 if True"),
    Fault("plans are not counted", PASSAGE, "_pass", "+= place - self._planned", "+= 0"),
    Fault("tokens are not settled", PASSAGE, "_write", "computed + 1", "computed"),
    Fault("rows are not settled", PASSAGE, "commit", "stretch.step + commits - 1", "stretch.step - 1"),
    Fault("masks name the slot of the step", STRETCH, "plan", "(place - 1) %", "place %"),
    Fault("masks as if nobody had left", STRETCH, "plan", "if place < self.together else", "if n else"),
    Fault("padded as if nobody had left", STRETCH, "plan", "padded(n)", "padded(len(self.rows))"),
    Fault("who left is paid for", STRETCH, "parts", "n -= 1", "pass"),
    Fault("KV of who left is read", STRETCH, "parts", "starts -= start", "pass"),
    Fault(
        "blocks in order of rows",
        asyncsched.stretch,
        "_repeated",
        "events.sort()",
        "pass",
    ),
    Fault("blocks come a step early", asyncsched.stretch, "crossings", "size - starts", "size - starts - 1"),
    Fault("more steps than blocks", asyncsched.stretch, "affordable", "events[available][0]", "steps"),
    Fault(
        "blocks are shared before they are full",
        asyncsched.stretch,
        "grow_and_share",
        "left - 1 + ahead",
        "left - 2 + ahead",
    ),
    Fault(
        "the last full block is not shared",
        asyncsched.stretch,
        "grow_and_share",
        "commits + ahead]",
        "commits + ahead - 1]",
    ),
    Fault("gaps of one request", METRICS, "delivered_each", "repeat(count, steps - 1)", "repeat(1, steps - 1)"),
    Fault("gaps of requests that ended", METRICS, "delivered_each", "count - gone", "count"),
    Fault("tokens counted once", METRICS, "delivered_each", "+= got", "+= 1"),
    Fault("who ended got the last token last", METRICS, "delivered_each", "[got - 1]", "[-1]"),
    Fault("tokens for all at all times", METRICS, "delivered_each", "sum(counts)", "steps * count"),
    Fault("what led up to it is not counted", ENGINE, "_land", "left + passed.behind", "left"),
    Fault("who ended gets what follows", ENGINE, "_land", "<= stretch.together", "<= 999 + stretch.together"),
    Fault("what led up to it is not written", PASSAGE, "_write", "1 - self.behind", "1"),
    Fault("nor that of who ends", PASSAGE, "_end_rows", "start + 1 - behind : end", "start + 1 : end"),
    Fault("who ends before it goes on", LEAPS, "_is_led_up_to", "len(plan.rows) != n or len(sampled) != n", "False"),
    Fault(
        "blocks of what led up to it are not shared",
        LEAPS,
        "_is_led_up_to",
        "scheduler.config.enable_prefix_caching",
        "False",
    ),
    Fault("who ended decodes", PASSAGE, "commit", "scheduler._decode = self.rows", "pass"),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.what.replace(" ", "-"))
def test_planted_faults_are_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [make() for make in CASES.values()]  # drawn before there is a fault
    changed = Rewrite(fault.name, ((fault.old, fault.new),)).changed(vars(fault.owner)[fault.name])
    monkeypatch.setattr(fault.owner, fault.name, changed)
    if fault.owner is asyncsched.stretch and hasattr(LEAPS, fault.name):  # they have imported it
        monkeypatch.setattr(LEAPS, fault.name, changed)
    assert any(_is_found(case) for case in cases)


def _is_found(case: Case) -> bool:
    try:
        check(case)
    except (AssertionError, ValueError, IndexError, KeyError, sim.engine.StuckError):
        return True
    return False


def test_rows_that_end_by_length_alone_are_not_taken_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of a driver that samples the same token always do not say who ends."""
    assert stepped_and_leaped(depth=3)
    changed = Rewrite("_is_led_up_to", (("(plan.sampled == rows)", "(rows == rows)"),)).changed(LEAPS._is_led_up_to)
    monkeypatch.setattr(LEAPS, "_is_led_up_to", changed)
    assert not stepped_and_leaped(depth=3)


def stepped_and_leaped(depth: int) -> bool:
    """Whether both give the same notices and decisions, with a driver that takes every leap as far as it goes."""
    results = []
    for can_leap in (False, True):
        log: list[str] = []
        scheduler = Scheduler(EngineConfig(depth=depth, max_num_seqs=3, max_model_len=64, num_blocks=90), log=log)
        inbox, notices = Inbox(), []
        for number in range(7):
            params = SamplingParams(max_tokens=9 + 5 * number % 11)
            inbox.put(Submit(str(number), np.arange(5 + number, dtype=np.int32), params))
        inbox.close()
        loop, reply = pipeline(scheduler, inbox, can_leap=can_leap), None
        try:
            for _ in range(1000):
                effect = loop.send(reply)
                reply = None
                if isinstance(effect, Leap):
                    sampled = [np.full(len(plan.sampled), 5, dtype=np.int32) for plan in effect.in_flight]
                    reply = Leaped(effect.stretch.steps, sampled, 5, np.full(len(effect.stretch.rows), 5, np.int32))
                elif isinstance(effect, Landed):
                    notices += [*(effect.output.finished if effect.output else ()), *effect.passed.finished]
                    notices += [notice for output in effect.passed.outputs for notice in output.finished]
                    reply = [None] * len(effect.passed.in_flight)
                elif isinstance(effect, Collect):
                    reply = np.full(len(effect.plan.sampled), 5, dtype=np.int32)
                elif isinstance(effect, Deliver):
                    notices += effect.output.finished
        except StopIteration:
            pass
        results.append((log, sorted((notice.number, notice.token_ids.tolist()) for notice in notices)))
    return results[0] == results[1]


def test_presets_leap_to_the_same_report() -> None:
    for name in ("h200-llama-8b", "hf-8b-mixed"):
        scenario = load_preset(name, ["workload.limit=30"] if name == "h200-llama-8b" else ["workload.num_requests=40"])
        reports = []
        for leaps in (False, True):
            result = simulate(scenario, leaps=leaps, spans=True, decisions=True)
            report = result.summary()
            del report["wall_s"]
            reports.append((report, result.log, result.timeline))
        assert reports[0] == reports[1]
