"""What one run of an engine was: its settings, its requests and, where somebody could see them, its steps.

The same for a run of this project's engine, of a simulated one, and for a log of somebody else's that was imported. All
times are integer nanoseconds since the start of the run; UNKNOWN stands for what was not observed. This module holds
the data and says what is consistent; `run_files` writes and reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from asyncsched.config import (
    FIELD_NAMES,
    MOST_BLOCKS,
    EngineConfig,
    default_buckets,
    default_mixed_buckets,
)
from asyncsched.errors import ConfigError

IntArray = NDArray[np.int64]

UNKNOWN = -1
FINISHES = ("length", "stop", "abort", "rejected", "error")

# Host work of a step, in the order in which it happens. collect is the wait for the step's tokens; delay is a busy-wait
# that somebody asked for, to learn what a slower host would do.
HOST_SPANS = ("plan", "delay", "fill", "launch", "collect", "commit", "deliver")
LANE_SPANS = ("h2d", "restore", "compute", "offload", "d2h")
SPANS = (*HOST_SPANS, *LANE_SPANS)

# plan: the number of the call of Scheduler.plan. captured: whether the step ran as one CUDA graph.
SIZES = (
    "step",
    "slot",
    "plan",
    "num_seqs",
    "num_decodes",
    "num_prefill_tokens",
    "num_samples",
    "kv_tokens",
    "attn_pairs",
    "bucket",
    "mixed_bucket",
    "captured",
    "offloaded_blocks",
    "restored_blocks",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """Everything about a run that is not a table. Tables of facts may hold whatever JSON can.

    name           what to call it
    source         who ran it: asyncsched, simulated, or the importer's name
    engine         settings of EngineConfig by name; an import leaves out what it does not know
    device         name, driver, and `inline`: whether steps compute in the host's own thread, as on a CPU
    versions       of the software
    model          layers, dimensions, dtype, bytes of weights and of KV per token
    workload       what was asked for
    host_delay_us  busy-wait per step that was added to the host's work
    host           what the host was like: `probe_us` lists readings of a probe before and after the run,
                   `probe_during_us` those in it, and `probe_during_at_ms` when each of these began
    seed           of the workload and of requests without a seed
    makespan_ns    from the start to the last token or notice
    preemptions    UNKNOWN where nobody counted
    notes          what a reader must know: what is missing, what was assumed
    """

    name: str
    source: str
    engine: Mapping[str, Any]
    device: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    workload: Mapping[str, Any] = field(default_factory=dict)
    host_delay_us: float = 0.0
    host: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    makespan_ns: int
    preemptions: int = UNKNOWN
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for key in self.engine:
            if key not in FIELD_NAMES:
                raise ConfigError(f"engine.{key}", self.engine[key], f"there is {', '.join(FIELD_NAMES)}")
        if self.makespan_ns < 0:
            raise ConfigError("makespan_ns", self.makespan_ns, "use a whole number of at least 0")
        if not 0 <= self.host_delay_us <= 1e9:
            raise ConfigError("host_delay_us", self.host_delay_us, "use a number from 0 to 1e9")
        for name in ("probe_us", "probe_during_us", "probe_during_at_ms"):
            probes = self.host.get(name, [])
            if not isinstance(probes, list | tuple) or not all(_is_time(one) for one in probes):
                raise ConfigError(f"host.{name}", probes, "use a list of numbers above 0 and up to 1e9")
        during, at = (self.host.get(f"probe_during{name}", []) for name in ("_us", "_at_ms"))
        if len(during) != len(at) or list(at) != sorted(at):
            allowed = f"use times in order, one for each of {len(during)} probe_during_us"
            raise ConfigError("host.probe_during_at_ms", at, allowed)

    def engine_config(self, **changes: Any) -> EngineConfig:
        """The engine's settings, with changes. Sizes of captured steps that followed from a limit follow the new one;
        of others those are left out that exceed it. Raises ConfigError where the KV block count is missing: it has no
        default here."""
        settings = {**self.engine, **self._buckets_at(changes), **changes}
        if "num_blocks" not in settings:
            raise ConfigError("engine.num_blocks", None, f"run {self.name} does not say how many KV blocks it had")
        for key, value in settings.items():
            if isinstance(value, list):
                settings[key] = tuple(value)
        return EngineConfig(**settings)

    def _buckets_at(self, changes: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        """Of each kind whose limit changes."""
        kinds = (
            ("decode_buckets", "max_num_seqs", default_buckets),
            ("mixed_buckets", "max_num_batched_tokens", default_mixed_buckets),
        )
        found = {}
        for name, limit, default in kinds:
            sizes, was, most = self.engine.get(name), self.engine.get(limit), changes.get(limit)
            if _is_sizes(sizes) and type(most) is int and 1 <= most <= MOST_BLOCKS:
                followed = type(was) is int and tuple(sizes) == default(was)
                found[name] = default(most) if followed else tuple(size for size in sizes if size <= most)
        return found


def _is_sizes(value: object) -> TypeGuard[Sequence[int]]:
    return isinstance(value, list | tuple) and bool(value) and all(type(size) is int for size in value)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= 1e9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestLog:
    """Requests in the order of their arrival, one entry each.

    arrival_ns, scheduled_ns, first_ns, last_ns   when it came, was first part of a step, got its first and last token
    prompt_tokens, max_tokens, output_tokens      max_tokens is what it asked for, output_tokens what it got
    entered_plan, entered_commits                 it entered when so many calls of plan and commits had been made
    aborted_plan, aborted_commits                 the same of its abort
    finish        one of FINISHES
    gaps_ns       int64[output_tokens - 1] between its tokens; () of all of them where only first and last are known
    """

    request_id: tuple[str, ...]
    arrival_ns: IntArray
    prompt_tokens: IntArray
    max_tokens: IntArray
    output_tokens: IntArray
    priority: IntArray
    scheduled_ns: IntArray
    first_ns: IntArray
    last_ns: IntArray
    entered_plan: IntArray
    entered_commits: IntArray
    aborted_plan: IntArray
    aborted_commits: IntArray
    finish: tuple[str, ...]
    gaps_ns: tuple[IntArray, ...] = ()

    def __post_init__(self) -> None:
        for one in fields(self):
            length = len(getattr(self, one.name))
            if length != len(self.request_id) and not (one.name == "gaps_ns" and length == 0):
                raise ConfigError(one.name, length, f"one entry is needed for each of {len(self.request_id)} requests")
        for number, problem, value, allowed in self._problems():
            raise ConfigError(f"request {self.request_id[number]}: {problem}", value, allowed)

    @classmethod
    def from_outside(
        cls,
        request_id: Sequence[str],
        *,
        arrival_ns: IntArray,
        prompt_tokens: IntArray,
        output_tokens: IntArray,
        first_ns: IntArray,
        last_ns: IntArray,
        scheduled_ns: IntArray | None = None,
        gaps_ns: tuple[IntArray, ...] = (),
    ) -> RequestLog:
        """What somebody saw who was not in the engine, of requests that got all they asked for."""
        unknown = np.full(len(request_id), UNKNOWN, dtype=np.int64)
        return cls(
            request_id=tuple(request_id),
            arrival_ns=arrival_ns,
            prompt_tokens=prompt_tokens,
            max_tokens=output_tokens,
            output_tokens=output_tokens,
            priority=np.zeros(len(request_id), dtype=np.int64),
            scheduled_ns=unknown if scheduled_ns is None else scheduled_ns,
            first_ns=first_ns,
            last_ns=last_ns,
            entered_plan=unknown,
            entered_commits=unknown,
            aborted_plan=unknown,
            aborted_commits=unknown,
            finish=("length",) * len(request_id),
            gaps_ns=gaps_ns,
        )

    def __len__(self) -> int:
        return len(self.request_id)

    @property
    def completed(self) -> NDArray[np.bool_]:
        """Requests that ended by length or by a stop."""
        return np.array([reason in ("length", "stop") for reason in self.finish], dtype=np.bool_)

    def _problems(self) -> Sequence[tuple[int, str, Any, str]]:
        """The first thing of each kind that cannot be: request, field, value, what is allowed."""
        got = self.output_tokens > 0
        rules = (
            ("arrival_ns", self.arrival_ns < 0, "use a whole number of at least 0"),
            ("prompt_tokens", self.prompt_tokens < 1, "use a whole number of at least 1"),
            ("max_tokens", self.max_tokens < 1, "use a whole number of at least 1"),
            ("output_tokens", self.output_tokens < 0, "use a whole number of at least 0"),
            ("output_tokens", self.output_tokens > self.max_tokens, "it cannot be more than max_tokens"),
            ("first_ns", got & (self.first_ns < self.arrival_ns), "it cannot be before arrival_ns"),
            ("last_ns", got & (self.last_ns < self.first_ns), "it cannot be before first_ns"),
        )
        found: list[tuple[int, str, Any, str]] = [
            (int(np.flatnonzero(bad)[0]), name, int(getattr(self, name)[np.flatnonzero(bad)[0]]), allowed)
            for name, bad, allowed in rules
            if bad.any()
        ]
        if len(set(self.request_id)) != len(self.request_id):
            number = next(n for n, one in enumerate(self.request_id) if one in self.request_id[:n])
            found.append((number, "request_id", self.request_id[number], "it is in the log twice"))
        for number, gaps in enumerate(self.gaps_ns):
            if len(gaps) != max(int(self.output_tokens[number]) - 1, 0) or (gaps < 0).any():
                found.append((number, "gaps_ns", len(gaps), "one is needed between any two tokens, none negative"))
                break
        return found


@dataclass(frozen=True, slots=True, eq=False)
class StepLog:
    """One entry per step and column. Columns are SIZES, and start and end of each of SPANS as `name_start_ns` and
    `name_end_ns`, UNKNOWN where a step had none."""

    columns: Mapping[str, IntArray]

    def __post_init__(self) -> None:
        lengths = {name: len(self.columns[name]) for name in STEP_COLUMNS if name in self.columns}
        missing = [name for name in STEP_COLUMNS if name not in lengths]
        if missing:
            raise ConfigError("steps", missing[0], "a column is missing")
        if len(set(lengths.values())) > 1:
            raise ConfigError("steps", lengths, "columns must be equally long")
        for name in SIZES:
            if (self.columns[name] < 0).any():
                raise ConfigError(f"steps: {name}", int(self.columns[name].min()), "use whole numbers of at least 0")
        for name in SPANS:
            start, end = self.start(name), self.end(name)
            if ((end < start) | ((start == UNKNOWN) != (end == UNKNOWN))).any():
                row = int(np.flatnonzero((end < start) | ((start == UNKNOWN) != (end == UNKNOWN)))[0])
                raise ConfigError(f"steps: {name}, row {row + 1}", int(end[row]), f"it starts at {int(start[row])}")
        if (np.diff(self.columns["step"]) <= 0).any():
            raise ConfigError("steps: step", "numbers", "they must increase")

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, column: str) -> IntArray:
        return self.columns[column]

    def start(self, span: str) -> IntArray:
        return self.columns[f"{span}_start_ns"]

    def end(self, span: str) -> IntArray:
        return self.columns[f"{span}_end_ns"]

    def duration(self, span: str) -> IntArray:
        """Nanoseconds; 0 where a step had none."""
        return self.end(span) - self.start(span)

    def has(self, span: str) -> NDArray[np.bool_]:
        return np.asarray(self.start(span) != UNKNOWN)

    @property
    def kind(self) -> NDArray[np.str_]:
        """decode, prefill, mixed, or copies for a step that computes nothing."""
        decodes, prefill = self["num_decodes"] > 0, self["num_prefill_tokens"] > 0
        return np.select(
            [decodes & prefill, decodes, prefill],
            [np.array("mixed"), np.array("decode"), np.array("prefill")],
            np.array("copies"),
        )


STEP_COLUMNS = (*SIZES, *(f"{span}_{edge}_ns" for span in SPANS for edge in ("start", "end")))
NO_STEPS = StepLog({name: np.zeros(0, dtype=np.int64) for name in STEP_COLUMNS})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """`steps` is empty where nobody saw them, `decisions` (the scheduler's log) where nobody kept them."""

    info: RunInfo
    requests: RequestLog
    steps: StepLog = NO_STEPS
    decisions: tuple[str, ...] = ()
