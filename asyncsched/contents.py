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

from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

import numpy as np

from asyncsched.accesses import Memory, Spot, first_visible
from asyncsched.config import EngineConfig
from asyncsched.kv import NULL_BLOCK
from asyncsched.plan import NO_SOURCE, NO_STEP, IndexArray, StepPlan
from asyncsched.rows import Rows

NOBODY = -1


class FlawKind(Enum):
    """UNWRITTEN  it reads what nobody has written
    STALE      it reads what was written for another position, request or step
    EARLY      it reads a shared KV block that was not complete when its writer was last collected
    COLLISION  two rows of a step write to one KV block, or one to what another reads, or one to the null block
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


# One row of a plan: the row, the number of its request's first token, the positions start..end-1 that are computed, and
# the blocks of its table when the plan was made, up to the last position.
Part = tuple[int, int, int, int, list[int]]


@dataclass(slots=True, eq=False)
class Snapshot:
    """A plan and the block tables of its rows when it was made, as lists: batches that are checked are small."""

    plan: Final[StepPlan]
    state: Final[Rows]
    carry: Final[list[int]]
    parts: Final[list[Part]]

    @property
    def table(self) -> IndexArray:
        """The block tables as int64[num_seqs, width], filled up with the null block."""
        width = max((len(blocks) for *_, blocks in self.parts), default=0)
        filled = [blocks + [NULL_BLOCK] * (width - len(blocks)) for *_, blocks in self.parts]
        return np.array(filled, dtype=np.int64).reshape(len(filled), width)


class Contents:
    """The memory of one engine. Methods are what operations do to it; those that read answer with what is wrong.

    Positions must lie within `max_model_len` and blocks within the pool, as the scheduler's do.
    """

    def __init__(self, config: EngineConfig) -> None:
        size, width = config.block_size, config.max_blocks_per_seq
        self._config = config
        self._size = size
        self._seats = config.max_num_seqs
        self._window = config.sliding_window
        self._stride = (width + 1) * size  # more than a table spans, so that no number is of two requests
        self._device = _Blocks(config.num_blocks)
        self._host = _Blocks(config.num_host_blocks)
        self._end = config.depth * config.max_num_seqs
        self._dev_out = [NOBODY] * self._end
        self._dev_out_step = [NO_STEP] * config.depth
        # of each row: whose it was last, and what each full block of its table should hold
        capacity = config.max_num_seqs * config.depth
        self._tenant = [NOBODY] * capacity
        self._wanted: list[list[int]] = [[]] * capacity

    def snapshot(self, plan: StepPlan, rows: Rows) -> Snapshot:
        tenant, stride, size, table = self._tenant, self._stride, self._size, rows.table
        parts: list[Part] = []
        for row, request, start, end in zip(
            plan.rows.tolist(), plan.requests.tolist(), plan.starts.tolist(), plan.ends.tolist(), strict=True
        ):
            base = request * stride
            if tenant[row] != request:
                tenant[row] = request
                self._wanted[row] = list(range(base + size, base + stride, size))
            parts.append((row, base, start, end, table[row, : (end + size - 1) // size].tolist()))
        return Snapshot(plan, rows, plan.carry.tolist(), parts)

    # ---- tokens ----------------------------------------------------------------------------------------------------

    def carry(self, snapshot: Snapshot) -> list[Flaw] | None:
        """Every input token must be on the host, or in `dev_out` where the mask says."""
        flaws: list[Flaw] = []
        carry, known, count = snapshot.carry, snapshot.state.known, len(snapshot.carry)
        for place, (row, base, start, end, _) in enumerate(snapshot.parts):
            if place < count and (source := carry[place]) != NO_SOURCE:
                if not 0 <= source < self._end or self._dev_out[source] != base + start:
                    flaws.append(self._misfit(snapshot, place))
            elif known.item(row) < end:
                flaws.append(self._unknown_token(snapshot.plan, place))
        return flaws

    def not_carried(self, snapshot: Snapshot) -> list[Flaw]:
        """For a program that runs its forward pass without carrying over before it."""
        carried = (place for place, source in enumerate(snapshot.carry) if source != NO_SOURCE)
        return [self._unknown_token(snapshot.plan, place) for place in carried]

    def sampled(self, snapshot: Snapshot, slot: int) -> None:
        """The step leaves its tokens in `dev_out` of a slot."""
        plan = snapshot.plan
        if plan.sampled is plan.rows and plan.sampled_ends is plan.ends:
            numbers = [base + end for _, base, _, end, _ in snapshot.parts]
        else:
            bases = {row: base for row, base, *_ in snapshot.parts}
            pairs = zip(plan.sampled.tolist(), plan.sampled_ends.tolist(), strict=True)
            numbers = [bases[row] + at for row, at in pairs]
        seats = self._seats
        self._dev_out[slot * seats : (slot + 1) * seats] = numbers + [NOBODY] * (seats - len(numbers))
        self._dev_out_step[slot] = plan.step

    # ---- KV --------------------------------------------------------------------------------------------------------

    def read(self, snapshot: Snapshot, own_too: bool) -> list[Flaw] | None:
        """Each row reads the positions before its queries that it sees, and with `own_too` those of its queries."""
        holds, size, window = self._device.holds, self._size, self._window
        found, wrong = holds.__getitem__, []
        for place, (row, _, start, end, blocks) in enumerate(snapshot.parts):
            seen = 0 if window is None else max(start - window + 1, 0) // size
            upto = end if own_too else start
            full, wanted = upto // size, self._wanted[row]
            if list(map(found, blocks[seen:full])) != wanted[seen:full]:
                wrong += [(place, at, upto) for at in range(seen, full) if holds[blocks[at]] != wanted[at]]
            rest = upto - full * size  # positions of its newest block: filled up to there at least
            if rest and not wanted[full] - size + rest <= holds[blocks[full]] <= wanted[full]:
                wrong.append((place, full, upto))
        if not wrong:
            return None
        flaws = (self._judge(snapshot, place, column, upto) for place, column, upto in wrong)
        return [flaw for flaw in flaws if flaw is not None]

    def write(self, snapshot: Snapshot, is_checked: bool) -> list[Flaw] | None:
        """Each row writes positions starts..ends-1. `is_checked`: what stands before them was just read."""
        holds, writer, size, step = self._device.holds, self._device.writer, self._size, snapshot.plan.step
        holes = [] if is_checked else self._holes(snapshot)
        written: list[int] = []
        for _, base, start, end, blocks in snapshot.parts:
            column = start // size
            block = blocks[column]
            while (column := column + 1) * size < end:
                holds[block] = base + column * size
                writer[block] = step
                written.append(block)
                block = blocks[column]
            holds[block] = base + end
            writer[block] = step
            written.append(block)
        for block in holes:
            holds[block] = NOBODY
        distinct = set(written)
        if NULL_BLOCK in distinct or len(distinct) != len(written):
            holds[NULL_BLOCK] = NOBODY
            return self._collisions(step, written)
        if is_checked and len(snapshot.parts) > 1:
            return self._torn(snapshot, distinct)
        return None

    def offload(self, snapshot: Snapshot) -> None:
        copies = snapshot.plan.offload
        self._host.copy_from(self._device, copies.device, copies.host, snapshot.plan.step)

    def restore(self, snapshot: Snapshot) -> None:
        copies = snapshot.plan.restore
        self._device.copy_from(self._host, copies.host, copies.device, snapshot.plan.step)

    # ---- ends ------------------------------------------------------------------------------------------------------

    def collected(self, snapshot: Snapshot) -> None:
        """Blocks that the step completed may be shared from now on. Only for engines with prefix caching."""
        size, holds = self._size, self._device.holds
        for row, base, start, end, blocks in snapshot.parts:
            for column in range(start // size, end // size):
                block, full = blocks[column], base + (column + 1) * size
                if holds[block] == full:
                    self._device.digests[block] = full, self._digest(snapshot.state, row, column)

    def failed(self, snapshot: Snapshot) -> None:
        """What the step wrote is worth nothing."""
        step, size = snapshot.plan.step, self._seats
        self._device.forget(step)
        self._host.forget(step)
        for slot, writer in enumerate(self._dev_out_step):
            if writer == step:
                self._dev_out[slot * size : (slot + 1) * size] = [NOBODY] * size

    @property
    def num_digests(self) -> int:
        return len(self._device.digests) + len(self._host.digests)

    # ---- judging ---------------------------------------------------------------------------------------------------

    def _unknown_token(self, plan: StepPlan, place: int) -> Flaw:
        token = f"the token of position {plan.starts[place]} of request {plan.requests[place]}"
        text = f"{token} is neither on the host nor carried over"
        return Flaw(FlawKind.UNWRITTEN, Spot(Memory.DEV_IN, plan.slot), text)

    def _misfit(self, snapshot: Snapshot, place: int) -> Flaw:
        """What is wrong with the carry-over of one decode row."""
        plan = snapshot.plan
        source = int(plan.carry[place])
        slot, index = divmod(source, self._config.max_num_seqs)
        request, position = int(plan.requests[place]), int(plan.starts[place])
        wanted = f"row {index} of what the slot sampled is carried over for position {position} of request {request}"
        spot = Spot(Memory.DEV_OUT, slot)
        if not 0 <= source < self._end:
            return Flaw(FlawKind.UNWRITTEN, spot, f"{wanted}, and there is no such row")
        found, writer = self._dev_out[source], self._dev_out_step[slot]
        if found == NOBODY:
            return Flaw(FlawKind.UNWRITTEN, spot, f"{wanted}, and nobody sampled it", writer)
        return Flaw(FlawKind.STALE, spot, f"{wanted}, and it holds {self._name(found)}", writer)

    def _judge(self, snapshot: Snapshot, place: int, column: int, upto: int) -> Flaw | None:
        """What is wrong with a read of one block, if anything is. From then on it counts as right, to be told once."""
        plan, rows = snapshot.plan, snapshot.state
        row, mine, _, _, blocks = snapshot.parts[place]
        request, size, block = int(plan.requests[place]), self._size, blocks[column]
        first = max(int(first_visible(plan, self._config)[place]), column * size)
        end = min(upto, (column + 1) * size)
        if first >= end:
            return None
        found, writer = self._device.holds[block], self._device.writer[block]
        wanted = f"positions {first}..{end - 1} of request {request}"
        if block == NULL_BLOCK:
            return Flaw(FlawKind.UNWRITTEN, Spot(Memory.KV, block), f"{wanted} have no block")
        if found == NOBODY:
            return Flaw(FlawKind.UNWRITTEN, Spot(Memory.KV, block, first % size), f"{wanted} were never written")
        owner, after = divmod(found, self._stride)
        if owner == request and (after - 1) // size == column:
            self._wanted[row][column] = mine + (column + 1) * size
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
                self._wanted[row][column] = found
                return None
        self._device.holds[block] = mine + end
        self._wanted[row][column] = mine + (column + 1) * size
        return stale

    def _holes(self, snapshot: Snapshot) -> list[int]:
        """Blocks that a row starts to write to behind a hole: they do not hold its positions up to there."""
        holds, size = self._device.holds, self._size
        return [
            blocks[start // size]
            for _, base, start, _, blocks in snapshot.parts
            if start % size and holds[blocks[start // size]] != base + start
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

    def _torn(self, snapshot: Snapshot, written: set[int]) -> list[Flaw]:
        """Whole blocks that one row reads while another, in the same forward pass, writes to them."""
        flaws = []
        for _, _, start, _, blocks in snapshot.parts:
            seen = 0 if self._window is None else max(start - self._window + 1, 0) // self._size
            for block in written.intersection(blocks[seen : start // self._size]):
                text = "one row of the step writes to it and another reads it"
                flaws.append(Flaw(FlawKind.COLLISION, Spot(Memory.KV, block), text, snapshot.plan.step))
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
        self.holds = [NOBODY] * (num_blocks + 1)
        self.writer = [NO_STEP] * (num_blocks + 1)
        self.digests: dict[int, tuple[int, int]] = {}

    def copy_from(self, other: _Blocks, sources: IndexArray, targets: IndexArray, step: int) -> None:
        found = [(other.holds[source], other.digests.get(source)) for source in sources.tolist()]
        for target, (number, digest) in zip(targets.tolist(), found, strict=True):
            self.holds[target], self.writer[target] = number, step
            if digest is not None:
                self.digests[target] = digest

    def forget(self, step: int) -> None:
        """What a step wrote is gone."""
        for block, writer in enumerate(self.writer):
            if writer == step:
                self.holds[block] = NOBODY
