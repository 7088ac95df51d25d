"""Room for requests: which can run at all, what an admission must find free, and who could make room.

Arithmetic on blocks for the scheduler, which decides. It knows no order of requests and no policy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from asyncsched.kv import BlockPool
from asyncsched.plan import IndexArray
from asyncsched.request import Request, SamplingParams
from asyncsched.residency import Residency
from asyncsched.rows import Rows


def why_never(residency: Residency, prompt: int, params: SamplingParams) -> str:
    """Why a request with so many prompt tokens can never run, with the numbers; empty when it can."""
    config = residency.config
    total = prompt + params.max_tokens
    if prompt == 0:
        return "the prompt is empty; at least 1 token is needed"
    sizes = f"prompt {prompt} + max_tokens {params.max_tokens} = {total} tokens"
    if total > config.max_model_len:
        return f"{sizes}, over max_model_len {config.max_model_len}"
    blocks, usable = residency.least_blocks(total - 1), residency.pool.num_usable
    if blocks > usable:  # the last token's KV is never written
        return f"{sizes}: {blocks} KV blocks of {config.block_size}, over num_blocks {usable}"
    if not config.enable_chunked_prefill and total - 1 > config.max_num_batched_tokens:
        return f"{sizes}, over max_num_batched_tokens {config.max_num_batched_tokens} with chunked prefill off"
    return ""


def wanted_blocks(residency: Residency, reserved: int, known: int) -> int:
    """Blocks for an admission whose policy reserves so many tokens, of which some are known: never more than the
    request can use or the pool has."""
    tokens = reserved if residency.config.enable_chunked_prefill else max(reserved, known)
    return min(residency.footprint(tokens), residency.pool.num_usable)


def outstanding_promises(rows: Rows, reserved: IndexArray, seated: Collection[int]) -> int:
    """Blocks promised to seated rows that they do not hold yet; `reserved` is by row."""
    if not seated:
        return 0
    which = np.array(list(seated), dtype=np.int64)
    held = rows.num_blocks[which] - rows.freed[which]
    return sum([promised for promised in (reserved[which] - held).tolist() if promised > 0])


def who_frees(rows: Rows, pool: BlockPool, candidates: list[Request], *, is_last_resort: bool) -> list[Request]:
    """Those who would free a block now. Where every block is shared nobody frees one alone: then the answer is to wait
    for what is in flight, and as a last resort to evict until the last owner of some block is gone."""
    freeing = [request for request in candidates if pool.num_sole(rows.blocks_of(request.row))]
    if not freeing and is_last_resort:
        freeing = [request for request in candidates if rows.num_blocks[request.row]]
    return freeing


def unfit(residency: Residency, requests: Iterable[Request]) -> list[Request]:
    """Those that do not fit the usable blocks, since some were lost."""
    usable = residency.pool.num_usable
    return [request for request in requests if residency.least_blocks(request.max_total_tokens - 1) > usable]
