"""Recording real runs on the CPU: every request, token and step is there, and times are consistent."""

import importlib
import tarfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncsched.cli.record import check_folder
from asyncsched.errors import AsyncschedError, ConfigError
from asyncsched.pipeline import Deliver, Effect, Host
from asyncsched.run_files import encode, read_run, write_run
from asyncsched.runs import HOST_SPANS, UNKNOWN, Run
from executors import recorder
from executors.llm import LLM
from executors.named_configs import named_config
from executors.recorder import Recorder, TimedRequest

WORKLOAD = [TimedRequest(number * 2_000_000, 5 + number, 3 + number % 5) for number in range(10)]


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny(depth: int = 2, **settings: object) -> LLM:
    engine = {
        "max_num_seqs": 4,
        "max_model_len": 32,
        "block_size": 4,
        "num_blocks": 9,
        "timeline": True,
        "decisions": False,
    }
    return LLM(named_config("llama-tiny"), depth=depth, device="cpu", dummy_weights=True, **{**engine, **settings})


@pytest.fixture(scope="module")
def runs() -> tuple[Run, Run]:
    """Two runs of one LLM, the second from another slot, with a delay."""
    llm = tiny()
    return Recorder(llm).run(WORKLOAD, name="first"), Recorder(llm, host_delay_us=700).run(WORKLOAD, name="second")


def test_every_request_and_token_is_recorded(runs: tuple[Run, Run]) -> None:
    for run in runs:
        log = run.requests
        assert log.prompt_tokens.tolist() == [one.prompt_tokens for one in WORKLOAD]
        assert log.output_tokens.tolist() == [one.output_tokens for one in WORKLOAD]
        assert log.arrival_ns.tolist() == [one.arrival_ns for one in WORKLOAD]
        assert set(log.finish) == {"length"}
        assert (log.arrival_ns < log.scheduled_ns).all()
        assert (log.scheduled_ns < log.first_ns).all()
        for first, last, gaps in zip(log.first_ns, log.last_ns, log.gaps_ns, strict=True):
            assert first + gaps.sum() == last
        assert log.last_ns.max() == run.info.makespan_ns


def test_steps_add_up_to_the_requests(runs: tuple[Run, Run]) -> None:
    for run in runs:
        steps, log = run.steps, run.requests
        assert steps["num_samples"].sum() == log.output_tokens.sum()
        assert steps["step"].tolist() == list(range(len(steps)))
        assert steps["slot"].tolist() == [number % 2 for number in range(len(steps))]
        assert {"decode", "mixed", "prefill"} >= set(steps.kind.tolist()) >= {"decode", "mixed"}
        prefilled = steps["num_prefill_tokens"].sum()
        assert prefilled >= log.prompt_tokens.sum()
        assert (prefilled == log.prompt_tokens.sum()) == (run.info.preemptions == 0)
    assert runs[0].info.preemptions > 0


def test_host_spans_of_a_step_follow_one_another(runs: tuple[Run, Run]) -> None:
    for run in runs:
        steps = run.steps
        present = [name for name in HOST_SPANS if steps.has(name).any()]
        assert present == [name for name in HOST_SPANS if name != "delay" or run.info.host_delay_us]
        for before, after in pairwise(present):
            assert (steps.end(before) <= steps.start(after)).all()
        assert (steps.start("compute") >= steps.start("launch")).all()  # inline: a launch computes
        assert (steps.end("compute") <= steps.end("launch")).all()
    delays = runs[1].steps.duration("delay")
    assert delays.min() >= 700_000
    assert np.median(delays) < 800_000


