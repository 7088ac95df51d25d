"""Compiled layers: one compilation per kind and size class, no graph break, the tokens of the layers as written.

The compiler's front end is the same whatever the backend, so most tests stop at its graphs ("eager"); "inductor" is
what users get.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_llm import GREEDY, PROMPTS, tiny_llm, tokens_of
from test_models import Driver, Sabotaged, prompts
from tiny_models import TINY, WINDOW, tiny_model
from torch import nn
from torch._dynamo.utils import counters
from transformers import LlamaConfig

from executors import attention, compiled
from executors.attention import PagedStep
from executors.bound import BoundLayers, Traced, _Inputs
from executors.compiled import CompileSettings, decoder_layers
from executors.errors import UnsupportedModelError
from executors.models import Model
from executors.stacks import stacks

torch.set_num_threads(1)

TRACED = CompileSettings(backend="eager")
SIZES = 2  # one token, and any other number
KINDS = dict.fromkeys(TINY, 1) | {"gemma2": 2, "gemma3": 2, "gpt-oss-sinks": 2}  # sliding and global layers


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


TWICE = dict.fromkeys(TINY, 0) | {"gemma3": 1}  # its rotary embedding has another code per kind of layer


def compilations() -> int:
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def told(said: list[str]) -> list[str]:
    """What a user is told of the compilation."""
    return [line for line in said if "compil" in line]


@pytest.mark.parametrize("name", TINY)
def test_one_compilation_serves_all_layers_of_a_kind_and_any_number_of_tokens(name: str) -> None:
    said: list[str] = []
    model = tiny_model(name, compile=TRACED, report=said.append)
    assert model.compiled is not None
    assert model.compiled.kinds == KINDS[name]
    assert model.compiled.is_bound
    assert told(said) == ["compiling the layers", str(model.compiled)]
    assert compilations() == SIZES * (KINDS[name] + model.compiled.num_beside + TWICE[name])
    expected = Driver(tiny_model(name), prompts())
    driver = Driver(model, prompts())
    assert driver.run() == expected.run()
    assert compilations() == SIZES * (KINDS[name] + model.compiled.num_beside + TWICE[name])
    for actual, wanted in zip(driver.logits, expected.logits, strict=True):
        torch.testing.assert_close(torch.stack(actual), torch.stack(wanted), rtol=0, atol=1e-4)


def test_the_next_model_of_the_same_code_is_compiled_alike() -> None:
    """The compiler remembers sizes by the name of the code: what it saw of another model is not this one's."""
    for number, name in enumerate(("llama", "llama", "qwen3", "llama"), start=1):
        model = tiny_model(name, compile=TRACED)
        assert model.compiled is not None
        assert model.compiled.is_bound
        assert compilations() == SIZES * number * (1 + model.compiled.num_beside)


@pytest.mark.parametrize("layers", [1, 5])
def test_more_layers_are_no_more_compilations(layers: int) -> None:
    config = TINY["llama"]()
    config.num_hidden_layers = layers
    model = Model.load(config, device="cpu", dtype=torch.float32, dummy_weights=True, compile=TRACED)
    assert model.compiled is not None
    assert model.compiled.num_beside == 2  # the final norm and the rotary embedding
    assert compilations() == SIZES * (1 + 2)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_generated_code_gives_the_same_tokens_at_every_depth(name: str) -> None:
    """In float32 those of the layers as written; and whatever the dtype, those of every depth."""
    wanted = tokens_of(tiny_llm(name).generate(PROMPTS, GREEDY))
    for depth in (1, 2, 3):
        said: list[str] = []
        llm = tiny_llm(name, depth=depth, compile=CompileSettings(), report=said.append)
        assert llm.model.compiled is not None, said
        assert tokens_of(llm.generate(PROMPTS, GREEDY)) == wanted
        assert llm.scheduler.preemptions > 0
    assert not counters["graph_break"]


def test_merged_products_stay_merged() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    for merge, products in ((True, 4), (False, 7)):
        torch._dynamo.reset()
        graphs.clear()
        model = tiny_model("llama", merge=merge, compile=dataclasses.replace(TRACED, backend=keep))
        assert model.compiled is not None
        layers = [graph for graph in graphs if any("attend" in str(node.target) for node in graph.graph.nodes)]
        assert len(layers) == SIZES
        linear = [node for node in layers[0].graph.nodes if "linear" in str(node.target)]
        assert len(linear) == products


