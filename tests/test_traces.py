"""Traces: every format exact, bad lines named and counted, and nothing changed in silence."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from asyncsched.errors import ConfigError
from sim.prompts import ideal_reuse, prompt_of
from sim.run import simulate
from sim.scenario import Scenario, load_preset, override_values, read_preset
from sim.spec import validate
from sim.trace import PACKAGED, read_trace
from sim.trace_formats import FORMATS, PREFIX_BLOCK
from sim.workload import Arrival, TraceWorkload, Workload, build_workload

FILES = {
    "azure": "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00.5,10,3\n2024-01-01 00:00:02.7500001,20,4\n",
    "burstgpt": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5.5,ChatGPT,10,3,13,Conversation log\n7.7500001,GPT-4,20,4,24,API log\n",
    "csv": "arrival,input,output\n0.5,10,3\n2.7500001,20,4\n",
    "mooncake": '{"timestamp": 500, "input_length": 10, "output_length": 3, "hash_ids": [7]}\n'
    '{"timestamp": 2750.0001, "input_length": 20, "output_length": 4, "hash_ids": [8], "other": null}\n',
}
BAD = {  # a line after the first two lines of the file, and why it is no request
    "azure": ("2024-01-01 00:00:03,10", "3 columns are needed, not 2"),
    "burstgpt": ("9,ChatGPT,10,0,10,Conversation log", "Response tokens must be a whole number from 1 to"),
    "csv": ("-1,10,3", "arrival must be a number of at least 0 without an exponent, not '-1'"),
    "mooncake": (
        '{"timestamp": 3000, "input_length": 10',
        "it is no JSON object (Expecting ',' delimiter at character 39",
    ),
}


def spec_of(path: object, **keys: object) -> TraceWorkload:
    return validate(TraceWorkload, {"kind": "trace", "trace": str(path), **keys})


def load(path: object, seed: int = 0, **keys: object) -> Workload:
    return build_workload(spec_of(path, **keys), seed)


def write(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_bytes(text.encode())
    return path


def jsonl(*rows: Mapping[str, object]) -> str:
    return "".join(json.dumps({"input_length": 10, "output_length": 3, **row}) + "\n" for row in rows)


@pytest.mark.parametrize("form", FILES)
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_every_format_gives_the_same_requests(form: str, named: bool, ending: str, tmp_path: Path) -> None:
    path = write(tmp_path, FILES[form].replace("\n", ending))
    read, notes = load(path, **({"format": form} if named else {}))
    assert [request[:3] for request in read] == [(0, 10, 3), (2_250_000_100, 20, 4)]
    assert [request.prefix for request in read] == ([(7,), (8,)] if form == "mooncake" else [(), ()])
    assert notes == ()


def test_the_formats_are_those_that_a_scenario_may_name() -> None:
    assert get_args(TraceWorkload.model_fields["format"].annotation) == ("auto", *sorted(FORMATS))
    assert set(FILES) == set(FORMATS)


@pytest.mark.parametrize(("unit", "value"), [("s", "1.5"), ("ms", "1500"), ("us", "1500000"), ("ns", "1500000000")])
def test_a_plain_csv_names_its_unit(unit: str, value: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"arrival_{unit},input,output\n0,1,1\n{value},2,2\n")
    assert load(path).arrivals[1].arrival_ns == 1_500_000_000


@pytest.mark.parametrize("form", FILES)
def test_a_bad_line_is_left_out_named_and_counted(form: str, tmp_path: Path) -> None:
    line, reason = BAD[form]
    good = FILES[form]
    number = good.count("\n") + 1
    read, notes = load(write(tmp_path, good + f"{line}\n" * 5))
    assert len(read) == 2
    (note,) = notes
    assert f"trace: 5 lines are no requests and were left out (line {number}: {reason}" in note
    assert note.endswith("; and 2 more)")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "trace", strict=True)
    assert str(caught.value).startswith(
        f"workload.trace: '{tmp_path / 'trace'}, line {number}' is not allowed; {reason}"
    )


def test_a_file_of_bad_lines_alone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it must hold at least one request; line 2: input must be a whole number"):
        load(write(tmp_path, "arrival,input,output\n1,x,2\n"))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"timestamp": -1}, "timestamp must be milliseconds of at least 0, not -1"),
        ({"timestamp": float("nan")}, "timestamp must be milliseconds of at least 0, not nan"),
        ({"timestamp": "5"}, "timestamp must be milliseconds of at least 0, not '5'"),
        ({}, "timestamp must be milliseconds of at least 0, not None"),
        ({"timestamp": 1, "input_length": 0}, "input_length must be a whole number from 1 to 999999999, not 0"),
        ({"timestamp": 1, "output_length": 1.5}, "output_length must be a whole number from 1 to 999999999, not 1.5"),
        ({"timestamp": 1, "hash_ids": [1, 2]}, "hash_ids must be 1, one per 512 tokens of 10, not 2"),
        ({"timestamp": 1, "hash_ids": [-1]}, "hash_ids must be a list of whole numbers from 0 to 2147483645"),
        ({"timestamp": 1, "hash_ids": "ab"}, "hash_ids must be a list of whole numbers from 0 to 2147483645"),
    ],
)
def test_bad_mooncake_rows(row: Mapping[str, object], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, jsonl({"timestamp": 0}, row)), strict=True)
    assert f"line 2' is not allowed; {reason}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "line 1 must name the columns of a known format"),
        ("a,b,c\n1,2,3\n", "line 1 must name the columns of a known format"),
        ("arrival,input\n1,2\n", "line 1 must name the columns arrival, input, output; output is missing"),
        ("[1]\n", "line 1 must name the columns of a known format"),
        ("arrival,input,output\n", "it must hold at least one request"),
    ],
)
def test_a_file_in_no_format_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text))
    assert reason in str(caught.value)


def test_a_folder_and_a_wrong_format_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"it cannot be read \(Is a directory\)"):
        load(tmp_path)
    with pytest.raises(ConfigError, match=r"line 1 must name the columns Timestamp"):
        load(write(tmp_path, FILES["csv"]), format="burstgpt")


def test_requests_out_of_order_are_sorted_and_that_is_said(tmp_path: Path) -> None:
    read, notes = load(write(tmp_path, "arrival,input,output\n5,1,1\n3,2,1\n4,3,1\n9,4,1\n"))
    assert [(request.arrival_ns // 10**9, request.prompt_tokens) for request in read] == [
        (0, 2),
        (1, 3),
        (2, 1),
        (6, 4),
    ]
    assert notes[0].endswith("trace: 1 of 4 requests are earlier than the one before; sorted by time")


def test_slices(tmp_path: Path) -> None:
    path = write(tmp_path, "arrival,input,output\n" + "".join(f"{10 + i},{i + 1},1\n" for i in range(10)) + "oops\n")

    def prompts(**keys: object) -> list[int]:
        return [request.prompt_tokens for request in load(path, **keys).arrivals]

    assert prompts(limit=3) == [1, 2, 3]
    assert prompts(skip=2, limit=3) == [3, 4, 5]
    assert prompts(start_s=7) == [8, 9, 10]
    assert prompts(skip=1, start_s=2.0, duration_s=3.0) == [4, 5, 6]
    assert load(path, limit=10).notes == ()  # what follows is not read
    assert load(path, start_s=7, rate_scale=2.0).arrivals[1].arrival_ns == 500_000_000
    with pytest.raises(
        ConfigError, match=r"^workload.trace: .* no request comes from 50 s; the last one comes at 9 s$"
    ):
        load(path, start_s=50)
    with pytest.raises(ConfigError, match=r"^workload.skip: 99 is not allowed; .* has fewer requests$"):
        load(write(tmp_path, "arrival,input,output\n1,1,1\n"), skip=99)


def test_clipped_lengths_are_said(tmp_path: Path) -> None:
    path = write(tmp_path, jsonl({"timestamp": 0, "input_length": 1500, "hash_ids": [1, 2, 3]}, {"timestamp": 1}))
    read, notes = load(path, max_prompt_tokens=600, max_tokens=2)
    assert list(read) == [Arrival(0, 600, 2, 2, 0, (1, 2)), Arrival(1_000_000, 10, 2, 2, 0)]
    assert notes == (
        "1 of 2 prompts were clipped to 600 tokens, 59.6% of all prompt tokens",
        "2 of 2 outputs were clipped to 2 tokens, 33.3% of all output tokens",
    )


def test_coarse_timestamps_are_spread_by_the_seed(tmp_path: Path) -> None:
    times = [0] * 40 + [3000] * 40 + [6000] * 40 + [600_000] * 40
    path = write(tmp_path, jsonl(*({"timestamp": time, "input_length": i + 1} for i, time in enumerate(times))))
    read, notes = load(path)
    assert notes == ("160 requests have only 4 timestamps and come in bursts; workload.dequantise spreads them",)
    spread, notes = load(path, dequantise=True)
    assert notes == ("160 requests had 4 timestamps; spread at random over 3 s each",)
    at = np.array([request.arrival_ns for request in spread])
    assert [request.prompt_tokens for request in spread] == list(range(1, 161))  # nobody overtakes
    assert (np.diff(at) >= 0).all()
    assert len(set(at.tolist())) == 160
    assert at[0] == 0
    moved = at - np.array([request.arrival_ns for request in read])
    assert moved.min() > -3 * 10**9
    assert moved.max() < 3 * 10**9  # the long pause is not filled
    assert spread == load(path, dequantise=True).arrivals
    assert spread != load(path, 1, dequantise=True).arrivals


def test_arrivals_replace_a_traces_times() -> None:
    drawn = load("azure-conv-500", arrivals={"kind": "gamma", "rate_per_s": 10.0, "burstiness": 0.5}).arrivals
    own = load("azure-conv-500").arrivals
    assert [(a.prompt_tokens, a.output_tokens) for a in drawn] == [(a.prompt_tokens, a.output_tokens) for a in own]
    assert drawn[-1].arrival_ns / 499 == pytest.approx(1e8, rel=0.15)
    with pytest.raises(ConfigError, match=r"^rate_scale: 2.0 is not allowed; it changes the trace's times"):
        spec_of("azure-conv-500", arrivals={"kind": "all-at-once"}, rate_scale=2.0)


def test_requests_drawn_from_a_trace_are_as_many_as_asked_for() -> None:
    poisson = {"kind": "poisson", "rate_per_s": 10.0}
    own = {(a.prompt_tokens, a.output_tokens) for a in load("azure-conv-500").arrivals}
    drawn = load("azure-conv-500", arrivals=poisson, num_requests=2000).arrivals
    assert len(drawn) == 2000
    lengths = [(a.prompt_tokens, a.output_tokens) for a in drawn]
    assert set(lengths) <= own
    assert len(set(lengths)) > 0.9 * len(own)
    again = load("azure-conv-500", 1, arrivals=poisson, num_requests=2000).arrivals
    assert lengths != [(a.prompt_tokens, a.output_tokens) for a in again]
    with pytest.raises(ConfigError, match=r"^num_requests: 7 is not allowed; it goes with arrivals"):
        spec_of("azure-conv-500", num_requests=7)


@pytest.mark.parametrize(("shape", "half_way"), [("linear", 45.0), ("exponential", 30.0)])
def test_a_ramp_goes_from_one_rate_to_the_other(shape: str, half_way: float) -> None:
    ramp = {"kind": "ramp", "start_rate_per_s": 10.0, "end_rate_per_s": 90.0, "shape": shape, "burstiness": 4.0}
    scenario = override_values(read_preset("hf-8b-bs32"), {"workload.num_requests": 60_001, "workload.arrivals": ramp})
    gaps = np.diff([a.arrival_ns for a in Scenario.from_dict(scenario).workload_arrivals()])
    rates = [1e9 / part.mean() for part in np.array_split(gaps, 60)]
    assert rates[0] == pytest.approx(10, rel=0.12)
    assert rates[-1] == pytest.approx(90, rel=0.12)
    assert rates[30] == pytest.approx(half_way if shape == "exponential" else 50.0, rel=0.12)


# ---- prefixes ------------------------------------------------------------------------------------------------------


def mooncake(**overrides: Any) -> dict[str, Any]:
    result = simulate(load_preset("h200-llama-8b-mooncake", [f"{key}={value}" for key, value in overrides.items()]))
    return result.summary()


def test_prompts_are_alike_for_as_long_as_their_ids_are() -> None:
    one, two = (Arrival(0, 1200, 1, 1, 0, prefix) for prefix in ((5, 6, 7), (5, 6, 8)))
    first, second = (prompt_of(arrival, 0, number, True) for number, arrival in enumerate((one, two)))
    assert len(first) == len(second) == 1200
    assert (first[: 2 * PREFIX_BLOCK] == second[: 2 * PREFIX_BLOCK]).all()
    assert (first[2 * PREFIX_BLOCK :] != second[2 * PREFIX_BLOCK :]).all()


def test_the_ideal_counts_leading_blocks_seen_before() -> None:
    def ask(tokens: int, *prefix: int) -> Arrival:
        return Arrival(0, tokens, 1, 1, 0, prefix)

    asked = [ask(1024, 1, 2), ask(1024, 1, 2), ask(1025, 1, 3, 2), ask(600, 2, 1), ask(512, 1)]
    ideal = ideal_reuse(asked, 16)
    assert ideal.blocks == pytest.approx((0 + 2 + 1 + 0 + 1) / 10)
    assert ideal.tokens == pytest.approx((0 + 1008 + 512 + 0 + 496) / (1024 + 1024 + 1025 + 600 + 512))
    assert ideal_reuse([Arrival(0, 5, 1, 1, 0)], 16) == (0.0, None)


def test_a_cache_that_forgets_nothing_reaches_the_ideal() -> None:
    """Slow arrivals and room for all: the scheduler's own cache saves, to the token, what the ids promise."""
    cache = mooncake(**{"num_blocks": 400_000, "workload.rate_scale": 0.5})["prefix_cache"]
    assert cache["hit_rate"] == cache["ideal_hit_rate"] > 0.08


