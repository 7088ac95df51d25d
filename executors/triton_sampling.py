"""The sampler in Triton, for CUDA devices: edits, penalties and the draw, a few kernels over parts of rows.

It gives the tokens of `sampling.sample_plain`, and finds them in another way. The largest weight / noise over the
tokens that top_p keeps is the largest over all tokens, if that one is kept. If the weight above its own says that it is
not, whatever weighs no more is out too, and the next candidate is the largest over the rest; most rows keep one of the
first few. So no threshold is searched for top_p. Top_k needs its own, because the weight of what it keeps is what
top_p takes its share of.

A row of logits is divided into parts of BLOCK tokens, and a program takes one part, once per pass: the peak, with edits
and penalties; the candidates; the weight above each. Candidates of parts merge: those of a part get heavier down the
list, and the best token of a part that weighs more than some bound is the first of its list that does. A row whose
candidates are all out, or whose lists were too short to tell, is gone through again by one program.

Everything that is summed to decide on a token is an integer, and parts are the same in every batch: no batch changes a
token. Products and sums are not contracted, and logarithms and exponentials are those of torch's own kernels.
"""
# ruff: noqa: N803, SIM102  # constants of a kernel are upper case, and conditions on them stand alone

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from executors.sampling_layout import IN_PROMPT, MAX_EDITS, Features, Word
from executors.sampling_state import SamplerState
from executors.triton_weights import (
    LOWEST_KEY,
    ONE,
    candidate_of,
    draw_again,
    exponential,
    kth_key,
    token_of,
    weight_of,
)

BLOCK = 4096  # tokens of a part
NUM_WARPS = 8
CANDIDATES = 8  # of a part, and of a row, where top_p may leave tokens out
FEW_CANDIDATES = 4  # are enough where it leaves out little
WHOLE_BLOCK = 8192  # tokens that a program which goes through whole rows looks at together
WHOLE_WARPS = 16

_ROW, _KEY = tl.constexpr(int(Word.ROW)), tl.constexpr(int(Word.KEY))
_NUM_EDITS = tl.constexpr(int(Word.NUM_EDITS))
_TOP_K, _TOP_P = tl.constexpr(int(Word.TOP_K)), tl.constexpr(int(Word.TOP_P))
_MIN_P, _INV_TEMPERATURE = tl.constexpr(int(Word.MIN_P)), tl.constexpr(int(Word.INV_TEMPERATURE))
_REPETITION, _PRESENCE = tl.constexpr(int(Word.REPETITION)), tl.constexpr(int(Word.PRESENCE))
_FREQUENCY = tl.constexpr(int(Word.FREQUENCY))
_IN_OUTPUT = tl.constexpr(IN_PROMPT - 1)
_MAX_EDITS = tl.constexpr(MAX_EDITS)
_EDIT_BLOCK = tl.constexpr(256)
_FEW_CANDIDATES = tl.constexpr(FEW_CANDIDATES)
_LITTLE = tl.constexpr(0.7)
_NO_BOUND = tl.constexpr(0x7FFFFFFF)  # as bits of a weight: heavier than all
_EXACT: dict[str, Any] = {"enable_fp_fusion": False}


