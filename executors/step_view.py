"""What one forward pass reads, as the model sees it: a ragged batch of query tokens over a paged KV cache.

Sequences follow one another in the flat arrays; sequence i owns tokens `query_start[i]` to `query_start[i + 1]`, which
are the last ones of its `seq_lens[i]` tokens. Tensors are on the device, whole numbers are known on the host, so that
nothing that reads a view has to wait for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepView:
    """T tokens of S sequences, arrays sliced to T and S, all int32; `token_ids` and `positions` may be int64 as well.
    KV lengths include the step's own tokens.

    token_ids      [T]
    positions      [T]
    kv_positions   [T]    block * block_size + offset that the token's KV is written to
    query_start    [S+1]
    seq_lens       [S]    KV length after the step
    rows           [S]    row of `table` each sequence has
    table          [rows, max_blocks]
    logits_at      [num_samples]  tokens whose logits are wanted
    counts         [2]    sequences at the front that are decodes, as the device is to see it, and all sequences
    max_query_len  no sequence has more query tokens
    max_seq_len    no sequence has a greater KV length; a captured graph gives the capacity
    is_decode      every sequence has exactly one query token: token i is sequence i
    num_decodes    so many sequences at the front are known to have exactly one query token, or may have
    samples_all    logits of every token are wanted, in order: `logits_at` says no more
    is_padded      the whole numbers are capacities of a captured graph, which only `counts` and the lengths fill
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    kv_positions: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    rows: torch.Tensor
    table: torch.Tensor
    logits_at: torch.Tensor
    counts: torch.Tensor
    num_tokens: int
    num_seqs: int
    max_query_len: int
    max_seq_len: int
    is_decode: bool
    num_decodes: int = 0
    is_padded: bool = False
    samples_all: bool = False

    @property
    def leading_decodes(self) -> int:
        """Sequences at the front whose token i is sequence i."""
        return self.num_seqs if self.is_decode else self.num_decodes


class Chunk(NamedTuple):
    """Consecutive tokens of one sequence, the first at position `start`, with the blocks its KV is in so far."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]


def view_of(chunks: Sequence[Chunk], *, block_size: int, device: torch.device, all_logits: bool = False) -> StepView:
    """A view of these chunks, for callers without an engine. Logits are of each chunk's last token, or of all tokens.

    Chunks of one token come first, or count as prefill.
    """
    lengths = [len(chunk.tokens) for chunk in chunks]
    starts = [sum(lengths[:i]) for i in range(len(chunks) + 1)]
    ends = [chunk.start + length for chunk, length in zip(chunks, lengths, strict=True)]
    positions = [range(chunk.start, end) for chunk, end in zip(chunks, ends, strict=True)]
    kv_positions = [
        chunk.blocks[p // block_size] * block_size + p % block_size
        for chunk, of_chunk in zip(chunks, positions, strict=True)
        for p in of_chunk
    ]
    width = max(len(chunk.blocks) for chunk in chunks)
    table = [list(chunk.blocks) + [0] * (width - len(chunk.blocks)) for chunk in chunks]
    decodes = next((i for i, length in enumerate(lengths) if length != 1), len(lengths))

    def tensor(values: Sequence[object]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    return StepView(
        token_ids=tensor([token for chunk in chunks for token in chunk.tokens]),
        positions=tensor([p for of_chunk in positions for p in of_chunk]),
        kv_positions=tensor(kv_positions),
        query_start=tensor(starts),
        seq_lens=tensor(ends),
        rows=tensor(range(len(chunks))),
        table=tensor(table),
        logits_at=tensor(range(starts[-1])) if all_logits else tensor([stop - 1 for stop in starts[1:]]),
        counts=tensor([decodes, len(chunks)]),
        num_tokens=starts[-1],
        num_seqs=len(chunks),
        max_query_len=max(lengths),
        max_seq_len=max(ends),
        is_decode=decodes == len(chunks),
        num_decodes=decodes,
    )
