"""Run folders and archives: what is written is read back, and whatever cannot be read is one line that says where."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asyncsched.config import default_buckets, default_mixed_buckets
from asyncsched.errors import ConfigError
from asyncsched.run_files import DECISIONS, INFO, REQUESTS, STEPS, encode, read_run, read_runs, write_archive, write_run
from asyncsched.runs import SPANS, STEP_COLUMNS, UNKNOWN, RequestLog, Run, RunInfo, StepLog


def integers(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def requests(**changes: object) -> RequestLog:
    columns = {
        "request_id": ("0/0", 'a,"b"'),
        "arrival_ns": integers(0, 5),
        "prompt_tokens": integers(7, 9),
        "max_tokens": integers(3, 2),
        "output_tokens": integers(3, 1),
        "priority": integers(0, 1),
        "scheduled_ns": integers(1, UNKNOWN),
        "first_ns": integers(10, 20),
        "last_ns": integers(30, 20),
        "entered_plan": integers(0, 1),
        "entered_commits": integers(0, 0),
        "aborted_plan": integers(UNKNOWN, UNKNOWN),
        "aborted_commits": integers(UNKNOWN, UNKNOWN),
        "finish": ("length", "stop"),
        "gaps_ns": (integers(8, 12), integers()),
    }
    return RequestLog(**{**columns, **changes})


def steps(count: int = 3) -> StepLog:
    columns = {name: np.arange(count, dtype=np.int64) for name in STEP_COLUMNS}
    for span in SPANS:
        columns[f"{span}_end_ns"] = columns[f"{span}_start_ns"] + 5
    columns["offload_start_ns"] = columns["offload_end_ns"] = np.full(count, UNKNOWN)
    return StepLog(columns)


def run(name: str = "one") -> Run:
    info = RunInfo(
        name=name,
        source="asyncsched",
        engine={"depth": 2, "num_blocks": 64, "decode_buckets": (1, 2)},
        device={"name": "CPU", "inline": True},
        makespan_ns=30,
        notes=("a note",),
    )
    return Run(info=info, requests=requests(), steps=steps(), decisions=("step 0", "step 1"))


def same(one: Run, other: Run) -> bool:
    return encode(one) == encode(other)


def test_a_folder_gives_back_what_was_written(tmp_path: Path) -> None:
    write_run(tmp_path / "run", run())
    read = read_run(tmp_path / "run")
    assert same(read, run())
    assert read.info.engine_config().decode_buckets == (1, 2)
    assert read.requests.gaps_ns[0].tolist() == [8, 12]
    assert read.requests.request_id[1] == 'a,"b"'
    assert not read.steps.has("offload").any()
    assert read.steps.duration("plan").tolist() == [5, 5, 5]


@pytest.mark.parametrize(
    ("recorded", "changes", "decode", "mixed"),
    [
        ((default_buckets(128), default_mixed_buckets(8192)), {}, default_buckets(128), default_mixed_buckets(8192)),
        ((default_buckets(128), ()), {"max_num_seqs": 50}, (1, 2, 4, 8, 16, 24, 32, 40, 48, 50), ()),
        ((default_buckets(128), ()), {"max_num_seqs": 256}, default_buckets(256), ()),
        (([1, 7, 90], [64, 512]), {"max_num_seqs": 50}, (1, 7), (64, 512)),
        (([1, 7, 90], [64, 512]), {"max_num_seqs": 200, "max_num_batched_tokens": 100}, (1, 7, 90), (64,)),
        ((default_buckets(128), ()), {"max_num_seqs": 50, "decode_buckets": (3,)}, (3,), ()),
    ],
)
def test_sizes_of_captured_steps_follow_a_limit_that_changes(
    recorded: tuple[Sequence[int], Sequence[int]],
    changes: dict[str, object],
    decode: tuple[int, ...],
    mixed: tuple[int, ...],
) -> None:
    """They were refused where the limit became smaller, and steps were launched kernel by kernel where it grew."""
    sizes = dict(zip(("decode_buckets", "mixed_buckets"), recorded, strict=True))
    engine = {"num_blocks": 64, "max_num_seqs": 128, "max_num_batched_tokens": 8192, **sizes}
    config = replace(run().info, engine=engine).engine_config(**changes)
    assert (config.decode_buckets, config.mixed_buckets) == (decode, mixed)


@pytest.mark.parametrize("sizes", ["x", 5, ["x"], [1.5], [True]])
def test_sizes_that_are_none_are_refused(sizes: object) -> None:
    engine = {"num_blocks": 64, "max_num_seqs": 128, "decode_buckets": sizes}
    for changes in ({}, {"max_num_seqs": 50}):
        with pytest.raises(ConfigError, match=r"^decode_buckets: .* is not allowed; use a list of batch sizes$"):
            replace(run().info, engine=engine).engine_config(**changes)


def test_what_nobody_saw_is_left_out(tmp_path: Path) -> None:
    one = run()
    bare = Run(info=replace(one.info, engine={}), requests=requests(gaps_ns=()))
    write_run(tmp_path / "run", bare)
    read = read_run(tmp_path / "run")
    assert len(read.steps) == 0
    assert read.requests.gaps_ns == ()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [f"{REQUESTS}.gz", INFO]
    with pytest.raises(ConfigError, match=r"num_blocks.*does not say how many KV blocks"):
        read.info.engine_config()


def test_an_archive_holds_runs_by_name(tmp_path: Path) -> None:
    path = tmp_path / "runs.tar.xz"
    write_archive(path, [run("b"), run("a")])
    assert [one.info.name for one in read_runs(path)] == ["a", "b"]
    assert same(read_run(f"{path}::b"), run("b"))
    with pytest.raises(ConfigError, match=r"use .*::.* with one of a, b"):
        read_run(f"{path}::c")
    with pytest.raises(ConfigError, match="with one of a, b"):
        read_run(path)
    with pytest.raises(ConfigError, match="two runs"):
        write_archive(tmp_path / "other.tar.xz", [run("a"), run("a")])
    assert not (tmp_path / "other.tar.xz").exists()


def test_equal_runs_give_equal_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_run(tmp_path / name, run())
        write_archive(tmp_path / f"{name}.tar.xz", [run()])
    for name in (INFO, f"{REQUESTS}.gz", f"{STEPS}.gz", f"{DECISIONS}.gz"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert (tmp_path / "one.tar.xz").read_bytes() == (tmp_path / "two.tar.xz").read_bytes()


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(ConfigError, match="not empty"):
        write_run(tmp_path, run())
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


INFO_FAULTS = {
    "": "run.json:1",
    "{": "run.json:1",
    "[]": "one JSON object",
    '{"schema": 2}': "schema: 2 .*reads schema 1",
    '{"schema": 1}': "name: None .*missing",
}


@pytest.mark.parametrize("text", INFO_FAULTS)
def test_info_that_is_none(tmp_path: Path, text: str) -> None:
    write_run(tmp_path / "run", run())
    (tmp_path / "run" / INFO).write_text(text)
    with pytest.raises(ConfigError, match=INFO_FAULTS[text]):
        read_run(tmp_path / "run")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("seed", "1", "seed: '1' .*whole number"),
        ("seed", True, "whole number"),
        ("host_delay_us", float("nan"), "a number"),
        ("host_delay_us", -1, "from 0"),
        ("makespan_ns", -1, "at least 0"),
        ("engine", {"detph": 2}, "engine.detph"),
        ("engine", [], "a table"),
        ("notes", "x", "a list of texts"),
        ("more", 1, "unknown key"),
    ],
)
def test_info_with_a_wrong_value(tmp_path: Path, key: str, value: object, message: str) -> None:
    write_run(tmp_path / "run", run())
    path = tmp_path / "run" / INFO
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(ConfigError, match=message) as caught:
        read_run(tmp_path / "run")
    assert "run.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def edited(lines: list[str], row: int, column: str, value: str) -> list[str]:
    """One field of a table without quotes changed."""
    fields = lines[row].split(",")
    fields[lines[0].split(",").index(column)] = value
    return [*lines[:row], ",".join(fields), *lines[row + 1 :]]


@pytest.mark.parametrize("value", ["-1", "1.5", "nan", "inf", "x", "9" * 30, " 1", "1_0", "\u0661"])
def test_a_number_that_is_none_is_named_with_file_line_and_field(tmp_path: Path, value: str) -> None:
    folder = tmp_path / "run"
    write_run(folder, run())
    lines = gzip.decompress((folder / f"{STEPS}.gz").read_bytes()).decode().splitlines()
    (folder / STEPS).write_text("\n".join(edited(lines, 2, "num_seqs", value)) + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"steps\.csv:3: num_seqs"):
        read_run(folder)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (REQUESTS, lambda data: b"", "the file is empty"),
        (REQUESTS, lambda data: data[: data.index(b"stop") - 2], r"requests\.csv:3: .*fields"),
        (REQUESTS, lambda data: data.replace(b"length", b"bored"), r"requests\.csv:2: finish: 'bored'"),
        (REQUESTS, lambda data: data.replace(b"8 12", b"8"), "gaps_ns"),
        (REQUESTS, lambda data: data.replace(b"8 12", b"8 x"), r"requests\.csv:2: gaps_ns"),
        (REQUESTS, lambda data: data.replace(b"priority", b"prio"), r"requests\.csv:1: 'prio'"),
        (REQUESTS, lambda data: data.replace(b"first_ns", b"arrival_ns"), "'arrival_ns' .*once"),
        (REQUESTS, lambda data: data.replace(b"0/0", b"\xff"), r"requests\.csv:2: .*UTF-8"),
        (REQUESTS, lambda data: data.replace(b'"a,""b"""', b"0/0"), "request 0/0: request_id.*twice"),
        (STEPS, lambda data: data.replace(b"step,", b"stop,", 1), r"steps\.csv:1: 'stop'"),
        (STEPS, lambda data: data.replace(b"\n2,", b"\n0,"), "increase"),
    ],
)
def test_a_table_that_is_broken(tmp_path: Path, name: str, change: object, message: str) -> None:
    folder = tmp_path / "run"
    write_run(folder, run())
    data = gzip.decompress((folder / f"{name}.gz").read_bytes())
    (folder / name).write_bytes(change(data))  # type: ignore[operator]
    assert (folder / name).read_bytes() != data
    with pytest.raises(ConfigError, match=message) as caught:
        read_run(folder)
    assert "\n" not in str(caught.value)


