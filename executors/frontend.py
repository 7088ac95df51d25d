"""Between users and the core: prompts become requests, deliveries become text and outputs.

It lives on the thread that drives the engine and touches no device. One `_Output` exists per request of the core; a
prompt with n outputs is n requests.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncsched.errors import ConfigError
from asyncsched.pipeline import Submit
from asyncsched.plan import StepOutput, StepPlan
from asyncsched.request import Finished, FinishReason, SamplingParams, TokenArray, as_tokens
from asyncsched.rows import Rows
from executors.logprobs import TokenLogprobs, read_logprobs
from executors.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamPiece
from executors.text import Decode, OutputText, decoder_of


@dataclass(slots=True, eq=False)
class _Output:
    """One output in the making."""

    parent: _Prompt
    index: int
    params: SamplingParams
    text: OutputText | None
    arrived: float
    first_token: float | None = None
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)

    def piece(self, text: str, tokens: list[int], completion: CompletionOutput | None = None) -> StreamPiece:
        parent = self.parent
        return StreamPiece(parent.request_id, parent.place, self.index, text, tuple(tokens), completion)


@dataclass(slots=True, eq=False)
class _Prompt:
    request_id: str
    prompt: str | None
    token_ids: TokenArray
    params: SamplingParams
    place: int
    is_streamed: bool
    done: dict[int, CompletionOutput] = field(default_factory=dict)


class Frontend:
    """Requests of one engine. Without a tokenizer, `why` says why, prompts are token ids and there is no text."""

    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int], why: str = "") -> None:
        self.tokenizer = tokenizer
        self.no_tokenizer = f"the model has no tokenizer ({why})" if why else "the model has no tokenizer"
        self._decode: Decode | None = decoder_of(tokenizer) if tokenizer is not None else None
        self._eos = tuple(eos_token_ids)
        self._outputs: dict[int, _Output] = {}  # by the core's number of the request
        self._num_submitted = 0

    def requests(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        token_ids: TokenArray | None = None,
        place: int = 0,
        *,
        is_streamed: bool = True,
    ) -> Iterator[Submit]:
        """The core's requests for a prompt, in the order in which they must be put into the inbox.

        token_ids    the prompt's, where it was encoded already
        place        of the prompt in its list
        is_streamed  whether anybody wants its pieces
        """
        text = prompt if isinstance(prompt, str) else None
        token_ids = self.encode(prompt) if token_ids is None else token_ids
        parent = _Prompt(request_id, text, token_ids, params, place, is_streamed)
        for index, one in enumerate(params.with_eos(self._eos).fan_out()):
            output_text = OutputText(self._decode, one, token_ids.tolist()) if self._decode else None
            self._outputs[self._num_submitted] = _Output(parent, index, one, output_text, time.perf_counter())
            self._num_submitted += 1
            matcher = output_text if output_text is not None and output_text.has_stops else None
            yield Submit(core_id(request_id, index), token_ids, one, matcher=matcher)

    def num_outputs(self, request_id: str) -> int:
        """Outputs of a prompt that has not finished; 0 for one that has."""
        return next((o.parent.params.n for o in self._outputs.values() if o.parent.request_id == request_id), 0)

    def encode(self, prompt: str | Sequence[int]) -> TokenArray:
        if not isinstance(prompt, str):
            return as_tokens(prompt)
        if self.tokenizer is None:
            raise ConfigError("prompt", prompt, f"{self.no_tokenizer}: give prompts as token ids")
        try:
            prompt.encode()
        except UnicodeEncodeError:  # halves of characters, which no tokenizer takes
            raise ConfigError("prompt", prompt, "it is no valid text") from None
        return as_tokens(self.tokenizer(prompt)["input_ids"])

    def on_logprobs(self, plan: StepPlan, words: NDArray[np.int32], rows: Rows) -> None:
        """Log-probabilities of a collected step, before it is committed: every row is still its request's."""
        for number, line in zip(rows.request[plan.sampled].tolist(), words, strict=True):
            output = self._outputs.get(number)
            if output is not None and output.params.logprobs is not None:
                output.logprobs.append(read_logprobs(line, output.params.logprobs))

    def deliver(self, step: StepOutput) -> list[StreamPiece | RequestOutput]:
        """What the step means to users: pieces of streams, and prompts whose outputs are complete."""
        now = time.perf_counter()
        results: list[StreamPiece | RequestOutput] = []
        ended = {notice.number: notice for notice in step.finished}
        for number, tokens in _by_request(step):
            output = self._outputs[number]
            piece = self._extend(output, tokens, now)
            if number in ended:
                results += self._end(ended.pop(number), output, piece, tokens, now)
            elif output.parent.is_streamed:
                results.append(output.piece(piece, tokens))
        for number, notice in ended.items():  # those that end without a further token
            output = self._outputs[number]
            results += self._end(notice, output, self._extend(output, [], now), [], now)
        return results

    def _end(
        self, notice: Finished, output: _Output, piece: str, tokens: list[int], now: float
    ) -> list[StreamPiece | RequestOutput]:
        """The last piece of an output, and its prompt if no other output is left."""
        completion = self._complete(output, notice, now)
        piece += completion.text[len("".join(output.pieces)) :]
        return [
            *([output.piece(piece, tokens, completion)] if output.parent.is_streamed else ()),
            *self._close(notice.number, output, completion),
        ]

    def _extend(self, output: _Output, tokens: list[int], now: float) -> str:
        if tokens and output.first_token is None:
            output.first_token = now
        output.tokens += tokens
        if output.text is None:
            return ""
        piece = output.text.deliver(tokens)
        output.pieces.append(piece)
        return piece

    def _complete(self, output: _Output, notice: Finished, now: float) -> CompletionOutput:
        text = "".join(output.pieces)
        stop_reason: int | str | None = None
        if output.text is not None and notice.reason is not FinishReason.REJECTED:
            text += output.text.finish()
            stop_reason = output.text.stop_string
        if notice.reason is FinishReason.STOP and stop_reason is None:
            stop_reason = output.tokens[-1]
        logprobs = tuple(output.logprobs[: len(output.tokens)]) if output.params.logprobs is not None else None
        return CompletionOutput(
            index=output.index,
            text=text,
            token_ids=tuple(output.tokens),
            finish_reason=notice.reason.value,
            stop_reason=stop_reason,
            logprobs=logprobs,
            message=notice.message,
            metrics=RequestMetrics(
                first_token_s=None if output.first_token is None else output.first_token - output.arrived,
                finished_s=now - output.arrived,
            ),
        )

    def _close(self, number: int, output: _Output, completion: CompletionOutput) -> list[RequestOutput]:
        """Forgets a finished output; the whole prompt once its last output has finished."""
        del self._outputs[number]
        parent = output.parent
        parent.done[output.index] = completion
        if len(parent.done) < parent.params.n:
            return []
        return [
            RequestOutput(
                request_id=parent.request_id,
                prompt=parent.prompt,
                prompt_token_ids=tuple(parent.token_ids.tolist()),
                outputs=tuple(parent.done[index] for index in sorted(parent.done)),
            )
        ]


def _by_request(step: StepOutput) -> Iterable[tuple[int, list[int]]]:
    """Each request with the tokens it gets, in order. Most steps have one for each."""
    numbers, tokens = step.requests.tolist(), step.tokens.tolist()
    if len(set(numbers)) == len(numbers):
        return zip(numbers, ([token] for token in tokens), strict=True)
    grouped: dict[int, list[int]] = {}
    for number, token in zip(numbers, tokens, strict=True):
        grouped.setdefault(number, []).append(token)
    return grouped.items()


def core_id(request_id: str, index: int) -> str:
    """The core's id of one output of a prompt."""
    return f"{request_id}/{index}"
