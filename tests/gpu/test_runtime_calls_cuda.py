"""What a steady stretch of asynchronous decoding asks of the CUDA runtime: no wait but in collections, no pageable
copy, no allocation. The mode that `test_generation` sets lets much of that pass.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from runtime_calls import Call, ProfilerRanges, calls_of, calls_of_step, faults, waits_of
from tiny_models import TINY

from asyncsched.request import SamplingParams
from executors.llm import LLM

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Warning. Profiler clears events"),
]

NEW_TOKENS = 64
PROMPTS = [[place, place + 1, place + 2] for place in range(8)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
SAMPLED = SamplingParams(seed=3, top_p=0.9, repetition_penalty=1.2, logprobs=2, max_tokens=NEW_TOKENS, ignore_eos=True)
SIZES = {"block_size": 16, "max_num_seqs": 8, "num_blocks": 64, "max_model_len": 128}


def nothing(name: str) -> None:
    """No fault."""


def profiled_run(
    monkeypatch: pytest.MonkeyPatch,
    params: SamplingParams,
    depth: int,
    at_push: Callable[[str], object] = nothing,
    **options: object,
) -> tuple[list[Call], int, int]:
    """The calls of a second run, and the first and last step of its steady stretch: all decode, nobody ends."""
    active = False
    ranges = ProfilerRanges(lambda name: at_push(name) if active else None)
    monkeypatch.setattr("executors.llm.recorder", lambda device: ranges)
    options = {"dtype": "float32", "compile": False, **SIZES, **options}
    llm = LLM(TINY["llama"](), depth=depth, device="cuda", dummy_weights=True, nvtx=True, **options)
    llm.generate(PROMPTS, params)  # captures its graphs
    before, active = llm.engine.steps, True
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiled:
        llm.generate(PROMPTS, params)
    return calls_of(profiled.events()), before + 8, before + NEW_TOKENS - 8


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_steady_stretch_only_waits_in_collections(
    monkeypatch: pytest.MonkeyPatch, params: SamplingParams, depth: int
) -> None:
    calls, first, last = profiled_run(monkeypatch, params, depth)
    assert faults(calls, first, last) == []
    assert len(waits_of(calls)) >= last - first  # the runtime's calls are in the profile
    assert any(call.on_device and call.name.startswith("Memcpy HtoD") for call in calls)


def test_so_does_one_of_compiled_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, first, last = profiled_run(monkeypatch, GREEDY, 2, compile=True, dtype="bfloat16")
    assert faults(calls, first, last) == []


def test_a_captured_step_makes_eight_calls_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two copies, three records, two waits and one graph, and nothing of torch's around them."""
    calls, first, last = profiled_run(monkeypatch, GREEDY, 2)
    expected = {"cudaMemcpyAsync": 2, "cudaEventRecord": 3, "cudaStreamWaitEvent": 2, "cudaGraphLaunch": 1}
    expected["cudaEventSynchronize"] = 1
    assert [calls_of_step(calls, step) for step in range(first, last)] == [expected] * (last - first)


def synchronize(name: str) -> None:
    if name.startswith("launch step"):
        torch.cuda.current_stream().synchronize()


def copy_pageable(name: str) -> None:
    if name.startswith("launch step"):
        torch.ones(4096).to("cuda", non_blocking=True)


def allocate(name: str) -> None:
    if name.startswith("launch step"):
        torch.cuda.empty_cache()
        KEPT.append(torch.empty(2**26, device="cuda"))


def pin(name: str) -> None:
    if name.startswith("launch step"):
        KEPT.append(torch.empty(2**18, pin_memory=True))


KEPT: list[torch.Tensor] = []


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (synchronize, "cudaStreamSynchronize"),
        (copy_pageable, "Memcpy HtoD (Pageable -> Device)"),
        (allocate, "cudaMalloc"),
        (pin, "cudaHostAlloc"),
    ],
)
def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, fault: Callable[[str], object], found: str) -> None:
    calls, first, last = profiled_run(monkeypatch, GREEDY, 2, fault)
    KEPT.clear()
    assert found in faults(calls, first, last)
