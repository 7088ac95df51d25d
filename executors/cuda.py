"""Lanes of a GPU: three non-default streams, and the program's events.

Nothing here blocks the host but `synchronize`. Timing events bracket each operation; they are read once the step was
collected, when reading them waits for nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from asyncsched.program import Event, Lane

DEVICE_LANES = (Lane.H2D, Lane.COMPUTE, Lane.D2H)
CLOCK_READINGS = 9
MAX_ORIGIN_AGE_MS = 1000.0  # elapsed times are single precision: a near origin keeps them below a microsecond
Call = Callable[[], object]
TimedPair = tuple[torch.cuda.Event, torch.cuda.Event]


class CudaLanes:
    """Streams by lane and events by name, on the current device."""

    pinned = True
    graphs = True

    def __init__(self, device: torch.device, *, timed: bool = False) -> None:
        self.device = device
        self.streams = {lane: torch.cuda.Stream(device) for lane in DEVICE_LANES}
        self._events: dict[Event, torch.cuda.Event] = {}
        self.timed = timed
        self._pending: list[TimedPair] = []
        self._spare: deque[TimedPair] = deque()
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record(self.streams[Lane.COMPUTE])
        self._origin.synchronize()
        self._origin_ns = time.perf_counter_ns()

    def begin(self) -> torch.cuda.Stream:
        """The caller's stream, for `end`."""
        return torch.cuda.current_stream(self.device)

    def end(self, begun: torch.cuda.Stream) -> None:
        torch.cuda.set_stream(begun)

    def enter(self, lane: Lane) -> Call:
        return partial(torch.cuda.set_stream, self.streams[lane])

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        """Work inside is enqueued on the lane's stream; not measured."""
        with torch.cuda.stream(self.streams[lane]):
            yield

    def recorder(self, event: Event, lane: Lane) -> Call:
        return partial(self._event(event).record, self.streams[lane])

    def waiter(self, event: Event, lane: Lane) -> Call:
        return partial(self.streams[lane].wait_event, self._event(event))

    def bracket(self, lane: Lane) -> tuple[Call, Call] | None:
        if not self.timed:
            return None
        stream = self.streams[lane]
        return partial(self._start, stream), partial(self._stop, stream)

    def synchronize(self, event: Event) -> None:
        self._event(event).synchronize()

    def drain(self) -> None:
        """Waits for everything that was enqueued; after a failure only."""
        for stream in self.streams.values():
            stream.synchronize()

    def take(self) -> list[TimedPair]:
        """The timing events of bracketed operations since the last call, in order, for `read`."""
        pairs, self._pending = self._pending, []
        return pairs

    def read(self, pairs: list[TimedPair]) -> list[tuple[int, int]]:
        """Start and end of each pair on the host's clock (ns). Call it once the step was collected."""
        spans = []
        for start, end in pairs:
            since_ms = self._origin.elapsed_time(start)
            begin = self._origin_ns + round(since_ms * 1e6)
            spans.append((begin, begin + round(start.elapsed_time(end) * 1e6)))
            if since_ms > MAX_ORIGIN_AGE_MS:
                self._origin, self._origin_ns = start, begin
            else:
                self._spare.append((start, end))
        return spans

    def clock_error_ns(self) -> int:
        """What must be added to the times that `read` gives now: clocks of host and device drift apart. Blocks; call it
        while the lanes have nothing to do."""
        errors = []
        for _ in range(CLOCK_READINGS):
            mark = torch.cuda.Event(enable_timing=True)
            mark.record(self.streams[Lane.COMPUTE])
            mark.synchronize()
            now = time.perf_counter_ns()
            self._origin_ns += round(self._origin.elapsed_time(mark) * 1e6)
            self._origin = mark  # a near origin makes the next times exact
            errors.append(now - self._origin_ns)
        return min(errors)  # the one that returned soonest

    def _event(self, event: Event) -> torch.cuda.Event:
        if event not in self._events:
            self._events[event] = torch.cuda.Event()
        return self._events[event]

    def _start(self, stream: torch.cuda.Stream) -> None:
        pair = self._spare.popleft() if self._spare else _timed_pair()
        pair[0].record(stream)
        self._pending.append(pair)

    def _stop(self, stream: torch.cuda.Stream) -> None:
        self._pending[-1][1].record(stream)


def _timed_pair() -> TimedPair:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
