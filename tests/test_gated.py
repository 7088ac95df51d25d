"""Gated layers: where the compiler's graphs have them, and which kernel they would get. The kernels: tests/gpu."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_compiled import TRACED
from test_few_rows import run
from tiny_models import TINY, tiny_model
from torch import Tensor, fx, nn
from torch.nn import functional

from executors import few_rows, gated
from executors.compiled import CompiledStack
from executors.gated import tiling_of
from executors.models import Model

torch.set_num_threads(1)

H200 = 132
WIDTH = 6


@pytest.fixture
def wide_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Own products for float32 too, as CPU tests compare to the last digit; there they are torch's."""
    monkeypatch.setattr(few_rows, "DTYPES", (torch.float32,))


def called(graph: fx.GraphModule) -> list[object]:
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


@pytest.mark.usefixtures("wide_types")
@pytest.mark.parametrize(
    ("name", "per_layer"),
    [("llama", 1), ("phi3", 1), ("gemma2", 1), ("qwen3", 1), ("gpt2", 0), ("gpt-neox", 0), ("gpt-oss-sinks", 0)],
)
def test_a_models_gated_layers_are_found_and_tokens_stay(name: str, per_layer: int) -> None:
    expected = run(tiny_model(name))
    model = tiny_model(name)
    few_rows.install(model.module)
    model = model._compile(TRACED, lambda _: None, check=True)
    assert model.compiled is not None
    stacks = [
        forward
        for layers in model.module.modules()
        if isinstance(layers, nn.ModuleList)
        for layer in layers
        if isinstance(forward := vars(layer).get("forward"), CompiledStack)
    ]
    graphs = [one.call.__self__ for stack in stacks for one in stack.kind.traced]  # type: ignore[attr-defined]
    assert graphs
    for graph in graphs:
        targets = called(graph)
        assert targets.count(torch.ops.asyncsched.gated) == per_layer
        if per_layer:
            assert functional.silu not in targets
            assert functional.gelu not in targets
            assert targets.count(torch.ops.asyncsched.linear) == 3  # q, k, v; o; down
    assert run(model) == expected


# ---- graphs by hand --------------------------------------------------------------------------------------------------


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return torch.ops.asyncsched.linear(x, weight, bias)  # type: ignore[no-any-return]


