"""Steps that cannot be captured in a CUDA graph run kernel by kernel; no step fails for it. On the CPU, with a capture
that refuses: what capturing does is a matter of tests/gpu.
"""

from __future__ import annotations

import pytest
import torch
from test_llm import GREEDY, PROMPTS, tiny_llm, tokens_of

from asyncsched.inputs import Buckets
from executors.llm import LLM


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
