"""Serving metrics in the field's terms, from arrivals and deliveries. Knows no scheduler and no clock of its own.

TTFT   first token after arrival, queueing included
TPOT   (last token - first token) / (output tokens - 1), per request with at least two tokens
ITL    time between two tokens of a request, per token
E2EL   last token after arrival

Only requests that ended by a stop or by length count towards TTFT, TPOT and E2EL. Tokens that a request delivered
before it was aborted count as output tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, pairwise, repeat
from operator import sub

import numpy as np
from numpy.typing import NDArray

from asyncsched.plan import StepOutput
from asyncsched.request import Finished, FinishReason
from asyncsched.tally import Tally

PERCENTILES = (50, 90, 95, 99)
NOT_YET = -1


class ServingMetrics:
    """Per-request times, by request index, in nanoseconds: 33 bytes per request, doubled when there is no room.

    `most_gaps` bounds the entries kept about inter-token latencies, as in `Tally`.
    """

    def __init__(self, most_gaps: int = 1 << 20) -> None:
        self.arrival_ns = np.zeros(0, dtype=np.int64)
        self.first_ns = np.zeros(0, dtype=np.int64)
        self.last_ns = np.zeros(0, dtype=np.int64)
        self.num_tokens = np.zeros(0, dtype=np.int64)
        self.completed = np.zeros(0, dtype=np.bool_)
        self.ended = dict.fromkeys(FinishReason, 0)
        self.output_tokens = 0
        self.overshoot_tokens = 0
        self.num_requests = 0
        self._gaps = Tally(most_gaps)

    def arrived(self, index: int, now_ns: int) -> None:
        """A request was submitted; indices count up from 0."""
        if index >= len(self.arrival_ns):
            self._grow(max(len(self.arrival_ns), index + 1, 64))
        self.arrival_ns[index] = now_ns
        self.num_requests = max(self.num_requests, index + 1)

    def delivered(self, output: StepOutput, now_ns: int) -> None:
        """Tokens and notices reached their users."""
        requests = output.requests
        self.overshoot_tokens += output.overshoot
        if len(requests):
            self.output_tokens += len(requests)
            before = self.last_ns[requests]
            self.last_ns[requests] = now_ns
            if True in (requests[1:] == requests[:-1]).tobytes():
                # Tokens held back for a stop string arrive together: no time passes between them.
                np.add.at(self.num_tokens, requests, 1)
                again = np.concatenate(([False], requests[1:] == requests[:-1]))
                before[again] = now_ns
            else:
                self.num_tokens[requests] += 1
            self._record(requests, before, now_ns)
        self.finished(output.finished)

    def finished(self, notices: Sequence[Finished]) -> None:
        """Notices reached their users, behind the tokens."""
        for notice in notices:
            self.ended[notice.reason] += 1
            self.completed[notice.number] = notice.reason in (FinishReason.LENGTH, FinishReason.STOP)

    def delivered_each(
        self, requests: NDArray[np.int64], times_ns: list[int], tokens: NDArray[np.int64] | None = None
    ) -> None:
        """`delivered` at each of these times: a token for each of `requests`; only for those that have not got `tokens`
        of them yet, where that is given, and somebody has not at any of the times."""
        steps, count = len(times_ns), len(requests)
        before = self.last_ns[requests]
        self._record(requests, before, times_ns[0])
        if tokens is None:
            self.output_tokens += steps * count
            self.num_tokens[requests] += steps
            self.last_ns[requests] = times_ns[-1]
            there: Iterable[int] = repeat(count, steps - 1)
        else:
            got = np.minimum(tokens, steps)
            counts = sorted(got.tolist())
            self.output_tokens += sum(counts)
            self.num_tokens[requests] += got
            self.last_ns[requests] = np.array(times_ns)[got - 1]
            firsts = [1, *counts]  # i requests have got all they get when `counts[i - 1]` times are over
            there = chain.from_iterable(
                [repeat(count - gone, end - first) for gone, (first, end) in enumerate(pairwise(firsts))]
            )
        self._gaps.add_each(map(sub, times_ns[1:], times_ns), there)

    def summary(self) -> dict[str, dict[str, float] | None]:
        """ttft_ms, tpot_ms, itl_ms, e2el_ms: mean and percentiles in milliseconds; None where there are none."""
        done = np.flatnonzero(self.completed & (self.num_tokens > 0))
        many = done[self.num_tokens[done] > 1]
        return {
            "ttft_ms": _describe(self.first_ns[done] - self.arrival_ns[done]),
            "tpot_ms": _describe((self.last_ns[many] - self.first_ns[many]) / (self.num_tokens[many] - 1)),
            "itl_ms": self._gaps.describe(PERCENTILES, 1e6),
            "e2el_ms": _describe(self.last_ns[done] - self.arrival_ns[done]),
        }

    def quantiles_ms(self) -> dict[str, list[float] | None]:
        """Hundredths of the distributions over requests, from the least to the most: 101 values each."""
        done = np.flatnonzero(self.completed & (self.num_tokens > 0))
        many = done[self.num_tokens[done] > 1]
        times = {
            "ttft": self.first_ns[done] - self.arrival_ns[done],
            "tpot": (self.last_ns[many] - self.first_ns[many]) / (self.num_tokens[many] - 1),
            "e2el": self.last_ns[done] - self.arrival_ns[done],
        }
        shares = np.linspace(0, 100, 101)
        return {name: (np.percentile(ns, shares) / 1e6).tolist() if len(ns) else None for name, ns in times.items()}

    def gaps(self) -> NDArray[np.int64]:
        """Every inter-token latency, in nanoseconds, in order of delivery while there are few enough of them."""
        return np.repeat(*self._gaps.entries())

    @classmethod
    def merged(cls, parts: Sequence[ServingMetrics], numbers: Sequence[NDArray[np.int64]]) -> ServingMetrics:
        """The metrics of several engines as one; request i of part k is request `numbers[k][i]` of the whole."""
        whole = cls()
        whole._gaps = Tally.merged([part._gaps for part in parts])
        whole.num_requests = sum(part.num_requests for part in parts)
        whole._grow(whole.num_requests)
        for part, places in zip(parts, numbers, strict=True):
            for name in ("arrival_ns", "first_ns", "last_ns", "num_tokens", "completed"):
                getattr(whole, name)[places] = getattr(part, name)[: part.num_requests]
            for reason, count in part.ended.items():
                whole.ended[reason] += count
            whole.output_tokens += part.output_tokens
            whole.overshoot_tokens += part.overshoot_tokens
        return whole

    def _record(self, requests: NDArray[np.int64], before: NDArray[np.int64], now_ns: int) -> None:
        """First tokens, and gaps behind others. Requests that got their last token together have equal gaps, so a step
        needs few numbers."""
        last = before.item(0)
        if False not in (before == last).tobytes():
            if last == NOT_YET:
                self.first_ns[requests] = now_ns
            else:
                self._gaps.add(now_ns - last, len(before))
            return
        times = before.tolist()
        for last in sorted(set(times), reverse=True):
            if last == NOT_YET:
                self.first_ns[requests[before == NOT_YET]] = now_ns
            else:
                self._gaps.add(now_ns - last, times.count(last))

    def _grow(self, more: int) -> None:
        """Room for so many more requests."""
        self.arrival_ns = np.concatenate((self.arrival_ns, np.zeros(more, dtype=np.int64)))
        self.first_ns = np.concatenate((self.first_ns, np.full(more, NOT_YET)))
        self.last_ns = np.concatenate((self.last_ns, np.full(more, NOT_YET)))
        self.num_tokens = np.concatenate((self.num_tokens, np.zeros(more, dtype=np.int64)))
        self.completed = np.concatenate((self.completed, np.zeros(more, dtype=np.bool_)))


def _describe(nanoseconds: NDArray[np.int64] | NDArray[np.float64]) -> dict[str, float] | None:
    if not len(nanoseconds):
        return None
    milliseconds = np.asarray(nanoseconds, dtype=np.float64) / 1e6
    values = np.percentile(milliseconds, PERCENTILES)
    named = {f"p{p}": float(v) for p, v in zip(PERCENTILES, values, strict=True)}
    return {"mean": float(milliseconds.mean()), **named}
