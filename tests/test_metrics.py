"""Serving metrics against their definitions, computed per request in plain loops."""

from __future__ import annotations

import itertools
from statistics import fmean
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import asyncsched.request_table
from asyncsched.goodput import ServiceLevels
from asyncsched.metrics import ServingMetrics
from asyncsched.plan import StepOutput
from asyncsched.request import NO_TOKENS, Finished, FinishReason


class Delivery(NamedTuple):
    """Tokens per request, in order of delivery, and who ends with it."""

    now_ns: int
    counts: tuple[tuple[int, int], ...]
    ended: tuple[tuple[int, FinishReason], ...]
    overshoot: int


def output(delivery: Delivery) -> StepOutput:
    requests = np.array([number for number, count in delivery.counts for _ in range(count)], dtype=np.int64)
    finished = tuple(Finished(str(number), number, reason, NO_TOKENS) for number, reason in delivery.ended)
    return StepOutput(0, requests, requests.astype(np.int32), finished, delivery.overshoot)


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[int], list[Delivery]]:
    """Arrivals, and deliveries as an engine makes them: nothing after the end, everybody ends."""
    count = draw(st.integers(1, 5))
    arrivals = sorted(draw(st.lists(st.integers(0, 50), min_size=count, max_size=count)))
    alive, now, deliveries = list(range(count)), 50, []
    while alive:
        now += draw(st.integers(0, 3)) * 1_000_003
        counts = tuple((number, draw(st.sampled_from([1, 1, 1, 0, 2, 3]))) for number in alive if draw(st.booleans()))
        ended = tuple((number, draw(st.sampled_from(FinishReason))) for number in alive if draw(st.integers(0, 3)) == 0)
        deliveries.append(Delivery(now, tuple(pair for pair in counts if pair[1]), ended, draw(st.integers(0, 2))))
        alive = [number for number in alive if number not in dict(ended)]
    return arrivals, deliveries


def record(arrivals: list[int], deliveries: list[Delivery]) -> ServingMetrics:
    metrics = ServingMetrics()
    for number, now_ns in enumerate(arrivals):
        metrics.arrived(number, now_ns)
    for delivery in deliveries:
        metrics.delivered(output(delivery), delivery.now_ns)
    return metrics


@settings(max_examples=150)
@given(histories())
def test_metrics_are_what_their_definitions_say(history):
    arrivals, deliveries = history
    metrics = record(arrivals, deliveries)
    times = [
        [d.now_ns for d in deliveries for request, tokens in d.counts if request == number for _ in range(tokens)]
        for number in range(len(arrivals))
    ]
    reasons = {number: reason for d in deliveries for number, reason in d.ended}
    done = [n for n, reason in reasons.items() if reason in (FinishReason.LENGTH, FinishReason.STOP) and times[n]]
    expected = {
        "ttft_ms": [times[n][0] - arrivals[n] for n in done],
        "tpot_ms": [(times[n][-1] - times[n][0]) / (len(times[n]) - 1) for n in done if len(times[n]) > 1],
        "itl_ms": [after - before for row in times for before, after in itertools.pairwise(row)],
        "e2el_ms": [times[n][-1] - arrivals[n] for n in done],
    }
    summary = metrics.summary()
    assert summary.keys() == expected.keys()
    for name, values in expected.items():
        found = summary[name]
        if not values:
            assert found is None
            continue
        assert found is not None
        assert found["mean"] == pytest.approx(fmean(values) / 1e6)
        for percent in (50, 90, 95, 99):
            assert found[f"p{percent}"] == pytest.approx(np.percentile(values, percent) / 1e6)
    assert sorted(metrics.gaps().tolist()) == sorted(expected["itl_ms"])
    assert metrics.output_tokens == sum(map(len, times))
    assert metrics.overshoot_tokens == sum(d.overshoot for d in deliveries)
    assert {reason: n for reason, n in metrics.ended.items() if n} == {
        reason: list(reasons.values()).count(reason) for reason in set(reasons.values())
    }


