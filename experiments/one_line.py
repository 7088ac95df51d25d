"""Bad input of a script ends as that of a command: one line on stderr, status 2."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from asyncsched.errors import AsyncschedError, ConfigError


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Exits where what is done inside raises an error of ours."""
    try:
        yield
    except AsyncschedError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def whole_numbers(option: str, text: str) -> list[int]:
    """Of a list such as 1,32. Raises ConfigError."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and 1 <= int(part) <= 10**6 for part in parts):
        raise ConfigError(option, text, "use whole numbers of at least 1, as in 1,32")
    return [int(part) for part in parts]
