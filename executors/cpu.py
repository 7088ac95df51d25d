"""Lanes of a machine without a GPU: one thread, so every operation has run when it has been enqueued."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from asyncsched.program import Event, Lane


class CpuLanes:
    """Runs operations at once. An event is recorded or not; there is nothing to wait for."""

    pinned = False
    graphs = False

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._recorded: set[Event] = set()
        self._spans: list[tuple[int, int]] = []

    @contextmanager
    def on(self, lane: Lane) -> Iterator[None]:
        """Operations inside run on the lane, and their span is measured."""
        start = time.perf_counter_ns()
        yield
        self._spans.append((start, time.perf_counter_ns()))

    def record(self, event: Event, lane: Lane) -> None:
        self._recorded.add(event)

    def wait(self, event: Event, lane: Lane) -> None:
        self._require(event)

    def synchronize(self, event: Event) -> None:
        self._require(event)

    def drain(self) -> None:
        """Whatever was enqueued has run."""

    def take(self) -> list[tuple[int, int]]:
        """The spans of each `on` since the last call, in order, for `read`."""
        spans, self._spans = self._spans, []
        return spans

    def read(self, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Start and end of each span on the host's clock (ns)."""
        return spans

    def _require(self, event: Event) -> None:
        if event not in self._recorded:
            raise RuntimeError(f"{event} was never recorded: the program lacks an operation")