def test_nothing_is_kept_after_a_compiled_layer() -> None:
    model = tiny_model("llama", compile=TRACED)
    Driver(model, prompts()).run()
    groups = [each for each in model.module.modules() if type(each).__name__ == "Merged"]
    assert len(groups) == 4
    assert all(each._kept == (None, ()) for each in groups)


@pytest.mark.parametrize("most", [1, 2])
def test_a_copy_of_a_compiled_model_has_layers_of_its_own(most: int) -> None:
    model = tiny_model("llama", compile=dataclasses.replace(TRACED, layers_per_graph=most))
    copied = copy.deepcopy(model.module)
    own, stack = copied.model.layers, vars(copied.model.layers[0])["forward"]
    assert stack.layers == tuple(own[:most])
    weight = own[0].self_attn.o_proj.weight
    assert weight is not model.module.model.layers[0].self_attn.o_proj.weight
    assert any(each is weight for each in stack.bound._several.fixed)
    compiled.restore(copied)
    assert not any("forward" in vars(layer) for layer in own)
    assert all("forward" in vars(layer) for layer in model.module.model.layers)


def test_layers_that_differ_are_kinds() -> None:
    """By a shape, a window, or a number that steers their code; a layer's ordinal is none."""
    model = tiny_model("llama")
    layers = decoder_layers(model.module, list(model._index))
    assert len({compiled._key(layer) for layer in layers}) == 1
    layers[1].self_attn.scaling *= 2
    assert len({compiled._key(layer) for layer in layers}) == 2


# Stacks of layers


@pytest.mark.parametrize(("layers", "most", "kinds"), [(4, 2, 1), (5, 2, 2), (3, 8, 1)])
def test_layers_compiled_as_one_give_the_same_tokens(layers: int, most: int, kinds: int) -> None:
    config = TINY["llama"]()
    config.num_hidden_layers = layers
    options = {"device": "cpu", "dtype": torch.float32, "dummy_weights": True}
    model = Model.load(config, compile=dataclasses.replace(TRACED, layers_per_graph=most), **options)
    assert model.compiled is not None
    assert model.compiled.is_bound
    assert model.compiled.kinds == kinds
    assert compilations() == SIZES * (kinds + model.compiled.num_beside)
    assert Driver(model, prompts()).run() == Driver(Model.load(config, **options), prompts()).run()
    compiled.restore(model.module)
    assert Driver(model, prompts()).run() == Driver(Model.load(config, **options), prompts()).run()


