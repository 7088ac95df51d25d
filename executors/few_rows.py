"""Products of few rows, as decode steps have them: which go to kernels of our own, and how a model's get there.

The model's code stays as it is. Its linear layers, merged ones too, call an operation that looks at the number of rows
when it is called: a product of few rows takes as long as reading its weight, and a library's kernels are made for more.
All others, and those of few rows in which the library was measured to be as fast, are the library's
(`executors.library_products`). So are all inside `alike`, where a row's numbers must not depend on how many there are.

What was measured is one H200, so devices that are no Hopper keep the library: newer ones have other tensor cores, and
some of them a fraction of its shared memory, which the widest tiles do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from executors import library_products
from executors.merged import Merged

MAX_ROWS = 32
DTYPES = (torch.bfloat16, torch.float16)
HOPPER = (9, 0)
PLAIN = (Tensor, nn.Parameter)  # no tensors that say themselves what a product with them is, as quantised ones do


class Tiling(NamedTuple):
    """How `triton_product` computes several rows.

    columns, depth  of a tile of the weight
    splits          parts of the sum; the depth is a multiple of splits x depth
    warps, stages   of a program: threads / 32, and tiles on their way at once
    """

    columns: int
    depth: int
    splits: int
    warps: int
    stages: int


class Scratch(NamedTuple):
    """What the programs of one product share; products on one stream may use it one after the other.

    partial  float32, at least splits x columns x rows, each in whole tiles
    arrived  int32, at least one per tile; zeros, which each product leaves behind
    """

    partial: Tensor
    arrived: Tensor


NARROW, NARROW_ROWS = Tiling(columns=32, depth=128, splits=1, warps=2, stages=5), 16
WIDE = Tiling(columns=64, depth=128, splits=1, warps=4, stages=4)


@cache
def tiling_of(rows: int, columns: int, depth: int, multiprocessors: int) -> Tiling | None:
    """For a product of several rows with a weight [columns, depth]; None where it is the library's.

    Up to 16 rows, narrow tiles in as many parts as give every multiprocessor a program. Beyond, reading the rows again
    for every tile begins to tell: the library is slower only where wide tiles fill the device once, or many times.
    """
    if rows > MAX_ROWS:
        return None
    if rows <= NARROW_ROWS:
        splits = 1
        while splits * _tiles(columns, NARROW) < multiprocessors and depth % (2 * splits * NARROW.depth) == 0:
            splits *= 2
        return NARROW._replace(splits=splits) if depth % NARROW.depth == 0 else None
    waves = _tiles(columns, WIDE) / multiprocessors
    if 0.7 <= waves <= 1 and depth % (2 * WIDE.depth) == 0:
        return WIDE._replace(depth=2 * WIDE.depth)
    return WIDE if waves >= 8 and depth % WIDE.depth == 0 else None


def _tiles(columns: int, tiling: Tiling) -> int:
    return -(-columns // tiling.columns)


# ---- the operation ---------------------------------------------------------------------------------------------------


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    rows = x.shape[:-1].numel()
    if not (rows and weight.is_cuda and is_readable(x, weight, bias)):
        return functional.linear(x, weight, bias)
    columns, depth = weight.shape
    flat = x.reshape(rows, depth).contiguous()
    if is_alike():
        output = library_products.product_alike(flat, weight) if bias is None else None
    else:
        output = _own_product(flat, weight, bias)
    if output is None:
        output = library_products.product(flat, weight) if bias is None else functional.linear(flat, weight, bias)
    return output.view(*x.shape[:-1], columns)


def _own_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """None where it is the library's."""
    if not is_own(len(x), weight):
        return None
    from executors import triton_product  # needs Triton

    tiling = tiling_of(len(x), *weight.shape, multiprocessors(weight.device)) if len(x) > 1 else None
    if tiling is None:
        return triton_product.product_of_row(x, weight, bias)
    scratch = _scratch(weight.device, torch.cuda.current_stream(weight.device).cuda_stream)
    return triton_product.product_of_rows(x, weight, bias, tiling, scratch)


@contextmanager
def alike() -> Iterator[None]:
    """Meanwhile, in this thread, a row's product has the same bits whatever the number of rows, where it can be had."""
    before = _is_alike.set(True)
    try:
        yield
    finally:
        _is_alike.reset(before)


