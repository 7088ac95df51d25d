"""Gated layers of few rows in Triton: both halves of the weight in one tile, joined before anything is stored.

A tile has rows of gate and of up by turns, so that one product of the tensor cores makes both, and the two values that
belong together end up side by side. They are rounded before they are joined, as where they are products of their own.
Decode steps wait for memory, as in `executors.triton_product`: what a tile costs is reading the weight.
"""
# ruff: noqa: N803  # constants of a kernel are upper case

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from executors.few_rows import Tiling

ROW_COLUMNS, ROW_DEPTH, ROW_WARPS = 2, 1024, 2  # of a tile of each half where there is one row
JOINED = 1024  # columns that a program joins


@triton.jit
def _join(gate, up, dtype: tl.constexpr, ACTIVATION: tl.constexpr):
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    if ACTIVATION == "silu":
        share = tl.sigmoid(gate)
    else:  # (1 + tanh(z)) / 2 is the sigmoid of 2 z
        share = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    return (gate * share * up).to(dtype)


@triton.jit
def gate_row(
    x,
    weight,
    output,
    width,
    depth,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_EVEN: tl.constexpr,
):
    """Program (tile of columns): output [width], x [depth], weight [2 width, depth]. Even: tiles fill the depth."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    from_gate = weight + (column % width).to(tl.int64)[:, None] * depth + k[None, :]
    from_up = from_gate + tl.cast(width, tl.int64) * depth
    gate = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for begin in range(0, depth, BLOCK_K):
        if IS_EVEN:
            value = tl.load(x + begin + k)
            of_gate = tl.load(from_gate + begin, eviction_policy="evict_first")
            of_up = tl.load(from_up + begin, eviction_policy="evict_first")
        else:
            inside = begin + k < depth
            value = tl.load(x + begin + k, mask=inside, other=0.0)
            of_gate = tl.load(from_gate + begin, mask=inside[None, :], other=0.0)
            of_up = tl.load(from_up + begin, mask=inside[None, :], other=0.0)
        gate += of_gate.to(tl.float32) * value.to(tl.float32)[None, :]
        up += of_up.to(tl.float32) * value.to(tl.float32)[None, :]
    result = _join(tl.sum(gate, 1), tl.sum(up, 1), output.dtype.element_ty, ACTIVATION)
    tl.store(output + column, result, mask=column < width)


@triton.jit(do_not_specialize=["rows"])
def gate_rows(
    x,
    weight,
    output,
    rows,
    width,
    depth,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Program (tile of columns): output [rows, width] of x [rows, depth] and weight [2 width, depth].

    The depth is a multiple of BLOCK_K. Rows and columns beyond the matrices are read where they begin again.
    """
    tile = tl.program_id(0) * BLOCK_N
    turn = tl.arange(0, 2 * BLOCK_N)
    row = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    of_weight = (tile + turn // 2) % width + (turn % 2) * width
    from_weight = weight + of_weight.to(tl.int64)[:, None] * depth + k[None, :]
    from_x = x + (row % rows)[None, :] * depth + k[:, None]
    total = tl.zeros([2 * BLOCK_N, BLOCK_M], tl.float32)
    for _ in range(0, depth, BLOCK_K):
        total = tl.dot(tl.load(from_weight), tl.load(from_x), total)
        from_weight += BLOCK_K
        from_x += BLOCK_K
    gate, up = tl.split(tl.permute(tl.reshape(total, [BLOCK_N, 2, BLOCK_M]), [0, 2, 1]))
    column = tile + tl.arange(0, BLOCK_N)
    inside = (column < width)[:, None] & (row < rows)[None, :]
    into = output + row[None, :].to(tl.int64) * width + column[:, None]
    tl.store(into, _join(gate, up, output.dtype.element_ty, ACTIVATION), mask=inside)


@triton.jit
def join_halves(halves, output, width, BLOCK_N: tl.constexpr, ACTIVATION: tl.constexpr):
    """Program (row, tile of columns): output [rows, width] of halves [rows, 2 width]."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    gate = tl.load(halves + row * 2 * width + column, mask=column < width)
    up = tl.load(halves + row * 2 * width + width + column, mask=column < width)
    result = _join(gate.to(tl.float32), up.to(tl.float32), output.dtype.element_ty, ACTIVATION)
    tl.store(output + row * width + column, result, mask=column < width)


def gated_row(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    """[1, width] of x [1, depth] and weight [2 width, depth], gate above up, contiguous; sums are float32."""
    width, depth = len(weight) // 2, weight.shape[1]
    output = torch.empty(1, width, dtype=x.dtype, device=x.device)
    gate_row[(triton.cdiv(width, ROW_COLUMNS),)](
        x,
        weight,
        output,
        width,
        depth,
        BLOCK_N=ROW_COLUMNS,
        BLOCK_K=ROW_DEPTH,
        ACTIVATION=activation,
        IS_EVEN=depth % ROW_DEPTH == 0,
        num_warps=ROW_WARPS,
    )
    return output


def gated_rows(x: Tensor, weight: Tensor, activation: str, tiling: Tiling) -> Tensor:
    """[rows, width] of x [rows, depth] and weight [2 width, depth], gate above up, contiguous; sums are float32."""
    (rows, depth), width = x.shape, len(weight) // 2
    output = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    gate_rows[(triton.cdiv(width, tiling.columns),)](
        x,
        weight,
        output,
        rows,
        width,
        depth,
        BLOCK_M=max(8, triton.next_power_of_2(rows)),
        BLOCK_N=tiling.columns,
        BLOCK_K=tiling.depth,
        ACTIVATION=activation,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    return output


def joined(halves: Tensor, activation: str) -> Tensor:
    """[rows, width] of [rows, 2 width], contiguous: gate, then up, in each row."""
    rows, width = len(halves), halves.shape[1] // 2
    output = torch.empty(rows, width, dtype=halves.dtype, device=halves.device)
    grid = (rows, triton.cdiv(width, JOINED))
    join_halves[grid](halves, output, width, BLOCK_N=JOINED, ACTIVATION=activation, num_warps=4)
    return output
