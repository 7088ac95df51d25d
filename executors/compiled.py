"""Decoder layers under torch.compile: one compilation for all layers of a kind, for any number of tokens.

The model's code stays as it is. A layer's `forward` is replaced, on the instance, by a compiled function of the layer
and its arguments, in which the layer's weights are inputs; so layers that differ in their weights alone share it. A
kind is what tells layers apart beyond that: shapes, and the numbers in them that steer their code. Attention stays an
opaque operation inside. A step of one token is compiled once more, since the compiler makes that size a constant.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from executors.errors import UnsupportedModelError
from executors.kv_cache import KvCache
from executors.step_view import Chunk, StepView, view_of

# Tokens of the steps that make the compiler compile. Kernels are tuned for about the first size, which must be no size
# in any model: the compiler takes equal sizes for the same size.
WARM_UP = (31, 1)
WARM_UP_BLOCK_SIZE = 16
ORDINALS = ("layer_idx", "layer_number")  # of a layer among the others: steer its cache, which is not the model's here

Forward = Callable[[StepView, KvCache], torch.Tensor]
AllocateKv = Callable[[int, int], KvCache]


@dataclass(frozen=True, kw_only=True)
class CompileSettings:
    """How layers are compiled.

    backend             of torch.compile
    max_autotune_gemm   matrix products in Triton where they beat the library's
    coordinate_descent  search for the parameters of generated kernels, step by step
    """

    backend: str = "inductor"
    max_autotune_gemm: bool = False
    coordinate_descent: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Inductor's. Generated code is cached between runs, in TORCHINDUCTOR_CACHE_DIR or the temporary folder."""
        if self.backend != "inductor":
            return {}
        return {
            "fx_graph_cache": True,
            "max_autotune_gemm": self.max_autotune_gemm,
            "coordinate_descent_tuning": self.coordinate_descent,
        }


class Compiled(NamedTuple):
    """How many kinds of layers there were, and how long it took."""

    kinds: int
    seconds: float

    def __str__(self) -> str:
        return f"compiled {self.kinds} kind{'s' if self.kinds > 1 else ''} of layers in {self.seconds:.1f} s"


def decoder_layers(module: nn.Module, attention: Sequence[nn.Module]) -> list[nn.Module]:
    """The model's layers, each with one of the modules that attend inside. Raises UnsupportedModelError."""
    wanted = {id(each) for each in attention}
    for stack in module.modules():
        if not isinstance(stack, nn.ModuleList) or len(stack) != len(attention):
            continue
        if all(sum(id(inner) in wanted for inner in layer.modules()) == 1 for layer in stack):
            return list(stack)
    raise UnsupportedModelError("its layers are no list of which each attends once")


@torch.no_grad()
def compile_layers(
    module: nn.Module,
    attention: Sequence[nn.Module],
    settings: CompileSettings,
    forward: Forward,
    allocate_kv: AllocateKv,
) -> Compiled:
    """Compiles the layers of `module`, whose attention modules these are, and runs `forward` until all is compiled.

    Raises what the compiler raises; `restore` undoes it.
    """
    started = time.perf_counter()
    by_kind: dict[object, Callable[..., Any]] = {}
    for layer in decoder_layers(module, attention):
        kind = _kind(layer)
        if kind not in by_kind:
            by_kind[kind] = _compiled(type(layer).forward, settings)
        layer.forward = _Shared(by_kind[kind], layer)
    kv = allocate_kv(max(WARM_UP), WARM_UP_BLOCK_SIZE)
    # A number in a layer is a constant of its kind: as an input, which "dynamic" makes it, it costs a tensor per call.
    with warnings.catch_warnings(), torch._dynamo.config.patch(specialize_float=True):
        warnings.simplefilter("ignore")  # the compiler's are about its own code
        for count in WARM_UP:
            chunks = [Chunk([0], 0, [1 + i]) for i in range(count)]
            forward(view_of(chunks, block_size=WARM_UP_BLOCK_SIZE, device=kv.keys[0].device), kv)
    return Compiled(len(by_kind), time.perf_counter() - started)


def restore(module: nn.Module) -> None:
    """Every layer runs as it was written again."""
    for layer in _replaced(module):
        del layer.forward


@contextmanager
def suspended(module: nn.Module) -> Iterator[None]:
    """Every layer runs as it was written meanwhile."""
    layers = {layer: layer.forward for layer in _replaced(module)}
    restore(module)
    try:
        yield
    finally:
        for layer, forward in layers.items():
            layer.forward = forward


def _replaced(module: nn.Module) -> list[nn.Module]:
    return [layer for layer in module.modules() if isinstance(vars(layer).get("forward"), _Shared)]


class _Shared(partial):  # type: ignore[type-arg]  # a type of its own tells it from other replacements
    """The compiled function of a layer's kind, with the layer."""


def _compiled(forward: Callable[..., Any], settings: CompileSettings) -> Callable[..., Any]:
    """The compiler keeps what it compiled by code object: each kind has a copy, to find its own at once."""
    code = forward.__code__.replace()
    copy = FunctionType(code, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    return torch.compile(copy, backend=settings.backend, fullgraph=True, dynamic=True, options=settings.options or None)


def _kind(layer: nn.Module) -> object:
    """Equal for layers that the same compiled code serves."""
    return tuple(
        (name, type(part), _shapes(part._parameters), _shapes(part._buffers), _numbers(part))
        for name, part in layer.named_modules()
    )


def _shapes(tensors: Mapping[str, torch.Tensor | None]) -> tuple[object, ...]:
    return tuple((name, None if tensor is None else (tensor.shape, tensor.dtype)) for name, tensor in tensors.items())


def _numbers(part: nn.Module) -> tuple[object, ...]:
    return tuple(
        (name, value)
        for name, value in vars(part).items()
        if isinstance(value, bool | int | float | str | None) and name not in ORDINALS
    )
