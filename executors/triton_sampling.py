"""The sampler in Triton, for CUDA devices: penalties, the draw and log-probabilities, a row's draw in one program.

It gives the tokens of `sampling.sample_plain`, and finds them in another way. The largest weight / noise over the
tokens that top_p keeps is the largest over all tokens, if that one is kept. So a token is drawn from all; the weight
above its own says whether top_p keeps it; if not, whatever weighs no more is out too, and the draw is repeated over the
rest. No threshold is searched, and most rows are done after one round, whatever the shape of their distribution. Top_k
needs its threshold, because the weight of what it keeps is what top_p takes its share of.

Everything that is summed to decide on a token is an integer, and a row is one program's alone: no batch changes a
token. Products and sums are not contracted, and logarithms and exponentials are those of torch's own kernels.
"""
# ruff: noqa: N803, SIM102  # constants of a kernel are upper case, and conditions on them stand alone

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from executors.sampling_layout import IN_PROMPT, Features, Word

BLOCK = 8192  # tokens a program looks at together
NUM_WARPS = 16
PENALTY_BLOCK = 4096

_ROW, _KEY = tl.constexpr(int(Word.ROW)), tl.constexpr(int(Word.KEY))
_TOP_K, _TOP_P = tl.constexpr(int(Word.TOP_K)), tl.constexpr(int(Word.TOP_P))
_MIN_P, _INV_TEMPERATURE = tl.constexpr(int(Word.MIN_P)), tl.constexpr(int(Word.INV_TEMPERATURE))
_REPETITION, _PRESENCE = tl.constexpr(int(Word.REPETITION)), tl.constexpr(int(Word.PRESENCE))
_FREQUENCY = tl.constexpr(int(Word.FREQUENCY))
_IN_OUTPUT = tl.constexpr(IN_PROMPT - 1)
_ONE = tl.constexpr(2.0**44)  # see thresholds.py
_LOWEST_KEY = tl.constexpr(-(0x7F800000 + 1))  # that of -infinity
_IS_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter has no libdevice
_EXACT: dict[str, Any] = {"enable_fp_fusion": False}


def penalise(logits: Tensor, words: Tensor, counts: Tensor) -> Tensor:
    """float32[m, V]: the logits with penalties, for what each row has counted."""
    rows, vocab_size = logits.shape
    penalised = torch.empty_like(logits)
    grid = (rows, triton.cdiv(vocab_size, PENALTY_BLOCK))
    _penalise[grid](
        logits,
        words,
        counts,
        penalised,
        vocab_size,
        logits.stride(0),
        words.stride(0),
        penalised.stride(0),
        BLOCK=PENALTY_BLOCK,
        num_warps=8,
        **_EXACT,
    )
    return penalised


def draw(logits: Tensor, words: Tensor, hashes: Tensor, counts: Tensor | None, features: int) -> Tensor:
    """A token per row, int32[m]; NO_TOKEN where there is none. `counts`, if any, gets each token counted."""
    rows, vocab_size = logits.shape
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    _draw[(rows,)](
        logits,
        words,
        hashes,
        tokens if counts is None else counts,
        tokens,
        vocab_size,
        logits.stride(0),
        words.stride(0),
        RANDOM=bool(features & Features.RANDOM),
        MIN_P=bool(features & Features.MIN_P),
        TOP_K=bool(features & Features.TOP_K),
        TOP_P=bool(features & Features.TOP_P),
        COUNTS=counts is not None,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
        **_EXACT,
    )
    return tokens


