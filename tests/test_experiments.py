"""The scripts that the README quotes: they run from anywhere, and the published run comes out as it should."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asyncsched.timeline import Span, Timeline

ROOT = Path(__file__).parent.parent


def script(name: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "experiments" / name), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_published_run_is_input_prediction_and_fit(tmp_path: Path) -> None:
    done = script("published_run.py", "--json", folder=tmp_path)
    rows = {row["run"]: row for row in json.loads(done.stdout)["rows"]}
    sync, predicted, contention, both = rows.values()
    assert [row["the figure is"] for row in rows.values()] == ["input", "predicted", "fitted", "fitted"]
    assert sync["simulated s"] == pytest.approx(300.6, abs=1e-6)
    assert sync["GPU active"] == pytest.approx(0.76, abs=1e-6)
    assert predicted["simulated s"] == pytest.approx(228.5, abs=0.1)
    assert contention["simulated s"] == pytest.approx(233.0, abs=0.1)
    assert both["simulated s"] == pytest.approx(234.5, abs=0.1)
    assert both["GPU active"] == pytest.approx(0.994, abs=5e-4)


def test_the_demo_ends_with_real_generation_a_picture_and_a_trace(tmp_path: Path) -> None:
    done = script("demo.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Real generation: llama-" in done.stdout
    same = next(line for line in done.stdout.splitlines() if "same tokens as sync" in line)
    assert same.split()[-1] == "yes"
    generated = [line.split()[4:-1] for line in done.stdout.splitlines() if " generated, request 0: " in line]
    assert len(generated[0]) == 12
    assert generated[0] == generated[1]
    assert (tmp_path / "out" / "demo-generation.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert "300.6 s" in done.stdout
    assert "228.5 s" in done.stdout
    assert "Azure trace" in done.stdout
    assert (tmp_path / "out" / "demo-timeline.png").read_bytes().startswith(b"\x89PNG\r\n")
    events = json.loads((tmp_path / "out" / "demo-trace.json").read_text())["traceEvents"]
    assert {event["args"]["name"][:5] for event in events if event["name"] == "process_name"} == {"async", "synch"}
    assert {event["pid"] for event in events if event["ph"] == "X"} == {0, 1}


def test_the_demo_without_torch_says_what_to_install(tmp_path: Path) -> None:
    program = "import sys; sys.modules['torch'] = None; sys.path.insert(0, sys.argv[1])\n"
    program += "import pathlib, demo_generation as demo; demo.real_generation(pathlib.Path('p.png'))"
    done = subprocess.run(
        [sys.executable, "-c", program, str(ROOT / "experiments")],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    expected = "torch is not installed, so nothing was generated: pip install -e '.[torch]' in the clone\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


def test_costs_are_medians_of_the_decode_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a made-up run: its prefill is priced apart, and on a CPU the launch is what it does not compute."""
    monkeypatch.syspath_prepend(ROOT / "experiments")
    from demo_generation import SIZES, measured_costs

    spans = []
    for step, compute_us in enumerate((2000, 500, 400, 600, 9000)):
        for lane, name, us in (
            ("host", "plan", 10 + step),
            ("host", "fill", 20),
            ("host", "launch", 30 + compute_us + 3),
            ("h2d", "h2d", 1),
            ("compute", "carry", 100),
            ("compute", "forward", compute_us - 100),
            ("d2h", "d2h", 2),
            ("host", "commit", 7),
        ):
            spans.append(Span(lane, name, step, 0, 0, us * 1000, 8))
    found = measured_costs(Timeline(spans), on_cpu=True)
    assert found["host"] == {"plan_us": 12.5, "fill_us": 20, "launch_us": 30, "commit_us": 7}
    assert found["copy"] == {"h2d_latency_us": 1, "d2h_latency_us": 2}
    prefill = SIZES["requests"] * SIZES["prompt_tokens"]
    assert found["gpu"] == {"kind": "constant", "step_us": 550, "us_per_prefill_token": 1450 / prefill}
    assert measured_costs(Timeline(spans), on_cpu=False)["host"]["launch_us"] == 583


