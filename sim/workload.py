"""What arrives, when, and how long it is: synthetic or from a trace.

A workload knows the lengths that will come out, the scheduler does not. Prompts, outputs, gaps and priorities are drawn
from streams of their own, so changing one leaves the others as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Annotated, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import Field, model_validator

from asyncsched.errors import MISSING, ConfigError
from sim.arrivals import Arrivals
from sim.draws import Stream, generator, lognormal
from sim.spec import BY_KIND, Count, Rate, Section, Time
from sim.trace import Slice, clip, dequantise, looks_quantised, read_trace
from sim.trace_rows import TraceRow

IntArray = NDArray[np.int64]
CHUNK = 4096  # requests that are objects at a time


class Arrival(NamedTuple):
    """One request. `output_tokens` is what the model really generates, `max_tokens` what the request allows.

    `prefix` says what its prompt shares with others, as in `TraceRow`.
    """

    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    priority: int
    prefix: tuple[int, ...] = ()


class ArrivalTable:
    """Requests as columns: 40 bytes each instead of the 190 that objects take, as there may be millions.

    arrival_ns, prompt_tokens, output_tokens, max_tokens, priority  int64[n]
    prefixes  of each request; None where none has one
    """

    __slots__ = ("_columns", "_prefixes")

    def __init__(self, columns: Sequence[ArrayLike], prefixes: list[tuple[int, ...]] | None = None) -> None:
        """The columns in the order of `Arrival`."""
        self._columns: list[IntArray] = [np.asarray(column, dtype=np.int64) for column in columns]
        self._prefixes = prefixes

    @property
    def prompt_tokens(self) -> IntArray:
        return self._columns[1]

    @property
    def output_tokens(self) -> IntArray:
        return self._columns[2]

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, number: int) -> Arrival:
        at, tokens_in, tokens_out, asked, priority = [column.item(number) for column in self._columns]
        return Arrival(at, tokens_in, tokens_out, asked, priority, self._prefixes[number] if self._prefixes else ())

    def __iter__(self) -> Iterator[Arrival]:
        for first in range(0, len(self), CHUNK):
            part = slice(first, first + CHUNK)
            columns = [column[part].tolist() for column in self._columns]
            prefixes = repeat(()) if self._prefixes is None else self._prefixes[part]
            yield from map(Arrival, *columns, prefixes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ArrivalTable):
            return NotImplemented
        same = all(map(np.array_equal, self._columns, other._columns))
        return same and self._prefixes == other._prefixes

    __hash__ = None  # type: ignore[assignment]  # it is compared by its values


class Workload(NamedTuple):
    """Requests in order of arrival, the first at 0 ns, and what its user should know about them."""

    arrivals: ArrivalTable
    notes: tuple[str, ...] = ()


class FixedLength(Section):
    kind: Literal["fixed"]
    tokens: Count

    def draw(self, random: np.random.Generator, size: int) -> IntArray:
        return np.full(size, self.tokens, dtype=np.int64)


class _Range(Section):
    """min_tokens to max_tokens, both included."""

    min_tokens: Count = 1
    max_tokens: Count

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.max_tokens < self.min_tokens:
            raise ConfigError("max_tokens", self.max_tokens, f"use at least min_tokens, {self.min_tokens}")
        return self


class UniformLength(_Range):
    """Every length of the range is equally likely."""

    kind: Literal["uniform"]

    def draw(self, random: np.random.Generator, size: int) -> IntArray:
        return random.integers(self.min_tokens, self.max_tokens, size, endpoint=True)


class LognormalLength(_Range):
    """A long tail. `mean_tokens` is the mean before clipping to the range, `sigma` is that of the logarithm."""

    kind: Literal["lognormal"]
    mean_tokens: Rate
    sigma: Annotated[float, Field(ge=0, le=5)]

    def draw(self, random: np.random.Generator, size: int) -> IntArray:
        lengths = np.rint(self.mean_tokens * lognormal(random, self.sigma, size))
        return np.clip(lengths, self.min_tokens, self.max_tokens).astype(np.int64)


Length = Annotated[FixedLength | UniformLength | LognormalLength, Field(discriminator="kind"), BY_KIND]


class _Workload(Section):
    """How requests end, and their priorities.

    stop            "length": a request asks for the tokens it gets. "eos": it asks for max_tokens and the model ends it
                    after the drawn output, which the scheduler learns late (overshoot)
    max_tokens      longest output asked for; caps the drawn one. "eos" needs it
    num_priorities  priorities are drawn evenly from 0 to num_priorities - 1
    max_concurrency requests in the system at most (a closed loop): one that would come earlier is sent when another
                    ends, and arrives then
    """

    stop: Literal["length", "eos"] = "length"
    max_tokens: Count | None = None
    num_priorities: Count = 1
    max_concurrency: Count | None = None

    @model_validator(mode="after")
    def _check_eos(self) -> Self:
        if self.stop == "eos" and self.max_tokens is None:
            raise ConfigError("max_tokens", MISSING, 'stop = "eos" needs the longest output that requests ask for')
        return self


class SyntheticWorkload(_Workload):
    kind: Literal["synthetic"]
    num_requests: Annotated[int, Field(ge=1, le=10_000_000)]
    prompt: Length
    output: Length
    arrivals: Arrivals


class TraceWorkload(_Workload):
    """A trace by name (`azure-conv-500`) or a file.

    format             that of the file; "auto" tells by its first line
    skip, limit        requests to leave out at the start of the file, and to use after that
    start_s            time after the first of those, from which on requests are used
    duration_s         and for how long; both in the trace's own time
    rate_scale         2 lets the requests come twice as fast
    arrivals           times drawn instead of the trace's, which then gives lengths and prefixes alone
    num_requests       with arrivals: so many requests, each one of the trace's drawn at random, instead of all in order
    dequantise         spread requests that share a timestamp over the time up to the next
    max_prompt_tokens  clips longer prompts
    strict             stop at the first line that is no request, instead of leaving it out and saying so
    """

    kind: Literal["trace"]
    trace: str
    format: Literal["auto", "azure", "burstgpt", "csv", "mooncake"] = "auto"
    skip: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    limit: Count | None = None
    start_s: Time = 0.0
    duration_s: Rate | None = None
    rate_scale: Rate = 1.0
    arrivals: Arrivals | None = None
    num_requests: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    dequantise: bool = False
    max_prompt_tokens: Count | None = None
    strict: bool = False

    @model_validator(mode="after")
    def _check_times(self) -> Self:
        if self.arrivals is not None and (self.rate_scale != 1 or self.dequantise):
            name = "rate_scale" if self.rate_scale != 1 else "dequantise"
            raise ConfigError(name, getattr(self, name), "it changes the trace's times, which arrivals replace")
        if self.num_requests is not None and self.arrivals is None:
            raise ConfigError("num_requests", self.num_requests, "it goes with arrivals; the trace's times are for all")
        return self


WorkloadSpec = Annotated[SyntheticWorkload | TraceWorkload, Field(discriminator="kind"), BY_KIND]


def build_workload(spec: SyntheticWorkload | TraceWorkload, seed: int) -> Workload:
    """Raises ConfigError for a trace that cannot be used."""
    notes: list[str] = []
    prefixes: list[tuple[int, ...]] | None = None
    if isinstance(spec, TraceWorkload):
        rows, said = _traced(spec, seed)
        notes += said
        times = np.array([row.time_ns for row in rows], dtype=np.int64)
        prompts = np.array([row.prompt_tokens for row in rows], dtype=np.int64)
        outputs = np.array([row.output_tokens for row in rows], dtype=np.int64)
        if any(row.prefix for row in rows):
            prefixes = [row.prefix for row in rows]
    else:
        count = spec.num_requests
        times = spec.arrivals.draw(generator(seed, Stream.ARRIVAL), count)
        prompts = spec.prompt.draw(generator(seed, Stream.PROMPT), count)
        outputs = spec.output.draw(generator(seed, Stream.OUTPUT), count)
    if spec.max_tokens is not None:
        most = spec.max_tokens
        longer = int(np.count_nonzero(outputs > most))
        if longer and isinstance(spec, TraceWorkload):
            lost = int(np.maximum(outputs - most, 0).sum()) / int(outputs.sum())
            notes.append(
                f"{longer} of {len(outputs)} outputs were clipped to {most} tokens, {lost:.1%} of all output tokens"
            )
        outputs = np.minimum(outputs, most)
    asked = np.full(len(outputs), spec.max_tokens) if spec.stop == "eos" and spec.max_tokens else outputs
    priorities = generator(seed, Stream.PRIORITY).integers(spec.num_priorities, size=len(times))
    return Workload(ArrivalTable((times, prompts, outputs, asked, priorities), prefixes), tuple(notes))


def _traced(spec: TraceWorkload, seed: int) -> tuple[list[TraceRow], list[str]]:
    """The trace's requests as the workload wants them, and what was done to them."""
    part = Slice(spec.skip, spec.limit, spec.start_s, spec.duration_s)
    rows, said = read_trace(spec.trace, spec.format, part, strict=spec.strict)
    notes = list(said)
    rows, note = clip(rows, spec.max_prompt_tokens)
    notes += [note] if note else []
    if spec.num_requests is not None:
        chosen = generator(seed, Stream.PROMPT).integers(len(rows), size=spec.num_requests).tolist()
        rows = [rows[place] for place in chosen]
    if spec.arrivals is not None:
        drawn = spec.arrivals.draw(generator(seed, Stream.ARRIVAL), len(rows)).tolist()
        return [row._replace(time_ns=time) for row, time in zip(rows, drawn, strict=True)], notes
    if spec.dequantise:
        rows, note = dequantise(rows, seed)
    else:
        note = looks_quantised(rows)
    notes += [note] if note else []
    return [row._replace(time_ns=round(row.time_ns / spec.rate_scale)) for row in rows], notes
