"""A multiset of whole numbers for percentiles: exact while there are few different ones, then with a bounded error.

Up to `most` entries are kept as they come. When there are more, equal values become one; and where there are too many
different ones, each gives up its last bits, by which it moves by less than 1 / 2,000 of itself. From then on memory
does not grow, however many numbers are added, and all values are taken without their last bits: what a tally says
follows from the numbers alone, not from when there were too many. Sum, mean, least and largest value stay exact.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

KEPT_BITS = 11  # leading bits of a value that are kept: half a unit of the last one is 1/2048 of the value at most
LOW_BITS = 20  # of a value, added up apart, so that no sum is too large for its type


class Known(NamedTuple):
    """What is known of values that have given up their last bits."""

    sum: int
    least: int
    largest: int


NOTHING = Known(0, 2**63 - 1, 0)


class Tally:
    """Whole numbers of at least 0, each with how often it came. `most` bounds the entries kept; with `is_exact` False
    values give up their last bits from the start."""

    def __init__(self, most: int = 1 << 20, *, is_exact: bool = True) -> None:
        self.is_exact = is_exact
        self._most = most
        self._limit = most  # entries before equal ones become one again
        self._values = array("q")
        self._counts = array("q")
        self._coarse = 0  # entries at the front that have given up their last bits
        self._past = NOTHING  # of those

    def add(self, value: int, count: int) -> None:
        self._values.append(value)
        self._counts.append(count)
        if len(self._values) > self._limit:
            self._compact()

    def add_each(self, values: Iterable[int], counts: Iterable[int]) -> None:
        """Each of the values, as often as the count beside it says."""
        self._values.extend(values)
        self._counts.extend(counts)
        if len(self._values) > self._limit:
            self._compact()

    def entries(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Values and counts, in the order in which they came as long as there was room; a value may be there twice."""
        return np.array(self._values, dtype=np.int64), np.array(self._counts, dtype=np.int64)

    def describe(self, percentiles: Sequence[float], unit: float) -> dict[str, float] | None:
        """Mean and percentiles, as numpy interpolates them, in this many of the values' units; None without values."""
        quantiles = self.quantiles(percentiles, unit)
        if quantiles is None:
            return None
        named = {f"p{percentile}": quantile for percentile, quantile in zip(percentiles, quantiles, strict=True)}
        return {"mean": self._known().sum / sum(self._counts) / unit, **named}

    def quantiles(self, percentiles: Sequence[float], unit: float) -> list[float] | None:
        """The percentiles alone. The 0th and the 100th are always exact."""
        values, counts = self.entries()
        if not len(values):
            return None
        known = self._known()
        if not self.is_exact:
            values = np.clip(_coarse(values), known.least, known.largest)
        order = np.argsort(values, kind="stable")
        values, ends = values[order], np.cumsum(counts[order])
        total = int(ends[-1])

        def at(rank: int) -> float:
            if rank in (0, total - 1):
                return float(known.largest if rank else known.least) / unit
            return float(values[np.searchsorted(ends, rank, side="right")]) / unit

        found = []
        for percentile in percentiles:
            place = (total - 1) * (percentile / 100)
            low = min(int(place), total - 1)
            a, b = at(low), at(min(low + 1, total - 1))
            share = place - low
            found.append(a + (b - a) * share if share < 0.5 else b - (b - a) * (1 - share))
        return found

    @classmethod
    def merged(cls, tallies: Sequence[Tally]) -> Tally:
        """All numbers of the tallies. The result follows from the numbers alone where it is not exact."""
        result = cls(
            max([tally._most for tally in tallies], default=1), is_exact=all(tally.is_exact for tally in tallies)
        )
        for tally in tallies:
            if result.is_exact:
                result._values += tally._values
                result._counts += tally._counts
            else:
                result._past = _both(result._past, tally._known())
                result._values += array("q", _coarse(tally.entries()[0]).tobytes())
                result._counts += tally._counts
                result._coarse = len(result._values)
            if len(result._values) > result._limit:
                result._compact()
        return result

    def _known(self) -> Known:
        """Sum, least and largest of all values as they came."""
        values, counts = self.entries()
        return _both(self._past, _known(values[self._coarse :], counts[self._coarse :]))

    def _compact(self) -> None:
        values, counts = self.entries()
        if self.is_exact:
            values, counts = _summed(values, counts)
            self.is_exact = len(values) <= self._most // 2
        if not self.is_exact:
            self._past = _both(self._past, _known(values[self._coarse :], counts[self._coarse :]))
            values, counts = _summed(_coarse(values), counts)
            self._coarse = len(values)
            self._limit = max(self._most, 2 * len(values))
        self._values, self._counts = array("q", values.tobytes()), array("q", counts.tobytes())


def _both(one: Known, other: Known) -> Known:
    return Known(one.sum + other.sum, min(one.least, other.least), max(one.largest, other.largest))


def _known(values: NDArray[np.int64], counts: NDArray[np.int64]) -> Known:
    if not len(values):
        return NOTHING
    high, low = values >> LOW_BITS, values & ((1 << LOW_BITS) - 1)
    total = (int(np.dot(high, counts)) << LOW_BITS) + int(np.dot(low, counts))
    return Known(total, int(values.min()), int(values.max()))


def _summed(values: NDArray[np.int64], counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Different values, in order, and how often each came."""
    different, places = np.unique(values, return_inverse=True)
    sums = np.zeros(len(different), dtype=np.int64)
    np.add.at(sums, places, counts)
    return different, sums


def _coarse(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each value as the middle of those that share its leading bits."""
    bits = np.frexp(values.astype(np.float64))[1].astype(np.int64)  # exact below 2**53 ns, which is 104 days
    dropped = np.maximum(bits - KEPT_BITS, 0)
    return (values >> dropped << dropped) + (1 << dropped >> 1)
