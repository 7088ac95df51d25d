"""Matrix products of few rows in Triton. Reading the weight is what they cost, so they are built around that.

One row is multiplied by ordinary arithmetic: many programs of a few columns each keep more of the weight on its way
than tensor cores fed through shared memory do. For several rows the weight is the left operand, whose side the tensor
cores take 16 or 64 wide, and the rows are the narrow side. Where a sum is split, the last of a tile's programs to
finish adds the parts up, in order: equal inputs give equal bits, whoever is last.
"""
# ruff: noqa: N803  # constants of a kernel are upper case

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from executors.few_rows import Scratch, Tiling

ROW_COLUMNS, ROW_DEPTH, ROW_WARPS = 4, 2048, 4  # of a tile of the weight where there is one row


@triton.jit(do_not_specialize=["columns"])
def multiply_row(
    x,
    weight,
    bias,
    output,
    columns,
    depth,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """Program (tile of columns): output [columns] = weight [columns, depth] x [depth]. Even: tiles fill the depth."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    from_weight = weight + (column % columns).to(tl.int64)[:, None] * depth
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for begin in range(0, depth, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        if IS_EVEN:
            tile = tl.load(from_weight + k[None, :], eviction_policy="evict_first")
            value = tl.load(x + k)
        else:
            tile = tl.load(from_weight + k[None, :], mask=(k < depth)[None, :], other=0.0)
            value = tl.load(x + k, mask=k < depth, other=0.0)
        total += tile.to(tl.float32) * value.to(tl.float32)[None, :]
    result = tl.sum(total, 1)
    if HAS_BIAS:
        result += tl.load(bias + column % columns).to(tl.float32)
    tl.store(output + column, result.to(output.dtype.element_ty), mask=column < columns)


@triton.jit(do_not_specialize=["rows", "columns"])
def multiply_rows(
    x,
    weight,
    bias,
    output,
    partial,
    arrived,
    rows,
    columns,
    depth,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Program (tile of columns, part of the sum): output [rows, columns] = x [rows, depth] weight [columns, depth]^T.

    The depth is a multiple of SPLITS x BLOCK_K. Rows and columns beyond the matrices are read where they begin again.
    """
    tile, part = tl.program_id(0), tl.program_id(1)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_M)
    k = part * (depth // SPLITS) + tl.arange(0, BLOCK_K)
    from_weight = weight + (column % columns).to(tl.int64)[:, None] * depth + k[None, :]
    from_x = x + (row % rows)[None, :] * depth + k[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for _ in range(0, depth // SPLITS, BLOCK_K):
        total = tl.dot(tl.load(from_weight), tl.load(from_x), total)
        from_weight += BLOCK_K
        from_x += BLOCK_K
    is_last = True
    if SPLITS > 1:
        cell = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + row[None, :]
        parts = partial + tile * SPLITS * BLOCK_N * BLOCK_M + cell
        tl.store(parts + part * BLOCK_N * BLOCK_M, total)
        tl.debug_barrier()  # all that the program stored comes before its arrival
        is_last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLITS - 1
        if is_last:
            tl.store(arrived + tile, 0)
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for each in tl.static_range(SPLITS):
                total += tl.load(parts + each * BLOCK_N * BLOCK_M)
    if is_last:
        if HAS_BIAS:
            total += tl.load(bias + column % columns).to(tl.float32)[:, None]
        inside = (column < columns)[:, None] & (row < rows)[None, :]
        into = output + row[None, :].to(tl.int64) * columns + column[:, None]
        tl.store(into, total.to(output.dtype.element_ty), mask=inside)


def product_of_row(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[1, columns] of x [1, depth] and weight [columns, depth], all contiguous; sums are float32."""
    columns, depth = weight.shape
    output = torch.empty(1, columns, dtype=x.dtype, device=x.device)
    multiply_row[(triton.cdiv(columns, ROW_COLUMNS),)](
        x,
        weight,
        bias,
        output,
        columns,
        depth,
        BLOCK_N=ROW_COLUMNS,
        BLOCK_K=ROW_DEPTH,
        HAS_BIAS=bias is not None,
        IS_EVEN=depth % ROW_DEPTH == 0,
        num_warps=ROW_WARPS,
    )
    return output


def product_of_rows(x: Tensor, weight: Tensor, bias: Tensor | None, tiling: Tiling, scratch: Scratch) -> Tensor:
    """[rows, columns] of x [rows, depth] and weight [columns, depth], all contiguous; sums are float32."""
    (rows, depth), columns = x.shape, len(weight)
    output = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    multiply_rows[(triton.cdiv(columns, tiling.columns), tiling.splits)](
        x,
        weight,
        bias,
        output,
        scratch.partial,
        scratch.arrived,
        rows,
        columns,
        depth,
        BLOCK_M=max(8, triton.next_power_of_2(rows)),
        BLOCK_N=tiling.columns,
        BLOCK_K=tiling.depth,
        SPLITS=tiling.splits,
        HAS_BIAS=bias is not None,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return output
