"""Times of requests, a row each, in memory that follows from how many are there at once and not from how many came.

Requests are numbered as they come, and rows are in that order. Until rows are given up, which may be when their
requests have ended, request i is row i. Knows no metrics: who gives rows up has taken from them what is of use.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
Mask = NDArray[np.bool_]

NOT_YET = -1
FEWEST = 64  # rows that there is room for
EMPTY: dict[str, int | bool] = {
    "number": 0,
    "arrival_ns": 0,
    "first_ns": NOT_YET,
    "last_ns": NOT_YET,
    "num_tokens": 0,
    "completed": False,
    "ended": False,
}


class RequestTable:
    """42 bytes per row. Only the first `count` rows are in use.

    number              of the request
    arrival_ns          when it came
    first_ns, last_ns   when it got its first token, and the newest; NOT_YET
    num_tokens          how many it has got
    completed           whether it ended by a stop or by length
    ended               whether it ended
    """

    number: IntArray
    arrival_ns: IntArray
    first_ns: IntArray
    last_ns: IntArray
    num_tokens: IntArray
    completed: Mask
    ended: Mask

    def __init__(self) -> None:
        self.count = 0
        self._first = 0  # the number of the first row
        self._shift = np.array(0)  # the same, as numpy subtracts it fastest
        self._has_gaps = False  # between numbers
        self._resize(np.zeros(0, dtype=np.int64), FEWEST)

    @property
    def is_full(self) -> bool:
        return self.count == len(self.number)

    def add(self, number: int, now_ns: int) -> None:
        """The row of a request that comes now. Ask `is_full` first."""
        self.number[self.count], self.arrival_ns[self.count] = number, now_ns
        self.count += 1

    def rows(self, numbers: IntArray) -> IntArray:
        """int64[n]: where these requests are."""
        if self._has_gaps:
            return self.number[: self.count].searchsorted(numbers)
        return numbers - self._shift if self._first else numbers

    def row(self, number: int) -> int:
        return int(self.number[: self.count].searchsorted(number)) if self._has_gaps else number - self._first

    def grow(self) -> None:
        self._resize(np.arange(self.count), 2 * len(self.number))

    def past(self) -> Mask:
        """bool[count]: rows to give up. Those before all requests that have not ended, so that the others can be found
        by subtraction; where these are few, as somebody has been there for long, all that have ended."""
        ended = self.ended[: self.count]
        front = self.count if ended.all() else int(ended.argmin())
        return ended if 2 * front < self.count else np.arange(self.count) < front

    def give_up(self, past: Mask) -> None:
        """Forgets these rows, and makes room where little was gained."""
        following = int(self.number[self.count - 1]) + 1
        stay, room = np.flatnonzero(~past), len(self.number)
        self.count = len(stay)
        self._resize(stay, room if 2 * len(stay) <= room else 2 * room)
        self._first = int(self.number[0]) if self.count else following
        self._shift = np.array(self._first)
        self._has_gaps = self.count > 0 and following - self._first != self.count

    @classmethod
    def merged(cls, tables: Sequence[RequestTable], numbers: Sequence[IntArray]) -> RequestTable:
        """Tables that have given nothing up as one; request i of table k is request `numbers[k][i]` of the whole."""
        whole = cls()
        whole.count = sum(table.count for table in tables)
        whole._resize(np.zeros(0, dtype=np.int64), whole.count)
        for table, places in zip(tables, numbers, strict=True):
            for name in EMPTY:
                getattr(whole, name)[places] = getattr(table, name)[: table.count]
        whole.number[:] = np.arange(whole.count)
        return whole

    def _resize(self, stay: IntArray, room: int) -> None:
        """Has room for so many rows, and keeps some of the old ones."""
        for name, empty in EMPTY.items():
            column = np.full(room, empty)
            if len(stay):
                column[: len(stay)] = getattr(self, name)[stay]
            setattr(self, name, column)