@pytest.mark.parametrize(
    ("name", "decisions"),
    [
        ("does_async_pay.py", ["decision_llama-1b", "decision_llama-8b"]),
        ("how_many_gpus.py", ["decision_strict", "decision_easy"]),
        ("half_host_cost.py", ["decision_llama-1b", "decision_llama-8b"]),
    ],
)
def test_a_study_of_a_trace_ends_in_a_decision(name: str, decisions: list[str], tmp_path: Path) -> None:
    rows = "".join(f"{2 * number},{4000 + 500 * (number % 5)},{5 + 11 * number % 30}\n" for number in range(12))
    (tmp_path / "trace.csv").write_text("arrival,input,output\n" + rows)
    options = ["--trace", str(tmp_path / "trace.csv"), "--jobs", "1", "--json"]
    options += [] if name == "does_async_pay.py" else ["--requests", "20"]
    done = script(name, *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert all(answer[key] for key in decisions)
    assert len(answer["rows"]) >= 4


def test_a_sweep_on_two_processes_has_the_rows_of_one(tmp_path: Path) -> None:
    done = script("sweep_scaling.py", "--points", "6", "--requests", "5", "--json", folder=tmp_path)
    assert json.loads(done.stdout)["rows_equal"] is True


def test_a_study_checks_its_picture_before_the_work(tmp_path: Path) -> None:
    done = script("host_cost.py", "--plot", "no/where.png", folder=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "no/where.png" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("does_async_pay.py", "--trace", "nowhere.csv"), "error: workload.trace: 'nowhere.csv' is not allowed"),
        (("does_async_pay.py", "--requests", "0"), "argument --requests: '0' is not allowed; use a whole number"),
        (("half_host_cost.py", "--jobs", "0"), "argument --jobs: '0' is not allowed; use a whole number"),
        (("sweep_scaling.py", "--points", "-3"), "argument --points: '-3' is not allowed; use a whole number"),
        (("bench_core.py", "--batch", "0"), "--batch"),
        (("compare_peers.py", "--device", "tpu"), "error: device: 'tpu' is not allowed"),
        (("compare_peers.py", "--device", "cpu", "--config", "nowhere"), "error: config: 'nowhere' is not allowed"),
        (("compare_peers.py", "--device", "cpu", "--out", "no/x.json"), "error: --out: 'no/x.json' is not allowed"),
        (("record_h200.py", "--out", ".", "--config", "nowhere"), "error: config: 'nowhere' is not allowed"),
        (("record_h200.py", "--out", ".", "--minutes", "nan", "--dry-run"), "error: --minutes: nan is not allowed"),
    ],
)
def test_bad_options_of_a_script_are_found_before_the_work(
    arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    done = script(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["validate_h200.py", "drift_h200.py"])
def test_a_document_that_is_not_there_is_found_missing_before_the_work(name: str, tmp_path: Path) -> None:
    done = script(name, "--docs", "missing.md", "--json-out", "out.json", folder=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: --docs: 'missing.md' is not allowed; it cannot be read")
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("held", ["", '{"batch":', "[1]"])
def test_results_that_cannot_be_added_to_are_found_before_the_work(held: str, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    out.write_text(held)
    done = script("compare_peers.py", "--device", "cpu", "--out", "out.json", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: --out: 'out.json' is not allowed; it exists and ")
    assert out.read_text() == held
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_an_archive_that_cannot_be_continued_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "cpu-llama-tiny-fit.tar.xz").write_bytes(b"")
    done = script("record_h200.py", "--out", ".", "--dry-run", "--only", "fit", folder=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("error: run: 'cpu-llama-tiny-fit.tar.xz' is not allowed; it is not a whole .tar.xz")


def test_a_model_step_is_timed_and_a_variant_that_fails_is_one_line(tmp_path: Path) -> None:
    arguments = ("--config", "tiny", "--batch", "2", "--context", "20", "--variants", "eager,merged")
    done = script("model_step.py", *arguments, "--json", folder=tmp_path)
    eager, merged = json.loads(done.stdout)["rows"]
    assert (eager["variant"], merged["variant"]) == ("eager", "merged")
    assert eager["floor_ms"] == merged["floor_ms"] < min(eager["step_ms"], merged["step_ms"])
    done = script("model_step.py", *arguments, "--attention", "triton", folder=tmp_path)
    assert done.returncode == 0
    assert "merged: attention: 'triton' is not allowed" in done.stdout
    done = script("model_step.py", "--variants", "fast", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --variants: 'fast' is not allowed; use eager, compiled, merged, both, ")
    assert done.stderr.count("\n") == 1
    done = script("products.py", "--batch", "1,x", folder=tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: --batch: '1,x' is not allowed; use whole numbers of at least 1")


def test_the_simulator_bench_reports_both_ways_and_a_fleet(tmp_path: Path) -> None:
    done = script("bench_sim.py", "--rounds", "1", "--replicas", "3", "--requests", "40", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    leaps, steps, quarter, fleet = json.loads(done.stdout)["rows"]
    assert leaps["steps"] == steps["steps"] > 20_000
    assert leaps["simulated_s"] == steps["simulated_s"]
    assert leaps["cpu_s"] < steps["cpu_s"]
    assert (quarter["requests"], fleet["requests"]) == (10, 40)
    bad = script("bench_sim.py", "nowhere.csv", folder=tmp_path)
    assert bad.returncode == 2
    assert bad.stderr.startswith("error: workload.trace: 'nowhere.csv'")
    assert bad.stderr.count("\n") == 1
