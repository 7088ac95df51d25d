"""Serving metrics against their definitions, computed per request in plain loops."""

from __future__ import annotations

import itertools
from statistics import fmean
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
