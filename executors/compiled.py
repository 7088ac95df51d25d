"""Decoder layers under torch.compile: one compilation for all layers of a kind, for any number of tokens.

The model's code stays as it is. A layer's `forward` is replaced, on the instance, by a compiled function of the layer
and its arguments, in which the layer's weights are inputs; so layers that differ in their weights alone share it. A
kind is what tells layers apart beyond that: shapes, and the numbers in them that steer their code. Attention stays an
opaque operation inside. A step of one token is compiled once more, since the compiler makes that size a constant.

Once all is compiled, layers are bound (`executors.bound`), if their results stay what they are, bit by bit.

What stands beside the layers, the final norm and the rotary embedding, is compiled the same way, but not bound: it runs
once per step, and written out it is two dozen kernels. Where it cannot be compiled, it stays as it is.
"""

from __future__ import annotations

import copy
import itertools
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from executors import gated
from executors.bound import BoundLayers, Traced, recording
from executors.errors import UnsupportedModelError
from executors.kv_cache import KvCache
from executors.stacks import stacks
from executors.step_view import Chunk, StepView, view_of

# Tokens of the steps that make the compiler compile. Kernels are tuned for about the first size, which must be no size
# in any model: the compiler takes equal sizes for the same size.
WARM_UP = (31, 1)
WARM_UP_BLOCK_SIZE = 16
ORDINALS = ("layer_idx", "layer_number")  # of a layer among the others: steer its cache, which is not the model's here

_numbers_of_kinds = itertools.count()

Forward = Callable[[StepView, KvCache], torch.Tensor]
AllocateKv = Callable[[int, int], KvCache]


