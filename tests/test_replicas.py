"""Several engines behind a router: who gets what, the same whatever the order, with leaps as without."""

from __future__ import annotations

import gc
import json
import sys
import types
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutants.patching import Rewrite

import asyncsched.request_table
import sim.engine
import sim.fleet
from asyncsched.cli.app import run as main
from asyncsched.errors import ConfigError, PolicyError
from asyncsched.plan import StepShape
from asyncsched.scheduler import Scheduler
from sim.engine import SimEngine
from sim.fleet import Fleet
from sim.lanes import Lanes
from sim.routers import LeastLoaded, PrefixAware, Replica, RoundRobin, Routed
from sim.run import Result, report, simulate
from sim.scenario import Scenario


def scenario(count: int, router: str = "round-robin", **changes: Any) -> Scenario:
    data: dict[str, Any] = {
        "depth": 2,
        "engine": {"max_num_seqs": 4, "max_model_len": 200, "block_size": 4, "num_blocks": 120},
        "host": {"plan_us": 5.0, "commit_us": 4.0},
        "copy": {"d2h_latency_us": 6.0},
        "gpu": {"kind": "constant", "step_us": 20.0, "us_per_kv_token": 0.05},
        "workload": {
            "kind": "synthetic",
            "num_requests": 60,
            "prompt": {"kind": "uniform", "max_tokens": 40},
            "output": {"kind": "uniform", "max_tokens": 60},
            "arrivals": {"kind": "poisson", "rate_per_s": 3_000.0 * count},
        },
        "replicas": {"count": count, "router": router},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        data.setdefault(section, {})[name] = value
    return Scenario.from_dict(data)


def told(result: Result) -> dict[str, Any]:
    summary = result.summary()
    del summary["wall_s"]
    table, count = result.metrics.requests, result.metrics.requests.count
    arrays = (table.arrival_ns, table.first_ns, table.last_ns, table.num_tokens, table.completed)
    return {**summary, "requests": [values[:count].tolist() for values in arrays], "log": result.log}


FAULTS = {
    "a leap is not cut short": (SimEngine, "notify", "elif self._leaping is not None:", "elif False:"),
    "a leap cut short goes too far": (SimEngine, "_leap", "commits, self.env.now)", "commits, self.env.now + 1)"),
    "lanes are not put back": (Lanes, "restore", "self.free[:], self", "_, self"),
    "output is not put back": (Lanes, "restore", "self.recorded[:], self", "_, self"),
    "busy times are not put back": (Lanes, "restore", "account.busy.update(busy)", "pass"),
    "idle times are not put back": (Lanes, "restore", "account.idle.update(idle)", "pass"),
    "ends are passed in a leap": (SimEngine, "_leap", "next(ending, steps) + 1", "steps"),
    "clients ask again at once": (Fleet, "_arrive", "yield env.timeout(1)", "pass"),
    "loads do not fall": (sim.fleet._Loads, "ended", "num_requests -= 1", "num_requests -= 0"),
}


def in_step(folder: Path, most: int | None = None) -> Scenario:
    """Everything takes whole milliseconds and requests come at whole milliseconds, so moments coincide."""
    lines = [{"timestamp": 7 * n % 90 + n, "input_length": 9, "output_length": 5 + 11 * n % 40} for n in range(60)]
    lines.sort(key=lambda line: line["timestamp"])
    (folder / "trace.jsonl").write_text("\n".join(json.dumps({**line, "hash_ids": [1]}) for line in lines))
    data = scenario(3, "least-loaded").to_dict()
    data["workload"] = {"kind": "trace", "trace": str(folder / "trace.jsonl"), "max_concurrency": most}
    data["host"] = {"plan_us": 1000.0}
    data["gpu"] = {"kind": "constant", "step_us": 3000.0}
    data["copy"] = {}
    return Scenario.from_dict(data)


def test_moments_that_coincide(tmp_path: Path) -> None:
    for most in (None, 7):
        fleet = in_step(tmp_path, most)
        assert told(simulate(fleet, decisions=True)) == told(simulate(fleet, leaps=False, decisions=True))


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    owner, function, old, new = FAULTS[name]
    host = {"jitter__kind": "none", "host__fill_us": 9.0, "host__launch_us": 20.0}
    fleets = [
        scenario(3, "least-loaded", **host),
        scenario(2, "least-loaded", workload__max_concurrency=4, workload__arrivals={"kind": "all-at-once"}),
        scenario(4, "least-loaded", workload__max_concurrency=7, workload__output={"kind": "fixed", "tokens": 9}),
        scenario(2, module("their_router", 1), **host, workload__max_concurrency=3),
        in_step(tmp_path),
        in_step(tmp_path, most=7),
    ]
    sound = [told(simulate(fleet, leaps=False, decisions=True)) for fleet in fleets]
    monkeypatch.setattr(owner, function, Rewrite(function, ((old, new),)).changed(vars(owner)[function]))
    found = False
    for fleet, expected in zip(fleets, sound, strict=True):
        env, workload = simpy.Environment(initial_time=0), fleet.build_workload()
        faulty = Fleet(env, fleet, decisions=True, order=reversed(range(fleet.replicas.count)))
        env.run(faulty.start(workload))
        found |= told(report(fleet, workload, faulty, 0.0)) != expected
    assert found


ROUTERS = ("round-robin", "least-loaded", "prefix-aware")


@st.composite
def fleets(draw: st.DrawFn) -> Scenario:
    count = draw(st.integers(1, 4))
    jitter = {"jitter__kind": "lognormal", "jitter__host_sigma": 0.5, "jitter__gpu_sigma": 0.3}
    return scenario(
        count,
        draw(st.sampled_from(ROUTERS)),
        engine__num_blocks=draw(st.sampled_from([120, 40])),
        engine__enable_prefix_caching=draw(st.booleans()),
        workload__num_requests=draw(st.integers(1, 40)),
        workload__max_tokens=draw(st.sampled_from([60, 12])),
        workload__stop=draw(st.sampled_from(["length", "eos"])),
        workload__max_concurrency=draw(st.sampled_from([None, None, 1, 5])),
        workload__arrivals=draw(
            st.sampled_from([{"kind": "all-at-once"}, {"kind": "poisson", "rate_per_s": 5_000.0 * count}])
        ),
        **draw(st.sampled_from([{}, jitter])),
    )


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(fleets(), st.randoms(use_true_random=False))
def test_neither_leaps_nor_the_order_of_replicas_change_anything(fleet: Scenario, random: Any) -> None:
    expected = told(simulate(fleet, leaps=False, decisions=True))
    assert told(simulate(fleet, decisions=True)) == expected
    order = list(range(fleet.replicas.count))
    random.shuffle(order)
    workload, env = fleet.build_workload(), simpy.Environment(initial_time=0)
    shuffled = Fleet(env, fleet, decisions=True, order=order)
    env.run(shuffled.start(workload))
    assert told(report(fleet, workload, shuffled, 0.0)) == expected


TIMES = ("ttft_ms", "tpot_ms", "e2el_ms")


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(fleets(), st.integers(0, 60), st.sampled_from([1, 4, 64]))
def test_letting_go_of_times_changes_nothing_but_percentiles(fleet: Scenario, most: int, fewest: int) -> None:
    """Whatever is let go of, and when: decisions are the same, and so is what else is reported. Leaps still change
    nothing."""
    fleet = Scenario.from_dict({**fleet.to_dict(), "goodput": {"ttft_ms": 0.5, "tpot_ms": 0.04}})
    exact = simulate(fleet, decisions=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sim.fleet, "MOST_REQUESTS", most)
        patch.setattr(asyncsched.request_table, "FEWEST", fewest)
        bounded = simulate(fleet, decisions=True)
        stepped = simulate(fleet, leaps=False, decisions=True)
    count = exact.metrics.num_requests
    assert bounded.metrics.is_exact == (count <= most)
    assert bounded.log == stepped.log == exact.log
    expected, found, again = exact.summary(), bounded.summary(), stepped.summary()
    for summary in (expected, found, again):
        del summary["wall_s"]
    assert found == again
    assert expected.pop("notes") == []
    assert len(found.pop("notes")) == (count > most)
    if count > most:
        for name, shares in expected.pop("quantiles_ms").items():
            assert found["quantiles_ms"][name] == (shares and pytest.approx(shares, rel=1 / 2000)), name
        del found["quantiles_ms"]
        pairs = [(expected, found), *zip(expected.get("replicas", []), found.get("replicas", []), strict=True)]
        for one, other in pairs:
            for name in TIMES:
                described, times = other.pop(name), one.pop(name)
                assert described == (times and pytest.approx(times, rel=1 / 2000)), name
                assert not times or described["mean"] == pytest.approx(times["mean"], abs=5e-10)
    assert found == expected


@pytest.mark.parametrize("router", ["round-robin", "least-loaded"])
def test_nothing_is_kept_of_requests_that_ended(router: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, numbers and sizes; what a tally keeps has a test of its own."""
    monkeypatch.setattr(sim.fleet, "MOST_REQUESTS", 700)
    fleet, env = scenario(3, router, workload__num_requests=2_000), simpy.Environment(initial_time=0)
    made = Fleet(env, fleet)
    env.run(made.start(fleet.build_workload()))
    assert made.numbers is None
    assert made._loads._sizes == {}
    for engine in made.engines:
        assert engine._last_of == {}
        assert 512 < engine.metrics.num_requests < 700  # it would have kept them all
        assert len(engine.metrics.requests.number) <= 256


def test_few_reasons_of_rejections_are_kept_and_all_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = scenario(2, workload__num_requests=200, engine__max_model_len=60)
    rejected = simulate(fleet).summary()["rejected"]
    monkeypatch.setattr(sim.engine, "MOST_REJECTIONS", 3)
    summary = simulate(fleet).summary()
    assert summary["rejected"] == rejected > 20
    assert len(summary["rejections"]) == 6  # three of each replica


def test_leaps_are_taken_and_cut_short() -> None:
    fleet, env = scenario(3, "least-loaded", workload__num_requests=100), simpy.Environment(initial_time=0)
    engines = Fleet(env, fleet)
    env.run(engines.start(fleet.build_workload()))
    assert sum(engine.leaped for engine in engines.engines) > 0.3 * sum(engine.steps for engine in engines.engines)


def test_one_replica_is_an_engine_alone() -> None:
    alone = told(simulate(scenario(1)))
    assert "replicas" not in alone
    assert alone == told(simulate(scenario(1, replicas__router="round-robin")))


def test_round_robin_gives_each_replica_what_it_would_have_alone() -> None:
    """Three replicas, each third request: as if the others did not exist."""
    result = simulate(scenario(3), decisions=True)
    assert [row["requests"] for row in result.summary()["replicas"]] == [20, 20, 20]
    requests = np.arange(60)
    for number in range(3):
        mine = requests[number::3]
        assert (np.diff(result.metrics.requests.arrival_ns[mine]) >= 0).all()
    assert result.metrics.requests.completed[:60].all()


def test_totals_are_the_sums_of_the_replicas() -> None:
    result = simulate(scenario(4, "least-loaded"))
    summary = result.summary()
    for key in ("requests", "completed", "steps", "output_tokens", "preemptions"):
        assert summary[key] == sum(row[key] for row in summary["replicas"]), key
    makespan = summary["makespan_s"]
    assert sum(summary["idle_s"].values()) + summary["busy_s"]["compute"] == pytest.approx(4 * makespan)
    assert summary["gpu_active"] == pytest.approx(np.mean([row["gpu_active"] for row in summary["replicas"]]))


def replicas(*loads: int) -> list[Replica]:
    return [Replica(number, load, 100 * load) for number, load in enumerate(loads)]


def routed(*tokens: int) -> Routed:
    return Routed(0, 0, np.repeat(np.array(tokens, dtype=np.int32), 16), 10, 0)


def test_round_robin_takes_turns() -> None:
    router = RoundRobin()
    assert [router.route(routed(1), replicas(5, 0, 0)) for _ in range(5)] == [0, 1, 2, 0, 1]


def test_least_loaded_looks_at_requests_then_tokens_then_numbers() -> None:
    assert LeastLoaded().route(routed(1), replicas(2, 1, 3)) == 1
    assert LeastLoaded().route(routed(1), [Replica(0, 2, 9), Replica(1, 2, 8), Replica(2, 2, 8)]) == 1


def test_prefix_aware_follows_the_longest_start_unless_that_replica_is_crowded() -> None:
    router = PrefixAware()
    assert router.route(routed(7, 8, 9), replicas(1, 0)) == 1
    assert router.route(routed(7, 8, 5), replicas(0, 8)) == 1  # two blocks are known there
    assert router.route(routed(7, 8, 5), replicas(0, 9)) == 0
    assert router.route(routed(7, 8, 5), replicas(0, 5)) == 0  # it was sent there since
    assert router.route(routed(7, 8, 9), replicas(0, 5)) == 1
    assert router.route(routed(3), replicas(0, 5)) == 0


def test_prefix_aware_routing_raises_the_hit_rate(tmp_path: Path) -> None:
    """Five families of prompts on four replicas: each is computed once, not once per replica."""
    lines = [
        {
            "timestamp": 50 * n,
            "input_length": 1600,
            "output_length": 5,
            "hash_ids": [n % 5, 10 + n % 5, 20 + n % 5, 99 + n],
        }
        for n in range(60)
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    hits = {}
    for router in ("round-robin", "prefix-aware"):
        fleet = Scenario.from_dict(
            {
                "engine": {"max_model_len": 2048, "num_blocks": 4_000, "enable_prefix_caching": True},
                "gpu": {"kind": "constant", "step_us": 1_000.0},
                "workload": {"kind": "trace", "trace": str(tmp_path / "trace.jsonl")},
                "replicas": {"count": 4, "router": router},
            }
        )
        hits[router] = simulate(fleet).summary()["prefix_cache"]["hit_tokens"]
    assert hits == {"round-robin": 40 * 1536, "prefix-aware": 55 * 1536}


def module(name: str, answer: Any) -> str:
    """A router of a user's module that answers so, or raises it."""

    class Router:
        def route(self, request: Routed, replicas: list[Replica]) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

    made = types.ModuleType(name)
    made.Router = Router  # type: ignore[attr-defined]
    sys.modules[name] = made
    return f"{name}:Router"


@pytest.mark.parametrize("answer", [2, -1, "0", None, 0.5, RuntimeError("no\nidea")], ids=repr)
def test_a_router_that_fails_ends_the_run_with_one_line(answer: Any) -> None:
    with pytest.raises(PolicyError, match=r"router Router (failed for|sent) request 0") as error:
        simulate(scenario(2, module("their_router", answer)))
    assert "\n" not in str(error.value)


def test_a_users_router_is_asked() -> None:
    result = simulate(scenario(3, module("their_router", 2)))
    assert [row["requests"] for row in result.summary()["replicas"]] == [0, 0, 60]
    assert result.summary()["replicas"][0]["ttft_ms"] is None


@pytest.mark.parametrize(
    ("replicas", "field"),
    [
        ({"count": 0}, "replicas.count"),
        ({"count": -1}, "replicas.count"),
        ({"count": 1.5}, "replicas.count"),
        ({"count": float("nan")}, "replicas.count"),
        ({"count": 10**9}, "replicas.count"),
        ({"router": "nearest"}, "replicas.router"),
        ({"router": "nowhere:Router"}, "replicas.router"),
        ({"router": "sim.routers:Replica"}, "replicas.router"),
        ({"router": 3}, "replicas.router"),
        ({"number": 3}, "replicas.number"),
    ],
)
def test_bad_replicas_are_one_line(replicas: dict[str, Any], field: str) -> None:
    data = scenario(1).to_dict() | {"replicas": replicas}
    with pytest.raises(ConfigError, match=f"^{field}: ") as error:
        Scenario.from_dict(data)
    assert "\n" not in str(error.value)


def test_replicas_draw_jitter_of_their_own() -> None:
    fleet = scenario(2, jitter__kind="lognormal", jitter__host_sigma=0.5, workload__arrivals={"kind": "all-at-once"})
    first, second = (fleet.costs(number) for number in range(2))
    shape = StepShape(4, 4, 0, 4, 4, 100, 100, 0)
    assert [first.host_ns("plan", shape, step) for step in range(9)] != [
        second.host_ns("plan", shape, step) for step in range(9)
    ]


# ---- the command ---------------------------------------------------------------------------------------------------

PRESET = ["simulate", "--preset", "h200-llama-8b", "--set", "workload.limit=40"]


def test_the_command_reports_each_replica(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "replicas.png"
    assert main([*PRESET, "--replicas", "3", "--router", "least-loaded", "--json", "--plot", str(picture)]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["router"] == "least-loaded"
    assert [row["replica"] for row in summary["replicas"]] == [0, 1, 2]
    assert sum(row["completed"] for row in summary["replicas"]) == summary["completed"] == 40
    assert picture.read_bytes().startswith(b"\x89PNG")
    for count, row in ((2, "1 "), (17, "requests")):  # each in a row, or how far they lie apart
        assert main([*PRESET, "--replicas", str(count)]) == 0
        table = capsys.readouterr().out.split(f"{count} replicas, round-robin")[1]
        assert any(line.strip().startswith(row) for line in table.splitlines())


@pytest.mark.parametrize("count", [1, 3])
def test_leaps_are_on_unless_they_are_not_wanted(capsys: pytest.CaptureFixture[str], count: int) -> None:
    summaries = []
    for options in ([], ["--no-leaps"]):
        assert main([*PRESET, "--json", "--replicas", str(count), *options]) == 0
        summaries.append(json.loads(capsys.readouterr().out))
        del summaries[-1]["wall_s"]
    assert summaries[0] == summaries[1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--replicas", "0"], "replicas.count: 0"),
        (["--replicas", "2.5"], "replicas.count: 2.5"),
        (["--replicas", "two"], "replicas.count: 'two'"),
        (["--replicas", "2", "--router", "nearest"], "replicas.router: 'nearest'"),
        (["--replicas", "2", "--router", "nowhere:Router"], "it could not be loaded"),
        (["--replicas", "2", "--trace", "trace.json"], "--trace: 'trace.json' is not allowed; it is about one engine"),
    ],
)
def test_bad_options_are_one_line(capsys: pytest.CaptureFixture[str], options: list[str], said: str) -> None:
    assert main([*PRESET, *options]) == 2
    captured = capsys.readouterr()
    assert not captured.out
    assert captured.err.count("\n") == 1
    assert said in captured.err


def test_a_router_that_raises_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PRESET, "--replicas", "2", "--router", module("their_router", KeyError("x"))]) == 1
    captured = capsys.readouterr()
    assert captured.err == "error: router Router failed for request 0 (KeyError: 'x')\n"
    assert not captured.out


@pytest.mark.parametrize("router", ["round-robin", "least-loaded"])
@pytest.mark.parametrize("most", [None, 3])
def test_a_run_leaves_nothing_but_its_result(router: str, most: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even until Python looks for garbage: the next fleet would not fit beside it."""
    made: list[weakref.ref[Scheduler]] = []

    def scheduler(*args: Any, **options: Any) -> Scheduler:
        one = Scheduler(*args, **options)
        made.append(weakref.ref(one))
        return one

    monkeypatch.setattr(sim.fleet, "Scheduler", scheduler)
    asked = scenario(3, router)
    if most is not None:
        workload = asked.workload.model_copy(update={"max_concurrency": most})
        asked = asked.model_copy(update={"workload": workload})
    gc.collect()
    gc.disable()
    try:
        result = simulate(asked)
        assert result.steps > 0
        assert [ref() for ref in made] == [None] * 3
    finally:
        gc.enable()
