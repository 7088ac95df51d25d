"""Log-probabilities of sampled tokens, computed on the device only in steps where a request asks.

They are of the model's own logits, before bias, penalties and temperature, as vLLM reports them by default.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncsched.inputs import Int32s


class TokenLogprobs(NamedTuple):
    """Of one sampled token; `rank` is 1 for the most likely token. `top` are (token, log-probability), best first."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def num_words(num_logprobs: int) -> int:
    """Words per sampled token that hold its own log-probability and those of `num_logprobs` others."""
    return 2 + 2 * num_logprobs


def logprob_words(logits: Tensor, tokens: Tensor, num_logprobs: int) -> Tensor:
    """int32[m, num_words]: bits of the log-probability, rank, the most likely tokens, bits of theirs.

    `logits` is float32[m, V], `tokens` int64[m]; where a token is negative, its words mean nothing.
    """
    own = logits.gather(1, tokens.clamp(min=0).unsqueeze(1))
    ranks = (logits > own).sum(-1, keepdim=True) + 1
    normalisers = logits.logsumexp(-1, keepdim=True)
    return packed_logprobs(logits, own - normalisers, ranks, normalisers, num_logprobs)


def packed_logprobs(logits: Tensor, own: Tensor, ranks: Tensor, normalisers: Tensor, num_logprobs: int) -> Tensor:
    """The words, where the sampled token's log-probability and rank and the row's log-sum-exp, [m, 1], are known."""
    values, tokens = _largest(logits, num_logprobs)
    parts = (
        own.view(torch.int32),
        ranks.to(torch.int32),
        tokens.to(torch.int32),
        (values - normalisers).view(torch.int32),
    )
    return torch.cat(parts, dim=1)


def _largest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest logits of each row, in order, and their tokens.

    A GPU takes up a row with one multiprocessor, so there a long row is looked at in parts, and what each part has to
    offer once more.
    """
    rows, vocab_size = logits.shape
    num_parts = next((n for n in (32, 24, 16, 12, 8, 4) if vocab_size % n == 0), 1)
    if not logits.is_cuda or vocab_size // num_parts < 4 * count:
        return torch.topk(logits, count, dim=-1)
    part = vocab_size // num_parts
    values, places = torch.topk(logits.view(rows, num_parts, part), count, dim=-1)
    places += torch.arange(0, vocab_size, part, device=logits.device).view(1, num_parts, 1)
    best = torch.topk(values.view(rows, -1), count, dim=-1)
    return best.values, places.view(rows, -1).gather(1, best.indices)


def read_logprobs(words: Int32s, num_asked: int) -> TokenLogprobs:
    """Log-probabilities of one sampled token from its words, with those of the `num_asked` most likely tokens."""
    num_logprobs = (len(words) - 2) // 2
    floats = words.view(np.float32)
    tokens = words[2 : 2 + num_asked].tolist()
    values = floats[2 + num_logprobs : 2 + num_logprobs + num_asked].tolist()
    return TokenLogprobs(float(floats[0]), int(words[1]), tuple(zip(tokens, values, strict=True)))
