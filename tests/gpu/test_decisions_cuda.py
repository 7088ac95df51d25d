"""The decision log of the CUDA executor is that of the simulator, with arrivals, aborts and stops, and in float32 every
token is the one that transformers generates for its request alone.
"""

from __future__ import annotations

import pytest
import torch
from decision_logs import check_decisions
from tiny_models import TINY

from executors.llm import LLM

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

TIGHT = {"block_size": 16, "max_num_seqs": 5, "max_model_len": 64, "max_num_batched_tokens": 20, "num_blocks": 6}


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("preemption", ["recompute", "offload"])
def test_the_simulator_decides_as_the_executor_does(depth: int, preemption: str) -> None:
    options = {**TIGHT, "depth": depth, "preemption": preemption, "mixed_buckets": (8, 20), "decisions": True}
    check_decisions(LLM(TINY["llama"](), device="cuda", dtype="float32", dummy_weights=True, compile=False, **options))
