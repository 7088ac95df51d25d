"""Products of few rows in Triton against float64, and in a model.

Needs a CUDA device. With TRITON_INTERPRET=1 the kernels also run on a CPU, in float32, slowly.
"""

from __future__ import annotations

import os

import pytest
import torch
from test_models import Driver, prompts
from tiny_models import TINY
from torch.nn import functional

from executors import few_rows
from executors.few_rows import NARROW, WIDE, FewRows, Scratch, Tiling
from executors.models import Model

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not (torch.cuda.is_available() or INTERPRETED):
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

from executors.triton_product import product_of_row, product_of_rows  # noqa: E402  # needs triton

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = [torch.float32] if INTERPRETED else [torch.float16, torch.bfloat16]
needs_cuda = pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
TILINGS = {
    "narrow": NARROW,
    "in two": NARROW._replace(splits=2),
    "in eight": NARROW._replace(splits=8),
    "wide": WIDE,
    "deep": WIDE._replace(depth=256),
}


def operands(
    rows: int, columns: int, depth: int, dtype: torch.dtype, *, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(rows * columns + depth)
    x, weight, bias = (
        torch.randn(*shape, generator=generator) for shape in ((rows, depth), (columns, depth), (columns,))
    )
    on_device = [each.to(DEVICE, dtype) for each in (x, weight, bias)]
    return on_device[0], on_device[1], on_device[2] if has_bias else None


def check(actual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    expected = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert actual.dtype == x.dtype
    assert float((actual.double() - expected).abs().max() / expected.abs().max()) < TOLERANCE[x.dtype]


def scratch(tiling: Tiling, columns: int) -> Scratch:
    tiles = -(-columns // tiling.columns)
    partial = torch.full((tiles * tiling.splits * tiling.columns * few_rows.MAX_ROWS,), torch.nan, device=DEVICE)
    return Scratch(partial, torch.zeros(tiles, dtype=torch.int32, device=DEVICE))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("columns", "depth"), [(1, 16), (35, 640), (192, 4096), (130, 2048 + 128)])
def test_a_row(columns: int, depth: int, has_bias: bool, dtype: torch.dtype) -> None:
    x, weight, bias = operands(1, columns, depth, dtype, has_bias=has_bias)
    check(product_of_row(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", TILINGS)
@pytest.mark.parametrize(("rows", "columns"), [(2, 35), (8, 192), (9, 64), (16, 128), (17, 100), (32, 200)])
def test_rows(rows: int, columns: int, name: str, dtype: torch.dtype) -> None:
    tiling = TILINGS[name]
    x, weight, bias = operands(rows, columns, 2048, dtype, has_bias=rows % 2 == 0)
    shared = scratch(tiling, columns)
    first = product_of_rows(x, weight, bias, tiling, shared)
    check(first, x, weight, bias)
    assert not shared.arrived.any()  # ready for the next product
    for _ in range(3):
        assert torch.equal(product_of_rows(x, weight, bias, tiling, shared), first)


@needs_cuda
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 32, 33, 200])
def test_the_operation_for_any_number_of_rows(rows: int) -> None:
    for columns, depth in ((4096, 4096), (6144, 4096), (8, 512), (320, 200)):
        x, weight, bias = operands(rows, columns, depth, torch.bfloat16, has_bias=True)
        shaped = x.view(1, rows, depth)
        check(torch.ops.asyncsched.linear(shaped, weight, bias)[0], x, weight, bias)
        strided = torch.stack([x, x], dim=-1)[..., 0]
        check(torch.ops.asyncsched.linear(strided, weight, bias), x, weight, bias)
        check(torch.ops.asyncsched.linear(x, weight.t().contiguous().t(), bias), x, weight, bias)


@needs_cuda
def test_products_on_two_streams_at_once_do_not_mix() -> None:
    x, weight, _ = operands(8, 4096, 4096, torch.bfloat16, has_bias=False)
    assert few_rows.tiling_of(8, 4096, 4096, few_rows.multiprocessors(weight.device)).splits > 1
    inputs = [x, x.flip(0).contiguous()]
    expected = [torch.ops.asyncsched.linear(each, weight, None) for each in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    found: list[list[torch.Tensor]] = [[], []]
    for _ in range(200):
        for stream, each, into in zip(streams, inputs, found, strict=True):
            with torch.cuda.stream(stream):
                into.append(torch.ops.asyncsched.linear(each, weight, None))
    torch.cuda.synchronize()
    for outputs, one in zip(found, expected, strict=True):
        assert all(torch.equal(each, one) for each in outputs)


@needs_cuda
def test_a_captured_product_gives_the_same_bits_and_needs_its_room_before() -> None:
    x, weight, _ = operands(8, 4096, 4096, torch.bfloat16, has_bias=False)
    expected = torch.ops.asyncsched.linear(x, weight, None)
    few_rows._scratches.clear()
    stream = torch.cuda.Stream()
    with (
        pytest.raises(RuntimeError, match="run it once before"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream),
    ):
        torch.ops.asyncsched.linear(x, weight, None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        torch.ops.asyncsched.linear(x, weight, None)
    with torch.cuda.graph(graph, stream=stream):
        output = torch.ops.asyncsched.linear(x, weight, None)
    for _ in range(3):
        output.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(output, expected)


@needs_cuda
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "mixtral"])
def test_logits_of_a_model_are_those_of_the_library(name: str) -> None:
    logits = []
    for own_products in (True, False):
        model = Model.load(
            TINY[name](),
            device="cuda",
            dtype=torch.float16,
            dummy_weights=True,
            attention="plain",
            own_products=own_products,
        )
        assert any(type(each) is FewRows for each in model.module.modules()) == own_products
        driver = Driver(model, prompts(), new_tokens=1)
        driver.arrange = lambda view: view  # type: ignore[method-assign]  # the tables are on the device
        driver.run()
        logits.append(torch.cat([torch.stack(each) for each in driver.logits]).float())
    assert float((logits[0] - logits[1]).norm() / logits[1].norm()) < 5e-3
