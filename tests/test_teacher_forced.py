"""Evictions, aborts and late arrivals in bf16 and float32: every delivered token is as good as the best one."""

from __future__ import annotations

import pytest
import torch
from teacher_forced import TOLERANCE, Delivered, corrupt_a_block, eventful_run, float32_reference, prompts, shortfalls
from tiny_models import TINY

from executors.llm import LLM

torch.set_num_threads(1)

NEW_TOKENS = 16
TIGHT = {"block_size": 4, "max_num_seqs": 5, "max_model_len": 64, "max_num_batched_tokens": 20, "num_blocks": 18}
DTYPES = (torch.float32, torch.bfloat16)


def run(name: str, dtype: torch.dtype, *, corrupt_at: int | None = None, **engine: object) -> tuple[LLM, Delivered]:
    """Checks that what the run is about has happened."""
    text = str(dtype).removeprefix("torch.")
    llm = LLM(TINY[name](), device="cpu", dtype=text, dummy_weights=True, **{**TIGHT, **engine})
    corrupted = []
    delivered = eventful_run(
        llm, prompts(10), NEW_TOKENS, lambda n: n == corrupt_at and corrupted.append(corrupt_a_block(llm))
    )
    assert llm.model.dtype == dtype
    assert corrupted == ([] if corrupt_at is None else [True])
    assert llm.scheduler.preemptions > 0
    for number, (_, tokens) in enumerate(delivered):
        if number % 5 == 4:  # aborted half way; what was in flight then may still come
            assert NEW_TOKENS // 2 <= len(tokens) <= NEW_TOKENS // 2 + llm.config.depth
        else:
            assert len(tokens) == NEW_TOKENS
    assert len({token for _, tokens in delivered for token in tokens}) > 30
    return llm, delivered


@pytest.mark.parametrize(
    ("name", "depth", "preemption", "dtype"),
    [
        *(
            (*case, dtype)
            for case in (("llama", 2, "recompute"), ("llama", 3, "offload"), ("gemma2", 1, "recompute"))
            for dtype in DTYPES
        ),
        ("qwen3-moe", 2, "recompute", torch.float32),
    ],
)
def test_every_delivered_token_is_as_good_as_the_best(
    name: str, depth: int, preemption: str, dtype: torch.dtype
) -> None:
    llm, delivered = run(name, dtype, depth=depth, preemption=preemption)
    found = shortfalls(float32_reference(llm), delivered)
    assert len(found) == sum(len(tokens) for _, tokens in delivered)
    assert max(found) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_corrupted_block_is_noticed(dtype: torch.dtype) -> None:
    llm, delivered = run("llama", dtype, depth=2, corrupt_at=6)
    found = shortfalls(float32_reference(llm), delivered)
    assert max(found) > 4 * TOLERANCE[dtype]


def test_a_token_that_is_not_the_best_is_measured() -> None:
    """Against logits that are known: the second best of one position is as far below as it is."""
    llm, delivered = run("llama", torch.float32, depth=2)
    reference = float32_reference(llm)
    prompt, tokens = delivered[0]
    with torch.no_grad():
        logits = reference(torch.tensor([prompt])).logits[0, -1].double()
    best, second = logits.topk(2).indices.tolist()
    assert tokens[0] == best
    (found,) = shortfalls(reference, [(prompt, [second])])
    assert found == pytest.approx(float((logits[best] - logits[second]) / logits.std()), rel=1e-4)
