"""Lanes of a GPU: three non-default streams, and the program's events.

Nothing here blocks the host but `synchronize`. Timing events bracket each operation; they are read once the step was
collected, when reading them waits for nothing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import torch

from asyncsched.program import Event, Lane
from executors.cudart import BY_ADDRESS, NO_FLAGS, Runtime, loaded_library
from executors.streams import Transfer

DEVICE_LANES = (Lane.H2D, Lane.COMPUTE, Lane.D2H)
CLOCK_READINGS = 9
MAX_ORIGIN_AGE_MS = 1000.0  # elapsed times are single precision: a near origin keeps them below a microsecond
Call = Callable[[], object]
TimedPair = tuple[torch.cuda.Event, torch.cuda.Event]


class CudaStream:
    """One lane's stream. Copies and graphs go straight to the runtime."""

    def __init__(self, stream: torch.cuda.Stream, runtime: Runtime) -> None:
        self._stream = stream
        self._handle = stream.cuda_stream
        self._copy, self._launch = runtime.copy, runtime.launch
        self._launches: dict[torch.cuda.CUDAGraph, Call] = {}

    def on(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = torch.cuda.stream(self._stream)
        return context

    def copy(self, transfer: Transfer) -> None:
        _, _, to, source, num_bytes = transfer
        self._copy(to, source, num_bytes, BY_ADDRESS, self._handle)

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        launch = self._launches.get(graph)
        if launch is None:
            self._replay_first(graph)
        else:
            launch()

    def _replay_first(self, graph: torch.cuda.CUDAGraph) -> None:
        """Through torch, which moves its generator on where the graph draws from it: such a graph stays with torch."""
        generator = torch.cuda.default_generators[self._stream.device_index]
        drawn = generator.get_offset()
        self._replay_by_torch(graph)
        if generator.get_offset() != drawn:
            self._launches[graph] = partial(_replay, self._stream, graph)
        else:
            self._launches[graph] = partial(self._launch, graph.raw_cuda_graph_exec(), self._handle)

    def _replay_by_torch(self, graph: torch.cuda.CUDAGraph) -> None:
        _replay(self._stream, graph)


def _replay(stream: torch.cuda.Stream, graph: torch.cuda.CUDAGraph) -> None:
    """Through torch. It is no method, as what a lane keeps must not keep the lane, which has the graphs' memory."""
    with torch.cuda.stream(stream):
        graph.replay()


class CudaLanes:
    """Streams by lane and events by name, on the current device."""

    pinned = True
    graphs = True

    def __init__(self, device: torch.device, *, timed: bool = False) -> None:
        self.device = device
        self.streams = {lane: torch.cuda.Stream(device) for lane in DEVICE_LANES}
        self._runtime = Runtime(loaded_library())
        self._lanes = {lane: CudaStream(stream, self._runtime) for lane, stream in self.streams.items()}
        self._events: dict[Event, torch.cuda.Event] = {}
        self.timed = timed
        self._pending: list[TimedPair] = []
        self._spare: deque[TimedPair] = deque()
        self._origin = torch.cuda.Event(enable_timing=True)
        self._origin.record(self.streams[Lane.COMPUTE])
        self._origin.synchronize()
        self._origin_ns = time.perf_counter_ns()

    def stream(self, lane: Lane) -> CudaStream:
        return self._lanes[lane]

    def recorder(self, event: Event, lane: Lane) -> Call:
        return partial(self._runtime.record, self._event(event).cuda_event, self.streams[lane].cuda_stream)

    def waiter(self, event: Event, lane: Lane) -> Call:
        return partial(self._runtime.wait, self.streams[lane].cuda_stream, self._event(event).cuda_event, NO_FLAGS)

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
            made = self._events[event] = torch.cuda.Event()
            made.record(self.streams[Lane.COMPUTE])  # torch makes an event's handle when it is recorded first
        return self._events[event]

    def _start(self, stream: torch.cuda.Stream) -> None:
        pair = self._spare.popleft() if self._spare else _timed_pair()
        pair[0].record(stream)
        self._pending.append(pair)

    def _stop(self, stream: torch.cuda.Stream) -> None:
        self._pending[-1][1].record(stream)


def _timed_pair() -> TimedPair:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
