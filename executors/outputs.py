"""What users get: outputs in vLLM's shape, and the pieces of a stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from executors.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Times of one output in seconds after its arrival; None where there was no such moment."""

    first_token_s: float | None
    finished_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One output of a prompt. finish_reason: length, stop, abort, error, rejected; `message` explains the last two."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: int | str | None
    logprobs: tuple[TokenLogprobs, ...] | None
    message: str
    metrics: RequestMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A prompt and its `n` outputs."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]


class StreamPiece(NamedTuple):
    """New tokens and text of one output. The last piece of an output carries it whole, in `output`.

    prompt_index  place of the prompt in the list that was given; 0 for a prompt that was given alone
    index         which of the prompt's `n` outputs
    """

    request_id: str
    prompt_index: int
    index: int
    text: str
    token_ids: tuple[int, ...]
    output: CompletionOutput | None = None
