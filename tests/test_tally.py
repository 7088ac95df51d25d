"""Tallies against the numbers written out."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncsched.tally import Tally

PERCENTILES = (0, 1, 50, 90, 99, 100)
ENTRIES = st.lists(st.tuples(st.integers(0, 10**12), st.integers(1, 50)), min_size=1, max_size=40)


def filled(entries: list[tuple[int, int]], most: int) -> Tally:
    tally = Tally(most)
    for value, count in entries:
        tally.add(value, count)
    return tally


def expected(entries: list[tuple[int, int]]) -> list[float]:
    values = np.repeat(*np.array(entries, dtype=np.int64).T) / 1e6
    return [values.mean(), *np.percentile(values, PERCENTILES)]


@given(ENTRIES)
def test_a_tally_with_room_is_exact(entries: list[tuple[int, int]]) -> None:
    tally = filled(entries, 100)
    described = tally.describe(PERCENTILES, 1e6)
    assert list(described.values()) == pytest.approx(expected(entries), rel=1e-12)
    assert tally.is_exact
    assert list(zip(*map(np.ndarray.tolist, tally.entries()), strict=True)) == entries


@given(ENTRIES)
def test_a_tally_without_room_is_within_its_bound(entries: list[tuple[int, int]]) -> None:
    described = filled(entries, 3).describe(PERCENTILES, 1e6)
    assert list(described.values()) == pytest.approx(expected(entries), rel=1 / 2000, abs=1e-5)


@given(ENTRIES)
def test_equal_values_need_no_room(entries: list[tuple[int, int]]) -> None:
    few = [(value % 4, count) for value, count in entries]
    tally = filled(few * 3, 8)
    assert tally.is_exact
    assert list(tally.describe(PERCENTILES, 1e6).values()) == pytest.approx(expected(few * 3), rel=1e-12)


@given(ENTRIES, ENTRIES)
def test_merging_is_adding_all(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    merged = Tally.merged([filled(first, 100), filled(second, 100)])
    assert list(merged.describe(PERCENTILES, 1e6).values()) == pytest.approx(expected(first + second), rel=1e-12)


def test_memory_does_not_grow_with_numbers() -> None:
    tally, random = Tally(1 << 12), np.random.default_rng(0)
    sizes = []
    for _ in range(20):
        tally.add_each(random.integers(10**6, 10**9, 20_000).tolist(), [3] * 20_000)
        sizes.append(len(tally.entries()[0]))
    assert not tally.is_exact
    assert max(sizes[10:]) <= 2 * (1 << 14)  # ten octaves of 1,024 values, twice over, and what is not summed up yet
    assert sum(tally.entries()[1].tolist()) == 20 * 20_000 * 3


def test_an_empty_tally_describes_nothing() -> None:
    assert Tally().describe(PERCENTILES, 1.0) is None
