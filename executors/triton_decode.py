"""The Triton kernels of decode rows: one query per sequence, whose key and value are new in this step.

A program takes the query heads that share a KV head, and a part of the sequence's keys; `combine_splits` adds the parts
up. The new key and value never make the way through memory: the program whose part ends with them weighs them from
where the model left them, and stores them in the cache for the steps to come, so no kernel has to write first.

Scores, softmax and sums are float32; logarithms are to base 2. Keys that the query may not see are never loaded.
"""
# ruff: noqa: N803, RET505  # constants of a kernel are upper case, and its branches need an else

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["counts", "seq_lens", "rows", "table"])
def attend_decodes(
    queries,
    new_keys,
    new_values,
    keys,
    values,
    sinks,
    output,
    partial,
    partial_lse,
    counts,
    seq_lens,
    rows,
    table,
    scale,
    splits,
    stride_query_token,
    stride_query_head,
    stride_new_key_token,
    stride_new_key_head,
    stride_new_value_token,
    stride_new_value_head,
    stride_key_block,
    stride_key_token,
    stride_key_head,
    stride_value_block,
    stride_value_token,
    stride_value_head,
    stride_output_token,
    stride_output_head,
    stride_table_row,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (kv_head, split, seq). Token `seq` is the query of sequence `seq`, for as many as `counts` says."""
    kv_head, split, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if seq >= tl.load(counts):
        return
    seq_len = tl.load(seq_lens + seq)
    table_row = table + tl.load(rows + seq).to(tl.int64) * stride_table_row
    token = seq.to(tl.int64)
    row = tl.arange(0, BLOCK_M)
    head = kv_head * GROUP + row
    is_row = row < GROUP
    key_dim = tl.arange(0, BLOCK_K)
    value_dim = tl.arange(0, BLOCK_V)
    tile_queries = tl.load(
        queries + token * stride_query_token + head[:, None] * stride_query_head + key_dim[None, :],
        mask=is_row[:, None] & (key_dim < KEY_DIM)[None, :],
        other=0.0,
    )

    begin = _first_key(seq_len, WINDOW, BLOCK_N)
    end = seq_len
    if IS_SPLIT:
        share = _share(seq_len - begin, splits, BLOCK_N)
        begin += split * share
        end = tl.minimum(seq_len, begin + share)
        if begin >= seq_len:
            return

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)  # running maximum of the scores
    total = tl.zeros([BLOCK_M], tl.float32)  # sum of the weights, as multiples of 2 ** top
    if HAS_SINKS and not IS_SPLIT:
        top = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    result = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    last = seq_len - 1
    stop = tl.minimum(end, last)
    for offset in range(begin, stop, BLOCK_N):
        key = offset + tl.arange(0, BLOCK_N)
        is_key = key < stop
        if WINDOW > 0:
            is_key = is_key & (key > last - WINDOW)
        block = tl.load(table_row + key // PAGE, mask=is_key, other=0).to(tl.int64)
        tile_keys = tl.load(
            keys
            + (block * stride_key_block + (key % PAGE) * stride_key_token + kv_head * stride_key_head)[None, :]
            + key_dim[:, None],
            mask=is_key[None, :] & (key_dim < KEY_DIM)[:, None],
            other=0.0,
        )
        tile_values = tl.load(
            values
            + (block * stride_value_block + (key % PAGE) * stride_value_token + kv_head * stride_value_head)[:, None]
            + value_dim[None, :],
            mask=is_key[:, None] & (value_dim < VALUE_DIM)[None, :],
            other=0.0,
        )
        scores = _capped(tl.dot(tile_queries, tile_keys, input_precision="ieee") * scale, SOFTCAP)
        scores = tl.where(is_key[None, :], scores * LOG2_E, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row may have seen no key yet
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(top - shift)
        result = result * rescale[:, None]
        result = tl.dot(weights.to(tile_values.dtype), tile_values, result, input_precision="ieee")
        total = total * rescale + tl.sum(weights, 1)
        top = new_top

    if end == seq_len:
        block = tl.load(table_row + last // PAGE).to(tl.int64)
        new_key = tl.load(
            new_keys + token * stride_new_key_token + kv_head * stride_new_key_head + key_dim,
            mask=key_dim < KEY_DIM,
            other=0.0,
        ).to(keys.dtype.element_ty)
        new_value = tl.load(
            new_values + token * stride_new_value_token + kv_head * stride_new_value_head + value_dim,
            mask=value_dim < VALUE_DIM,
            other=0.0,
        ).to(values.dtype.element_ty)
        at = keys + block * stride_key_block + (last % PAGE) * stride_key_token + kv_head * stride_key_head
        tl.store(at + key_dim, new_key, mask=key_dim < KEY_DIM)
        at = values + block * stride_value_block + (last % PAGE) * stride_value_token + kv_head * stride_value_head
        tl.store(at + value_dim, new_value, mask=value_dim < VALUE_DIM)
        score = tl.sum(tile_queries.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale
        score = _capped(score, SOFTCAP) * LOG2_E
        new_top = tl.maximum(top, score)
        weight = tl.exp2(score - new_top)
        rescale = tl.exp2(top - new_top)
        result = result * rescale[:, None] + weight[:, None] * new_value.to(tl.float32)[None, :]
        total = total * rescale + weight
        top = new_top

    result = result / total[:, None]
    is_element = is_row[:, None] & (value_dim < VALUE_DIM)[None, :]
    if IS_SPLIT:
        part = (token * (tl.num_programs(0) * GROUP) + head) * splits + split
        tl.store(partial_lse + part, top + tl.log2(total), mask=is_row)
        tl.store(partial + part[:, None] * VALUE_DIM + value_dim[None, :], result, mask=is_element)
    else:
        tl.store(
            output + token * stride_output_token + head[:, None] * stride_output_head + value_dim[None, :],
            result.to(output.dtype.element_ty),
            mask=is_element,
        )


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["counts", "seq_lens"])
def combine_splits(
    partial,
    partial_lse,
    sinks,
    output,
    counts,
    seq_lens,
    stride_output_token,
    stride_output_head,
    splits,
    VALUE_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Program (token, head): the mean of the outputs of the splits that had keys, weighted by what their keys weigh."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if token >= tl.load(counts):
        return
    seq_len = tl.load(seq_lens + token)
    num_keys = seq_len - _first_key(seq_len, WINDOW, BLOCK_N)
    split = tl.arange(0, BLOCK_SPLITS)
    is_split = split < tl.cdiv(num_keys, _share(num_keys, splits, BLOCK_N))
    value_dim = tl.arange(0, BLOCK_V)
    part = (token * tl.num_programs(1) + head) * splits + split
    lse = tl.load(partial_lse + part, mask=is_split, other=float("-inf"))
    top = tl.max(lse, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
    weights = tl.exp2(lse - top)
    total = tl.sum(weights, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - top)
    outputs = tl.load(
        partial + part[:, None] * VALUE_DIM + value_dim[None, :],
        mask=is_split[:, None] & (value_dim < VALUE_DIM)[None, :],
        other=0.0,
    )
    result = tl.sum(outputs * weights[:, None], 0) / total
    tl.store(
        output + token * stride_output_token + head * stride_output_head + value_dim,
        result.to(output.dtype.element_ty),
        mask=value_dim < VALUE_DIM,
    )


@triton.jit
def _first_key(seq_len, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where the first tile of keys begins that the last token of a sequence sees."""
    if WINDOW > 0:
        return tl.maximum(seq_len - WINDOW, 0) // BLOCK_N * BLOCK_N
    else:
        return seq_len * 0


@triton.jit
def _share(num_keys, splits, BLOCK_N: tl.constexpr):
    """Keys of a split: whole tiles. What the sequence has is divided, not what it may have: a graph's grid is fixed."""
    return tl.cdiv(tl.cdiv(num_keys, splits), BLOCK_N) * BLOCK_N


@triton.jit
def _capped(scores, SOFTCAP: tl.constexpr):
    if SOFTCAP > 0:
        return SOFTCAP * (2 * tl.sigmoid(2 * scores / SOFTCAP) - 1)  # tanh
    else:
        return scores
