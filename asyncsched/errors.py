"""Errors a user can act on. Every message is one line that names the field, the value and what is allowed."""

from __future__ import annotations


class AsyncschedError(Exception):
    """Base of every error this project raises on purpose."""


class ConfigError(AsyncschedError, ValueError):
    """A setting that cannot be used. `field` is the dotted name the user wrote."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}: {value!r} is not allowed; {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed


class PolicyError(AsyncschedError):
    """A policy, built in or the user's own, raised or answered with something unusable."""
