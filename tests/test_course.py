"""Steps taken at once against the same steps one by one, from states that steps of other prices have left."""

from __future__ import annotations

import random
from itertools import repeat
from typing import Any

import pytest
from mutants.patching import Rewrite

from sim.costs import Around, DecodePrices
from sim.course import Course, StepMoments


def course(draw: random.Random, ahead: int, sync: int) -> Course:
    """Where some steps of random prices lead. Small numbers, so that what is equal is often equal."""
    moments: list[StepMoments] = []
    start = Course([0, 0, 0, 0], 0, draw.randint(0, 4), 0, sync, [(0, draw.randint(0, 9))] * ahead, moments)
    for _ in range(draw.randint(ahead, ahead + 3)):
        if not ahead and draw.random() < 0.3:
            start.idle, start.host = start.idle + 7, start.host + 7
        start.step([around(draw)], [draw.choice((0, 5, 10, 20, 60))], 10**9)
    return start


def around(draw: random.Random) -> Around:
    return Around(*[draw.randint(0, draw.choice((0, 0, 3, 9))) for _ in Around._fields])


def state(course: Course) -> dict[str, Any]:
    return {name: list(value) if name == "flying" else value for name, value in vars(course).items()}


def twice(seed: int) -> tuple[bool, dict[str, Any], dict[str, Any]]:
    """Whether steps could be taken at once, and what came of it; then one by one."""
    draw = random.Random(seed)
    ahead, sync = draw.randint(0, 3), draw.choice((0, 0, 2, 9))
    at_once, one_by_one = (course(random.Random(seed), ahead, sync) for _ in range(2))
    price, shortest, count = around(draw), draw.randint(0, 40), draw.randint(1, 9)
    forwards = [shortest + draw.randint(0, 3) for _ in range(count)]
    until = at_once.host + draw.randint(0, (shortest + 5) * count)
    full = ahead > 0 and at_once.is_full(price, min(forwards))
    if full:
        at_once.glide(price, forwards, until)
    else:
        at_once.take(DecodePrices((price,), forwards), until)
    one_by_one.step(repeat(price), forwards, until)
    return full, state(at_once), state(one_by_one)


def test_steps_at_once_are_steps_one_by_one() -> None:
    full = 0
    for seed in range(20_000):
        could, at_once, one_by_one = twice(seed)
        full += could
        assert at_once == one_by_one, seed
    assert 0.1 < full / 20_000 < 0.9


FAULTS = {
    "input copies may queue at first": ("is_full", "self.h2d > self.host + plan + fill", "False"),
    "output copies may queue": ("is_full", "max(copy_out, commit", "max(0, commit"),
    "output copies may queue at first": ("is_full", ", self.d2h - self.compute)", ", 0)"),
    "the host may be late": ("is_full", "commit + ready, self", "0, self"),
    "the lane may wait": ("is_full", "copy_out + commit + ready >", "copy_out + commit >"),
    "the host may be late for what flies": ("is_full", "> min(gate, done)", "> gate"),
    "the lane may wait for what flies": ("is_full", "> min(gate, done)", "> done"),
    "the host may be late for the first": ("is_full", "<= min(gate, self.compute + spacing + copy_out)", "<= gate"),
    "the lane may wait for the first": (
        "is_full",
        "<= min(gate, self.compute + spacing + copy_out)",
        "<= self.compute + spacing + copy_out",
    ),
    "inputs are there at once": ("is_full", "max(launch, copy_in)", "launch"),
    "a step begins at the end": ("glide", "begins, until,", "begins, until + 1,"),
    "the output is free": ("glide", "[forward + sync for", "[forward for"),
    "others' commits": ("glide", "sum(commits) + commit *", "commit *"),
    "one commit too many": ("glide", "commit * (count - len(commits))", "commit * count"),
    "copies in are free": ("_count", "busy[1] += copy_in * count", "pass"),
    "copies out are free": ("_count", "busy[3] += copy_out * count", "pass"),
    "host work is free": ("_count", "busy[0] += host * count", "pass"),
    "the lane is not held": ("_leave_at", "computed + self.sync", "computed"),
    "steps that are not taken count": ("glide", "sum(forwards[:count])", "sum(forwards)"),
    "holding is no waiting": ("glide", "self.waited[2] += sync * count", "pass"),
    "input copies are forgotten": ("glide", "self.h2d = begins[count - 1]", "self.h2d = 0 * begins[count - 1]"),
    "what is in flight is forgotten": ("glide", "max(count - ahead, 0) + 1", "max(count - ahead, 0)"),
    "launches begin": ("glide", "before = plan + fill + launch", "before = plan + fill"),
    "held for the output, and not waiting": ("take_turns", "if sync > gap:", "if False:"),
    "one more turn": ("take_turns", "begins, until,", "begins, until + 1,"),
    "inputs are there at once, in turns": ("take_turns", "max(launch, copy_in)", "launch"),
    "the host is waited for while the output is": ("take_turns", "max(after + before, sync)", "after + before"),
    "waiting for input is no waiting": ("take_turns", "(gap - enqueued) * count", "0"),
    "commits are free in turns": ("take_turns", "before + commit, copy_in", "before, copy_in"),
    "turns leave no input copy": ("take_turns", "begins[count - 1] + plan + fill + copy_in", "begins[count - 1]"),
    "the first turn is not taken": ("take", "forwards[:1]", "forwards[:0]"),
    "some steps are taken twice": ("take", "forwards = forwards[few:]", "pass"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, old, new = FAULTS[fault]
    monkeypatch.setattr(Course, name, Rewrite(name, ((old, new),)).changed(vars(Course)[name]))
    assert any(at_once != one_by_one for _, at_once, one_by_one in map(twice, range(100_000)))
