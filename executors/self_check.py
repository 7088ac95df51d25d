"""Admission by logits: a model is right over a paged cache if its logits are those of its own attention.

Two random sequences, longer than the model's windows, go through the model's own eager attention, one at a time, whole.
The same go through the paged path together, in uneven chunks, through shuffled blocks, the cache full of NaN before,
with merged products and compiled layers where the model has them; its own attention runs as the model was written.
Windows are shortened for both, so that a short prompt exceeds them.

How far rounding alone may take the logits apart depends on the model and its dtype. It is measured: the model's own
logits again, with every embedding nudged by at most its last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from executors import compiled, few_rows, merged
from executors.attention import PAGED
from executors.errors import UnsupportedModelError
from executors.kv_cache import KvCache
from executors.step_view import Chunk, StepView, view_of

BLOCK_SIZE = 4
SHORT_WINDOW = 12
LENGTHS = (37, 36)
NUM_BLOCKS = sum(-(-length // BLOCK_SIZE) for length in LENGTHS)
# Tokens of the two sequences in each step: prefills, mixed steps and decodes, off the block boundaries; and one, up to
# 16, up to 32 and more, as products of so many rows have kernels of their own each (`executors.few_rows`, `.gated`).
STEPS = ((7, 0), (8, 9), (1, 8), (1, 1), (1, 1), (17, 16), (1, 1), (1, 0))
MIN_TOLERANCE = 1e-4  # float32 needs 1e-6; a wrong scale, window or cap costs 1e-2 and more
NOISE_FACTOR = 3  # measured: the paged logits are 0.4 to 0.8 times as far off as the nudged ones
MAX_TOLERANCE = 0.5  # logits that have nothing to do with one another are 1.4 apart

Forward = Callable[[StepView, KvCache], torch.Tensor]


def check(module: PreTrainedModel, paged: Forward, kv: KvCache, vocab_size: int) -> float:
    """The error of the paged logits; raises UnsupportedModelError where it is out of tolerance.

    paged  logits [tokens, vocab_size] of a view over `kv`, which has NUM_BLOCKS usable blocks of BLOCK_SIZE
    """
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in LENGTHS]
    with _short_windows(module), compiled.checked(module):
        expected = [_own_logits(module, tokens) for tokens in sequences]
        with _nudged_embeddings(module):
            noise = _error(_own_logits(module, sequences[0]), expected[0])
        prefix = _own_logits(module, sequences[0][: LENGTHS[0] // 2])
        actual = torch.cat(_paged_logits(paged, kv, sequences, module.device))
    tolerance = min(max(MIN_TOLERANCE, NOISE_FACTOR * noise), MAX_TOLERANCE)
    if not (change := _error(prefix, expected[0][: len(prefix)])) <= tolerance:
        raise UnsupportedModelError(f"its logits change by {change:.2g} (relative) when more tokens follow")
    if not (error := _error(actual, torch.cat(expected))) <= tolerance:
        raise UnsupportedModelError(
            f"its logits over a paged KV cache differ from those of its own attention by {error:.2g} "
            f"(relative), more than {tolerance:.2g}"
        )
    return error


@torch.no_grad()
def _own_logits(module: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """Logits float32 [tokens, vocab] as `generate` computes a prompt's, through eager attention."""
    token_ids = torch.tensor([tokens], device=module.device)
    module.set_attn_implementation("eager")
    try:
        with merged.apart(module), few_rows.apart(module), compiled.suspended(module):
            output = module(input_ids=token_ids, attention_mask=torch.ones_like(token_ids), use_cache=True)
    finally:
        module.set_attn_implementation(PAGED)
    return output.logits[0].float()


def _paged_logits(
    paged: Forward, kv: KvCache, sequences: Sequence[Sequence[int]], device: torch.device
) -> list[torch.Tensor]:
    """Logits float32 of each sequence, all positions, from the steps in STEPS."""
    for pool in (*kv.keys, *kv.values):
        pool.fill_(torch.nan)
    order = (torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(1)) + 1).tolist()
    blocks = [order[: -(-LENGTHS[0] // BLOCK_SIZE)], order[-(-LENGTHS[0] // BLOCK_SIZE) :]]
    done = [0] * len(sequences)
    parts: list[list[torch.Tensor]] = [[] for _ in sequences]
    for counts in STEPS:
        turn = [i for i in sorted(range(len(counts)), key=lambda i: counts[i] != 1) if counts[i]]
        chunks = [Chunk(sequences[i][done[i] : done[i] + counts[i]], done[i], blocks[i]) for i in turn]
        logits = paged(view_of(chunks, block_size=BLOCK_SIZE, device=device, all_logits=True), kv)
        for i, part in zip(turn, logits.split([counts[i] for i in turn]), strict=True):
            parts[i].append(part.float())
            done[i] += counts[i]
    return [torch.cat(of_sequence) for of_sequence in parts]


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Mean over positions of |actual - expected| over |expected - its mean|; NaN counts as infinite."""
    spread = (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    error = ((actual - expected).norm(dim=-1) / spread).mean()
    return float(error.nan_to_num(nan=torch.inf))


@contextmanager
def _short_windows(module: PreTrainedModel) -> Iterator[None]:
    """Sliding windows longer than SHORT_WINDOW have that length meanwhile, in the model's layers and configurations."""
    owners: dict[int, Any] = {
        id(owner): owner for layer in module.modules() for owner in (layer, getattr(layer, "config", None))
    }
    changed = [
        (owner, window)
        for owner in owners.values()
        if isinstance(window := getattr(owner, "sliding_window", None), int) and window > SHORT_WINDOW
    ]
    for owner, _ in changed:
        owner.sliding_window = SHORT_WINDOW
    try:
        yield
    finally:
        for owner, window in changed:
            owner.sliding_window = window


@contextmanager
def _nudged_embeddings(module: PreTrainedModel) -> Iterator[None]:
    """Embeddings are off by up to the precision of their dtype meanwhile."""
    generator = torch.Generator().manual_seed(2)

    def nudge(_: torch.nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
        by = torch.rand(output.shape, generator=generator).mul_(2).sub_(1).to(output.device)
        return (output.double() * (1 + by * torch.finfo(output.dtype).eps)).to(output.dtype)

    hook = module.get_input_embeddings().register_forward_hook(nudge)
    try:
        yield
    finally:
        hook.remove()
