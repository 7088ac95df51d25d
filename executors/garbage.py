"""Python's garbage collector, kept out of the way of an engine.

A full collection looks at every object of the process: with torch and transformers that is 0.2 to 0.4 s, in which no
step is planned. Behind `old_objects_stay` it looks at what is made meanwhile.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager


class _Shared:
    """A state of the collector, which is one for all threads: the first that wants it begins it, the last ends it."""

    def __init__(self, begin: Callable[[], bool], end: Callable[[], None]) -> None:
        self._begin, self._end = begin, end  # the former answers whether there will be something to end
        self._lock = threading.RLock()  # the collector may close a stream that nobody ended, right in here
        self._inside = 0
        self._is_ours = False

    @contextmanager
    def meanwhile(self) -> Iterator[None]:
        with self._lock:
            if not self._inside:
                self._is_ours = self._begin()
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside and self._is_ours:
                    self._end()


def _freeze() -> bool:
    if gc.get_freeze_count():
        return False
    gc.freeze()
    return True


def _disable() -> bool:
    was_on = gc.isenabled()
    gc.disable()
    return was_on


_frozen, _off = _Shared(_freeze, gc.unfreeze), _Shared(_disable, gc.enable)


def old_objects_stay() -> AbstractContextManager[None]:
    """No collection looks at what is there already. Where somebody froze objects for good, nothing is changed."""
    return _frozen.meanwhile()


def nothing_is_collected() -> AbstractContextManager[None]:
    """By the collector; what nobody refers to any more goes at once, as ever."""
    return _off.meanwhile()
