"""Paged attention in Triton: one kernel for decode, prefill and mixed steps, and one that combines splits.

A program computes one tile: queries of one sequence, with all query heads that share a KV head as further rows, so
that a key is loaded once for its group. Decodes have one query per sequence; to fill the device, their keys are split
over several programs, each of which leaves a partial output and its log-sum-exp for `_combine_splits`. Splits divide
the KV length that a sequence has, not the capacity, so that a captured graph, whose grid is fixed, stays balanced.

Scores, softmax and sums are float32; weights are rounded to the values' dtype before they meet the values. Logarithms
are to base 2. Keys and values that no query may see are never loaded.
"""
# ruff: noqa: N803  # constants of a kernel are upper case

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from executors.attention import Attend, AttentionRule
from executors.kv_cache import KvCache
from executors.step_view import StepView

MAX_SPLITS = 64
MIN_SPLIT = 64  # keys
SMALL_SPLITS = 8  # `_combine_splits` is compiled for so many and for the most
SHARED_MEMORY = 96 * 1024  # bytes a program may take for its tiles, so that two fit a multiprocessor


@dataclass(frozen=True)
class TritonAttention:
    """The backend.

    target_programs  programs that a launch should have at least; decodes are split to reach it
    """

    target_programs: int

    def begin(self, view: StepView, kv: KvCache) -> Attend:
        decodes = view.leading_decodes
        workspaces: dict[tuple[int, ...], _Workspace] = {}

        def attend(
            queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: AttentionRule
        ) -> torch.Tensor:
            output = queries.new_empty((view.num_tokens, queries.shape[1], values.shape[-1]))
            layer = _Layer(queries, keys, values, output, rule, view)
            if decodes:
                splits = self._splits(decodes * keys.shape[2], view.max_seq_len)
                shape = (decodes, queries.shape[1], splits, values.shape[-1])
                if splits > 1 and shape not in workspaces:
                    workspaces[shape] = _Workspace.empty(shape, queries.device)
                _attend_decodes(layer, decodes, splits, workspaces.get(shape))
            if decodes < view.num_seqs:
                _attend_prefills(layer, decodes)
            return output

        return attend

    def _splits(self, programs: int, max_seq_len: int) -> int:
        """A power of two; known on the host, so bounded by what lengths may be and not by what they are."""
        wanted = max(1, self.target_programs // programs)
        useful = -(-max_seq_len // MIN_SPLIT)
        return min(MAX_SPLITS, 1 << (min(wanted, useful).bit_length() - 1))


class _Workspace(NamedTuple):
    """Partial outputs float32 [sequences, query_heads, splits, value_dim] and their log-sum-exp without the last."""

    outputs: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def empty(cls, shape: tuple[int, ...], device: torch.device) -> _Workspace:
        """Shared by the layers of a step: they run one after the other."""
        return cls(
            torch.empty(shape, dtype=torch.float32, device=device),
            torch.empty(shape[:-1], dtype=torch.float32, device=device),
        )


class _Layer(NamedTuple):
    """One call of the backend."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    output: torch.Tensor
    rule: AttentionRule
    view: StepView

    @property
    def kv_heads(self) -> int:
        return self.keys.shape[2]

    @property
    def group(self) -> int:
        return self.queries.shape[1] // self.kv_heads


class _Tile(NamedTuple):
    """Rows (queries times heads of a group) and keys of a tile, and how a program is compiled."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, layer: _Layer, rows: int) -> _Tile:
        """The most keys, up to 64, and then stages, up to 3, whose tiles fit shared memory beside the queries."""
        key_dim, value_dim = _padded(layer.keys.shape[-1]), _padded(layer.values.shape[-1])
        item = layer.keys.element_size()
        left = SHARED_MEMORY - rows * key_dim * item
        keys = 64
        while keys > 16 and 2 * keys * (key_dim + value_dim) * item > left:
            keys //= 2
        stages = max(1, min(3, left // (keys * (key_dim + value_dim) * item)))
        return cls(rows, keys, num_warps=8 if rows >= 128 else 4, num_stages=stages)


def _attend_decodes(layer: _Layer, count: int, splits: int, workspace: _Workspace | None) -> None:
    """Sequences 0..count-1, whose token i is sequence i."""
    tile = _Tile.of(layer, max(16, triton.next_power_of_2(layer.group)))
    grid = (count, layer.kv_heads, splits)
    _launch(layer, tile, grid, first_seq=0, queries_per_tile=1, is_decode=True, splits=splits, workspace=workspace)
    if workspace is None:
        return
    output, sinks = layer.output, layer.rule.sinks
    _combine_splits[(count, output.shape[1])](
        workspace.outputs,
        workspace.lse,
        output if sinks is None else sinks,
        output,
        output.stride(0),
        output.stride(1),
        splits,
        VALUE_DIM=output.shape[-1],
        BLOCK_V=_padded(output.shape[-1]),
        BLOCK_SPLITS=SMALL_SPLITS if splits <= SMALL_SPLITS else MAX_SPLITS,
        HAS_SINKS=sinks is not None,
        num_warps=4,
    )


def _attend_prefills(layer: _Layer, first_seq: int) -> None:
    """Sequences first_seq.., of any number of queries each."""
    view = layer.view
    tile = _Tile.of(layer, max(_prefill_rows(layer), triton.next_power_of_2(layer.group)))
    queries_per_tile = tile.rows // layer.group
    # Every sequence has at most one tile that isn't full.
    tiles = (view.num_tokens - first_seq) // queries_per_tile + view.num_seqs - first_seq
    grid = (tiles, layer.kv_heads, 1)
    _launch(layer, tile, grid, first_seq=first_seq, queries_per_tile=queries_per_tile, is_decode=False)


def _prefill_rows(layer: _Layer) -> int:
    """As many as registers hold: float32 has no tensor cores, and wide heads need wide sums."""
    if layer.queries.dtype == torch.float32:
        return 16
    dim = max(layer.keys.shape[-1], layer.values.shape[-1])
    return 128 if dim <= 128 else 64 if dim <= 256 else 32


def _launch(
    layer: _Layer,
    tile: _Tile,
    grid: tuple[int, int, int],
    *,
    first_seq: int,
    queries_per_tile: int,
    is_decode: bool,
    splits: int = 1,
    workspace: _Workspace | None = None,
) -> None:
    queries, keys, values, output, rule, view = layer
    queries = queries if queries.stride(-1) == 1 else queries.contiguous()
    _attend_tile[grid](
        queries,
        keys,
        values,
        output if rule.sinks is None else rule.sinks,
        output,
        output if workspace is None else workspace.outputs,
        output if workspace is None else workspace.lse,
        view.query_start,
        view.seq_lens,
        view.rows,
        view.table,
        rule.scale,
        first_seq,
        view.num_seqs,
        splits,
        queries.stride(0),
        queries.stride(1),
        keys.stride(0),
        keys.stride(1),
        keys.stride(2),
        values.stride(0),
        values.stride(1),
        values.stride(2),
        output.stride(0),
        output.stride(1),
        view.table.stride(0),
        KEY_DIM=keys.shape[-1],
        VALUE_DIM=values.shape[-1],
        GROUP=layer.group,
        PAGE=keys.shape[1],
        WINDOW=rule.window or 0,
        SOFTCAP=rule.softcap or 0.0,
        HAS_SINKS=rule.sinks is not None,
        IS_DECODE=is_decode,
        IS_SPLIT=workspace is not None,
        QUERIES=queries_per_tile,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.keys,
        BLOCK_K=_padded(keys.shape[-1]),
        BLOCK_V=_padded(values.shape[-1]),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _padded(dim: int) -> int:
    """Width of a tile for a head dimension: matrix products want a power of two of at least 16."""
    return max(16, triton.next_power_of_2(dim))


LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(
    do_not_specialize=["first_seq", "num_seqs", "splits"],
    do_not_specialize_on_alignment=["query_start", "seq_lens", "rows", "table"],
)
def _attend_tile(
    queries,
    keys,
    values,
    sinks,
    output,
    partial,
    partial_lse,
    query_start,
    seq_lens,
    rows,
    table,
    scale,
    first_seq,
    num_seqs,
    splits,
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
    IS_DECODE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Program (tile, kv_head, split). A tile is QUERIES queries of one sequence; row r is query r // GROUP.

    Decodes: tile i is sequence i. Otherwise sequences from `first_seq` on have the tiles that `_first_tile` says.
    """
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if IS_DECODE:
        seq = tile
        first_query = 0
    else:
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

    # Keys of the tile, then of this split.
    begin = 0
    end = tl.minimum(first_position + QUERIES, seq_len)
    if WINDOW > 0:
        begin = tl.maximum(first_position - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    if IS_SPLIT:
        share = tl.cdiv(tl.cdiv(end - begin, splits), BLOCK_N) * BLOCK_N
        begin += split * share
        end = tl.minimum(end, begin + share)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)  # running maximum of the scores
    total = tl.zeros([BLOCK_M], tl.float32)  # sum of the weights, as multiples of 2 ** top
    if HAS_SINKS and not IS_SPLIT:
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
    if IS_SPLIT:
        part = (token * (tl.num_programs(1) * GROUP) + head) * splits + split
        tl.store(partial_lse + part, top + tl.log2(total), mask=is_row)
        tl.store(partial + part[:, None] * VALUE_DIM + value_dim[None, :], result, mask=is_element)
    else:
        tl.store(
            output + token[:, None] * stride_output_token + head[:, None] * stride_output_head + value_dim[None, :],
            result.to(output.dtype.element_ty),
            mask=is_element,
        )


@triton.jit(do_not_specialize=["splits"])
def _combine_splits(
    partial,
    partial_lse,
    sinks,
    output,
    stride_output_token,
    stride_output_head,
    splits,
    VALUE_DIM: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Program (token, head): the mean of the splits' outputs, weighted by what their keys weigh."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split = tl.arange(0, BLOCK_SPLITS)
    value_dim = tl.arange(0, BLOCK_V)
    part = (token * tl.num_programs(1) + head) * splits + split
    lse = tl.load(partial_lse + part, mask=split < splits, other=float("-inf"))
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
        mask=(split < splits)[:, None] & (value_dim < VALUE_DIM)[None, :],
        other=0.0,
    )
    result = tl.sum(outputs * weights[:, None], 0) / total
    tl.store(
        output + token * stride_output_token + head * stride_output_head + value_dim,
        result.to(output.dtype.element_ty),
        mask=value_dim < VALUE_DIM,
    )


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
