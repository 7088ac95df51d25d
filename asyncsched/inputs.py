"""Host inputs of a step: the arrays an executor copies to the device, one set per slot, written in place.

A slot's copy of the block tables is updated by what changed since the slot was last filled, `depth` steps ago, not
since the last step. The arrays may lie in pinned memory: pass `buffer`. Filling a slot whose previous
step has not been collected overwrites what a copy may still read; the pipeline collects first.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from asyncsched.config import EngineConfig
from asyncsched.kv import NULL_BLOCK
from asyncsched.plan import NO_SOURCE, StepPlan
from asyncsched.rows import Rows

PLACEHOLDER = 0  # stands for the token that carry-over fills in

Int32s = NDArray[np.int32]
Allocate = Callable[[int], Int32s]


def plain_memory(count: int) -> Int32s:
    return np.zeros(count, dtype=np.int32)


class SlotInputs:
    """The arrays of one slot, int32, views of one buffer, so that one copy moves them.

    T is max_num_batched_tokens or the largest bucket, S is max_num_seqs or the largest bucket:

    token_ids     [T]    known tokens; PLACEHOLDER where carry-over will write
    positions     [T]
    kv_positions  [T]    block * block_size + offset that the token's KV is written to
    carry         [T]    the carry-over mask by flat token position: slot * max_num_seqs + index, or NO_SOURCE
    rows          [S]    row of each sequence, an index into `table`
    query_start   [S+1]  first token of each sequence
    seq_lens      [S]    KV length after the step
    logits_at     [S]    flat token position of each sampled row's last token
    table         [rows + 1, max_blocks_per_seq]  block tables by row; the last row is all null, for padding
    """

    def __init__(self, config: EngineConfig, rows: Rows, allocate: Allocate = plain_memory) -> None:
        largest_bucket = max(config.decode_buckets, default=0)
        tokens = max(config.max_num_batched_tokens, largest_bucket)
        seqs = max(config.max_num_seqs, largest_bucket)
        sizes = (
            tokens,
            tokens,
            tokens,
            tokens,
            seqs,
            seqs + 1,
            seqs,
            seqs,
            rows.table.size + config.max_blocks_per_seq,
        )
        self.buffer = allocate(sum(sizes))
        self.parts = parts = np.split(self.buffer, np.cumsum(sizes)[:-1])
        self.token_ids, self.positions, self.kv_positions, self.carry = parts[:4]
        self.rows, self.query_start, self.seq_lens, self.logits_at = parts[4:8]
        self.table = parts[8].reshape(rows.capacity + 1, config.max_blocks_per_seq)
        self.table[:-1], self.table[-1] = rows.table, NULL_BLOCK
        self._state = rows
        self._changes = rows.journal()
        self._ramp = np.arange(seqs + 1, dtype=np.int32)
        self._decode_size = -1  # sequences of the pure decode step the ramps were last written for

    def fill(self, plan: StepPlan) -> None:
        """Writes everything the step reads."""
        for rows, columns, blocks in self._changes:
            self.table[rows, columns] = blocks
        self._changes.clear()
        n, size = plan.num_seqs, self._state.block_size
        self.rows[:n] = plan.rows
        self.seq_lens[:n] = plan.ends
        if plan.num_tokens == plan.num_decodes:
            self._fill_tokens(plan, 0, n, plan.rows, plan.starts)
            self._fill_ramps(max(n, plan.bucket))
            self._pad(n, plan.bucket)
        else:
            self._fill_mixed(plan, size)

    def _fill_ramps(self, n: int) -> None:
        """One token per sequence: token i belongs to sequence i, which is sampled row i."""
        if n != self._decode_size:
            self.query_start[: n + 1] = self._ramp[: n + 1]
            self.logits_at[:n] = self._ramp[:n]
            self._decode_size = n

    def _fill_tokens(
        self, plan: StepPlan, first: int, last: int, rows: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> None:
        """Tokens first..last-1, of which the first `num_decodes` of the step may be carried over."""
        state = self._state
        size = state.block_size
        column = positions // size
        self.positions[first:last] = positions
        self.kv_positions[first:last] = state.table[rows, column] * size + (positions - column * size)
        self.token_ids[first:last] = state.tokens[rows, positions]
        self.carry[first:last] = NO_SOURCE
        if first < plan.num_decodes:
            self.carry[: plan.num_decodes] = plan.carry
            self.token_ids[: plan.num_decodes] *= plan.carry == NO_SOURCE

    def _fill_mixed(self, plan: StepPlan, size: int) -> None:
        lengths = plan.ends - plan.starts
        stops = np.cumsum(lengths)
        first_tokens = stops - lengths
        token_rows = np.repeat(plan.rows, lengths)
        positions = np.arange(plan.num_tokens) - np.repeat(first_tokens - plan.starts, lengths)
        self._fill_tokens(plan, 0, plan.num_tokens, token_rows, positions)
        self.query_start[0] = 0
        self.query_start[1 : plan.num_seqs + 1] = stops
        self.logits_at[: len(plan.sampled)] = stops[plan.sampled_at] - 1
        self._decode_size = -1

    def _pad(self, n: int, bucket: int) -> None:
        """Rows a captured batch has beyond the plan: one token each, into the null block, seeing only itself."""
        if bucket > n:
            padding = slice(n, bucket)
            self.token_ids[padding] = PLACEHOLDER
            self.positions[padding] = 0
            self.kv_positions[padding] = NULL_BLOCK
            self.carry[padding] = NO_SOURCE
            self.rows[padding] = self._state.capacity
            self.seq_lens[padding] = 1
