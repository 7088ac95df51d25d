"""Host inputs of a step: the arrays an executor copies to the device, one set per slot, written in place.

A step needs one copy, of the first `num_words` words of one buffer. Arrays lie close together, as long as the step's
bucket wants them: a layout per bucket, at the same places every time, so that a captured graph may read them. Block
tables stay on the device; what changed since the slot was last filled, `depth` steps ago and not one, travels as a list
of changes that the carry-over operation applies. Where the list is too long for its place, or a step failed and nobody
knows what arrived, the whole table is copied instead: it is the end of the buffer.

Filling a slot whose previous step has not been collected overwrites what a copy may still read; the pipeline collects
first.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncsched.config import EngineConfig
from asyncsched.kv import NULL_BLOCK
from asyncsched.plan import NO_SOURCE, StepPlan
from asyncsched.rows import PLACEHOLDER, Rows

ONE = np.array(1, dtype=np.int32)  # numpy takes it faster than a Python int

Int32s = NDArray[np.int32]
Allocate = Callable[[int], Int32s]
Buckets = tuple[int, int]  # decode bucket and mixed bucket, as in the plan
NOT_PADDED: Buckets = (0, 0)


def plain_memory(count: int) -> Int32s:
    return np.zeros(count, dtype=np.int32)


class Layout(NamedTuple):
    """Where arrays are in the buffer, one after the other from its start; see `SlotInputs`. `sizes` are in words."""

    num_seqs: int
    sizes: tuple[int, ...]

    @property
    def num_words(self) -> int:
        return sum(self.sizes)


class SlotInputs:
    """The arrays of one slot, int32 unless noted, views of one buffer.

    T and S are the decode bucket; or T is the mixed bucket and S max_num_seqs; where a step is not padded,
    max_num_batched_tokens and max_num_seqs, or the largest decode bucket.
    C is the room for changes: blocks that a step of this size can add.

    changes_at    [C] int64  flat places in `table`; the last one, of the null row, where there are fewer changes
    changes_to    [C]    what to write there
    token_ids     [T]    known tokens; PLACEHOLDER where carry-over will write, as `tokens` of `Rows` has it
    positions     [T]
    kv_positions  [T]    block * block_size + offset that the token's KV is written to
    carry         [T]    the carry-over mask by flat token position: slot * max_num_seqs + index, or NO_SOURCE
    rows          [S]    row of each sequence, an index into `table`
    query_start   [S+1]  first token of each sequence
    seq_lens      [S]    KV length after the step
    logits_at     [S]    flat token position of each sampled row's last token
    counts        [2]    sequences that decode, which come first, and all sequences; with padding of a decode bucket.
                         In batch-invariant steps none counts as decoding
    samples       [S, words_per_sample]  an executor's own, for each sampled row
    table         [rows + 1, max_blocks_per_seq]  block tables by row; the last row is all null, for padding
    """

    def __init__(
        self, config: EngineConfig, rows: Rows, allocate: Allocate = plain_memory, words_per_sample: int = 0
    ) -> None:
        largest_bucket = max(config.decode_buckets, default=0)
        self._full = max(config.max_num_batched_tokens, largest_bucket), max(config.max_num_seqs, largest_bucket)
        self._words_per_sample = words_per_sample
        self._is_invariant = config.batch_invariant
        self._block_size = config.block_size
        self._max_blocks = config.max_blocks_per_seq
        self._layouts: dict[Buckets, tuple[Layout, NDArray[np.int64], tuple[Int32s, ...], Int32s]] = {}
        table_at = self.layout(NOT_PADDED).num_words
        self.buffer = allocate(table_at + rows.table.size + self._max_blocks)
        self.table = self.buffer[table_at:].reshape(rows.capacity + 1, self._max_blocks)
        self.table[:-1], self.table[-1] = rows.table, NULL_BLOCK
        self._flat_table = self.buffer[table_at:]
        self._nowhere = self.table.size - 1
        self._state = rows
        self._changes = rows.journal()
        self._size = np.array(config.block_size, dtype=np.int32)
        self._ramp = np.arange(max(self._full[1], config.max_model_len) + 1, dtype=np.int32)
        self._decode_rows: NDArray[np.int64] | None = None  # `rows` of the pure decode step that was filled last
        self._num_changes = 0  # written in the layout in use
        self._is_stale = True  # the device's table is not what the changes start from
        self._buckets: Buckets | None = None
        self.use(NOT_PADDED)

    def layout(self, buckets: Buckets) -> Layout:
        """The layout of steps that are padded so."""
        bucket, mixed_bucket = buckets
        tokens, seqs = (bucket, bucket) if bucket else self._full
        tokens = mixed_bucket or tokens
        changes = seqs + tokens // self._block_size
        sizes = (2 * changes, changes, tokens, tokens, tokens, tokens, seqs, seqs + 1, seqs, seqs, 2)
        return Layout(seqs, (*sizes, seqs * self._words_per_sample))

    def use(self, buckets: Buckets) -> bool:
        """Names the arrays of a layout; True when they are others than before, and hold nothing that may be read."""
        if buckets == self._buckets:
            return False
        if buckets not in self._layouts:
            layout = self.layout(buckets)
            ends = list(accumulate(layout.sizes))
            arrays = [self.buffer[end - size : end] for size, end in zip(layout.sizes, ends, strict=True)]
            samples = arrays[-1].reshape(layout.num_seqs, self._words_per_sample)
            self._layouts[buckets] = layout, arrays[0].view(np.int64), tuple(arrays[1:-1]), samples
        layout, self.changes_at, parts, self.samples = self._layouts[buckets]
        self.changes_to, self.token_ids, self.positions, self.kv_positions, self.carry = parts[:5]
        self.rows, self.query_start, self.seq_lens, self.logits_at, self.counts = parts[5:]
        self._buckets, self._words = buckets, layout.num_words
        self._num_changes = len(self.changes_at)
        self._decode_rows = None
        return True

    def fill(self, plan: StepPlan) -> None:
        """Writes everything the step reads, but for `samples`."""
        self.use((plan.bucket, plan.mixed_bucket))
        self._fill_changes()
        n, decodes = len(plan.rows), plan.num_decodes
        self.seq_lens[:n] = plan.ends
        if n == decodes and not plan.mixed_bucket:
            if plan.rows is not self._decode_rows:
                self._fill_batch(plan)
            self._fill_decodes(plan, plan.rows, plan.starts)
            return
        self.rows[:n] = plan.rows
        if decodes:
            self._fill_decodes(plan, plan.rows[:decodes], plan.starts[:decodes])
        self._fill_chunks(plan)
        self._pad_mixed(plan)

    def apply_changes(self) -> None:
        """What the carry-over operation does with a device's copy: brings its table up to date."""
        self._flat_table[self.changes_at] = self.changes_to

    def resend(self) -> None:
        """The last copy may not have arrived: the next one takes the whole table."""
        self._is_stale = True

    def _fill_changes(self) -> None:
        """Brings the table up to date, here and, by `num_words` and the list of changes, on the device."""
        is_whole, count = self._is_stale, 0
        if self._changes:
            is_whole = is_whole or sum([len(blocks) for _, blocks in self._changes]) > len(self.changes_at)
            for places, blocks in self._changes:
                self._flat_table[places] = blocks
                if not is_whole:
                    self.changes_at[count : count + len(blocks)] = places
                    count += len(blocks)
            self._changes.clear()
            # What the places hold now, not what each change wrote: where one changed twice, the order does not matter.
            self.changes_to[:count] = self._flat_table[self.changes_at[:count]]
        if count < self._num_changes:
            self.changes_at[count : self._num_changes] = self._nowhere
            self.changes_to[count : self._num_changes] = NULL_BLOCK
        self._num_changes = count
        self._is_stale = False
        self.num_words = len(self.buffer) if is_whole else self._words

    def _fill_batch(self, plan: StepPlan) -> None:
        """What stays in a layout from one pure decode step to the next, as long as the same rows decode. One token per
        sequence: token i belongs to sequence i, which is sampled row i."""
        count = len(plan.rows)
        n = max(count, plan.bucket)
        self.rows[:count] = plan.rows
        self.query_start[: n + 1] = self._ramp[: n + 1]
        self.logits_at[:n] = self._ramp[:n]
        self.counts[:] = n
        self._pad(count, plan.bucket)
        self._decode_rows = plan.rows

    def _fill_decodes(self, plan: StepPlan, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        """The first `num_decodes` tokens, one of each row; they may be carried over."""
        state, count = self._state, plan.num_decodes
        blocks = state.flat_table[state.table_base[rows] + state.column_of[positions]]
        self.positions[:count] = positions
        self.kv_positions[:count] = blocks * self._size + state.offset_of[positions]
        self.token_ids[:count] = state.flat_tokens[state.token_base[rows] + positions]
        self.carry[:count] = plan.carry

    def _fill_chunks(self, plan: StepPlan) -> None:
        """The tokens of rows that prefill, and where all rows begin and are sampled."""
        state, decodes = self._state, plan.num_decodes
        self.query_start[: decodes + 1] = self._ramp[: decodes + 1]
        first = decodes
        chunks = zip(
            plan.rows[decodes:].tolist(), plan.starts[decodes:].tolist(), plan.ends[decodes:].tolist(), strict=True
        )
        for seq, (row, start, end) in enumerate(chunks, decodes + 1):
            last = first + end - start
            blocks = state.table[row][state.column_of[start:end]]
            self.positions[first:last] = self._ramp[start:end]
            self.kv_positions[first:last] = blocks * self._size + state.offset_of[start:end]
            self.token_ids[first:last] = state.tokens[row, start:end]
            self.query_start[seq] = first = last
        self.carry[decodes:first] = NO_SOURCE
        self.logits_at[: len(plan.sampled)] = self.query_start[1:][plan.sampled_at] - ONE
        self.counts[:] = 0 if self._is_invariant else decodes, len(plan.rows)
        self._decode_rows = None

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

    def _pad_mixed(self, plan: StepPlan) -> None:
        """Tokens of a mixed bucket that no sequence has, written into the null block; and sequences without tokens."""
        if not plan.mixed_bucket:
            return
        padding = slice(plan.num_tokens, None)
        self.token_ids[padding] = PLACEHOLDER
        self.positions[padding] = 0
        self.kv_positions[padding] = NULL_BLOCK
        self.carry[padding] = NO_SOURCE
        self.rows[plan.num_seqs :] = self._state.capacity
        self.query_start[plan.num_seqs + 1 :] = plan.num_tokens
        self.seq_lens[plan.num_seqs :] = 0
        self.logits_at[len(plan.sampled) :] = 0
