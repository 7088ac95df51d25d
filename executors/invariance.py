"""Whether the numbers of a token depend on how many tokens its step is padded to.

A batch-invariant step computes each row by itself: decodes as prefills are, sums in one order. Whether the order is the
same for every size is up to the library's products and the compiler's kernels, so it is tried: the same two sequences,
in steps of each size, beside others that fill them. Padding to several sizes instead of one then costs no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from executors import few_rows
from executors.step_view import Chunk, view_of

if TYPE_CHECKING:
    from executors.models import Model

BLOCK_SIZE = 16
STEPS = ((6, 5), (1, 1), (1, 3))  # tokens of the two sequences: prefills, and as many as decodes have
LEAST_TOKENS = sum(STEPS[0]) + 2  # of a step; a sequence of one token in front would be a decode
MAX_TOKENS = 4 * BLOCK_SIZE  # of a sequence that fills
LEAST_CONTEXT = max(map(sum, zip(*STEPS, strict=True)))  # a model with less has no positions for the two


@torch.no_grad()
def alike(model: Model, sizes: Sequence[int]) -> tuple[int, ...]:
    """Those of the increasing sizes in which a token's logits are, bit by bit, what they are in the largest one."""
    *smaller, largest = sizes
    if not smaller or (model.max_model_len or LEAST_CONTEXT) < LEAST_CONTEXT:
        return (largest,)
    expected = _logits(model, largest)
    agree = [size for size in smaller if size >= LEAST_TOKENS and torch.equal(_logits(model, size), expected)]
    return (*agree, largest)


def _logits(model: Model, size: int) -> torch.Tensor:
    """Logits of the two sequences' last tokens, step by step."""
    draw = torch.Generator().manual_seed(0)
    ours = torch.randint(model.vocab_size, (2, BLOCK_SIZE), generator=draw).tolist()
    tokens = torch.randint(model.vocab_size, (size,), generator=draw).tolist()
    longest = min(MAX_TOKENS, model.max_model_len or MAX_TOKENS)
    others = -(-longest // BLOCK_SIZE)  # blocks of each
    kv = model.allocate_kv(2 + others * -(-size // longest), BLOCK_SIZE)
    done = [0, 0]
    found = []
    for counts in STEPS:
        ends = [*range(longest, size - sum(counts), longest), size - sum(counts)]
        chunks = [
            Chunk(tokens[begin:end], 0, range(3 + others * number, 3 + others * (number + 1)))
            for number, (begin, end) in enumerate(pairwise([0, *ends]))
        ]
        for number, count in enumerate(counts):
            chunks.append(Chunk(ours[number][done[number] :][:count], done[number], [1 + number]))
            done[number] += count
        view = view_of(chunks, block_size=BLOCK_SIZE, device=model.device)
        with few_rows.alike():
            found.append(model.forward(replace(view, logits_at=view.logits_at[-2:]), kv))
    return torch.cat(found)
