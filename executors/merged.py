"""Projections of one input as one matrix product: q, k and v of an attention, gate and up of a gated layer.

The model's code stays as it is. Each of its linear layers becomes a `Part` that owns a view into one weight: the first
part computes the product for all and keeps it for its siblings, who are called with the very same tensor, and the last
of them drops it. A part that is called with another tensor computes its own share. Which layers are called that way
is not guessed: `watching` sees it in a pass over the model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
EXPERTS = "experts"  # of a mixture: which tokens they get is only known in the step


class Group(NamedTuple):
    """The linear layers called `names` in `parent`."""

    parent: nn.Module
    names: tuple[str, ...]

    @property
    def parts(self) -> list[nn.Linear]:
        return [self.parent.get_submodule(name) for name in self.names]  # type: ignore[misc]  # `find` saw they are


def find(module: nn.Module) -> list[Group]:
    """Groups that could be merged by what they are: plain linear layers of equal width, their weights unshared."""
    owners: dict[nn.Parameter, int] = {}
    for each in module.modules():
        for parameter in each.parameters(recurse=False):
            owners[parameter] = owners.get(parameter, 0) + 1
    return [
        Group(parent, names)
        for path, parent in module.named_modules()
        if EXPERTS not in path.split(".")
        for names in GROUPS
        if _fit([getattr(parent, name, None) for name in names], owners)
    ]


def _fit(parts: Sequence[object], owners: dict[nn.Parameter, int]) -> bool:
    linear = [part for part in parts if type(part) is nn.Linear]
    if len(linear) < len(parts):
        return False
    kinds = {(part.in_features, part.weight.dtype, part.weight.device, part.bias is None) for part in linear}
    return len(kinds) == 1 and all(owners[parameter] == 1 for part in linear for parameter in part.parameters())


@contextmanager
def watching(groups: Sequence[Group]) -> Iterator[list[Group]]:
    """Fills the list, at the end, with the groups whose parts were each called once, in order, with one tensor."""
    calls: dict[nn.Module, list[tuple[nn.Module, torch.Tensor, int]]] = {group.parts[0]: [] for group in groups}

    def note(first: nn.Module, part: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        calls[first].append((part, args[0], args[0]._version))

    hooks = [part.register_forward_pre_hook(partial(note, group.parts[0])) for group in groups for part in group.parts]
    alike: list[Group] = []
    try:
        yield alike
    finally:
        for hook in hooks:
            hook.remove()
    for group in groups:
        seen = calls[group.parts[0]]
        if [part for part, _, _ in seen] == group.parts and len({(id(x), version) for _, x, version in seen}) == 1:
            alike.append(group)


@torch.no_grad()
def merge(groups: Sequence[Group]) -> None:
    """Merges group by group: never is more than one group's weight in memory twice."""
    for group in groups:
        parts = group.parts
        weight = torch.cat([part.weight for part in parts])
        bias = None if parts[0].bias is None else torch.cat([part.bias for part in parts])
        merged = Merged(weight, bias, [part.out_features for part in parts])
        del parts
        for index, name in enumerate(group.names):
            setattr(group.parent, name, Part(merged, index))


_Kept = tuple[torch.Tensor | weakref.ref[torch.Tensor] | None, tuple[torch.Tensor, ...]]
"""The input of the first part, and what became of it."""


class Merged(nn.Module):
    """The weight of a group, [sum(sizes), in_features], and the product while its parts are waited for.

    Its tensors are buffers that no state dict has: there, they are the parts' parameters. `product` computes it.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, sizes: Sequence[int]) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.sizes = tuple(sizes)
        self.product: Callable[..., torch.Tensor] = functional.linear
        self._kept: _Kept = (None, ())  # one value, as threads that share a model write it in between

    def share(self, index: int, x: torch.Tensor) -> torch.Tensor | None:
        """What part `index` makes of `x`; None where that is not the tensor that the first part got."""
        if index == 0:
            outputs = self.product(x, self.weight, self.bias).split(self.sizes, -1)
            # A trace keeps the tensor itself, and nothing of it outlives the trace; otherwise all ends with the tensor.
            self._kept = (x if torch.compiler.is_compiling() else weakref.ref(x, self._forget), outputs)
            return outputs[0]
        kept, outputs = self._kept
        if (kept() if isinstance(kept, weakref.ref) else kept) is not x:
            return None
        output = outputs[index]
        if index == len(self.sizes) - 1:
            self._forget()
        return output

    def _forget(self, _: object = None) -> None:
        self._kept = (None, ())


class Part(nn.Linear):
    """A linear layer whose weight is a view into the merged one."""

    def __init__(self, merged: Merged, index: int) -> None:
        super().__init__(merged.weight.shape[1], merged.sizes[index], bias=False, device="meta")
        start = sum(merged.sizes[:index])
        rows = slice(start, start + self.out_features)
        self.weight = nn.Parameter(merged.weight[rows], requires_grad=False)
        if merged.bias is not None:
            self.bias = nn.Parameter(merged.bias[rows], requires_grad=False)
        self.merged = merged
        self.index = index
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.merged.share(self.index, x)
        return super().forward(x) if output is None else output


@contextmanager
def apart(module: nn.Module) -> Iterator[None]:
    """Every part computes its own product meanwhile, as the model was written."""
    parts = [part for part in module.modules() if isinstance(part, Part)]
    for part in parts:
        part.forward = partial(nn.Linear.forward, part)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for part in parts:
            del part.forward
