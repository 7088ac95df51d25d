"""Service levels: which requests were served well enough. Knows times of requests, no scheduler and no clock.

Names and meaning are those of vLLM's benchmark: a request is good when it ended by a stop or by length and meets every
level. One that has a single token has no TPOT, and meets any.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncsched.request_table import RequestTable


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLevels:
    """Longest latencies of a good request, in milliseconds; None is no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None

    def met(self, requests: RequestTable) -> NDArray[np.bool_]:
        """bool[requests.count]: which are good."""
        count = requests.count
        arrival, first, last = requests.arrival_ns[:count], requests.first_ns[:count], requests.last_ns[:count]
        tokens = requests.num_tokens[:count]
        good = requests.completed[:count] & (tokens > 0)
        if self.ttft_ms is not None:
            good &= (first - arrival) <= self.ttft_ms * 1e6
        if self.tpot_ms is not None:
            good &= (last - first) <= self.tpot_ms * 1e6 * np.maximum(tokens - 1, 1)
        if self.e2el_ms is not None:
            good &= (last - arrival) <= self.e2el_ms * 1e6
        return good
