"""What an object that cannot be made leaves behind. That of an LLM: tests/test_garbage.py."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest

from executors.construction import whole_or_gone

WEIGHTS: list[weakref.ref[Weights]] = []


class Weights:
    def __init__(self) -> None:
        WEIGHTS.append(weakref.ref(self))


class Made:
    @whole_or_gone
    def __init__(self, fail: Callable[[], None]) -> None:
        self.weights = Weights()
        fail()


def low() -> None:
    weights = Weights()
    raise KeyError(weights is None)


def plainly() -> None:
    low()


def with_no_cause() -> None:
    try:
        low()
    except KeyError:
        raise ValueError from None


def with_another_cause() -> None:
    try:
        low()
    except KeyError:
        raise ValueError from OSError()


def of_itself() -> None:
    error = ValueError()
    raise error from error


def in_a_circle() -> None:
    try:
        low()
    except KeyError as low_error:
        error = ValueError()
        low_error.__cause__ = error
        raise error from low_error


def in_a_group() -> None:
    found = []
    try:
        low()
    except KeyError as error:
        found.append(error)
    raise ExceptionGroup("several", found)


@pytest.mark.parametrize("fail", [plainly, with_no_cause, with_another_cause, of_itself, in_a_circle, in_a_group])
def test_whatever_the_error_came_from_nothing_is_kept(fail: Callable[[], None]) -> None:
    WEIGHTS.clear()
    with pytest.raises(Exception) as caught:  # noqa: PT011  # any
        Made(fail)
    assert caught.value.__traceback__ is not None
    assert [weights() for weights in WEIGHTS] == [None] * (1 if fail is of_itself else 2)


class Stubborn(Made):
    def __init__(self) -> None:
        self.name = "mine"
        try:
            super().__init__(plainly)
        except KeyError:
            assert vars(self) == {"name": "mine"}
            super().__init__(lambda: None)


def test_a_subclass_that_tries_again_has_what_it_had() -> None:
    assert set(vars(Stubborn())) == {"name", "weights"}
