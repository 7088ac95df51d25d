"""A multiset of whole numbers for percentiles: exact while there are few different ones, then with a bounded error.

Up to `most` entries are kept as they come. When there are more, equal values become one; and where there are too many
different ones, each gives up its last bits, by which it moves by less than 1 / 2,000 of itself. From then on memory
does not grow, however many numbers are added.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

KEPT_BITS = 11  # leading bits of a value that are kept: half a unit of the last one is 1/2048 of the value at most


class Tally:
    """Whole numbers of at least 0, each with how often it came. `most` bounds the entries kept."""

    def __init__(self, most: int = 1 << 20) -> None:
        self.is_exact = True
        self._most = most
        self._values = array("q")
        self._counts = array("q")

    def add(self, value: int, count: int) -> None:
        self._values.append(value)
        self._counts.append(count)
        if len(self._values) > self._most:
            self._compact()

    def add_each(self, values: Iterable[int], counts: Iterable[int]) -> None:
        """Each of the values, as often as the count beside it says."""
        self._values.extend(values)
        self._counts.extend(counts)
        if len(self._values) > self._most:
            self._compact()

    def entries(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Values and counts, in the order in which they came as long as there was room; a value may be there twice."""
        return np.array(self._values, dtype=np.int64), np.array(self._counts, dtype=np.int64)

    def describe(self, percentiles: Sequence[int], unit: float) -> dict[str, float] | None:
        """Mean and percentiles, as numpy interpolates them, in this many of the values' units; None without values."""
        values, counts = self.entries()
        if not len(values):
            return None
        order = np.argsort(values, kind="stable")
        values, ends = values[order], np.cumsum(counts[order])
        total = int(ends[-1])
        named = {"mean": int(np.dot(values, counts[order])) / total / unit}
        for percentile in percentiles:
            place = (total - 1) * (percentile / 100)
            low = min(int(place), total - 1)
            a, b = (
                float(values[np.searchsorted(ends, at, side="right")]) / unit for at in (low, min(low + 1, total - 1))
            )
            share = place - low
            named[f"p{percentile}"] = a + (b - a) * share if share < 0.5 else b - (b - a) * (1 - share)
        return named

    @classmethod
    def merged(cls, tallies: Sequence[Tally]) -> Tally:
        result = cls(max([tally._most for tally in tallies], default=1))
        result.is_exact = all(tally.is_exact for tally in tallies)
        for tally in tallies:
            result._values += tally._values
            result._counts += tally._counts
            if len(result._values) > result._most:
                result._compact()
        return result

    def _compact(self) -> None:
        values, counts = _summed(*self.entries())
        if len(values) > self._most // 2:
            self.is_exact = False
            values, counts = _summed(_coarse(values), counts)
            self._most = max(self._most, 2 * len(values))
        self._values, self._counts = array("q", values.tobytes()), array("q", counts.tobytes())


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
