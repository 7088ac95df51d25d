"""`asyncsched import`: a log of vLLM's requests becomes a scenario that gives the log's figures again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from request_logs import CONFIG, TRUTH, log_of, workload

from asyncsched.cli import main
from asyncsched.plan import StepShape
from sim.costs import CopyCosts, HostCosts, LaneCosts, Overlap
from sim.replay import replay
from sim.run import simulate
from sim.scenario import load_scenario

SLICE = Path(__file__).parent / "data" / "llmservingsim" / "run"
SERVED = ("--set", "max_num_seqs=32", "--set", "max_num_batched_tokens=1024", "--set", "num_blocks=4000")

Captured = pytest.CaptureFixture[str]


def status_of(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as end:
        main(["import", *map(str, arguments)])
    assert isinstance(end.value.code, int)
    return end.value.code


def serve_result(**changes: Any) -> dict[str, Any]:
    """A run of the simulator as a result of vLLM's serving benchmark."""
    work = workload(40)
    replayed = replay(work, CONFIG, TRUTH)
    log = log_of(work, replayed)
    gaps = (log.last_ns - log.first_ns) / np.maximum(log.output_tokens - 1, 1) / 1e9
    return {
        "model_id": "some/model",
        "start_times": (1.7e9 + log.arrival_ns / 1e9).tolist(),
        "input_lens": log.prompt_tokens.tolist(),
        "output_lens": log.output_tokens.tolist(),
        "ttfts": ((log.first_ns - log.arrival_ns) / 1e9).tolist(),
        "itls": [[gap] * (count - 1) for gap, count in zip(gaps.tolist(), log.output_tokens.tolist(), strict=True)],
        **changes,
    }


def simulated_again(scenario: Path) -> dict[str, float]:
    summary = simulate(load_scenario(scenario)).summary()
    means = {f"{name}.mean": summary[name]["mean"] for name in ("ttft_ms", "tpot_ms", "e2el_ms")}
    return {**means, "makespan_s": summary["makespan_s"]}


def test_a_bench_folder_becomes_a_scenario_with_its_figures(tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "mine.toml"
    assert status_of(SLICE, "-o", out, "--json") == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["requests"] == 40
    scenario = load_scenario(out)
    assert (scenario.depth, scenario.engine["num_blocks"], scenario.engine["max_num_seqs"]) == (2, 2587, 256)
    figures = {row["figure"]: row for row in answer["figures"]}
    assert simulated_again(out) == pytest.approx({name: row["simulated"] for name, row in figures.items()}, rel=2e-3)
    assert abs(figures["tpot_ms.mean"]["error_pct"]) < 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.requests.csv", "mine.toml"]


def test_a_result_of_vllms_benchmark_becomes_a_scenario(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "serve.json").write_text(json.dumps(serve_result(), indent=1).replace("\n", "\r\n"))
    out = tmp_path / "mine.toml"
    assert status_of(tmp_path / "serve.json", *SERVED, "-o", out) == 0
    said = capsys.readouterr().out
    assert "The same requests at these prices" in said
    assert "note: the log does not say when requests were admitted" in said
    assert "note: host work is in the price of a step" in said
    log = log_of(workload(40), replay(workload(40), CONFIG, TRUTH))
    again = simulated_again(out)
    assert again["e2el_ms.mean"] == pytest.approx(float((log.last_ns - log.arrival_ns).mean()) / 1e6, rel=0.02)
    assert again["makespan_s"] == pytest.approx(int(log.last_ns.max()) / 1e9, rel=0.02)


def test_the_requests_are_not_written_over_the_log(tmp_path: Path, capsys: Captured) -> None:
    log = tmp_path / "serve.json"
    log.write_text(json.dumps(serve_result()))
    (tmp_path / "mine.requests.csv").symlink_to(log)
    before = log.read_bytes()
    assert status_of(log, *SERVED, "-o", tmp_path / "mine.toml") == 2
    assert "it is the file of the log too" in capsys.readouterr().err
    assert log.read_bytes() == before
    assert not (tmp_path / "mine.toml").exists()


def test_a_setting_that_is_given_counts(tmp_path: Path) -> None:
    assert status_of(SLICE, "--set", "engine.num_blocks=3000", "--set", "depth=1", "-o", tmp_path / "a.toml") == 0
    scenario = load_scenario(tmp_path / "a.toml")
    assert (scenario.depth, scenario.engine["num_blocks"]) == (1, 3000)


def test_learned_prices_are_the_same_as_a_scenarios() -> None:
    gpu = load_gpu()
    shapes = [
        StepShape(7, 7, 0, 7, 7, 900, 900, 0),
        StepShape(1, 0, 300, 300, 1, 300, 45_150, 0),
        StepShape(9, 8, 512, 520, 8, 2_000, 300_000, 0),
        StepShape(3, 2, 64, 66, 3, 900, 30_000, 0),
    ]
    for shape in shapes:
        assert gpu.forward_ns(shape, 0) == pytest.approx(TRUTH.forward_ns(shape, 0), abs=1)
    pairs = [shape.attn_pairs - shape.kv_tokens for shape in shapes]
    assert max(pairs) > 0  # a price of theirs that was lost would show


def load_gpu() -> LaneCosts:
    from pydantic import TypeAdapter

    from sim.costs import GpuCosts

    gpu = TypeAdapter(GpuCosts).validate_python(TRUTH.gpu_section())
    return LaneCosts(HostCosts(), CopyCosts(), gpu, Overlap(), depth=2, block_size=16)


# ---- bad input -----------------------------------------------------------------------------------------------------


def _without(name: str) -> dict[str, Any]:
    return {key: value for key, value in serve_result().items() if key != name}


BAD_RESULTS: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "it must be one JSON object"),
    "truncated": (lambda: json.dumps(serve_result()).encode()[:900], "it must be one JSON object"),
    "a list": (lambda: b"[1, 2]", "it must be one JSON object"),
    "not UTF-8": (lambda: b'{"model_id": "\xff"}', "it must be UTF-8 text"),
    "not detailed": (lambda: json.dumps(_without("itls")).encode(), "--save-detailed"),
    "a column of another type": (lambda: json.dumps(serve_result(ttfts="fast")).encode(), "ttfts: 'fast'"),
    "columns of two lengths": (lambda: json.dumps(serve_result(input_lens=[5])).encode(), "one entry per request"),
    "no request": (lambda: json.dumps({key: [] for key in serve_result()}).encode(), "one entry per request"),
    "a negative time": (lambda: json.dumps(serve_result(ttfts=[-1.0] * 40)).encode(), "request 0: ttfts: -1.0"),
    "NaN": (lambda: json.dumps(serve_result(ttfts=[float("nan")] * 40)).encode(), "NaN"),
    "a huge length": (lambda: json.dumps(serve_result(input_lens=[10**12] * 40)).encode(), "input_lens: 1000000000000"),
    "no tokens": (lambda: json.dumps(serve_result(output_lens=[0] * 40)).encode(), "output_lens: 0"),
    "a key twice": (lambda: b'{"ttfts": [], "ttfts": []}', "key ttfts twice"),
    "all failed": (lambda: json.dumps(serve_result(errors=["x"] * 40)).encode(), "all of them failed"),
    "one token each": (
        lambda: json.dumps(serve_result(output_lens=[1] * 40, itls=[[]] * 40)).encode(),
        "nothing in it tells how long a step takes",
    ),
}


