"""What arrives, when, and how long it is: synthetic or from a trace.

A workload knows the lengths that will come out, the scheduler does not. Prompts, outputs, gaps and priorities are drawn
from streams of their own, so changing one leaves the others as they were.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from asyncsched.errors import MISSING, ConfigError
from sim.arrivals import Arrivals
from sim.draws import Stream, generator, lognormal
from sim.spec import BY_KIND, Count, Rate, Section, Time
from sim.trace import Slice, clip, dequantise, looks_quantised, read_trace
from sim.trace_rows import TraceRow

IntArray = NDArray[np.int64]


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


class Workload(NamedTuple):
    """Requests in order of arrival, the first at 0 ns, and what its user should know about them."""

    arrivals: list[Arrival]
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
    if isinstance(spec, TraceWorkload):
        rows, said = _traced(spec, seed)
        notes += said
        times = [row.time_ns for row in rows]
        prompts = [row.prompt_tokens for row in rows]
        outputs = [row.output_tokens for row in rows]
        prefixes = [row.prefix for row in rows]
    else:
        count = spec.num_requests
        times = spec.arrivals.draw(generator(seed, Stream.ARRIVAL), count).tolist()
        prompts = spec.prompt.draw(generator(seed, Stream.PROMPT), count).tolist()
        outputs = spec.output.draw(generator(seed, Stream.OUTPUT), count).tolist()
        prefixes = [()] * count
    if spec.max_tokens is not None:
        most = spec.max_tokens
        longer = sum(tokens > most for tokens in outputs)
        if longer and isinstance(spec, TraceWorkload):
            lost = sum(max(tokens - most, 0) for tokens in outputs) / sum(outputs)
            notes.append(
                f"{longer} of {len(outputs)} outputs were clipped to {most} tokens, {lost:.1%} of all output tokens"
            )
        outputs = [min(tokens, most) for tokens in outputs]
    asked = [spec.max_tokens] * len(outputs) if spec.stop == "eos" and spec.max_tokens else outputs
    priorities = generator(seed, Stream.PRIORITY).integers(spec.num_priorities, size=len(times)).tolist()
    fields = zip(times, prompts, outputs, asked, priorities, prefixes, strict=True)
    return Workload([Arrival(*values) for values in fields], tuple(notes))


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
