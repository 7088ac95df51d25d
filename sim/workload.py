"""What arrives, when, and how long it is: synthetic or from a trace.

A workload knows the lengths that will come out, the scheduler does not. Prompts, outputs, gaps and priorities are drawn
from streams of their own, so changing one leaves the others as they were.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from asyncsched.errors import ConfigError
from sim.azure import read_trace
from sim.draws import Stream, generator, lognormal
from sim.spec import BY_KIND, Count, Rate, Section

IntArray = NDArray[np.int64]


class Arrival(NamedTuple):
    """One request. `output_tokens` is what the model really generates, `max_tokens` what the request allows."""

    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    priority: int


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


class AllAtOnce(Section):
    kind: Literal["all-at-once"]

    def draw(self, random: np.random.Generator, size: int) -> IntArray:
        return np.zeros(size, dtype=np.int64)


class PoissonArrivals(Section):
    """The first request comes at 0; gaps are exponential."""

    kind: Literal["poisson"]
    rate_per_s: Rate

    def draw(self, random: np.random.Generator, size: int) -> IntArray:
        return _times(random.standard_exponential(size - 1) / self.rate_per_s)


class GammaArrivals(Section):
    """Gaps from a gamma distribution with shape `burstiness` and mean 1 / rate, as in vLLM's benchmark: 1 is Poisson,
    less comes in bursts, more is more even."""

    kind: Literal["gamma"]
    rate_per_s: Rate
    burstiness: Rate

    def draw(self, random: np.random.Generator, size: int) -> IntArray:
        return _times(random.standard_gamma(self.burstiness, size - 1) / (self.burstiness * self.rate_per_s))


Arrivals = Annotated[AllAtOnce | PoissonArrivals | GammaArrivals, Field(discriminator="kind"), BY_KIND]


class _Workload(Section):
    """How requests end, and their priorities.

    stop            "length": a request asks for the tokens it gets. "eos": it asks for max_tokens and the model ends it
                    after the drawn output, which the scheduler learns late (overshoot)
    max_tokens      longest output asked for; caps the drawn one. "eos" needs it
    num_priorities  priorities are drawn evenly from 0 to num_priorities - 1
    """

    stop: Literal["length", "eos"] = "length"
    max_tokens: Count | None = None
    num_priorities: Count = 1

    @model_validator(mode="after")
    def _check_eos(self) -> Self:
        if self.stop == "eos" and self.max_tokens is None:
            raise ConfigError("max_tokens", None, 'stop = "eos" needs the longest output that requests ask for')
        return self


class SyntheticWorkload(_Workload):
    kind: Literal["synthetic"]
    num_requests: Annotated[int, Field(ge=1, le=10_000_000)]
    prompt: Length
    output: Length
    arrivals: Arrivals


class TraceWorkload(_Workload):
    """A trace by name (`azure-conv-500`) or a file in the Azure CSV format.

    rate_scale  2 lets the requests come twice as fast
    limit       first rows to use; all without
    """

    kind: Literal["trace"]
    trace: str
    rate_scale: Rate = 1.0
    limit: Count | None = None


WorkloadSpec = Annotated[SyntheticWorkload | TraceWorkload, Field(discriminator="kind"), BY_KIND]


def build_workload(spec: SyntheticWorkload | TraceWorkload, seed: int) -> list[Arrival]:
    """The requests in order of arrival, the first at 0 ns. Raises ConfigError for a trace that cannot be used."""
    if isinstance(spec, TraceWorkload):
        rows = sorted(read_trace(spec.trace, spec.limit), key=lambda row: row.time_ns)
        first_ns = rows[0].time_ns
        times = [round((row.time_ns - first_ns) / spec.rate_scale) for row in rows]
        prompts = [row.prompt_tokens for row in rows]
        outputs = [row.output_tokens for row in rows]
    else:
        count = spec.num_requests
        times = spec.arrivals.draw(generator(seed, Stream.ARRIVAL), count).tolist()
        prompts = spec.prompt.draw(generator(seed, Stream.PROMPT), count).tolist()
        outputs = spec.output.draw(generator(seed, Stream.OUTPUT), count).tolist()
    if spec.max_tokens is not None:
        outputs = [min(tokens, spec.max_tokens) for tokens in outputs]
    asked = [spec.max_tokens] * len(outputs) if spec.stop == "eos" and spec.max_tokens else outputs
    priorities = generator(seed, Stream.PRIORITY).integers(spec.num_priorities, size=len(times)).tolist()
    return [Arrival(*fields) for fields in zip(times, prompts, outputs, asked, priorities, strict=True)]


def _times(gaps_s: NDArray[np.float64]) -> IntArray:
    """Times in ns from gaps in s. Gaps are rounded before they add up, so no rounding error does."""
    return np.concatenate(([0], np.cumsum(np.rint(gaps_s * 1e9).astype(np.int64))))