def rank(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row's token: its log-probability, float32[m, 1]; rank, int32[m, 1]; and the row's log-sum-exp."""
    rows, vocab_size = logits.shape
    logprobs = torch.empty(rows, 1, dtype=torch.float32, device=logits.device)
    normalisers, ranks = torch.empty_like(logprobs), torch.empty_like(logprobs, dtype=torch.int32)
    _rank[(rows,)](
        logits, tokens, logprobs, ranks, normalisers, vocab_size, logits.stride(0), BLOCK=BLOCK, num_warps=NUM_WARPS
    )
    return logprobs, ranks, normalisers


@triton.jit
def _penalise(
    logits, words, counts, penalised, vocab_size, logits_stride, words_stride, penalised_stride, BLOCK: tl.constexpr
):
    seq = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < vocab_size
    ints = words + seq * words_stride
    floats = ints.to(tl.pointer_type(tl.float32))
    row = tl.load(ints + _ROW).to(tl.int64)
    repetition = tl.load(floats + _REPETITION)
    logit = tl.load(logits + seq * logits_stride + at, mask=inside)
    count = tl.load(counts + row * vocab_size + at, mask=inside, other=0)
    repeated = tl.where(logit > 0, tl.div_rn(logit, tl.zeros_like(logit) + repetition), logit * repetition)
    in_output = count & _IN_OUTPUT
    penalty = tl.load(floats + _FREQUENCY) * in_output.to(tl.float32)
    penalty += tl.load(floats + _PRESENCE) * (in_output > 0).to(tl.float32)
    value = tl.where(count != 0, repeated, logit) - penalty
    tl.store(penalised + seq * penalised_stride + at, value, mask=inside)


@triton.jit
def _draw(
    logits,
    words,
    hashes,
    counts,
    tokens,
    vocab_size,
    logits_stride,
    words_stride,
    RANDOM: tl.constexpr,
    MIN_P: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    COUNTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    line = logits + seq * logits_stride
    ints = words + seq * words_stride
    floats = ints.to(tl.pointer_type(tl.float32))
    lanes = tl.arange(0, BLOCK)

    # The largest logit, the first of equals.
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    is_nan = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        logit = tl.load(line + start + lanes, mask=start + lanes < vocab_size, other=float("-inf"))
        is_better = logit > best
        best = tl.where(is_better, logit, best)
        place = tl.where(is_better, start + lanes, place)
        is_nan |= (logit != logit).to(tl.int32)
    peak = tl.max(best, 0)
    token = tl.min(tl.where(best == peak, place, vocab_size), 0)
    is_usable = (tl.max(is_nan, 0) == 0) & (peak < float("inf")) & (peak > float("-inf"))

    if RANDOM:
        inverse = tl.load(floats + _INV_TEMPERATURE)
        if is_usable & (inverse > 0):
            least_weight = tl.load(floats + _MIN_P)
            share = tl.load(floats + _TOP_P)
            key_0 = tl.load(ints + _KEY).to(tl.uint32, bitcast=True)
            key_1 = tl.load(ints + _KEY + 1).to(tl.uint32, bitcast=True)
            least_key = _LOWEST_KEY
            if TOP_K:
                least_key = _kth_key(line, lanes, vocab_size, tl.load(ints + _TOP_K), peak, BLOCK)
            out_to = -1  # bits of a weight: tokens that weigh no more are known to be out
            needed = tl.zeros([], tl.int64)  # of the weight that is left, so much has to be kept
            is_drawn = 0
            while is_drawn == 0:
                score = tl.full([BLOCK], -1.0, tl.float32)
                place = tl.zeros([BLOCK], tl.int32)
                total = tl.zeros([BLOCK], tl.int64)
                for start in range(0, vocab_size, BLOCK):
                    inside = start + lanes < vocab_size
                    logit = tl.load(line + start + lanes, mask=inside, other=float("-inf"))
                    weight = _weight(logit, peak, inverse, least_weight, least_key, MIN_P, TOP_K)
                    noise = _exponential(tl.load(hashes + start + lanes, mask=inside, other=0), key_0, key_1)
                    drawn = tl.where(weight.to(tl.int32, bitcast=True) > out_to, tl.div_rn(weight, noise), -1.0)
                    is_better = drawn > score
                    score = tl.where(is_better, drawn, score)
                    place = tl.where(is_better, start + lanes, place)
                    if TOP_P:
                        total += (weight * _ONE).to(tl.int64)
                token = tl.min(tl.where(score == tl.max(score, 0), place, vocab_size), 0)
                is_drawn = 1
                if TOP_P:
                    if share < 1:
                        if out_to < 0:
                            whole = tl.sum(total, 0).to(tl.float64)
                            needed = tl.maximum(tl.ceil(share.to(tl.float64) * whole).to(tl.int64), 1)
                        logit = tl.load(line + token)
                        own = _weight(logit, peak, inverse, least_weight, least_key, MIN_P, TOP_K)
                        if (
                            _weight_above(
                                own,
                                line,
                                lanes,
                                vocab_size,
                                peak,
                                inverse,
                                least_weight,
                                least_key,
                                MIN_P,
                                TOP_K,
                                BLOCK,
                            )
                            >= needed
                        ):
                            out_to = own.to(tl.int32, bitcast=True)
                            is_drawn = 0

    tl.store(tokens + seq, tl.where(is_usable, token, -1))
    if COUNTS:
        if is_usable:
            row = tl.load(ints + _ROW).to(tl.int64)
            tl.atomic_add(counts + row * vocab_size + token, 1)


@triton.jit
def _weight(logit, peak, inverse, least_weight, least_key, MIN_P: tl.constexpr, TOP_K: tl.constexpr):
    """From 0 to 1; 0 for what min_p and top_k leave out."""
    weight = _exp((logit - peak) * inverse)
    if MIN_P:
        weight = tl.where(weight >= least_weight, weight, 0.0)
    if TOP_K:
        weight = tl.where(_order(logit) >= least_key, weight, 0.0)
    return weight


@triton.jit
def _weight_above(
    own,
    line,
    lanes,
    vocab_size,
    peak,
    inverse,
    least_weight,
    least_key,
    MIN_P: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The weight of all tokens that weigh more than `own`, as an integer."""
    above = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocab_size, BLOCK):
        logit = tl.load(line + start + lanes, mask=start + lanes < vocab_size, other=float("-inf"))
        weight = _weight(logit, peak, inverse, least_weight, least_key, MIN_P, TOP_K)
        above += (tl.where(weight > own, weight, 0.0) * _ONE).to(tl.int64)
    return tl.sum(above, 0)


