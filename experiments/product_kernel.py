"""A matrix product in Triton for `products.py`: one program per tile of the output, no split of the sum."""
# ruff: noqa: N803  # constants of a kernel are upper case

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(
    x, weight, output, rows, columns, depth, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Programs (tile of rows, tile of columns), rows first, so that neighbours share a tile of the weight.

    The depth is a multiple of BLOCK_K. Rows and columns beyond the matrices are read where they begin again.
    """
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    from_x = x + (row % rows)[:, None] * depth + k[None, :]
    from_weight = weight + (column % columns).to(tl.int64)[None, :] * depth + k[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in range(0, depth, BLOCK_K):
        total = tl.dot(tl.load(from_x), tl.load(from_weight), total)
        from_x += BLOCK_K
        from_weight += BLOCK_K
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(
        output + row[:, None].to(tl.int64) * columns + column[None, :], total.to(output.dtype.element_ty), mask=inside
    )
