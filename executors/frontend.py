"""Between users and the core: prompts become requests, deliveries become text and outputs.

It lives on the thread that drives the engine and touches no device. One `_Output` exists per request of the core; a
prompt with n outputs is n requests.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
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


@dataclass(slots=True, eq=False)
class _Prompt:
    request_id: str
    prompt: str | None
    token_ids: TokenArray
    params: SamplingParams
    place: int
    done: dict[int, CompletionOutput] = field(default_factory=dict)


class Frontend:
    """Requests of one engine. `tokenizer` may be None: then prompts are token ids and there is no text."""

    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
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
    ) -> Iterator[Submit]:
        """The core's requests for a prompt, in the order in which they must be put into the inbox.

        token_ids  the prompt's, where it was encoded already
        place      of the prompt in its list
        """
        text = prompt if isinstance(prompt, str) else None
        token_ids = self.encode(prompt) if token_ids is None else token_ids
        parent = _Prompt(request_id, text, token_ids, params, place)
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
            raise ConfigError("prompt", prompt, "the model has no tokenizer: give prompts as token ids")
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
        fresh: dict[int, list[int]] = {}
        for number, token in zip(step.requests.tolist(), step.tokens.tolist(), strict=True):
            fresh.setdefault(number, []).append(token)
        results: list[StreamPiece | RequestOutput] = []
        ended = {notice.number: notice for notice in step.finished}
        for number in dict.fromkeys((*fresh, *ended)):
            output = self._outputs[number]
            tokens = fresh.get(number, [])
            piece = self._extend(output, tokens, now)
            completion = self._complete(output, ended[number], now) if number in ended else None
            if completion is not None:
                piece += completion.text[len("".join(output.pieces)) :]
            results.append(
                StreamPiece(
                    request_id=output.parent.request_id,
                    prompt_index=output.parent.place,
                    index=output.index,
                    text=piece,
                    token_ids=tuple(tokens),
                    output=completion,
                )
            )
            if completion is not None:
                results += self._close(number, output, completion)
        return results

    def _extend(self, output: _Output, tokens: list[int], now: float) -> str:
        if tokens and output.first_token is None:
            output.first_token = now
        output.tokens += tokens
        piece = output.text.deliver(tokens) if output.text is not None else ""
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


def core_id(request_id: str, index: int) -> str:
    """The core's id of one output of a prompt."""
    return f"{request_id}/{index}"
