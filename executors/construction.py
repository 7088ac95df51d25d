"""What breaks off while it is made leaves nothing behind.

An exception keeps the frames that it came through, and those whatever they hold: weights, KV blocks. Who catches it and
tries again with less would not get the memory back before the handler is left.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec

P = ParamSpec("P")


def whole_or_gone(init: Callable[Concatenate[Any, P], None]) -> Callable[Concatenate[Any, P], None]:
    """For an `__init__`: where it raises, the object forgets what it got there, and the frames inside everything."""

    @wraps(init)
    def construct(self: Any, *arguments: P.args, **options: P.kwargs) -> None:
        before = sys.exception()  # it and its frames are somebody else's
        had = vars(self).copy()  # of a subclass, which may try again
        try:
            init(self, *arguments, **options)
        except BaseException as error:
            vars(self).clear()
            vars(self).update(had)
            _forget_frames(error, before)
            raise

    return construct


def _forget_frames(error: BaseException, before: BaseException | None) -> None:
    """Of the error and of what it came from, which may go in circles."""
    left: list[BaseException | None] = [error]
    seen = [None, before]
    while left:
        one = left.pop()
        if any(one is known for known in seen):
            continue
        seen.append(one)
        traceback.clear_frames(one.__traceback__)
        left += one.__cause__, one.__context__
        if isinstance(one, BaseExceptionGroup):
            left += one.exceptions
