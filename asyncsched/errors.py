"""Errors a user can act on. Every message is one line that names the field, the value and what is allowed."""

from __future__ import annotations

from enum import Enum
from typing import Final

LONGEST_VALUE = 120  # characters of a value in a message


class Missing(Enum):
    """Stands for the value of a setting that was not given at all."""

    MISSING = 0


MISSING: Final = Missing.MISSING


class AsyncschedError(Exception):
    """Base of every error this project raises on purpose."""


class ConfigError(AsyncschedError, ValueError):
    """A setting that cannot be used. `field` is the dotted name the user wrote; `value` may be MISSING."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        problem = "missing" if value is MISSING else f"{_short(value)} is not allowed"
        super().__init__(f"{field}: {problem}; {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str]]:
        """Errors come back from worker processes."""
        return type(self), (self.field, self.value, self.allowed)


def _short(value: object) -> str:
    """The value on one line, its middle left out where it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE // 2]} ... {text[-LONGEST_VALUE // 2 :]}"


class PolicyError(AsyncschedError):
    """A policy, built in or the user's own, raised or answered with something unusable."""


class BadInputError(AsyncschedError):
    """What the user named or asked for cannot be used, though no single setting is at fault: exit status 2."""


INSTALL_TORCH = "pip install -e '.[torch]' in the clone"  # what to do where a real model lacks its packages
