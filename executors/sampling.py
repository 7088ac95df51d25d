"""The sampler: logits in, one token per row out, all on the device, with static shapes.

The order is vLLM's: bias and min_tokens, penalties, then the largest logit for greedy rows; for the others temperature,
min_p, top_k, top_p, and a draw. A draw is the Gumbel-max trick without its outer logarithm: the largest
weight / exponential. Nothing is sorted, and nothing depends on which rows share the batch.

`features` is static: it says what is computed. A row that does not use a feature gets the same token whether the
feature is computed or not, so a captured graph may compute more than a step asks for.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from executors.logprobs import logprob_words
from executors.noise import exponentials
from executors.sampling_layout import IN_PROMPT, MAX_EDITS, Features, Word
from executors.sampling_state import SamplerState
from executors.thresholds import top_k_keep, top_p_keep

NO_TOKEN = -1


class Sampled(NamedTuple):
    """tokens int32[m], NO_TOKEN where a row's logits have a NaN, an infinity above all, or nothing above -infinity.

    logprobs  int32[m, num_words]  see logprobs.py; None when the step does not ask
    """

    tokens: Tensor
    logprobs: Tensor | None


def sample(logits: Tensor, words: Tensor, state: SamplerState, features: int, out: Tensor | None = None) -> Sampled:
    """Samples from `logits`, floating-point [m, V], with parameters `words`, int32[m, NUM_WORDS]; counts the tokens.

    `logits` are left as they are; `out`, int32[m], is where the tokens go, if given. What the features keep in `state`
    must be allocated. On a CUDA device a few kernels do it; they give the tokens of `sample_plain`.
    """
    return (sample_fused if logits.is_cuda else sample_plain)(logits, words, state, features, out)


def sample_plain(
    logits: Tensor, words: Tensor, state: SamplerState, features: int, out: Tensor | None = None
) -> Sampled:
    """`sample`, operation by operation: the reference, and what runs where there are no kernels."""
    logits = logits.float()
    params = _Params(words)
    edited = _edited(logits, params, state) if features & Features.EDITS else logits
    if features & Features.PENALTIES:
        edited = _penalised(edited, params, state)
    peak, tokens = edited.max(-1, keepdim=True)  # the first of equals; NaN if there is one
    if features & Features.RANDOM:
        drawn = _drawn(edited, peak, params, state, features)
        tokens = torch.where(params.floats(Word.INV_TEMPERATURE) > 0, drawn, tokens)
    tokens = torch.where(peak.isfinite(), tokens, NO_TOKEN).squeeze(1)
    if features & Features.PENALTIES:
        state.count(params.rows, tokens)
    logprobs = logprob_words(logits, tokens, state.num_logprobs) if features & Features.LOGPROBS else None
    return Sampled(tokens.to(torch.int32) if out is None else out.copy_(tokens), logprobs)


def sample_fused(
    logits: Tensor, words: Tensor, state: SamplerState, features: int, out: Tensor | None = None
) -> Sampled:
    """`sample` by Triton's kernels."""
    from executors import triton_logprobs, triton_sampling  # there is no Triton where there is no GPU

    tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device) if out is None else out
    triton_sampling.draw(logits, words, state, features, tokens)
    if not features & Features.LOGPROBS:
        return Sampled(tokens, None)
    return Sampled(tokens, triton_logprobs.logprob_words(logits, tokens, state.num_logprobs))


class _Params:
    """Columns of the parameters, as [m, 1] to stand beside [m, V]."""

    def __init__(self, words: Tensor) -> None:
        self._words = words
        self._floats = words.view(torch.float32)

    @property
    def rows(self) -> Tensor:
        return self._words[:, Word.ROW]

    @property
    def keys(self) -> Tensor:
        return self._words[:, Word.KEY : Word.KEY + 2]

    def ints(self, word: Word) -> Tensor:
        return self._words[:, word : word + 1]

    def floats(self, word: Word) -> Tensor:
        return self._floats[:, word : word + 1]


def _edited(logits: Tensor, params: _Params, state: SamplerState) -> Tensor:
    """With biases added and suppressed stop ids at -infinity. A row's unused edits add 0."""
    tokens = state.edit_tokens.index_select(0, params.rows)
    values = state.edit_values.index_select(0, params.rows)
    index = torch.arange(MAX_EDITS, device=logits.device)
    is_used = index < params.ints(Word.NUM_EDITS)
    values = torch.where(is_used, values, 0.0)
    # Unused edits go to tokens of their own: adding them all to one token would make them wait for each other.
    tokens = torch.where(is_used, tokens, index % logits.shape[1])
    return logits.scatter_add(1, tokens, values)


def _penalised(logits: Tensor, params: _Params, state: SamplerState) -> Tensor:
    counts = state.counts.index_select(0, params.rows)
    repetition = params.floats(Word.REPETITION)
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    in_output = counts & (IN_PROMPT - 1)
    penalty = params.floats(Word.FREQUENCY) * in_output + params.floats(Word.PRESENCE) * (in_output > 0)
    return torch.where(counts != 0, repeated, logits).sub_(penalty)


def _drawn(logits: Tensor, peak: Tensor, params: _Params, state: SamplerState, features: int) -> Tensor:
    """A random token per row, int64[m, 1]; for greedy rows, any."""
    weights = (logits - peak).mul_(params.floats(Word.INV_TEMPERATURE)).exp_()
    if features & Features.MIN_P:
        weights.mul_(weights >= params.floats(Word.MIN_P))
    if features & Features.TOP_K:
        weights.mul_(top_k_keep(logits, params.ints(Word.TOP_K)))
    if features & Features.TOP_P:
        weights.mul_(top_p_keep(weights, params.floats(Word.TOP_P)))
    return weights.div_(exponentials(params.keys, state.hashes)).argmax(-1, keepdim=True)
