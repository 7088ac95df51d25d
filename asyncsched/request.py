"""What a request is: its parameters, its life, and the notices that leave the core about it.

A `Request` is the scheduler's own mutable record; everything that crosses a border is frozen. Counters that change with
every token live in `rows.py`, per batch and not per request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from asyncsched.errors import ConfigError

TokenArray = NDArray[np.int32]

MOST_N = 16_384  # outputs of a prompt: each is a request of its own
MANY_N = f"use a whole number from 1 to {MOST_N}"
GREEDY_BELOW = 1e-5  # temperatures that would only overflow: the largest logit wins anyway


class Match(NamedTuple):
    """A stop matcher's answer to one token: how many tokens at the tail must be held back, and whether to stop."""

    held: int
    stopped: bool


class StopMatcher(Protocol):
    """Matches stop strings inside commit. It owns the tokenizer; the core knows none."""

    def feed(self, token: int) -> Match: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen and when it stops; vLLM's names and ranges. Raises ConfigError.

    The logits go through logit_bias and min_tokens, the penalties, then temperature, min_p, top_k and top_p.

    temperature         divides the logits; below 1e-5 the largest logit wins, and min_p, top_k, top_p have no effect
    top_k               keep the k largest logits; 0 keeps all
    top_p               keep the most likely tokens that together have this probability
    min_p               keep tokens at least this likely, relative to the most likely one
    seed                equal seeds draw equal tokens from equal logits; None draws from the engine's seed
    repetition_penalty  divides positive logits of tokens in prompt or output, multiplies negative ones
    presence_penalty    subtracted from the logit of each token in the output
    frequency_penalty   subtracted once per occurrence in the output
    logit_bias          token -> added to its logit; kept as pairs in order of token
    logprobs            report log-probabilities of the sampled token and this many of the most likely ones; from the
                        model's own logits, before everything above
    max_tokens          output tokens at most, at least 1: a length stop, known in advance
    min_tokens          output tokens before a content stop counts; stop ids are not sampled until then
    stop_token_ids      tokens that end the request; the stop token is part of the output
    stop                strings that end the request; the text is cut before them
    ignore_eos          do not stop at the model's end-of-sequence token
    n                   outputs to draw for the prompt
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] | None = None
    logprobs: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    n: int = 1

    def __post_init__(self) -> None:
        self._freeze()
        self._check_choice()
        self._check_tokens()
        self._check_stops()

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    def with_eos(self, token_ids: Sequence[int]) -> SamplingParams:
        """These parameters with the model's end-of-sequence tokens among the stop ids, unless they are ignored."""
        new = tuple(token for token in token_ids if token not in self.stop_token_ids)
        if self.ignore_eos or not new:
            return self
        return replace(self, stop_token_ids=(*self.stop_token_ids, *new))

    def fan_out(self) -> tuple[SamplingParams, ...]:
        """One set of parameters for each of the `n` outputs, with a seed of its own where there is a seed."""
        if self.n == 1:
            return (self,)
        seeds = [None if self.seed is None else (self.seed + i) % 2**63 for i in range(self.n)]
        return tuple(replace(self, n=1, seed=seed) for seed in seeds)

    def _freeze(self) -> None:
        """Lists, mappings and a lone stop string become tuples, so that equal parameters are equal and hashable."""
        for name in ("logit_bias", "stop_token_ids", "stop"):
            value: object = getattr(self, name)
            if isinstance(value, Mapping):
                value = value.items()
            elif isinstance(value, str) and name == "stop":
                value = (value,)
            elif value is None and name != "logit_bias":
                value = ()
            if isinstance(value, Iterable) and not isinstance(value, str | bytes):
                object.__setattr__(self, name, tuple(value))
            elif value is not None:
                raise ConfigError(name, value, "use a list")

    def _check_choice(self) -> None:
        _require_number("temperature", self.temperature, "use a number of at least 0", lambda x: x >= 0)
        _require_int("top_k", self.top_k, "use a whole number of at least 1, or 0 for all tokens", least=0)
        _require_number("top_p", self.top_p, "use a number above 0 and up to 1", lambda x: 0 < x <= 1)
        _require_number("min_p", self.min_p, "use a number from 0 to 1", lambda x: 0 <= x <= 1)
        _require_number("repetition_penalty", self.repetition_penalty, "use a number above 0", lambda x: x > 0)
        for name in ("presence_penalty", "frequency_penalty"):
            _require_number(name, getattr(self, name), "use a number from -2 to 2", lambda x: -2 <= x <= 2)
        if self.seed is not None:
            _require_int("seed", self.seed, "use a whole number from 0 to 2**63 - 1, or None", least=0)
            if self.seed >= 2**63:
                raise ConfigError("seed", self.seed, "use a whole number from 0 to 2**63 - 1, or None")
        _require_int("n", self.n, MANY_N, least=1)
        if self.n > MOST_N:
            raise ConfigError("n", self.n, MANY_N)
        if self.n > 1 and self.is_greedy:
            raise ConfigError("n", self.n, f"temperature {self.temperature} would draw the same output: use 1")

    def _check_tokens(self) -> None:
        if self.logprobs is not None:
            _require_int("logprobs", self.logprobs, "use a whole number of at least 0, or None", least=0)
        if self.logit_bias is None:
            return
        allowed = "use a mapping from token ids to numbers from -100 to 100"
        biases: dict[int, float] = {}
        for pair in self.logit_bias:
            match pair:
                case (int(token), bias) if _is_token(token) and token not in biases:
                    _require_number("logit_bias", bias, allowed, lambda x: -100 <= x <= 100)
                    biases[token] = float(bias)
                case _:
                    raise ConfigError("logit_bias", pair, allowed)
        object.__setattr__(self, "logit_bias", tuple(sorted(biases.items())))

    def _check_stops(self) -> None:
        _require_int("max_tokens", self.max_tokens, "use a whole number of at least 1", least=1)
        if not _is_int(self.min_tokens) or not 0 <= self.min_tokens <= self.max_tokens:
            raise ConfigError("min_tokens", self.min_tokens, f"use a whole number up to max_tokens {self.max_tokens}")
        if not all(_is_token(token) and token < 2**31 for token in self.stop_token_ids):
            raise ConfigError("stop_token_ids", self.stop_token_ids, "use token ids from 0 to 2**31 - 1")
        texts: tuple[object, ...] = self.stop
        if not all(isinstance(text, str) and text for text in texts):
            raise ConfigError("stop", self.stop, "use strings of at least one character")
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError("ignore_eos", self.ignore_eos, "use true or false")


