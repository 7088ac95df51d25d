"""Gated layers, activation(x G^T) * (x U^T): product, activation and multiplication in one kernel.

The model's code stays as it is. `fuse` sees the three in the graph of a compiled layer, where the weights of gate and
up are one matrix and the product is the operation of `executors.few_rows`, and puts one operation in their place. Like
that one, it looks at the number of rows when it is called: as many as decode steps have go to a kernel of their own
where it was measured to be faster than the library's product and a kernel behind it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, fx
from torch.nn import functional

from executors import few_rows
from executors.few_rows import Tiling

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}

TILINGS = (  # up to so many rows, the first that gives the device enough to do
    (32, (Tiling(columns=128, depth=128, splits=1, warps=4, stages=3), Tiling(64, 128, 1, warps=4, stages=4))),
    (128, (Tiling(columns=64, depth=64, splits=1, warps=4, stages=3),)),
)
LEAST_WAVES = 0.8  # programs over multiprocessors that are enough
LOADED = (1, 8, 16, 32, 64, 128, 129)  # rows that all kernels of a layer run for, as they are compiled per power of two


def tiling_of(rows: int, width: int, depth: int, multiprocessors: int) -> Tiling | None:
    """For several rows and `width` columns each of gate and up; None where it is the library's."""
    kinds = next((kinds for most, kinds in TILINGS if rows <= most), ())
    for kind in kinds:
        if -(-width // kind.columns) >= LEAST_WAVES * multiprocessors and depth % kind.depth == 0:
            return kind
    return None


# ---- the operation ---------------------------------------------------------------------------------------------------


def _gated(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    rows = x.shape[:-1].numel()
    if not (rows and weight.is_cuda and few_rows.is_readable(x, weight, None)):
        gate, up = few_rows.product(x, weight, None).chunk(2, -1)
        return ACTIVATIONS[activation](gate) * up
    from executors import triton_gated  # needs Triton

    _load_kernels(weight, activation)
    columns, depth = weight.shape
    flat = x.reshape(rows, depth).contiguous()
    if few_rows.is_alike():
        output = triton_gated.joined(few_rows.product(flat, weight, None), activation)
    elif rows == 1:
        output = triton_gated.gated_row(flat, weight, activation)
    elif tiling := tiling_of(rows, columns // 2, depth, few_rows.multiprocessors(weight.device)):
        output = triton_gated.gated_rows(flat, weight, activation, tiling)
    else:
        output = triton_gated.joined(few_rows.product(flat, weight, None), activation)
    return output.view(*x.shape[:-1], columns // 2)


def _load_kernels(weight: Tensor, activation: str) -> None:
    """Before the first such layer runs, which it does while a model is compiled, and not when a step has more rows."""
    key = (weight.shape, weight.dtype, weight.device, activation)
    if key not in _loaded:
        _loaded.add(key)
        for rows in LOADED:
            _gated(weight.new_zeros(rows, weight.shape[1]), weight, activation)


def _gated_fake(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2)


_loaded: set[tuple[torch.Size, torch.dtype, torch.device, str]] = set()
_LIBRARY = torch.library.Library("asyncsched", "FRAGMENT")
_LIBRARY.define("gated(Tensor x, Tensor weight, str activation) -> Tensor")
_LIBRARY.impl("gated", _gated, "CompositeExplicitAutograd")
torch.library.register_fake("asyncsched::gated", _gated_fake, lib=_LIBRARY)


# ---- into a graph ----------------------------------------------------------------------------------------------------


def fuse(graph: fx.GraphModule) -> None:
    """Every gated layer of `graph` without bias, as the front end traced it, is one operation."""
    for node in list(graph.graph.nodes):
        if not _calls(node, operator.mul):
            continue
        for joined, up in (node.args, node.args[::-1]):
            activation = _activation(joined)
            product = _halved(joined.args[0], up) if activation else None
            if product is None:
                continue
            with graph.graph.inserting_before(product):  # its operands may be changed in place behind it
                fused = graph.graph.call_function(torch.ops.asyncsched.gated, (*product.args[:2], activation))
            fused.meta.update(node.meta)
            node.replace_all_uses_with(fused)
            for each in (node, joined, joined.args[0], up, up.args[0], product):
                graph.graph.erase_node(each)
            break
    graph.graph.lint()
    graph.recompile()


def _calls(node: object, function: object) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target is function


def _activation(node: object) -> str | None:
    """Its name where the node is one that is known and has no other use."""
    if not isinstance(node, fx.Node) or len(node.users) > 1:
        return None
    if _calls(node, functional.silu) and not node.kwargs.get("inplace") and len(node.args) == 1:
        return "silu"
    if _calls(node, functional.gelu) and node.kwargs == {"approximate": "tanh"}:
        return "gelu_tanh"
    return None


def _halved(gate: object, up: object) -> fx.Node | None:
    """The product without bias that has `gate` and `up` as the halves of its columns, and no other use."""
    if not (_calls(gate, operator.getitem) and _calls(up, operator.getitem)):
        return None
    parts = gate.args[0]
    if up.args[0] is not parts or (gate.args[1], up.args[1]) != (0, 1) or parts.op != "call_method":
        return None
    product = parts.args[0]
    if not _calls(product, torch.ops.asyncsched.linear) or product.args[2] is not None:
        return None
    if any(len(each.users) != count for each, count in ((gate, 1), (up, 1), (parts, 2), (product, 1))):
        return None
    columns = product.args[1].meta["example_value"].shape[0]
    halves = {"split": (columns // 2, columns // 2), "chunk": 2}.get(parts.target)
    dim = parts.kwargs.get("dim", *parts.args[2:])
    return product if columns % 2 == 0 and parts.args[1:2] == (halves,) and dim == -1 else None
