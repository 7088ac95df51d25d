"""bf16 on a GPU under evictions, aborts and late arrivals: every delivered token is as good as the best one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from teacher_forced import TOLERANCE, corrupt_a_block, eventful_run, float32_reference, prompts, shortfalls
from tiny_models import TINY

from executors.llm import LLM
from executors.named_configs import named_config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

NEW_TOKENS = 32
COUNT = 20
TIGHT = {"block_size": 16, "max_num_seqs": 8, "max_model_len": 64, "max_num_batched_tokens": 24, "num_blocks": 14}


def run(config: object, between: Callable[[LLM, int], object] = lambda llm, n: None, **engine: object) -> list[float]:
    """Shortfalls of the delivered tokens, after checking that what the run is about has happened."""
    llm = LLM(config, device="cuda", dummy_weights=True, **{"dtype": "bfloat16", **TIGHT, **engine})
    delivered = eventful_run(llm, prompts(COUNT), NEW_TOKENS, lambda n: between(llm, n))
    assert llm.scheduler.preemptions > 0
    assert llm.scheduler.counts.aborted == COUNT // 5
    assert len({token for _, tokens in delivered for token in tokens}) > 30
    found = shortfalls(float32_reference(llm), delivered)
    assert len(found) >= COUNT * 4 // 5 * NEW_TOKENS + COUNT // 5 * NEW_TOKENS // 2
    return found


@pytest.mark.parametrize(
    ("depth", "preemption"), [(1, "recompute"), (2, "recompute"), (2, "offload"), (3, "recompute")]
)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama", "bfloat16"), ("gemma2", "bfloat16"), ("mixtral", "float32"), ("gpt-oss-sinks", "float32")],
)
def test_every_delivered_token_is_as_good_as_the_best(name: str, dtype: str, depth: int, preemption: str) -> None:
    found = run(TINY[name](), depth=depth, preemption=preemption, dtype=dtype, compile=False)
    print(f"{name}, {dtype}, depth {depth}, {preemption}: at most {max(found):.4f} standard deviations below")
    assert max(found) <= TOLERANCE[getattr(torch, dtype)]


def test_a_model_of_real_size() -> None:
    """Sixteen layers, compiled: roundings have room to grow. The prompts' tokens are few, its vocabulary is not."""
    found = run(named_config("llama-1b"), depth=2)
    print(f"llama-1b: at most {max(found):.3f} standard deviations below")
    assert max(found) <= TOLERANCE[torch.bfloat16]


def test_a_corrupted_block_is_noticed() -> None:
    corrupted = []
    found = run(
        TINY["llama"](), lambda llm, n: n == 8 and corrupted.append(corrupt_a_block(llm)), depth=2, compile=False
    )
    assert corrupted == [True]
    assert max(found) > 4 * TOLERANCE[torch.bfloat16]
