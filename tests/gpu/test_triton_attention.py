"""The Triton backend against plain attention in float32, on random queries over a random cache.

Needs a CUDA device. With TRITON_INTERPRET=1 the cases in float32 also run on a CPU, slowly.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

from executors.attention import AttentionBackend, AttentionRule
from executors.kv_cache import KvCache
from executors.plain_attention import PlainAttention
from executors.step_view import Chunk, StepView, view_of

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

from executors.triton_attention import MAX_SPLITS, TritonAttention  # noqa: E402  # needs triton
from sim.profile import splits  # noqa: E402

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float32] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
needs_cuda = pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")


class Heads(NamedTuple):
    query: int
    kv: int
    key_dim: int
    value_dim: int


LLAMA = Heads(8, 2, 128, 128)
HEADS = {
    "llama": LLAMA,
    "no groups": Heads(3, 3, 64, 64),
    "odd group": Heads(7, 1, 64, 64),
    "one kv head": Heads(20, 1, 32, 32),
    "odd dim": Heads(4, 2, 80, 80),
    "tiny dim": Heads(4, 2, 8, 8),
    "mla": Heads(4, 4, 192, 128),
    "wide": Heads(4, 2, 256, 256),
}
# (query tokens, KV length) of each sequence; those of one query come first.
DECODES = ((1, 1), (1, 16), (1, 17), (1, 100), (1, 333))
MIXED = ((1, 90), (1, 7), (5, 5), (64, 64), (33, 150), (1, 1), (130, 131))
PREFILLS = ((200, 200), (1, 40), (17, 300))


class Case(NamedTuple):
    """Queries and new KV in the tested dtype, a cache with NaN wherever nothing was written, and what a step sees."""

    queries: torch.Tensor
    new_keys: torch.Tensor
    new_values: torch.Tensor
    kv: KvCache
    view: StepView

    def run(self, backend: AttentionBackend, rule: AttentionRule) -> torch.Tensor:
        attend = backend.begin(self.view, self.kv)
        return attend(self.queries, self.new_keys, self.new_values, self.kv.keys[0], self.kv.values[0], rule)

    def expected(self, rule: AttentionRule) -> torch.Tensor:
        """In float32, over a copy of the cache."""
        wide = KvCache((self.kv.keys[0].float().clone(),), (self.kv.values[0].float().clone(),), self.kv.block_size)
        sinks = None if rule.sinks is None else rule.sinks.float()
        case = Case(self.queries.float(), self.new_keys.float(), self.new_values.float(), wide, self.view)
        return case.run(PlainAttention(reads_lengths=True), rule._replace(sinks=sinks))

    def assert_stored(self) -> None:
        at = self.view.kv_positions[: self.view.num_tokens].long()
        for pool, new in ((self.kv.keys[0], self.new_keys), (self.kv.values[0], self.new_values)):
            assert torch.equal(pool.flatten(0, 1)[at], new)


def case_of(
    shape: Sequence[tuple[int, int]], heads: Heads, dtype: torch.dtype, *, page: int = 16, seed: int = 0
) -> Case:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    sizes = [-(-length // page) for _, length in shape]
    pool = list(range(1, sum(sizes) + 1))
    rng.shuffle(pool)
    blocks = [[pool.pop() for _ in range(size)] for size in sizes]
    chunks = [
        Chunk([0] * count, length - count, of_sequence)
        for (count, length), of_sequence in zip(shape, blocks, strict=True)
    ]
    view = view_of(chunks, block_size=page, device=DEVICE)
    caches = []
    for dim in (heads.key_dim, heads.value_dim):
        cache = torch.full((sum(sizes) + 1, page, heads.kv, dim), torch.nan)
        for (count, length), of_sequence in zip(shape, blocks, strict=True):
            for position in range(length - count):
                cache[of_sequence[position // page], position % page] = torch.randn(heads.kv, dim)
        caches.append(cache.to(DEVICE, dtype))
    queries = torch.randn(view.num_tokens, heads.query, heads.key_dim).to(DEVICE, dtype)
    new = [torch.randn(view.num_tokens, heads.kv, dim).to(DEVICE, dtype) for dim in (heads.key_dim, heads.value_dim)]
    return Case(queries, *new, KvCache((caches[0],), (caches[1],), page), view)


def rule_of(heads: Heads, **changes: object) -> AttentionRule:
    return AttentionRule(scale=heads.key_dim**-0.5)._replace(**changes)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    error = (actual.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(error.max()) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("shape", [DECODES, MIXED, PREFILLS], ids=["decodes", "mixed", "prefills"])
def test_head_shapes(shape: Sequence[tuple[int, int]], heads: Heads, dtype: torch.dtype) -> None:
    case = case_of(shape, heads, dtype)
    rule = rule_of(heads)
    assert_close(case.run(TritonAttention(target_programs=64), rule), case.expected(rule), dtype)
    case.assert_stored()


RULES: dict[str, dict[str, object]] = {
    "window 1": {"window": 1},
    "window 20": {"window": 20},
    "window 128": {"window": 128},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.linspace(-3, 3, LLAMA.query)},
    "all": {"window": 50, "softcap": 5.0, "sinks": torch.linspace(-1, 4, LLAMA.query)},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("changes", RULES.values(), ids=RULES)
@pytest.mark.parametrize("target_programs", [1, 64, 10_000], ids=["whole", "few splits", "most splits"])
def test_rules(target_programs: int, changes: dict[str, object], dtype: torch.dtype) -> None:
    sinks = changes.get("sinks")
    moved = {**changes, "sinks": sinks.to(DEVICE, dtype)} if isinstance(sinks, torch.Tensor) else changes
    for shape in (DECODES, MIXED):
        case = case_of(shape, LLAMA, dtype)
        rule = rule_of(LLAMA, **moved)
        assert_close(case.run(TritonAttention(target_programs), rule), case.expected(rule), dtype)


@pytest.mark.parametrize("dtype", DTYPES[-1:], ids=str)
@pytest.mark.parametrize("page", [1, 4, 16, 32, 128])
def test_page_sizes(page: int, dtype: torch.dtype) -> None:
    case = case_of(MIXED, LLAMA, dtype, page=page)
    rule = rule_of(LLAMA, window=40)
    assert_close(case.run(TritonAttention(target_programs=64), rule), case.expected(rule), dtype)


def test_splits_are_a_bounded_power_of_two() -> None:
    backend = TritonAttention(target_programs=2112)
    assert backend._splits(programs=256, max_seq_len=8192) == 8
    assert backend._splits(programs=8, max_seq_len=131_072) == MAX_SPLITS
    assert backend._splits(programs=8, max_seq_len=100) == 4
    assert backend._splits(programs=5000, max_seq_len=8192) == 1


def test_queries_may_be_strided() -> None:
    """As projections leave them: [1, heads, tokens, dim] transposed, or a part of a merged product."""
    dtype = DTYPES[-1]
    case = case_of(MIXED, LLAMA, dtype)
    merged = torch.randn(case.view.num_tokens, LLAMA.query * 3, LLAMA.key_dim).to(DEVICE, dtype)
    rule = rule_of(LLAMA)
    for queries in (merged[:, 2 : 2 + LLAMA.query], case.queries.transpose(0, 1).contiguous().transpose(0, 1)):
        strided = case._replace(queries=queries)
        assert_close(strided.run(TritonAttention(target_programs=64), rule), strided.expected(rule), dtype)


@needs_cuda
def test_a_captured_decode_follows_the_lengths() -> None:
    """The grid of a graph is for the capacity; lengths, rows and blocks are read when it is replayed."""
    dtype, backend, rule = torch.bfloat16, TritonAttention(target_programs=512), rule_of(LLAMA)
    long = case_of(((1, 700), (1, 650), (1, 30)), LLAMA, dtype)
    short = case_of(((1, 3), (1, 64), (1, 65)), LLAMA, dtype, seed=1)
    long.run(backend, rule)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = long.run(backend, rule)
    for case in (long, short, long):
        reference = case.expected(rule)
        blocks, width = case.kv.keys[0].shape[0], case.view.table.shape[1]
        changed = (
            (long.kv.keys[0][:blocks], case.kv.keys[0]),
            (long.kv.values[0][:blocks], case.kv.values[0]),
            (long.queries, case.queries),
            (long.new_keys, case.new_keys),
            (long.new_values, case.new_values),
            (long.view.seq_lens, case.view.seq_lens),
            (long.view.table[:, :width], case.view.table),
        )
        saved = [tensor.clone() for tensor, _ in changed]
        for tensor, value in changed:
            tensor.copy_(value)
        graph.replay()
        assert_close(output, reference, dtype)
        for (tensor, _), value in zip(changed, saved, strict=True):
            tensor.copy_(value)


@pytest.mark.parametrize("dtype", DTYPES[-1:], ids=str)
def test_a_view_padded_to_capacity_follows_the_counts(dtype: torch.dtype) -> None:
    """As a captured mixed step: more sequences and tokens than there are, and how many decode is read on the device."""
    rule, backend = rule_of(LLAMA, window=40), TritonAttention(target_programs=64)
    for shape in (MIXED, DECODES, PREFILLS[:1]):
        case = case_of(shape, LLAMA, dtype)
        expected = case.expected(rule)
        view, tokens, seqs = case.view, case.view.num_tokens, case.view.num_seqs

        def longer(tensor: torch.Tensor, count: int, value: int) -> torch.Tensor:
            return torch.cat((tensor, tensor.new_full((count, *tensor.shape[1:]), value)))

        padded = dataclasses.replace(
            view,
            kv_positions=longer(view.kv_positions, 9, 0),
            query_start=longer(view.query_start, 4, tokens),
            seq_lens=longer(view.seq_lens, 4, 0),
            rows=longer(view.rows, 4, 0),
            num_tokens=tokens + 9,
            num_seqs=seqs + 4,
            num_decodes=seqs + 4,
            is_decode=False,
            is_padded=True,
        )
        wide = Case(*(longer(tensor, 9, 3) for tensor in case[:3]), case.kv, padded)
        output = wide.run(backend, rule)
        assert_close(output[:tokens], expected, dtype)
        assert not output[tokens:].any()
        case.assert_stored()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_how_a_prompt_is_cut_changes_no_bit(dtype: torch.dtype) -> None:
    """Without decode rows, a query's answer depends on its sequence alone: not on its step, tile, or company."""
    rule, backend = rule_of(LLAMA), TritonAttention(target_programs=64)
    whole = case_of(((70, 70), (130, 131)), LLAMA, dtype)
    expected = whole.run(backend, rule)[70:]
    view = whole.view
    for cut in (1, 33, 64):
        start = 200 - cut
        part = dataclasses.replace(
            view,
            kv_positions=view.kv_positions[start:],
            query_start=view.query_start.new_tensor([0, cut]),
            seq_lens=view.seq_lens[1:],
            rows=view.rows[1:],
            counts=view.counts.new_tensor([0, 1]),
            num_tokens=cut,
            num_seqs=1,
            is_decode=False,
            num_decodes=0,
        )
        case = Case(whole.queries[start:], whole.new_keys[start:], whole.new_values[start:], whole.kv, part)
        assert torch.equal(case.run(backend, rule), expected[start - 70 :])


