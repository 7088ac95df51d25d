"""What a request is: its parameters, its life, and the notices that leave the core about it.

A `Request` is the scheduler's own mutable record; everything that crosses a border is frozen. Counters that change with
every token live in `rows.py`, per batch and not per request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncsched.errors import ConfigError

TokenArray = NDArray[np.int32]


class Match(NamedTuple):
    """A stop matcher's answer to one token: how many tokens at the tail must be held back, and whether to stop."""

    held: int
    stopped: bool


class StopMatcher(Protocol):
    """Matches stop strings inside commit. It owns the tokenizer; the core knows none."""

    def feed(self, token: int) -> Match: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """When a request stops. `max_tokens` is a length stop, known in advance; the rest are content stops.

    max_tokens      output tokens at most, at least 1
    min_tokens      output tokens before a content stop counts
    stop_token_ids  tokens that end the request; the stop token is part of the output
    """

    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not _is_int(self.max_tokens) or self.max_tokens < 1:
            raise ConfigError("max_tokens", self.max_tokens, "use a whole number of at least 1")
        if not _is_int(self.min_tokens) or not 0 <= self.min_tokens <= self.max_tokens:
            raise ConfigError("min_tokens", self.min_tokens, f"use a whole number up to max_tokens {self.max_tokens}")
        if not all(_is_int(token) for token in self.stop_token_ids):
            raise ConfigError("stop_token_ids", self.stop_token_ids, "use whole numbers")


class Status(Enum):
    """Where a request is. A request evicted with a step in flight is WAITING."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"
    REJECTED = "rejected"


class FinishReason(Enum):
    """Why nothing more will be delivered. A request that failed counts as finished, with reason ERROR."""

    LENGTH = "length"
    STOP = "stop"
    ABORT = "abort"
    ERROR = "error"
    REJECTED = "rejected"


class Finished(NamedTuple):
    """The last notice about a request. `token_ids` are the output tokens; `message` explains ERROR and REJECTED."""

    request_id: str
    number: int
    reason: FinishReason
    token_ids: TokenArray
    message: str = ""


class RequestView(NamedTuple):
    """What a policy may see of a request. `number` counts submissions, so it orders arrivals without a clock."""

    request_id: str
    number: int
    priority: int
    num_prompt_tokens: int
    num_known_tokens: int
    max_tokens: int
    num_blocks: int


@dataclass(slots=True, eq=False)
class Request:
    """The scheduler's record of one request; no other module changes it.

    tokens    prompt and outputs known while the request has no row, int32[n]
    row       its row in the batch state, or -1; kept until every step that names the row is collected
    hashes    chained hashes of the full blocks of `tokens`, filled when prefix caching needs them
    """

    request_id: str
    number: int
    params: SamplingParams
    priority: int
    tokens: TokenArray
    num_prompt_tokens: int
    max_total_tokens: int
    matcher: StopMatcher | None = None
    status: Status = Status.WAITING
    row: int = -1
    num_released: int = 0
    num_preemptions: int = 0
    hashes: list[bytes] | None = None


NO_TOKENS: TokenArray = np.zeros(0, dtype=np.int32)


def as_tokens(prompt: Sequence[int] | NDArray[np.integer]) -> TokenArray:
    """A prompt as int32[n]; raises ConfigError where it isn't a list of token ids."""
    try:
        tokens = np.asarray(prompt)
        if tokens.size and not np.issubdtype(tokens.dtype, np.integer):
            raise TypeError
    except (TypeError, ValueError):
        raise ConfigError("prompt", prompt, "use a sequence of token ids") from None
    if tokens.ndim != 1:
        raise ConfigError("prompt", prompt, "use a flat sequence of token ids")
    return tokens.astype(np.int32, copy=False)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