def test_windows_line_ends_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder, run())
    for name in (REQUESTS, STEPS, DECISIONS):
        data = gzip.decompress((folder / f"{name}.gz").read_bytes())
        (folder / name).write_bytes(data.replace(b"\n", b"\r\n"))
    assert same(read_run(folder), run())


def test_paths_that_are_no_run(tmp_path: Path) -> None:
    write_archive(tmp_path / "runs.tar.xz", [run()])
    whole = (tmp_path / "runs.tar.xz").read_bytes()
    (tmp_path / "cut.tar.xz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.tar.xz").write_bytes(b"hello")
    (tmp_path / "empty.tar.xz").write_bytes(b"")
    (tmp_path / "folder.tar.xz").mkdir()
    (tmp_path / "nothing").mkdir()
    (tmp_path / "file").write_text("x")
    names = ("cut.tar.xz", "text.tar.xz", "empty.tar.xz", "folder.tar.xz", "nothing", "file", "absent", "absent.tar.xz")
    for name in names:
        with pytest.raises(ConfigError, match="run: ") as caught:
            read_run(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_a_truncated_table_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_run(folder, run())
    path = folder / f"{STEPS}.gz"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ConfigError, match="not a whole gzip file"):
        read_run(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arrival_ns": integers(0)}, "one entry is needed for each of 2"),
        ({"first_ns": integers(10, 4)}, "first_ns: 4 .*before arrival_ns"),
        ({"last_ns": integers(9, 20)}, "last_ns: 9 .*before first_ns"),
        ({"output_tokens": integers(3, 3)}, "more than max_tokens"),
        ({"prompt_tokens": integers(0, 3)}, "prompt_tokens: 0"),
    ],
)
def test_requests_that_cannot_be(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        requests(**changes)


def test_the_kind_of_a_step_follows_from_its_sizes() -> None:
    log = steps(4)
    log.columns["num_decodes"][:] = (0, 1, 2, 0)
    log.columns["num_prefill_tokens"][:] = (5, 0, 3, 0)
    assert log.kind.tolist() == ["prefill", "decode", "mixed", "copies"]
