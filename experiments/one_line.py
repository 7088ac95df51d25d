"""Bad input of a script ends as that of a command: one line on stderr, status 2."""

from __future__ import annotations

import argparse
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


def at_least_one(text: str) -> int:
    """What argparse takes a number of requests or points for."""
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 10**9):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; use a whole number of at least 1")
    return int(text)


def processes(text: str) -> int:
    """The same for --jobs."""
    return -1 if text == "-1" else at_least_one(text)


def whole_numbers(option: str, text: str) -> list[int]:
    """Of a list such as 1,32. Raises ConfigError."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and 1 <= int(part) <= 10**6 for part in parts):
        raise ConfigError(option, text, "use whole numbers of at least 1 and at most 1,000,000, as in 1,32")
    return [int(part) for part in parts]
