"""Who runs next: adversaries that choose among all orders that lanes and events allow.

An adversary names lanes by their place in LANES and only ever prefers; the executor knows who can run. Before every
operation it is asked for the lanes in order of preference: the first that can run does. Lanes it leaves out are held
back, and None holds all of them back, until the host has done something more.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import permutations
from typing import Protocol

from asyncsched.program import Lane

LANES = tuple(lane for lane in Lane if lane is not Lane.HOST)
UPSTREAM_FIRST = tuple(range(len(LANES)))  # in the order of Lane, which is the order of a step
DOWNSTREAM_FIRST = UPSTREAM_FIRST[::-1]  # runs the least that the host waits for
ORDERS = tuple(permutations(range(len(LANES))))
# By lane that is held back: orders without it, and, where nothing else can run and the host waits, with it at the end.
ORDERS_WITHOUT = tuple(
    tuple(tuple(lane for lane in order if lane != held) for order in ORDERS) for held in UPSTREAM_FIRST
)
ORDERS_OR_NONE = tuple((None,) * (tenths * len(ORDERS)) + ORDERS * (10 - tenths) for tenths in (1, 3, 6))  # of None
ORDERS_TO = tuple(tuple(order for order in ORDERS if order[-1] == held) for held in UPSTREAM_FIRST)

Order = tuple[int, ...]


class Adversary(Protocol):
    def order(self, blocked: bool) -> Order | None:
        """Lanes in order of preference. All of them when the host is `blocked` on what they do; else None: not now."""


class Eager:
    """Lanes run as far ahead as events allow, as under a host that is always late."""

    def order(self, blocked: bool) -> Order | None:
        return UPSTREAM_FIRST


class Lazy:
    """Nothing runs until the host waits for it, and then no more than that."""

    def order(self, blocked: bool) -> Order | None:
        return DOWNSTREAM_FIRST if blocked else None


class Drawn:
    """Every choice is drawn: `draw(n)` answers a number from 0 to n - 1. Hypothesis then shrinks the order."""

    def __init__(self, draw: Callable[[int], int]) -> None:
        self._draw = draw

    def order(self, blocked: bool) -> Order | None:
        choice = self._draw(len(ORDERS) + (not blocked))
        return ORDERS[choice] if choice < len(ORDERS) else None


class Seeded:
    """Moods that change from time to time: eager, lazy, random, and one lane held back for several steps.

    `patience` is about how many times it is asked in one mood.
    """

    def __init__(self, seed: int, patience: int = 48) -> None:
        self._random = random.Random(seed)
        self._draw = self._random.random
        self._patience = patience
        self._left = 0  # times it is asked until the mood changes
        self._answers: tuple[Order | None, ...] = ORDERS  # one of these
        self._blocked_answers: tuple[Order, ...] = ORDERS

    def order(self, blocked: bool) -> Order | None:
        self._left -= 1
        if self._left < 0:
            self._change()
        answers = self._blocked_answers if blocked else self._answers
        return answers[int(self._draw() * len(answers))]

    def _change(self) -> None:
        draw = self._random
        self._left = draw.randrange(1, 2 * self._patience)
        self._answers = self._blocked_answers = ORDERS
        mood = draw.randrange(5)
        if mood == 1:
            self._answers, self._blocked_answers = (None,), (DOWNSTREAM_FIRST,)
        elif mood == 2:
            held = draw.randrange(len(LANES))
            self._answers, self._blocked_answers = ORDERS_WITHOUT[held], ORDERS_TO[held]
        elif mood > 2:
            self._answers = draw.choice(ORDERS_OR_NONE)
