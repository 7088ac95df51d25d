"""Workloads: lengths and arrivals as specified, traces exact to the nanosecond, bad rows named by file and line."""

from __future__ import annotations

import csv
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncsched.errors import ConfigError
from sim.spec import validate
from sim.trace import FOLDER, PACKAGED, read_trace
from sim.workload import Arrival, SyntheticWorkload, TraceWorkload, build_workload

FIXED = {"kind": "fixed", "tokens": 10}
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def synthetic(**keys) -> SyntheticWorkload:
    base = {
        "kind": "synthetic",
        "num_requests": 5,
        "prompt": FIXED,
        "output": FIXED,
        "arrivals": {"kind": "all-at-once"},
    }
    return validate(SyntheticWorkload, {**base, **keys})


def trace(path="azure-conv-500", **keys) -> TraceWorkload:
    return validate(TraceWorkload, {"kind": "trace", "trace": str(path), **keys})


def requests(spec, seed):
    return list(build_workload(spec, seed).arrivals)


def write(folder: Path, text: str) -> Path:
    path = folder / "some.csv"
    path.write_bytes(text.encode())
    return path


def test_fixed_all_at_once():
    assert requests(synthetic(), seed=0) == [Arrival(0, 10, 10, 10, 0)] * 5


def test_uniform_lengths_reach_both_ends():
    spec = synthetic(num_requests=2000, prompt={"kind": "uniform", "min_tokens": 3, "max_tokens": 7})
    assert {arrival.prompt_tokens for arrival in requests(spec, seed=0)} == {3, 4, 5, 6, 7}


def test_lognormal_lengths_have_the_mean_and_spread_asked_for():
    output = {"kind": "lognormal", "mean_tokens": 5000.0, "sigma": 0.6, "max_tokens": 10**9}
    lengths = np.array([a.output_tokens for a in requests(synthetic(num_requests=40_000, output=output), seed=0)])
    assert lengths.mean() == pytest.approx(5000, rel=0.02)
    assert np.log(lengths).std() == pytest.approx(0.6, rel=0.02)


def test_lognormal_lengths_are_clipped_to_the_range():
    output = {"kind": "lognormal", "mean_tokens": 50.0, "sigma": 2.0, "min_tokens": 20, "max_tokens": 60}
    lengths = [a.output_tokens for a in requests(synthetic(num_requests=500, output=output), seed=0)]
    assert (min(lengths), max(lengths)) == (20, 60)
    assert len(set(lengths)) > 10


@pytest.mark.parametrize(
    ("arrivals", "variation"),
    [
        ({"kind": "poisson", "rate_per_s": 50.0}, 1.0),
        ({"kind": "gamma", "rate_per_s": 50.0, "burstiness": 1.0}, 1.0),
        ({"kind": "gamma", "rate_per_s": 50.0, "burstiness": 0.25}, 2.0),
        ({"kind": "gamma", "rate_per_s": 50.0, "burstiness": 4.0}, 0.5),
    ],
)
def test_random_arrivals_have_the_rate_and_the_burstiness_asked_for(arrivals, variation):
    times = [a.arrival_ns for a in requests(synthetic(num_requests=40_000, arrivals=arrivals), seed=0)]
    gaps = np.diff(times)
    assert times[0] == 0
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1e9 / 50, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)


def test_one_stream_per_quantity():
    """A longer output must not move the arrivals, or two scenarios would differ in more than what was varied."""
    keys = {
        "num_requests": 50,
        "prompt": {"kind": "uniform", "min_tokens": 1, "max_tokens": 100},
        "arrivals": {"kind": "poisson", "rate_per_s": 5.0},
        "num_priorities": 5,
    }
    output = {"kind": "lognormal", "mean_tokens": 50.0, "sigma": 1.0, "max_tokens": 1000}
    fixed, drawn = requests(synthetic(**keys), 3), requests(synthetic(**keys, output=output), 3)
    assert [(a.arrival_ns, a.prompt_tokens, a.priority) for a in fixed] == [
        (a.arrival_ns, a.prompt_tokens, a.priority) for a in drawn
    ]
    assert {a.priority for a in fixed} == {0, 1, 2, 3, 4}
    assert [a.output_tokens for a in fixed] != [a.output_tokens for a in drawn]
    alike = requests(synthetic(num_requests=50, prompt=keys["prompt"], output=keys["prompt"]), 3)
    assert [a.prompt_tokens for a in alike] != [a.output_tokens for a in alike]


@given(st.integers(0, 2**63 - 1))
def test_same_seed_same_workload(seed):
    spec = synthetic(
        num_requests=20,
        prompt={"kind": "uniform", "min_tokens": 1, "max_tokens": 10**6},
        arrivals={"kind": "poisson", "rate_per_s": 5.0},
    )
    first = requests(spec, seed)
    assert first == requests(spec, seed)
    assert first != requests(spec, (seed + 1) % 2**63)
    assert [a.arrival_ns for a in first] == sorted(a.arrival_ns for a in first)


def test_length_stops_ask_for_what_they_get():
    assert requests(synthetic(max_tokens=4), seed=0)[0] == Arrival(0, 10, 4, 4, 0)
    assert requests(synthetic(max_tokens=40), seed=0)[0] == Arrival(0, 10, 10, 10, 0)


