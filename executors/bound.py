"""Compiled layers called without the compiler's front end.

Before each call, the front end checks everything that it assumed about a layer, some 300 things, and unpacks the layer
again; over all layers of a step that takes the host as long as launching the kernels. None of it changes while a model
generates: a layer's weights are looked up once, and what is left of a call is the step's own tensors. Whoever binds has
to see that the results are those of the checked call, and must not change the layer afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn

OF_LAYERS = "L['layers']"
Call = Callable[..., Sequence[torch.Tensor]]


class Traced(NamedTuple):
    """What the front end made of a layer: where each input comes from, as expressions over `L`, and the code."""

    sources: tuple[str, ...]
    call: Call

    @property
    def sizes(self) -> set[str]:
        """Those of the inputs that are sizes, which the code may be called with any number for."""
        return {source for source in self.sources if ".size()" in source}


def recording(compile_graph: Callable[..., Call], into: list[Traced]) -> Callable[..., Call]:
    """A backend for torch.compile that compiles with `compile_graph` and keeps what it made."""

    def backend(graph: torch.fx.GraphModule, inputs: Sequence[object]) -> Call:
        sources = [_name(node) for node in graph.graph.nodes if node.op == "placeholder"]
        call = compile_graph(graph, inputs)
        into.append(Traced(tuple(sources), call))
        return call

    return backend


def _name(node: torch.fx.Node) -> str:
    """Empty, which is no expression, where the front end does not say."""
    argument = node.meta.get("grapharg")
    name = getattr(getattr(argument, "source", None), "name", "")
    return name() if callable(name) else name  # a method in older versions of torch


class BoundLayers:
    """Layers in a row over code for several tokens, and code for one. Raises LookupError where it is for other cases.

    The code is that of a function of `layers`, `args` and `kwargs`.
    """

    def __init__(self, layers: tuple[nn.Module, ...], several: Traced, single: Traced) -> None:
        sizes = sorted(several.sizes - single.sizes)  # all of them are the number of tokens
        if not sizes:
            raise LookupError("the compiler made other code than for one token and for more")
        self._several, self._single = _Inputs.of(layers, several), _Inputs.of(layers, single)
        self._size = compile(sizes[0], "<size>", "eval")

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        scope = {"L": {"args": args, "kwargs": kwargs}}
        inputs = self._single if eval(self._size, scope) == 1 else self._several
        (output,) = inputs.call(*inputs.with_step(scope))
        return output


class _Inputs(NamedTuple):
    """The inputs of the code in order: the layers' are there, the step's are looked up by expressions."""

    fixed: list[object]
    of_step: list[tuple[int, CodeType]]
    call: Call

    @classmethod
    def of(cls, layers: tuple[nn.Module, ...], traced: Traced) -> _Inputs:
        scope = {"L": {"layers": layers}}
        is_fixed = [source.startswith(OF_LAYERS) for source in traced.sources]
        return cls(
            [eval(source, scope) if fixed else None for source, fixed in zip(traced.sources, is_fixed, strict=True)],
            [
                (place, compile(source, "<input>", "eval"))
                for place, (source, fixed) in enumerate(zip(traced.sources, is_fixed, strict=True))
                if not fixed
            ],
            traced.call,
        )

    def with_step(self, scope: dict[str, Any]) -> list[object]:
        inputs = self.fixed.copy()
        for place, source in self.of_step:
            inputs[place] = eval(source, scope)
        return inputs
