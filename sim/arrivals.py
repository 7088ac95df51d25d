"""When requests come: load generation in the terms of vLLM's benchmark, request rate, burstiness and ramp.

The first request comes at 0. How many are in the system at a time, the closed loop, is the workload's to say.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sim.draws import exp
from sim.spec import BY_KIND, Rate, Section

IntArray = NDArray[np.int64]


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


class RampArrivals(Section):
    """The rate goes from one value to another over the workload, as in vLLM's benchmark: evenly from request to request
    (linear), or by an equal factor (exponential). Gaps are gamma distributed with shape `burstiness`."""

    kind: Literal["ramp"]
    start_rate_per_s: Rate
    end_rate_per_s: Rate
    shape: Literal["linear", "exponential"] = "linear"
    burstiness: Rate = 1.0

    def draw(self, random: np.random.Generator, size: int) -> IntArray:
        part = np.arange(1, size) / max(size - 1, 1)
        if self.shape == "linear":
            rates = self.start_rate_per_s + (self.end_rate_per_s - self.start_rate_per_s) * part
        else:
            ratio = Decimal(self.end_rate_per_s) / Decimal(self.start_rate_per_s)
            rates = self.start_rate_per_s * exp(float(ratio.ln()) * part)  # equal on every machine, as math.log is not
        return _times(random.standard_gamma(self.burstiness, size - 1) / (self.burstiness * rates))


Arrivals = Annotated[AllAtOnce | PoissonArrivals | GammaArrivals | RampArrivals, Field(discriminator="kind"), BY_KIND]


def _times(gaps_s: NDArray[np.float64]) -> IntArray:
    """Times in ns from gaps in s. Gaps are rounded before they add up, so no rounding error does."""
    return np.concatenate(([0], np.cumsum(np.rint(gaps_s * 1e9).astype(np.int64))))