def test_one_request_by_hand():
    """Arrives at 1 ms; tokens at 4, 6 and 12 ms."""
    deliveries = [Delivery(ms * 1_000_000, ((0, 1),), (), 0) for ms in (4, 6)]
    deliveries.append(Delivery(12_000_000, ((0, 1),), ((0, FinishReason.STOP),), 3))
    summary = record([1_000_000], deliveries).summary()
    assert {name: values["mean"] for name, values in summary.items() if values} == {
        "ttft_ms": 3,
        "tpot_ms": 4,
        "itl_ms": 4,
        "e2el_ms": 11,
    }
    assert summary["itl_ms"]["p50"] == 4
    assert summary["itl_ms"]["p99"] == pytest.approx(5.96)


def test_nobody_leaves_no_numbers():
    assert set(ServingMetrics().summary().values()) == {None}
    rejected = record([0], [Delivery(5, (), ((0, FinishReason.REJECTED),), 0)])
    assert set(rejected.summary().values()) == {None}
    assert rejected.num_requests == rejected.ended[FinishReason.REJECTED] == 1


def test_more_requests_than_the_first_arrays_hold():
    arrivals = list(range(200))
    deliveries = [Delivery(1000 + number, ((number, 1),), ((number, FinishReason.LENGTH),), 0) for number in arrivals]
    metrics = record(arrivals, deliveries)
    assert metrics.num_requests == metrics.output_tokens == 200
    assert metrics.summary()["ttft_ms"]["mean"] == pytest.approx(1000 / 1e6)


# ---- more requests than are kept -----------------------------------------------------------------------------------

LEVELS = ServiceLevels(ttft_ms=40, tpot_ms=6, e2el_ms=60)
REASONS = (FinishReason.LENGTH, FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR)


def serve(metrics: list[ServingMetrics], seed: int, count: int, at_once: int, stragglers: int = 0) -> None:
    """So many requests to each of the metrics, `at_once` of them at a time. The first few stay until the end."""
    random = np.random.default_rng(seed)
    now, came, alive = 0, 0, []
    while alive or came < count:
        now += int(random.integers(1, 5_000_000))
        while came < count and len(alive) < at_once:
            for one in metrics:
                one.arrived(came, now)
            alive.append(came)
            came += 1
            now += int(random.integers(0, 1_000_000))
        some = [number for number in alive if random.random() < 0.7]
        counts = tuple((number, int(random.choice([1, 1, 1, 2]))) for number in some)
        may_end = [number for number in alive if number >= stragglers or came == count]
        ended = tuple((number, REASONS[random.integers(5)]) for number in may_end if random.random() < 0.2)
        delivery = output(Delivery(now, counts, ended, 1))
        for one in metrics:
            one.delivered(delivery, now)
            table = one.requests
            assert table.number[table.rows(np.array(alive))].tolist() == alive
            assert [table.row(number) for number in alive] == table.rows(np.array(alive)).tolist()
        alive = [number for number in alive if number not in dict(ended)]
        if alive and random.random() < 0.3:
            left = np.array([random.integers(1, 5) for _ in alive])
            left[0] = 4  # somebody gets a token at each of the times
            now += 1_000_000
            for one in metrics:
                one.delivered_each(np.array(alive), [now, now + 5, now + 8, now + 300], left)
            now += 300


def check_close(found: ServingMetrics, exact: ServingMetrics) -> None:
    """Means, extremes and counts are equal, percentiles within the bound."""
    assert (exact.is_exact, found.is_exact) == (True, False)
    assert exact.notes == ()
    assert found.notes == ("too many to keep each: percentiles of TTFT, TPOT, E2EL are within 1/2,000 of their value",)
    assert 0 < exact.num_good < exact.num_requests
    for name in ("num_requests", "num_good", "ended", "output_tokens", "overshoot_tokens"):
        assert getattr(found, name) == getattr(exact, name), name
    assert sorted(found.gaps().tolist()) == sorted(exact.gaps().tolist())
    for name, expected in exact.summary().items():
        assert found.summary()[name] == pytest.approx(expected, rel=1 / 2000), name
        assert found.summary()[name]["mean"] == pytest.approx(expected["mean"], rel=1e-9), name
    for name, expected in exact.quantiles_ms().items():
        quantiles = found.quantiles_ms()[name]
        assert quantiles == pytest.approx(expected, rel=1 / 2000), name
        assert [quantiles[0], quantiles[-1]] == pytest.approx([expected[0], expected[-1]], rel=1e-9), name


