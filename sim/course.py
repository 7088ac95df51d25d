"""A stretch of decode steps on the lanes: the arithmetic of `sim/lanes.py` for steps that all have the same operations.

A change to the step program is a change to be made here too. Times are nanoseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate, repeat
from typing import NamedTuple

from sim.costs import Around, DecodePrices


class StepMoments(NamedTuple):
    """When the operations of one step began and ended, and those of the host that followed it: it waited for the oldest
    step until `collected`, and had committed it at `committed`."""

    begun: int
    planned: int
    filled: int
    copied: int
    h2d: int
    launched: int
    started: int
    computed: int
    read: int
    d2h: int
    collected: int
    committed: int


class Course:
    """Where the lanes are, and what happened on the way: each step is launched, then the oldest is committed.

    host, h2d, compute, d2h  when each lane is free
    gate      no forward pass before this
    idle      time without work before the next launch
    last      when the newest forward pass ended
    flying    of each step in flight, oldest first: when its output is back, and what committing it takes
    launches  when the launch of each step ended
    busy, waited  in the order of LANES and IDLE_CAUSES
    times     receives the moments of each step, where somebody wants them
    """

    def __init__(
        self,
        free: Sequence[int],
        gate: int,
        idle: int,
        last: int,
        sync: int,
        flying: Iterable[tuple[int, int]],
        times: list[StepMoments] | None = None,
    ) -> None:
        self.host, self.h2d, self.compute, self.d2h = free
        self.gate, self.idle, self.last, self.sync = gate, idle, last, sync
        self.flying = deque(flying)
        self.launches: list[int] = []
        self.busy, self.waited = [0, 0, 0, 0], [0, 0, 0, 0]
        self.times = times

    def step(self, arounds: Iterable[Around], forwards: Iterable[int], until: float) -> None:
        """Takes the steps one by one, as long as they begin before `until`."""
        flying, launches, times, sync = self.flying, self.launches, self.times, self.sync
        host, h2d, compute, d2h = self.host, self.h2d, self.compute, self.d2h
        gate, idle, last = self.gate, self.idle, self.last
        host_busy, h2d_busy, compute_busy, d2h_busy = self.busy
        host_wait, h2d_wait, sync_wait, no_work = self.waited
        for (plan, fill, launch, copy_in, copy_out, commit), forward in zip(arounds, forwards, strict=False):
            if host >= until:
                break
            begun = host
            host += plan + fill
            filled = host
            copied = host if host > h2d else h2d
            h2d = copied + copy_in
            host += launch
            launched = host
            launches.append(host)
            start = gate if gate > compute else compute
            if h2d > start:
                start = h2d
            if host > start:
                start = host
            if start > last:  # as LaneAccount.step has it
                free = min(last + sync, start)
                ready = min(max(free, host), start)
                unused = min(idle, ready - free)
                sync_wait += free - last
                no_work += unused
                host_wait += ready - free - unused
                h2d_wait += start - ready
            idle = 0
            last = compute = start + forward
            gate = compute + sync
            read = compute if compute > d2h else d2h
            d2h = read + copy_out
            flying.append((d2h, commit))
            done, commit = flying.popleft()
            if done > host:
                host = done
            host += commit
            host_busy += launched - begun + commit
            h2d_busy += copy_in
            compute_busy += forward
            d2h_busy += copy_out
            if times is not None:
                planned, collected = begun + plan, host - commit
                times.append(
                    StepMoments(
                        begun, planned, filled, copied, h2d, launched, start, compute, read, d2h, collected, host
                    )
                )
        self.host, self.h2d, self.compute, self.d2h = host, h2d, compute, d2h
        self.gate, self.idle, self.last = gate, idle, last
        self.busy[:] = host_busy, h2d_busy, compute_busy, d2h_busy
        self.waited[:] = host_wait, h2d_wait, sync_wait, no_work

    def take(self, prices: DecodePrices, until: float) -> None:
        """Takes steps of these prices, in whichever way is the quickest."""
        arounds, forwards = prices
        if len(arounds) > 1:
            self.step(arounds, forwards, until)
            return
        around, shortest = arounds[0], min(forwards)
        if not self.flying:
            self.step(arounds, forwards[:1], until)
            if self.host < until:
                self.take_turns(around, forwards[1:], until)
            return
        if not self.is_full(around, shortest):
            few = len(self.flying) + 1
            self.step(repeat(around), forwards[:few], until)
            forwards = forwards[few:]
            if not self.is_full(around, shortest):
                self.step(repeat(around), forwards, until)
                return
        self.glide(around, forwards, until)

    def take_turns(self, around: Around, forwards: Sequence[int], until: float) -> None:
        """Takes the steps at once where nothing is in flight beside them, as far as they begin before `until`: lanes
        wait for each other in turn. Behind a step of the same prices."""
        plan, fill, launch, copy_in, copy_out, commit = around
        sync, before, after = self.sync, plan + fill + launch, copy_out + commit
        gap = after + plan + fill + max(launch, copy_in)  # between two forward passes
        if sync > gap:  # it holds the lane for longer
            self.step(repeat(around), forwards, until)
            return
        ends = list(accumulate([forward + gap for forward in forwards], initial=self.compute))
        begins = [end + after for end in ends]
        count = bisect_left(begins, until, 0, len(forwards))
        if not count:
            return
        self.launches += [begun + before for begun in begins[:count]]
        if self.times is not None:
            for begun, computed, committed in zip(begins[:count], ends[1:], begins[1:], strict=False):
                filled, started, back = begun + plan + fill, begun + (gap - after), computed + copy_out
                self.times.append(
                    StepMoments(
                        *(begun, begun + plan, filled, filled, filled + copy_in, filled + launch),
                        *(started, computed, computed, back, back, committed),
                    )
                )
        enqueued = max(after + before, sync)  # when the lane waits for the host no longer
        self._count(count, before + commit, copy_in, sum(forwards[:count]), copy_out)
        self.waited[0] += (enqueued - sync) * count
        self.waited[1] += (gap - enqueued) * count
        self.waited[2] += sync * count
        self.host, self.h2d = begins[count], begins[count - 1] + plan + fill + copy_in
        self._leave_at(ends[count], copy_out)

    def is_full(self, around: Around, shortest: int) -> bool:
        """Whether the compute lane never waits and the host always does, as long as steps have these prices and no
        forward pass is shorter: then every time follows from the sum of the forward passes before it. Something is in
        flight, so the lane was held last by a forward pass, and has not been without work since."""
        plan, fill, launch, copy_in, copy_out, commit = around
        spacing = shortest + self.sync  # between the ends of two steps, at least
        ready = plan + fill + max(launch, copy_in)  # after a step begins, its inputs are there
        if self.h2d > self.host + plan + fill:
            return False
        if spacing < max(copy_out, commit + ready, self.d2h - self.compute):
            return False
        if copy_out + commit + ready > len(self.flying) * spacing + self.sync:
            return False
        begun, gate = self.host, self.gate
        for done, committing in self.flying:
            if begun + ready > min(gate, done):
                return False
            begun, gate = done + committing, gate + spacing
        return begun + ready <= min(gate, self.compute + spacing + copy_out)

    def glide(self, around: Around, forwards: Sequence[int], until: float) -> None:
        """Takes the steps at once, as far as they begin before `until`. Ask `is_full` first."""
        plan, fill, launch, copy_in, copy_out, commit = around
        sync, flying, ahead = self.sync, self.flying, len(self.flying)
        ends = list(accumulate([forward + sync for forward in forwards] if sync else forwards, initial=self.compute))
        begins = [self.host, *[done + committing for done, committing in flying]]
        after = copy_out + commit
        begins += [end + after for end in ends[1:]]
        count = bisect_left(begins, until, 0, len(forwards))
        if not count:
            return
        before = plan + fill + launch
        self.launches += [begun + before for begun in begins[:count]]
        if self.times is not None:
            commits = [committing for _, committing in flying] + [commit] * count
            for place in range(count):
                begun, started, computed = begins[place], ends[place] + sync, ends[place + 1]
                filled, committed = begun + plan + fill, begins[place + 1]
                launched, collected = filled + launch, committed - commits[place]
                self.times.append(
                    StepMoments(
                        *(begun, begun + plan, filled, filled, filled + copy_in, launched),
                        *(started, computed, computed, computed + copy_out, collected, committed),
                    )
                )
        commits = [committing for _, committing in flying][:count]
        self._count(count, before, copy_in, sum(forwards[:count]), copy_out)
        self.busy[0] += sum(commits) + commit * (count - len(commits))
        self.waited[2] += sync * count
        self.host = begins[count]
        self.h2d = begins[count - 1] + plan + fill + copy_in
        self._leave_at(ends[count], copy_out)
        flying.extend([(end + copy_out, commit) for end in ends[max(count - ahead, 0) + 1 : count + 1]])
        while len(flying) > ahead:
            flying.popleft()

    def _count(self, count: int, host: int, copy_in: int, forwards: int, copy_out: int) -> None:
        """So many steps of these prices; `forwards` is the sum of theirs."""
        busy = self.busy
        busy[0] += host * count
        busy[1] += copy_in * count
        busy[2] += forwards
        busy[3] += copy_out * count

    def _leave_at(self, computed: int, copy_out: int) -> None:
        """The newest forward pass ended then, and its output is copied behind it."""
        self.compute = self.last = computed
        self.gate, self.d2h = computed + self.sync, computed + copy_out