def test_eos_stops_ask_for_more_than_they_get():
    assert requests(synthetic(stop="eos", max_tokens=40), seed=0)[0] == Arrival(0, 10, 10, 40, 0)
    assert requests(synthetic(stop="eos", max_tokens=4), seed=0)[0] == Arrival(0, 10, 4, 4, 0)
    with pytest.raises(ConfigError, match=r"^max_tokens: missing; stop = \"eos\" needs"):
        synthetic(stop="eos")


def test_a_range_upside_down_is_refused():
    with pytest.raises(ConfigError, match=r"^prompt.max_tokens: 3 is not allowed; use at least min_tokens, 5$"):
        synthetic(prompt={"kind": "uniform", "min_tokens": 5, "max_tokens": 3})


def test_the_packaged_trace_is_the_published_one():
    arrivals = requests(trace(), seed=0)
    assert len(arrivals) == 500
    assert arrivals[0] == Arrival(0, 374, 44, 44, 0)
    assert arrivals[1] == Arrival(4_314_579_000, 396, 109, 109, 0)  # 18:15:50.9951690 - 18:15:46.6805900
    assert arrivals[-1] == Arrival(129_012_474_000, 1033, 420, 420, 0)
    assert sum(a.output_tokens for a in arrivals) == 132_536


def test_the_packaged_trace_has_its_licence_beside_it():
    assert "Attribution 4.0 International" in (FOLDER / "LICENSE-CC-BY-4.0.txt").read_text(encoding="utf-8-sig")
    assert "Apache License" in (FOLDER / "LICENSE-Mooncake-Apache-2.0.txt").read_text(encoding="utf-8")
    attribution = (FOLDER / "ATTRIBUTION.md").read_text(encoding="utf-8")
    assert all(name in attribution for name in PACKAGED.values())


def test_parsing_agrees_with_the_csv_module_and_datetime():
    path = FOLDER / PACKAGED["azure-conv-500"]
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    nanoseconds: list[int] = []
    for row, ours in zip(rows, read_trace("azure-conv-500").rows, strict=True):
        moment = datetime.fromisoformat(row["TIMESTAMP"][:26] + "+00:00")  # microseconds; the seventh digit is below
        microseconds = round(moment.timestamp() * 1e6)
        nanoseconds.append(microseconds * 1000 + int(row["TIMESTAMP"][26]) * 100)
        assert ours.time_ns == nanoseconds[-1] - nanoseconds[0]
        assert (ours.prompt_tokens, ours.output_tokens) == (int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def test_rate_scale_and_limit():
    whole = requests(trace(), seed=0)
    fast = requests(trace(rate_scale=2.0, limit=100), seed=0)
    assert [a.arrival_ns for a in fast] == [round(a.arrival_ns / 2) for a in whole[:100]]


def test_trace_columns_by_name_byte_order_mark_blank_lines_and_zones(tmp_path):
    text = (
        "\ufeffGeneratedTokens,Other,TIMESTAMP,ContextTokens\r\n"
        "5,x,2024-05-10 00:00:01.5+00:00,7\r\n\r\n"
        "6,y,2024-05-10 02:00:01+02:00,8\r\n"
    )
    assert requests(trace(write(tmp_path, text)), seed=0) == [
        Arrival(0, 8, 6, 6, 0),
        Arrival(500_000_000, 7, 5, 5, 0),
    ]


GOOD = "2023-11-16 18:15:46.6805900"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (f"{GOOD},374,0", "GeneratedTokens must be a whole number from 1 to 999999999, not '0'"),
        (f"{GOOD},0,3", "ContextTokens must be a whole number from 1 to 999999999, not '0'"),
        (f"{GOOD},-4,3", "ContextTokens must be a whole number from 1 to 999999999, not '-4'"),
        (f"{GOOD},3.5,3", "ContextTokens must be a whole number from 1 to 999999999, not '3.5'"),
        (f"{GOOD},9999999999,3", "ContextTokens must be a whole number from 1 to 999999999, not '9999999999'"),
        (f"{GOOD},3", "3 columns are needed, not 2"),
        ("yesterday,3,4", "TIMESTAMP must be like 2023-11-16 18:15:46.6805900, not 'yesterday'"),
        ("2023-11-16 18:15:46.68059001234,3,4", "TIMESTAMP must be like .*"),
        ("2023-02-30 18:15:46.6805900,3,4", "TIMESTAMP '2023-02-30 18:15:46.6805900' is no date .*"),
    ],
)
def test_a_bad_row_is_named_by_file_line_and_reason(tmp_path, row, reason):
    path = write(tmp_path, f"{HEADER}{GOOD},374,44\n{row}\n")
    with pytest.raises(
        ConfigError, match=rf"^workload.trace: '.*some.csv, line 3' is not allowed; {reason}$"
    ) as caught:
        requests(trace(path, strict=True), seed=0)
    assert "\n" not in str(caught.value)
    assert len(requests(trace(path, limit=1), seed=0)) == 1  # rows past the limit are not read


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "line 1 must name the columns"),
        ("TIMESTAMP,ContextTokens\n", "GeneratedTokens is missing"),
        (HEADER, "it must hold at least one request"),
    ],
)
def test_a_file_without_requests_is_refused(tmp_path, text, reason):
    with pytest.raises(ConfigError, match=reason):
        requests(trace(write(tmp_path, text)), seed=0)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^workload.trace: .* cannot be read \(No such file or directory\)"):
        requests(trace(tmp_path / "nothing.csv"), seed=0)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"^workload.trace: .* cannot be read"):
        requests(trace(tmp_path / "binary.csv"), seed=0)
