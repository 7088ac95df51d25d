"""Steps that cannot be captured in a CUDA graph run kernel by kernel; no step fails for it. On the CPU, with a capture
that refuses: what capturing does is a matter of tests/gpu.
"""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from test_llm import GREEDY, PROMPTS, tiny_llm, tokens_of

from asyncsched.inputs import Buckets
from asyncsched.plan import StepPlan
from asyncsched.program import Lane
from asyncsched.request import SamplingParams
from executors.compute import ComputeLane, variant
from executors.cpu import CpuLanes
from executors.llm import LLM
from executors.plain_attention import PlainAttention


def refusing(monkeypatch: pytest.MonkeyPatch, error: Exception, depth: int) -> tuple[LLM, list[Buckets]]:
    """An engine that would capture, and the buckets it tried to."""
    tried: list[Buckets] = []

    def refuse(slot: object, buckets: Buckets, features: object) -> None:
        tried.append(buckets)
        raise error

    llm = tiny_llm(depth=depth)
    llm._compute._use_graphs = True
    monkeypatch.setattr(llm._compute, "_capture", refuse)
    return llm, tried


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_step_that_cannot_be_captured_runs_kernel_by_kernel(
    depth: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = tokens_of(tiny_llm(depth=depth).generate(PROMPTS, GREEDY))
    llm, tried = refusing(monkeypatch, RuntimeError("operation not permitted when stream is capturing\nmore"), depth)
    assert tokens_of(llm.generate(PROMPTS, GREEDY)) == wanted
    assert len(tried) == 1
    assert llm._compute.refusal == "operation not permitted when stream is capturing"
    assert "CUDA graphs are off from now on: operation not permitted" in caplog.text


def test_memory_that_runs_out_fails_the_step_and_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, tried = refusing(monkeypatch, torch.OutOfMemoryError("no memory"), 2)
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY)]
    assert {output.finish_reason for output in outputs} == {"error"}
    assert all("no memory" in output.message for output in outputs)
    assert len(tried) > 1
    assert not llm._compute.refusal


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(top_p=0.5)])
def test_a_warm_up_runs_each_shape_once_and_captures_it_in_every_slot(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = tiny_llm(depth=2, decode_buckets=(1, 2, 5))
    compute, slots = llm._compute, llm.engine.executor.slots
    assert compute.shapes == []
    compute._use_graphs = True
    ran: list[tuple[Buckets, int]] = []
    captured: list[tuple[int, Buckets, int]] = []
    run = compute._run_padded

    def run_padded(slot: Any, buckets: Buckets, features: int) -> None:
        ran.append((buckets, features))
        run(slot, buckets, features)

    def capture(slot: Any, buckets: Buckets, features: int) -> object:
        captured.append((slot.index, buckets, features))
        return object()

    monkeypatch.setattr(compute, "_run_padded", run_padded)
    monkeypatch.setattr(compute, "_capture", capture)
    features = variant(*llm._sampling_rows.needs(params))
    stream = llm.engine.executor.lanes.stream(Lane.COMPUTE)
    for _ in range(2):  # there is nothing left for the second time
        assert compute.capture(stream, slots, compute.shapes, features) == ""
        assert ran == [((size, 0), features) for size in (1, 2, 5)]
        assert captured == [(slot, (size, 0), features) for size in (1, 2, 5) for slot in (0, 1)]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"top_p": 0.5},
        {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": (1,)},
        {"min_tokens": 3, "stop_token_ids": (1,)},
        {"presence_penalty": 0.5, "logprobs": 1},
    ],
)
def test_requests_like_those_it_was_told_of_have_no_step_that_was_not_captured(
    params: dict[str, Any], depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor have those whose prompts take several steps, of which all but the last sample nothing."""
    monkeypatch.setattr(CpuLanes, "graphs", True)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(PlainAttention, "captures_mixed", True)
    captured: set[tuple[int, Buckets, int]] = set()
    ran: set[tuple[int, Buckets, int]] = set()

    def capture(_: object, __: object, slots: list[Any], shapes: list[Buckets], features: int) -> str:
        captured.update((slot.index, shape, features) for slot in slots for shape in shapes)
        return ""

    monkeypatch.setattr(ComputeLane, "capture", capture)
    asked = SamplingParams(max_tokens=6, **params)
    sizes = {"max_num_batched_tokens": 8, "mixed_buckets": (4, 8), "decode_buckets": (1, 2, 4), "max_num_seqs": 4}
    llm = tiny_llm(depth=depth, warm_up=[asked], num_blocks=50, **sizes)
    compute, forward = llm._compute, llm._compute.forward
    compute._use_graphs = False

    def run(stream: Any, slot: Any, plan: StepPlan) -> None:
        if plan.num_tokens:
            ran.add((slot.index, (plan.bucket, plan.mixed_bucket), variant(slot.features)))
        forward(stream, slot, plan)

    monkeypatch.setattr(compute, "forward", run)
    llm.generate([list(range(1, 30)), *PROMPTS[:3]], asked)
    assert {buckets[1] > 0 for _, buckets, _ in ran} == {False, True}
    assert ran <= captured


class BrokenOff:
    """A graph whose capture ends as that of a step which did what it must not."""

    is_open = False

    def capture_begin(self, **_: object) -> None:
        BrokenOff.is_open = True

    def capture_end(self) -> None:
        BrokenOff.is_open = False
        raise RuntimeError("operation failed due to a previous error during capture")


@pytest.mark.parametrize(
    ("cause", "refusal", "finish_reason"),
    [
        (RuntimeError("operation not permitted"), "operation not permitted", "length"),
        (torch.OutOfMemoryError("no memory"), "", "error"),
        (None, "operation failed due to a previous error during capture", "length"),
    ],
)
def test_what_a_step_that_was_captured_says_is_what_counts(
    cause: Exception | None, refusal: str, finish_reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not what the end of the capture makes of it, which would take memory that ran out for a refusal."""
    llm = tiny_llm(depth=1)
    compute, run_padded = llm._compute, llm._compute._run_padded
    compute._use_graphs = True
    monkeypatch.setattr(torch.cuda, "CUDAGraph", BrokenOff)

    def run(*arguments: Any) -> None:
        if BrokenOff.is_open and cause is not None:
            raise cause
        run_padded(*arguments)

    monkeypatch.setattr(compute, "_run_padded", run)
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY)]
    assert compute.refusal == refusal
    assert {output.finish_reason for output in outputs} == {finish_reason}
    assert not BrokenOff.is_open


