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
    """For an `__init__`: where it raises, the object and the frames inside forget everything."""

    @wraps(init)
    def construct(self: Any, *arguments: P.args, **options: P.kwargs) -> None:
        before = sys.exception()  # it and its frames are somebody else's
        try:
            init(self, *arguments, **options)
        except BaseException as error:
            vars(self).clear()
            _forget_frames(error, before)
            raise

    return construct


def _forget_frames(error: BaseException | None, before: BaseException | None) -> None:
    """Of the error and of what it came from."""
    while error is not None and error is not before:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
