"""Merged projections: fewer matrix products, the same outputs, nothing twice in memory, nothing kept."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from test_models import Driver, prompts
from tiny_models import TINY, VOCAB, reference_of, tiny_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from executors import merged
from executors.errors import UnsupportedModelError
from executors.merged import Merged, Part

torch.set_num_threads(1)

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
# Matrix products of a pass, and how many groups of projections there are; phi3, gpt2 and gpt-neox come merged.
GROUPS = dict.fromkeys(TINY, 4) | {
    "gemma2": 6, "gemma3": 6, "phi3": 0, "gpt2": 0, "gpt-neox": 0, "mixtral": 2, "qwen3-moe": 2, "gpt-oss-sinks": 3
}  # fmt: skip


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in PRODUCTS
        return func(*args, **(kwargs or {}))


@contextmanager
def eager(module: PreTrainedModel) -> Iterator[None]:
    before = module.config._attn_implementation
    module.set_attn_implementation("eager")
    yield
    module.set_attn_implementation(before)


@torch.no_grad()
def logits(module: PreTrainedModel) -> tuple[torch.Tensor, int]:
    """Of random tokens, and the number of matrix products."""
    tokens = torch.randint(VOCAB, (1, 19), generator=torch.Generator().manual_seed(3))
    with Products() as products:
        output = module(tokens, use_cache=False).logits
    return output, products.count


def merged_groups(module: nn.Module) -> int:
    return sum(isinstance(each, Merged) for each in module.modules())


@pytest.mark.parametrize("name", TINY)
def test_each_group_is_one_product_and_the_logits_stay(name: str) -> None:
    module = tiny_model(name).module
    expected, plain = logits(reference_of(tiny_model(name, merge=False)))
    with eager(module):
        actual, fewer = logits(module)
        with merged.apart(module):
            apart, many = logits(module)
    saved = sum(len(each.sizes) - 1 for each in module.modules() if isinstance(each, Merged))
    assert merged_groups(module) == GROUPS[name]
    assert saved >= GROUPS[name]
    assert fewer == plain - saved
    assert many == plain
    assert torch.equal(apart, expected)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", TINY)
def test_tokens_are_those_of_the_model_as_written(name: str) -> None:
    assert Driver(tiny_model(name), prompts()).run() == Driver(tiny_model(name, merge=False), prompts()).run()


def test_the_state_is_still_the_models() -> None:
    """Same names, and the parts' weights are views into the merged one."""
    model, plain = tiny_model("qwen2").module, tiny_model("qwen2", merge=False).module
    assert model.state_dict().keys() == plain.state_dict().keys()
    for name, tensor in plain.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)
    for part in (each for each in model.modules() if isinstance(each, Part)):
        for own, whole in ((part.weight, part.merged.weight), (part.bias, part.merged.bias)):
            assert own is None or own.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_no_weight_is_in_memory_twice() -> None:
    """When a group is merged, the weights of all groups before it are gone."""
    module = tiny_model("llama", merge=False).module
    groups = merged.find(module)
    weights = [[weakref.ref(part.weight) for part in group.parts] for group in groups]
    for done in range(1, len(groups) + 1):
        merged.merge(groups[done - 1 : done])
        gc.collect()
        alive = [any(weight() is not None for weight in group) for group in weights]
        assert alive == [False] * done + [True] * (len(groups) - done)


# Parts that are called otherwise


