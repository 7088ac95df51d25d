"""Sweeps that are kept on disk: killed half way they go on where they were; the same results on any workers."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from asyncsched.cli import main
from asyncsched.errors import ConfigError
from sim.design import Range, parse_range, random_points
from sim.results import Record, ResultFile, point_key
from sim.scenario import Scenario, override_values, read_preset
from sim.sweep import run_sweep

COMMAND = [sys.executable, "-m", "asyncsched.cli", "sweep"]
SCENARIO = """
mode = "async"
[engine]
max_num_seqs = 4
num_blocks = 64
[host]
plan_us = 300
[gpu]
kind = "constant"
step_us = 2000
[jitter]
kind = "lognormal"
host_sigma = 0.3
[workload]
kind = "synthetic"
num_requests = 30
prompt = { kind = "uniform", min_tokens = 4, max_tokens = 40 }
output = { kind = "lognormal", mean_tokens = 12, sigma = 0.5, max_tokens = 60 }
arrivals = { kind = "poisson", rate_per_s = 200 }
"""
RANDOM = ["--range", "host.scale=0.1:10:log", "--range", "max_num_seqs=1:8", "--vary", "mode=sync,async"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "small.toml").write_text(SCENARIO)
    monkeypatch.chdir(tmp_path)
    root = str(Path(__file__).parent.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    return tmp_path


def status_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["sweep", *arguments])
    return int(ended.value.code or 0)


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- the design ----------------------------------------------------------------------------------------------------


def test_random_points_depend_on_their_number_alone() -> None:
    ranges = {"a": Range(1, 4, False), "b": Range(0.1, 10.0, True), "c": Range(1, 1000, True)}
    many = random_points(ranges, {"d": ["x", "y"]}, 400, 0)
    assert random_points(ranges, {"d": ["x", "y"]}, 50, 0) == many[:50]
    assert random_points(ranges, {"d": ["x", "y"]}, 50, 1) != many[:50]
    assert Counter(point["a"] for point in many).keys() == {1, 2, 3, 4}
    assert all(isinstance(point["c"], int) and 1 <= point["c"] <= 1000 for point in many)
    assert min(Counter(point["d"] for point in many).values()) > 150
    low = sum(point["b"] < 1 for point in many)  # type: ignore[operator]
    assert 160 < low < 240  # equal factors are equally likely
    assert all(0.1 <= point["b"] <= 10 for point in many)  # type: ignore[operator]


@pytest.mark.parametrize(
    "text", ["a", "a=1", "a=1:", "a=x:2", "a=3:2", "a=0:2:log", "a=1:2:lin", "=1:2", "a=1:inf", "a=1:nan"]
)
def test_bad_ranges_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--range: .* is not allowed; use key=low:high"):
        parse_range(text)


def test_ranges() -> None:
    assert parse_range("host.scale=0.1:10:log") == ("host.scale", Range(0.1, 10, True))
    assert parse_range("max_num_seqs=16:256") == ("max_num_seqs", Range(16, 256, False))


# ---- the file ------------------------------------------------------------------------------------------------------


def test_equal_scenarios_have_one_key_however_they_are_written(tmp_path: Path) -> None:
    preset = read_preset("h200-llama-8b")

    def key(**values: object) -> str:
        return point_key(Scenario.from_dict(override_values(preset, values)))

    assert key(mode="async") == key(depth=2) == key(description="x")
    assert len({key(), key(depth=1), key(seed=1), key(**{"host.plan_us": 61})}) == 4
    trace = tmp_path / "t.csv"
    trace.write_text("arrival,input,output\n0,1,1\n")
    before = key(**{"workload.trace": str(trace)})
    trace.write_text("arrival,input,output\n0,1,2\n")
    os.utime(trace, (1, 1))  # so that no clock's coarseness hides the change
    assert key(**{"workload.trace": str(trace)}) != before


def test_half_a_line_is_cut_off_and_anything_else_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with ResultFile("--results", path) as file:
        file.add("k", Record({"a": 1}, {"b": 2}, ""))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"key": "half')
    with ResultFile("--results", path) as file:
        assert file.cut
        assert file.records == {"k": Record({"a": 1}, {"b": 2}, "")}
        with pytest.raises(ConfigError, match="another sweep is writing to it"), ResultFile("--results", path):
            pass
        file.add("l", Record({"a": 2}, {}, "oops"))
    assert [line.get("key") for line in lines_of(path)] == [None, "k", "l"]
    for content, reason in [
        (b"a,b\n1,2\n", "line 1 is no JSON object"),
        (b"{}\n", "it is no result file of a sweep"),
        (b"half", "it is no result file of a sweep"),
        (whole + b"oops\n" + whole, "line 3 is no JSON object"),
        (whole + b"{}\n", "line 3 has no 'point'"),
        (whole.replace(b'"version": "', b'"version": "x'), "it was written by asyncsched x"),
    ]:
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=reason), ResultFile("--results", path):
            pass
        assert path.read_bytes() == content  # what is somebody else's stays as it is
    path.write_bytes(whole[:9])  # killed while it wrote its first line
    with ResultFile("--results", path):
        assert path.read_bytes() == whole[: whole.index(b"\n") + 1]
    with (
        pytest.raises(ConfigError, match=r"it cannot be written \(Is a directory\)"),
        ResultFile("--results", tmp_path),
    ):
        pass


def test_what_is_in_the_file_is_not_run_again_but_what_failed_is(tmp_path: Path) -> None:
    ran: list[int] = []

    def simulate(scenario: Scenario) -> dict[str, object]:
        ran.append(scenario.depth)
        if scenario.depth == 3 and ran.count(3) == 1:
            raise ZeroDivisionError("once")
        return {"depth": scenario.depth}

    points: list[dict[str, object]] = [{"depth": 1}, {"depth": 3}, {"mode": "async"}, {"depth": 2}]

    def sweep(points: list[dict[str, object]]) -> list[tuple[object, object]]:
        with ResultFile("--results", tmp_path / "r.jsonl") as file:
            rows = run_sweep(read_preset("hf-8b-bs32"), points, simulate=simulate, results=file, columns=["depth"])
        return [(row["depth"], row["error"]) for row in rows]

    assert sweep(points) == [(1, ""), (3, "ZeroDivisionError: once"), (2, ""), (2, "")]
    assert ran == [1, 3, 2]  # mode async is depth 2
    assert sweep([{"depth": 4}, *points]) == [(4, ""), (1, ""), (3, ""), (2, ""), (2, "")]
    assert ran == [1, 3, 2, 4, 3]


def test_a_killed_sweep_goes_on_where_it_was(folder: Path) -> None:
    """Killed outright after some points, as often as it takes: no point is lost, none is run twice."""
    sweep = [*COMMAND, "small.toml", *RANDOM, "--sample", "60"]
    resumed = [*sweep, "--jobs", "2", "--results", "r.jsonl", "--out", "resumed.csv"]
    kept, kills = 0, 0
    while kills < 2:
        process = subprocess.Popen(resumed, stdout=subprocess.DEVNULL, start_new_session=True)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            lines = (folder / "r.jsonl").read_bytes().count(b"\n") if (folder / "r.jsonl").exists() else 0
            if lines > kept + 8:
                break
            time.sleep(0.005)
        assert process.poll() is None, "it ended before it could be killed"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        before = (folder / "r.jsonl").read_bytes()
        kept, kills = before.count(b"\n"), kills + 1
        assert 8 < kept < 61
    before = before[: before.rfind(b"\n") + 1]
    assert subprocess.run(resumed, stdout=subprocess.DEVNULL, check=False).returncode == 0
    assert (folder / "r.jsonl").read_bytes().startswith(before)
    keys = Counter(line.get("key") for line in lines_of(folder / "r.jsonl"))
    assert len(keys) == 61  # the header has none
    assert set(keys.values()) == {1}
    assert subprocess.run([*sweep, "--out", "once.csv"], stdout=subprocess.DEVNULL, check=False).returncode == 0
    assert (folder / "resumed.csv").read_bytes() == (folder / "once.csv").read_bytes()


@pytest.mark.parametrize("backend", ["ray", "dask"])
def test_a_cluster_gives_the_same_as_this_process(backend: str, folder: Path) -> None:
    if importlib.util.find_spec(backend if backend == "ray" else "distributed") is None:
        pytest.skip(f"{backend} is not installed: pip install '.[{backend}]'")
    for name, options in {"alone": ["--jobs", "1"], "cluster": ["--backend", backend, "--jobs", "2"]}.items():
        files = ["--out", f"{name}.csv", "--results", f"{name}.jsonl"]
        done = subprocess.run(
            [*COMMAND, "small.toml", *RANDOM, "--sample", "24", *options, *files],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
    assert (folder / "alone.csv").read_bytes() == (folder / "cluster.csv").read_bytes()
    alone, cluster = (sorted((folder / f"{name}.jsonl").read_text().splitlines()) for name in ("alone", "cluster"))
    assert alone == cluster


# ---- the command ---------------------------------------------------------------------------------------------------


def test_a_random_sweep_has_a_row_per_point(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("small.toml", *RANDOM, "--sample", "5", "--out", "p.csv") == 0
    assert "5 runs (simulated)" in capsys.readouterr().out
    with (folder / "p.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 5
    assert all(0.1 <= float(row["host.scale"]) <= 10 and row["error"] == "" for row in rows)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--range", "host.scale=1:2"], "--range: 'host.scale=1:2' is not allowed; say with --sample how many"),
        (
            ["--range", "host.scale=1:2", "--sample", "0"],
            "--sample: '0' is not allowed; use a whole number of at least 1",
        ),
        (["--range", "host.scale=1:2", "--sample", "x"], "--sample: 'x' is not allowed"),
        (["--range", "host.scale=1:2", "--sample", "9999999999"], "use a whole number of at most 999,999,999"),
        (["--range", "host.scale=1:2", "--vary", "host.scale=1", "--sample", "2"], "host.scale is varied already"),
        (["--vary", "depth=1", "--sample-seed", "1"], "--sample-seed: '1' is not allowed; say with --sample how many"),
        (["--vary", "depth=1", "--backend", "slurm"], "--backend: 'slurm' is not allowed; use one of local, ray, dask"),
        (["--vary", "depth=1", "--results", "r.csv"], "--results: 'r.csv' is not allowed; its name must end in .jsonl"),
        (["--vary", "depth=1", "--results", "no/r.jsonl"], "it cannot be written (No such file or directory)"),
        (["--range", "host.scale=1:2", "--sample", "2", "--plot", "p.png"], "a grid can be drawn"),
        ([], "--vary: missing; name at least one key"),
    ],
)
def test_bad_options_are_one_line(
    options: list[str], error: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of("small.toml", *options) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert error in captured.err


def test_long_varied_values_are_shown_whole(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    buckets = "[1,2,3,4]"
    assert (
        status_of("small.toml", "--vary", f"decode_buckets={buckets},[4]", "--vary", "description='" + "x" * 150 + "'")
        == 0
    )
    assert capsys.readouterr().out.count("x") >= 300


def test_an_interrupt_keeps_what_is_done(folder: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "small.toml", *RANDOM, "--sample", "500", "--results", "r.jsonl"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (folder / "r.jsonl").exists() and (folder / "r.jsonl").read_bytes().count(b"\n") > 3:
            break
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors == "error: interrupted\n"
    assert 3 < len(lines_of(folder / "r.jsonl")) < 500
