"""The check against runs that others measured: it judges, it can fail, and bad input is one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from request_logs import CONFIG, TRUTH, log_of, workload

from sim.replay import replay

ROOT = Path(__file__).parent.parent


def check(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "validate_external.py"), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def bench_folder(folder: Path, wrong: float = 1.0) -> Path:
    """A run of the simulator in LLMServingSim's format; its second half takes `wrong` times as long."""
    work = workload(40)
    log = log_of(work, replay(work, CONFIG, TRUTH))
    half = log.last_ns.max() / 2e9

    def late(ns: int) -> float:
        return 500.0 + (ns / 1e9 if ns / 1e9 <= half else half + wrong * (ns / 1e9 - half))

    folder.mkdir()
    rows = [
        {
            "request_id": name,
            "input_toks": int(log.prompt_tokens[n]),
            "output_toks": int(log.output_tokens[n]),
            "arrival_time": 1.7e9 + int(log.arrival_ns[n]) / 1e9,
            "queued_ts": 500.0 + int(log.arrival_ns[n]) / 1e9,
            "scheduled_ts": max(late(int(log.scheduled_ns[n])), 500.0 + int(log.arrival_ns[n]) / 1e9),
            "first_token_ts": late(int(log.first_ns[n])),
            "last_token_ts": late(int(log.last_ns[n])),
        }
        for n, name in enumerate(log.request_id)
    ]
    settings = {"max_num_seqs": 32, "max_num_batched_tokens": 1024, "async_scheduling": True}
    meta = {"model": "some/model", "engine_kwargs": settings, "kv_cache": {"num_gpu_blocks": CONFIG.num_blocks + 1}}
    (folder / "meta.json").write_text(json.dumps(meta))
    (folder / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_an_external_run_is_predicted_and_judged(tmp_path: Path) -> None:
    bench_folder(tmp_path / "good")
    out = tmp_path / "result.json"
    done = check("good", "--cut", "0.5", "--json", str(out), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "3 of 3 limits kept" in done.stdout
    (result,) = json.loads(out.read_text())["results"]
    assert {row[""] for row in result["rows"]} == {"pass", ""}
    assert all(abs(row["error %"]) < 1.5 for row in result["rows"] if "mean" in row["figure"])


def test_an_external_run_that_changes_after_the_cut_is_missed(tmp_path: Path) -> None:
    """Steps that get 1.2 times as long are in no first half: the verdict must be able to fail."""
    bench_folder(tmp_path / "slower", wrong=1.2)
    done = check("slower", "--cut", "0.5", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "FAIL" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nowhere"], "nowhere"),
        (["good", "--cut", "1.5"], "--cut"),
        (["good", "--cut", "0.5", "--json", "no/where.json"], "no/where.json"),
        (["good", "--engine", "max_num_seqs"], "--engine"),
        (["serve.json"], "max_num_seqs"),
    ],
)
def test_the_external_check_refuses_in_one_line(tmp_path: Path, arguments: list[str], named: str) -> None:
    bench_folder(tmp_path / "good")
    detail = {"input_lens": [9], "output_lens": [3], "ttfts": [0.1], "itls": [[0.01, 0.01]], "start_times": [1.0]}
    (tmp_path / "serve.json").write_text(json.dumps(detail))
    done = check(*arguments, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert named in done.stderr
