"""Python's garbage collector, kept out of the way of an engine.

A full collection looks at every object of the process: with torch and transformers that is 0.2 to 0.4 s, in which no
step is planned. Behind `old_objects_stay` it looks at what is made meanwhile.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def old_objects_stay() -> Iterator[None]:
    """No collection looks at what is there already. Where somebody froze objects for good, nothing is changed."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def nothing_is_collected() -> Iterator[None]:
    """By the collector; what nobody refers to any more goes at once, as ever."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
