"""Paged attention in Triton: what the host decides about the kernels of decode rows and of rows that prefill.

Decodes have one query per sequence; to fill the device, their keys are split over several programs. Grids follow from
what the host knows, or from the capacity of a captured graph; how many sequences there are and how long they are is
read on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton

from executors.attention import Attend, AttentionRule
from executors.kv_cache import KvCache
from executors.step_view import StepView
from executors.triton_decode import attend_decodes, combine_splits
from executors.triton_prefill import attend_tiles, write_kv

MAX_SPLITS = 64
SMALL_SPLITS = 8  # `combine_splits` is compiled for so many and for the most
SHARED_MEMORY = 96 * 1024  # bytes a program may take for its tiles, so that two fit a multiprocessor
DECODE_KEYS = 32  # of a tile: more programs fit a multiprocessor than with 64, which short contexts need
WRITTEN_TOKENS = 16  # of a program that stores KV


@dataclass(frozen=True)
class TritonAttention:
    """The backend.

    target_programs  programs that a launch should have at least; decodes are split to reach it
    """

    target_programs: int
    captures_mixed = True

    def begin(self, view: StepView, kv: KvCache) -> Attend:
        decodes = view.leading_decodes
        workspaces: dict[tuple[int, ...], _Workspace] = {}

        def attend(
            queries: torch.Tensor,
            new_keys: torch.Tensor,
            new_values: torch.Tensor,
            keys: torch.Tensor,
            values: torch.Tensor,
            rule: AttentionRule,
        ) -> torch.Tensor:
            shape = (view.num_tokens, queries.shape[1], values.shape[-1])
            output = queries.new_zeros(shape) if view.is_padded else queries.new_empty(shape)
            layer = _Layer(_dense(queries), _dense(new_keys), _dense(new_values), keys, values, output, rule, view)
            if decodes:
                splits = self._splits(decodes * keys.shape[2], view.max_seq_len)
                parts = (decodes, queries.shape[1], splits, values.shape[-1])
                if splits > 1 and parts not in workspaces:
                    workspaces[parts] = _Workspace.empty(parts, queries.device)
                _attend_decodes(layer, decodes, splits, workspaces.get(parts))
            if decodes < view.num_seqs or view.is_padded:
                _write_kv(layer)
                _attend_prefills(layer, 0 if view.is_padded else decodes)
            return output

        return attend

    def _splits(self, programs: int, max_seq_len: int) -> int:
        """A power of two; known on the host, so bounded by what lengths may be and not by what they are."""
        wanted = max(1, self.target_programs // programs)
        useful = -(-max_seq_len // DECODE_KEYS)
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
    new_keys: torch.Tensor
    new_values: torch.Tensor
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
    def of(cls, layer: _Layer, rows: int, keys: int, max_stages: int) -> _Tile:
        """The most keys, up to `keys`, and then stages whose tiles fit shared memory beside the queries."""
        key_dim, value_dim = _padded(layer.keys.shape[-1]), _padded(layer.values.shape[-1])
        item = layer.keys.element_size()
        left = SHARED_MEMORY - rows * key_dim * item
        while keys > 16 and 2 * keys * (key_dim + value_dim) * item > left:
            keys //= 2
        stages = max(1, min(max_stages, left // (keys * (key_dim + value_dim) * item)))
        return cls(rows, keys, num_warps=8 if rows >= 128 else 4, num_stages=stages)


def _attend_decodes(layer: _Layer, count: int, splits: int, workspace: _Workspace | None) -> None:
    """Sequences 0..count-1, whose token i is sequence i, and which store their new KV."""
    queries, new_keys, new_values, keys, values, output, rule, view = layer
    rows = max(16, triton.next_power_of_2(layer.group))
    # Measured: two warps load a split's keys fastest, and one where whole sequences are enough to fill the device.
    warps = max(1, rows // 16) * (1 if workspace is None else 2)
    tile = _Tile.of(layer, rows, DECODE_KEYS, max_stages=2)._replace(num_warps=min(8, warps))
    sinks = output if rule.sinks is None else rule.sinks
    attend_decodes[layer.kv_heads, splits, count](
        queries,
        new_keys,
        new_values,
        keys,
        values,
        sinks,
        output,
        output if workspace is None else workspace.outputs,
        output if workspace is None else workspace.lse,
        view.counts,
        view.seq_lens,
        view.rows,
        view.table,
        rule.scale,
        splits,
        *queries.stride()[:2],
        *new_keys.stride()[:2],
        *new_values.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        *output.stride()[:2],
        view.table.stride(0),
        IS_SPLIT=workspace is not None,
        **_constants(layer, tile),
    )
    if workspace is None:
        return
    combine_splits[count, output.shape[1]](
        workspace.outputs,
        workspace.lse,
        sinks,
        output,
        view.counts,
        view.seq_lens,
        *output.stride()[:2],
        splits,
        VALUE_DIM=output.shape[-1],
        WINDOW=rule.window or 0,
        BLOCK_N=tile.keys,
        BLOCK_V=_padded(output.shape[-1]),
        BLOCK_SPLITS=SMALL_SPLITS if splits <= SMALL_SPLITS else MAX_SPLITS,
        HAS_SINKS=rule.sinks is not None,
        num_warps=1 if splits <= SMALL_SPLITS else 4,
    )


def _constants(layer: _Layer, tile: _Tile) -> dict[str, Any]:
    """What both attention kernels are compiled for."""
    keys, values, rule = layer.keys, layer.values, layer.rule
    return {
        "KEY_DIM": keys.shape[-1],
        "VALUE_DIM": values.shape[-1],
        "GROUP": layer.group,
        "PAGE": keys.shape[1],
        "WINDOW": rule.window or 0,
        "SOFTCAP": rule.softcap or 0.0,
        "HAS_SINKS": rule.sinks is not None,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.keys,
        "BLOCK_K": _padded(keys.shape[-1]),
        "BLOCK_V": _padded(values.shape[-1]),
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def _write_kv(layer: _Layer) -> None:
    """Stores the new KV of the tokens that no decode stores."""
    _, new_keys, new_values, keys, values, _, _, view = layer
    write_kv[triton.cdiv(view.num_tokens, WRITTEN_TOKENS), layer.kv_heads](
        new_keys,
        new_values,
        keys,
        values,
        view.counts,
        view.kv_positions,
        view.num_tokens,
        *new_keys.stride()[:2],
        *new_values.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        KEY_DIM=keys.shape[-1],
        VALUE_DIM=values.shape[-1],
        PAGE=keys.shape[1],
        TOKENS=WRITTEN_TOKENS,
        BLOCK_K=_padded(keys.shape[-1]),
        BLOCK_V=_padded(values.shape[-1]),
        num_warps=4,
    )


def _attend_prefills(layer: _Layer, fewest_decodes: int) -> None:
    """Sequences after the decodes, of which there are `fewest_decodes` or more; any number of queries each."""
    queries, _, _, keys, values, output, rule, view = layer
    tile = _Tile.of(layer, max(_prefill_rows(layer), triton.next_power_of_2(layer.group)), 64, max_stages=3)
    queries_per_tile = tile.rows // layer.group
    # Every sequence has at most one tile that isn't full.
    tiles = (view.num_tokens - fewest_decodes) // queries_per_tile + view.num_seqs - fewest_decodes
    attend_tiles[tiles, layer.kv_heads](
        queries,
        keys,
        values,
        output if rule.sinks is None else rule.sinks,
        output,
        view.counts,
        view.query_start,
        view.seq_lens,
        view.rows,
        view.table,
        rule.scale,
        *queries.stride()[:2],
        *keys.stride()[:3],
        *values.stride()[:3],
        *output.stride()[:2],
        view.table.stride(0),
        QUERIES=queries_per_tile,
        **_constants(layer, tile),
    )


def _prefill_rows(layer: _Layer) -> int:
    """As many as registers hold: float32 has no tensor cores, and wide heads need wide sums."""
    if layer.queries.dtype == torch.float32:
        return 16
    dim = max(layer.keys.shape[-1], layer.values.shape[-1])
    return 128 if dim <= 128 else 64 if dim <= 256 else 32


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The kernels take any strides but that of the last dimension."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _padded(dim: int) -> int:
    """Width of a tile for a head dimension: matrix products want a power of two of at least 16."""
    return max(16, triton.next_power_of_2(dim))
