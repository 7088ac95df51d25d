"""What the scheduler decides for one step, what it costs in sizes, and what comes out of it.

Arrays here have one entry per row of the step (or per sampled token), never one object per request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncsched.request import NO_TOKENS, Finished, TokenArray

IndexArray = NDArray[np.int64]

NO_STEP = -1
NO_SOURCE = -1  # carry-over mask: this token is already on the host


class BlockCopies(NamedTuple):
    """Copies of whole KV blocks: `device[i]` in the device pool, `host[i]` in the host pool, int64[k] each."""

    device: IndexArray
    host: IndexArray


NO_COPIES = BlockCopies(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


@dataclass(slots=True, eq=False)
class StepPlan:
    """Step `step`, to run in I/O slot `slot`. Decode rows come first, then rows that prefill.

    It never changes. Fields are Final and the class is not frozen, which would cost each step another microsecond.

    rows          int64[n]  row of each request in the batch state
    requests      int64[n]  index of each request
    starts, ends  int64[n]  the step computes positions starts..ends-1; ends is also the KV length it reads
    num_decodes   rows with one query token whose input is the newest token
    carry         int64[num_decodes]  the carry-over mask: `slot * max_num_seqs + index among that step's sampled rows`
                  of the newest step in flight that sampled for the request, or NO_SOURCE
    sampled       int64[m]  rows that sample a token, in the order of `rows`
    sampled_ends  int64[m]  position the sampled token will have
    sampled_at    int64[m]  index of each sampled row in `rows`
    num_tokens    query tokens of the step
    bucket        batch size a pure decode step is padded to; 0 for a step that is not padded so
    mixed_bucket  tokens a step without such a batch size is padded to; 0 for a step that is not padded so
    offload       KV blocks copied to the host on d2h; a step may consist of nothing else
    restore       KV blocks copied to the device on h2d, before the forward pass
    """

    step: Final[int]
    slot: Final[int]
    rows: Final[IndexArray]
    requests: Final[IndexArray]
    starts: Final[IndexArray]
    ends: Final[IndexArray]
    num_decodes: Final[int]
    carry: Final[IndexArray]
    sampled: Final[IndexArray]
    sampled_ends: Final[IndexArray]
    sampled_at: Final[IndexArray]
    num_tokens: Final[int]
    bucket: Final[int]
    offload: Final[BlockCopies] = NO_COPIES
    restore: Final[BlockCopies] = NO_COPIES
    mixed_bucket: Final[int] = 0

    @property
    def num_seqs(self) -> int:
        return len(self.rows)

    @property
    def num_prefill_tokens(self) -> int:
        return self.num_tokens - self.num_decodes


class StepShape(NamedTuple):
    """The sizes a cost model may price.

    kv_tokens   KV positions read, summed over rows
    attn_pairs  query-key pairs, summed over rows
    offloaded_blocks, restored_blocks  KV blocks copied to and from the host
    bucket, mixed_bucket               rows or tokens the step is padded to, or 0
    """

    num_seqs: int
    num_decodes: int
    num_prefill_tokens: int
    num_tokens: int
    num_samples: int
    kv_tokens: int
    attn_pairs: int
    bucket: int
    offloaded_blocks: int = 0
    restored_blocks: int = 0
    mixed_bucket: int = 0

    @classmethod
    def of(cls, plan: StepPlan, sliding_window: int | None = None) -> StepShape:
        ends = plan.ends
        if sliding_window is not None:
            ends = np.minimum(ends, plan.ends - plan.starts + sliding_window - 1)
        kv_tokens = pairs = int(np.add.reduce(ends))
        if plan.num_tokens > plan.num_decodes:
            for start, end in zip(
                plan.starts[plan.num_decodes :].tolist(), plan.ends[plan.num_decodes :].tolist(), strict=True
            ):
                pairs += _causal_pairs(start, end, sliding_window) - min(end, end - start + (sliding_window or end) - 1)
        return cls(
            len(plan.rows),
            plan.num_decodes,
            plan.num_tokens - plan.num_decodes,
            plan.num_tokens,
            len(plan.sampled),
            kv_tokens,
            pairs,
            plan.bucket,
            len(plan.offload.host),
            len(plan.restore.host),
            plan.mixed_bucket,
        )


class StepOutput(NamedTuple):
    """What a collected step gives to users, in order of delivery.

    requests   int64[k]  index of the request each token belongs to
    tokens     int32[k]
    finished   requests that ended with this step; their tokens above come before the notice
    overshoot  rows computed for requests that a content stop had already ended; never delivered
    """

    step: int
    requests: IndexArray
    tokens: TokenArray
    finished: tuple[Finished, ...]
    overshoot: int = 0

    @classmethod
    def of_notices(cls, finished: tuple[Finished, ...], step: int = NO_STEP) -> StepOutput:
        """No tokens, only notices: of rejections and aborts between steps, or of a step that failed."""
        return cls(step, np.zeros(0, dtype=np.int64), NO_TOKENS, finished)


def _causal_pairs(start: int, end: int, window: int | None) -> int:
    """Keys seen by queries start..end-1, query p seeing min(p + 1, window) of them."""
    if window is None or end <= window:
        return (start + 1 + end) * (end - start) // 2
    full = max(start, window)
    growing = (start + 1 + full) * (full - start) // 2 if full > start else 0
    return growing + (end - full) * window
