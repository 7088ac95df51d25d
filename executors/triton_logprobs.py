"""Log-probabilities in Triton: `logprobs.logprob_words` by two kernels, the first over parts of rows.

Sums of float32 have the same order in every batch. Of equal logits, the lower token comes first.
"""
# ruff: noqa: N803  # constants of a kernel are upper case

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from executors.logprobs import num_words
from executors.triton_weights import exp, logit_of, order_of, ranked, token_of

BLOCK = 4096  # tokens of a part
NUM_WARPS = 8

_NOTHING = tl.constexpr(-(2**63))


def logprob_words(logits: Tensor, tokens: Tensor, num_logprobs: int) -> Tensor:
    """int32[m, num_words], from logits [m, V] of any floating-point type and tokens int32[m]."""
    rows, vocab_size = logits.shape
    num_parts = triton.cdiv(vocab_size, BLOCK)
    words = torch.empty(rows, num_words(num_logprobs), dtype=torch.int32, device=logits.device)
    if not rows:
        return words
    peaks = torch.empty(rows, num_parts, dtype=torch.float32, device=logits.device)
    totals, above = torch.empty_like(peaks), torch.empty_like(peaks, dtype=torch.int32)
    largest = torch.empty(rows, num_parts, num_logprobs, dtype=torch.int64, device=logits.device)
    _look_at_parts[rows, num_parts](
        logits,
        tokens,
        peaks,
        totals,
        above,
        largest,
        vocab_size,
        logits.stride(0),
        NUM_LOGPROBS=num_logprobs,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )
    _add_up[(rows,)](
        logits,
        tokens,
        peaks,
        totals,
        above,
        largest,
        words,
        logits.stride(0),
        num_parts,
        NUM_LOGPROBS=num_logprobs,
        PARTS=triton.next_power_of_2(num_parts),
        LISTED=triton.next_power_of_2(num_parts * num_logprobs),
        num_warps=4,
    )
    return words


@triton.jit(do_not_specialize_on_alignment=["tokens"])
def _look_at_parts(
    logits,
    tokens,
    peaks,
    totals,
    above,
    largest,
    vocab_size,
    logits_stride,
    NUM_LOGPROBS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, part): the largest logits and the sum of the exponentials; how many exceed the token's own."""
    seq, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line = logits + seq * logits_stride
    at = part * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab_size
    own = tl.load(line + tl.maximum(tl.load(tokens + seq), 0)).to(tl.float32)
    logit = tl.load(line + at, mask=inside, other=float("-inf")).to(tl.float32)
    peak = tl.max(logit, 0)
    base = tl.where(peak > float("-inf"), peak, 0.0)
    out = seq * tl.num_programs(1) + part
    tl.store(peaks + out, peak)
    tl.store(totals + out, tl.sum(exp(logit - base), 0))
    tl.store(above + out, tl.sum((logit > own).to(tl.int32), 0))
    listed = tl.where(inside, ranked(order_of(logit), at), _NOTHING)
    for i in range(NUM_LOGPROBS):
        best = tl.max(listed, 0)
        tl.store(largest + out * NUM_LOGPROBS + i, best)
        listed = tl.where(listed == best, _NOTHING, listed)


@triton.jit(do_not_specialize_on_alignment=["tokens"])
def _add_up(
    logits,
    tokens,
    peaks,
    totals,
    above,
    largest,
    words,
    logits_stride,
    num_parts,
    NUM_LOGPROBS: tl.constexpr,
    PARTS: tl.constexpr,
    LISTED: tl.constexpr,
):
    """Program (row): its words, as `logprobs.py` has them."""
    seq = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, PARTS)
    inside = parts < num_parts
    of_parts = tl.load(peaks + seq * num_parts + parts, mask=inside, other=float("-inf"))
    peak = tl.max(of_parts, 0)
    total = tl.load(totals + seq * num_parts + parts, mask=inside, other=0.0)
    normaliser = peak + tl.log(tl.sum(total * exp(of_parts - peak), 0))
    own = tl.load(logits + seq * logits_stride + tl.maximum(tl.load(tokens + seq), 0)).to(tl.float32)
    rank = tl.sum(tl.load(above + seq * num_parts + parts, mask=inside, other=0), 0) + 1
    out = words + seq * (2 + 2 * NUM_LOGPROBS)
    tl.store(out, (own - normaliser).to(tl.int32, bitcast=True))
    tl.store(out + 1, rank)
    index = tl.arange(0, LISTED)
    count = num_parts * NUM_LOGPROBS
    listed = tl.load(largest + seq * count + index, mask=index < count, other=_NOTHING)
    for i in range(NUM_LOGPROBS):
        best = tl.max(listed, 0)
        tl.store(out + 2 + i, token_of(best))
        value = logit_of((best >> 32).to(tl.int32))
        tl.store(out + 2 + NUM_LOGPROBS + i, (value - normaliser).to(tl.int32, bitcast=True))
        listed = tl.where(listed == best, _NOTHING, listed)
