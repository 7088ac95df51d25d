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
from itertools import groupby
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from asyncsched.decisions import describe
from asyncsched.plan import NO_SOURCE, StepOutput, StepPlan
from asyncsched.request import Finished, TokenArray
from asyncsched.scheduler import Scheduler
from asyncsched.stretch import Event, Passed, Stretch, affordable, crossings, grow_and_share

NOBODY: tuple[Finished, ...] = ()


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
    r, rows = scheduler.rows, stretch.rows
    if not 1 <= steps <= stretch.steps or True in (r.stop_token[rows] == token).tobytes():
        raise ValueError(f"{steps} steps of {stretch.steps} with token {token}")
    ahead = len(in_flight)
    commits = steps - ahead  # of the stretch's own plans
    behind = ahead if commits > 0 and _is_led_up_to(scheduler, stretch, in_flight, tokens, token) else 0
    passage = _Passage(scheduler, stretch, steps, ahead, behind, token, last_tokens)
    outputs: list[StepOutput] = []
    if not behind:
        for place in range(min(steps, ahead)):
            outputs.append(passage.commit_early(place, in_flight[place], tokens[place]))
        if scheduler._decode is not rows:
            raise ValueError("a row of the stretch ended within it")
    last = passage.commit(in_flight[:behind], commits) if commits > 0 else outputs.pop()
    passage.leave()
    left = [stretch.plan(place) for place in range(max(commits, 0), steps)] if ahead else []
    repeated = behind + commits - 1 if commits > 0 else 0
    return Passed(
        tuple(outputs), repeated, behind, tuple(passage.finished), last, (*in_flight[steps:], *left), passage.most_held
    )


def _is_led_up_to(
    scheduler: Scheduler, stretch: Stretch, in_flight: Sequence[StepPlan], tokens: Sequence[TokenArray], token: int
) -> bool:
    """Whether the plans in flight are like those of the stretch: a token for each of its rows, nobody else, no end."""
    if scheduler.config.enable_prefix_caching:
        return False
    n, rows = len(stretch.rows), stretch.rows
    for plan, sampled in zip(in_flight, tokens, strict=True):
        if len(plan.rows) != n or len(sampled) != n:
            return False
        if False in (plan.sampled == rows).tobytes() or False in (sampled == token).tobytes():
            return False
    return True


