"""Stretches: steps that decode the same rows, so that everything about them but their number follows from the first.

The scheduler says how many such plans it would make one after the other, and can then be moved past some of them at
once. Afterwards it is in the state that planning and committing them one by one would have left, to the block and to
the line of the decision log. Nothing here knows how long a step takes: who asks decides how many steps are passed.

With `depth` steps in flight, the first `depth - 1` commits of a stretch are of plans made before it. They are
committed as ever, since they may hold prefills and last tokens; block allocations keep their order around them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncsched.plan import NO_SOURCE, IndexArray, StepOutput, StepPlan
from asyncsched.residency import Residency
from asyncsched.rows import Rows


class Stretch(NamedTuple):
    """Plans `step`, `step + 1`, ...: `rows` decode one token each, from positions `starts` on, and nobody else runs.

    steps      so many plans at most; at the last one a row may reach its length limit
    rows, requests, starts  int64[n], as in the first plan
    carry      int64[n], the carry-over mask of the first plan
    sources    per slot: int64[>= n], where a step in it leaves the tokens of its rows; of slot 0: 0, 1, 2, ...
    slots      the slots the plans take in turn
    bucket, mixed_bucket  of each plan
    """

    step: int
    steps: int
    rows: IndexArray
    requests: IndexArray
    starts: IndexArray
    carry: IndexArray
    sources: Sequence[IndexArray]
    slots: tuple[int, ...]
    bucket: int
    mixed_bucket: int = 0

    def plan(self, place: int) -> StepPlan:
        """The plan `place` steps after the first."""
        n, slots = len(self.rows), self.slots
        starts = self.starts + place
        ends = starts + 1
        if not place:
            carry = self.carry
        elif len(slots) == 1:
            carry = np.full(n, NO_SOURCE)
        else:
            carry = self.sources[slots[(place - 1) % len(slots)]][:n]
        step, slot = self.step + place, slots[place % len(slots)]
        at = self.sources[0][:n]
        return StepPlan(
            step,
            slot,
            self.rows,
            self.requests,
            starts,
            ends,
            n,
            carry,
            self.rows,
            ends,
            at,
            n,
            self.bucket,
            mixed_bucket=self.mixed_bucket,
        )


class Passed(NamedTuple):
    """What a stretch gave: outputs of the plans made before it, then one token per row for each of `commits` steps.

    outputs   in order, one for each of the first commits
    commits   how many commits of the stretch's own plans followed
    last      the output of the last commit, whether it is one of `outputs` or not
    in_flight the plans that are left uncommitted
    most_held KV blocks held at most
    """

    outputs: tuple[StepOutput, ...]
    commits: int
    last: StepOutput
    in_flight: tuple[StepPlan, ...]
    most_held: int


def affordable(residency: Residency, rows: IndexArray, starts: IndexArray, steps: int) -> int:
    """How many of `steps` steps find the blocks they need, whoever else gives up theirs meanwhile."""
    size, available = residency.config.block_size, residency.pool.available
    if len(rows) * (steps // size + 1) <= available:
        return steps
    events = _crossings(residency.rows, rows, starts, steps)
    return steps if len(events) <= available else events[available][0]


def settle(
    residency: Residency, rows: IndexArray, starts: IndexArray, ahead: int, steps: int, commits: int, token: int
) -> None:
    """Steps `ahead`..`steps` - 1 are planned; the first `commits` are committed, and sampled `token` for every row."""
    r = residency.rows
    places: NDArray[np.int64] = (r.token_base[rows] + starts)[:, None] + np.arange(1, commits + 1)
    r.flat_tokens[places] = token
    if residency.config.enable_prefix_caching:
        _grow_and_share(residency, rows, starts, ahead, steps, commits)
    else:
        events = _crossings(r, rows, starts, steps)
        if events:
            have = r.num_blocks[rows]
            ends = (r.table_base[rows] + have).tolist()
            residency.fill_in([ends[who] + nth for _, who, nth in events])
            r.num_blocks[rows] = np.maximum(have, r.column_of[starts + (steps - 1)] + 1)
    computed = starts + commits
    r.computed[rows] = computed
    r.known[rows] = computed + 1


def _grow_and_share(
    residency: Residency, rows: IndexArray, starts: IndexArray, ahead: int, steps: int, commits: int
) -> None:
    """Step `place` is planned, then step `place - ahead` is committed: blocks that are taken may hold old prefixes,
    blocks that fill up become shareable, and both in this order."""
    size = residency.config.block_size
    left = size - starts % size  # steps until a block is full
    events = [(place, False, who) for place, who, _ in _crossings(residency.rows, rows, starts, steps)]
    events += [(place, True, who) for place, who, _ in _repeated((left - 1 + ahead).tolist(), commits + ahead, size)]
    for (place, filled), group in groupby(sorted(events), key=itemgetter(0, 1)):
        whose = [who for _, _, who in group]
        if not filled:
            residency.grow(rows[whose])
            continue
        for who in whose:
            residency.share_filled(int(rows[who]), (int(starts[who]) + place - ahead) // size)


_Event = tuple[int, int, int]
"""At which step; of whom, an index into the rows of the stretch; and how many of theirs came before it."""


def _crossings(rows: Rows, which: IndexArray, starts: IndexArray, steps: int) -> list[_Event]:
    """Where rows need another block in the first `steps` steps."""
    size = rows.block_size
    room = (rows.num_blocks[which] * size - starts).tolist()  # steps that the blocks suffice for
    return _repeated(room, steps, size)


def _repeated(first: list[int], end: int, period: int) -> list[_Event]:
    """Events of i at steps `first[i]`, `first[i] + period`, ..., before `end`. A batch has few of them."""
    events = [
        (when, who, nth)
        for who, begin in enumerate(first)
        if begin < end
        for nth, when in enumerate(range(begin, end, period))
    ]
    events.sort()
    return events
