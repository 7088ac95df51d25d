"""What a model can be refused for, in one line that begins with its name; and what an engine has died of."""

from __future__ import annotations

from textwrap import shorten

from asyncsched.errors import AsyncschedError


class ModelLoadError(AsyncschedError):
    """The model isn't there, or its files cannot be read."""


class UnsupportedModelError(AsyncschedError):
    """The model is there, but its layers cannot run over a paged KV cache."""


class EngineDeadError(AsyncschedError):
    """The engine broke in an earlier step, or the device stopped answering: it takes no more prompts."""


def one_line(cause: BaseException) -> str:
    """The message of `cause` as one line of a readable length; the name of its class where it has none."""
    return shorten(str(cause), 240, placeholder=" ...") or type(cause).__name__