class Status(Enum):
    """Where a request is. A request evicted with a step in flight is WAITING."""

    __hash__ = object.__hash__  # a status is one object; hashing its name takes as long as three other look-ups

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"
    REJECTED = "rejected"


class FinishReason(Enum):
    """Why nothing more will be delivered. A request that failed counts as finished, with reason ERROR."""

    __hash__ = object.__hash__  # as for Status

    LENGTH = "length"
    STOP = "stop"
    ABORT = "abort"
    ERROR = "error"
    REJECTED = "rejected"


class Counts(NamedTuple):
    """Where all submitted requests are. Failed requests count as finished."""

    submitted: int
    rejected: int
    waiting: int
    running: int
    finished: int
    aborted: int


class Finished(NamedTuple):
    """The last notice about a request. `message` explains ERROR and REJECTED.

    token_ids  the output tokens, all of them handed out by now: an ABORT or ERROR leaves out what a matcher held back
    """

    request_id: str
    number: int
    reason: FinishReason
    token_ids: TokenArray
    message: str = ""


class HostCopy(NamedTuple):
    """KV of positions 0..end-1 on the host, without `freed` leading blocks; complete once `step` is collected."""

    blocks: list[int]
    freed: int
    end: int
    step: int


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
    hashes    chained hashes of its full blocks, filled when prefix caching needs them
    host_copy where its KV is while it waits, if it was offloaded
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
    hashes: list[bytes] = field(default_factory=list)
    host_copy: HostCopy | None = None


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
    if tokens.size and not 0 <= int(tokens.min()) <= int(tokens.max()) < 2**31:
        raise ConfigError("prompt", prompt, "use token ids from 0 to 2**31 - 1")
    return tokens.astype(np.int32, copy=False)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_token(value: int) -> bool:
    return _is_int(value) and value >= 0


def _require_int(name: str, value: object, allowed: str, *, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(name, value, allowed)


def _require_number(name: str, value: object, allowed: str, is_allowed: Callable[[float], bool]) -> None:
    """An int or float that is neither NaN nor infinite."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        with suppress(OverflowError):  # an int that no float holds
            if math.isfinite(value) and is_allowed(value):
                return
    raise ConfigError(name, value, allowed)
