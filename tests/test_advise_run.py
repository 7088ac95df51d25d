"""Advice on recorded runs, against the runs that were recorded at the other depth."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from asyncsched.cli import main
from asyncsched.cli.runs import load_profile, load_run
from asyncsched.errors import ConfigError
from sim.advise import Question, advise_run
from sim.host_speed import probed
from sim.predict import predict
from sim.profile import Profile
from sim.validate import figures

NAME = "h200-llama-8b"
METRIC = "e2el_ms.mean"
Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def profile() -> Profile:
    return load_profile(NAME)


def status_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


@pytest.mark.parametrize("name", ["heldout::open-11-{}", "fit-tight::closed-50-{}", "delay::closed-26-{}-delay-2000us"])
def test_what_async_gains_is_told_by_the_synchronous_run_alone(profile: Profile, name: str) -> None:
    sync, later = (load_run(f"{NAME}-{name.format(mode)}") for mode in ("sync", "async"))
    advice = advise_run(sync, profile, Question((1, 2), METRIC, 0.02))
    measured = figures(sync)[METRIC] / figures(later)[METRIC] - 1
    assert measured > 0.02
    assert advice.gains[2] == pytest.approx(measured, abs=0.015)
    assert advice.chosen == 2
    assert advice.only_lengths
    (threshold,) = advice.thresholds
    assert threshold.pays_from is not None
    assert threshold.pays_from < 1
    before = advise_run(later, profile, Question((1, 2), METRIC, 0.02))
    assert before.gains[2] == pytest.approx(advice.gains[2], abs=0.015)  # whichever depth was recorded


def test_figures_are_those_of_the_prediction(profile: Profile) -> None:
    run = load_run(f"{NAME}-delay::closed-26-sync-delay-8000us")
    advice = advise_run(run, profile, Question((1, 2), "makespan_s", 0.02))
    predicted = figures(predict(run, probed(profile, run)))
    assert advice.runs[1]["makespan_s"] == predicted["makespan_s"]
    assert advice.runs[1]["gpu_active"] == pytest.approx(predicted["gpu_active"])
    assert advice.runs[1][METRIC.split(".")[0]]["mean"] == pytest.approx(predicted[METRIC])
    assert 8000 < advice.host_us_per_step < 9500  # its busy-wait is the host's work
    (threshold,) = advice.thresholds
    assert threshold.balanced is not None
    assert threshold.balanced < 1  # the host was the limit
    assert 0.6 < threshold.gain_balanced < 1  # at the balance async halves, nearly


def test_overshoot_is_what_stops_by_content_leave(profile: Profile) -> None:
    run = load_run(f"{NAME}-heldout::closed-84-sync")
    requests = replace(run.requests, finish=("stop",) * len(run.requests), max_tokens=run.requests.max_tokens + 50)
    advice = advise_run(replace(run, requests=requests), profile, Question((1, 2), METRIC, 0.02))
    assert not advice.only_lengths
    assert [advice.runs[depth]["overshoot_tokens"] for depth in (1, 2)] == [0, 84]


def test_a_run_that_does_not_say_what_the_engine_had(profile: Profile) -> None:
    run = load_run(f"{NAME}-heldout::closed-84-sync")
    engine = {key: value for key, value in run.info.engine.items() if key != "num_blocks"}
    with pytest.raises(ConfigError, match="num_blocks"):
        advise_run(replace(run, info=replace(run.info, engine=engine)), profile, Question((1, 2), METRIC, 0.02))


def test_a_run_in_which_nobody_finishes_has_no_latency(profile: Profile) -> None:
    run = load_run(f"{NAME}-heldout::closed-84-sync")
    requests, question = run.requests, Question((1, 2), METRIC, 0.02)
    nobody = replace(requests, **{field.name: getattr(requests, field.name)[:0] for field in fields(requests)})
    with pytest.raises(ConfigError) as caught:
        advise_run(replace(run, requests=nobody), profile, question)
    assert "no request of the run has one; use output_throughput" in str(caught.value)
    advice = advise_run(replace(run, requests=nobody), profile, question._replace(metric="output_throughput"))
    assert advice.chosen == 1


def test_advice_on_a_run_in_words(capsys: Captured, tmp_path: Path) -> None:
    name = f"{NAME}-heldout::closed-84-sync"
    assert status_of("advise", name, "--profile", NAME, "--depths", "1,2") == 0
    said = capsys.readouterr().out
    assert "closed-84-sync: depths compared (simulated)" in said
    told = r"The run at depth 1: end-to-end latency, mean 1,\d{3} ms measured, 1,\d{3} ms predicted \([+-]\d\.\d%\)\."
    assert re.search(told, said)
    assert said.endswith("Overshoot: none, as requests end by length.\nAdvice: async (depth 2).\n")
    assert status_of("advise", name, "--set", "host.scale=0.01", "--depths", "1,2", "--json") == 0
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (answer["run"], answer["profile"], answer["chosen"]) == ("closed-84-sync", None, 1)  # its own prices
    assert not any("measured" in line for line in answer["words"])  # of another host
    kept = tmp_path / "advice.json"
    kept.write_text(json.dumps(answer))
    assert status_of("report", str(kept), "-o", str(tmp_path / "page.html")) == 0
    assert "closed-84-sync" in kept.read_text()
    assert "Advice: sync (depth 1)." in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (
            ["--profile", NAME, "--preset", NAME],
            "--profile: 'h200-llama-8b' is not allowed; it goes with a recorded run",
        ),
        (["--preset", NAME, "--set", "mode=x"], "--set: 'mode=x' is not allowed; depths are what is compared"),
        (["--preset", NAME, "--set", "depth=7"], "--set: 'depth=7' is not allowed; depths are what is compared"),
        (["RUN", "--preset", NAME], "--preset: 'h200-llama-8b' is not allowed; it goes with a scenario"),
        (["RUN", "--strict"], "--strict: True is not allowed; it goes with a scenario"),
        (["RUN", "--goodput", "ttft:5"], "--goodput: 'ttft:5' is not allowed; it goes with a scenario"),
        (["RUN", "--set", "depth=2"], "--set: 'depth=2' is not allowed; depths are what is compared"),
        (["RUN", "--set", "mode=async"], "--set: 'depth=2' is not allowed; depths are what is compared"),
        (
            ["RUN", "--set", "host.scale=2", "--set", "host.scale=3"],
            "--set: 'host.scale=3' is not allowed; host.scale=2",
        ),
        (["RUN", "--set", "workload.limit=3"], "--set: 'workload.limit=3' is not allowed; use a setting of the engine"),
        (["RUN", "--profile", "none"], "profile: 'none'"),
        (["RUN", "--depths", "2"], "--depths: '2' is not allowed; name at least two depths"),
        (["RUN", "--depths", "0,1"], "depth: 0 is not allowed"),
        ([f"{NAME}-heldout::none"], "run: "),
        ([f"{NAME}-heldout"], "run: "),
        (["."], "run: "),
        (["none.tar.xz::a"], "run: "),
    ],
)
def test_bad_questions_about_a_run(
    options: list[str], error: str, tmp_path: Path, capsys: Captured, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    options = [f"{NAME}-heldout::closed-84-sync" if option == "RUN" else option for option in options]
    assert status_of("advise", *options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {error}")
    assert captured.err.count("\n") == 1