@dataclass(frozen=True, kw_only=True)
class CompileSettings:
    """How layers are compiled.

    backend             of torch.compile
    max_autotune_gemm   matrix products in Triton where they beat the library's
    coordinate_descent  search for the parameters of generated kernels, step by step
    combo_kernels       independent operations share a kernel
    layers_per_graph    so many consecutive layers are compiled as one, where the model calls them alike
    """

    backend: str | Callable[..., Any] = "inductor"
    max_autotune_gemm: bool = False
    coordinate_descent: bool = False
    combo_kernels: bool = True
    layers_per_graph: int = 1

    def compile_graph(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The backend's code. Inductor's is cached between runs, in TORCHINDUCTOR_CACHE_DIR or the temporary folder."""
        gated.fuse(graph)
        if self.backend != "inductor":
            return torch._dynamo.lookup_backend(self.backend)(graph, inputs)
        from torch._inductor.compile_fx import compile_fx  # slow to import, and only used here

        options = {
            "fx_graph_cache": True,
            "max_autotune_gemm": self.max_autotune_gemm,
            "coordinate_descent_tuning": self.coordinate_descent,
            "combo_kernels": self.combo_kernels,
        }
        return compile_fx(graph, inputs, config_patches=options)


class Compiled(NamedTuple):
    """How many kinds of layers there were, how long it took, and whether calls go past the compiler's front end.

    num_beside  modules beside the layers that are compiled too
    """

    kinds: int
    seconds: float
    is_bound: bool
    num_beside: int

    def __str__(self) -> str:
        return f"compiled {self.kinds} kind{'s' if self.kinds > 1 else ''} of layers in {self.seconds:.1f} s"


class CompiledStack:
    """The `forward` of the first layer of a stack, which runs all: checked by the compiler's front end, or bound.

    It does not keep the layers, who keep it: then only the collector would give up the weights of a model that is gone.
    """

    def __init__(self, layers: Sequence[nn.Module], kind: _Kind) -> None:
        self._layers = [weakref.ref(layer) for layer in layers]
        self.kind = kind
        self.bound: BoundLayers | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledStack:
        """Over the copies of its layers, as a copied model has it."""
        copied = CompiledStack([copy.deepcopy(layer, memo) for layer in self.layers], self.kind)
        copied.bound = copy.deepcopy(self.bound, memo)
        return copied

    @property
    def layers(self) -> tuple[nn.Module, ...]:
        return tuple(layer for ref in self._layers if (layer := ref()) is not None)

    @property
    def layer(self) -> nn.Module:
        return self.layers[0]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.bound is None:
            return self.kind.checked(self.layers, args, kwargs)
        return self.bound(args, kwargs)

    def bind(self) -> None:
        """Raises LookupError where the compiler made other code than for the sizes in WARM_UP."""
        if len(self.kind.traced) != len(WARM_UP):
            raise LookupError("the compiler made other code than for one token and for more")
        self.bound = BoundLayers(self.layers, *self.kind.traced)

    def install(self) -> None:
        first, *followers = self.layers
        first.forward = self
        for follower in followers:
            follower.forward = _computed


def _computed(hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """The `forward` of a layer that ran with the first of its stack."""
    return hidden_states


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
    kv = allocate_kv(max(WARM_UP), WARM_UP_BLOCK_SIZE)
    layers = decoder_layers(module, attention)
    keys = {layer: _key(layer) for layer in layers}
    kinds: dict[object, _Kind] = {}
    found = []
    run = partial(_warm_up_logits, forward, kv)
    for stack in stacks(layers, list(keys.values()), run, settings.layers_per_graph):
        key = (keys[stack[0]], len(stack))
        if key not in kinds:
            kinds[key] = _Kind.of(stack[0], settings)
        found.append(CompiledStack(stack, kinds[key]))
    for one in found:
        one.install()
    # A number in a layer is a constant of its kind: as an input, which "dynamic" makes it, it costs a tensor per call.
    with warnings.catch_warnings(), torch._dynamo.config.patch(specialize_float=True):
        warnings.simplefilter("ignore")  # the compiler's are about its own code
        checked = run()
        beside = [CompiledStack([part], _Kind.of(part, settings)) for part in _beside(module, layers[0])]
        if beside:
            checked = _try(beside, run) or checked
    is_bound = _bind(found, run, checked)
    num_beside = sum("forward" in vars(part.layer) for part in beside)
    return Compiled(len(kinds), time.perf_counter() - started, is_bound, num_beside)


def _beside(module: nn.Module, first: nn.Module) -> list[nn.Module]:
    """What stands beside the list of the layers and computes something."""
    for parent in module.modules():
        children = list(parent.children())
        if any(isinstance(child, nn.ModuleList) and len(child) and child[0] is first for child in children):
            idle = nn.ModuleList | nn.Embedding | nn.Dropout | nn.Identity
            return [child for child in children if not isinstance(child, idle)]
    return []


def _try(beside: Sequence[CompiledStack], run: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor] | None:
    """Compiles the modules, and takes all of them back where that fails. Answers the logits."""
    for part in beside:
        part.install()
    try:
        return run()
    except Exception:  # the compiler's own
        for part in beside:
            del part.layer.forward
        return None


def _warm_up_logits(forward: Forward, kv: KvCache) -> list[torch.Tensor]:
    """Of each step in WARM_UP: sequences of one token, in a block each."""
    steps = [[Chunk([i + 1], 0, [1 + i]) for i in range(count)] for count in WARM_UP]
    device = kv.keys[0].device
    return [forward(view_of(chunks, block_size=WARM_UP_BLOCK_SIZE, device=device), kv) for chunks in steps]


def _bind(found: Sequence[CompiledStack], run: Callable[[], list[torch.Tensor]], checked: list[torch.Tensor]) -> bool:
    """Binds all layers if that leaves every bit of the logits as it was; returns whether it does."""
    try:
        for one in found:
            one.bind()
        equal = all(map(torch.equal, run(), checked))
    except Exception:  # a layer that gives more than one tensor back, or takes one that isn't an argument
        equal = False
    if not equal:
        for one in found:
            one.bound = None
    return equal


def restore(module: nn.Module) -> None:
    """Every layer runs as it was written again."""
    for one in _compiled(module):
        for layer in one.layers:
            del layer.forward


@contextmanager
def suspended(module: nn.Module) -> Iterator[None]:
    """Every layer runs as it was written meanwhile."""
    found = _compiled(module)
    restore(module)
    try:
        yield
    finally:
        for one in found:
            one.install()


@contextmanager
def checked(module: nn.Module) -> Iterator[None]:
    """No layer is bound meanwhile: what steers its code may change, and is compiled again."""
    found = {one: one.bound for one in _compiled(module)}
    for one in found:
        one.bound = None
    try:
        yield
    finally:
        for one, bound in found.items():
            one.bound = bound


def _compiled(module: nn.Module) -> list[CompiledStack]:
    found = (vars(layer).get("forward") for layer in module.modules())
    return [forward for forward in found if isinstance(forward, CompiledStack)]


class _Kind(NamedTuple):
    """What stacks of a kind share: the compiled function, and what was made for it so far."""

    checked: Callable[..., Any]
    traced: list[Traced]

    @classmethod
    def of(cls, layer: nn.Module, settings: CompileSettings) -> _Kind:
        forward = type(layer).forward

        def run(layers: tuple[nn.Module, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            for layer in layers:
                args = (forward(layer, *args, **kwargs), *args[1:])
            return args[0]

        # The compiler keeps what it made by code object, and what sizes it saw by name: each kind has its own.
        code = run.__code__.replace(co_name=f"{type(layer).__name__}_{next(_numbers_of_kinds)}")
        own = FunctionType(code, run.__globals__, code.co_name, None, run.__closure__)
        traced: list[Traced] = []
        backend = recording(settings.compile_graph, traced)
        return cls(torch.compile(own, backend=backend, fullgraph=True, dynamic=True), traced)


def _key(layer: nn.Module) -> object:
    """Equal for layers of a kind."""
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
