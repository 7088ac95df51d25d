"""Which consecutive layers may run as one: each takes the output of the one before, and otherwise the same arguments.

It is not guessed, but seen in a pass over the model.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import nn


class _Call(NamedTuple):
    """What one layer was called with, and what it gave."""

    first: object
    others: tuple[object, ...]
    output: object


def stacks(
    layers: Sequence[nn.Module], keys: Sequence[Hashable], run: Callable[[], object], most: int
) -> list[list[nn.Module]]:
    """Splits `layers` into stacks of up to `most` layers; `run` passes through the model. Layers of other keys part."""
    if most == 1:
        return [[layer] for layer in layers]
    calls = _watch(layers, run)
    joined = [[layers[0]]]
    for (layer, key), (following, next_key) in pairwise(zip(layers, keys, strict=True)):
        one, other = calls.get(layer), calls.get(following)
        fits = one is not None and other is not None and other.first is one.output and _same(one.others, other.others)
        if fits and key == next_key and len(joined[-1]) < most:
            joined[-1].append(following)
        else:
            joined.append([following])
    return joined


def _same(these: Sequence[object], those: Sequence[object]) -> bool:
    return len(these) == len(those) and all(one is other for one, other in zip(these, those, strict=True))


def _watch(layers: Sequence[nn.Module], run: Callable[[], object]) -> dict[nn.Module, _Call]:
    """The call of each layer whose first argument has a place and no name."""
    calls: dict[nn.Module, _Call] = {}

    def note(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
        if args:
            named = tuple(part for name in sorted(kwargs) for part in (name, kwargs[name]))
            calls[layer] = _Call(args[0], (*args[1:], *named), output)

    hooks = [layer.register_forward_hook(note, with_kwargs=True) for layer in layers]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return calls
