"""The Triton kernels of rows that prefill: queries of one sequence in tiles, and the KV that they add.

A program takes one tile: queries of one sequence, with all query heads that share a KV head as further rows, so that a
key is loaded once for its group. Where tiles lie and which sequences have any is read on the device, so that the grid
may be for a capacity. What a query gets depends on its sequence alone, not on how it was cut into tiles and steps.

Scores, softmax and sums are float32; weights are rounded to the values' dtype before they meet the values. Keys that no
query may see are never loaded.
"""
# ruff: noqa: N803  # constants of a kernel are upper case

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize_on_alignment=["counts", "query_start", "seq_lens", "rows", "table"])
def attend_tiles(
    queries,
    keys,
    values,
    sinks,
    output,
    counts,
    query_start,
    seq_lens,
    rows,
    table,
    scale,
    stride_query_token,
    stride_query_head,
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
    QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (tile, kv_head). A tile is QUERIES queries of one sequence; row r is query r // GROUP.

    Sequences counts[0]..counts[1]-1 have the tiles that `_first_tile` says.
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    first_seq = tl.load(counts)
    num_seqs = tl.load(counts + 1)
    if first_seq >= num_seqs:
        return
    seq = _sequence_of(query_start, tile, first_seq, num_seqs, QUERIES)
    first_query = (tile - _first_tile(query_start, seq, first_seq, QUERIES)) * QUERIES
    first_token = tl.load(query_start + seq)
    num_queries = tl.load(query_start + seq + 1) - first_token
    if first_query >= num_queries:
        return
    seq_len = tl.load(seq_lens + seq)
    table_row = table + tl.load(rows + seq).to(tl.int64) * stride_table_row
    first_position = seq_len - num_queries + first_query

    row = tl.arange(0, BLOCK_M)
    query = row // GROUP
    head = kv_head * GROUP + row % GROUP
    is_row = (query < QUERIES) & (first_query + query < num_queries)
    position = first_position + query
    token = (first_token + first_query + query).to(tl.int64)
    key_dim = tl.arange(0, BLOCK_K)
    value_dim = tl.arange(0, BLOCK_V)
    tile_queries = tl.load(
        queries + token[:, None] * stride_query_token + head[:, None] * stride_query_head + key_dim[None, :],
        mask=is_row[:, None] & (key_dim < KEY_DIM)[None, :],
        other=0.0,
    )

    begin = 0
    end = tl.minimum(first_position + QUERIES, seq_len)
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)  # running maximum of the scores
    total = tl.zeros([BLOCK_M], tl.float32)  # sum of the weights, as multiples of 2 ** top
    if HAS_SINKS:
        top = tl.load(sinks + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    result = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for offset in range(begin, end, BLOCK_N):
        key = offset + tl.arange(0, BLOCK_N)
        is_key = key < end
        if WINDOW > 0:
            is_key = is_key & (key > first_position - WINDOW)
        block = tl.load(table_row + key // PAGE, mask=is_key, other=0).to(tl.int64)
        tile_keys = tl.load(
            keys
            + (block * stride_key_block + (key % PAGE) * stride_key_token + kv_head * stride_key_head)[None, :]
            + key_dim[:, None],
            mask=is_key[None, :] & (key_dim < KEY_DIM)[:, None],
            other=0.0,
        )
        scores = tl.dot(tile_queries, tile_keys, input_precision="ieee") * scale
        if SOFTCAP > 0:
            scores = SOFTCAP * (2 * tl.sigmoid(2 * scores / SOFTCAP) - 1)  # tanh
        is_seen = is_key[None, :] & (key[None, :] <= position[:, None])
        if WINDOW > 0:
            is_seen = is_seen & (key[None, :] > position[:, None] - WINDOW)
        scores = tl.where(is_seen, scores * LOG2_E, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)  # a row may have seen no key yet
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(top - shift)
        tile_values = tl.load(
            values
            + (block * stride_value_block + (key % PAGE) * stride_value_token + kv_head * stride_value_head)[:, None]
            + value_dim[None, :],
            mask=is_key[:, None] & (value_dim < VALUE_DIM)[None, :],
            other=0.0,
        )
        result = result * rescale[:, None]
        result = tl.dot(weights.to(tile_values.dtype), tile_values, result, input_precision="ieee")
        total = total * rescale + tl.sum(weights, 1)
        top = new_top

    total = tl.where(total == 0.0, 1.0, total)  # a row that saw no key; `top` says so
    result = result / total[:, None]
    is_element = is_row[:, None] & (value_dim < VALUE_DIM)[None, :]
    tl.store(
        output + token[:, None] * stride_output_token + head[:, None] * stride_output_head + value_dim[None, :],
        result.to(output.dtype.element_ty),
        mask=is_element,
    )


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["counts", "kv_positions"])
def write_kv(
    new_keys,
    new_values,
    keys,
    values,
    counts,
    kv_positions,
    num_tokens,
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
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (tile, kv_head): stores TOKENS tokens, of those after the counts[0] decodes, who store their own."""
    head = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    is_token = (token >= tl.load(counts)) & (token < num_tokens)
    position = tl.load(kv_positions + token, mask=is_token, other=0)
    block = (position // PAGE).to(tl.int64)
    inside = position % PAGE
    token = token.to(tl.int64)
    dim = tl.arange(0, BLOCK_K)
    mask = is_token[:, None] & (dim < KEY_DIM)[None, :]
    new = tl.load(
        new_keys + (token * stride_new_key_token + head * stride_new_key_head)[:, None] + dim[None, :], mask=mask
    )
    at = keys + (block * stride_key_block + inside * stride_key_token + head * stride_key_head)[:, None]
    tl.store(at + dim[None, :], new.to(keys.dtype.element_ty), mask=mask)
    dim = tl.arange(0, BLOCK_V)
    mask = is_token[:, None] & (dim < VALUE_DIM)[None, :]
    new = tl.load(
        new_values + (token * stride_new_value_token + head * stride_new_value_head)[:, None] + dim[None, :], mask=mask
    )
    at = values + (block * stride_value_block + inside * stride_value_token + head * stride_value_head)[:, None]
    tl.store(at + dim[None, :], new.to(values.dtype.element_ty), mask=mask)


@triton.jit
def _first_tile(query_start, seq, first_seq, QUERIES: tl.constexpr):
    """Tiles before those of the sequence, from `first_seq` on: the last tile of each may be partly or wholly unused."""
    return (tl.load(query_start + seq) - first_seq) // QUERIES + seq - first_seq


@triton.jit
def _sequence_of(query_start, tile, first_seq, num_seqs, QUERIES: tl.constexpr):
    """The last sequence whose first tile isn't after this one."""
    low = first_seq
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        is_before = _first_tile(query_start, middle, first_seq, QUERIES) <= tile
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    return low