def draw(logits: Tensor, words: Tensor, state: SamplerState, features: int, tokens: Tensor) -> None:
    """Writes a token per row to `tokens`, int32[m]; NO_TOKEN where there is none. With penalties, it is counted.

    `logits` are [m, V] of any floating-point type and are left as they are.
    """
    rows, vocab_size = logits.shape
    if not rows:
        return
    has_edits, has_penalties = bool(features & Features.EDITS), bool(features & Features.PENALTIES)
    has_top_p = bool(features & Features.TOP_P)
    num_parts, num_candidates = triton.cdiv(vocab_size, BLOCK), CANDIDATES if has_top_p else 1
    parts, padded = (rows, num_parts), triton.next_power_of_2(num_parts)

    def room(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    edited = room(rows, vocab_size, dtype=torch.float32) if has_edits or has_penalties else logits
    peaks, places = room(*parts, dtype=torch.float32), room(*parts, dtype=torch.int32)
    _find_peaks[parts](
        logits,
        words,
        state.counts if has_penalties else places,
        state.edit_tokens if has_edits else places,
        state.edit_values if has_edits else peaks,
        edited,
        peaks,
        places,
        vocab_size,
        logits.stride(0),
        words.stride(0),
        EDITS=has_edits,
        PENALTIES=has_penalties,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
        **_EXACT,
    )
    least_keys, finalists, bounds, totals, above = places, places, places, peaks, peaks
    # By name, as all kernels behind the first begin with these.
    lines: dict[str, Any] = {
        "edited": edited,
        "words": words,
        "peaks": peaks,
        "places": places,
        "vocab_size": vocab_size,
        "edited_stride": edited.stride(0),
        "words_stride": words.stride(0),
        "PARTS": padded,
    }
    cuts = {"MIN_P": bool(features & Features.MIN_P), "TOP_K": bool(features & Features.TOP_K)}
    if features & Features.RANDOM:
        if features & Features.TOP_K:
            least_keys = room(rows, dtype=torch.int32)
            _find_least_keys[(rows,)](
                **lines,
                least_keys=least_keys,
                num_parts=num_parts,
                BLOCK=WHOLE_BLOCK,
                num_warps=WHOLE_WARPS,
                **_EXACT,
            )
        candidates, weights = (room(*parts, num_candidates, dtype=dtype) for dtype in (torch.int64, torch.int32))
        totals = room(*parts, dtype=torch.int64)
        _find_candidates[parts](
            **lines,
            hashes=state.hashes,
            least_keys=least_keys,
            candidates=candidates,
            weights=weights,
            totals=totals,
            **cuts,
            TOP_P=has_top_p,
            CANDIDATES=num_candidates,
            BLOCK=BLOCK,
            num_warps=NUM_WARPS,
            **_EXACT,
        )
        finalists, bounds = (room(rows, num_candidates, dtype=torch.int32) for _ in range(2))
        _merge_lists[(rows,)](
            words,
            peaks,
            places,
            candidates,
            weights,
            finalists,
            bounds,
            vocab_size,
            words.stride(0),
            num_parts,
            CANDIDATES=num_candidates,
            PARTS=padded,
            num_warps=4,
        )
        if has_top_p:
            above = room(rows, num_candidates, num_parts, dtype=torch.int64)
            _weigh_above[parts](
                **lines,
                least_keys=least_keys,
                bounds=bounds,
                above=above,
                **cuts,
                CANDIDATES=num_candidates,
                BLOCK=BLOCK,
                num_warps=NUM_WARPS,
                **_EXACT,
            )
    is_whole = has_top_p and bool(features & Features.RANDOM)
    _choose[(rows,)](
        **lines,
        hashes=state.hashes,
        least_keys=least_keys,
        finalists=finalists,
        bounds=bounds,
        totals=totals,
        above=above,
        counts=state.counts if has_penalties else places,
        tokens=tokens,
        num_parts=num_parts,
        RANDOM=bool(features & Features.RANDOM),
        **cuts,
        TOP_P=has_top_p,
        COUNTS=has_penalties,
        CANDIDATES=num_candidates,
        BLOCK=WHOLE_BLOCK,
        num_warps=WHOLE_WARPS if is_whole else 1,
        **_EXACT,
    )


@triton.jit(do_not_specialize_on_alignment=["words"])
def _find_peaks(
    logits,
    words,
    counts,
    edit_tokens,
    edit_values,
    edited,
    peaks,
    places,
    vocab_size,
    logits_stride,
    words_stride,
    EDITS: tl.constexpr,
    PENALTIES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, part): the largest logit, the first of equals, with edits and penalties; NaN where there is one."""
    seq, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = part * BLOCK
    at = begin + tl.arange(0, BLOCK)
    inside = at < vocab_size
    logit = tl.load(logits + seq * logits_stride + at, mask=inside, other=float("-inf")).to(tl.float32)
    target = edited + seq * vocab_size
    ints = words + seq * words_stride
    if EDITS:
        num_edits = tl.load(ints + _NUM_EDITS)
        if num_edits > 0:
            # A token has two edits at most, and then one of them is -infinity: their order does not matter.
            tl.store(target + at, logit, mask=inside)
            tl.debug_barrier()
            first_edit = tl.load(ints + _ROW).to(tl.int64) * _MAX_EDITS
            for first in range(0, num_edits, _EDIT_BLOCK):
                index = first + tl.arange(0, _EDIT_BLOCK)
                token = tl.load(edit_tokens + first_edit + index, mask=index < num_edits, other=-1)
                amount = tl.load(edit_values + first_edit + index, mask=index < num_edits, other=0.0)
                tl.atomic_add(target + token, amount, mask=(token >= begin) & (token < begin + BLOCK))
            tl.debug_barrier()
            logit = tl.load(target + at, mask=inside, other=float("-inf"), cache_modifier=".cg")
    if PENALTIES:
        floats = ints.to(tl.pointer_type(tl.float32))
        row = tl.load(ints + _ROW).to(tl.int64)
        repetition = tl.load(floats + _REPETITION)
        count = tl.load(counts + row * vocab_size + at, mask=inside, other=0)
        repeated = tl.where(logit > 0, tl.div_rn(logit, tl.zeros_like(logit) + repetition), logit * repetition)
        in_output = count & _IN_OUTPUT
        penalty = tl.load(floats + _FREQUENCY) * in_output.to(tl.float32)
        penalty += tl.load(floats + _PRESENCE) * (in_output > 0).to(tl.float32)
        logit = tl.where(count != 0, repeated, logit) - penalty
    if EDITS or PENALTIES:
        tl.store(target + at, logit, mask=inside)
    is_nan = logit != logit
    peak = tl.max(tl.where(is_nan, float("-inf"), logit), 0)
    place = tl.min(tl.where(inside & (logit == peak), at, vocab_size), 0)
    out = seq * tl.num_programs(1) + part
    tl.store(peaks + out, tl.where(tl.max(is_nan.to(tl.int32), 0) > 0, float("nan"), peak))
    tl.store(places + out, place)


@triton.jit
def _peak(peaks, places, seq, num_parts, vocab_size, PARTS: tl.constexpr):
    """Of a row: the largest logit, where it comes first, and whether the row has a token at all."""
    parts = tl.arange(0, PARTS)
    of_parts = tl.load(peaks + seq * num_parts + parts, mask=parts < num_parts, other=float("-inf"))
    place = tl.load(places + seq * num_parts + parts, mask=parts < num_parts, other=vocab_size)
    is_nan = of_parts != of_parts
    peak = tl.max(tl.where(is_nan, float("-inf"), of_parts), 0)
    token = tl.min(tl.where(of_parts == peak, place, vocab_size), 0)
    is_usable = (tl.max(is_nan.to(tl.int32), 0) == 0) & (peak < float("inf")) & (peak > float("-inf"))
    return peak, token, is_usable


@triton.jit(do_not_specialize_on_alignment=["words"])
def _find_least_keys(
    edited,
    words,
    peaks,
    places,
    least_keys,
    vocab_size,
    edited_stride,
    words_stride,
    num_parts,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row): the key that top_k's tokens reach."""
    seq = tl.program_id(0).to(tl.int64)
    ints = words + seq * words_stride
    k = tl.load(ints + _TOP_K)
    inverse = tl.load(ints.to(tl.pointer_type(tl.float32)) + _INV_TEMPERATURE)
    peak, _first, is_usable = _peak(peaks, places, seq, num_parts, vocab_size, PARTS)
    least_key = tl.zeros([], tl.int32) + LOWEST_KEY
    if is_usable & (inverse > 0) & (k < vocab_size):
        least_key = kth_key(edited + seq * edited_stride, tl.arange(0, BLOCK), vocab_size, k, peak, BLOCK)
    tl.store(least_keys + seq, least_key)


@triton.jit(do_not_specialize_on_alignment=["words"])
def _find_candidates(
    edited,
    words,
    hashes,
    peaks,
    places,
    least_keys,
    candidates,
    weights,
    totals,
    vocab_size,
    edited_stride,
    words_stride,
    MIN_P: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, part): the part's whole weight, and its list: each has the best score of what is heavier than the
    one before. Where the list is full, or not to be longer, it ends with the weight of its last one; else heavier.
    """
    seq, part, num_parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    ints = words + seq * words_stride
    floats = ints.to(tl.pointer_type(tl.float32))
    inverse = tl.load(floats + _INV_TEMPERATURE)
    peak, _first, is_usable = _peak(peaks, places, seq, num_parts, vocab_size, PARTS)
    if is_usable & (inverse > 0):
        at = part * BLOCK + tl.arange(0, BLOCK)
        inside = at < vocab_size
        line = edited + seq * edited_stride
        weight = _weights(line, floats, least_keys + seq, at, vocab_size, peak, inverse, MIN_P, TOP_K)
        key_0 = tl.load(ints + _KEY).to(tl.uint32, bitcast=True)
        key_1 = tl.load(ints + _KEY + 1).to(tl.uint32, bitcast=True)
        noise = exponential(tl.load(hashes + at, mask=inside, other=0), key_0, key_1)
        candidate = tl.where(inside, candidate_of(tl.div_rn(weight, noise), at), -1)
        weight_bits = weight.to(tl.int32, bitcast=True)
        out = seq * num_parts + part
        depth = 1
        if TOP_P:
            tl.store(totals + out, tl.sum((weight * ONE).to(tl.int64), 0))
            depth = _depth(tl.load(floats + _TOP_P), CANDIDATES)
        own = tl.zeros([], tl.int32)
        for i in range(depth):
            best = tl.max(candidate, 0)
            own = tl.max(tl.where(candidate == best, weight_bits, -1), 0)
            own = tl.where(best < 0, _NO_BOUND, own)
            tl.store(candidates + out * CANDIDATES + i, best)
            tl.store(weights + out * CANDIDATES + i, own)
            candidate = tl.where(weight_bits > own, candidate, -1)
        for i in range(depth, CANDIDATES):
            tl.store(candidates + out * CANDIDATES + i, -1)
            tl.store(weights + out * CANDIDATES + i, own)


@triton.jit
def _weights(line, floats, least_key_at, at, vocab_size, peak, inverse, MIN_P: tl.constexpr, TOP_K: tl.constexpr):
    """Of the tokens `at` of a row; 0 beyond its end."""
    logit = tl.load(line + at, mask=at < vocab_size, other=float("-inf")).to(tl.float32)
    least_key = 0
    if TOP_K:
        least_key = tl.load(least_key_at)
    return weight_of(logit, peak, inverse, tl.load(floats + _MIN_P), least_key, MIN_P, TOP_K)


@triton.jit
def _depth(share, CANDIDATES: tl.constexpr):
    """How many candidates are looked for, where top_p is to keep `share`."""
    wanted = tl.where(share > _LITTLE, tl.minimum(_FEW_CANDIDATES, CANDIDATES), CANDIDATES)
    return tl.where(share < 1, wanted, 1)


@triton.jit(do_not_specialize_on_alignment=["words"])
def _merge_lists(
    words,
    peaks,
    places,
    candidates,
    weights,
    finalists,
    bounds,
    vocab_size,
    words_stride,
    num_parts,
    CANDIDATES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Program (row): the row's candidates in order, and the bits of their weights; -1 where the lists cannot tell."""
    seq = tl.program_id(0).to(tl.int64)
    floats = (words + seq * words_stride).to(tl.pointer_type(tl.float32))
    _largest, _first, is_usable = _peak(peaks, places, seq, num_parts, vocab_size, PARTS)
    if is_usable & (tl.load(floats + _INV_TEMPERATURE) > 0):
        index = tl.arange(0, PARTS * CANDIDATES)
        inside = index < num_parts * CANDIDATES
        listed = seq * num_parts * CANDIDATES + index
        candidate = tl.load(candidates + listed, mask=inside, other=-1)
        weight = tl.load(weights + listed, mask=inside, other=_NO_BOUND)
        is_last = index % CANDIDATES == CANDIDATES - 1
        out = seq * CANDIDATES
        bound = tl.zeros([], tl.int32) - 1
        for i in range(_depth(tl.load(floats + _TOP_P), CANDIDATES)):
            best = tl.max(tl.where(weight > bound, candidate, -1), 0)
            own = tl.max(tl.where((candidate == best) & (candidate >= 0), weight, -1), 0)
            # Of a list whose last one is no heavier, nothing heavier is known.
            is_known = (tl.max((is_last & (weight <= bound)).to(tl.int32), 0) == 0) & (best >= 0)
            bound = tl.where(is_known, own, _NO_BOUND)
            tl.store(finalists + out + i, tl.where(is_known, token_of(best), -1))
            tl.store(bounds + out + i, bound)


@triton.jit(do_not_specialize_on_alignment=["words"])
def _weigh_above(
    edited,
    words,
    peaks,
    places,
    least_keys,
    bounds,
    above,
    vocab_size,
    edited_stride,
    words_stride,
    MIN_P: tl.constexpr,
    TOP_K: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row, part): what the part's tokens weigh that are heavier than each candidate of the row."""
    seq, part, num_parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    floats = (words + seq * words_stride).to(tl.pointer_type(tl.float32))
    inverse = tl.load(floats + _INV_TEMPERATURE)
    peak, _first, is_usable = _peak(peaks, places, seq, num_parts, vocab_size, PARTS)
    top_p = tl.load(floats + _TOP_P)
    if is_usable & (inverse > 0) & (top_p < 1):
        at = part * BLOCK + tl.arange(0, BLOCK)
        line = edited + seq * edited_stride
        weight = _weights(line, floats, least_keys + seq, at, vocab_size, peak, inverse, MIN_P, TOP_K)
        weight_bits = weight.to(tl.int32, bitcast=True)
        share = (weight * ONE).to(tl.int64)
        for i in range(_depth(top_p, CANDIDATES)):
            bound = tl.load(bounds + seq * CANDIDATES + i)
            heavier = tl.sum(tl.where(weight_bits > bound, share, 0), 0)
            tl.store(above + (seq * CANDIDATES + i) * num_parts + part, heavier)


@triton.jit(do_not_specialize_on_alignment=["words", "tokens"])
def _choose(
    edited,
    words,
    hashes,
    peaks,
    places,
    least_keys,
    finalists,
    bounds,
    totals,
    above,
    counts,
    tokens,
    vocab_size,
    edited_stride,
    words_stride,
    num_parts,
    RANDOM: tl.constexpr,
    MIN_P: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_P: tl.constexpr,
    COUNTS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (row): the token, from what is known of the parts; only if that is not enough, from all tokens."""
    seq = tl.program_id(0).to(tl.int64)
    ints = words + seq * words_stride
    floats = ints.to(tl.pointer_type(tl.float32))
    peak, token, is_usable = _peak(peaks, places, seq, num_parts, vocab_size, PARTS)
    if RANDOM:
        inverse = tl.load(floats + _INV_TEMPERATURE)
        if is_usable & (inverse > 0):
            token = tl.load(finalists + seq * CANDIDATES)
            if TOP_P:
                share = tl.load(floats + _TOP_P)
                if share < 1:
                    parts = tl.arange(0, PARTS)
                    of_parts = tl.load(totals + seq * num_parts + parts, mask=parts < num_parts, other=0)
                    whole = tl.sum(of_parts, 0).to(tl.float64)
                    needed = tl.maximum(tl.ceil(share.to(tl.float64) * whole).to(tl.int64), 1)
                    bound = tl.zeros([], tl.int32) - 1  # bits of a weight: tokens that weigh no more are out
                    is_kept = 0
                    i = 0
                    while (is_kept == 0) & (i < _depth(share, CANDIDATES)):
                        finalist = tl.load(finalists + seq * CANDIDATES + i)
                        if finalist < 0:
                            i = CANDIDATES
                        else:
                            line = above + (seq * CANDIDATES + i) * num_parts
                            heavier = tl.sum(tl.load(line + parts, mask=parts < num_parts, other=0), 0)
                            bound = tl.load(bounds + seq * CANDIDATES + i)
                            token = finalist
                            is_kept = (heavier < needed).to(tl.int32)
                            i += 1
                    if is_kept == 0:
                        least_key = 0
                        if TOP_K:
                            least_key = tl.load(least_keys + seq)
                        token = draw_again(
                            edited + seq * edited_stride,
                            hashes,
                            tl.load(ints + _KEY).to(tl.uint32, bitcast=True),
                            tl.load(ints + _KEY + 1).to(tl.uint32, bitcast=True),
                            vocab_size,
                            peak,
                            inverse,
                            tl.load(floats + _MIN_P),
                            least_key,
                            bound,
                            needed,
                            MIN_P,
                            TOP_K,
                            BLOCK,
                        )

    tl.store(tokens + seq, tl.where(is_usable, token, -1))
    if COUNTS:
        if is_usable:
            row = tl.load(ints + _ROW).to(tl.int64)
            tl.atomic_add(counts + row * vocab_size + token, 1)
