"""Memory of a real device that runs out in the middle of a step: who fails, what stays, and that nothing hangs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import LlamaConfig

from asyncsched.request import SamplingParams
from executors.llm import LLM

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
LONG = 8192  # tokens of a prompt whose step takes 8192 x 16384 x 2 bytes for the widest activation alone
ROOM = 64 * 2**20


@contextmanager
def only_a_little_memory() -> Iterator[None]:
    """What torch's allocator may take beyond what is in use: ROOM."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + ROOM) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_step_that_runs_out_of_memory_fails_its_requests_and_no_others(depth: int) -> None:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=1024,
        intermediate_size=16384,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=2 * LONG,
        initializer_range=0.2,
        eos_token_id=None,
        pad_token_id=0,
    )
    llm = LLM(
        config,
        device="cuda",
        dtype="bfloat16",
        dummy_weights=True,
        depth=depth,
        compile=False,
        max_num_seqs=8,
        max_num_batched_tokens=LONG + 8,
        max_model_len=LONG + 64,
        num_blocks=2048,
    )
    short = [[7, 8, 9 + i] for i in range(4)]
    long = [5] * LONG
    alone = [output.outputs[0].token_ids for output in llm.generate(short, GREEDY)]
    (fits,) = llm.generate([long], GREEDY)
    assert fits.outputs[0].finish_reason == "length"

    with only_a_little_memory():
        # The long one does not fit the step of the first: it comes alone, or with rows that decode.
        outputs = [output.outputs[0] for output in llm.generate([*short, long], GREEDY)]
        assert outputs[-1].finish_reason == "error"
        assert "out of memory" in outputs[-1].message
        for output, tokens in zip(outputs[:-1], alone, strict=True):
            assert output.finish_reason in ("error", "length")  # those of the step fail with it
            assert output.token_ids == tokens[: len(output.token_ids)]
        assert llm.usable
        again = [output.outputs[0].token_ids for output in llm.generate(short, GREEDY)]
        assert again == alone

    (fits,) = llm.generate([long], GREEDY)
    assert fits.outputs[0].finish_reason == "length"
    assert [output.outputs[0].token_ids for output in llm.generate(short, GREEDY)] == alone