class Kept:
    """A graph that can be captured."""

    is_open = False

    def capture_begin(self, **_: object) -> None:
        Kept.is_open = True

    def capture_end(self) -> None:
        Kept.is_open = False


class Garbage:
    """In a cycle, so that only the collector finds it, as it does the graphs of an engine that is gone."""

    def __init__(self, collected_in_capture: list[bool]) -> None:
        self.itself, self.collected = self, collected_in_capture

    def __del__(self) -> None:
        self.collected.append(Kept.is_open)


@pytest.mark.parametrize("is_on", [True, False])
def test_no_garbage_is_collected_in_a_capture(is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph given up in a capture breaks it, and all steps would run kernel by kernel from then on."""
    llm = tiny_llm(depth=1)
    compute, run_padded = llm._compute, llm._compute._run_padded
    compute._use_graphs = True
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Kept)
    collected: list[bool] = []
    captured = []

    def run(*arguments: Any) -> None:
        if Kept.is_open:
            captured.append(True)
            for _ in range(3):
                Garbage(collected)
            [[] for _ in range(10)]  # what makes the collector run
            return
        run_padded(*arguments)

    monkeypatch.setattr(compute, "_run_padded", run)
    slot, thresholds = llm.engine.executor.slots[0], gc.get_threshold()
    gc.collect()
    gc.set_threshold(1, 1, 1)
    (gc.enable if is_on else gc.disable)()
    try:
        compute._capture(slot, (1, 0), 0)
        assert gc.isenabled() == is_on
    finally:
        gc.enable()
        gc.set_threshold(*thresholds)
    gc.collect()
    assert captured
    assert collected == [False] * 3


@pytest.mark.parametrize("is_on", [True, False])
def test_no_garbage_is_collected_while_another_thread_captures(is_on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two captures at once, the one that ends first does not end it for the other."""
    engines = [tiny_llm(depth=1) for _ in range(2)]
    both, inside, ended = threading.Event(), threading.Event(), threading.Event()
    seen: list[bool] = []

    def first(*_: Any) -> None:
        inside.set()
        both.wait(10)

    def second(*_: Any) -> None:
        both.set()
        ended.wait(10)
        seen.append(gc.isenabled())

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Kept)
    for llm, run in zip(engines, (first, second), strict=True):
        monkeypatch.setattr(llm._compute, "_run_padded", run)

    def capture(llm: LLM) -> None:
        llm._compute._capture(llm.engine.executor.slots[0], (1, 0), 0)

    (gc.enable if is_on else gc.disable)()
    try:
        threads = [threading.Thread(target=capture, args=(llm,)) for llm in engines]
        threads[0].start()
        inside.wait(10)
        threads[1].start()
        threads[0].join(20)
        ended.set()
        threads[1].join(20)
        assert seen == [False]
        assert gc.isenabled() == is_on
    finally:
        gc.enable()


def test_a_shape_whose_first_step_fails_is_not_captured_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels may not be there yet, and loading them in a capture would turn graphs off."""
    llm, tried = refusing(monkeypatch, RuntimeError("a kernel was loaded"), 1)
    run_padded, failures = llm._compute._run_padded, [torch.OutOfMemoryError("no memory")]

    def run(*arguments: Any) -> None:
        if failures:
            raise failures.pop()
        run_padded(*arguments)

    monkeypatch.setattr(llm._compute, "_run_padded", run)
    short = SamplingParams(temperature=0.0, max_tokens=2)  # one prompt and one decode step
    assert [llm.generate([PROMPTS[0]], short)[0].outputs[0].finish_reason for _ in range(2)] == ["error", "length"]
    assert not tried
    llm.generate([PROMPTS[0]], short)
    assert len(tried) == 1
