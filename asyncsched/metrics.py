"""Serving metrics in the field's terms, from arrivals and deliveries. Knows no scheduler and no clock of its own.

TTFT   first token after arrival, queueing included
TPOT   (last token - first token) / (output tokens - 1), per request with at least two tokens
ITL    time between two tokens of a request, per token
E2EL   last token after arrival

Only requests that ended by a stop or by length count towards TTFT, TPOT and E2EL. Tokens that a request delivered
before it was aborted count as output tokens.

As long as few requests have come, all their times are there, and everything is exact. After that those of requests that
are over go into tallies: memory then follows from how many requests are there at once. Percentiles are within 1 / 2,000
of themselves from then on; means and the number of good requests, least and greatest times stay exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise, repeat
from operator import sub

import numpy as np
from numpy.typing import NDArray

from asyncsched.goodput import ServiceLevels
from asyncsched.plan import StepOutput
from asyncsched.request import Finished, FinishReason
from asyncsched.request_table import NOT_YET, Mask, RequestTable
from asyncsched.tally import Tally

PERCENTILES = (50, 90, 95, 99)
MOST_REQUESTS = 1 << 16
MOST_ENTRIES = 1 << 10  # of a tally of what is over, before equal ones become one
PARTS = {"ttft": 1, "tpot": 1024, "e2el": 1}  # of a nanosecond, in which the tallies count


class ServingMetrics:
    """What became of requests, which are numbered as they come. All times are in nanoseconds.

    requests       the times of each, as long as it is there or, where everything is exact, also afterwards
    most_requests  as long as no more have come, everything is exact
    most_gaps      bounds the entries kept about inter-token latencies, as in `Tally`
    levels         what a good request meets; None is nothing
    """

    def __init__(
        self, *, most_requests: int = MOST_REQUESTS, most_gaps: int = 1 << 20, levels: ServiceLevels | None = None
    ) -> None:
        self.requests = RequestTable()
        self.ended = dict.fromkeys(FinishReason, 0)
        self.output_tokens = 0
        self.overshoot_tokens = 0
        self.num_requests = 0
        self._levels = levels or ServiceLevels()
        self._most_requests = most_requests
        self._gaps = Tally(most_gaps)
        self._past = {name: Tally(MOST_ENTRIES, is_exact=False) for name in PARTS}  # of requests without a row
        self._past_good = 0

    @property
    def is_exact(self) -> bool:
        """Whether all times per request are there."""
        return self.num_requests <= self._most_requests

    @property
    def num_good(self) -> int:
        """Requests that met every level."""
        return self._past_good + int(np.count_nonzero(self._levels.met(self.requests)))

    @property
    def notes(self) -> tuple[str, ...]:
        """What is not exact, for who reads the figures."""
        rough = ([] if self.is_exact else ["TTFT, TPOT, E2EL"]) + ([] if self._gaps.is_exact else ["ITL"])
        if not rough:
            return ()
        return (f"too many to keep each: percentiles of {', '.join(rough)} are within 1/2,000 of their value",)

    def arrived(self, number: int, now_ns: int) -> None:
        """A request was submitted; numbers count up from 0."""
        if self.requests.is_full:
            if number < self._most_requests:
                self.requests.grow()
            else:
                past = self.requests.past()
                self._take(past, self._past)
                self._past_good += int(np.count_nonzero(self._levels.met(self.requests)[: len(past)] & past))
                self.requests.give_up(past)
        self.requests.add(number, now_ns)
        self.num_requests = number + 1

    def let_go(self) -> None:
        """Keeps no times of requests that are over any more, however few they are."""
        self._most_requests = 0

    def delivered(self, output: StepOutput, now_ns: int) -> None:
        """Tokens and notices reached their users."""
        self.overshoot_tokens += output.overshoot
        if len(output.requests):
            table = self.requests
            rows = table.rows(output.requests)
            self.output_tokens += len(rows)
            before = table.last_ns[rows]
            table.last_ns[rows] = now_ns
            if True in (rows[1:] == rows[:-1]).tobytes():
                # Tokens held back for a stop string arrive together: no time passes between them.
                np.add.at(table.num_tokens, rows, 1)
                again = np.concatenate(([False], rows[1:] == rows[:-1]))
                before[again] = now_ns
            else:
                table.num_tokens[rows] += 1
            self._record(rows, before, now_ns)
        self.finished(output.finished)

    def finished(self, notices: Sequence[Finished]) -> None:
        """Notices reached their users, behind the tokens."""
        for notice in notices:
            self.ended[notice.reason] += 1
            row = self.requests.row(notice.number)
            self.requests.ended[row] = True
            self.requests.completed[row] = notice.reason in (FinishReason.LENGTH, FinishReason.STOP)

    def delivered_each(
        self, requests: NDArray[np.int64], times_ns: list[int], tokens: NDArray[np.int64] | None = None
    ) -> None:
        """`delivered` at each of these times: a token for each of `requests`; only for those that have not got `tokens`
        of them yet, where that is given, and somebody has not at any of the times."""
        table, steps, count = self.requests, len(times_ns), len(requests)
        rows = table.rows(requests)
        self._record(rows, table.last_ns[rows], times_ns[0])
        if tokens is None:
            self.output_tokens += steps * count
            table.num_tokens[rows] += steps
            table.last_ns[rows] = times_ns[-1]
            there: Iterable[int] = repeat(count, steps - 1)
        else:
            got = np.minimum(tokens, steps)
            counts = sorted(got.tolist())
            self.output_tokens += sum(counts)
            table.num_tokens[rows] += got
            table.last_ns[rows] = np.array(times_ns)[got - 1]
            firsts = [1, *counts]  # i requests have got all they get when `counts[i - 1]` times are over
            there = chain.from_iterable(
                [repeat(count - gone, end - first) for gone, (first, end) in enumerate(pairwise(firsts))]
            )
        self._gaps.add_each(map(sub, times_ns[1:], times_ns), there)

    def summary(self) -> dict[str, dict[str, float] | None]:
        """ttft_ms, tpot_ms, itl_ms, e2el_ms: mean and percentiles in milliseconds; None where there are none."""
        if self.is_exact:
            found = {name: _describe(times) for name, times in self._times().items()}
        else:
            found = {name: one.describe(PERCENTILES, 1e6 * PARTS[name]) for name, one in self._tallies().items()}
        itl = self._gaps.describe(PERCENTILES, 1e6)
        return {"ttft_ms": found["ttft"], "tpot_ms": found["tpot"], "itl_ms": itl, "e2el_ms": found["e2el"]}

    def quantiles_ms(self) -> dict[str, list[float] | None]:
        """Hundredths of the distributions over requests, from the least to the most: 101 values each."""
        shares = np.linspace(0, 100, 101)
        if not self.is_exact:
            return {name: one.quantiles(shares.tolist(), 1e6 * PARTS[name]) for name, one in self._tallies().items()}
        times = self._times()
        return {name: (np.percentile(ns, shares) / 1e6).tolist() if len(ns) else None for name, ns in times.items()}

    def gaps(self) -> NDArray[np.int64]:
        """Every inter-token latency, in nanoseconds, in order of delivery while there are few enough of them."""
        return np.repeat(*self._gaps.entries())

    @classmethod
    def merged(cls, parts: Sequence[ServingMetrics], numbers: Sequence[NDArray[np.int64]] | None) -> ServingMetrics:
        """The metrics of several engines with the same levels as one; request i of part k is request `numbers[k][i]` of
        the whole. Without numbers the whole keeps no times per request, as its parts need not."""
        whole = cls(levels=parts[0]._levels)
        whole._gaps = Tally.merged([part._gaps for part in parts])
        for part in parts:
            whole.num_requests += part.num_requests
            whole.output_tokens += part.output_tokens
            whole.overshoot_tokens += part.overshoot_tokens
            for reason, count in part.ended.items():
                whole.ended[reason] += count
        if numbers is not None:
            whole.requests = RequestTable.merged([part.requests for part in parts], numbers)
            return whole
        whole.let_go()
        whole._past_good = sum(part.num_good for part in parts)
        tallies = [part._tallies() for part in parts]
        whole._past = {name: Tally.merged([each[name] for each in tallies]) for name in PARTS}
        return whole

    def _times(self, among: Mask | None = None) -> dict[str, NDArray[np.int64] | NDArray[np.float64]]:
        """TTFT, TPOT and E2EL of the rows that count, in nanoseconds; of all, or of those among these rows."""
        table = self.requests
        counts = table.completed & (table.num_tokens > 0)
        if among is not None:
            counts[: len(among)] &= among
        done = np.flatnonzero(counts)
        many = done[table.num_tokens[done] > 1]
        return {
            "ttft": table.first_ns[done] - table.arrival_ns[done],
            "tpot": (table.last_ns[many] - table.first_ns[many]) / (table.num_tokens[many] - 1),
            "e2el": table.last_ns[done] - table.arrival_ns[done],
        }

    def _take(self, among: Mask | None, tallies: Mapping[str, Tally]) -> None:
        """Adds the times of rows to the tallies."""
        for name, times in self._times(among).items():
            tallies[name].add_each(np.rint(times * PARTS[name]).astype(np.int64).tolist(), repeat(1, len(times)))

    def _tallies(self) -> dict[str, Tally]:
        """The times of all requests, with and without a row."""
        here = {name: Tally(MOST_ENTRIES, is_exact=False) for name in PARTS}
        self._take(None, here)
        return {name: Tally.merged([past, here[name]]) for name, past in self._past.items()}

    def _record(self, rows: NDArray[np.int64], before: NDArray[np.int64], now_ns: int) -> None:
        """First tokens, and gaps behind others. Requests that got their last token together have equal gaps, so a step
        needs few numbers."""
        last = before.item(0)
        if False not in (before == last).tobytes():
            if last == NOT_YET:
                self.requests.first_ns[rows] = now_ns
            else:
                self._gaps.add(now_ns - last, len(before))
            return
        times = before.tolist()
        for last in sorted(set(times), reverse=True):
            if last == NOT_YET:
                self.requests.first_ns[rows[before == NOT_YET]] = now_ns
            else:
                self._gaps.add(now_ns - last, times.count(last))


def _describe(nanoseconds: NDArray[np.int64] | NDArray[np.float64]) -> dict[str, float] | None:
    if not len(nanoseconds):
        return None
    milliseconds = np.asarray(nanoseconds, dtype=np.float64) / 1e6
    values = np.percentile(milliseconds, PERCENTILES)
    named = {f"p{p}": float(v) for p, v in zip(PERCENTILES, values, strict=True)}
    return {"mean": float(milliseconds.mean()), **named}
