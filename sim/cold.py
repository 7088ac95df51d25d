"""Host work right behind a busy-wait: caches have grown cold, and the longer it waited, the more.

The work before the wait, plans and commits of the same steps, tells how quick the host was then, so that a slow time is
not taken for the wait's doing. Knows durations and delays only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from sim.fitting import FloatArray

COLD_KINDS = ("fill", "launch")  # what follows the wait
LEAST = 20  # steps with a delay, and without
HALVES_US = (250.0, 500.0, 1000.0, 1500.0, 2000.0, 3000.0, 4000.0, 6000.0, 8000.0, 12_000.0)


class Cold(NamedTuple):
    """Behind a wait of d, a kind of work takes `1 + factors[kind] * d / (d + half_us)` times as long."""

    factors: Mapping[str, float]
    half_us: float

    def of(self, kind: str, delay_us: FloatArray) -> FloatArray:
        if kind not in self.factors:
            return np.ones(len(delay_us))
        return np.asarray(1 + self.factors[kind] * delay_us / (delay_us + max(self.half_us, 1e-9)))


NOT_COLD = Cold({}, 0.0)


def fit_cold(slowness: Mapping[str, FloatArray], reference: FloatArray, delay_us: FloatArray) -> Cold:
    """From each step's work over what is usual, by kind and of plan and commit together, and the wait between them. NaN
    where a step had none."""
    waited = delay_us > 0
    if min(np.count_nonzero(waited), np.count_nonzero(~waited)) < LEAST:
        return NOT_COLD
    delays = np.unique(delay_us[waited])
    grown: dict[str, FloatArray] = {}
    for kind, slow in slowness.items():
        beside = slow / np.maximum(reference, 1e-9)
        usual = np.nanmedian(beside[~waited])
        grown[kind] = np.array([np.nanmedian(beside[delay_us == delay]) for delay in delays]) / usual - 1

    def factor(kind: str, half: float) -> float:
        term = delays / (delays + half)
        return max(float((grown[kind] * term).sum() / (term * term).sum()), 0.0)

    def leftover(half: float) -> float:
        terms = delays / (delays + half)
        return sum(float(((grown[kind] - factor(kind, half) * terms) ** 2).sum()) for kind in grown)

    half = min(HALVES_US, key=leftover)
    return Cold({kind: factor(kind, half) for kind in grown}, half)