def test_the_host_is_probed_every_20_ms_and_no_more_often(runs: tuple[Run, Run]) -> None:
    run = Recorder(tiny(), host_delay_us=3000).run([TimedRequest(0, 4, 28)], name="long")
    at, took = (np.array(run.info.host[f"probe_during{name}"]) for name in ("_at_ms", "_us"))
    delivered = np.sort(run.steps.start("deliver")) / 1e6
    assert (np.diff(at) >= recorder.PROBE_EVERY_MS).all()
    assert 3 <= len(at) <= 1 + run.info.makespan_ns / 1e6 / recorder.PROBE_EVERY_MS
    due = np.searchsorted(delivered, at[:-1] + recorder.PROBE_EVERY_MS)
    delivery = np.searchsorted(delivered, at)  # it was read right before this one
    assert (delivery[1:] - due <= 1).all()  # the next where the reading would have been early by a moment
    assert (at + took / 1e3 <= delivered[delivery]).all()
    assert all(1 < us < 1e6 for us in took)
    log = run.requests
    tokens = log.first_ns[0] + np.concatenate(([0], np.cumsum(log.gaps_ns[0])))
    assert set(np.rint(at * 1e6).astype(int)) <= set(tokens.tolist())  # no token is later for it
    for short in runs:
        assert len(short.info.host["probe_during_us"]) == len(short.info.host["probe_during_at_ms"]) >= 1


def test_slots_count_from_the_first_of_a_recording() -> None:
    """Three steps at depth 2: the next recording begins in the other slot, and reads the same."""
    llm = tiny()
    recorded = [Recorder(llm).run([TimedRequest(0, 4, 3)], name="odd") for _ in range(3)]
    assert [len(run.steps) for run in recorded] == [3, 3, 3]
    assert recorded[1].decisions == recorded[2].decisions == recorded[0].decisions
    assert recorded[0].decisions[1].startswith("step 1 slot 1 ")
    assert recorded[0].decisions[1].endswith("carry 0")


def test_a_second_recording_starts_from_nothing(runs: tuple[Run, Run]) -> None:
    first, second = (run.decisions for run in runs)
    assert first[0].startswith("step 0 slot 0 ")
    assert second[0].startswith("step 0 slot 0 ")
    assert second[0].split(":", 1)[1].startswith(" 0[0:5]")
    assert len(second) == len(runs[1].steps)


def test_what_a_run_was_is_written_and_read(runs: tuple[Run, Run], tmp_path: Path) -> None:
    write_run(tmp_path / "run", runs[0])
    read = read_run(tmp_path / "run")
    assert encode(read) == encode(runs[0])
    assert read.info.engine_config() == tiny().config
    assert read.info.device["inline"] is True
    assert read.info.model["kv_bytes_per_token"] == 512
    assert (read.requests.aborted_plan == UNKNOWN).all()


def test_folders_above_that_of_a_run_are_made_later_and_a_file_there_is_refused(tmp_path: Path) -> None:
    check_folder("--out", tmp_path / "runs" / "one")
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is no folder that can be written to"):
        check_folder("--out", tmp_path / "file" / "one")


