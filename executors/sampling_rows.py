"""Sampling parameters on the host: one row per request that a step may name, packed into words for the device.

A row is written when a request is seated and read by every step that samples for it. What the device keeps per row
(token counts, logit edits) is reset by `Resets`, which the step that seats the request applies on the compute lane
before it samples: behind every step of the row's former owner, ahead of every step of the new one. A reset starts
from the tokens known when the request is seated, so it does not matter whether the prompt passes through the model,
comes from the prefix cache, or is computed again after an eviction.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncsched.errors import ConfigError
from asyncsched.inputs import Int32s
from asyncsched.plan import StepPlan
from asyncsched.request import SamplingParams, TokenArray
from asyncsched.rows import Rows
from executors.noise import step_keys, stream_of
from executors.sampling_layout import IN_PROMPT, MAX_EDITS, NO_RESETS, NUM_WORDS, Features, Resets, Word

_NOBODY = -1
_MIN_TOKENS = 128  # beside the features: edits apply while the output is short


class Look(NamedTuple):
    """What a step uses; and how many edits apply to each sampled row, where that changes as its output grows."""

    features: int
    num_edits: NDArray[np.int32] | None


NO_FEATURES = Look(0, None)


class SamplingRows:
    """`capacity` rows, and one more that padding rows of a captured batch use: greedy, without any feature.

    `seed` is the engine's: requests without a seed of their own draw from it and their number.
    """

    def __init__(self, capacity: int, vocab_size: int, *, max_logprobs: int = 20, seed: int = 0) -> None:
        self.vocab_size = vocab_size
        self.max_logprobs = min(max_logprobs, vocab_size)
        self._seed = seed
        self._words = np.zeros((capacity + 1, NUM_WORDS), dtype=np.int32)
        self._features = np.zeros(capacity + 1, dtype=np.int64)
        self._streams = np.zeros(capacity + 1, dtype=np.uint64)
        self._suppress_until = np.zeros(capacity + 1, dtype=np.int64)  # position from which stop ids may be sampled
        self._num_suppressed = np.zeros(capacity + 1, dtype=np.int32)
        self._with_features: set[int] = set()  # rows whose `_features` are not 0
        self._owner = np.full(capacity + 1, _NOBODY, dtype=np.int64)
        self._row_of: dict[int, int] = {}
        self._counts = np.zeros(vocab_size, dtype=np.int32)  # scratch, all zero between calls
        self._pending: list[tuple[Int32s, Int32s, Int32s]] = []
        self._write(capacity, SamplingParams(temperature=0.0))

    def check(self, params: SamplingParams) -> None:
        """Raises ConfigError for parameters that this vocabulary, or the room for edits, cannot serve."""
        if params.logprobs is not None and params.logprobs > self.max_logprobs:
            raise ConfigError("logprobs", params.logprobs, f"use a whole number up to {self.max_logprobs}")
        for pair in _biases(params):
            if pair[0] >= self.vocab_size:
                raise ConfigError("logit_bias", pair, f"use token ids below the vocabulary's size {self.vocab_size}")
        edits = len(_biases(params)) + len(self._suppressed(params))
        if edits > MAX_EDITS:
            raise ConfigError("logit_bias", edits, f"use up to {MAX_EDITS} biased tokens and stop ids in all")

    def needs(self, params: SamplingParams) -> tuple[int, ...]:
        """The features of steps that sample for such a request; first those of its first steps, if they differ."""
        features = _used(params, self.vocab_size)
        return (features | Features.EDITS, features) if self._suppressed(params) else (features,)

    def seat(
        self, row: int, number: int, params: SamplingParams, prompt_tokens: TokenArray, output_tokens: TokenArray
    ) -> None:
        """Request `number` has `row` from now on; the tokens are all that it has. Its resets wait for `take_resets`."""
        self._forget(number, row)
        self._write(row, params)
        self._streams[row] = stream_of(params.seed) if params.seed is not None else stream_of(self._seed, number)
        suppressed = self._suppressed(params)
        if suppressed:
            self._features[row] |= _MIN_TOKENS
            self._suppress_until[row] = len(prompt_tokens) + params.min_tokens
            self._num_suppressed[row] = len(suppressed)
        if self._features[row]:
            self._with_features.add(row)
        else:
            self._with_features.discard(row)
        edits = [*_biases(params), *((token, -np.inf) for token in suppressed)]
        if self._features[row] & Features.PENALTIES or edits:
            self._pending.append(self._reset(row, edits, prompt_tokens, output_tokens))

    def seat_new(self, plan: StepPlan, rows: Rows) -> None:
        """Seats every request that computes its first chunk in `plan`. To be called before anything is committed."""
        if plan.num_decodes == len(plan.rows):
            return
        prefills = plan.rows[plan.num_decodes :]
        for row in prefills[self._owner[prefills] != plan.requests[plan.num_decodes :]].tolist():
            request = rows.owner[row]
            assert request is not None  # the plan was made from these rows
            tokens = rows.tokens[row, : rows.known[row]]
            split = request.num_prompt_tokens
            self.seat(row, request.number, request.params, tokens[:split], tokens[split:])

    def take_resets(self) -> Resets:
        """What the step that is being filled has to reset; empties the list."""
        if not self._pending:
            return NO_RESETS
        rows, counts, edits = (np.concatenate(parts) for parts in zip(*self._pending, strict=True))
        self._pending.clear()
        return Resets(np.concatenate((rows, counts, edits), axis=None), len(rows), len(counts), len(edits))

    def features(self, plan: StepPlan) -> int:
        """What the sampled rows of the plan use; they must be seated."""
        return self.look(plan).features

    def look(self, plan: StepPlan) -> Look:
        if not self._with_features:
            return NO_FEATURES
        sampled = plan.sampled
        features = int(np.bitwise_or.reduce(self._features[sampled]))  # 0 for a step that samples nothing
        if not features & _MIN_TOKENS:
            return Look(features, None)
        is_short = plan.sampled_ends < self._suppress_until[sampled]
        if is_short.any():
            features |= Features.EDITS
        num_edits = self._words[sampled, Word.NUM_EDITS] + self._num_suppressed[sampled] * is_short
        return Look(features & Features.ALL, num_edits)

    def pack(self, plan: StepPlan, look: Look, words: Int32s) -> None:
        """Writes the parameters of the sampled rows, and of padding, into `words`, int32[num_rows, NUM_WORDS]."""
        sampled = plan.sampled
        words[: len(sampled)] = self._words[sampled]
        if look.num_edits is not None:
            words[: len(sampled), Word.NUM_EDITS] = look.num_edits
        if look.features & Features.RANDOM:
            words[: len(sampled), Word.KEY : Word.KEY + 2] = step_keys(self._streams[sampled], plan.sampled_ends)
        words[len(sampled) :] = self.neutral

    @property
    def neutral(self) -> Int32s:
        """The parameters of padding: greedy, without any feature."""
        neutral: Int32s = self._words[-1]
        return neutral

    def _forget(self, number: int, row: int) -> None:
        """Unties the row's former owner, and the request's former row: whoever comes back is seated anew."""
        former = int(self._owner[row])
        if former != _NOBODY:
            del self._row_of[former]
        if number in self._row_of:
            self._owner[self._row_of[number]] = _NOBODY
        self._owner[row] = number
        self._row_of[number] = row

    def _write(self, row: int, params: SamplingParams) -> None:
        random = not params.is_greedy
        features = _used(params, self.vocab_size)
        top_k = params.top_k if features & Features.TOP_K else self.vocab_size
        biases = _biases(params)
        words = self._words[row]
        words[: Word.INV_TEMPERATURE] = row, len(biases), 0, 0, top_k
        floats = words.view(np.float32)
        floats[Word.INV_TEMPERATURE :] = (
            max(1 / params.temperature, 1e-30) if random else 0.0,
            params.top_p if random else 1.0,
            params.min_p if random else 0.0,
            min(max(params.repetition_penalty, 1e-30), 1e30),  # finite as a float32
            params.presence_penalty,
            params.frequency_penalty,
        )
        self._features[row] = features
        self._suppress_until[row] = self._num_suppressed[row] = 0

    def _suppressed(self, params: SamplingParams) -> list[int]:
        """Stop ids that must not be sampled while the output is shorter than min_tokens."""
        if not params.min_tokens:
            return []
        return sorted({token for token in params.stop_token_ids if 0 <= token < self.vocab_size})

    def _reset(
        self, row: int, edits: list[tuple[int, float]], prompt_tokens: TokenArray, output_tokens: TokenArray
    ) -> tuple[Int32s, Int32s, Int32s]:
        rows = np.zeros(0, dtype=np.int32)
        counts = np.zeros((0, 3), dtype=np.int32)
        if self._features[row] & Features.PENALTIES:
            rows = np.array([row], dtype=np.int32)
            self._counts[prompt_tokens] = IN_PROMPT
            np.add.at(self._counts, output_tokens, 1)
            tokens = np.flatnonzero(self._counts).astype(np.int32)
            counts = np.column_stack((np.full_like(tokens, row), tokens, self._counts[tokens]))
            self._counts[tokens] = 0
        packed = np.zeros((len(edits), 4), dtype=np.int32)
        packed[:, 0], packed[:, 1] = row, np.arange(len(edits))
        packed[:, 2] = [token for token, _ in edits]
        packed.view(np.float32)[:, 3] = [value for _, value in edits]
        return rows, counts, packed


class SlotSampling:
    """The sampling parameters of one slot's step, written to `words`, int32[S, NUM_WORDS], in plan order.

    A step without features leaves the parameters alone where they are neutral already, so that greedy decoding pays
    nothing.
    """

    def __init__(self, rows: SamplingRows, words: Int32s) -> None:
        self.resets = NO_RESETS
        self._rows = rows
        self.use(words)

    def use(self, words: Int32s) -> None:
        """Other memory, of unknown content."""
        self.words = words
        self._num_neutral = 0

    def fill(self, plan: StepPlan, rows: Rows) -> int:
        """Seats who is new, writes what the step's sampler reads, and says what it uses."""
        self._rows.seat_new(plan, rows)
        self.resets = self._rows.take_resets()
        look = self._rows.look(plan)
        num_rows = len(self.words) if plan.mixed_bucket else max(len(plan.sampled), plan.bucket)
        if look.features:
            self._num_neutral = 0
            self._rows.pack(plan, look, self.words[:num_rows])
        elif self._num_neutral < num_rows:
            self._num_neutral = num_rows
            self.words[:num_rows] = self._rows.neutral
        return look.features


def _used(params: SamplingParams, vocab_size: int) -> int:
    """Features whatever the length of the output, of values as float32 has them."""
    random = not params.is_greedy
    used = {
        Features.RANDOM: random,
        Features.MIN_P: random and np.float32(params.min_p) > 0,
        Features.TOP_K: random and 0 < params.top_k < vocab_size,
        Features.TOP_P: random and np.float32(params.top_p) < 1,
        Features.PENALTIES: params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty,
        Features.EDITS: bool(_biases(params)),
        Features.LOGPROBS: params.logprobs is not None,
    }
    return sum(feature for feature, is_used in used.items() if is_used)


def _biases(params: SamplingParams) -> tuple[tuple[int, float], ...]:
    return tuple(params.logit_bias or ())  # type: ignore[arg-type]  # kept as pairs
