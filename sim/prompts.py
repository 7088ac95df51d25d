"""The tokens of made-up prompts, which matter to the prefix cache alone, and how often prompts begin alike.

Requests of a trace with prefix ids share exactly what their ids share: a block of the trace is its id, repeated. Other
prompts are random, so they share nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

import numpy as np

from asyncsched.request import TokenArray
from sim.draws import Stream, generator
from sim.trace_formats import PREFIX_BLOCK
from sim.workload import Arrival

VOCABULARY = 32_000
FIRST = 2  # smaller token ids are those of the simulated model's outputs


def prompt_of(arrival: Arrival, seed: int, number: int, caching: bool) -> TokenArray:
    """int32[prompt_tokens] of the request that is the `number`-th to come. Without caching one zero stands for all."""
    size = arrival.prompt_tokens
    if not caching:
        return _zeros(-(-size // 65_536) * 65_536)[:size]
    if arrival.prefix:
        return np.repeat(np.array(arrival.prefix, dtype=np.int32) + np.int32(FIRST), PREFIX_BLOCK)[:size]
    return generator(seed, Stream.TOKENS, number).integers(FIRST, VOCABULARY, size, dtype=np.int32)


@cache
def _zeros(size: int) -> TokenArray:
    """Shared by all who need no more, as queues may be long."""
    return np.zeros(size, dtype=np.int32)


class IdealReuse(NamedTuple):
    """What a cache without limit would save if every prompt were there as soon as it came. Shares of 1.

    tokens  of all prompt tokens, in whole KV blocks, the last token of a prompt never being saved
    blocks  of the blocks that the trace has ids for, its own measure; None where it has none
    """

    tokens: float
    blocks: float | None


def ideal_reuse(arrivals: Iterable[Arrival], block_size: int) -> IdealReuse:
    node_of: dict[tuple[int, int], int] = {}  # (all blocks before, id) -> all blocks up to here
    tokens = saved = blocks = seen = 0
    for arrival in arrivals:
        node = known = 0
        for block in arrival.prefix:
            known += (node, block) in node_of  # never behind one that is not: its node is new
            node = node_of.setdefault((node, block), len(node_of) + 1)
        tokens += arrival.prompt_tokens
        blocks += len(arrival.prefix)
        seen += known
        most = (arrival.prompt_tokens - 1) // block_size
        saved += min(known * PREFIX_BLOCK // block_size, most) * block_size
    return IdealReuse(saved / tokens if tokens else 0.0, seen / blocks if blocks else None)
