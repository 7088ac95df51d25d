"""Stretches: steps that only decode, so that everything about them but their number follows from the first.

Rows leave a stretch where they reach their length limit; nobody joins. Here is what such plans are, and which blocks
they take. Nothing here knows how long a step takes: who asks decides how many steps are passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from asyncsched.plan import NO_SOURCE, IndexArray, StepOutput, StepPlan
from asyncsched.request import Finished
from asyncsched.residency import Residency
from asyncsched.rows import Rows

Part = tuple[int, int, int, int]
"""Plans `first`..`end - 1` of a stretch have the same `n` rows, and the sum of their `starts`: these four."""


class Stretch(NamedTuple):
    """Plans `step`, `step + 1`, ...: `rows` decode one token each, from positions `starts` on, and nobody else runs.

    steps      so many plans at most
    together   so many of them have all rows
    rows, requests, starts  int64[n], as in the first plan
    left       int64[n], in how many plans each row is: then it has reached its length limit
    carry      int64[n], the carry-over mask of the first plan
    sources    per slot: int64[>= n], where a step in it leaves the tokens of its rows; of slot 0: 0, 1, 2, ...
    slots      the slots the plans take in turn
    padded     bucket and mixed bucket of a plan of so many rows
    """

    step: int
    steps: int
    together: int
    rows: IndexArray
    requests: IndexArray
    starts: IndexArray
    left: IndexArray
    carry: IndexArray
    sources: Sequence[IndexArray]
    slots: tuple[int, ...]
    padded: Callable[[int], tuple[int, int]]

    def plan(self, place: int) -> StepPlan:
        """The plan `place` steps after the first."""
        rows, requests, starts, slots = self.rows, self.requests, self.starts, self.slots
        if place >= self.together:
            who = self.present(place)
            rows, requests, starts = rows[who], requests[who], starts[who]
        n = len(rows)
        starts = starts + place
        ends = starts + 1
        if not place:
            carry = self.carry
        elif len(slots) == 1:
            carry = np.full(n, NO_SOURCE)
        else:
            carry = self.sources[slots[(place - 1) % len(slots)]]
            carry = carry[:n] if place < self.together else carry[np.searchsorted(self.present(place - 1), who)]
        step, slot = self.step + place, slots[place % len(slots)]
        bucket, mixed_bucket = self.padded(n)
        at = self.sources[0][:n]
        return StepPlan(
            step, slot, rows, requests, starts, ends, n, carry, rows, ends, at, n, bucket, mixed_bucket=mixed_bucket
        )

    def present(self, place: int) -> IndexArray:
        """Who is in the plan `place` steps after the first: indices into `rows`."""
        return (self.left > place).nonzero()[0]

    def parts(self, steps: int) -> Iterator[Part]:
        """The first `steps` plans, by who is in them."""
        n, starts = len(self.rows), int(np.add.reduce(self.starts))
        if steps <= self.together:
            yield 0, steps, n, starts
            return
        first = 0
        for left, start in sorted(zip(self.left.tolist(), self.starts.tolist(), strict=True)):
            if left > first:
                end = min(left, steps)
                yield first, end, n, starts
                if end == steps:
                    return
                first = end
            n -= 1
            starts -= start


class Passed(NamedTuple):
    """What a stretch gave: outputs of the plans made before it, then those of its own.

    outputs   in order, one for each of the first commits
    repeated  how many commits followed before the last: each gave a token to all rows of the stretch that are left
    behind    of these, how many were of plans made before the stretch
    finished  who ended with them
    last      the output of the last commit
    in_flight the plans that are left uncommitted
    most_held KV blocks held at most
    """

    outputs: tuple[StepOutput, ...]
    repeated: int
    behind: int
    finished: tuple[Finished, ...]
    last: StepOutput
    in_flight: tuple[StepPlan, ...]
    most_held: int


def affordable(residency: Residency, rows: IndexArray, starts: IndexArray, steps: int) -> int:
    """How many of `steps` steps find the blocks they need, whoever else gives up theirs meanwhile."""
    size, available = residency.config.block_size, residency.pool.available
    if len(rows) * (steps // size + 1) <= available:
        return steps
    events = crossings(residency.rows, rows, starts, [steps] * len(rows))
    return steps if len(events) <= available else events[available][0]


def grow_and_share(
    residency: Residency, rows: IndexArray, starts: IndexArray, ahead: int, steps: int, commits: int
) -> None:
    """Step `place` is planned, then step `place - ahead` is committed: blocks that are taken may hold old prefixes,
    blocks that fill up become shareable, and both in this order."""
    size = residency.config.block_size
    left = size - starts % size  # steps until a block is full
    events = [(place, False, who) for place, who, _ in crossings(residency.rows, rows, starts, [steps] * len(rows))]
    ends = [commits + ahead] * len(rows)
    events += [(place, True, who) for place, who, _ in _repeated((left - 1 + ahead).tolist(), ends, size)]
    for (place, filled), group in groupby(sorted(events), key=itemgetter(0, 1)):
        whose = [who for _, _, who in group]
        if not filled:
            residency.grow(rows[whose])
            continue
        for who in whose:
            residency.share_filled(int(rows[who]), (int(starts[who]) + place - ahead) // size)


Event = tuple[int, int, int]
"""At which step; of whom, an index into the rows of the stretch; and how many of theirs came before it."""


def crossings(rows: Rows, which: IndexArray, starts: IndexArray, ends: list[int]) -> list[Event]:
    """Where rows need another block before the step at which each of them leaves."""
    size = rows.block_size
    room = (rows.num_blocks[which] * size - starts).tolist()  # steps that the blocks suffice for
    return _repeated(room, ends, size)


def _repeated(first: list[int], ends: list[int], period: int) -> list[Event]:
    """Events of i at steps `first[i]`, `first[i] + period`, ..., before `ends[i]`. A batch has few of them."""
    events = [
        (when, who, nth)
        for who, (begin, end) in enumerate(zip(first, ends, strict=True))
        if begin < end
        for nth, when in enumerate(range(begin, end, period))
    ]
    events.sort()
    return events
