"""What completes a step's inputs on a CUDA device, in one kernel: `ComputeLane`'s plain path is the reference.

A captured step runs it first; operation by operation it is a dozen kernels, which at batch 1 are half a percent of a
step.
"""
# ruff: noqa: N803  # constants of a kernel are upper case

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from asyncsched.plan import NO_SOURCE
from executors.slots import DeviceInputs

BLOCK = 512

_NO_SOURCE = tl.constexpr(NO_SOURCE)


def complete(inputs: DeviceInputs, sampled: Tensor, ids: Tensor, num_tokens: int) -> None:
    """Applies the changes of block tables; writes to `ids`, int64[2, T], token ids, carried over from `sampled` where
    they are, and positions.
    """
    num_changes = len(inputs.changes_at)
    _complete[(triton.cdiv(max(num_changes, num_tokens), BLOCK),)](
        inputs.changes_at,
        inputs.changes_to,
        inputs.table,
        inputs.carry,
        inputs.token_ids,
        inputs.positions,
        sampled,
        ids,
        num_changes,
        num_tokens,
        ids.stride(0),
        BLOCK=BLOCK,
        num_warps=4,
    )


@triton.jit(
    do_not_specialize=["num_changes", "num_tokens"],
    do_not_specialize_on_alignment=["changes_at", "changes_to", "table", "carry", "token_ids", "positions"],
)
def _complete(
    changes_at,
    changes_to,
    table,
    carry,
    token_ids,
    positions,
    sampled,
    ids,
    num_changes,
    num_tokens,
    ids_stride,
    BLOCK: tl.constexpr,
):
    """Program (block): some of the changes, and some of the tokens."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_change = at < num_changes
    place = tl.load(changes_at + at, mask=is_change, other=0)
    tl.store(table + place, tl.load(changes_to + at, mask=is_change, other=0), mask=is_change)
    is_token = at < num_tokens
    source = tl.load(carry + at, mask=is_token, other=_NO_SOURCE)
    is_carried = source != _NO_SOURCE
    carried = tl.load(sampled + source, mask=is_carried, other=0)
    carried = tl.maximum(carried, 0)  # a row whose logits were no numbers: it fails when it is collected
    token = tl.where(is_carried, carried, tl.load(token_ids + at, mask=is_token, other=0))
    tl.store(ids + at, token.to(tl.int64), mask=is_token)
    tl.store(ids + ids_stride + at, tl.load(positions + at, mask=is_token, other=0).to(tl.int64), mask=is_token)
