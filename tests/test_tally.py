"""Tallies against the numbers written out."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncsched.tally import Tally

PERCENTILES = (0, 1, 50, 90, 99, 99.9, 100)
ENTRIES = st.lists(st.tuples(st.integers(0, 10**12), st.integers(1, 50)), min_size=1, max_size=40)


def filled(entries: list[tuple[int, int]], most: int, *, is_exact: bool = True) -> Tally:
    tally = Tally(most, is_exact=is_exact)
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


@given(ENTRIES, st.integers(1, 50), st.booleans())
def test_a_tally_without_room_is_within_its_bound(entries: list[tuple[int, int]], most: int, is_exact: bool) -> None:
    tally = filled(entries, most, is_exact=is_exact)
    described, known = list(tally.describe(PERCENTILES, 1e6).values()), expected(entries)
    assert described == pytest.approx(known, rel=1 / 2000)
    assert described[1:] == sorted(described[1:])
    for exact in (0, 1, -1):  # mean, least, largest
        assert described[exact] == pytest.approx(known[exact], rel=1e-12)


@given(ENTRIES, st.integers(1, 10), st.integers(1, 10), st.randoms(use_true_random=False))
def test_what_is_not_exact_follows_from_the_numbers_alone(
    entries: list[tuple[int, int]], most: int, parts: int, random: Random
) -> None:
    """Not from their order, from how much room there was, or from the tallies they came through."""
    expected = filled(entries, 10**6, is_exact=False).describe(PERCENTILES, 1e6)
    random.shuffle(entries)
    assert filled(entries, most, is_exact=False).describe(PERCENTILES, 1e6) == expected
    tallies = [filled(entries[part::parts], most, is_exact=False) for part in range(parts)]
    random.shuffle(tallies)
    assert Tally.merged(tallies).describe(PERCENTILES, 1e6) == expected


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


def test_one_that_is_not_exact_makes_the_whole_so() -> None:
    entries = [(10**9 + value, 1) for value in range(50)]
    exact, rough = filled(entries, 100), filled(entries, 100, is_exact=False)
    for tallies in ([exact, rough], [rough, exact]):
        merged = Tally.merged(tallies)
        assert not merged.is_exact
        assert merged.describe(PERCENTILES, 1e6) == filled(entries * 2, 100, is_exact=False).describe(PERCENTILES, 1e6)


def test_no_sum_is_too_large() -> None:
    tally = Tally(2)
    for value in (2**60, 2**60 + 2**40, 2**59):
        tally.add(value, 1 << 20)
    assert tally.describe((), 1.0) == {"mean": pytest.approx((2**60 + 2**60 + 2**40 + 2**59) / 3, rel=1e-15)}


def test_an_empty_tally_describes_nothing() -> None:
    assert Tally().describe(PERCENTILES, 1.0) is None
