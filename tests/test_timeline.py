"""The timeline schema, its export, and the accounting of where the compute lane waited."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncsched.timeline import IDLE_CAUSES, LANES, LaneAccount, Span, StepTimes, Timeline
from sim.costs import D2H_BYTES_PER_SAMPLE, H2D_BYTES_PER_SEQ, H2D_BYTES_PER_TOKEN
from sim.run import simulate
from sim.scenario import Scenario

SPANS = [
    Span("host", "plan", 0, 0, 0, 1500, 2),
    Span("h2d", "h2d", 0, 0, 1500, 2000, 64),
    Span("compute", "forward", 0, 0, 2000, 9000, 7),
    Span("d2h", "d2h", 0, 0, 9000, 9001, 8),
    Span("host", "plan", 1, 1, 3000, 4000, 2),
    Span("compute", "forward", 3, 1, 9000, 9500, 2),
]


def small_run(**engine: int):
    return simulate(
        Scenario.from_dict(
            {
                "mode": "async",
                "engine": {
                    "max_num_seqs": 3,
                    "max_num_batched_tokens": 16,
                    "max_model_len": 64,
                    "num_blocks": 32,
                    **engine,
                },
                "host": {"plan_us": 5.0, "fill_us": 2.0, "launch_us": 3.0, "commit_us": 4.0},
                "copy": {"h2d_latency_us": 2.0, "d2h_latency_us": 1.0},
                "gpu": {"kind": "constant", "step_us": 20.0},
                "workload": {
                    "kind": "synthetic",
                    "num_requests": 5,
                    "prompt": {"kind": "uniform", "min_tokens": 1, "max_tokens": 30},
                    "output": {"kind": "fixed", "tokens": 6},
                    "arrivals": {"kind": "all-at-once"},
                },
            }
        ),
        spans=True,
    )


def test_perfetto_has_one_named_track_per_lane_and_every_span_on_its_own():
    trace = json.loads(json.dumps(Timeline(SPANS).to_perfetto()))
    events = trace["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert [names[tid] for tid in sorted(names)] == list(LANES)
    order = {event["tid"]: event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"}
    assert order == {tid: tid for tid in names}
    complete = [event for event in events if event["ph"] == "X"]
    found = [(names[e["tid"]], e["name"], e["args"]["step"], e["args"]["slot"], e["ts"], e["dur"]) for e in complete]
    assert found == [(s.lane, s.name, s.step, s.slot, s.start_ns / 1e3, (s.end_ns - s.start_ns) / 1e3) for s in SPANS]
    assert len({event["pid"] for event in events}) == 1


def test_an_empty_timeline_still_names_its_tracks():
    assert {event["ph"] for event in Timeline().to_perfetto()["traceEvents"]} == {"M"}


@pytest.mark.parametrize(("first", "last", "kept"), [(0, 3, 6), (0, 0, 4), (1, 2, 1), (3, 3, 1), (4, 9, 0), (2, 1, 0)])
def test_a_window_has_the_steps_it_names(first, last, kept):
    timeline = Timeline(list(SPANS))
    window = timeline.window(first, last)
    assert window.spans == [span for span in SPANS if first <= span.step <= last]
    assert len(window.spans) == kept
    assert timeline.spans == SPANS


def test_every_step_of_a_run_has_its_spans_in_order():
    result = small_run()
    order = ["plan", "fill", "h2d", "launch", "forward", "d2h", "collect", "commit"]
    for step in range(result.steps):
        spans = {span.name: span for span in result.timeline.spans if span.step == step}
        assert set(spans) == set(order)
        assert {name: span.lane for name, span in spans.items()} == {
            name: {"h2d": "h2d", "forward": "compute", "d2h": "d2h"}.get(name, "host") for name in order
        }
        assert {span.slot for span in spans.values()} == {step % 2}
        assert spans["plan"].end_ns <= spans["fill"].start_ns
        assert spans["fill"].end_ns <= spans["h2d"].start_ns
        assert max(spans["h2d"].end_ns, spans["launch"].end_ns) <= spans["forward"].start_ns
        assert spans["forward"].end_ns <= spans["d2h"].start_ns
        assert spans["d2h"].end_ns <= spans["collect"].end_ns <= spans["commit"].start_ns


def test_sizes_are_sequences_on_the_host_tokens_on_the_compute_lane_and_bytes_on_the_copy_lanes():
    result = small_run()
    for step in range(result.steps):
        sizes = {span.name: span.size for span in result.timeline.spans if span.step == step}
        sequences, tokens = sizes["plan"], sizes["forward"]
        assert sizes["fill"] == sizes["launch"] == sizes["commit"] == sequences
        assert sizes["h2d"] == H2D_BYTES_PER_TOKEN * tokens + H2D_BYTES_PER_SEQ * sequences
        assert sizes["d2h"] % D2H_BYTES_PER_SAMPLE == 0
        assert sizes["d2h"] <= D2H_BYTES_PER_SAMPLE * sequences


# ---- the account -----------------------------------------------------------------------------------------------------


@st.composite
def step_times(draw: st.DrawFn) -> list[StepTimes]:
    """Steps of a FIFO lane: each enqueued, then ready, then started no earlier than the lane allows."""
    steps: list[StepTimes] = []
    lane = host = 0
    for _ in range(draw(st.integers(1, 8))):
        idle = draw(st.integers(0, 20)) * draw(st.integers(0, 1))
        host += idle + draw(st.integers(0, 20))
        held = draw(st.integers(0, 5))
        before = steps[-1].output_sync_ns if steps else 0
        start = max(lane + before, host + draw(st.integers(0, 10)))
        end = start + draw(st.integers(0, 30))
        steps.append(StepTimes(host, start, end, idle, held))
        lane = end
    return steps


@settings(max_examples=200)
@given(steps=step_times(), tail=st.integers(0, 20), idle=st.integers(0, 20))
def test_every_nanosecond_is_active_or_idle_for_one_cause(steps, tail, idle):
    account = LaneAccount()
    for step in steps:
        account.step(step)
    account.finish(steps[-1].end_ns + tail, idle)
    assert tuple(account.idle) == IDLE_CAUSES
    assert min(account.idle.values()) >= 0
    assert account.busy["compute"] == sum(step.end_ns - step.start_ns for step in steps)
    assert account.busy["compute"] + sum(account.idle.values()) == steps[-1].end_ns + tail


@pytest.mark.parametrize(
    ("times", "idle"),
    [
        (StepTimes(10, 30, 40, 0, 0), {"host": 10, "h2d": 20}),
        (StepTimes(10, 10, 20, 10, 0), {"no_work": 10}),
        (StepTimes(10, 12, 20, 4, 0), {"no_work": 4, "host": 6, "h2d": 2}),
        (StepTimes(10, 10, 20, 0, 3), {"output_sync": 3, "host": 7}),
        (StepTimes(2, 10, 20, 0, 10), {"output_sync": 10}),
        (StepTimes(0, 0, 20, 0, 0), {}),
    ],
)
def test_causes_of_one_gap(times, idle):
    account = LaneAccount()
    account.step(times)
    assert {cause: ns for cause, ns in account.idle.items() if ns} == idle


def test_the_limiting_lane_is_the_busiest():
    account = LaneAccount()
    account.busy.update(host=5, h2d=9, compute=7, d2h=1)
    assert account.limiting_lane == "h2d"
