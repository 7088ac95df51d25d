"""Gated layers in Triton against float64, and in a model.

Needs a CUDA device. With TRITON_INTERPRET=1 the kernels also run on a CPU, in float32, slowly.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch.nn import functional

from executors import gated
from executors.few_rows import Tiling

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

from executors import triton_gated  # noqa: E402  # needs triton
from executors.triton_gated import gated_row, gated_rows, joined  # noqa: E402

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
DTYPES = [torch.float32] if INTERPRETED else [torch.float16, torch.bfloat16]
SMALL = Tiling(columns=16, depth=64, splits=1, warps=4, stages=2)
needs_cuda = pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")


def operands(rows: int, width: int, depth: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Gates of about 1, of either sign, where activations bend."""
    generator = torch.Generator().manual_seed(rows * width + depth)
    x = torch.randn(rows, depth, generator=generator) / depth**0.5
    weight = torch.randn(2 * width, depth, generator=generator)
    return x.to(DEVICE, dtype), weight.to(DEVICE, dtype)


def expected(x: torch.Tensor, weight: torch.Tensor, activation: str) -> torch.Tensor:
    gate, up = functional.linear(x.double(), weight.double()).chunk(2, -1)
    return gated.ACTIVATIONS[activation](gate) * up


def check(actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, activation: str) -> None:
    wanted = expected(x, weight, activation)
    assert actual.dtype == x.dtype
    assert actual.shape == wanted.shape
    assert float((actual.double() - wanted).abs().max() / wanted.abs().max()) < TOLERANCE[x.dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", gated.ACTIVATIONS)
@pytest.mark.parametrize(("width", "depth"), [(1, 16), (35, 640), (192, 4096), (129, 2048 + 128)])
def test_a_row(width: int, depth: int, activation: str, dtype: torch.dtype) -> None:
    x, weight = operands(1, width, depth, dtype)
    check(gated_row(x, weight, activation), x, weight, activation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", gated.ACTIVATIONS)
@pytest.mark.parametrize(("rows", "width"), [(2, 35), (8, 192), (17, 100), (32, 128), (33, 65), (100, 200), (128, 64)])
def test_rows(rows: int, width: int, activation: str, dtype: torch.dtype) -> None:
    x, weight = operands(rows, width, 256, dtype)
    kinds = next(kinds for most, kinds in gated.TILINGS if rows <= most)
    for tiling in (*kinds, SMALL):
        first = gated_rows(x, weight, activation, tiling)
        check(first, x, weight, activation)
        assert torch.equal(gated_rows(x, weight, activation, tiling), first)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", gated.ACTIVATIONS)
def test_joining_what_the_library_multiplied(activation: str, dtype: torch.dtype) -> None:
    for rows, width in ((3, 5), (300, 1500)):
        x, weight = operands(rows, width, 64, dtype)
        check(joined(functional.linear(x, weight), activation), x, weight, activation)


@needs_cuda
@pytest.mark.parametrize("rows", [1, 2, 16, 32, 33, 64, 128, 129, 256, 1000])
def test_the_operation_for_any_number_of_rows(rows: int) -> None:
    for width, depth in ((14336, 4096), (8192, 2048), (48, 200)):
        x, weight = operands(rows, width, depth, torch.bfloat16)
        check(torch.ops.asyncsched.gated(x.view(1, rows, depth), weight, "silu")[0], x, weight, "silu")
        strided = torch.stack([x, x], dim=-1)[..., 0]
        check(torch.ops.asyncsched.gated(strided, weight, "silu"), x, weight, "silu")
        check(torch.ops.asyncsched.gated(x, weight.t().contiguous().t(), "gelu_tanh"), x, weight, "gelu_tanh")


@needs_cuda
def test_a_layers_kernels_are_loaded_when_it_first_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    for name in ("gated_row", "gated_rows", "joined"):
        run = getattr(triton_gated, name)
        monkeypatch.setattr(triton_gated, name, lambda x, *more, run=run: rows.append(len(x)) or run(x, *more))
    x, weight = operands(40, 8320, 128, torch.bfloat16)  # a shape that no other test has
    for _ in range(2):
        torch.ops.asyncsched.gated(x, weight, "silu")
    assert rows == [*gated.LOADED, 40, 40]


@needs_cuda
def test_a_captured_layer_gives_the_same_bits() -> None:
    x, weight = operands(32, 14336, 4096, torch.bfloat16)
    wanted = torch.ops.asyncsched.gated(x, weight, "silu")
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output = torch.ops.asyncsched.gated(x, weight, "silu")
    output.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output, wanted)