def test_a_small_cache_saves_less_and_none_is_not_reported() -> None:
    cache = mooncake(**{"workload.rate_scale": 0.5})["prefix_cache"]  # the same run as above with a seventh of the room
    assert 0 < cache["hit_rate"] < cache["ideal_hit_rate"]
    assert mooncake(**{"workload.limit": 5, "enable_prefix_caching": "false"})["prefix_cache"] is None


def test_equal_prefixes_make_the_run_shorter() -> None:
    keys = {"workload.limit": 40, "workload.rate_scale": 1000}
    with_cache, without = mooncake(**keys), mooncake(**keys, enable_prefix_caching="false")
    assert with_cache["makespan_s"] < without["makespan_s"]


# ---- load generation -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("most", [1, 3])
def test_a_closed_loop_keeps_to_its_concurrency(depth: int, most: int) -> None:
    overrides = ["workload.limit=25", "workload.rate_scale=1000", f"workload.max_concurrency={most}", f"depth={depth}"]
    result = simulate(load_preset("h200-llama-8b", overrides))
    metrics = result.metrics.requests
    starts, ends = metrics.arrival_ns[:25], metrics.last_ns[:25]
    assert (np.diff(starts) >= 0).all()
    at_once = [int(((starts <= start) & (ends > start)).sum()) for start in starts.tolist()]
    assert max(at_once) == most
    open_loop = simulate(load_preset("h200-llama-8b", [*overrides[:2], "workload.max_concurrency=25"])).metrics.requests
    assert (open_loop.arrival_ns[:25] < 1e8).all()


def test_notes_reach_the_user_and_strict_stops(tmp_path: Path) -> None:
    path = write(tmp_path, FILES["csv"] + "oops\n")
    command = [sys.executable, "-m", "asyncsched.cli", "simulate", "--preset", "h200-llama-8b"]
    command += ["--set", f"workload.trace={path}", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    (note,) = json.loads(done.stdout)["notes"]
    assert done.stderr == f"warning: {note}\n"
    assert "line 4: 3 columns are needed, not 1" in note
    done = subprocess.run([*command, "--strict"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: workload.trace: ")
    assert "line 4' is not allowed; 3 columns are needed, not 1" in done.stderr


def test_packaged_traces_load() -> None:
    assert {name: len(load(name, limit=None).arrivals) for name in PACKAGED} == {
        "azure-conv-500": 500,
        "mooncake-conv-300": 300,
    }


def test_a_name_that_no_file_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="no file has a null byte"):
        read_trace("a\0b")
