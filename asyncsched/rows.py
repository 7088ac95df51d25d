"""The running batch as arrays: one row per request that a step may name, one array per quantity.

Settled quantities change only at commit, optimistic ones only at plan; none is both. A row belongs to one
request until every step that names it is collected, so an index into these arrays stays valid for as long as any plan
holds it. Tokens in flight are never counted, only derived: `planned - computed`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncsched.config import EngineConfig
from asyncsched.kv import NULL_BLOCK
from asyncsched.request import Request

NEVER = -1
NO_TOKEN = -1
PLACEHOLDER = 0  # in place of a token that is not known


class TableWrite(NamedTuple):
    """Entries of block tables that changed: `flat_table[places] = blocks`."""

    places: NDArray[np.int64]
    blocks: NDArray[np.int32]


class Rows:
    """`capacity` rows. Names of arrays:

    settled     computed    KV positions written by collected steps
                known       tokens known: prompt and collected outputs
    optimistic  planned     KV positions written once every planned step has run
                last_step   newest step that names the row
                sampled_at  newest step that samples for the row
                source      where that step leaves its token: slot * max_num_seqs + index among sampled rows
    fixed       request     index of the request
                last_end    `ends` of the step that samples the last token the length limit allows
                stop_token  the first stop token, or NO_TOKEN
                scrutinise  the request has more to its stops than one token id: commit looks at it alone
    state       live        its tokens are still delivered
                stopped     a content stop ended it: what else is computed for it is overshoot
                num_blocks  entries of its block table, freed leading ones included; 0 once its blocks were given up
                freed       leading blocks that left the sliding window
                owner       the request that has the row, a list

    tokens is int32[capacity, max_model_len], PLACEHOLDER behind what is known; table is int32[capacity,
    max_blocks_per_seq]. flat_tokens and flat_table are the same memory, in which row r begins at token_base[r] and
    table_base[r]: one index is faster than two.
    column_of and offset_of say where a position is: in which entry of a table, and where in that block (int32); after
    is the position after it, since a gather takes less than an addition.
    """

    def __init__(self, config: EngineConfig) -> None:
        capacity = config.max_num_seqs * config.depth
        self.capacity = capacity
        self.block_size = config.block_size
        self.tokens = np.zeros((capacity, config.max_model_len), dtype=np.int32)  # untouched pages cost nothing
        self.table = np.full((capacity, config.max_blocks_per_seq), NULL_BLOCK, dtype=np.int32)
        self.flat_tokens, self.flat_table = self.tokens.reshape(-1), self.table.reshape(-1)
        self.token_base = np.arange(capacity) * config.max_model_len
        self.table_base = np.arange(capacity) * config.max_blocks_per_seq
        positions = np.arange(config.max_model_len + 1)
        self.column_of = positions // config.block_size
        self.after = positions + 1
        self.offset_of = (positions % config.block_size).astype(np.int32)
        self.computed = np.zeros(capacity, dtype=np.int64)
        self.known = np.zeros(capacity, dtype=np.int64)
        self.planned = np.zeros(capacity, dtype=np.int64)
        self.last_step = np.full(capacity, NEVER, dtype=np.int64)
        self.sampled_at = np.full(capacity, NEVER, dtype=np.int64)
        self.source = np.zeros(capacity, dtype=np.int64)
        self.request = np.zeros(capacity, dtype=np.int64)
        self.last_end = np.zeros(capacity, dtype=np.int64)
        self.stop_token = np.full(capacity, NO_TOKEN, dtype=np.int32)
        self.scrutinise = np.zeros(capacity, dtype=np.bool_)
        self.live = np.zeros(capacity, dtype=np.bool_)
        self.stopped = np.zeros(capacity, dtype=np.bool_)
        self.num_blocks = np.zeros(capacity, dtype=np.int64)
        self.freed = np.zeros(capacity, dtype=np.int64)
        self.owner: list[Request | None] = [None] * capacity
        self._free = list(range(capacity - 1, -1, -1))
        self._journals: list[list[TableWrite]] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A row nobody uses. Ask `num_free` first."""
        return self._free.pop()

    def give_back(self, row: int) -> None:
        self.tokens[row, : self.known.item(row)] = PLACEHOLDER
        self._free.append(row)

    def journal(self) -> list[TableWrite]:
        """A list that receives every later table write, for a copy updated in place; its reader empties it."""
        journal: list[TableWrite] = []
        self._journals.append(journal)
        return journal

    def write_table(self, places: NDArray[np.int64], blocks: list[int]) -> None:
        """Sets entries of `flat_table`."""
        self.flat_table[places] = blocks
        if self._journals:
            write = TableWrite(places, np.array(blocks, dtype=np.int32))
            for journal in self._journals:
                journal.append(write)

    def write_row(self, row: int, first: int, blocks: list[int]) -> None:
        """Sets entries of the table of one row, from column `first`."""
        start = self.table_base.item(row) + first
        self.write_table(np.arange(start, start + len(blocks)), blocks)

    def append_blocks(self, row: int, blocks: list[int]) -> None:
        """Extends the table of one row."""
        if blocks:
            have = self.num_blocks.item(row)
            self.write_row(row, have, blocks)
            self.num_blocks[row] = have + len(blocks)

    def blocks_of(self, row: int) -> list[int]:
        """Blocks the row owns, in order of position; those that left a sliding window are gone."""
        blocks: list[int] = self.table[row, self.freed.item(row) : self.num_blocks.item(row)].tolist()
        return blocks

    def missing_blocks(self, row: int, end: int) -> int:
        """Blocks to allocate before positions up to `end` can be written."""
        return max(0, -(-end // self.block_size) - self.num_blocks.item(row))