@needs_cuda
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_waits_for_the_device() -> None:
    rule = rule_of(LLAMA, window=40)
    backend = TritonAttention(target_programs=64)
    case = case_of(MIXED, LLAMA, torch.bfloat16)
    case.run(backend, rule)  # compiles
    try:
        torch.cuda.set_sync_debug_mode("error")
        case.run(backend, rule)
        case.run(PlainAttention(reads_lengths=False), rule)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@needs_cuda
def test_a_cache_of_more_than_two_billion_elements() -> None:
    case = case_of(((1, 33), (20, 20)), LLAMA, torch.bfloat16)
    shift = 2**31 // (16 * LLAMA.kv * LLAMA.key_dim)  # blocks of 16 tokens
    keys, values = (
        torch.cat((torch.full((shift, *pool.shape[1:]), torch.nan, dtype=pool.dtype, device=DEVICE), pool))
        for pool in (case.kv.keys[0], case.kv.values[0])
    )
    rule = rule_of(LLAMA)
    expected = case.expected(rule)
    case.view.table.add_(shift)
    case.view.kv_positions.add_(shift * 16)
    far = case._replace(kv=KvCache((keys,), (values,), 16))
    assert_close(far.run(TritonAttention(target_programs=64), rule), expected, torch.bfloat16)


@pytest.mark.parametrize("kv_heads", [1, 8])
def test_the_simulator_splits_decodes_as_the_kernel_does(kv_heads: int) -> None:
    """Profiles price a program's share of the longest sequence; contexts are long enough for all splits."""
    backend = TritonAttention(target_programs=132 * 8)
    for seqs in range(1, 300):
        assert splits(132 * 8 // kv_heads, seqs) == backend._splits(seqs * kv_heads, 4096), seqs
