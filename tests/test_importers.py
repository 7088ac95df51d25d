"""What others recorded, read as runs: the values, and one line with file and line number for whatever is broken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncsched.errors import ConfigError
from asyncsched.run_files import decode, encode
from asyncsched.runs import UNKNOWN
from sim.importers import import_run

SLICE = Path(__file__).parent / "data" / "llmservingsim" / "run"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SLICE, tmp_path / "run"))


def rewrite(folder: Path, line: int, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "requests.jsonl"
    lines = path.read_text().splitlines()
    row = json.loads(lines[line - 1])
    change(row)
    lines[line - 1] = json.dumps(row)
    path.write_text("\n".join(lines) + "\n")


def test_a_bench_folder_is_a_run() -> None:
    run = import_run(SLICE)
    assert run.info.engine == {
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "max_model_len": 32768,
        "block_size": 16,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "admission": "fcfs",
        "num_blocks": 2587,  # 2588 with the null block
        "depth": 2,
    }
    assert run.info.notes == ()
    log = run.requests
    assert len(log) == 40
    assert log.prompt_tokens[:3].tolist() == [2358, 1034, 1320]
    assert log.max_tokens[:3].tolist() == log.output_tokens[:3].tolist() == [531, 769, 769]
    # The clocks meet at the first request: arrival 1787267980.0827403 is 27536.660701067 on the engine's clock.
    assert log.arrival_ns[0] == 0
    assert log.arrival_ns[1] == pytest.approx(0.3478317e9 - 0.0827403e9, abs=1000)
    assert log.scheduled_ns[1] == pytest.approx((27537.047613531 - 27536.660701067) * 1e9, abs=2)
    assert log.first_ns[0] == pytest.approx((27537.350135653 - 27536.660701067) * 1e9, abs=2)
    assert log.last_ns[0] == pytest.approx((27554.231018618 - 27536.660701067) * 1e9, abs=2)
    assert run.info.makespan_ns == log.last_ns.max()


def test_an_import_survives_the_projects_own_files() -> None:
    run = import_run(SLICE)
    again = decode(encode(run), "copy")
    assert again.info == run.info
    assert np.array_equal(again.requests.first_ns, run.requests.first_ns)


def test_what_the_file_does_not_say_is_noted(folder: Path) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    for key in ("resolved_config", "kv_cache", "hardware"):
        del meta[key]
    meta["engine_kwargs"]["max_model_len"] = None
    (folder / "meta.json").write_text(json.dumps(meta))
    info = import_run(folder).info
    assert "num_blocks" not in info.engine
    assert info.engine["depth"] == 2
    assert [note for note in info.notes if "does not say num_blocks" in note]
    assert [note for note in info.notes if "depth 2 follows from vLLM's version 0.19.0" in note]
    assert import_run(folder, {"num_blocks": 7, "depth": 1}).info.engine["num_blocks"] == 7


def test_lines_in_another_order_are_the_same_run(folder: Path) -> None:
    path = folder / "requests.jsonl"
    path.write_text("\r\n".join(reversed(path.read_text().splitlines())) + "\r\n")
    assert np.array_equal(import_run(folder).requests.arrival_ns, import_run(SLICE).requests.arrival_ns)


@pytest.mark.parametrize("key", ["request_id", "input_toks", "output_toks", "arrival_time", "first_token_ts"])
def test_a_missing_key_is_named_with_its_line(folder: Path, key: str) -> None:
    rewrite(folder, 7, lambda row: row.pop(key))
    with pytest.raises(ConfigError, match=rf"requests\.jsonl:7: {key}") as error:
        import_run(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("input_toks", 0),
        ("input_toks", -3),
        ("input_toks", 1.5),
        ("input_toks", True),
        ("output_toks", "12"),
        ("output_toks", 10**12),
        ("arrival_time", -1.0),
        ("arrival_time", None),
        ("queued_ts", 1e300),
        ("scheduled_ts", 0.0),  # before it was queued
        ("last_token_ts", 27537.0),  # before the first token
        ("request_id", ""),
        ("request_id", "bench-0"),  # twice
    ],
)
def test_a_bad_value_is_named_with_its_line(folder: Path, key: str, value: object) -> None:
    rewrite(folder, 7, lambda row: row.update({key: value}))
    with pytest.raises(ConfigError, match=r"requests\.jsonl:7: ") as error:
        import_run(folder)
    assert key in str(error.value) or "scheduled_ts" in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (b"", r"requests\.jsonl"),
        (b"\n\n", r"requests\.jsonl"),
        (b"[1, 2]\n", r"requests\.jsonl:1"),
        (b'{"request_id": "a", "request_id": "b"}\n', r"requests\.jsonl:1"),
        (b'{"request_id": "a", "input_toks": NaN}\n', r"requests\.jsonl:1"),
        (b'{"request_id": "a", "inp', r"requests\.jsonl:1"),
        (b'{"request_id": "a"\xff}\n', r"requests\.jsonl:1"),
        (b"[" * 100_000, r"requests\.jsonl:1"),
    ],
)
def test_a_broken_file_is_one_line(folder: Path, text: bytes, place: str) -> None:
    (folder / "requests.jsonl").write_bytes(text)
    with pytest.raises(ConfigError, match=place) as error:
        import_run(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["meta.json", "requests.jsonl"])
def test_a_file_that_is_not_there_or_is_a_folder(folder: Path, name: str) -> None:
    (folder / name).unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        import_run(folder)
    (folder / name).mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        import_run(folder)


@pytest.mark.parametrize(
    ("key", "value"),
    [("data_parallel_size", 2), ("pipeline_parallel_size", 4), ("speculative_config", {"method": "ngram"})],
)
def test_what_cannot_be_simulated_is_refused(folder: Path, key: str, value: object) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    del meta["resolved_config"]
    meta["engine_kwargs"][key] = value
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ConfigError, match=key):
        import_run(folder)


@pytest.mark.parametrize("key", ["max_num_seqs", "max_num_batched_tokens"])
def test_settings_that_must_be_there(folder: Path, key: str) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    del meta["resolved_config"], meta["engine_kwargs"][key]
    (folder / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(ConfigError, match=key):
        import_run(folder)
    assert import_run(folder, {key: 64}).info.engine[key] == 64


def serve_result() -> dict[str, Any]:
    """The fields of a detailed result, in the order in which the requests were sent: the second failed."""
    return {
        "model_id": "some/model",
        "request_rate": "inf",
        "completed": 2,
        "input_lens": [100, 5, 200],
        "output_lens": [3, 1, 2],
        "ttfts": [0.25, 0.0, 0.5],
        "itls": [[0.01, 0.02], [], [0.04]],
        "start_times": [1000.5, 1000.0, 1000.75],
        "generated_texts": ["a b c", "", "a b"],
        "errors": ["", "timeout", ""],
    }


def test_a_serving_benchmarks_result_is_a_run(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(serve_result()))
    run = import_run(path, {"max_num_seqs": 8})
    assert run.info.engine == {"max_num_seqs": 8}
    assert [note for note in run.info.notes if note.startswith("1 of 3 requests failed")]
    log = run.requests
    assert log.request_id == ("0", "2")
    assert log.arrival_ns.tolist() == [0, 250_000_000]
    assert log.first_ns.tolist() == [250_000_000, 750_000_000]
    assert log.last_ns.tolist() == [280_000_000, 790_000_000]
    assert [gaps.tolist() for gaps in log.gaps_ns] == [[10_000_000, 20_000_000], [40_000_000]]
    assert log.scheduled_ns.tolist() == [UNKNOWN, UNKNOWN]


def test_chunks_of_several_tokens_keep_first_and_last(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(serve_result() | {"output_lens": [5, 1, 2]}))
    run = import_run(path)
    assert run.requests.gaps_ns == ()
    assert run.requests.output_tokens.tolist() == [5, 2]
    assert [note for note in run.info.notes if "several tokens" in note]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"itls": None}, "itls"),
        ({"ttfts": [0.25, 0.0]}, "ttfts"),
        ({"input_lens": [100, 5, -1]}, "request 2: input_lens"),
        ({"output_lens": [3, 1, 0]}, "request 2: output_lens"),
        ({"start_times": ["now", 1, 2]}, "request 0: start_times"),
        ({"itls": [[0.01, "x"], [], [0.04]]}, "request 0: itls"),
        ({"errors": ["a", "b", "c"]}, "all of them failed"),
        ({"input_lens": []}, "input_lens"),
    ],
)
def test_a_broken_result_names_the_field(tmp_path: Path, change: dict[str, object], named: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(serve_result() | change))
    with pytest.raises(ConfigError, match=named) as error:
        import_run(path)
    assert "\n" not in str(error.value)


def test_a_result_without_details_says_how_to_get_them(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"completed": 3}))
    with pytest.raises(ConfigError, match="--save-detailed"):
        import_run(path)


def test_settings_are_checked_by_name() -> None:
    with pytest.raises(ConfigError, match=r"engine\.max_seqs"):
        import_run(SLICE, {"max_seqs": 1})
