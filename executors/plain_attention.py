"""Paged attention in plain torch, softmax in float32: serves the CPU, and is the reference for every other backend.

It gathers a sequence's keys and values through its block table, so it moves more memory than a kernel would. A value
that no query of its sequence may see is replaced before it is used, not only weighted with zero: it may be NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from executors.attention import Attend, AttentionRule
from executors.kv_cache import KvCache
from executors.step_view import StepView

QUERY_SLICE = 256  # queries of one sequence whose scores are in memory at a time


@dataclass(frozen=True)
class PlainAttention:
    """The backend. Nothing is kept between steps.

    reads_lengths  the host may read the lengths of sequences, as on a CPU, where that doesn't make it wait. Otherwise
                   each prefill is computed as if it were the step's longest, and what is too much is dropped.
    """

    reads_lengths: bool
    captures_mixed = False

    def begin(self, view: StepView, kv: KvCache) -> Attend:
        kv_positions = view.kv_positions.long()
        decodes = _decodes(view, kv.block_size)
        prefills = _prefills(view, kv.block_size, self.reads_lengths)

        def attend(
            queries: torch.Tensor,
            new_keys: torch.Tensor,
            new_values: torch.Tensor,
            keys: torch.Tensor,
            values: torch.Tensor,
            rule: AttentionRule,
        ) -> torch.Tensor:
            for cache, new in ((keys, new_keys), (values, new_values)):
                cache.flatten(0, 1).index_copy_(0, kv_positions, new.to(cache.dtype))
            output = queries.new_empty((view.num_tokens + 1, queries.shape[1], values.shape[-1]))
            if decodes is not None:
                output[: len(decodes.positions)] = _attend_decodes(decodes, queries, keys, values, rule)
            for prefill in prefills:
                _attend_prefill(output, prefill, queries, keys, values, rule)
            return output[: view.num_tokens]

        return attend


class _Decodes(NamedTuple):
    """The sequences at the front, with one query each: their blocks [S, n] and the positions of their queries [S]."""

    blocks: torch.Tensor
    positions: torch.Tensor


class _Prefill(NamedTuple):
    """One sequence. Where lengths are only bounded, queries past its last repeat that and go `into` the spare row.

    blocks     [n]
    tokens     [Q]  flat token positions of its queries
    into       [Q]  rows of the output
    positions  [Q]
    """

    blocks: torch.Tensor
    tokens: torch.Tensor
    into: torch.Tensor
    positions: torch.Tensor


def _decodes(view: StepView, block_size: int) -> _Decodes | None:
    count = view.leading_decodes
    if count == 0:
        return None
    blocks = view.table[view.rows[:count], : -(-view.max_seq_len // block_size)].long()
    return _Decodes(blocks, view.seq_lens[:count].long() - 1)


def _prefills(view: StepView, block_size: int, reads_lengths: bool) -> list[_Prefill]:
    """The sequences after the leading decodes."""
    sequences = range(view.leading_decodes, view.num_seqs)
    if reads_lengths:
        starts, ends = view.query_start.tolist(), view.seq_lens.tolist()
        bounds = [(starts[i + 1] - starts[i], ends[i]) for i in sequences]
    else:
        bounds = [(view.max_query_len, view.max_seq_len)] * len(sequences)
    return [_prefill(view, i, *bound, block_size) for i, bound in zip(sequences, bounds, strict=True)]


def _prefill(view: StepView, sequence: int, max_query_len: int, max_seq_len: int, block_size: int) -> _Prefill:
    one = slice(sequence, sequence + 1)  # a slice, since an index that is a tensor of no dimension is read by the host
    first, stop = view.query_start[one].long(), view.query_start[sequence + 1 : sequence + 2].long()
    tokens = first + torch.arange(max_query_len, device=first.device)
    into = torch.where(tokens < stop, tokens, view.num_tokens)
    tokens = torch.minimum(tokens, stop - 1)
    blocks = view.table[view.rows[one], : -(-max_seq_len // block_size)].long().squeeze(0)
    return _Prefill(blocks, tokens, into, view.seq_lens[one].long() - (stop - tokens))


def _attend_decodes(
    batch: _Decodes, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rule: AttentionRule
) -> torch.Tensor:
    num_seqs, kv_heads = len(batch.positions), keys.shape[2]
    grouped = queries[:num_seqs].unflatten(1, (kv_heads, -1)).float()  # [S, kv_heads, group, dim]
    past_keys = keys[batch.blocks].flatten(1, 2).permute(0, 2, 3, 1).float()  # [S, kv_heads, dim, L]
    past_values = values[batch.blocks].flatten(1, 2).transpose(1, 2).float()  # [S, kv_heads, L, dim]
    visible = _visible(batch.positions, past_keys.shape[-1], rule.window)[:, None, None]  # [S, 1, 1, L]
    scores = _scores(grouped, past_keys, visible, rule)
    sinks = None if rule.sinks is None else rule.sinks.view(kv_heads, -1, 1)
    output = _weights(scores, sinks) @ past_values.masked_fill(~visible.transpose(2, 3), 0)
    return output.flatten(1, 2).to(queries.dtype)


def _attend_prefill(
    output: torch.Tensor,
    prefill: _Prefill,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    rule: AttentionRule,
) -> None:
    """Fills the sequence's rows of `output`."""
    kv_heads = keys.shape[2]
    past_keys = keys[prefill.blocks].flatten(0, 1).permute(1, 2, 0).unsqueeze(1).float()  # [kv_heads, 1, dim, L]
    past_values = values[prefill.blocks].flatten(0, 1).transpose(0, 1).unsqueeze(1).float()  # [kv_heads, 1, L, dim]
    sinks = None if rule.sinks is None else rule.sinks.view(kv_heads, -1, 1, 1)
    parts = (tensor.split(QUERY_SLICE) for tensor in (prefill.tokens, prefill.into, prefill.positions))
    for tokens, into, positions in zip(*parts, strict=True):
        grouped = queries[tokens].unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3).float()  # [kv_heads, group, Q, dim]
        visible = _visible(positions, past_keys.shape[-1], rule.window)  # [Q, L]
        scores = _scores(grouped, past_keys, visible, rule)
        attended = _weights(scores, sinks) @ past_values.masked_fill(~visible.any(0)[:, None], 0)
        output[into] = attended.flatten(0, 1).transpose(0, 1).to(queries.dtype)


def _visible(positions: torch.Tensor, num_keys: int, window: int | None) -> torch.Tensor:
    """bool[Q, num_keys]: the keys that queries at these positions see."""
    keys = torch.arange(num_keys, device=positions.device)
    visible = keys <= positions[:, None]
    return visible if window is None else visible & (keys > positions[:, None] - window)


def _scores(queries: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    scores = queries @ keys * rule.scale
    if rule.softcap is not None:
        scores = torch.tanh(scores / rule.softcap) * rule.softcap
    return scores.masked_fill(~visible, -torch.inf)


def _weights(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax of scores [..., L] over the keys; a sink [..., 1] takes its share and is dropped."""
    if sinks is None:
        return scores.softmax(-1)
    return torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), -1).softmax(-1)[..., :-1]