def test_a_folder_that_cannot_be_made_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever permissions say: root has them all."""
    check_folder("--out", tmp_path)
    assert list(tmp_path.iterdir()) == []

    def refuse(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ConfigError, match="is no folder that can be written to"):
        check_folder("--out", tmp_path / "one")


def test_requests_that_cannot_fit_are_refused_before_the_run() -> None:
    recorder = Recorder(tiny())
    with pytest.raises(ConfigError, match=r"request 1: 33 .*must fit 32"):
        recorder.run([TimedRequest(0, 4, 4), TimedRequest(0, 28, 5)], name="x")


@pytest.mark.parametrize("delay", [-1, float("nan"), 1e7])
def test_a_delay_that_cannot_be(delay: float) -> None:
    with pytest.raises(ConfigError, match="host_delay_us"):
        Recorder(tiny(), host_delay_us=delay)


def test_an_llm_without_a_timeline_is_refused() -> None:
    with pytest.raises(AsyncschedError, match="timeline=True"):
        Recorder(tiny(timeline=False))


def test_nobody_watches_after_a_recording() -> None:
    llm = tiny()
    Recorder(llm, host_delay_us=50).run(WORKLOAD[:2], name="x")
    assert (llm.engine.observer, llm.engine.inbox.observer, llm.engine.host_delay_ns) == (None, None, 0)


def test_an_observer_sees_effects_in_the_order_of_the_loop() -> None:
    llm = tiny(depth=1)
    seen: list[Effect] = []
    llm.engine.observer = seen.append
    llm.generate([[1, 2, 3]])
    kinds = [effect.kind if isinstance(effect, Host) else type(effect).__name__ for effect in seen]
    assert kinds[:7] == ["plan", "Launch", "Collect", "commit", "plan", "Launch", "Deliver"]
    assert isinstance(seen[6], Deliver)


def test_models_can_be_shared() -> None:
    one = tiny()
    other = LLM(one.model, depth=1, device="cpu", max_num_seqs=4, max_model_len=32, num_blocks=12, timeline=True)
    assert other.model is one.model
    tokens = [llm.generate([[5, 6, 7]])[0].outputs[0].token_ids for llm in (one, other)]
    assert tokens[0] == tokens[1]


def test_a_clock_that_drifts_is_set_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose clock is 5 ms late and gains 2 ms per second: what is recorded is on the host's clock."""
    llm = tiny()
    lanes = llm.engine.executor.lanes
    begun = time.perf_counter_ns()
    read = lanes.read

    def late(at: int) -> int:
        return 5_000_000 + (at - begun) // 500

    def drifting(taken: object) -> list[tuple[int, int]]:
        return [(start - late(start), end - late(start)) for start, end in read(taken)]

    monkeypatch.setattr(lanes, "read", drifting)
    monkeypatch.setattr(lanes, "clock_error_ns", lambda: late(time.perf_counter_ns()))
    steps = Recorder(llm).run(WORKLOAD, name="drift").steps
    slack = 20_000
    assert (steps.start("compute") >= steps.start("launch") - slack).all()
    assert (steps.end("compute") <= steps.end("launch") + slack).all()
    monkeypatch.setattr(lanes, "clock_error_ns", lambda: 0)
    steps = Recorder(llm).run(WORKLOAD, name="drift").steps
    assert (steps.start("compute") < steps.start("launch") - slack).all()  # it does drift


def test_a_pack_holds_all_archives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the script that records on a GPU; one in the same folder is not in itself."""
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "experiments")
    recording = importlib.import_module("record_h200")
    results = recording._Results(tmp_path, tmp_path / "all.tar")
    for group in ("fit", "tight"):
        results.archive("llama-8b", group).write_bytes(group.encode())
        results.packed()
    with tarfile.open(tmp_path / "all.tar") as file:
        held = {name: file.extractfile(name).read() for name in file.getnames()}  # type: ignore[union-attr]
    assert held == {f"h200-llama-8b-{group}.tar.xz": group.encode() for group in ("fit", "tight")}
    for options in ({"pack": tmp_path / "all.zip"}, {"only": "fit,all"}, {"out": tmp_path / "none"}):
        with pytest.raises(SystemExit, match=r"^2$"):
            recording.main(**{"out": tmp_path, **options})
        said = capsys.readouterr().err
        assert said.startswith(f"error: --{next(iter(options))}: ")
        assert said.count("\n") == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 20, "max_num_batched_tokens": 8},  # more than two seats for a token
        {"max_num_seqs": 20, "max_num_batched_tokens": 8, "max_model_len": 4},
        {"max_model_len": 16},
        {"max_model_len": 2},
    ],
)
def test_a_warm_up_asks_for_nothing_that_is_rejected(settings: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of no tokens, say: the steps it was to warm up would be missing, and nobody would know."""
    served: list[list[TimedRequest]] = []
    serve = recorder._serve

    def watch(llm: LLM, requests: Sequence[Any], started: int) -> None:
        served.append([TimedRequest(one.arrival_ns, len(one.prompt), one.params.max_tokens) for one in requests])
        serve(llm, [one._replace(arrival_ns=0) for one in requests], started)

    monkeypatch.setattr(recorder, "_serve", watch)
    llm = tiny(**{"num_blocks": 200, **settings})
    launches = recorder.warm_up(llm)
    room = llm.config.max_model_len
    for requests in served:
        assert all(1 <= one.prompt_tokens < one.prompt_tokens + one.output_tokens <= room for one in requests)
    assert llm.scheduler.counts.rejected == 0
    assert launches[-1][0] == llm.config.max_num_seqs
    assert launches[-1][1] > 0  # some step was launched