@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    most=st.integers(0, 200),
    at_once=st.integers(1, 40),
    stragglers=st.integers(0, 2),
    fewest=st.sampled_from([1, 3, 64]),
)
def test_with_fewer_times_kept_figures_are_within_their_bound(seed, most, at_once, stragglers, fewest):
    exact = ServingMetrics(levels=LEVELS)
    bounded = ServingMetrics(most_requests=most, levels=LEVELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncsched.request_table, "FEWEST", fewest)
        early = ServingMetrics(levels=LEVELS)
        early.let_go()
        serve([exact, bounded, early], seed, 300, at_once, min(stragglers, at_once - 1))
    check_close(bounded, exact)
    # What is not exact follows from the times alone, not from when they were let go of.
    assert bounded.summary() == early.summary()
    assert bounded.quantiles_ms() == early.quantiles_ms()


def test_as_many_as_are_kept_are_exact():
    exact, bounded = ServingMetrics(), ServingMetrics(most_requests=300)
    serve([exact, bounded], 0, 300, 20)
    assert bounded.is_exact
    assert bounded.summary() == exact.summary()
    assert bounded.quantiles_ms() == exact.quantiles_ms()
    assert bounded.requests.number[:300].tolist() == list(range(300))


@pytest.mark.parametrize("stays", [False, True])
def test_memory_does_not_grow_with_requests_that_are_over(stays):
    """Not even where one is there all the time. 40 requests come, get two tokens and end, 1,000 times."""
    metrics, random, now, came = ServingMetrics(most_requests=100), np.random.default_rng(0), 0, 0
    octaves = {"ttft": 4, "tpot": 3, "e2el": 3}  # of the times below, 1,024 values each, and as many not yet summed up
    if stays:
        metrics.arrived(0, 0)
        came = 1
    for _ in range(1_000):
        for number in range(came, came + 40):
            now += int(random.integers(1, 100_000))
            metrics.arrived(number, now)
        counts = tuple((number, 1) for number in range(came, came + 40))
        now += int(random.integers(10**6, 4 * 10**6))
        metrics.delivered(output(Delivery(now, counts, (), 0)), now)
        now += int(random.integers(10**6, 4 * 10**6))
        ended = tuple((number, FinishReason.LENGTH) for number in range(came, came + 40))
        metrics.delivered(output(Delivery(now, counts, ended, 0)), now)
        came += 40
    assert not metrics.is_exact
    assert [len(getattr(metrics.requests, name)) for name in asyncsched.request_table.EMPTY] == [128] * 7
    for name, tally in metrics._past.items():
        values, counts = tally.entries()
        assert len(values) <= 2 * 1024 * octaves[name], name
        assert came - 130 < counts.sum() < came, name


@given(seed=st.integers(0, 10**6), parts=st.integers(1, 4), random=st.randoms(use_true_random=False))
@settings(max_examples=15)
def test_several_that_let_go_are_merged_in_any_order(seed, parts, random):
    each = [ServingMetrics(levels=LEVELS) for _ in range(parts)]
    exact = [ServingMetrics(levels=LEVELS) for _ in range(parts)]
    for number, one in enumerate(each):
        one.let_go()
        serve([one, exact[number]], seed + number, 100, 10)
    places = np.arange(100 * parts)
    whole = ServingMetrics.merged(exact, [places[number::parts] for number in range(parts)])
    found = ServingMetrics.merged(each, None)
    check_close(found, whole)
    random.shuffle(each)
    again = ServingMetrics.merged(each, None)
    assert (again.summary(), again.quantiles_ms()) == (found.summary(), found.quantiles_ms())
