"""What a mutant is. The planted faults themselves are in edges.py, inputs.py, blocks.py and requests.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from mutants.patching import Around, Patch, Rewrite, planted


@dataclass(frozen=True)
class Mutant:
    """One planted fault.

    name      what is wrong, in words
    patches   what makes it so
    case      name of the case that must find it
    scenario  of docs/known-faults.md whose kind it is, 0 for none
    dies      what the engine says when it dies of the fault; empty where a check must find it
    """

    name: str
    patches: tuple[Patch, ...]
    case: str
    scenario: int = 0
    dies: str = ""

    def __str__(self) -> str:
        return self.name.replace(",", "").replace(" ", "-")

    def planted(self) -> AbstractContextManager[None]:
        return planted(self.patches)


def rewrite(target: str, *swaps: tuple[str, str]) -> Rewrite:
    return Rewrite(target, swaps)


def around(target: str, make: Callable[[Any], Any]) -> Around:
    return Around(target, make)
