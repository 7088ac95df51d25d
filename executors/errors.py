"""What a model can be refused for. Every message is one line that begins with the model's name."""

from __future__ import annotations

from textwrap import shorten

from asyncsched.errors import AsyncschedError


class ModelLoadError(AsyncschedError):
    """The model isn't there, or its files cannot be read."""


class UnsupportedModelError(AsyncschedError):
    """The model is there, but its layers cannot run over a paged KV cache."""


def one_line(cause: BaseException) -> str:
    """The message of `cause` as one line of a readable length; the name of its class where it has none."""
    return shorten(str(cause), 240, placeholder=" ...") or type(cause).__name__