class _Passage:
    """The part of a stretch that commits its own plans, and `behind` plans before them that are like them."""

    def __init__(
        self,
        scheduler: Scheduler,
        stretch: Stretch,
        steps: int,
        ahead: int,
        behind: int,
        token: int,
        last_tokens: TokenArray,
    ) -> None:
        self.scheduler, self.stretch, self.steps, self.ahead, self.behind = scheduler, stretch, steps, ahead, behind
        self.token, self.last_tokens = token, last_tokens
        self.rows, self.starts, self.left = stretch.rows, stretch.starts, stretch.left  # of those who have not ended
        self.most_held = 0
        self.finished: list[Finished] = []  # before the last commit
        self._planned = 0
        self._entries: list[int] = []  # by row of the stretch: the first free entry of its table
        self._events: list[Event] = []  # blocks still to be taken, in order
        self._grows = False  # a row gets blocks by events

    def commit_early(self, place: int, plan: StepPlan, tokens: TokenArray) -> StepOutput:
        """Plans the step at `place`, and commits one that was planned before the stretch."""
        scheduler, residency, rows = self.scheduler, self.scheduler.residency, self.stretch.rows
        self._pass(place + 1)
        lacks = residency.lacks_block(rows, self.stretch.starts + place if place else self.stretch.starts)
        if True in lacks.tobytes():
            residency.grow(rows[lacks])
        self.most_held = max(self.most_held, residency.pool.num_held)
        return scheduler.commit(plan, tokens)

    def commit(self, led_up: Sequence[StepPlan], commits: int) -> StepOutput:
        """Plans all steps, commits plans that led up to the stretch and the first of its own. What the last gave."""
        scheduler, stretch, steps = self.scheduler, self.stretch, self.steps
        r, residency, rows, starts = scheduler.rows, scheduler.residency, stretch.rows, stretch.starts
        requests, tokens, ended = stretch.requests, np.full(len(rows), self.token, dtype=np.int32), NOBODY
        if residency.config.enable_prefix_caching:
            self._write(commits)
            self._pass(steps)
            grow_and_share(residency, rows, starts, self.ahead, steps, commits)
            self.most_held = max(self.most_held, residency.pool.num_held)
        else:
            ends = [steps] * len(rows) if steps <= stretch.together else np.minimum(stretch.left, steps).tolist()
            self._events = crossings(r, rows, starts, ends)
            self._grows = bool(self._events)
            if self._grows:
                self._entries = (r.table_base[rows] + r.num_blocks[rows]).tolist()
            for place, plan in enumerate(led_up):
                self._plan_until(place + 1)
                residency.committed(plan)
            if commits >= stretch.together:
                ended = self._end_rows(commits)
                there = stretch.left >= commits
                requests, tokens = requests[there], np.where(stretch.left == commits, self.last_tokens, tokens)[there]
                stay = stretch.left > commits
                self.rows, self.starts, self.left = rows[stay], starts[stay], stretch.left[stay]
                scheduler._decode = self.rows
            self._plan_until(steps)
            self._write(commits)
        scheduler._settled = stretch.step + commits - 1
        residency.passed(scheduler._settled)
        return StepOutput(scheduler._settled, requests, tokens, ended)

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
        if self._grows:
            r.num_blocks[rows] = np.maximum(r.num_blocks[rows], r.column_of[ends - 1] + 1)
        scheduler._next_step = last + 1
        if self.steps >= stretch.together:
            scheduler._give_up_seats(rows, ends)

    def _end_rows(self, commits: int) -> tuple[Finished, ...]:
        """Commits the first plans, with which some rows reach their limit. The notices of the last one."""
        scheduler, stretch, r, behind = self.scheduler, self.stretch, self.scheduler.rows, self.behind
        rows, starts = stretch.rows.tolist(), stretch.starts.tolist()
        ending = sorted([(left, who) for who, left in enumerate(stretch.left.tolist()) if left <= commits])
        notices: list[Finished] = []
        for limit, group in groupby(ending, key=itemgetter(0)):
            self.finished += notices
            notices = []
            self._plan_until(limit + self.ahead)
            scheduler._settled = step = stretch.step + limit - 1
            for _, who in group:
                row, start = rows[who], starts[who]
                end = start + limit
                r.tokens[row, start + 1 - behind : end] = self.token
                r.tokens[row, end] = self.last_tokens[who]
                r.computed[row], r.known[row], r.last_step[row] = end, end + 1, step
                r.num_blocks[row] = max(r.num_blocks.item(row), r.column_of.item(end - 1) + 1)
                scheduler._finishing[row] = scheduler._seated.pop(row)
                notices.append(scheduler._end_of(row, end))
        if limit < commits:
            self.finished += notices
            notices = []
        return tuple(notices)

    def _plan_until(self, place: int) -> None:
        """The plans before `place` are made, and take their blocks."""
        self._pass(place)
        events, residency = self._events, self.scheduler.residency
        if events and events[0][0] < place:
            count = len(events) if place == self.steps else bisect_left(events, (place,))
            residency.fill_in([self._entries[who] + nth for _, who, nth in events[:count]])
            del events[:count]
        self.most_held = max(self.most_held, residency.pool.num_held)

    def _write(self, commits: int) -> None:
        """Tokens of rows that go on."""
        r, rows, starts = self.scheduler.rows, self.rows, self.starts
        places: NDArray[np.int64] = (r.token_base[rows] + starts)[:, None] + np.arange(1 - self.behind, commits + 1)
        r.flat_tokens[places] = self.token
        r.computed[rows] = computed = starts + commits
        r.known[rows] = computed + 1

    def _pass(self, place: int) -> None:
        """The plans before `place` are made; the log says so as if one by one."""
        if self.scheduler._log is not None:
            self.scheduler._log += [describe(self.stretch.plan(at)) for at in range(self._planned, place)]
        self.scheduler.plans += place - self._planned
        self._planned = place


def _may_admit(scheduler: Scheduler, num_decodes: int) -> bool:
    """Whether a plan of these decodes would even look at the queue."""
    if not scheduler._waiting or num_decodes >= scheduler.config.max_num_batched_tokens:
        return False
    if scheduler.config.batching == "static":
        return scheduler._next_in_line() is not None
    return len(scheduler._seated) < scheduler.config.max_num_seqs
