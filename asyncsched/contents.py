"""What KV blocks and sampled-token buffers hold, step by step in the order of launches, and reads of anything else.

Order alone does not make a read right: a block table may be old, a block may be somebody else's by now, a carry-over
may name the wrong batch. So every token of every request has a number, `request * stride + position`, and memory is
remembered by the numbers of what was last written there:

* a KV block holds a stretch of one request's positions from the start of the block; one number, that of the token
  after the newest, says whose it is, which block of the request, and how far it is filled;
* `dev_out` of a slot holds one number per sampled row.

Reading another request's block is right when the tokens up to its end are the same and the step that completed it was
collected: then it is a shared prefix. Digests of real tokens decide, not what the block pool believes.
"""

from __future__ import annotations

from enum import Enum
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from asyncsched.accesses import Memory, Spot, first_visible
from asyncsched.config import EngineConfig
from asyncsched.kv import NULL_BLOCK
from asyncsched.plan import NO_SOURCE, NO_STEP, IndexArray, StepPlan
from asyncsched.rows import Rows

NOBODY = -1
WIDE_TABLE = 32  # wider ones are cut to what a step reads
UNLIMITED = 2**64 - 1


class FlawKind(Enum):
    """UNWRITTEN  it reads what nobody has written
    STALE      it reads what was written for another position, request or step
    EARLY      it reads a shared KV block that was not complete when its writer was last collected
    COLLISION  two rows of a step write to one KV block, or one writes to the null block
    """

    UNWRITTEN = "unwritten"
    STALE = "stale"
    EARLY = "early"
    COLLISION = "collision"


class Flaw(NamedTuple):
    """`writer` is the step that wrote what was found, or NO_STEP."""

    kind: FlawKind
    spot: Spot
    text: str
    writer: int = NO_STEP


class Snapshot(NamedTuple):
    """A plan and the block tables of its rows when it was made.

    base, first, after are int64[num_seqs], numbers of tokens of each request: its first, the first that the step
    computes, and the one after the last.
    """

    plan: StepPlan
    rows: Rows
    table: IndexArray
    base: IndexArray
    first: IndexArray
    after: IndexArray


