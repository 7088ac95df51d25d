"""Service levels: who is good, the highest rate that keeps enough of them so, and which depth is worth it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncsched.cli import advise as advise_command
from asyncsched.cli import main
from asyncsched.errors import AsyncschedError, ConfigError
from asyncsched.goodput import ServiceLevels
from asyncsched.request_table import RequestTable
from sim.advise import Question, advise
from sim.capacity import Search, find_capacity, usd_per_million
from sim.rates import at_rate, depends_on_seed, offered_rate
from sim.run import simulate
from sim.scenario import Scenario, load_preset, override_values, read_preset

SCENARIO = """
mode = "async"
[engine]
max_num_seqs = 4
[host]
plan_us = 300
[gpu]
kind = "constant"
step_us = 2000
us_per_prefill_token = 20
[workload]
kind = "synthetic"
num_requests = 60
prompt = { kind = "uniform", min_tokens = 4, max_tokens = 40 }
output = { kind = "uniform", min_tokens = 1, max_tokens = 20 }
arrivals = { kind = "poisson", rate_per_s = 40 }
[goodput]
ttft_ms = 30
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "small.toml").write_text(SCENARIO)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def small(folder: Path, **values: object) -> Scenario:
    from sim.scenario import read_scenario

    return Scenario.from_dict(override_values(read_scenario(folder / "small.toml"), values))


def status_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


# ---- goodput -------------------------------------------------------------------------------------------------------


def metrics_of(*requests: tuple[float, float, float, int, bool]) -> RequestTable:
    """Arrival, first and last token in ms, number of tokens, and whether it ended well."""
    table = RequestTable()
    for index, (arrival, first, last, tokens, completed) in enumerate(requests):
        table.add(index, round(arrival * 1e6))
        table.first_ns[index], table.last_ns[index] = round(first * 1e6), round(last * 1e6)
        table.num_tokens[index], table.completed[index] = tokens, completed
    return table


def test_a_good_request_meets_every_level_exactly() -> None:
    metrics = metrics_of(
        (5, 105, 505, 5, True),  # TTFT 100, TPOT 100, E2EL 500
        (5, 105.001, 505, 5, True),
        (5, 105, 505.001, 5, True),
        (5, 105, 105, 1, True),  # no TPOT
        (5, 105, 505, 5, False),
        (5, -1e-6, -1e-6, 0, True),
    )

    def good(**levels: float) -> list[int]:
        return np.flatnonzero(ServiceLevels(**levels).met(metrics)).tolist()

    assert good() == [0, 1, 2, 3]
    assert good(ttft_ms=100) == [0, 2, 3]
    assert good(tpot_ms=100) == [0, 1, 3]
    assert good(e2el_ms=500) == [0, 1, 3]
    assert good(ttft_ms=100, tpot_ms=100, e2el_ms=500) == [0, 3]


def test_goodput_of_a_run_counts_against_all_that_arrived(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("simulate", "small.toml", "--goodput", "ttft:4", "tpot:3", "--json") == 0
    summary = json.loads(capsys.readouterr().out)
    result = simulate(small(folder))
    metrics, count = result.metrics.requests, 60
    ttft = (metrics.first_ns - metrics.arrival_ns)[:count] / 1e6
    tpot = ((metrics.last_ns - metrics.first_ns)[:count] / np.maximum(metrics.num_tokens[:count] - 1, 1)) / 1e6
    good = int(((ttft <= 4) & (tpot <= 3)).sum())
    assert 0 < good < 60
    assert summary["goodput"] == {"requests": good, "share": good / 60, "per_s": good / summary["makespan_s"]}
    assert summary["scenario"]["goodput"] == {"ttft_ms": 4, "tpot_ms": 3, "e2el_ms": None}
    assert simulate(load_preset("hf-8b-bs32", ["workload.output.tokens=2"])).summary()["goodput"] is None


@pytest.mark.parametrize(
    "options",
    [
        ["--goodput", "ttft:12", "tpot:3"],
        ["--goodput", "ttft:12", "--goodput", "tpot:3"],
        ["--goodput=ttft:12", "--goodput=tpot:3"],
    ],
)
def test_levels_are_written_as_in_vllm_or_one_by_one(options: list[str], folder: Path, capsys: Any) -> None:
    assert status_of("simulate", *options, "small.toml") == 0
    assert "requests that were good" in capsys.readouterr().out


@pytest.mark.parametrize("level", ["ttft", "ttft:", "ttft:0", "ttft:-1", "ttft:nan", "ttft:inf", "itl:5", "x:1", ":"])
def test_bad_levels_are_refused(level: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("simulate", "small.toml", "--goodput", level) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --goodput: {level!r} is not allowed; use NAME:MS")
    assert error.count("\n") == 1


def test_a_level_that_is_given_twice_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("simulate", "small.toml", "--goodput", "ttft:5", "tpot:3", "ttft:6") == 2
    expected = "error: --goodput: 'ttft:6' is not allowed; ttft has a level already; give each once\n"
    assert capsys.readouterr().err == expected


# ---- rates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"workload.arrivals": {"kind": "gamma", "rate_per_s": 40.0, "burstiness": 0.5}},
        {"workload.arrivals": {"kind": "ramp", "start_rate_per_s": 10.0, "end_rate_per_s": 40.0}},
    ],
)
def test_requests_come_as_many_times_faster_as_asked(overrides: dict[str, object], folder: Path) -> None:
    scenario = small(folder, **overrides)
    assert offered_rate(at_rate(scenario, 2.5)) == pytest.approx(2.5 * offered_rate(scenario), rel=1e-6)


