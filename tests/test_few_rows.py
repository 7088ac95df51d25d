"""Products of few rows: which kernel they would get, and that a model calls them. The kernels: tests/gpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_compiled import TRACED
from test_models import Driver, prompts
from tiny_models import tiny_model
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from executors import few_rows, self_check
from executors.few_rows import FewRows, Tiling, tiling_of
from executors.merged import Part
from executors.models import Model

torch.set_num_threads(1)

H200 = 132


@pytest.fixture
def wide_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operation for float32 too, as CPU tests compare to the last digit; there it is torch's own product."""
    monkeypatch.setattr(few_rows, "DTYPES", (torch.float32,))


class Calls(TorchDispatchMode):
    """Rows of each call of the operation."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.asyncsched.linear.default:
            self.rows.append(args[0].numel() // args[0].shape[-1])
        return func(*args, **(kwargs or {}))


def run(model: Model) -> list[list[int]]:
    return Driver(model, prompts()).run()


def linear_layers(module: nn.Module) -> list[nn.Linear]:
    return [each for each in module.modules() if isinstance(each, nn.Linear) and not isinstance(each, Part)]


@given(
    rows=st.integers(2, few_rows.MAX_ROWS),
    columns=st.integers(1, 300_000),
    depth=st.integers(1, 256).map(lambda n: 64 * n),
    multiprocessors=st.sampled_from((78, 114, 132, 160)),
)
def test_a_tiling_fits_its_product(rows: int, columns: int, depth: int, multiprocessors: int) -> None:
    tiling = tiling_of(rows, columns, depth, multiprocessors)
    if tiling is None:
        assert rows > few_rows.NARROW_ROWS or depth % few_rows.NARROW.depth
        return
    tiles = -(-columns // tiling.columns)
    assert depth % (tiling.splits * tiling.depth) == 0
    assert tiling.splits == 1 or tiles * tiling.splits < 2 * multiprocessors  # what there is room for
    if rows <= few_rows.NARROW_ROWS and tiles * tiling.splits < multiprocessors:
        assert depth % (2 * tiling.splits * tiling.depth)  # no split would be even


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "expected"),
    [
        (8, 6144, 4096, Tiling(32, 128, 1, 2, 5)),
        (8, 4096, 4096, Tiling(32, 128, 2, 2, 5)),
        (16, 4096, 14336, Tiling(32, 128, 2, 2, 5)),
        (32, 6144, 4096, Tiling(64, 256, 1, 4, 4)),
        (32, 4096, 14336, None),
        (32, 28672, 4096, None),
        (32, 128256, 4096, Tiling(64, 128, 1, 4, 4)),
    ],
)
def test_products_of_the_llama_8b_shape_get_what_was_measured(
    rows: int, columns: int, depth: int, expected: Tiling | None
) -> None:
    assert tiling_of(rows, columns, depth, H200) == expected


@pytest.mark.usefixtures("wide_types")
@pytest.mark.parametrize("name", ["llama", "qwen2", "mixtral"])
def test_every_linear_layer_calls_the_operation_and_tokens_stay(name: str) -> None:
    expected = run(tiny_model(name))
    model = tiny_model(name)
    few_rows.install(model.module)
    assert {type(each) for each in linear_layers(model.module)} == {FewRows}
    with Calls() as calls:
        actual = run(model)
    assert calls.rows
    assert actual == expected
    with few_rows.apart(model.module), Calls() as apart:
        assert {type(each) for each in linear_layers(model.module)} == {nn.Linear}
        assert run(model) == expected
    assert not apart.rows
    assert {type(each) for each in linear_layers(model.module)} == {FewRows}


@pytest.mark.usefixtures("wide_types")
def test_compiled_layers_call_the_operation_and_are_bound() -> None:
    model = tiny_model("llama")
    few_rows.install(model.module)
    model = model._compile(TRACED, lambda _: None, check=True)
    assert model.compiled is not None
    assert model.compiled.is_bound
    expected = run(tiny_model("llama", compile=TRACED))
    assert run(model) == expected
    for one in model.module.model.layers[0].forward.kind.traced:
        called = [node.target for node in one.call.__self__.graph.nodes if node.op == "call_function"]  # type: ignore[attr-defined]
        assert called.count(torch.ops.asyncsched.linear) == 4  # q, k, v; o; gate, up; down
        assert functional.linear not in called


@pytest.mark.usefixtures("wide_types")
def test_the_self_check_compares_with_the_librarys_products(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    few_rows.install(model.module)
    with Calls() as calls:
        self_check._own_logits(model.module, [1, 2, 3])
    assert not calls.rows
    with Calls() as calls:
        model._check()
    assert calls.rows


def test_what_has_other_types_keeps_its_product() -> None:
    model = tiny_model("llama")
    few_rows.install(model.module)
    assert {type(each) for each in linear_layers(model.module)} == {nn.Linear}
    assert not few_rows.pays_on(torch.device("cpu"))
    mixed = torch.ops.asyncsched.linear(torch.ones(2, 4), torch.ones(3, 4), torch.ones(3))
    assert torch.equal(mixed, functional.linear(torch.ones(2, 4), torch.ones(3, 4), torch.ones(3)))


@pytest.mark.parametrize(("capability", "pays"), [((8, 9), False), ((9, 0), True), ((10, 0), False), ((12, 0), False)])
def test_devices_that_nobody_measured_keep_the_library(
    capability: tuple[int, int], pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile of 64 x 256 takes 144 KB of shared memory on a device of capability 12.0, which has 99."""
    monkeypatch.setattr(few_rows, "find_spec", lambda _: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert few_rows.pays_on(torch.device("cuda")) == pays
