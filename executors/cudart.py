"""The calls of the CUDA runtime that every step makes, without what torch does around each of them.

Through torch, a copy, a record or a launch of a graph looks up and sets the current stream, has an allocator note who
uses the memory, and lets the GIL go, which another thread may then keep for milliseconds. These calls name their
stream, keep the GIL and note nothing: whoever makes them keeps what they touch until the stream is past it.

They are calls of the library that torch has loaded, so the handles of torch's streams, events and graphs are its own.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any, Protocol

import torch

from asyncsched.errors import AsyncschedError

_HANDLE, _SIZE, _ENUM, _FLAGS = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint
BY_ADDRESS = 4  # cudaMemcpyDefault: the addresses say which way a copy goes
NO_FLAGS = 0
Call = Callable[..., object]


class CudaError(RuntimeError):
    """A call of the runtime failed: which, and CUDA's name and text for it."""


class Library(Protocol):
    """The runtime's functions by name, as ctypes has them."""

    def __getattr__(self, name: str) -> Any: ...


def loaded_library() -> Library:
    """The runtime that torch uses. Raises AsyncschedError where torch has none of its own in the process."""
    name = f"libcudart.so.{(torch.version.cuda or '').split('.')[0]}"
    try:
        return ctypes.PyDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)  # PyDLL keeps the GIL
    except OSError as error:
        raise AsyncschedError(f"torch {torch.__version__} has not loaded {name}: {error}") from None


class Runtime:
    """Calls that enqueue work and return at once. Each raises CudaError where CUDA refuses it.

    copy    to and source (addresses of device memory or of pinned host memory), bytes, BY_ADDRESS, stream
    record  event, stream
    wait    stream, event as it was recorded last, NO_FLAGS
    launch  executable graph, stream
    """

    def __init__(self, library: Library) -> None:
        self._last_error = library.cudaGetLastError
        self._name_of, self._text_of = library.cudaGetErrorName, library.cudaGetErrorString
        self._last_error.argtypes, self._last_error.restype = (), _ENUM
        for of_error in (self._name_of, self._text_of):
            of_error.argtypes, of_error.restype = (_ENUM,), ctypes.c_char_p
        self.copy = self._checked(library, "cudaMemcpyAsync", _HANDLE, _HANDLE, _SIZE, _ENUM, _HANDLE)
        self.record = self._checked(library, "cudaEventRecord", _HANDLE, _HANDLE)
        self.wait = self._checked(library, "cudaStreamWaitEvent", _HANDLE, _HANDLE, _FLAGS)
        self.launch = self._checked(library, "cudaGraphLaunch", _HANDLE, _HANDLE)

    def _checked(self, library: Library, name: str, *types: type) -> Call:
        def check(code: int, function: object, arguments: object) -> None:
            if code:
                self._last_error()  # takes it back: torch would find it behind its next kernel and blame that
                raise CudaError(f"{name}: {self._name_of(code).decode()}: {self._text_of(code).decode()}")

        function = getattr(library, name)
        function.argtypes, function.restype, function.errcheck = types, _ENUM, check
        call: Call = function
        return call
