"""What ran when: spans on lanes, measured or simulated, in one schema; where the compute lane waited, and for what.

Times are integer nanoseconds on the clock of whoever recorded them. This module knows nothing of schedulers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

LANES = ("host", "h2d", "compute", "d2h")
IDLE_CAUSES = ("host", "h2d", "output_sync", "no_work")


class Span(NamedTuple):
    """One operation on one lane. `size` is sequences for host work, bytes for copies (KV blocks for
    offload and restore), tokens for compute."""

    lane: str
    name: str
    step: int
    slot: int
    start_ns: int
    end_ns: int
    size: int


@dataclass(slots=True)
class Timeline:
    """Spans in the order they were recorded."""

    spans: list[Span] = field(default_factory=list)

    def window(self, first_step: int, last_step: int) -> Timeline:
        """The spans of steps first..last, both included."""
        return Timeline([span for span in self.spans if first_step <= span.step <= last_step])

    def to_perfetto(self) -> dict[str, object]:
        """Chrome trace JSON, one track per lane; open it in Perfetto. Its unit is microseconds."""
        events: list[dict[str, object]] = [
            {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": lane}}
            for tid, lane in enumerate(LANES)
        ]
        events += [
            {"ph": "M", "pid": 0, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}}
            for tid in range(len(LANES))
        ]
        events += [
            {
                "ph": "X",
                "pid": 0,
                "tid": LANES.index(span.lane),
                "name": span.name,
                "ts": span.start_ns / 1000,
                "dur": (span.end_ns - span.start_ns) / 1000,
                "args": {"step": span.step, "slot": span.slot, "size": span.size},
            }
            for span in self.spans
        ]
        return {"traceEvents": events, "displayTimeUnit": "ms"}


class StepTimes(NamedTuple):
    """When one step was enqueued and computed; since the step before, how long the host had nothing to do and how long
    the compute lane was held for the output."""

    enqueued_ns: int
    start_ns: int
    end_ns: int
    idle_ns: int
    output_sync_ns: int


@dataclass(slots=True)
class LaneAccount:
    """Running totals over a run, so that a long run needs no spans. All in nanoseconds.

    busy      per lane
    idle      of the compute lane, by cause: waiting for the host, for the input copy, for the exposed output
              synchronization, or with no work to do
    """

    busy: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LANES, 0))
    idle: dict[str, int] = field(default_factory=lambda: dict.fromkeys(IDLE_CAUSES, 0))
    last_end_ns: int = 0

    def step(self, times: StepTimes) -> None:
        """Accounts for the compute lane from the end of the step before to the end of this one."""
        gap_start, gap_end = self.last_end_ns, times.start_ns
        self.last_end_ns = times.end_ns
        self.busy["compute"] += times.end_ns - times.start_ns
        if gap_end <= gap_start:
            return
        free = min(gap_start + times.output_sync_ns, gap_end)
        ready = min(max(free, times.enqueued_ns), gap_end)
        no_work = min(times.idle_ns, ready - free)
        self.idle["output_sync"] += free - gap_start
        self.idle["no_work"] += no_work
        self.idle["host"] += ready - free - no_work
        self.idle["h2d"] += gap_end - ready

    def add(self, busy: Sequence[int], idle: Sequence[int]) -> None:
        """More of it, in the order of LANES and IDLE_CAUSES."""
        for lane, ns in zip(LANES, busy, strict=True):
            self.busy[lane] += ns
        for cause, ns in zip(IDLE_CAUSES, idle, strict=True):
            self.idle[cause] += ns

    def finish(self, end_ns: int, idle_ns: int = 0) -> None:
        """Accounts for the time between the last step and the end of the run."""
        rest = max(end_ns - self.last_end_ns, 0)
        no_work = min(idle_ns, rest)
        self.idle["no_work"] += no_work
        self.idle["host"] += rest - no_work
        self.last_end_ns = end_ns

    @property
    def limiting_lane(self) -> str:
        """The lane that was busy longest: no schedule can be shorter than its work."""
        return max(LANES, key=lambda lane: self.busy[lane])