def usual(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = product(x, weight).split((WIDTH, WIDTH), -1)
    return functional.silu(gate) * up


def chunked(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = product(x, weight).chunk(2, dim=-1)
    return up * functional.gelu(gate, approximate="tanh")


def twice(x: Tensor, weight: Tensor) -> Tensor:
    return usual(x, weight) + chunked(x, weight)


def operands_change_behind_it(x: Tensor, weight: Tensor) -> Tensor:
    x, weight = x.clone(), weight.clone()
    gate, up = product(x, weight).chunk(2, dim=-1)
    x.add_(1)
    weight.zero_()
    return functional.silu(gate) * up + x.sum()


def exact_gelu(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = product(x, weight).chunk(2, dim=-1)
    return functional.gelu(gate) * up


def swapped(x: Tensor, weight: Tensor) -> Tensor:
    up, gate = product(x, weight).chunk(2, dim=-1)
    return functional.silu(gate) * up


def uneven(x: Tensor, weight: Tensor) -> Tensor:
    gate, up, rest = product(x, weight).split((5, 5, 2), -1)
    return functional.silu(gate) * up + rest.sum()


def many_parts(x: Tensor, weight: Tensor) -> Tensor:
    parts = product(x, weight).split(2, -1)
    return functional.silu(parts[0]) * parts[1]


def chunked_by_name(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = product(x, weight).chunk(chunks=2, dim=-1)
    return functional.silu(gate) * up


def split_by_name(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = product(x, weight).split(split_size=WIDTH, dim=-1)
    return functional.silu(gate) * up


def broadcast(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = product(x, weight[:3]).chunk(2, dim=-1)
    return functional.silu(gate) * up


def by_rows(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = product(x, weight).chunk(2, dim=0)
    return functional.silu(gate) * up


def with_bias(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = product(x, weight, weight[:, 0].contiguous()).chunk(2, dim=-1)
    return functional.silu(gate) * up


def gate_has_other_use(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = product(x, weight).chunk(2, dim=-1)
    return functional.silu(gate) * up + gate


def up_has_other_use(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = product(x, weight).chunk(2, dim=-1)
    return functional.silu(gate) * up + up


def product_has_other_use(x: Tensor, weight: Tensor) -> Tensor:
    both = product(x, weight)
    gate, up = both.chunk(2, dim=-1)
    return functional.silu(gate) * up + both.sum()


def activation_has_other_use(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = product(x, weight).chunk(2, dim=-1)
    active = functional.silu(gate)
    return active * up + active


def of_two_products(x: Tensor, weight: Tensor) -> Tensor:
    return functional.silu(product(x, weight).chunk(2, dim=-1)[0]) * product(2 * x, weight).chunk(2, dim=-1)[1]


def crosswise(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = product(x, weight).chunk(2, dim=-1)
    other_gate, other_up = product(2 * x, weight).chunk(2, dim=-1)
    return functional.silu(gate) * other_up + functional.silu(other_gate) * up


def one_gate_for_all(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = product(x, weight).split((1, 2 * WIDTH - 1), -1)
    return functional.silu(gate) * up


def squared(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = product(x, weight).chunk(2, dim=-1)
    active = functional.silu(gate)
    return active * active + up


def plain_library(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = functional.linear(x, weight).chunk(2, dim=-1)
    return functional.silu(gate) * up


def scaled(x: Tensor, weight: Tensor) -> Tensor:
    gate, up = product(x, weight).chunk(2, dim=-1)
    return functional.silu(gate) * 2 + up


FUSED = {usual: 1, chunked: 1, twice: 2, operands_change_behind_it: 1}
LEFT = (
    exact_gelu,
    swapped,
    uneven,
    many_parts,
    chunked_by_name,
    split_by_name,
    broadcast,
    by_rows,
    with_bias,
    gate_has_other_use,
    up_has_other_use,
    product_has_other_use,
    activation_has_other_use,
    of_two_products,
    crosswise,
    one_gate_for_all,
    squared,
    plain_library,
    scaled,
)


@pytest.mark.parametrize("layer", [*FUSED, *LEFT], ids=lambda layer: layer.__name__)
def test_what_is_a_gated_layer_and_what_only_looks_like_one(layer: Callable[[Tensor, Tensor], Tensor]) -> None:
    graphs: list[fx.GraphModule] = []

    def backend(graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        gated.fuse(graph)
        graphs.append(graph)
        return graph.forward

    x, weight = torch.randn(4, 3), torch.randn(2 * WIDTH, 3)
    assert torch.equal(torch.compile(layer, backend=backend, fullgraph=True)(x, weight), layer(x, weight))
    (graph,) = graphs
    assert called(graph).count(torch.ops.asyncsched.gated) == FUSED.get(layer, 0)
    if layer in FUSED:
        assert not {torch.ops.asyncsched.linear, operator.mul, operator.getitem} & set(called(graph))


# ---- the operation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", gated.ACTIVATIONS)
@pytest.mark.parametrize("shape", [(4, 3), (1, 4, 3), (0, 3), (2, 0, 3)])
def test_elsewhere_the_operation_is_what_the_model_says(shape: tuple[int, ...], activation: str) -> None:
    x, weight = torch.randn(shape), torch.randn(2 * WIDTH, 3)
    gate, up = functional.linear(x, weight).chunk(2, -1)
    assert torch.equal(torch.ops.asyncsched.gated(x, weight, activation), gated.ACTIVATIONS[activation](gate) * up)
    assert torch.ops.asyncsched.gated(x.to("meta"), weight.to("meta"), activation).shape == gate.shape


@given(
    rows=st.integers(2, 400),
    width=st.integers(1, 30_000),
    depth=st.integers(1, 256).map(lambda n: 64 * n),
    multiprocessors=st.sampled_from((78, 114, 132, 160)),
)
def test_a_tiling_fits_its_layer(rows: int, width: int, depth: int, multiprocessors: int) -> None:
    tiling = tiling_of(rows, width, depth, multiprocessors)
    if tiling is None:
        return
    assert rows <= 128
    assert depth % tiling.depth == 0
    assert width > (0.8 * multiprocessors - 1) * tiling.columns
    rows_of_tile = max(8, 1 << (rows - 1).bit_length())
    assert (2 * tiling.columns + rows_of_tile) * tiling.depth * 2 * tiling.stages <= 227 * 1024  # shared memory


@pytest.mark.parametrize(
    ("rows", "width", "expected"),
    [(8, 14336, (128, 3)), (32, 14336, (128, 3)), (32, 8192, (64, 4)), (33, 14336, (64, 3)), (128, 14336, (64, 3))],
)
def test_layers_of_known_shapes_get_what_was_measured(rows: int, width: int, expected: tuple[int, int]) -> None:
    tiling = tiling_of(rows, width, 4096, H200)
    assert tiling is not None
    assert (tiling.columns, tiling.stages) == expected


@pytest.mark.parametrize(("rows", "width", "depth"), [(129, 14336, 4096), (8, 4096, 1024), (8, 14336, 4000)])
def test_what_the_library_does(rows: int, width: int, depth: int) -> None:
    assert tiling_of(rows, width, depth, H200) is None


def test_without_own_products_nothing_is_fused() -> None:
    model = Model.load(TINY["llama"](), device="cpu", dummy_weights=True, compile=TRACED)
    for one in model.module.model.layers[0].forward.kind.traced:
        assert torch.ops.asyncsched.gated not in called(one.call.__self__)  # type: ignore[attr-defined]
