"""The smallest model that can tell whether it was served right, and what each request gets from it when it is alone.

A position's key is a hash of its token, its position and every key it may see; the sampled token is a hash of the last
key. So whatever goes wrong on the way to a key (a wrong block, position, token or length, KV that is not there) changes
that key, every later key of the request, and with them its tokens. Integers only: equal on every machine.

Keys are less than 2**30, never 0: 0 stands for KV that nobody wrote.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from asyncsched.request import FinishReason, Match, SamplingParams

UNWRITTEN = 0
PRIME = 2**30 - 35


@cache
def weights(count: int) -> list[int]:
    """What the key of each position counts for in a digest: different, so that order matters, and so small that digests
    of thousands of keys are machine integers, which Python adds fast."""
    return [position * 8_191 % 1_048_573 + 1 for position in range(count)]


def new_key(token: int, position: int, digest: int, epoch: int) -> int:
    """The key of a position. `digest`: the keys it sees, each times its position's weight, summed. `epoch` says which
    parameters the model has."""
    mixed = (374_761_393 + digest + token * 668_265_263 + position * 265_443_577 + epoch * 19_349_669) % PRIME
    mixed ^= mixed >> 13
    return mixed * 73_856_093 % PRIME + 1


def sample(key: int, vocab_size: int) -> int:
    """The token after the position with this key."""
    return (key * 1_103_515_245 >> 11) % vocab_size


class PatternMatcher:
    """Stops at a sequence of tokens, and holds back what may still become one; a stop string without a tokenizer."""

    def __init__(self, pattern: Sequence[int]) -> None:
        self._pattern = tuple(pattern)
        self._tail: tuple[int, ...] = ()

    def feed(self, token: int) -> Match:
        pattern = self._pattern
        tail = (*self._tail, token)[-len(pattern) :]
        while tail != pattern[: len(tail)]:
            tail = tail[1:]
        stopped = len(tail) == len(pattern)
        self._tail = () if stopped else tail
        return Match(0 if stopped else len(tail), stopped)


class Reference:
    """One request alone, a token at a time. `pattern` is what its PatternMatcher stops at; () for no matcher."""

    def __init__(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        pattern: Sequence[int] = (),
        window: int | None = None,
        vocab_size: int,
    ) -> None:
        self.params = params
        self.outputs: list[int] = []
        self.reason: FinishReason | None = None
        self._stops, self._most = params.stop_token_ids, params.max_tokens
        self._tokens = list(prompt)
        self._matcher = PatternMatcher(pattern) if pattern else None
        self._window = window
        self._vocab_size = vocab_size
        self._epoch = 0
        self._weights = weights(len(prompt) + params.max_tokens)
        self._keys: list[int] = []
        self._digest = 0

    def advance(self, epoch: int = 0) -> int:
        """The next output token, sampled with the weights of `epoch`. Sets `reason` when it is the last."""
        if epoch != self._epoch:  # new weights: every key is computed again
            self._epoch, self._keys, self._digest = epoch, [], 0
        keys, tokens, factors, window, digest = self._keys, self._tokens, self._weights, self._window, self._digest
        for position in range(len(keys), len(tokens)):
            key = new_key(tokens[position], position, digest, epoch)
            keys.append(key)
            digest += factors[position] * key
            if window is not None and position >= window - 1:
                leaving = position - window + 1
                digest -= factors[leaving] * keys[leaving]
        self._digest = digest
        token = sample(keys[-1], self._vocab_size)
        tokens.append(token)
        self.outputs.append(token)
        if self._stops or self._matcher is not None or len(self.outputs) == self._most:
            self.reason = self._why_ended(token)
        return token

    def _why_ended(self, token: int) -> FinishReason | None:
        matched = self._matcher is not None and self._matcher.feed(token).stopped
        count = len(self.outputs)
        if (matched or token in self._stops) and count >= self.params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if count == self._most else None


def reference(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    pattern: Sequence[int] = (),
    window: int | None = None,
    vocab_size: int,
) -> Reference:
    """The whole output of one request alone."""
    alone = Reference(prompt, params, pattern=pattern, window=window, vocab_size=vocab_size)
    while alone.reason is None:
        alone.advance()
    return alone
