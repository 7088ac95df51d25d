"""Patches of running code: a function with one piece of its source exchanged, or with something put around it.

No file is edited. Whatever is patched is put back when the context ends, and a piece of source that is not there, or
not once, is an error: then the code has moved on, and the patch must too.
"""

from __future__ import annotations
import __future__

import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rewrite:
    """A function in which each `old` piece of source is `new`. `target` is "module.function" or "module.Class.name"."""

    target: str
    swaps: tuple[tuple[str, str], ...]

    def changed(self, original: Any) -> Any:
        function = inspect.unwrap(original.fget if isinstance(original, property) else original)
        source = textwrap.dedent(inspect.getsource(function))
        for old, new in self.swaps:
            if source.count(old) != 1:
                raise LookupError(f"{self.target} has {source.count(old)} times, not once: {old}")
            source = source.replace(old, new)
        module = sys.modules[function.__module__]
        names: dict[str, Any] = {}
        code = compile(source, f"<mutant of {self.target}>", "exec", flags=__future__.annotations.compiler_flag)
        exec(code, module.__dict__, names)
        return names[function.__name__]


@dataclass(frozen=True)
class Around:
    """A function replaced by what `make` returns for it."""

    target: str
    make: Callable[[Any], Any]

    def changed(self, original: Any) -> Any:
        return self.make(original)


Patch = Rewrite | Around


@contextmanager
def planted(patches: tuple[Patch, ...]) -> Iterator[None]:
    with ExitStack() as undo:
        for patch in patches:
            _plant(patch, undo)
        yield


def _plant(patch: Patch, undo: ExitStack) -> None:
    module, *path = patch.target.split(".")
    owner: Any = importlib.import_module(f"asyncsched.{module}")
    for name in path[:-1]:
        owner = getattr(owner, name)
    name = path[-1]
    original = vars(owner)[name]
    changed = patch.changed(original)
    holders = [owner]
    if len(path) == 1:  # others have imported it
        holders += [other for key, other in sys.modules.items() if key.startswith("asyncsched.")]
    for holder in holders:
        if vars(holder).get(name) is original:
            setattr(holder, name, changed)
            undo.callback(setattr, holder, name, original)