@triton.jit
def _kth_key(line, lanes, vocab_size, k, peak, BLOCK: tl.constexpr):
    """A key that the `k` largest logits reach, and what equals the k-th of them, and nothing else."""
    low = tl.zeros([], tl.int64) + _LOWEST_KEY  # k or more reach it
    high = _order(peak).to(tl.int64) + 1  # fewer than k reach it
    at_low = vocab_size
    while (high - low > 1) & (at_low != k):
        quarter = (high - low) // 4
        first = tl.maximum(low + quarter, low + 1)
        second = low + (high - low) // 2
        third = tl.minimum(second + quarter, high - 1)
        num_first = tl.zeros([BLOCK], tl.int32)
        num_second = tl.zeros([BLOCK], tl.int32)
        num_third = tl.zeros([BLOCK], tl.int32)
        for start in range(0, vocab_size, BLOCK):
            inside = start + lanes < vocab_size
            key = _order(tl.load(line + start + lanes, mask=inside, other=float("-inf")))
            num_first += (inside & (key >= first.to(tl.int32))).to(tl.int32)
            num_second += (inside & (key >= second.to(tl.int32))).to(tl.int32)
            num_third += (inside & (key >= third.to(tl.int32))).to(tl.int32)
        at_first, at_second, at_third = tl.sum(num_first, 0), tl.sum(num_second, 0), tl.sum(num_third, 0)
        if at_third >= k:
            low, at_low = third, at_third
        elif at_second >= k:
            low, at_low, high = second, at_second, third
        elif at_first >= k:
            low, at_low, high = first, at_first, second
        else:
            high = first
    return low.to(tl.int32)


@triton.jit
def _order(logit):
    """An integer that compares like the logit; 0.0 and -0.0 are one number."""
    bits = (logit + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _exponential(hash, key_0, key_1):
    """See noise.py."""
    x = hash.to(tl.uint32, bitcast=True) ^ key_0
    x *= 0x7FEB352D
    x = x ^ (x >> 15) ^ key_1
    x *= 0x846CA68B
    x = (x ^ (x >> 16)) & 0x7FFFFFFF
    uniform = tl.minimum((x.to(tl.int32, bitcast=True).to(tl.float32) + 0.5) * 2.0**-31, 1 - 2.0**-24)
    return -_log1p(-uniform)


@triton.jit
def _exp(x):
    if _IS_COMPILED:
        return libdevice.exp(x)
    return tl.exp(x)


@triton.jit
def _log1p(x):
    if _IS_COMPILED:
        return libdevice.log1p(x)
    one_more = 1 + x
    return tl.where(one_more == 1, x, tl.log(one_more) * x / tl.where(one_more == 1, 1.0, one_more - 1))


@triton.jit
def _rank(logits, tokens, logprobs, ranks, normalisers, vocab_size, logits_stride, BLOCK: tl.constexpr):
    seq = tl.program_id(0).to(tl.int64)
    line = logits + seq * logits_stride
    lanes = tl.arange(0, BLOCK)
    own = tl.load(line + tl.maximum(tl.load(tokens + seq), 0))
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    above = tl.zeros([BLOCK], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        logit = tl.load(line + start + lanes, mask=start + lanes < vocab_size, other=float("-inf"))
        best = tl.maximum(best, logit)
        above += (logit > own).to(tl.int32)
    peak = tl.max(best, 0)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        logit = tl.load(line + start + lanes, mask=start + lanes < vocab_size, other=float("-inf"))
        total += _exp(logit - peak)
    normaliser = peak + tl.log(tl.sum(total, 0))
    tl.store(logprobs + seq, own - normaliser)
    tl.store(ranks + seq, tl.sum(above, 0) + 1)
    tl.store(normalisers + seq, normaliser)
