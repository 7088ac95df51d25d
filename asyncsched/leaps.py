"""Leaps: a scheduler moved past plans of which everything is known, at once.

`stretch` says which plans it would make one after the other, and `advance` passes some of them. Afterwards the
scheduler is in the state that planning and committing them one by one would have left, to the block and to the line of
the decision log. These functions belong to the scheduler and write its state; they decide nothing that it would not.

With `depth` steps in flight, the first `depth - 1` commits of a stretch are of plans made before it. They are committed
as ever, since they may hold prefills and last tokens. Rows that reach their length limit later end on the way.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from asyncsched.decisions import describe
from asyncsched.plan import NO_SOURCE, StepOutput, StepPlan
from asyncsched.request import Finished, TokenArray
from asyncsched.scheduler import Scheduler
from asyncsched.stretch import Event, Passed, Repeated, Stretch, affordable, crossings, grow_and_share


def stretch(scheduler: Scheduler, slots: Sequence[int]) -> Stretch | None:
    """The coming plans that only decode, if there are two or more. `slots` is the free I/O slot, then those of the
    steps in flight: `depth - 1` of them, or there is nothing to ask."""
    rows, residency = scheduler._decode, scheduler.residency
    if not len(rows) or scheduler._prefilling or scheduler._paused or residency.has_copies:
        return None
    config, r, n = scheduler.config, scheduler.rows, len(rows)
    if n > config.max_num_batched_tokens or config.sliding_window is not None or _may_admit(scheduler, n):
        return None
    if True in r.scrutinise[rows].tobytes():
        return None
    starts = r.planned[rows]
    left = r.last_end[rows] - starts
    ahead, together, most = len(slots) - 1, int(np.minimum.reduce(left)), int(np.maximum.reduce(left))
    can_pass_ends = not (config.enable_prefix_caching or scheduler._waiting) and together >= ahead
    if can_pass_ends and n * (most // config.block_size + 1) <= residency.pool.available:
        steps = most
    else:  # without a commit of somebody's last token
        steps = affordable(residency, rows, starts, min(together, together - 1 + ahead))
    if steps < 2:
        return None
    carry = r.source[rows]
    carry[r.sampled_at[rows] <= scheduler._settled] = NO_SOURCE
    return Stretch(
        scheduler._next_step,
        steps,
        together,
        rows,
        r.request[rows],
        starts,
        left,
        carry,
        scheduler._slot_base,
        tuple(slots),
        config.padded,
    )


def advance(
    scheduler: Scheduler,
    stretch: Stretch,
    steps: int,
    in_flight: Sequence[StepPlan],
    tokens: Sequence[TokenArray],
    token: int,
    last_tokens: TokenArray,
) -> Passed:
    """Does what `steps` times planning and committing the oldest does, for the stretch just asked for.

    in_flight    the uncommitted plans, oldest first
    tokens       what those of them sampled that are committed now; ends no row of the stretch
    token        what every step of the stretch samples for every row; no stop token of theirs
    last_tokens  int32[n], what a row samples instead where it reaches its length limit
    """
    r, residency, rows, starts = scheduler.rows, scheduler.residency, stretch.rows, stretch.starts
    if not 1 <= steps <= stretch.steps or True in (r.stop_token[rows] == token).tobytes():
        raise ValueError(f"{steps} steps of {stretch.steps} with token {token}")
    ahead = len(in_flight)
    early = min(steps, ahead)
    outputs: list[StepOutput] = []
    most_held = 0
    for place in range(early):
        _pass(scheduler, stretch, place, place + 1)
        lacks = residency.lacks_block(rows, starts + place if place else starts)
        if True in lacks.tobytes():
            residency.grow(rows[lacks])
        most_held = max(most_held, residency.pool.num_held)
        outputs.append(scheduler.commit(in_flight[place], tokens[place]))
    if scheduler._decode is not rows:
        raise ValueError("a row of the stretch ended within it")
    commits = steps - early
    passage = _Passage(scheduler, stretch, steps, ahead, token, last_tokens)
    passage.most_held = most_held
    repeated = passage.commit(commits) if commits else []
    passage.leave()
    newest = outputs[-1] if outputs else None
    if repeated:
        final = repeated.pop()
        newest = StepOutput(scheduler._settled, final.requests, final.tokens, final.finished)
        if final.steps > 1:
            repeated.append(final._replace(steps=final.steps - 1, finished=()))
    assert newest is not None  # something was committed
    left = [stretch.plan(place) for place in range(commits, steps)] if ahead else []
    return Passed(tuple(outputs), tuple(repeated), newest, (*in_flight[early:], *left), passage.most_held)


class _Passage:
    """The part of a stretch that commits its own plans. Arrays are of the rows that have not ended."""

    def __init__(
        self, scheduler: Scheduler, stretch: Stretch, steps: int, ahead: int, token: int, last_tokens: TokenArray
    ) -> None:
        self.scheduler, self.stretch, self.steps, self.ahead, self.token = scheduler, stretch, steps, ahead, token
        self.rows, self.requests, self.starts, self.left = stretch.rows, stretch.requests, stretch.starts, stretch.left
        self.last_tokens = last_tokens
        self.most_held = 0
        self._planned = min(steps, ahead)
        self._entries: list[int] = []  # by row of the stretch: the first free entry of its table
        self._events: list[Event] = []  # blocks still to be taken, in order

    def commit(self, commits: int) -> list[Repeated]:
        """Plans all steps, and commits the first of them."""
        scheduler, stretch = self.scheduler, self.stretch
        r, residency = scheduler.rows, scheduler.residency
        repeated: list[Repeated] = []
        done = 0
        if residency.config.enable_prefix_caching:
            self._write(commits)
            _pass(scheduler, stretch, self._planned, self.steps)
            grow_and_share(residency, self.rows, self.starts, self.ahead, self.steps, commits)
            self.most_held = max(self.most_held, residency.pool.num_held)
        else:
            ends = [self.steps] * len(self.rows)
            if self.steps > stretch.together:
                ends = np.minimum(self.left, self.steps).tolist()
            self._events = crossings(r, self.rows, self.starts, ends)
            self._entries = (r.table_base[self.rows] + r.num_blocks[self.rows]).tolist() if self._events else []
            if commits >= stretch.together:
                for limit in sorted({left for left in self.left.tolist() if left <= commits}):
                    repeated.append(self._end_rows(limit, limit - done))
                    done = limit
            self._plan_until(self.steps)
            self._write(commits)
        scheduler._settled = stretch.step + commits - 1
        residency.passed(scheduler._settled)
        if done < commits:
            sampled = np.full(len(self.rows), self.token, dtype=np.int32)
            repeated.append(Repeated(self.requests, commits - done, sampled, ()))
        return repeated

    def leave(self) -> None:
        """All steps are planned: what the scheduler knows of those that are not committed."""
        scheduler, stretch, r, rows, starts = self.scheduler, self.stretch, self.scheduler.rows, self.rows, self.starts
        last = stretch.step + self.steps - 1
        sources = stretch.sources[stretch.slots[(self.steps - 1) % len(stretch.slots)]]
        if self.steps <= stretch.together:
            r.planned[rows] = ends = starts + self.steps
            r.last_step[rows] = r.sampled_at[rows] = last
            r.source[rows] = sources[: len(rows)]
        else:
            planned = np.minimum(self.left, self.steps)
            r.planned[rows] = ends = starts + planned
            r.last_step[rows] = r.sampled_at[rows] = planned + (stretch.step - 1)
            newest = rows[self.left >= self.steps]
            r.source[newest] = sources[: len(newest)]
        scheduler._next_step = last + 1
        if self.steps >= stretch.together:
            scheduler._give_up_seats(rows, ends)

    def _end_rows(self, limit: int, steps: int) -> Repeated:
        """Commits as many plans of the stretch as `limit`, the last `steps` of them now: some rows end with that."""
        scheduler, r, step = self.scheduler, self.scheduler.rows, self.stretch.step + limit - 1
        self._plan_until(limit + self.ahead)
        scheduler._settled = step
        leaving = self.left == limit
        finished: list[Finished] = []
        for who in leaving.nonzero()[0].tolist():
            row, start = self.rows.item(who), self.starts.item(who)
            end = start + limit
            r.tokens[row, start + 1 : end] = self.token
            r.tokens[row, end] = self.last_tokens[who]
            r.computed[row], r.known[row], r.last_step[row] = end, end + 1, step
            finished.append(scheduler._end_of(row, end))
        sampled = np.where(leaving, self.last_tokens, np.int32(self.token))
        repeated = Repeated(self.requests, steps, sampled, tuple(finished))
        stay = ~leaving
        self.rows, self.requests, self.starts = self.rows[stay], self.requests[stay], self.starts[stay]
        self.left, self.last_tokens = self.left[stay], self.last_tokens[stay]
        return repeated

    def _plan_until(self, place: int) -> None:
        """The plans before `place` are made, and take their blocks."""
        _pass(self.scheduler, self.stretch, self._planned, place)
        self._planned = place
        events, r = self._events, self.scheduler.rows
        count = len(events) if place == self.steps else bisect_left(events, (place,))
        if count:
            residency, entries = self.scheduler.residency, self._entries
            residency.fill_in([entries[who] + nth for _, who, nth in events[:count]])
            del events[:count]
            planned = place if place <= self.stretch.together else np.minimum(self.left, place)
            have = r.num_blocks[self.rows]
            r.num_blocks[self.rows] = np.maximum(have, r.column_of[self.starts + (planned - 1)] + 1)
        self.most_held = max(self.most_held, self.scheduler.residency.pool.num_held)

    def _write(self, commits: int) -> None:
        """Tokens of rows that go on."""
        r, rows, starts = self.scheduler.rows, self.rows, self.starts
        places: NDArray[np.int64] = (r.token_base[rows] + starts)[:, None] + np.arange(1, commits + 1)
        r.flat_tokens[places] = self.token
        r.computed[rows] = computed = starts + commits
        r.known[rows] = computed + 1


def _pass(scheduler: Scheduler, stretch: Stretch, first: int, last: int) -> None:
    """Plans of the stretch are made; the log says so as if one by one."""
    if scheduler._log is not None:
        scheduler._log += [describe(stretch.plan(place)) for place in range(first, last)]
    scheduler.plans += last - first


def _may_admit(scheduler: Scheduler, num_decodes: int) -> bool:
    """Whether a plan of these decodes would even look at the queue."""
    if not scheduler._waiting or num_decodes >= scheduler.config.max_num_batched_tokens:
        return False
    if scheduler.config.batching == "static":
        return scheduler._next_in_line() is not None
    return len(scheduler._seated) < scheduler.config.max_num_seqs
