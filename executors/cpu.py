"""Lanes of a machine without a GPU: one thread, so every operation has run when it has been enqueued."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from asyncsched.program import Event, Lane
from executors.streams import Transfer

Call = Callable[[], object]


class CpuStream:
    """Any lane: the thread itself."""

    def on(self) -> AbstractContextManager[None]:
        return nullcontext()

    def copy(self, transfer: Transfer) -> None:
        transfer.to.copy_(transfer.source)

    def replay(self, graph: torch.cuda.CUDAGraph) -> None:
        raise NotImplementedError("there are no graphs on a CPU")


class CpuLanes:
    """Runs operations at once. An event is recorded or not; there is nothing to wait for."""

    pinned = False
    graphs = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.timed = False
        self._recorded: set[Event] = set()
        self._spans: list[tuple[int, int]] = []
        self._started = 0

    def stream(self, lane: Lane) -> CpuStream:
        return CpuStream()

    def recorder(self, event: Event, lane: Lane) -> Call:
        return partial(self._recorded.add, event)

    def waiter(self, event: Event, lane: Lane) -> Call:
        return partial(self._require, event)

    def bracket(self, lane: Lane) -> tuple[Call, Call] | None:
        """An operation has run when it has been enqueued, so the host's clock measures it."""
        return (self._start, self._stop) if self.timed else None

    def synchronize(self, event: Event) -> None:
        self._require(event)

    def drain(self) -> None:
        """Whatever was enqueued has run."""

    def take(self) -> list[tuple[int, int]]:
        """The spans of bracketed operations since the last call, in order, for `read`."""
        spans, self._spans = self._spans, []
        return spans

    def clock_error_ns(self) -> int:
        """There is one clock."""
        return 0

    def read(self, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Start and end of each span on the host's clock (ns)."""
        return spans

    def _start(self) -> None:
        self._started = time.perf_counter_ns()

    def _stop(self) -> None:
        self._spans.append((self._started, time.perf_counter_ns()))

    def _require(self, event: Event) -> None:
        if event not in self._recorded:
            raise RuntimeError(f"{event} was never recorded: the program lacks an operation")