def is_alike() -> bool:
    return _is_alike.get()


_is_alike = ContextVar("alike", default=False)


def is_own(rows: int, weight: Tensor) -> bool:
    """Whether a product of so many rows has a kernel of our own."""
    return rows == 1 or tiling_of(rows, *weight.shape, multiprocessors(weight.device)) is not None


def is_readable(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernels can read them, who look where a row begins and not at strides."""
    return x.dtype == weight.dtype and weight.is_contiguous() and (bias is None or bias.is_contiguous())


def _linear_fake(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _scratch(device: torch.device, stream: int) -> Scratch:
    """One per stream, for good: graphs keep its address. Raises RuntimeError in a capture before anything ran there."""
    key = (device, stream)
    if key not in _scratches:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("a product's room has to be there before the product is captured: run it once before")
        tiles = 2 * multiprocessors(device)  # `tiling_of` splits until there are so many programs, at most
        partial = torch.empty(tiles * NARROW.columns * NARROW_ROWS, dtype=torch.float32, device=device)
        _scratches[key] = Scratch(partial, torch.zeros(tiles, dtype=torch.int32, device=device))
    return _scratches[key]


_scratches: dict[tuple[torch.device, int], Scratch] = {}
_LIBRARY = torch.library.Library("asyncsched", "FRAGMENT")
_LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_LIBRARY.impl("linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake("asyncsched::linear", _linear_fake, lib=_LIBRARY)


# ---- into a model ----------------------------------------------------------------------------------------------------


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Calls the operation, which itself could not be pickled with a model."""
    return torch.ops.asyncsched.linear(x, weight, bias)


class FewRows(nn.Linear):
    """A linear layer that calls the operation."""

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)


def pays_on(device: torch.device) -> bool:
    """Whether the kernels run there, and were measured on a device of its kind."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) == HOPPER


@torch.no_grad()
def install(module: nn.Module) -> None:
    """Every linear layer of `module` in 16 bits calls the operation; on CUDA its kernels are compiled and loaded."""
    shapes = {}
    for each in module.modules():
        if type(each) in (nn.Linear, Merged) and type(each.weight) in PLAIN and each.weight.dtype in DTYPES:
            _set(each, FewRows, product)
            shapes[each.weight.shape, each.bias is None] = each
    for each in shapes.values():
        for rows in (1, 8, NARROW_ROWS, MAX_ROWS):
            _linear(each.weight.new_zeros(rows, each.weight.shape[1]), each.weight, each.bias)


def choose(module: nn.Module, sizes: Sequence[int], samples: Sequence[int]) -> str:
    """Has the library's algorithms tried for steps of so many tokens, and for the logits of so many of them.

    Returns why that could not be, or "".
    """
    head = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
    of_kind: dict[tuple[torch.Size, torch.dtype], list[Tensor]] = {}
    for layer in _calling(module):
        if layer is not head and layer.bias is None:
            of_kind.setdefault((layer.weight.shape, layer.weight.dtype), []).append(layer.weight)
    wanted = [(weights, sizes) for weights in of_kind.values()]
    if head is not None and type(head) is FewRows and head.bias is None:
        wanted.append(([head.weight], samples))
    for weights, counts in wanted:
        librarys = [rows for rows in counts if is_alike() or not is_own(rows, weights[0])]
        if why := library_products.choose(weights, librarys):
            return why
    return ""


@contextmanager
def apart(module: nn.Module) -> Iterator[None]:
    """Every linear layer is the library's meanwhile, as the model was written."""
    found = list(_calling(module))
    for each in found:
        _set(each, nn.Linear, functional.linear)
    try:
        yield
    finally:
        for each in found:
            _set(each, FewRows, product)


def _calling(module: nn.Module) -> Iterator[nn.Module]:
    """The layers that call the operation."""
    for each in module.modules():
        if type(each) is FewRows or getattr(each, "product", None) is product:
            yield each


def _set(layer: nn.Module, kind: type[nn.Linear], of_merged: Callable[..., Tensor]) -> None:
    if isinstance(layer, Merged):
        layer.product = of_merged
    else:
        layer.__class__ = kind
