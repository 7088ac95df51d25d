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

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from executors.bound import BoundLayer, Traced, recording
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

    backend: str | Callable[..., Any] = "inductor"
    max_autotune_gemm: bool = False
    coordinate_descent: bool = False

    def compile_graph(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """The backend's code. Inductor's is cached between runs, in TORCHINDUCTOR_CACHE_DIR or the temporary folder."""
        if self.backend != "inductor":
            return torch._dynamo.lookup_backend(self.backend)(graph, inputs)
        from torch._inductor.compile_fx import compile_fx  # slow to import, and only used here

        options = {
            "fx_graph_cache": True,
            "max_autotune_gemm": self.max_autotune_gemm,
            "coordinate_descent_tuning": self.coordinate_descent,
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


class CompiledLayer:
    """A layer's `forward`: the code of its kind, checked by the compiler's front end or bound."""

    def __init__(self, layer: nn.Module, kind: _Kind) -> None:
        self.layer = layer
        self.kind = kind
        self.bound: BoundLayer | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.bound is None:
            return self.kind.checked(self.layer, *args, **kwargs)
        return self.bound(*args, **kwargs)

    def bind(self) -> None:
        """Raises LookupError where the compiler made other code than for the sizes in WARM_UP."""
        if len(self.kind.traced) != len(WARM_UP):
            raise LookupError("the compiler made other code than for one token and for more")
        self.bound = BoundLayer(self.layer, self.kind.parameters, *self.kind.traced)


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
    kinds: dict[object, _Kind] = {}
    layers = []
    for layer in decoder_layers(module, attention):
        key = _key(layer)
        if key not in kinds:
            kinds[key] = _Kind.of(layer, settings)
        layers.append(CompiledLayer(layer, kinds[key]))
        layer.forward = layers[-1]
    kv = allocate_kv(max(WARM_UP), WARM_UP_BLOCK_SIZE)
    # A number in a layer is a constant of its kind: as an input, which "dynamic" makes it, it costs a tensor per call.
    with warnings.catch_warnings(), torch._dynamo.config.patch(specialize_float=True):
        warnings.simplefilter("ignore")  # the compiler's are about its own code
        checked = _warm_up_logits(forward, kv)
        beside = [CompiledLayer(part, _Kind.of(part, settings)) for part in _beside(module, layers)]
        if beside:
            checked = _try(beside, lambda: _warm_up_logits(forward, kv)) or checked
    is_bound = _bind(layers, lambda: _warm_up_logits(forward, kv), checked)
    num_beside = sum("forward" in vars(part.layer) for part in beside)
    return Compiled(len(kinds), time.perf_counter() - started, is_bound, num_beside)


def _beside(module: nn.Module, layers: Sequence[CompiledLayer]) -> list[nn.Module]:
    """What stands beside the list of the layers and computes something."""
    first = layers[0].layer
    for parent in module.modules():
        children = list(parent.children())
        if any(isinstance(child, nn.ModuleList) and len(child) and child[0] is first for child in children):
            idle = nn.ModuleList | nn.Embedding | nn.Dropout | nn.Identity
            return [child for child in children if not isinstance(child, idle)]
    return []


def _try(beside: Sequence[CompiledLayer], logits: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor] | None:
    """Compiles the modules, and takes all of them back where that fails. Answers the logits."""
    for part in beside:
        part.layer.forward = part
    try:
        return logits()
    except Exception:  # the compiler's own
        for part in beside:
            del part.layer.forward
        return None


def _warm_up_logits(forward: Forward, kv: KvCache) -> list[torch.Tensor]:
    """Of each step in WARM_UP: sequences of one token, in a block each."""
    steps = [[Chunk([i + 1], 0, [1 + i]) for i in range(count)] for count in WARM_UP]
    device = kv.keys[0].device
    return [forward(view_of(chunks, block_size=WARM_UP_BLOCK_SIZE, device=device), kv) for chunks in steps]


def _bind(
    layers: Sequence[CompiledLayer], logits: Callable[[], list[torch.Tensor]], checked: list[torch.Tensor]
) -> bool:
    """Binds all layers if that leaves every bit of the logits as it was; returns whether it does."""
    try:
        for layer in layers:
            layer.bind()
        equal = all(map(torch.equal, logits(), checked))
    except Exception:  # a layer that gives more than one tensor back, or takes one that isn't an argument
        equal = False
    if not equal:
        for layer in layers:
            layer.bound = None
    return equal


def restore(module: nn.Module) -> None:
    """Every layer runs as it was written again."""
    for compiled in _compiled(module):
        del compiled.layer.forward


@contextmanager
def suspended(module: nn.Module) -> Iterator[None]:
    """Every layer runs as it was written meanwhile."""
    layers = _compiled(module)
    restore(module)
    try:
        yield
    finally:
        for compiled in layers:
            compiled.layer.forward = compiled


@contextmanager
def checked(module: nn.Module) -> Iterator[None]:
    """No layer is bound meanwhile: what steers its code may change, and is compiled again."""
    layers = {compiled: compiled.bound for compiled in _compiled(module)}
    for compiled in layers:
        compiled.bound = None
    try:
        yield
    finally:
        for compiled, bound in layers.items():
            compiled.bound = bound


def _compiled(module: nn.Module) -> list[CompiledLayer]:
    found = (vars(layer).get("forward") for layer in module.modules())
    return [forward for forward in found if isinstance(forward, CompiledLayer)]


class _Kind(NamedTuple):
    """What layers of a kind share: the compiled function, the names of its arguments, and what was made so far."""

    checked: Callable[..., Any]
    parameters: tuple[str, ...]
    traced: list[Traced]

    @classmethod
    def of(cls, layer: nn.Module, settings: CompileSettings) -> _Kind:
        """The compiler keeps what it made by code object: each kind has a copy, to find its own at once."""
        forward = type(layer).forward
        code = forward.__code__.replace()
        copy = FunctionType(code, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__)
        copy.__kwdefaults__ = forward.__kwdefaults__
        traced: list[Traced] = []
        backend = recording(settings.compile_graph, traced)
        checked = torch.compile(copy, backend=backend, fullgraph=True, dynamic=True)
        return cls(checked, code.co_varnames[1 : code.co_argcount], traced)


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
