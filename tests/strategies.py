"""Random engines and workloads for Hypothesis: small enough to be tight, with everything the design allows.

Draws are few and coarse, since drawing takes as long as running.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from faithful import VOCABULARY
from harness import Ask, Entry
from hypothesis import strategies as st

from asyncsched.config import EngineConfig
from asyncsched.pipeline import Abort, Pause, Resume
from asyncsched.request import SamplingParams

MAX_PROMPT = 16
MAX_OUTPUT = 14
FAMILIES = 3  # prompts start with one of so many texts, hence shared prefixes
TAILS = 7  # and go on with one of so many others

ADMISSION = ("fcfs", "priority", "shortest-prompt")
VICTIM = ("latest-arrival", "lowest-priority", "least-progress")

TOKENS = range(VOCABULARY)
STOP_IDS = [(), (), (), *((token,) for token in TOKENS), (0, 3), (1, 2)]
PATTERNS = [None] * 80 + [tokens for length in (1, 2, 3) for tokens in product((0, 1, 4), repeat=length)]
BLOCK_SIZES = [1, 1, 2, 2, 3, 4, 5, 8]
SPARE_BLOCKS = [0, 0, 0, 1, 1, 2, 2, 3, 4, 6, 9, -1]  # beyond what the largest request needs; -1: it never fits


class Case(NamedTuple):
    """One run, as data. `failing` are numbers of steps that fail."""

    config: EngineConfig
    script: tuple[Entry, ...]
    failing: frozenset[int]


def family_text(family: int, length: int) -> tuple[int, ...]:
    return tuple((family + position * (position + family) // 3 + position) % VOCABULARY for position in range(length))


@st.composite
def asks(draw: st.DrawFn, block_size: int, request_id: str, alike: bool) -> Ask:
    """Prompts of one token, of multiples of the block size, and with prefixes that others have too."""
    length = draw(st.one_of(st.integers(1, MAX_PROMPT), st.sampled_from([1, block_size, 2 * block_size])))
    common = draw(st.integers(max(0, length - 2) if alike else 0, length))
    family = 0 if alike else draw(st.integers(0, FAMILIES - 1))
    tail = draw(st.integers(FAMILIES, FAMILIES + TAILS - 1))
    max_tokens = draw(st.one_of(st.integers(1, MAX_OUTPUT), st.integers(MAX_OUTPUT // 2, MAX_OUTPUT)))
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.one_of(st.just(0), st.integers(0, max_tokens))),
        stop_token_ids=draw(st.sampled_from(STOP_IDS)),
    )
    prompt = family_text(family, common) + family_text(tail, length - common)
    return Ask(request_id, prompt, params, draw(st.integers(0, 2)), draw(st.sampled_from(PATTERNS)))


@st.composite
def configs(draw: st.DrawFn, block_size: int, largest: int, **fixed: object) -> EngineConfig:
    """An engine whose pool is rarely much larger than a request of `largest` tokens, and now and then too small."""
    values: dict[str, object] = {
        "depth": draw(st.integers(1, 4)),
        "batching": "continuous",
        "max_num_seqs": draw(st.sampled_from([6, 5, 4, 4, 3, 2, 1])),
        "max_num_batched_tokens": draw(st.one_of(st.integers(1, 8), st.integers(9, 64))),
        "max_model_len": MAX_PROMPT + MAX_OUTPUT,
        "block_size": block_size,
        "enable_prefix_caching": draw(st.booleans()),
        "enable_chunked_prefill": draw(st.sampled_from([True, True, False])),
        "sliding_window": draw(st.one_of(st.none(), st.none(), st.none(), st.integers(1, 12))),
        "decode_buckets": draw(st.sampled_from([(), (1, 2, 4, 6), (3,)])),
        "mixed_buckets": draw(st.sampled_from([(), (4, 16), (2, 8, 64)])),
        "admission": draw(st.sampled_from(ADMISSION)),
        "victim": draw(st.sampled_from(VICTIM)),
        "reservation": draw(st.sampled_from(["optimistic", "optimistic", "optimistic", "worst-case"])),
    } | fixed
    values["decode_buckets"] = tuple(b for b in values["decode_buckets"] if b <= values["max_num_seqs"])
    budget = values["max_num_batched_tokens"]
    values["mixed_buckets"] = tuple(bucket for bucket in values["mixed_buckets"] if bucket <= budget)
    if values["depth"] == 1 and "batching" not in fixed and draw(st.booleans()):
        values["batching"] = "static"
    blocks, window = -(-(largest - 1) // block_size), values["sliding_window"]
    if isinstance(window, int) and draw(st.booleans()):
        blocks = min(blocks, -(-(window - 1) // block_size) + 1)
    spare = draw(st.sampled_from(SPARE_BLOCKS))
    return EngineConfig(**{"num_blocks": max(1, blocks + spare), **values})


@st.composite
def cases(draw: st.DrawFn, *, max_requests: int = 6, faults: bool = True, alike: bool = False, **fixed: object) -> Case:
    """`fixed` are settings of the engine that every case has; `alike` requests nearly have one prompt."""
    block_size = draw(st.sampled_from(BLOCK_SIZES))
    count = draw(st.one_of(st.integers(1, max_requests), st.just(max_requests)))
    requests = [draw(asks(block_size, name, alike)) for name in "abcdefgh"[:count]]
    if draw(st.integers(0, 9)) == 0:  # a name that may still be in use
        requests.append(draw(asks(block_size, "a", alike)))
    spread = draw(st.sampled_from([0, 0, 2, 8, 25]))
    script = []
    at = 0
    for ask in requests:
        at += draw(st.integers(0, spread)) if spread else 0
        script.append(Entry(at, ask))
    moments = st.integers(0, 120)
    for _ in range(draw(st.sampled_from([0, 0, 1, 2, 4]))):
        script.append(Entry(draw(moments), Abort(draw(st.sampled_from("abcdefz")))))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        moment = draw(moments)
        script += [Entry(moment, Pause(draw(st.booleans()))), Entry(moment + draw(st.integers(0, 12)), Resume())]
    failing = [draw(st.integers(0, 40)) for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2])))] if faults else []
    largest = max(len(ask.prompt) + ask.params.max_tokens for ask in requests)
    config = draw(configs(block_size, largest, **fixed))
    return Case(config, tuple(sorted(script, key=lambda entry: entry.at)), frozenset(failing))
