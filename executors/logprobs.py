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
    values, largest = torch.topk(logits, num_logprobs, dim=-1)
    parts = (
        (own - normalisers).view(torch.int32),
        ranks.to(torch.int32),
        largest.to(torch.int32),
        (values - normalisers).view(torch.int32),
    )
    return torch.cat(parts, dim=1)


def read_logprobs(words: Int32s, num_asked: int) -> TokenLogprobs:
    """Log-probabilities of one sampled token from its words, with those of the `num_asked` most likely tokens."""
    num_logprobs = (len(words) - 2) // 2
    floats = words.view(np.float32)
    tokens = words[2 : 2 + num_asked].tolist()
    values = floats[2 + num_logprobs : 2 + num_logprobs + num_asked].tolist()
    return TokenLogprobs(float(floats[0]), int(words[1]), tuple(zip(tokens, values, strict=True)))