class Projections(nn.Module):
    """Calls its parts with what the test says."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(6, size, bias=bias) for size in (8, 4, 4))

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part(x) for part, x in zip((self.q_proj, self.k_proj, self.v_proj), inputs, strict=True))


@pytest.fixture
def projections() -> Projections:
    torch.manual_seed(0)
    return Projections(bias=True).requires_grad_(False)


def as_merged(module: Projections) -> Projections:
    merged.merge(merged.find(module))
    assert isinstance(module.q_proj, Part)
    return module


def test_parts_with_other_inputs_compute_their_own(projections: Projections) -> None:
    first, second = torch.randn(2, 5, 6)
    cases = [(first, second, first), (first, first, second), (first, first.clone(), first), (first, first, first)]
    expected = [projections(*inputs) for inputs in cases]
    as_merged(projections)
    for inputs, outputs in zip(cases, expected, strict=True):
        for actual, own in zip(projections(*inputs), outputs, strict=True):
            torch.testing.assert_close(actual, own)


def test_parts_in_another_order_compute_their_own(projections: Projections) -> None:
    x = torch.randn(5, 6)
    expected = projections(x, x, x)
    as_merged(projections)
    names = ("v_proj", "k_proj", "q_proj")
    for name, own in zip(names, reversed(expected), strict=True):
        torch.testing.assert_close(projections.get_submodule(name)(x), own)


def test_nothing_is_kept(projections: Projections) -> None:
    """Neither after the last part, nor where a part is never called and the input has gone."""
    merging = as_merged(projections).q_proj.merged
    for called in (("q_proj", "k_proj", "v_proj"), ("q_proj", "k_proj"), ("q_proj",)):
        x = torch.randn(5, 6)
        outputs = [projections.get_submodule(name)(x) for name in called]
        kept = weakref.ref(outputs[0]._base)
        del outputs, x
        assert kept() is None
        assert merging._kept == (None, ())


def test_threads_that_share_a_model_do_not_get_each_others_products(
    projections: Projections, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread runs the same group while one of them keeps what it has computed."""
    mine, others = torch.randn(2, 5, 6)
    expected = projections(mine, mine, mine)
    as_merged(projections)
    is_compiling, left = torch.compiler.is_compiling, [1]

    def switch() -> bool:
        if left:
            left.pop()
            other = threading.Thread(target=projections.q_proj, args=(others,))
            other.start()
            other.join()
        return is_compiling()

    monkeypatch.setattr(torch.compiler, "is_compiling", switch)
    for actual, own in zip(projections(mine, mine, mine), expected, strict=True):
        torch.testing.assert_close(actual, own)
    assert not left


def watched(module: nn.Module, *inputs: torch.Tensor) -> int:
    with merged.watching(merged.find(module)) as alike:
        module(*inputs)
    return len(alike)


def test_only_what_is_called_with_one_tensor_is_merged(projections: Projections) -> None:
    x = torch.randn(5, 6)
    assert watched(projections, x, x, x) == 1
    assert watched(projections, x, x.clone(), x) == 0


def test_an_input_that_changes_between_the_calls_is_another(projections: Projections) -> None:
    def change(_: nn.Module, args: tuple[torch.Tensor]) -> None:
        args[0].add_(1)

    x = torch.randn(5, 6)
    assert watched(projections, x, x, x) == 1
    projections.k_proj.register_forward_pre_hook(change)
    assert watched(projections, x, x, x) == 0


@pytest.mark.parametrize("fault", ["width", "bias", "dtype", "shared", "subclass", "missing", "expert"])
def test_what_does_not_fit_is_left_alone(fault: str, projections: Projections) -> None:
    module: nn.Module = projections
    assert len(merged.find(module)) == 1
    if fault == "width":
        projections.k_proj = nn.Linear(7, 4)
    elif fault == "bias":
        projections.k_proj = nn.Linear(6, 4, bias=False)
    elif fault == "dtype":
        projections.k_proj.double()
    elif fault == "shared":
        projections.k_proj.weight = projections.v_proj.weight
    elif fault == "subclass":
        projections.k_proj.__class__ = nn.modules.linear.NonDynamicallyQuantizableLinear
    elif fault == "missing":
        del projections.k_proj
    else:
        module = nn.ModuleDict({"experts": nn.ModuleList([projections])})
    assert merged.find(module) == []


# Planted faults


@pytest.mark.parametrize("name", ["llama", "gpt-oss-sinks"])
def test_the_self_check_finds_a_share_that_is_off(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    share = Merged.share

    def off(self: Merged, index: int, x: torch.Tensor) -> torch.Tensor | None:
        output = share(self, index, x)
        return output if index == 0 or len(self.sizes) < 3 else output * 1.05

    monkeypatch.setattr(Merged, "share", off)
    with pytest.raises(UnsupportedModelError, match="differ from those of its own attention"):
        tiny_model(name)


def test_the_self_check_finds_a_product_of_another_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the product of the step before were still kept."""
    share = Merged.share
    monkeypatch.setattr(
        Merged,
        "share",
        lambda self, index, x: share(self, index, x) if index == 0 else share(self, index, x).roll(1, dims=-2),
    )
    with pytest.raises(UnsupportedModelError, match="differ from those of its own attention"):
        tiny_model("llama")