def test_a_traces_rate_and_what_has_none(folder: Path) -> None:
    trace = load_preset("h200-llama-8b", ["workload.rate_scale=2"])
    assert offered_rate(trace) == pytest.approx(499 / 129.012474 * 2)
    assert offered_rate(at_rate(trace, 3.0)) == pytest.approx(499 / 129.012474 * 6)
    with pytest.raises(ConfigError, match=r"^workload.arrivals.kind: 'all-at-once' is not allowed; they have no rate"):
        at_rate(load_preset("hf-8b-bs32"), 2.0)
    with pytest.raises(ConfigError, match=r"^workload.max_concurrency: 3 is not allowed; in a closed loop"):
        at_rate(small(folder, **{"workload.max_concurrency": 3}), 2.0)


def test_what_depends_on_the_seed() -> None:
    assert not depends_on_seed(load_preset("h200-llama-8b"))
    for change in ("jitter.kind=lognormal", "workload.num_priorities=3", "workload.dequantise=true"):
        assert depends_on_seed(load_preset("h200-llama-8b", [change]))


# ---- capacity ------------------------------------------------------------------------------------------------------

SEARCH = Search(0.95, 0.02, 3)


def share_at(scenario: Scenario, scale: float) -> float:
    return simulate(at_rate(scenario, scale)).summary()["goodput"]["share"]


def test_the_rate_found_meets_the_levels_and_a_little_more_does_not(folder: Path) -> None:
    scenario = small(folder)
    (capacity,) = find_capacity([scenario], SEARCH)
    assert len(capacity.found) == 3
    for found in capacity.found:
        seeded = scenario.model_copy(update={"seed": found.seed})
        base = offered_rate(seeded)
        share = simulate(at_rate(seeded, found.rate_per_s / base)).summary()["goodput"]["share"]
        assert share == found.share >= 0.95
        assert simulate(at_rate(seeded, 1.02 * found.rate_per_s / base)).summary()["goodput"]["share"] < 0.95
        grid = [base * 1.05**power for power in range(-20, 40)]  # another way to find it
        last = max(
            rate for rate in grid if simulate(at_rate(seeded, rate / base)).summary()["goodput"]["share"] >= 0.95
        )
        assert last / 1.05 < found.rate_per_s < last * 1.11
    summary = capacity.summary()
    assert summary["rate_low_per_s"] < summary["rate_per_s"] < summary["rate_high_per_s"]
    assert summary["confidence"] == 0.75
    assert find_capacity([scenario], SEARCH, jobs=2)[0].found == capacity.found


