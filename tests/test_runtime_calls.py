"""The check of a profile, on profiles that are made up: every kind of accident is found, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from runtime_calls import Call, ProfilerRanges, calls_of, calls_of_step, faults, waits_of
from tiny_models import TINY

from asyncsched.request import SamplingParams
from executors.llm import LLM

STEPS = 8
FIRST, LAST = 2, 5


def steady() -> list[Call]:
    """A step takes 100 us: its launch 30, its collection 40. The profiler synchronises and allocates at both ends."""
    calls = [Call("cudaDeviceSynchronize", -10, -5), Call("cudaMalloc", -4, -3)]
    for step in range(STEPS):
        at = step * 100.0
        calls += [
            Call(f"launch step {step}: 8 sequences, 8 tokens, slot {step % 2}", at, at + 30),
            Call("h2d", at + 1, at + 9),
            Call("aten::copy_", at + 2, at + 8),
            Call("cudaMemcpyAsync", at + 3, at + 7),
            Call("cudaEventRecord", at + 10, at + 11),
            Call("cudaStreamWaitEvent", at + 12, at + 13),
            Call("cudaGraphLaunch", at + 15, at + 20),
            Call(f"collect step {step}: 8 sequences, 8 tokens, slot {step % 2}", at + 40, at + 80),
            Call("cudaEventSynchronize", at + 41, at + 79),
            Call("Memcpy HtoD (Pinned -> Device)", at + 5, at + 6, on_device=True),
            Call("Memcpy DtoH (Device -> Pinned)", at + 70, at + 71, on_device=True),
            Call("gemm", at + 20, at + 65, on_device=True),
        ]
    return [*calls, Call("cudaDeviceSynchronize", 900, 950), Call("cudaFree", 951, 952)]


PLANTED = {
    "a stream synchronised": Call("cudaStreamSynchronize", 322, 324),
    "the device synchronised": Call("cudaDeviceSynchronize", 322, 324),
    "the context synchronised": Call("cuCtxSynchronize", 322, 324),
    "an event waited for in a launch": Call("cudaEventSynchronize", 322, 324),
    "an event waited for beyond a collection": Call("cudaEventSynchronize", 375, 381),
    "a copy that blocks": Call("cudaMemcpy", 322, 324),
    "a copy from pageable memory": Call("Memcpy HtoD (Pageable -> Device)", 322, 324, on_device=True),
    "a copy to pageable memory": Call("Memcpy DtoH (Device -> Pageable)", 322, 324, on_device=True),
    "an allocation": Call("cudaMalloc", 322, 324),
    "an allocation of pinned memory": Call("cudaHostAlloc", 322, 324),
    "memory given back": Call("cudaFree", 322, 324),
    "a graph made": Call("cudaGraphInstantiateWithFlags", 322, 324),
}


def test_a_steady_stretch_has_no_fault() -> None:
    assert faults(steady(), FIRST, LAST) == []
    assert len(waits_of(steady())) == STEPS


@pytest.mark.parametrize("case", PLANTED)
def test_every_accident_is_found(case: str) -> None:
    planted = PLANTED[case]
    assert faults([*steady(), planted], FIRST, LAST) == [planted.name]


def test_what_happens_outside_the_stretch_is_none_of_its_faults() -> None:
    before, after = Call("cudaMalloc", 150, 151), Call("cudaStreamSynchronize", 650, 651)
    assert faults([*steady(), before, after], FIRST, LAST) == []
    with pytest.raises(KeyError):
        faults(steady(), FIRST, STEPS)


def test_the_calls_of_one_step_are_counted() -> None:
    names = ("aten::copy_", "cudaMemcpyAsync", "cudaEventRecord", "cudaStreamWaitEvent", "cudaGraphLaunch")
    expected = dict.fromkeys((*names, "cudaEventSynchronize"), 1)
    assert calls_of_step(steady(), 3) == expected
    assert calls_of_step([*steady(), Call("cudaEventRecord", 322, 323)], 3) == {**expected, "cudaEventRecord": 2}
    with pytest.raises(KeyError):
        calls_of_step(steady(), STEPS - 1)


def test_a_profile_becomes_calls() -> None:
    def event(name: str, start: float, device: torch.autograd.DeviceType) -> SimpleNamespace:
        return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=start, end=start + 1))

    kinds = torch.autograd.DeviceType
    events = [event("gemm", 5.0, kinds.CUDA), event("cudaLaunchKernel", 2.0, kinds.CPU)]
    assert calls_of(events) == [Call("cudaLaunchKernel", 2.0, 3.0), Call("gemm", 5.0, 6.0, on_device=True)]


def test_a_real_profile_has_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the GPU's test does, without the CUDA runtime: the stretch is found, and there is nothing to complain of."""
    monkeypatch.setattr("executors.llm.recorder", lambda device: ProfilerRanges())
    llm = LLM(TINY["llama"](), device="cpu", dummy_weights=True, nvtx=True, max_num_seqs=4, num_blocks=32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiled:
        llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True))
    calls = calls_of(profiled.events())
    assert llm.engine.steps == 9
    assert faults(calls, 2, 8) == []
    assert any(call.name == "aten::copy_" for call in calls)
    with pytest.raises(KeyError):
        faults(calls, 2, 9)
