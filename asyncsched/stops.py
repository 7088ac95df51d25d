"""Sampled tokens that one comparison does not settle: several stop tokens, a least number of tokens, stop strings, and
tokens that are none.

They are looked at request by request. What may become a stop string is held back.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from asyncsched.plan import IndexArray
from asyncsched.request import Finished, FinishReason, Request, TokenArray
from asyncsched.rows import NO_TOKEN, Rows


def commit_one_by_one(
    r: Rows, rows: IndexArray, ends: IndexArray, tokens: TokenArray, end: Callable[[Request, FinishReason], Finished]
) -> tuple[IndexArray, TokenArray, tuple[Finished, ...]]:
    """Which request gets which token now, and who ended; `end` ends one. The tokens are in their rows already."""
    requests: list[int] = []
    delivered: list[int] = []
    finished: list[Finished] = []
    for row, position, token in zip(rows.tolist(), ends.tolist(), tokens.tolist(), strict=True):
        request = r.owner[row]
        assert request is not None  # the row is live
        at_limit = position >= int(r.last_end[row])
        stopped, held = scrutinise(request, position, token)
        # Only requests that are looked at alone hold anything back: the others' earlier tokens are all out.
        first = request.num_prompt_tokens + request.num_released if r.scrutinise[row] else position
        last = max(first, position + 1 - (0 if stopped or at_limit else held))  # what is out cannot be held back
        delivered += r.tokens[row, first:last].tolist()
        requests += [request.number] * (last - first)
        request.num_released += last - first
        if stopped or at_limit:
            finished.append(end(request, FinishReason.STOP if stopped else FinishReason.LENGTH))
    return np.array(requests, dtype=np.int64), np.array(delivered, dtype=np.int32), tuple(finished)


def fail_tokens(
    r: Rows,
    rows: IndexArray,
    tokens: TokenArray,
    vocab_size: int,
    end: Callable[[Request, FinishReason, str], Finished],
) -> tuple[Finished, ...]:
    """Ends the requests whose sampled tokens are no tokens: NaN logits, or a fault of the executor."""
    finished = []
    for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
        request = r.owner[row]
        assert request is not None  # the row is live
        finished.append(end(request, FinishReason.ERROR, fault_of(token, vocab_size)))
    return tuple(finished)


def fault_of(token: int, vocab_size: int) -> str:
    """What to say about a sampled token that is none."""
    if token == NO_TOKEN:
        return "no token could be sampled: the logits are NaN, or infinite"
    return f"sampled token {token} is outside the vocabulary of {vocab_size}"


def scrutinise(request: Request, position: int, token: int) -> tuple[bool, int]:
    """Whether a content stop ends the request with the token at `position`, and how many to hold back if not."""
    match = request.matcher.feed(token) if request.matcher else None
    outputs = position + 1 - request.num_prompt_tokens
    if outputs < request.params.min_tokens:
        return False, match.held if match else 0
    if token in request.params.stop_token_ids:
        return True, 0
    return (match.stopped, match.held) if match else (False, 0)
