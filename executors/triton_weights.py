"""What the kernels of sampling and log-probabilities compute of a token, and what sampling looks for in whole rows.

Products and sums are not contracted, if the kernel is launched so; logarithms and exponentials are those of torch's own
kernels.
"""
# ruff: noqa: N803  # constants of a kernel are upper case

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

ONE = tl.constexpr(2.0**44)  # see thresholds.py
LOWEST_KEY = tl.constexpr(-(0x7F800000 + 1))  # that of -infinity
_LAST_PLACE = tl.constexpr(0x7FFFFFFF)  # by exclusive or, counts down
_IS_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)  # the interpreter has no libdevice


@triton.jit
def ranked(key, token):
    """One number, int64, to order by: the higher key, int32, then the lower token."""
    return (key.to(tl.int64) << 32) | (token ^ _LAST_PLACE).to(tl.int64)


@triton.jit
def token_of(rank):
    return (rank & 0xFFFFFFFF).to(tl.int32) ^ _LAST_PLACE


@triton.jit
def candidate_of(score, token):
    """A rank by score. Scores are not negative: their bits compare like them."""
    return ranked(score.to(tl.int32, bitcast=True), token)


@triton.jit
def draw_again(
    line,
    hashes,
    key_0,
    key_1,
    vocab_size,
    peak,
    inverse,
    least_weight,
    least_key,
    bound,
    needed,
    MIN_P: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best of the tokens that are heavier than `bound` and that top_p keeps, by trying one after the other."""
    lanes = tl.arange(0, BLOCK)
    token = 0
    is_kept = 0
    while is_kept == 0:
        best = tl.zeros([BLOCK], tl.int64) - 1
        for start in range(0, vocab_size, BLOCK):
            at = start + lanes
            inside = at < vocab_size
            logit = tl.load(line + at, mask=inside, other=float("-inf")).to(tl.float32)
            weight = weight_of(logit, peak, inverse, least_weight, least_key, MIN_P, TOP_K)
            noise = exponential(tl.load(hashes + at, mask=inside, other=0), key_0, key_1)
            is_left = inside & (weight.to(tl.int32, bitcast=True) > bound)
            best = tl.maximum(best, tl.where(is_left, candidate_of(tl.div_rn(weight, noise), at), -1))
        token = token_of(tl.max(best, 0))
        own = tl.load(line + token).to(tl.float32)
        own = weight_of(own, peak, inverse, least_weight, least_key, MIN_P, TOP_K)
        heavier = tl.zeros([BLOCK], tl.int64)
        for start in range(0, vocab_size, BLOCK):
            logit = tl.load(line + start + lanes, mask=start + lanes < vocab_size, other=float("-inf")).to(tl.float32)
            weight = weight_of(logit, peak, inverse, least_weight, least_key, MIN_P, TOP_K)
            heavier += (tl.where(weight > own, weight, 0.0) * ONE).to(tl.int64)
        bound = own.to(tl.int32, bitcast=True)
        is_kept = (tl.sum(heavier, 0) < needed).to(tl.int32)
    return token


@triton.jit
def weight_of(logit, peak, inverse, least_weight, least_key, MIN_P: tl.constexpr, TOP_K: tl.constexpr):
    """From 0 to 1; 0 for what min_p and top_k leave out."""
    weight = exp((logit - peak) * inverse)
    if MIN_P:
        weight = tl.where(weight >= least_weight, weight, 0.0)
    if TOP_K:
        weight = tl.where(order_of(logit) >= least_key, weight, 0.0)
    return weight


@triton.jit
def kth_key(line, lanes, vocab_size, k, peak, BLOCK: tl.constexpr):
    """A key that the `k` largest logits reach, and what equals the k-th of them, and nothing else."""
    low = tl.zeros([], tl.int64) + LOWEST_KEY  # k or more reach it
    high = order_of(peak).to(tl.int64) + 1  # fewer than k reach it
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
            key = order_of(tl.load(line + start + lanes, mask=inside, other=float("-inf")).to(tl.float32))
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
def order_of(logit):
    """An integer that compares like the logit; 0.0 and -0.0 are one number."""
    bits = (logit + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def logit_of(key):
    """What `order_of` made the key of."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def exponential(hash, key_0, key_1):
    """See noise.py."""
    x = hash.to(tl.uint32, bitcast=True) ^ key_0
    x *= 0x7FEB352D
    x = x ^ (x >> 15) ^ key_1
    x *= 0x846CA68B
    x = (x ^ (x >> 16)) & 0x7FFFFFFF
    uniform = tl.minimum((x.to(tl.int32, bitcast=True).to(tl.float32) + 0.5) * 2.0**-31, 1 - 2.0**-24)
    return -_log1p(-uniform)


@triton.jit
def exp(x):
    if _IS_COMPILED:
        return libdevice.exp(x)
    return tl.exp(x)


@triton.jit
def _log1p(x):
    if _IS_COMPILED:
        return libdevice.log1p(x)
    one_more = 1 + x
    return tl.where(one_more == 1, x, tl.log(one_more) * x / tl.where(one_more == 1, 1.0, one_more - 1))
