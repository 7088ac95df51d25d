"""What `experiments/peers.py` tells of a recorded run."""

import importlib
from pathlib import Path

import pytest

from asyncsched.timeline import Span

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


def span(lane: str, name: str, step: int, start_us: int, end_us: int) -> Span:
    return Span(lane, name, step, 0, 1000 * start_us, 1000 * end_us, 1)


def test_the_longest_gap_is_found_with_what_the_host_did_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    longest_gap = importlib.import_module("peers").longest_gap
    spans = [
        span("compute", "forward", 1, 0, 100),
        span("compute", "forward", 3, 900, 1000),
        span("compute", "forward", 2, 110, 200),  # spans come in any order
        span("host", "launch", 3, 190, 310),  # 110 us of it beside the gap
        span("host", "collect", 2, 310, 880),
        span("host", "commit", 2, 880, 890),
    ]
    assert longest_gap(spans) == {"ms": 0.7, "before_step": 3, "host": "collect of step 2, 0.570 ms"}
    assert longest_gap(spans[:1]) == {}