class Chain(nn.Module):
    """Calls its layers one after the other, as the test says."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Named() for _ in range(4))
        self.fault = fault

    def forward(self) -> None:
        x, mask = torch.ones(3), torch.ones(3)
        for index, layer in enumerate(self.layers):
            odd = index == 2
            given = mask.clone() if odd and self.fault == "argument" else mask
            start = x.clone() if odd and self.fault == "input" else x
            x = layer(x=start, mask=given) if odd and self.fault == "name" else layer(start, mask=given)


class Named(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + mask


@pytest.mark.parametrize(
    ("fault", "sizes"),
    [("", [4]), ("argument", [2, 1, 1]), ("input", [2, 2]), ("name", [2, 1, 1]), ("key", [2, 2]), ("most", [3, 1])],
)
def test_only_layers_that_are_called_alike_are_stacked(fault: str, sizes: list[int]) -> None:
    chain = Chain(fault)
    keys = [0, 0, 1, 1] if fault == "key" else [0] * 4
    found = stacks(list(chain.layers), keys, chain, 3 if fault == "most" else 8)
    assert [len(stack) for stack in found] == sizes
    assert [layer for stack in found for layer in stack] == list(chain.layers)
    assert all(not layer._forward_hooks for layer in chain.layers)


# Bound layers


def test_bound_layers_give_the_logits_of_checked_ones_bit_by_bit() -> None:
    model = tiny_model("gemma2", compile=TRACED)
    assert model.compiled is not None
    assert model.compiled.is_bound
    bound = Driver(model, prompts())
    tokens = bound.run()
    with compiled.checked(model.module):
        checked = Driver(model, prompts())
        assert checked.run() == tokens
    for actual, wanted in zip(bound.logits, checked.logits, strict=True):
        assert torch.equal(torch.stack(actual), torch.stack(wanted))


@pytest.mark.parametrize("fault", ["weights", "values", "arguments"])
def test_layers_that_were_bound_wrong_are_not_used(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs_of = _Inputs.of.__func__

    def wrong(cls: type[_Inputs], layers: tuple[nn.Module, ...], traced: Traced) -> _Inputs:
        inputs = inputs_of(cls, layers, traced)
        if fault == "weights":  # those of whichever layer came first
            return first.setdefault(len(traced.sizes), inputs)
        if fault == "values":
            return inputs._replace(fixed=[value * 2 if torch.is_tensor(value) else value for value in inputs.fixed])
        return inputs._replace(of_step=inputs.of_step[1:])

    first: dict[int, _Inputs] = {}
    monkeypatch.setattr(_Inputs, "of", classmethod(wrong))
    model = tiny_model("llama", compile=TRACED)
    assert model.compiled is not None
    assert not model.compiled.is_bound
    assert Driver(model, prompts()).run() == Driver(tiny_model("llama"), prompts()).run()


def test_a_layer_that_is_compiled_once_is_not_bound() -> None:
    traced = Traced(("L['args'][0]",), nn.Linear(2, 2))
    with pytest.raises(LookupError):
        BoundLayers((nn.Linear(2, 2),), traced, traced)


# Faults


def test_a_layer_that_cannot_be_compiled_runs_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    forward = LlamaMLP.forward

    def reads(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x) if float(x.sum()) > 0 else forward(self, x) * 1.0

    monkeypatch.setattr(LlamaMLP, "forward", reads)
    said: list[str] = []
    model = tiny_model("llama", compile=TRACED, report=said.append)
    assert model.compiled is None
    _, reason = told(said)
    assert reason.startswith("the layers run uncompiled: ")
    assert "\n" not in reason
    assert Driver(model, prompts()).run() == Driver(tiny_model("llama"), prompts()).run()


def test_wrong_code_is_found_and_not_used() -> None:
    def wrong(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        for node in graph.graph.nodes:
            if node.op == "call_function" and node.target is torch.nn.functional.silu:
                node.target = torch.nn.functional.relu
        graph.recompile()
        return graph.forward

    said: list[str] = []
    model = tiny_model("llama", compile=dataclasses.replace(TRACED, backend=wrong), report=said.append)
    assert model.compiled is None
    assert "differ from those of its own attention" in told(said)[1]
    assert Driver(model, prompts()).run() == Driver(tiny_model("llama"), prompts()).run()


def test_a_model_that_is_wrong_is_refused_compiled_or_not() -> None:
    model = tiny_model("gemma2", compile=TRACED)
    wrong = dataclasses.replace(model, backend=Sabotaged(lambda rule: rule._replace(softcap=None)))
    with pytest.raises(UnsupportedModelError, match="differ from those of its own attention"):
        wrong.self_check()


def test_layers_in_another_turn_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled layer does not know which it is: its keys must not end up in another layer's cache."""
    attend = PagedStep.attend

    def stuck(self: PagedStep, layer: nn.Module | None, *rest: Any) -> torch.Tensor:
        self.turn = 0
        return attend(self, layer, *rest)

    model = tiny_model("llama", compile=TRACED)
    model.self_check()
    monkeypatch.setattr(attention.PagedStep, "attend", stuck)
    with pytest.raises(UnsupportedModelError, match="differ from those of its own attention"):
        model.self_check()


def test_a_window_that_was_compiled_in_does_not_outlive_it() -> None:
    """The self-check shortens windows: the code compiled for it is not what runs afterwards."""
    config = TINY["mistral-window"]()
    config.sliding_window = 30
    options = {"device": "cpu", "dtype": torch.float32, "dummy_weights": True}
    model = Model.load(config, compile=TRACED, **options)
    assert model.compiled is not None
    assert model.sliding_window == 30
    assert Driver(model, prompts()).run() == Driver(Model.load(config, **options), prompts()).run()
    config.sliding_window = WINDOW
    assert Driver(model, prompts()).run() != Driver(Model.load(config, **options), prompts()).run()


def test_a_model_without_a_list_of_layers_runs_as_it_was_written() -> None:
    model = tiny_model("llama")
    with pytest.raises(UnsupportedModelError, match="no list"):
        decoder_layers(model.module, list(model._index)[:1])


def test_the_default_is_uncompiled_on_a_cpu() -> None:
    said: list[str] = []
    assert tiny_llm(report=said.append).model.compiled is None
    assert not any("compil" in line for line in said)
    config = LlamaConfig(**{**TINY["llama"]().to_dict(), "num_hidden_layers": 1})
    assert tiny_llm(config=config, compile=TRACED, report=said.append).model.compiled is not None
    assert any(line.startswith("compiled 1 kind of layers in ") for line in said)
