"""Python's garbage collector, kept out of the way of an engine.

A full collection looks at every object of the process: with torch and transformers that is 0.2 to 0.4 s, in which no
step is planned. Behind `old_objects_stay` it looks at what is made meanwhile.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


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


class _Collector:
    """Whether it is on, which is one answer for all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._was_on = False

    @contextmanager
    def off(self) -> Iterator[None]:
        with self._lock:
            if not self._inside:
                self._was_on = gc.isenabled()
            self._inside += 1
            gc.disable()
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside and self._was_on:
                    gc.enable()


_collector = _Collector()


def nothing_is_collected() -> AbstractContextManager[None]:
    """By the collector; what nobody refers to any more goes at once, as ever. Of several threads that are inside, the
    last to leave lets it go on, if it was on before the first."""
    return _collector.off()
