"""Runs in which requests were aborted, predicted: an abort enters as an abort, and costs what was in flight."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planted import PLANTED, happened, wanted

from asyncsched.cli.app import run as command
from asyncsched.run_files import write_run
from asyncsched.runs import Run
from sim.advise import Question, advise_run
from sim.predict import predict, predicted_summary, replay
from sim.profile import Profile, to_toml
from sim.validate import figures, judge

TRUTH = Profile.from_dict(PLANTED)
PROMPTS, OUTPUTS = [40, 300, 60, 50, 20, 900], [30, 40, 50, 60, 25, 30]
ARRIVALS = [0.0, 1.0, 2.0, 3.0, 60.0, 80.0]
GOT = {1: 7, 3: 1}  # tokens until the abort


def with_aborts(depth: int, got: dict[int, int]) -> Run:
    """Asked for, and given up by their users when they had got so many tokens."""
    run = wanted("aborted", depth, PROMPTS, OUTPUTS, ARRIVALS)
    finish, output = list(run.requests.finish), run.requests.output_tokens.copy()
    for number, tokens in got.items():
        finish[number], output[number] = "abort", tokens
    return replace(run, requests=replace(run.requests, finish=tuple(finish), output_tokens=output))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_abort_costs_what_is_in_flight_when_it_enters(depth: int) -> None:
    run = with_aborts(depth, GOT)
    found = predict(run, TRUTH)
    assert found.requests.finish == ("length", "abort", "length", "abort", "length", "length")
    assert found.requests.output_tokens.tolist() == [30, 7, 50, 1, 25, 30]
    summary = predicted_summary(run, TRUTH)
    assert (summary["aborted"], summary["aborted_tokens"], summary["overshoot_tokens"]) == (2, 2 * (depth - 1), 0)
    samples = int(found.steps["num_samples"].sum())
    assert samples == int(found.requests.output_tokens.sum()) + 2 * (depth - 1)
    assert replay(found) == found.decisions  # each enters before the same plan again


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_recording_with_aborts_is_predicted_without_an_error(depth: int) -> None:
    recorded = happened(with_aborts(depth, GOT), TRUTH)
    assert recorded.requests.finish.count("abort") == 2
    validation = judge(recorded, TRUTH).validation
    assert all(abs(row.error) < 1e-9 for row in validation.rows)
    assert (validation.timed, validation.replayed) == (None, None)


def test_latencies_are_of_those_who_were_served() -> None:
    """As a content stop, the two would be in the means, which a measured run's are not."""
    run = happened(with_aborts(2, GOT), TRUTH)
    summary, measured = predicted_summary(run, TRUTH), figures(run)
    assert summary["e2el_ms"]["mean"] == pytest.approx(measured["e2el_ms.mean"])
    assert summary["ttft_ms"]["p50"] == pytest.approx(measured["ttft_ms.p50"])
    served = run.requests.completed
    assert served.tolist() == [True, False, True, False, True, True]
    assert measured["e2el_ms.mean"] == pytest.approx(
        (run.requests.last_ns - run.requests.arrival_ns)[served].mean() / 1e6
    )


def prefilled(run: Run) -> int:
    return int(run.steps["num_prefill_tokens"].sum())


def test_who_gave_up_before_the_first_token_left_at_the_time_it_did() -> None:
    """Request 5 has 900 prompt tokens, computed in chunks beside others, and not all of them."""
    settings = {"max_num_batched_tokens": 128, "max_num_seqs": 3, "decode_buckets": ()}
    whole = wanted("chunks", 2, PROMPTS, OUTPUTS, [0.0] * 6, **settings)
    finish, output = (*whole.requests.finish[:5], "abort"), whole.requests.output_tokens.copy()
    output[5] = 0
    as_planned = predict(whole, TRUTH)
    half = int(np.flatnonzero(as_planned.steps["num_prefill_tokens"] > 0)[-4])  # of its prompt
    plan = as_planned.steps["plan"].copy()
    nobody = np.full(6, -1)
    at = nobody.copy()
    at[5] = plan[half]
    requests = replace(
        as_planned.requests,
        finish=finish,
        output_tokens=output,
        aborted_plan=at,
        gaps_ns=(),
    )
    run = replace(as_planned, requests=requests)
    found = predict(run, TRUTH)
    assert found.requests.finish[5] == "abort"
    assert found.requests.output_tokens.tolist() == [*OUTPUTS[:5], 0]
    assert found.requests.scheduled_ns[5] > 0
    nobody_knows = predict(replace(run, requests=replace(requests, aborted_plan=nobody)), TRUTH)
    assert nobody_knows.requests.scheduled_ns[5] == -1  # it left as it came
    assert prefilled(nobody_knows) == sum(PROMPTS) - 900 < prefilled(found) < sum(PROMPTS)


def test_requests_that_are_due_before_those_above_them_in_the_log_follow_them() -> None:
    """As they do in a recording: the log is in the order in which they were submitted, and who is aborted is in it."""
    run = with_aborts(2, GOT)
    late_first = np.array([5_000_000, 0, 1_000_000, 9_000_000, 2_000_000, 80_000_000])
    together = np.maximum.accumulate(late_first)
    output = run.requests.output_tokens.copy()
    output[3] = 0  # gave up before the first token, and nobody knows when
    found, expected = (
        predict(
            replace(run, requests=replace(run.requests, arrival_ns=at, first_ns=at, last_ns=at, output_tokens=output)),
            TRUTH,
        )
        for at in (late_first, together)
    )
    assert found.requests.finish == ("length", "abort", "length", "abort", "length", "length")
    assert found.requests.output_tokens.tolist() == [30, 7, 50, 0, 25, 30]
    assert found.requests.prompt_tokens.tolist() == PROMPTS
    assert found.decisions == expected.decisions
    assert np.array_equal(found.requests.last_ns, expected.requests.last_ns)


def test_an_engine_that_would_have_refused_it_ends_too() -> None:
    """And one that was aborted when it had got all it asked for."""
    found = predict(with_aborts(2, {5: 7, 0: 30}), TRUTH, max_model_len=512)
    assert found.requests.finish == ("length", "length", "length", "length", "length", "rejected")


def test_advice_says_what_aborts_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = happened(with_aborts(1, GOT), TRUTH)
    advice = advise_run(run, TRUTH, Question((1, 2, 3), "e2el_ms.mean", 0.02))
    assert not advice.only_lengths
    assert {depth: summary["aborted_tokens"] for depth, summary in advice.runs.items()} == {1: 0, 2: 2, 3: 4}
    write_run(tmp_path / "run", run)
    (tmp_path / "truth.toml").write_text(to_toml(TRUTH))
    assert command(["advise", str(tmp_path / "run"), "--profile", str(tmp_path / "truth.toml"), "--json"]) == 0
    words = json.loads(capsys.readouterr().out)["words"]
    assert (
        "Aborts: 2 requests were aborted, here with as many tokens as in the run; computed in vain were 0 at depth 1, "
        "2 at depth 2, 4 at depth 3." in words
    )
    assert any("of the tokens computed are overshoot or of aborted requests" in line for line in words)
    assert not any(line.startswith("Overshoot: none") for line in words)
