"""Where the KV of each request is: on which device blocks, shared with whom, or copied to the host.

Rules of this file:

* A prefix becomes shareable when the step that computed it is committed, and only while its row still holds the blocks.
* Blocks are given up at once: whoever writes to them next does so on the compute lane, behind their last use.
* Copies to and from the host run on other lanes. Blocks that an offload reads or writes are fenced until its step is
  collected; a restore goes to quiet blocks only, which no step in flight touches.
* Blocks that left a sliding window are given up by what is settled, as steps in flight still read behind `planned`.

It decides nothing: the scheduler says who gets and who gives.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from asyncsched.config import EngineConfig
from asyncsched.kv import NO_STEP, NULL_BLOCK, BlockPool, block_hash
from asyncsched.plan import NO_COPIES, BlockCopies, IndexArray, StepPlan
from asyncsched.request import HostCopy, Request, TokenArray
from asyncsched.rows import Rows

ONE: IndexArray = np.array(1, dtype=np.int64)  # numpy takes it faster than a Python int


class Residency:
    """The device pool, the host pool and the block tables of all rows."""

    def __init__(self, config: EngineConfig, rows: Rows) -> None:
        self.config = config
        self.rows = rows
        self.pool = BlockPool(config.num_blocks)
        self.host_pool = BlockPool(config.num_host_blocks)
        window = config.sliding_window
        if window is not None:
            # by position: the first block that a query there, or behind, may see
            self._first_seen = np.maximum(np.arange(config.max_model_len + 1) - window + 1, 0) // config.block_size
        self._shareable_from = 0  # steps before this one wrote KV that no later request may share
        self._collected = NO_STEP  # the newest step that is known to have run
        self._offload: list[tuple[list[int], list[int]]] = []  # copies of the step being planned
        self._restore: list[tuple[list[int], list[int]]] = []

    # ---- taking ----------------------------------------------------------------------------------------------------

    def match_prefix(self, request: Request) -> list[int]:
        """Committed blocks that hold the start of the request, at least one token short of all of it."""
        if not self.config.enable_prefix_caching or request.host_copy is not None:
            return []
        usable = min((len(request.tokens) - 1) // self.config.block_size, self.config.num_blocks - 1)
        return self.pool.match(self._hashes(request, request.tokens, usable)[:usable])

    def share(self, row: int, blocks: list[int]) -> None:
        """Gives an empty row the blocks that `match_prefix` found."""
        self.pool.share(blocks)
        self.rows.append_blocks(row, blocks)

    def extend(self, row: int, end: int) -> int:
        """Blocks for positions up to `end`, as far as there are any; returns the end they reach."""
        reach = min(end, (self.rows.num_blocks.item(row) + self.pool.available) * self.config.block_size)
        self.rows.append_blocks(row, self.pool.allocate(self.rows.missing_blocks(row, reach)))
        return reach

    def lacks_block(self, rows: IndexArray, positions: IndexArray) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which rows need one more block before they can write to their position."""
        return self.rows.num_blocks[rows] <= self.rows.column_of[positions]

    def grow(self, rows: IndexArray) -> None:
        """One more block for each row. Ask `pool.available` first."""
        if len(rows):
            have = self.rows.num_blocks[rows]
            self.rows.write_table(self.rows.table_base[rows] + have, self.pool.allocate(len(rows)))
            self.rows.num_blocks[rows] = have + ONE

    def fill_in(self, places: list[int]) -> None:
        """A block for each of these entries of `flat_table`, in order; `num_blocks` is the caller's to raise. Only for
        a pool without cached blocks: free ones come off one stack, together or one by one."""
        self.rows.write_table(np.array(places, dtype=np.int64), self.pool.allocate(len(places)))

    # ---- giving ----------------------------------------------------------------------------------------------------

    def give_up(self, row: int) -> None:
        """The row's KV is not needed any more."""
        self.pool.release(self.rows.blocks_of(row), last_use=self.rows.last_step.item(row))
        self._empty(row)

    def offload(self, request: Request, step: int) -> bool:
        """Moves a row's KV to the host, as part of `step`, the step being planned; False where the host has no room."""
        row = request.row
        device = self.rows.blocks_of(row)
        if len(device) > self.host_pool.available or not device:
            return False
        host = self.host_pool.allocate(len(device))
        self._offload.append((device, host))
        request.host_copy = HostCopy(host, self.rows.freed.item(row), self.rows.planned.item(row), step)
        self.pool.release(device, last_use=self.rows.last_step.item(row), fence=step)
        self._empty(row)
        return True

    def drop_host_copy(self, request: Request, settled: int) -> None:
        copy = request.host_copy
        if copy is not None:
            self.host_pool.release(copy.blocks, fence=copy.step if copy.step > settled else None)
            request.host_copy = None

    def can_restore(self, request: Request) -> bool:
        """Whether the request's host copy is complete, and there are enough quiet blocks for it."""
        copy = request.host_copy
        if copy is None:
            return True
        return copy.step <= self._collected and self.pool.num_quiet(self._collected) >= len(copy.blocks)

    def restore(self, request: Request, row: int, step: int) -> None:
        """Brings the request's KV back into an empty row, as part of `step`. Ask `can_restore` first."""
        copy = request.host_copy
        if copy is None:
            return
        device = self.pool.allocate_quiet(len(copy.blocks), self._collected)
        self._restore.append((device, copy.blocks))
        if copy.freed:
            self.rows.write_row(row, 0, [NULL_BLOCK] * copy.freed)
        self.rows.num_blocks[row] = self.rows.freed[row] = copy.freed
        self.rows.append_blocks(row, device)
        self.host_pool.release(copy.blocks, fence=step)
        request.host_copy = None

    def take_copies(self) -> tuple[BlockCopies, BlockCopies]:
        """Offloads and restores of the step being planned."""
        if not self._offload and not self._restore:
            return NO_COPIES, NO_COPIES
        copies = _copies(self._offload), _copies(self._restore)
        self._offload, self._restore = [], []
        return copies

    @property
    def has_copies(self) -> bool:
        return bool(self._offload or self._restore)

    # ---- settling --------------------------------------------------------------------------------------------------

    def committed(self, plan: StepPlan) -> None:
        """The step ran: its blocks may be shared, its fences fall, its windows move on. Before any of its rows ends."""
        self._collected = plan.step
        self.pool.settle(plan.step)
        self.host_pool.settle(plan.step)
        if self.config.enable_prefix_caching and plan.step >= self._shareable_from:
            self._register_prefixes(plan)
        if self.config.sliding_window is not None:
            self._free_outside_window(plan)

    def share_filled(self, row: int, column: int) -> None:
        """A committed step filled this block of the row: it becomes shareable."""
        request = self.rows.owner[row]
        assert request is not None  # it holds blocks
        hashes = self._hashes(request, self.rows.tokens[row], column + 1)
        self.pool.register(self.rows.table.item(row, column), hashes[column])

    def passed(self, step: int) -> None:
        """Steps up to this one ran, of which none copied blocks."""
        self._collected = step
        self.pool.settle(step)
        self.host_pool.settle(step)

    def failed(self, plan: StepPlan, waiting: Iterable[Request]) -> None:
        """The step did not run, and nothing of it runs any more: its offloads hold nothing."""
        self._drop_failed_copies(plan, waiting)
        self.pool.settle(plan.step)
        self.host_pool.settle(plan.step)
        self._collected = plan.step

    def stuck(self, plan: StepPlan, waiting: Iterable[Request]) -> list[int]:
        """The step never came back: nobody gets again what it may still write. After its requests were ended.

        Returns the rows that own such blocks by now, because the step's rows had given them up.
        """
        self._drop_failed_copies(plan, waiting)
        size = self.config.block_size
        spans = zip(plan.rows.tolist(), plan.starts.tolist(), plan.ends.tolist(), strict=True)
        # A row is not taken again while a step names it, so its table still says where the step writes.
        written = {
            block
            for row, start, end in spans
            for block in self.rows.table[row, start // size : -(-end // size)].tolist()
        }
        held = self.pool.quarantine(plan.step, written.union(plan.restore.device.tolist()))
        self.host_pool.quarantine(plan.step)
        rows = np.flatnonzero(self.rows.num_blocks).tolist() if held else []
        return [row for row in rows if not held.isdisjoint(self.rows.blocks_of(row))]

    def forget_prefixes(self, next_step: int) -> None:
        """Nothing computed before `next_step` may be shared again."""
        self.pool.forget_prefixes()
        self._shareable_from = next_step

    # ---- sizes -----------------------------------------------------------------------------------------------------

    def footprint(self, tokens: int) -> int:
        """Blocks that `tokens` positions take at one time; a sliding window bounds it."""
        blocks = -(-tokens // self.config.block_size)
        window = self.config.sliding_window
        if window is None or not self.config.enable_chunked_prefill:
            return blocks
        in_flight = self.config.depth * self.config.max_num_batched_tokens
        return min(blocks, -(-(window - 1 + in_flight) // self.config.block_size) + 1)

    def least_blocks(self, tokens: int) -> int:
        """Blocks without which `tokens` positions cannot be computed, one at a time if need be."""
        blocks = -(-tokens // self.config.block_size)
        window = self.config.sliding_window
        if window is None or not self.config.enable_chunked_prefill:
            return blocks
        return min(blocks, -(-(window - 1) // self.config.block_size) + 1)

    # ---- helpers ---------------------------------------------------------------------------------------------------

    def _drop_failed_copies(self, plan: StepPlan, waiting: Iterable[Request]) -> None:
        for request in waiting:
            copy = request.host_copy
            if copy is not None and copy.step == plan.step:
                self.host_pool.release(copy.blocks, fence=copy.step)
                request.host_copy = None

    def _empty(self, row: int) -> None:
        self.rows.num_blocks[row] = self.rows.freed[row] = 0

    def _register_prefixes(self, plan: StepPlan) -> None:
        """Makes the blocks this step filled shareable; rows that gave up their blocks have none to share."""
        r = self.rows
        before, after = r.column_of[plan.starts], r.column_of[plan.ends]
        fills = after > before
        if True not in fills.tobytes():
            return
        for place in fills.nonzero()[0].tolist():
            row = plan.rows.item(place)
            if not r.num_blocks.item(row):
                continue
            for column in range(max(before.item(place), r.freed.item(row)), after.item(place)):
                self.share_filled(row, column)

    def _free_outside_window(self, plan: StepPlan) -> None:
        r, rows = self.rows, plan.rows
        visible = self._first_seen[r.computed[rows]]
        leaves = visible > r.freed[rows]
        if True not in leaves.tobytes():
            return
        for place in leaves.nonzero()[0].tolist():
            row, first = rows.item(place), visible.item(place)
            if r.num_blocks.item(row):
                freed = r.freed.item(row)
                self.pool.release(r.table[row, freed:first].tolist(), last_use=plan.step)
                r.write_row(row, freed, [NULL_BLOCK] * (first - freed))
                r.freed[row] = first

    def _hashes(self, request: Request, tokens: TokenArray, count: int) -> list[bytes]:
        """Chained hashes of at least the first `count` blocks of a request."""
        hashes, size = request.hashes, self.config.block_size
        for block in range(len(hashes), count):
            hashes.append(block_hash(hashes[-1] if hashes else b"", tokens[block * size : (block + 1) * size]))
        return hashes


def _copies(pairs: list[tuple[list[int], list[int]]]) -> BlockCopies:
    if not pairs:
        return NO_COPIES
    device = [block for blocks, _ in pairs for block in blocks]
    host = [block for _, blocks in pairs for block in blocks]
    return BlockCopies(np.array(device, dtype=np.int64), np.array(host, dtype=np.int64))