class Contents:
    """The memory of one engine. Methods are what operations do to it; those that read answer with what is wrong.

    Positions must lie within `max_model_len` and blocks within the pool, as the scheduler's do.
    """

    def __init__(self, config: EngineConfig) -> None:
        size, width = config.block_size, config.max_blocks_per_seq
        self._config = config
        self._size = size
        self._stride = (width + 1) * size  # more than a table spans, so that no number is of two requests
        self._limits = np.arange(1, width + 1) * size
        self._column = np.arange(width * size + 1) // size
        self._flat = np.arange(config.max_num_seqs + 1) * width
        self._slack = _slack(size, width, config.sliding_window)
        self._slack_of_all = _slack(size, width, None)
        self._device = _Blocks(config.num_blocks)
        self._host = _Blocks(config.num_host_blocks)
        self._dev_out = np.full(config.depth * config.max_num_seqs + 1, NOBODY)  # NO_SOURCE finds the last
        self._dev_out_step = [NO_STEP] * config.depth
        # of each row: whose it was last, that request's base, and what each full block of its table should hold
        capacity = config.max_num_seqs * config.depth
        self._tenant = np.full(capacity, NOBODY)
        self._base = np.zeros(capacity, dtype=np.int64)
        self._wanted = np.zeros((capacity, width), dtype=np.int64)

    def snapshot(self, plan: StepPlan, rows: Rows) -> Snapshot:
        if self._tenant.take(plan.rows).tobytes() != plan.requests.tobytes():
            self._tenant[plan.rows] = plan.requests
            self._base[plan.rows] = base = plan.requests * self._stride
            self._wanted[plan.rows] = base[:, None] + self._limits
        base = self._base.take(plan.rows)
        table = rows.table.take(plan.rows, axis=0).astype(np.int64)
        return Snapshot(plan, rows, table, base, base + plan.starts, base + plan.ends)

    # ---- tokens ----------------------------------------------------------------------------------------------------

    def carry(self, snapshot: Snapshot) -> list[Flaw]:
        """Every input token must be on the host, or in `dev_out` where the mask says."""
        plan, count = snapshot.plan, snapshot.plan.num_decodes
        try:
            wrong = self._dev_out[plan.carry] != (snapshot.first if count == len(plan.rows) else snapshot.first[:count])
        except IndexError:
            wrong = np.ones(count, dtype=np.bool_)
        flaws: list[Flaw] = []
        places = np.flatnonzero(wrong).tolist() if np.count_nonzero(wrong) else []
        for place in (*places, *range(count, len(plan.rows))):
            if place < count and plan.carry[place] != NO_SOURCE:
                flaws += self._misfit(snapshot, place)
            elif snapshot.rows.known[plan.rows[place]] < plan.ends[place]:
                flaws.append(self._unknown_token(plan, place))
        return flaws

    def not_carried(self, snapshot: Snapshot) -> list[Flaw]:
        """For a program that runs its forward pass without carrying over before it."""
        plan = snapshot.plan
        places = np.flatnonzero(plan.carry != NO_SOURCE).tolist()
        return [self._unknown_token(plan, place) for place in places]

    def sampled(self, snapshot: Snapshot, slot: int) -> None:
        """The step leaves its tokens in `dev_out` of a slot."""
        plan = snapshot.plan
        first, end = slot * self._config.max_num_seqs, (slot + 1) * self._config.max_num_seqs
        count = len(plan.sampled)
        if plan.sampled is plan.rows and plan.sampled_ends is plan.ends:
            self._dev_out[first : first + count] = snapshot.after
        else:
            numbers = dict(zip(plan.rows.tolist(), snapshot.base.tolist(), strict=True))
            pairs = zip(plan.sampled.tolist(), plan.sampled_ends.tolist(), strict=True)
            self._dev_out[first : first + count] = [numbers[row] + at for row, at in pairs]
        self._dev_out[first + count : end] = NOBODY
        self._dev_out_step[slot] = plan.step

    # ---- KV --------------------------------------------------------------------------------------------------------

    def read(self, snapshot: Snapshot, *, own_too: bool) -> list[Flaw]:
        """Each row reads the positions before its queries that it sees, and with `own_too` those of its queries."""
        plan, table = snapshot.plan, snapshot.table
        if not len(plan.rows):
            return []
        upto, slack = (plan.ends, self._slack_of_all) if own_too else (plan.starts, self._slack)
        wanted, width = self._wanted.take(plan.rows, axis=0), table.shape[1]
        if width > WIDE_TABLE:
            width = min(width, -(-int(upto.max()) // self._size))
            table, wanted, slack = table[:, :width], wanted[:, :width], slack[:, :width][upto]
        else:
            slack = slack.take(upto, axis=0)
        behind: NDArray[np.uint64] = (wanted - self._device.holds[table]).view(np.uint64)  # negative ones are large
        wrong = behind > slack
        if not np.count_nonzero(wrong):
            return []
        flaws = []
        for place, column in zip(*(axis.tolist() for axis in np.nonzero(wrong)), strict=True):
            flaw = self._judge(snapshot, place, column, int(upto[place]))
            if flaw is not None:
                flaws.append(flaw)
        return flaws

    def write(self, snapshot: Snapshot, *, is_checked: bool) -> list[Flaw]:
        """Each row writes positions starts..ends-1. `is_checked`: what stands before them was just read."""
        plan, table, base, after = snapshot.plan, snapshot.table, snapshot.base, snapshot.after
        holds, size, count = self._device.holds, self._size, plan.num_decodes
        holes = [] if is_checked else self._holes(snapshot)
        starts, chunks = plan.starts, range(count, len(plan.rows))
        if chunks:
            starts, after = starts[:count], after[:count]
        blocks = table.ravel()[self._flat[:count] + self._column.take(starts)]
        holds[blocks] = after
        self._device.writer[blocks] = plan.step
        written = blocks.tolist()
        for place in chunks:
            start, end = int(plan.starts[place]), int(plan.ends[place])
            first, last = start // size, -(-end // size)
            blocks = table[place, first:last]
            holds[blocks] = base[place] + np.minimum(self._limits[first:last], end)
            self._device.writer[blocks] = plan.step
            written += blocks.tolist()
        holds[NULL_BLOCK] = NOBODY
        if holes:
            holds[holes] = NOBODY
        distinct = set(written)
        if len(distinct) == len(written) and NULL_BLOCK not in distinct:
            return []
        return self._collisions(plan.step, written)

    def offload(self, snapshot: Snapshot) -> None:
        copies = snapshot.plan.offload
        self._host.copy_from(self._device, copies.device, copies.host, snapshot.plan.step)

    def restore(self, snapshot: Snapshot) -> None:
        copies = snapshot.plan.restore
        self._device.copy_from(self._host, copies.host, copies.device, snapshot.plan.step)

    # ---- ends ------------------------------------------------------------------------------------------------------

    def collected(self, snapshot: Snapshot) -> None:
        """Blocks that the step completed may be shared from now on."""
        if not self._config.enable_prefix_caching:
            return
        plan, rows, table, base = snapshot[:4]
        before, after = self._column.take(plan.starts), self._column.take(plan.ends)
        for place in (after > before).nonzero()[0].tolist():
            row, first = int(plan.rows[place]), int(base[place])
            for column in range(int(before[place]), int(after[place])):
                block, full = int(table[place, column]), first + int(self._limits[column])
                if self._device.holds[block] == full:
                    self._device.digests[block] = full, self._digest(rows, row, column)

    def failed(self, snapshot: Snapshot) -> None:
        """What the step wrote is worth nothing."""
        plan = snapshot.plan
        self._device.forget(np.flatnonzero(self._device.writer == plan.step))
        self._host.forget(np.flatnonzero(self._host.writer == plan.step))
        for slot, step in enumerate(self._dev_out_step):
            if step == plan.step:
                size = self._config.max_num_seqs
                self._dev_out[slot * size : (slot + 1) * size] = NOBODY

    @property
    def num_digests(self) -> int:
        return len(self._device.digests) + len(self._host.digests)

    # ---- judging ---------------------------------------------------------------------------------------------------

    def _unknown_token(self, plan: StepPlan, place: int) -> Flaw:
        token = f"the token of position {plan.starts[place]} of request {plan.requests[place]}"
        text = f"{token} is neither on the host nor carried over"
        return Flaw(FlawKind.UNWRITTEN, Spot(Memory.DEV_IN, plan.slot), text)

    def _misfit(self, snapshot: Snapshot, place: int) -> list[Flaw]:
        """What is wrong with the carry-over of one decode row."""
        plan = snapshot.plan
        source = int(plan.carry[place])
        slot, index = divmod(source, self._config.max_num_seqs)
        request, position = int(plan.requests[place]), int(plan.starts[place])
        wanted = f"row {index} of what the slot sampled is carried over for position {position} of request {request}"
        spot = Spot(Memory.DEV_OUT, slot)
        if not 0 <= source < len(self._dev_out) - 1:
            return [Flaw(FlawKind.UNWRITTEN, spot, f"{wanted}, and there is no such row")]
        found = int(self._dev_out[source])
        writer = self._dev_out_step[slot]
        if found == int(snapshot.base[place]) + position:
            return []
        if found == NOBODY:
            return [Flaw(FlawKind.UNWRITTEN, spot, f"{wanted}, and nobody sampled it", writer)]
        return [Flaw(FlawKind.STALE, spot, f"{wanted}, and it holds {self._name(found)}", writer)]

    def _judge(self, snapshot: Snapshot, place: int, column: int, upto: int) -> Flaw | None:
        """What is wrong with a read of one block, if anything is. From then on it counts as right, to be told once."""
        plan, rows, table, base = snapshot[:4]
        request, row, size = int(plan.requests[place]), int(plan.rows[place]), self._size
        block = int(table[place, column])
        first = max(int(first_visible(plan, self._config)[place]), column * size)
        end = min(upto, (column + 1) * size)
        if first >= end:
            return None
        found, writer = int(self._device.holds[block]), int(self._device.writer[block])
        mine = int(base[place])
        wanted = f"positions {first}..{end - 1} of request {request}"
        if block == NULL_BLOCK:
            return Flaw(FlawKind.UNWRITTEN, Spot(Memory.KV, block), f"{wanted} have no block")
        if found == NOBODY:
            return Flaw(FlawKind.UNWRITTEN, Spot(Memory.KV, block, first % size), f"{wanted} were never written")
        owner, after = divmod(found, self._stride)
        if owner == request and (after - 1) // size == column:
            self._wanted[row, column] = mine + (column + 1) * size
            if after >= end:
                return None
            self._device.holds[block] = mine + end
            missing = max(after, first)
            text = f"positions {missing}..{end - 1} of request {request} were never written"
            return Flaw(FlawKind.UNWRITTEN, Spot(Memory.KV, block, missing % size), text, writer)
        holding = f"the block holds positions {(after - 1) // size * size}..{after - 1} of request {owner}"
        stale = Flaw(FlawKind.STALE, Spot(Memory.KV, block, first % size), f"{wanted} are meant, and {holding}", writer)
        is_shared = self._config.enable_prefix_caching and after == (column + 1) * size and end == after
        if is_shared:
            number, digest = self._device.digests.get(block, (NOBODY, 0))
            if number != found:
                text = f"{wanted} are shared from request {owner}, whose step is not known to be over"
                stale = Flaw(FlawKind.EARLY, Spot(Memory.KV, block, first % size), text, writer)
            elif digest == self._digest(rows, row, column):
                self._wanted[row, column] = found
                return None
        self._device.holds[block] = mine + end
        self._wanted[row, column] = mine + (column + 1) * size
        return stale

    def _holes(self, snapshot: Snapshot) -> list[int]:
        """Blocks that a row starts to write to behind a hole: they do not hold its positions up to there."""
        plan, table, first = snapshot.plan, snapshot.table, snapshot.first
        blocks = [int(row[start // self._size]) for row, start in zip(table, plan.starts.tolist(), strict=True)]
        return [
            block
            for block, start, number in zip(blocks, plan.starts.tolist(), first.tolist(), strict=True)
            if start % self._size and self._device.holds[block] != number
        ]

    def _collisions(self, step: int, written: list[int]) -> list[Flaw]:
        flaws = []
        for block in sorted({block for block in written if written.count(block) > 1 or block == NULL_BLOCK}):
            text = (
                "it is the null block"
                if block == NULL_BLOCK
                else f"{written.count(block)} rows of the step write to it"
            )
            flaws.append(Flaw(FlawKind.COLLISION, Spot(Memory.KV, block), text, step))
        return flaws

    def _digest(self, rows: Rows, row: int, column: int) -> int:
        return hash(rows.tokens[row, : (column + 1) * self._size].tobytes())

    def _name(self, number: int) -> str:
        request, position = divmod(number, self._stride)
        return f"position {position} of request {request}"


class _Blocks:
    """What each block of a pool holds. `writer` is the newest step that wrote to it.

    digests  of complete blocks whose step was collected: the number they held then, and a digest of all tokens up to it
    """

    def __init__(self, num_blocks: int) -> None:
        self.holds = np.full(num_blocks + 1, NOBODY)
        self.writer = np.full(num_blocks + 1, NO_STEP)
        self.digests: dict[int, tuple[int, int]] = {}

    def copy_from(self, other: _Blocks, sources: IndexArray, targets: IndexArray, step: int) -> None:
        self.holds[targets] = other.holds[sources]
        self.writer[targets] = step
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            if source in other.digests:
                self.digests[target] = other.digests[source]

    def forget(self, blocks: IndexArray) -> None:
        self.holds[blocks] = NOBODY


@lru_cache(maxsize=64)
def _slack(size: int, width: int, window: int | None) -> NDArray[np.uint64]:
    """By position `upto` and column: how far the number of a block may stay behind that of the full block, uint64.

    0 for a block that a row reads whole, more for its newest block, unlimited for one that it does not read. All
    depends on the distance `column * size - upto`, so it is a view of a vector, but for narrow tables, where rows are
    taken faster from a copy.
    """
    reach = width * size
    distance = np.arange(-reach, reach + 1)
    slack = np.clip(distance + size, 0, None).astype(np.uint64)
    slack[distance >= 0] = UNLIMITED
    if window is not None:
        slack[distance <= 1 - window - size] = UNLIMITED
    step = slack.itemsize
    view = as_strided(slack[reach:], shape=(reach + 1, width), strides=(-step, size * step), writeable=False)
    return view if width > WIDE_TABLE else np.ascontiguousarray(view)
