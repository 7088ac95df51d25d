"""The command as its users meet it: real processes, exit statuses, one line for every error, files whole or absent."""

from __future__ import annotations

import csv
import itertools
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncsched.cli import main
from asyncsched.cli.figures import FIGURES, look_up, number, percent, write
from asyncsched.cli.simulate import SHOWN
from asyncsched.timeline import LANES

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-m", "asyncsched.cli"]

SCENARIO = """
seed = 5
mode = "async"
[engine]
max_num_seqs = 4
num_blocks = 64
[host]
plan_us = 300
fill_us = 200
launch_us = 50
commit_us = 100
[copy]
h2d_latency_us = 20
d2h_latency_us = 10
[gpu]
kind = "constant"
step_us = 2000
[jitter]
kind = "lognormal"
host_sigma = 0.3
gpu_sigma = 0.1
[workload]
kind = "synthetic"
num_requests = 12
prompt = { kind = "uniform", min_tokens = 4, max_tokens = 40 }
output = { kind = "lognormal", mean_tokens = 12, sigma = 0.5, max_tokens = 60 }
arrivals = { kind = "poisson", rate_per_s = 200 }
"""

POLICIES = """
import pathlib, time
class Raises:
    def admission_key(self, request):
        raise RuntimeError("first line\\nsecond line")
class Slow:
    def admission_key(self, request):
        pathlib.Path("started").touch()
        time.sleep(1.5)
        return request.number
class Stalls:
    def admission_key(self, request):
        pathlib.Path("started").touch()
        time.sleep(60)
class NoMethod:
    pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of the commands, with a small scenario and some policies."""
    (tmp_path / "small.toml").write_text(SCENARIO)
    (tmp_path / "users_policies.py").write_text(POLICIES)
    (tmp_path / "empty.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n")
    (tmp_path / "broken.toml").write_text("[gpu\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), **more}


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The real command, in the current folder."""
    return subprocess.run(
        [*COMMAND, *arguments], env=environment(**variables), capture_output=True, text=True, check=False
    )


def in_process(*arguments: str) -> int:
    """The same without a new process."""
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert isinstance(end.value.code, int)
    return end.value.code


def json_of(*arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert in_process(*arguments) == 0
    captured = capsys.readouterr()
    assert captured.err == ""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    value = json.loads(captured.out, parse_constant=refuse)
    assert isinstance(value, dict)
    return value


# ---- bad input -----------------------------------------------------------------------------------------------------

SMALL = ("simulate", "small.toml")

# Arguments, and what the one line must say: field, value, what is allowed.
BAD_INPUT: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "unknown key": ((*SMALL, "--set", "host.plan_uss=3"), ("host.plan_uss: 3", "did you mean plan_us")),
    "wrong type": ((*SMALL, "--set", "host.plan_us='3 ms'"), ("host.plan_us: '3 ms'", "number")),
    "wrong unit": ((*SMALL, "--set", "host.plan_ms=3"), ("host.plan_ms: 3", "plan_us")),
    "negative time": ((*SMALL, "--set", "gpu.step_us=-1"), ("gpu.step_us: -1", "greater than or equal to 0")),
    "NaN time": ((*SMALL, "--set", "gpu.step_us=nan"), ("gpu.step_us: nan", "finite")),
    "zero blocks": ((*SMALL, "--set", "engine.num_blocks=0"), ("engine.num_blocks: 0", "at least 1")),
    "prompt larger than the pool": (
        (*SMALL, "--set", "engine.num_blocks=2", "--set", "workload.prompt={kind='fixed',tokens=50}"),
        ("workload", "none of 12 requests", "prompt 50", "over num_blocks 2"),
    ),
    "policy that does not import": (
        (*SMALL, "--set", "engine.victim=nowhere:Policy"),
        ("engine.victim: 'nowhere:Policy'", "No module named 'nowhere'", "latest-arrival"),
    ),
    "depth 0": ((*SMALL, "--set", "depth=0"), ("depth: 0", "1")),
    "empty workload": ((*SMALL, "--set", "workload.num_requests=0"), ("workload.num_requests: 0", "1")),
    "unwritable output": ((*SMALL, "--trace", "no/where.json"), ("--trace: 'no/where.json'", "'no' does not exist")),
}

MORE_BAD_INPUT: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "empty trace": (
        ("simulate", "--preset", "h200-llama-8b", "--set", "workload.trace=empty.csv"),
        ("workload.trace: 'empty.csv'", "at least one request"),
    ),
    "policy without the method": (
        (*SMALL, "--set", "engine.admission=users_policies:NoMethod"),
        ("engine.admission: 'users_policies:NoMethod'", "admission_key"),
    ),
    "bad mode": ((*SMALL, "--set", "mode=asink"), ("mode: 'asink'", "static, sync, async")),
    "mode against depth": ((*SMALL, "--set", "mode=sync", "--set", "depth=2"), ("depth: 2", "mode 'sync' has depth 1")),
    "broken TOML": (("simulate", "broken.toml"), ("scenario: 'broken.toml'", "not valid TOML")),
    "missing scenario": (("simulate", "missing.toml"), ("scenario: 'missing.toml'", "No such file")),
    "folder for a scenario": (("simulate", "."), ("scenario: '.'", "directory")),
    "unknown preset": (("simulate", "--preset", "hf-8b"), ("preset: 'hf-8b'", "hf-8b-bs32")),
    "no scenario": (("simulate",), ("scenario: missing", "--preset")),
    "scenario and preset": ((*SMALL, "--preset", "hf-8b-bs32"), ("--preset: 'hf-8b-bs32'", "'small.toml'", "leave")),
    "set without value": ((*SMALL, "--set", "depth"), ("--set: 'depth'", "key=value")),
    "trace without value": ((*SMALL, "--trace"), ("--trace: ''", "requires an argument")),
    "trace of another kind": ((*SMALL, "--trace", "x.txt"), ("--trace: 'x.txt'", "must end in .json")),
    "plot of another kind": ((*SMALL, "--plot", "x.gif"), ("--plot: 'x.gif'", ".png or .svg or .pdf")),
    "trace over the scenario": (
        ("simulate", "kept.json", "--trace", "./kept.json"),
        ("--trace: 'kept.json'", "it is the file of the scenario too"),
    ),
    "plot into a folder": ((*SMALL, "--plot", "folder.png"), ("--plot: 'folder.png'", "directory")),
    "links in a circle": ((*SMALL, "--trace", "circle.json"), ("--trace: 'circle.json'", "cannot be written")),
    "output that is no file": ((*SMALL, "--trace", "pipe.json"), ("--trace: 'pipe.json'", "cannot be replaced")),
    "steps alone": ((*SMALL, "--steps", "1:2"), ("--steps: '1:2'", "--trace")),
    "steps backwards": ((*SMALL, "--steps", "5:4", "--trace", "t.json"), ("--steps: '5:4'", "FIRST:LAST")),
    "steps beyond the run": ((*SMALL, "--steps", "9999:9999", "--trace", "t.json"), ("--steps: '9999:9999'", "0 to ")),
    "more steps than can be drawn": ((*SMALL, "--steps", "0:500", "--plot", "p.png"), ("--steps: '0:500'", "at most")),
    "unknown option": ((*SMALL, "--jsn"), ("'--jsn'", "no such option", "--json")),
    "extra argument": ((*SMALL, "other.toml"), ("other.toml", "--help")),
    "unknown command": (("simulat",), ("simulat", "--help")),
    "more blocks than memory": (
        (*SMALL, "--set", "num_blocks=999999999999"),
        ("engine.num_blocks: 999999999999", "10,000,000"),
    ),
    "rows larger than memory": (
        (*SMALL, "--set", "max_model_len=999999999999"),
        ("engine.max_model_len: 999999999999", "at most 8,589,934,592"),
    ),
    "nothing to vary": (("sweep", "small.toml"), ("--vary: missing", "host.scale=1,2,4")),
    "vary without values": (("sweep", "small.toml", "--vary", "depth"), ("--vary: 'depth'", "key=value,value")),
    "vary an unknown key": (("sweep", "small.toml", "--vary", "dept=1,2"), ("dept: 1", "did you mean depth")),
    "vary a key twice": (
        ("sweep", "small.toml", "--vary", "depth=1", "--vary", "depth=2"),
        ("--vary: 'depth=2'", "varied already"),
    ),
    "vary a key in both spellings": (
        ("sweep", "small.toml", "--vary", "max_num_seqs=1", "--vary", "engine.max_num_seqs=2"),
        ("--vary: 'engine.max_num_seqs=2'", "varied already"),
    ),
    "vary to equal values": (
        ("sweep", "small.toml", "--vary", "host.scale=1,1.0"),
        ("--vary: 'host.scale=1,1.0'", "1.0 is there twice", "host.scale once"),
    ),
    "vary what is set": (
        ("sweep", "small.toml", "--vary", "max_num_seqs=1,2", "--set", "engine.max_num_seqs=4"),
        ("--set: 'engine.max_num_seqs=4'", "max_num_seqs is varied"),
    ),
    "vary the depth of a mode that is set": (
        ("sweep", "small.toml", "--vary", "depth=1,2", "--set", "mode=async"),
        ("--set: 'mode=async'", "depth is varied"),
    ),
    "set twice": ((*SMALL, "--set", "seed=1", "--set", "seed=2"), ("--set: 'seed=2'", "seed=1 is set already")),
    "set beside the option for it": (
        (*SMALL, "--set", "replicas.count=2", "--replicas", "3"),
        ("--set: 'replicas.count=3'", "replicas.count=2 is set already"),
    ),
    "vary to nothing but bad values": (("sweep", "small.toml", "--vary", "depth=0,-1"), ("depth: 0", "1")),
    "no jobs": (("sweep", "small.toml", "--vary", "depth=1", "--jobs", "0"), ("--jobs: '0'", "number of processes")),
    "jobs of another type": (("sweep", "small.toml", "--vary", "depth=1", "--jobs", "two"), ("--jobs: 'two'", "-1")),
    "unknown metric": (
        ("sweep", "small.toml", "--vary", "depth=1", "--metric", "ttft_ms"),
        ("--metric: 'ttft_ms'", "ttft_ms.p9"),
    ),
    "sweep to another kind of file": (
        ("sweep", "small.toml", "--vary", "depth=1", "--out", "x.json"),
        ("--out: 'x.json'", "must end in .csv"),
    ),
    "three keys to draw": (
        ("sweep", "small.toml", "--vary", "depth=1", "--vary", "seed=1", "--vary", "mode=sync", "--plot", "p.png"),
        ("--plot: 'p.png'", "one or two varied keys"),
    ),
}


def check_error(status: int, out: str, err: str, said: tuple[str, ...]) -> None:
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    for part in said:
        assert part in err


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_and_status_2(case: str, folder: Path) -> None:
    arguments, said = BAD_INPUT[case]
    before = sorted(folder.iterdir())
    done = command(*arguments)
    check_error(done.returncode, done.stdout, done.stderr, said)
    assert [path for path in sorted(folder.iterdir()) if path.name != "__pycache__"] == before


@pytest.mark.parametrize("case", MORE_BAD_INPUT)
def test_more_bad_input_is_one_line_and_status_2(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "folder.png").mkdir()
    os.mkfifo(folder / "pipe.json")  # no real device: were the check lost, this test would replace it
    (folder / "circle.json").symlink_to("circle.json")
    (folder / "kept.json").write_text("{}")
    arguments, said = MORE_BAD_INPUT[case]
    before = sorted(folder.iterdir())
    status = in_process(*arguments)
    check_error(status, *capsys.readouterr(), said)
    assert [path for path in sorted(folder.iterdir()) if path.name != "__pycache__"] == before


def test_an_output_is_checked_before_the_run(folder: Path) -> None:
    """A policy would leave a mark if the simulation began."""
    done = command(*SMALL, "--set", "engine.admission=users_policies:Stalls", "--plot", "no/where.png")
    assert done.returncode == 2
    assert not (folder / "started").exists()


def test_a_policy_that_raises_is_one_line_and_status_1(folder: Path) -> None:
    done = command(*SMALL, "--set", "engine.admission=users_policies:Raises", "--trace", "t.json")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "first line second line" in done.stderr
    assert not (folder / "t.json").exists()


def test_some_rejected_requests_are_a_warning(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert in_process(*SMALL, "--set", "engine.num_blocks=2", "--json") == 0
    captured = capsys.readouterr()
    summary = json.loads(captured.out)
    assert 0 < summary["rejected"] < 12
    assert summary["completed"] == 12 - summary["rejected"]
    assert captured.err.startswith(f"warning: workload: {summary['rejected']} of 12 requests ")
    assert "over num_blocks 2" in captured.err
    assert captured.err.count("\n") == 1


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_interrupt_is_one_line_and_status_130(folder: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, *SMALL, "--set", "engine.admission=users_policies:Stalls", "--trace", "t.json"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(folder / "started")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (130, "", "error: interrupted\n")
    assert not (folder / "t.json").exists()


@pytest.mark.parametrize("form", [("--json",), ()])
def test_a_reader_that_leaves_is_no_error(form: tuple[str, ...], folder: Path) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = subprocess.run(
        [*COMMAND, *SMALL, *form],
        env=environment(),
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write_end)
    assert done.stderr == ""
    assert done.returncode == 1


# ---- simulate ------------------------------------------------------------------------------------------------------


def test_json_has_what_is_promised(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = json_of(*SMALL, "--json", capsys=capsys)
    keys = "mode depth makespan_s steps gpu_active idle_s exposed_host_s limiting_lane output_tokens output_throughput"
    keys += " ttft_ms tpot_ms itl_ms e2el_ms preemptions overshoot_tokens kv_peak wall_s seed scenario"
    assert set(keys.split()) <= set(summary)
    for latency in ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms"):
        assert set(summary[latency]) == {"mean", "p50", "p90", "p95", "p99"}
    assert (summary["mode"], summary["depth"], summary["seed"]) == ("async", 2, 5)
    assert summary["scenario"]["host"]["plan_us"] == 300
    assert summary["scenario"]["engine"]["block_size"] == 16  # a default, filled in
    assert 0 < summary["gpu_active"] < 1


def test_the_resolved_scenario_simulates_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sim.run import simulate
    from sim.scenario import Scenario

    summary = json_of(*SMALL, "--json", capsys=capsys)
    again = simulate(Scenario.from_dict(summary["scenario"])).summary()
    assert again["makespan_s"] == summary["makespan_s"]


def test_equal_seeds_print_equal_json(folder: Path) -> None:
    runs = [command(*SMALL, "--json", PYTHONHASHSEED=seed).stdout for seed in ("1", "2")]
    first, second = (json.loads(run) for run in runs)
    assert first.pop("wall_s") > 0
    assert second.pop("wall_s") > 0
    assert first == second
    other = json.loads(command(*SMALL, "--json", "--set", "seed=6").stdout)
    assert other["makespan_s"] != first["makespan_s"]


def test_a_table_names_and_explains_every_figure(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert in_process(*SMALL) == 0
    lines = capsys.readouterr().out.splitlines()
    summary = json_of(*SMALL, "--json", capsys=capsys)
    assert lines[0] == "small.toml, async (depth 2), seed 5: simulated"
    for key in SHOWN:
        cells = (FIGURES[key].label, write(key, look_up(summary, key)), FIGURES[key].meaning)
        assert any(all(cell in line for cell in cells) for line in lines), cells


def test_every_figure_is_in_the_summary(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = json_of(*SMALL, "--set", "enable_prefix_caching=true", "--goodput", "ttft:9", "--json", capsys=capsys)
    assert [key for key in FIGURES if look_up(summary, key) is None] == ["prefix_cache.ideal_block_rate"]  # of traces


def test_a_trace_has_a_track_per_lane_without_overlaps(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = json_of(*SMALL, "--json", "--trace", "t.json", capsys=capsys)
    events = json.loads((folder / "t.json").read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(tracks.values()) == sorted(LANES)
    spans: dict[str, list[tuple[float, float, int]]] = {lane: [] for lane in LANES}
    for event in events:
        if event["ph"] == "X":
            spans[tracks[event["tid"]]].append((event["ts"], event["ts"] + event["dur"], event["args"]["step"]))
    for lane, found in spans.items():
        found.sort()
        assert {step for _, _, step in found} == set(range(summary["steps"])), lane
        assert all(before[1] <= after[0] + 1e-6 for before, after in itertools.pairwise(found)), lane
    computed_us = sum(end - start for start, end, _ in spans["compute"])
    assert computed_us == pytest.approx(1e6 * summary["makespan_s"] * summary["gpu_active"])


def test_steps_choose_what_a_trace_shows(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_of(*SMALL, "--json", "--trace", "t.json", "--steps", "3:5", capsys=capsys)
    events = json.loads((folder / "t.json").read_text())["traceEvents"]
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {3, 4, 5}


def test_a_plot_is_a_picture_and_replaces_the_old_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "p.png").write_text("old")
    (folder / "link.png").symlink_to("p.png")
    json_of(*SMALL, "--json", "--plot", "link.png", capsys=capsys)
    assert (folder / "link.png").is_symlink()
    assert (folder / "p.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert not list(folder.glob(".asyncsched*"))


# ---- sweep ---------------------------------------------------------------------------------------------------------

GRID = ("sweep", "small.toml", "--vary", "host.scale=0.5,1,4", "--vary", "mode=sync,async")


def test_a_sweep_is_equal_for_any_number_of_jobs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for jobs in ("1", "2"):
        json_of(*GRID, "--jobs", jobs, "--out", f"{jobs}.csv", "--json", capsys=capsys)
    assert (folder / "1.csv").read_bytes() == (folder / "2.csv").read_bytes()
    rows = list(csv.DictReader((folder / "1.csv").read_text().splitlines()))
    assert [(row["host.scale"], row["mode"]) for row in rows] == [
        (scale, mode) for scale in ("0.5", "1", "4") for mode in ("sync", "async")
    ]
    alone = json_of(*SMALL, "--json", "--set", "host.scale=4", "--set", "mode=sync", capsys=capsys)
    assert float(rows[4]["makespan_s"]) == alone["makespan_s"]


def test_a_sweep_uses_as_many_jobs_as_it_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sim import sweep

    told = []
    run_sweep = sweep.run_sweep

    def record(*arguments: Any, jobs: int, **options: Any) -> Any:
        told.append(jobs)
        return run_sweep(*arguments, jobs=1, **options)

    monkeypatch.setattr(sweep, "run_sweep", record)
    for jobs in ("3", "-1"):
        assert in_process("sweep", "small.toml", "--vary", "depth=1", "--jobs", jobs) == 0
    assert told == [3, -1]


def test_sweep_json_is_one_object(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swept = json_of(*GRID, "--metric", "e2el_ms.p99", "--json", capsys=capsys)
    assert swept["vary"] == {"host.scale": [0.5, 1, 4], "mode": ["sync", "async"]}
    assert len(swept["points"]) == 6
    assert all(point["error"] == "" and point["e2el_ms.p99"] > 0 for point in swept["points"])
    assert swept["scenario"]["seed"] == 5


@pytest.mark.parametrize(
    ("vary", "drawn"),
    [
        (("host.scale=0.5,1",), "plot_curve"),
        (("mode=sync,async",), "plot_curve"),
        (("host.scale=0.5,1", "mode=sync,async"), "plot_curve"),
        (("mode=sync,async", "host.scale=0.5,1"), "plot_curve"),
        (("host.scale=0.5,1", "depth=1,2"), "plot_heatmap"),
    ],
)
def test_a_sweep_draws_its_curve_or_heat_map(
    vary: tuple[str, ...], drawn: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from asyncsched import plotting

    calls = []
    draw = getattr(plotting, drawn)

    def record(rows: Any, x: str, y: str, *more: Any, **options: Any) -> None:
        calls.append(x)
        draw(rows, x, y, *more, **options)

    monkeypatch.setattr(plotting, drawn, record)
    options = [part for text in vary for part in ("--vary", text)]
    assert in_process("sweep", "small.toml", *options, "--plot", "p.png") == 0
    assert (folder / "p.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert calls == ["mode" if vary == ("mode=sync,async",) else "host.scale"]
    assert "total time" in capsys.readouterr().out


def test_points_that_fail_keep_the_others_and_are_status_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raises = "engine.admission=users_policies:Raises,fcfs"
    status = in_process("sweep", "small.toml", "--vary", raises, "--vary", "mode=static,async", "--json")
    captured = capsys.readouterr()
    points = json.loads(captured.out, parse_constant=lambda constant: pytest.fail(constant))["points"]
    assert status == 1
    assert captured.err.startswith("error: 2 of 4 runs failed; the first: the run is void: ")
    assert points[0]["makespan_s"] is None
    assert points[2]["makespan_s"] > 0


@pytest.mark.parametrize("bad", ["max_num_seqs=0,4", "host.scale=1,nan", "workload.seed=1,2", "mode=sync,asink"])
def test_a_value_that_no_point_can_have_is_status_2(bad: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(folder.iterdir())
    kept = ["--results", "r.jsonl", "--out", "r.csv", "--plot", "r.png"]
    assert in_process("sweep", "small.toml", "--vary", bad, "--vary", "seed=1,2", *kept) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert bad.partition("=")[0].removeprefix("workload.") in captured.err
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    "options",
    [
        ("--set", "workload.trace=t.csv", "--vary", "depth=1,2"),
        ("--vary", "workload.trace=azure-conv-500,./t.csv"),
    ],
)
def test_a_sweeps_rows_are_not_written_over_its_trace(
    options: tuple[str, ...], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "arrival,input,output\n0,8,4\n1,8,4\n"
    (folder / "t.csv").write_text(text)
    assert in_process("sweep", "--preset", "h200-llama-8b", *options, "--out", "t.csv") == 2
    assert "--out: 't.csv' is not allowed; it is the file of workload.trace too" in capsys.readouterr().err
    assert (folder / "t.csv").read_text() == text


def test_a_sweep_in_which_nothing_can_run_is_bad_input(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        in_process("sweep", "small.toml", "--vary", "engine.num_blocks=1", "--set", "workload.prompt.min_tokens=30")
        == 2
    )
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "none of 12 requests can ever run" in captured.err


def test_a_sweep_in_which_all_runs_fail_is_status_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert in_process("sweep", "small.toml", "--vary", "engine.admission=users_policies:Raises") == 1
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert "first line second line" in captured.err


# ---- the rest ------------------------------------------------------------------------------------------------------


def test_presets_are_listed_and_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = json_of("presets", "--json", capsys=capsys)
    assert "hf-8b-bs32" in known
    assert in_process("presets") == 0
    out = capsys.readouterr().out
    assert all(name in out for name in known)
    summary = json_of("simulate", "--preset", "hf-8b-bs32", "--set", "mode=sync", "--json", capsys=capsys)
    assert summary["makespan_s"] == pytest.approx(300.6, abs=1e-6)
    assert 1 - summary["gpu_active"] == pytest.approx(0.24, abs=1e-6)


def test_version_and_help(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from asyncsched import __version__

    assert in_process("--version") == 0
    assert capsys.readouterr().out == f"asyncsched {__version__}\n"
    for arguments in ((), ("--help",), ("simulate", "--help")):
        assert in_process(*arguments) == 0
        assert "Usage: asyncsched" in capsys.readouterr().out


def test_help_loads_nothing_heavy(folder: Path) -> None:
    program = """
import sys
from asyncsched.cli import main
try:
    main(["sweep", "--help"])
finally:
    print("loaded:", sorted({"matplotlib", "simpy", "joblib", "sim"} & set(sys.modules)), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.stderr == "loaded: []\n"


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Our end and the command's end of a terminal."""
    ours, theirs = pty.openpty()
    yield ours, theirs
    os.close(ours)


def test_a_long_run_shows_progress_on_a_terminal_only(folder: Path, terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    arguments = (*SMALL, "--set", "engine.admission=users_policies:Slow", "--set", "workload.num_requests=1", "--json")
    process = subprocess.Popen(
        [*COMMAND, *arguments], env=environment(TERM="xterm"), stdout=subprocess.PIPE, stderr=theirs, text=True
    )
    os.close(theirs)
    shown = json.loads(process.communicate(timeout=20)[0])
    assert process.returncode == 0
    assert b"simulating" in os.read(ours, 65536)
    quiet = command(*arguments)
    assert quiet.stderr == ""
    piped = json.loads(quiet.stdout)
    assert {**shown, "wall_s": 0} == {**piped, "wall_s": 0}


@pytest.mark.parametrize(
    ("share", "text"), [(0, "0.0%"), (0.76, "76.0%"), (0.99996, "> 99.9%"), (1, "100.0%"), (0.0001, "< 0.1%")]
)
def test_shares_are_not_rounded_to_all_or_nothing(share: float, text: str) -> None:
    assert percent(share) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.0123, "0.012"), (3.14159, "3.14"), (228.46, "228.5"), (1147.4, "1,147"), (8192, "8,192")],
)
def test_numbers_have_about_four_digits(value: float, text: str) -> None:
    assert number(value) == text


def test_no_value_is_a_dash() -> None:
    assert write("ttft_ms.p50", None) == "-"
