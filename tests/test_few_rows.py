"""Products of few rows: which kernel they would get, and that a model calls them. The kernels: tests/gpu."""

from __future__ import annotations

import copy
import pickle
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
from executors.merged import Merged, Part
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
        assert called.count(torch.ops.asyncsched.linear) == 3  # q, k, v; o; down: gate and up are `executors.gated`
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
    rows = set(calls.rows)
    assert 1 in rows  # each kind of kernel
    assert any(1 < count <= few_rows.NARROW_ROWS for count in rows)
    assert any(few_rows.NARROW_ROWS < count <= few_rows.MAX_ROWS for count in rows)


def test_what_has_other_types_keeps_its_product() -> None:
    model = tiny_model("llama")
    few_rows.install(model.module)
    assert {type(each) for each in linear_layers(model.module)} == {nn.Linear}
    assert not few_rows.pays_on(torch.device("cpu"))
    mixed = torch.ops.asyncsched.linear(torch.ones(2, 4), torch.ones(3, 4), torch.ones(3))
    assert torch.equal(mixed, functional.linear(torch.ones(2, 4), torch.ones(3, 4), torch.ones(3)))


def test_what_the_kernels_would_misread_is_the_librarys() -> None:
    """They look where a row begins, and not at strides."""
    x, weight, bias = torch.ones(2, 4), torch.ones(3, 4), torch.ones(3)
    assert few_rows.is_readable(x, weight, bias)
    assert few_rows.is_readable(x.t().contiguous().t(), weight, None)  # rows are made contiguous, they are few
    for other in (torch.ones(4, 3).t(), torch.ones(6, 4)[::2], torch.ones(3, 8)[:, :4], torch.ones(1, 4).expand(3, 4)):
        assert not few_rows.is_readable(x, other, None)
    assert not few_rows.is_readable(x, weight, torch.ones(1).expand(3))
    assert not few_rows.is_readable(x.half(), weight, None)


def test_rows_without_values_have_products_too() -> None:
    weight, bias = torch.ones(3, 0), torch.ones(3)
    assert torch.equal(torch.ops.asyncsched.linear(torch.ones(2, 0), weight, bias), torch.ones(2, 3))
    assert torch.ops.asyncsched.linear(torch.ones(2, 0, 4), torch.ones(3, 4), bias).shape == (2, 0, 3)


class Quantised(torch.Tensor):
    """A weight that says itself what a product with it is, as those of quantisation libraries do."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear:
            return functional.linear(args[0], args[1].as_subclass(torch.Tensor) * 2, *args[2:])
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.usefixtures("wide_types")
def test_layers_of_other_kinds_keep_their_product_and_hooks_stay() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    hooked, quantised, own, tied = nn.Linear(4, 3), nn.Linear(4, 3), Doubled(4, 3), nn.Linear(4, 3)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    seen: list[int] = []
    hooked.register_forward_hook(lambda *_: seen.append(1))
    quantised.weight = nn.Parameter(quantised.weight.detach().as_subclass(Quantised), requires_grad=False)
    tied.weight = hooked.weight
    layers = nn.ModuleList([hooked, quantised, own, normed, tied])
    x = torch.randn(2, 4)
    expected = [layer(x) for layer in layers]
    few_rows.install(layers)
    assert [type(layer) is FewRows for layer in layers] == [True, False, False, False, True]
    assert all(torch.equal(layer(x), each) for layer, each in zip(layers, expected, strict=True))
    assert len(seen) == 2


@pytest.mark.usefixtures("wide_types")
def test_a_model_with_its_products_can_be_copied_and_stored() -> None:
    model = tiny_model("llama")
    few_rows.install(model.module)
    wanted = {name: weight.clone() for name, weight in model.module.state_dict().items()}
    for other in (copy.deepcopy(model.module), pickle.loads(pickle.dumps(model.module))):
        assert {type(each) for each in linear_layers(other)} == {FewRows}
        merged = [each for each in other.modules() if isinstance(each, Merged)]
        assert merged
        assert all(each.product is few_rows.product for each in merged)
        with few_rows.apart(other):
            assert all(each.product is functional.linear for each in merged)
        stored = other.state_dict()
        assert stored.keys() == wanted.keys()
        assert all(torch.equal(stored[name], weight) for name, weight in wanted.items())


@pytest.mark.parametrize(("capability", "pays"), [((8, 9), False), ((9, 0), True), ((10, 0), False), ((12, 0), False)])
def test_devices_that_nobody_measured_keep_the_library(
    capability: tuple[int, int], pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile of 64 x 256 takes 144 KB of shared memory on a device of capability 12.0, which has 99."""
    monkeypatch.setattr(few_rows, "find_spec", lambda _: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert few_rows.pays_on(torch.device("cuda")) == pays
