"""Text of an output while its tokens arrive: characters that are complete, and stop strings.

Three ideas, one class each: `Detokenizer` makes text from tokens, `StopStrings` looks for strings in text that arrives
in pieces, and `OutputText` ties both to one request. What is released is final: the pieces, put together, are the
output's text, however the text is split into tokens. The text of the stop id that ended a request is not part of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from asyncsched.request import Match, SamplingParams

Decode = Callable[[list[int]], str]

_REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet
_CONTEXT = 6  # tokens before the first one that may change how it is written, a leading space above all
_PATIENCE = 8  # tokens without a complete character, after which they cannot be valid text
_MOST_PENDING = 3  # bytes, and so replacement characters, that an incomplete character has at most
_WINDOW = 64


def decoder_of(tokenizer: Any, *, skip_special_tokens: bool = True) -> Decode:
    """The decoding function of a Hugging Face tokenizer; the fast tokenizers' own one where there is one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return lambda tokens: str(backend.decode(tokens, skip_special_tokens=skip_special_tokens))
    return lambda tokens: str(
        tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
    )


class Detokenizer:
    """Text from one token after another, in pieces that are never taken back.

    It decodes a short window that starts before the last released piece, so a token costs the same late in a long
    output. Bytes of an incomplete character are held until it is complete, or until `flush`.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        """`context`: the prompt's tokens, of which the last few are used; () for a text that begins here."""
        self._decode = decode
        self._window = list(context[-_CONTEXT:])
        self._num_released = len(decode(self._window).rstrip(_REPLACEMENT))  # characters of the window's text
        self.num_pending = 0  # tokens of the window whose text is not released

    def feed(self, token: int) -> str:
        """The text that is complete with this token."""
        self._window.append(token)
        self.num_pending += 1
        text = self._decode(self._window)
        if not text.endswith(_REPLACEMENT):
            return self._release(text)
        if self.num_pending <= _PATIENCE:
            return ""
        return self._release_invalid(text)

    def flush(self) -> str:
        """What is left at the end of the output."""
        return self._release(self._decode(self._window)) if self.num_pending else ""

    def _release(self, text: str) -> str:
        piece = text[self._num_released :]
        if piece:
            del self._window[: -self.num_pending]
            self._num_released = len(self._decode(self._window))
        elif self._num_released:
            del self._window[-self.num_pending :]  # special tokens: they have no text, and change none
        else:
            del self._window[:-_WINDOW]
        self.num_pending = 0
        return piece

    def _release_invalid(self, text: str) -> str:
        """All of a run of bytes that cannot be text, but for the last ones: a character may begin there."""
        end = max(self._num_released, len(text) - _MOST_PENDING)
        piece, rest = text[self._num_released : end], len(text) - end
        del self._window[:-_WINDOW]
        self._num_released = max(0, len(self._decode(self._window)) - rest)
        self.num_pending = _MOST_PENDING
        return piece


class StopStrings:
    """Looks for strings in a text that arrives in pieces, and keeps back what may become one of them.

    The first string to be complete is the one that is found, of those that end together the longest: the split into
    pieces makes no difference.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._tail = ""  # kept back: the beginning of some stop string
        self.found: str | None = None

    def feed(self, piece: str, *, may_stop: bool = True) -> str:
        """The text that is now known to be no part of a stop string; up to the stop string when one is found.

        With `may_stop` false, strings that are complete with this piece are text like any other.
        """
        text = self._tail + piece
        if may_stop and self._stops:
            match = min(self._matches(text, len(self._tail)), default=None)
            if match is not None:
                _, start, self.found = match
                self._tail = ""
                return text[:start]
        kept = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._tail = text[kept:]
        return text[:kept]

    def flush(self) -> str:
        """What was kept back, when no more text will come."""
        tail, self._tail = self._tail, ""
        return tail

    def _matches(self, text: str, seen: int) -> Iterator[tuple[int, int, str]]:
        """End, start and string of the first occurrence of each that ends after the first `seen` characters."""
        for stop in self._stops:
            start = text.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0:
                yield start + len(stop), start, stop


class OutputText:
    """The text of one output, and the matcher of its stop strings that commit asks.

    With stop strings, give it to the core as the request's matcher; without, the core need not know it. Either way call
    `deliver` with the tokens that the core delivers, and `finish` after the last.
    """

    def __init__(self, decode: Decode, params: SamplingParams, prompt_tokens: Sequence[int] = ()) -> None:
        """The tokens of the prompt, if given, decide how the first token is written; they are not part of the text."""
        self._detokenizer = Detokenizer(decode, prompt_tokens)
        self._stops = StopStrings(params.stop)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._num_written = 0  # characters, kept back ones included
        self._num_released = 0  # characters
        self._ends: deque[int] = deque()  # of the held tokens that have their text: its end
        self._num_pending = 0  # held tokens without
        self._untaken: list[str] = []
        self.has_stops = bool(params.stop)

    @property
    def stop_string(self) -> str | None:
        """The stop string that was found."""
        return self._stops.found

    def feed(self, token: int) -> Match:
        """Takes the next token. `held` counts the tokens at the tail that may turn out to be part of a stop string."""
        self._num_tokens += 1
        may_stop = self._num_tokens >= self._min_tokens
        if may_stop and token in self._stop_ids:
            return Match(0, False)
        piece = self._detokenizer.feed(token)
        released = self._stops.feed(piece, may_stop=may_stop)
        self._untaken.append(released)
        self._num_written += len(piece)
        self._num_released += len(released)
        written = self._num_pending + 1 - self._detokenizer.num_pending
        self._num_pending = self._detokenizer.num_pending
        self._ends.extend([self._num_written] * written)
        while self._ends and self._ends[0] <= self._num_released:
            self._ends.popleft()
        if self._stops.found is not None:
            return Match(0, True)
        return Match(len(self._ends) + self._num_pending, False)

    def deliver(self, tokens: Sequence[int]) -> str:
        """The text to show for tokens that the core has delivered."""
        if not self.has_stops:
            for token in tokens:
                self.feed(token)
        return self._take()

    def finish(self) -> str:
        """The rest of the text, once the last token is delivered."""
        if self._stops.found is None:
            self._untaken += (self._stops.flush(), self._detokenizer.flush())
        return self._take()

    def _take(self) -> str:
        text = "".join(self._untaken)
        self._untaken.clear()
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, short of all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