def test_modes_are_compared_at_the_same_levels(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--seeds", "2", "--tolerance", "0.05", "--attainment", "0.9", "--gpu-hour", "3.6", "--rate", "500"]
    assert status_of("capacity", "small.toml", "--mode", "sync,async", *options, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    sync, overlapped = answer["capacity"]
    assert overlapped["rate_low_per_s"] > sync["rate_low_per_s"]
    tokens = overlapped["figures"]["output_tokens"] * overlapped["rate_low_per_s"]
    assert overlapped["usd_per_million_output_tokens"] == pytest.approx(3.6 / 3600 / tokens * 1e6)
    assert overlapped["usd_per_million_tokens"] < overlapped["usd_per_million_output_tokens"]
    assert overlapped["gpus"] == -(-500 // overlapped["rate_low_per_s"])
    assert status_of("capacity", "small.toml", "--mode", "sync,async", *options) == 0
    table = capsys.readouterr().out
    assert "highest rate at which 0.9 of the requests keep TTFT 30 ms" in table
    assert "with 50.0% confidence" in table


def test_the_fewest_replicas_are_enough_and_one_less_is_not(folder: Path) -> None:
    scenario = small(folder, **{"workload.arrivals.rate_per_s": 900.0, "goodput.ttft_ms": 15.0})
    (capacity,) = find_capacity([scenario], Search(0.95, 0.02, 2, "replicas"))

    def share(seed: int, count: int) -> float:
        replicas = scenario.replicas.model_copy(update={"count": count})
        run = simulate(scenario.model_copy(update={"seed": seed, "replicas": replicas}))
        return float(run.summary()["goodput"]["share"])

    for found in capacity.found:
        enough = [count for count in range(1, 12) if share(found.seed, count) >= 0.95]
        assert found.replicas == enough[0] > 2
        assert found.share == share(found.seed, found.replicas)
    summary = capacity.summary()
    assert summary["replicas"] == max(found.replicas for found in capacity.found)
    assert summary["replicas_low"] == min(found.replicas for found in capacity.found)


def test_replicas_for_a_rate_are_found_and_paid_for(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--find", "replicas", "--rate", "900", "--seeds", "1", "--gpu-hour", "3.6", "--attainment", "0.9"]
    assert status_of("capacity", "small.toml", "--mode", "async", *options, "--json") == 0
    (row,) = json.loads(capsys.readouterr().out)["capacity"]
    assert row["rate_per_s"] == pytest.approx(900)
    assert row["gpus"] == row["replicas"] > 1
    tokens = 900 * row["figures"]["output_tokens"]
    assert row["usd_per_million_output_tokens"] == pytest.approx(row["replicas"] * 3.6 / 3600 / tokens * 1e6)
    assert status_of("capacity", "small.toml", "--mode", "async", *options) == 0
    assert "fewest replicas for 900 requests/s" in capsys.readouterr().out


def test_levels_that_nothing_meets_and_that_anything_meets(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("capacity", "small.toml", "--goodput", "ttft:0.1", "--seeds", "1") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: goodput: no rate meets these levels; at the lowest 0.0% of the requests do")
    with pytest.raises(AsyncschedError, match="the levels are met at any rate"):
        find_capacity([small(folder, **{"goodput.ttft_ms": 1e9})], Search(0.9, 0.02, 1))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--preset", "h200-llama-8b"], "goodput: missing; name the service levels"),
        (["small.toml", "--attainment", "1.5"], "--attainment: '1.5' is not allowed; use a number above 0 and up to 1"),
        (["small.toml", "--tolerance", "0"], "--tolerance: '0' is not allowed"),
        (["small.toml", "--seeds", "0"], "--seeds: '0' is not allowed; use a whole number of at least 1"),
        (["small.toml", "--gpu-hour", "nan"], "--gpu-hour: 'nan' is not allowed"),
        (["small.toml", "--rate", "-1"], "--rate: '-1' is not allowed"),
        (["small.toml", "--mode", "sync,fast"], "mode: 'fast' is not allowed"),
        (["small.toml", "--mode", "sync,sync"], "--mode: 'sync,sync' is not allowed; 'sync' is there twice"),
        (["small.toml", "--set", "depth=3"], "--set: 'depth=3' is not allowed; modes are what is compared"),
        (["small.toml", "--set", "seed=3", "--set", "seed=4"], "--set: 'seed=4' is not allowed; seed=3 is set already"),
        (["small.toml", "--find", "gpus"], "--find: 'gpus' is not allowed; use rate or replicas"),
        (["small.toml", "--jobs", "0"], "--jobs: '0' is not allowed"),
        (["small.toml", "--set", "workload.max_concurrency=2"], "workload.max_concurrency: 2 is not allowed"),
    ],
)
def test_bad_questions_about_capacity(options: list[str], error: str, folder: Path, capsys: Any) -> None:
    assert status_of("capacity", *options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {error}")
    assert captured.err.count("\n") == 1


def test_what_a_million_tokens_cost() -> None:
    assert usd_per_million(3.6, 2, 1000.0) == pytest.approx(2.0)


# ---- advise --------------------------------------------------------------------------------------------------------


def published(**overrides: object) -> dict[str, Any]:
    return override_values(read_preset("hf-8b-bs32"), {"workload.output.tokens": 400, **overrides})


def test_the_host_cost_from_which_overlap_pays_is_the_one_in_theory() -> None:
    """Constant lanes: sync takes host + GPU, async the longer; the gain up to the crossover is host / GPU."""
    advice = advise(published(), Question((1, 2, 3), "makespan_s", 0.1))
    sync = advice.runs[1]
    ratio = sync["busy_s"]["host"] / sync["busy_s"]["compute"]
    two, three = advice.thresholds
    assert two.balanced == pytest.approx(1 / ratio)
    assert two.gain_balanced == pytest.approx(1.0, abs=0.01)
    assert two.pays_from is not None
    assert 0.1 / ratio <= two.pays_from * 1.01 <= 0.1 / ratio * 1.08
    assert advice.gains[2] == pytest.approx(ratio, rel=0.01)
    assert three.pays_from is None
    assert abs(three.gain_balanced) < 0.01
    assert advice.chosen == 2


def test_no_depth_pays_without_host_work_and_static_has_none() -> None:
    free = {f"host.{kind}_us": 0.0 for kind in ("plan", "fill", "launch", "commit")}
    advice = advise(published(**free), Question((1, 2), "makespan_s", 0.02))
    assert advice.chosen == 1
    assert advice.thresholds[0].pays_from is advice.thresholds[0].balanced is None
    with pytest.raises(ConfigError, match=r"^mode: 'static' is not allowed; it has no depth"):
        advise(published(mode="static"), Question((1, 2), "makespan_s", 0.02))


def test_overshoot_is_priced_where_requests_end_by_themselves() -> None:
    eos = published(**{"workload.stop": "eos", "workload.max_tokens": 1000})
    advice = advise(eos, Question((1, 2), "makespan_s", 0.02))
    assert (advice.runs[1]["overshoot_tokens"], advice.runs[2]["overshoot_tokens"]) == (0, 32)


def test_advice_in_words_of_a_scenario_and_of_a_kept_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--set", "host.plan_us=900", "--depths", "1,2"]
    assert status_of("advise", "small.toml", *options) == 0
    said = capsys.readouterr().out
    assert "Depth 2 pays: +" in said
    assert "The median TTFT" in said
    assert "0.0% of the tokens computed are overshoot" in said
    assert "depth 2 over depth 1 is worth it from" in said
    assert said.endswith("Advice: async (depth 2).\n")
    assert status_of("simulate", "small.toml", *options[:2], "--json") == 0
    (folder / "run.json").write_text(capsys.readouterr().out)
    assert status_of("advise", "run.json", *options[2:], "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["chosen"] == 2
    assert answer["words"] == said.splitlines()[-len(answer["words"]) :]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["small.toml", "--depths", "2"], "--depths: '2' is not allowed; name at least two depths"),
        (["small.toml", "--depths", "2,1"], "--depths: '2,1' is not allowed; name at least two depths"),
        (["small.toml", "--depths", "1,x"], "--depths: '1,x' is not allowed; use depths in increasing order"),
        (["small.toml", "--metric", "kv_peak"], "--metric: 'kv_peak' is not allowed; use a latency"),
        (["small.toml", "--worth", "2"], "--worth: '2' is not allowed"),
        (["none.json"], "scenario: 'none.json' is not allowed; it cannot be read as JSON"),
        (["list.json"], "scenario: 'list.json' is not allowed; it holds no scenario"),
    ],
)
def test_bad_questions_about_depth(options: list[str], error: str, folder: Path, capsys: Any) -> None:
    (folder / "list.json").write_text("[]")
    assert status_of("advise", *options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {error}")
    assert captured.err.count("\n") == 1


def test_a_depth_that_costs_time_is_not_said_to_gain() -> None:
    advice: Any = SimpleNamespace(host_us_per_step=100.0)
    for gain, said in ((-0.053, "never worth it; it costs 5.3%"), (0.004, "never worth it; it gains 0.4%")):
        threshold: Any = SimpleNamespace(depth=2, below=1, balanced=2.0, pays_from=None, gain_balanced=gain)
        assert said in advise_command._threshold(advice, threshold)
