"""The sampler on a CUDA device: the CPU's kept sets, tokens that depend on nobody else, graphs that draw what eager
code draws, and no synchronisation.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncsched import SamplingParams
from asyncsched.plan import NO_SOURCE, StepPlan
from executors.noise import exponentials, step_keys, stream_of, token_hashes
from executors.sampling import Sampled, sample, sample_plain
from executors.sampling_layout import NUM_WORDS, Features
from executors.sampling_rows import SamplingRows
from executors.sampling_state import SamplerState
from executors.thresholds import top_k_keep, top_p_keep

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
VOCAB = 32_003
ROWS = 48
KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(seed=1, top_p=0.9),
    SamplingParams(seed=2, top_k=40, temperature=0.8),
    SamplingParams(seed=3, min_p=0.05, logprobs=3),
    SamplingParams(seed=4, repetition_penalty=1.3, presence_penalty=0.5),
    SamplingParams(temperature=0.0, frequency_penalty=1.5),
    SamplingParams(seed=5, top_k=40, top_p=0.5, logit_bias={3: 2.0, 5: -100.0}),
    SamplingParams(temperature=0.0, stop_token_ids=(1, 2), min_tokens=9),
    SamplingParams(seed=9, top_p=0.05),
    SamplingParams(seed=9, top_p=0.3, min_p=0.01),
    SamplingParams(seed=9, top_k=3, top_p=0.7, temperature=3.0),
]


def logits_of(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed)).bfloat16().float() * 3


class Batch:
    """ROWS rows with all kinds of parameters, seated, their resets applied; and what a step of some of them reads."""

    def __init__(self, device: torch.device) -> None:
        self.rows, self.state = SamplingRows(ROWS, VOCAB), SamplerState(ROWS, VOCAB, device)
        self.state.allocate(Features.ALL)
        for row in range(ROWS):
            params = KINDS[row % len(KINDS)]
            params = replace(params, seed=None if params.seed is None else params.seed + row)
            tokens = np.arange(row + 1, dtype=np.int32)
            self.rows.seat(row, row, params, tokens, tokens[::2])
        resets = self.rows.take_resets()
        self.state.reset(torch.from_numpy(resets.words).to(device), resets)

    def words(self, rows: list[int]) -> torch.Tensor:
        at = np.array(rows, dtype=np.int64)
        carry = np.full(len(rows), NO_SOURCE, dtype=np.int64)
        plan = StepPlan(0, 0, at, at, at + 9, at + 10, len(rows), carry, at, at + 10, at, len(rows), 0)
        words = np.zeros((len(rows), NUM_WORDS), dtype=np.int32)
        self.rows.pack(plan, self.rows.look(plan), words)
        return torch.from_numpy(words)

    def step(self, logits: torch.Tensor, rows: list[int]) -> Sampled:
        device = self.state.hashes.device
        return sample(logits[rows].to(device), self.words(rows).to(device), self.state, Features.ALL)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.2, 1.0, 4.0])
@pytest.mark.parametrize("features", [Features.NONE, Features.RANDOM, Features.RANDOM | Features.TOP_P, Features.ALL])
def test_the_kernels_give_the_tokens_of_the_plain_sampler(scale: float, features: int, dtype: torch.dtype) -> None:
    """Flat and peaked logits, ties, rows without usable logits; counts that grow from step to step."""
    rows, kernels, plain = list(range(ROWS)), Batch(CUDA), Batch(CUDA)
    words, tokens = plain.words(rows).cuda(), set()
    for step in range(20):
        logits = logits_of(100 + step) * scale
        logits[3], logits[4], logits[5] = torch.nan, -torch.inf, 1.0
        logits[6, 7], logits[7, ::2] = torch.inf, -torch.inf
        logits = logits.cuda().to(dtype)
        expected = sample_plain(logits, words, plain.state, features)
        found = sample(logits, words, kernels.state, features)
        assert torch.equal(found.tokens, expected.tokens)
        tokens |= set(expected.tokens.tolist())
        if expected.logprobs is not None and found.logprobs is not None:
            good = expected.tokens >= 0
            assert torch.equal(found.logprobs[good, 1], expected.logprobs[good, 1])  # ranks
            most_likely = logits[good].float().argsort(dim=-1, descending=True, stable=True)[:, :20]
            assert torch.equal(found.logprobs[good, 2:22].long(), most_likely)
            for part in (slice(0, 1), slice(22, 42)):
                torch.testing.assert_close(
                    found.logprobs[good, part].contiguous().view(torch.float32),
                    expected.logprobs[good, part].contiguous().view(torch.float32),
                )
    assert torch.equal(kernels.state.counts, plain.state.counts)
    assert len(tokens) > ROWS


@pytest.mark.parametrize("candidates", [1, 2])
def test_rows_whose_first_candidates_are_all_out_are_gone_through_again(
    candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from executors import triton_sampling

    monkeypatch.setattr(triton_sampling, "CANDIDATES", candidates)
    rows, kernels, plain = list(range(ROWS)), Batch(CUDA), Batch(CUDA)
    words = plain.words(rows).cuda()
    for step in range(20):
        logits = logits_of(step).cuda()
        expected = sample_plain(logits, words, plain.state, Features.ALL)
        assert torch.equal(sample(logits, words, kernels.state, Features.ALL).tokens, expected.tokens)


@pytest.mark.parametrize("scale", [1.0, 1e-20])
def test_kept_sets_are_those_of_the_cpu(scale: float) -> None:
    logits = logits_of(0) * scale
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    k = torch.linspace(1, VOCAB, ROWS).to(torch.int32).unsqueeze(1)
    p = torch.linspace(0.001, 1, ROWS).unsqueeze(1)
    assert torch.equal(top_k_keep(logits.cuda(), k.cuda()).cpu(), top_k_keep(logits, k))
    assert torch.equal(top_p_keep(weights.cuda(), p.cuda()).cpu(), top_p_keep(weights, p))


def test_noise_has_the_same_bits_in_every_batch_and_is_that_of_the_cpu_but_for_rounding() -> None:
    streams = np.array([stream_of(seed) for seed in range(ROWS)], dtype=np.uint64)
    keys = torch.from_numpy(step_keys(streams, np.arange(ROWS)))
    noise = exponentials(keys.cuda(), token_hashes(VOCAB, CUDA))
    for row in (0, 7, ROWS - 1):
        assert torch.equal(exponentials(keys[row : row + 1].cuda(), token_hashes(VOCAB, CUDA))[0], noise[row])
    torch.testing.assert_close(noise.cpu(), exponentials(keys, token_hashes(VOCAB, CPU)), rtol=1e-5, atol=0)


def test_a_token_depends_neither_on_the_batch_nor_on_its_place() -> None:
    logits = logits_of(1)
    together = Batch(CUDA).step(logits, list(range(ROWS)))
    assert len(set(together.tokens.tolist())) > ROWS // 2
    backwards = Batch(CUDA).step(logits, list(range(ROWS))[::-1])
    assert torch.equal(backwards.tokens.flip(0), together.tokens)
    batch = Batch(CUDA)
    assert [batch.step(logits, [row]).tokens.item() for row in range(ROWS)] == together.tokens.tolist()
    on_cpu = Batch(CPU).step(logits, list(range(ROWS))).tokens
    assert (on_cpu == together.tokens.cpu()).float().mean() > 0.95  # exp and log1p round differently


def test_a_captured_graph_draws_what_eager_code_draws() -> None:
    """Five steps with new logits and parameters in the same buffers; counts go on growing."""
    stream, captured, eager = torch.cuda.Stream(), Batch(CUDA), Batch(CUDA)
    rows = list(range(ROWS))
    logits, words = logits_of(2).cuda(), captured.words(rows).cuda()
    Batch(CUDA).step(logits, rows)  # whatever is set up by the first use
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        with torch.cuda.graph(graph, stream=stream):
            out = sample(logits, words, captured.state, Features.ALL)
        for step in range(5):
            fresh = logits_of(step + 3)
            logits.copy_(fresh)
            graph.replay()
            assert torch.equal(out.tokens.cpu(), eager.step(fresh, rows).tokens.cpu())
        assert torch.equal(captured.state.counts, eager.state.counts)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_synchronises() -> None:
    batch = Batch(CUDA)
    logits, words = logits_of(4).cuda(), batch.words(list(range(ROWS))).cuda()
    batch.rows.seat(0, 1000, KINDS[5], np.arange(9, dtype=np.int32), np.arange(4, dtype=np.int32))
    batch.rows.seat(1, 1001, KINDS[7], np.arange(9, dtype=np.int32), np.arange(4, dtype=np.int32))
    resets = batch.rows.take_resets()
    reset_words = torch.from_numpy(resets.words).cuda()
    try:
        torch.cuda.set_sync_debug_mode("error")
        batch.state.reset(reset_words, resets)
        sample(logits, words, batch.state, Features.ALL)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_row_without_usable_logits_has_no_token_and_the_others_theirs() -> None:
    logits = logits_of(5)
    good = Batch(CUDA).step(logits, list(range(ROWS))).tokens.tolist()
    bad = logits.clone()
    bad[::3] = torch.nan
    bad[1, 7], bad[4] = torch.inf, -torch.inf
    tokens = Batch(CUDA).step(bad, list(range(ROWS))).tokens.tolist()
    assert tokens == [-1 if row % 3 == 0 or row in (1, 4) else token for row, token in enumerate(good)]