def refused(capsys: Captured, *arguments: str | Path) -> str:
    assert status_of(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize("case", BAD_RESULTS)
def test_a_bad_result_is_one_line_and_writes_nothing(case: str, tmp_path: Path, capsys: Captured) -> None:
    content, said = BAD_RESULTS[case]
    (tmp_path / "serve.json").write_bytes(content())
    assert said in refused(capsys, tmp_path / "serve.json", *SERVED, "-o", tmp_path / "mine.toml")
    assert [path.name for path in tmp_path.iterdir()] == ["serve.json"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["none.json", "-o", "a.toml"], "log: 'none.json' is not allowed; it cannot be read (No such file"),
        (["folder.json", "-o", "a.toml"], "log: 'folder.json/meta.json' is not allowed; it cannot be read"),
        (["empty", "-o", "a.toml"], "log: 'empty/meta.json' is not allowed; it cannot be read (No such"),
        (["serve.json", "-o", "a.toml"], "engine.max_num_seqs: missing; the log does not say it; give it as --set"),
        (["serve.json", *SERVED, "-o", "a.json"], "--out: 'a.json' is not allowed; its name must end in .toml"),
        (
            ["serve.json", *SERVED, "-o", "no/a.toml"],
            "--out: 'no/a.toml' is not allowed; the folder 'no' does not exist",
        ),
        (["serve.json", *SERVED, "-o", "folder.toml"], "--out: 'folder.toml' is not allowed; it is a directory"),
        (["serve.json", *SERVED, "-o", "taken.toml"], "--out: 'taken.requests.csv' is not allowed; it is a directory"),
        (["serve.json", *SERVED], "missing parameter: out"),
        (["-o", "a.toml"], "missing parameter: log"),
        (["serve.json", *SERVED, "--set", "num_blocks=5", "-o", "a.toml"], "num_blocks=4000 is set already"),
        (["serve.json", "--set", "max_num_seq=5", "-o", "a.toml"], "engine.max_num_seq: 5 is not allowed; use one of"),
        (
            ["serve.json", "--set", "max_num_seqs", "-o", "a.toml"],
            "--set: 'max_num_seqs' is not allowed; use key=value",
        ),
        (["serve.json", *SERVED[2:], "--set", "max_num_seqs=0", "-o", "a.toml"], "max_num_seqs: 0 is not allowed"),
        (["serve.json", *SERVED[2:], "--set", "max_num_seqs=lots", "-o", "a.toml"], "max_num_seqs: 'lots' is not allo"),
        (["serve.json", *SERVED[:4], "--set", "num_blocks=7", "-o", "a.toml"], "num_blocks: 7 is not allowed; "),
    ],
)
def test_bad_options_are_one_line_and_write_nothing(
    options: list[str], said: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "serve.json").write_text(json.dumps(serve_result()))
    for name in ("folder.json", "empty", "folder.toml", "taken.requests.csv"):
        (tmp_path / name).mkdir()
    before = sorted(tmp_path.iterdir())
    assert said in refused(capsys, *options)
    assert sorted(tmp_path.iterdir()) == before


def test_a_log_that_is_cut_off_names_its_line(tmp_path: Path, capsys: Captured) -> None:
    folder = Path(shutil.copytree(SLICE, tmp_path / "run"))
    path = folder / "requests.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    assert f"requests.jsonl:{40}" in refused(capsys, folder, "-o", tmp_path / "mine.toml")
    assert [one.name for one in tmp_path.iterdir()] == ["run"]


def test_a_folder_that_cannot_be_written_to_is_refused(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "touch", refuse)
    assert "it cannot be written (Permission denied)" in refused(capsys, SLICE, "-o", tmp_path / "mine.toml")
