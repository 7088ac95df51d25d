"""cuBLASLt's calls for one kind of product, x W^T, with the algorithm named by whoever calls.

Torch takes what the library guesses to be quickest; here its other guesses can be had, and variations of them. They are
calls of the library that torch has loaded, with numbers from its header, which have been the same since CUDA 11.8.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asyncsched.errors import AsyncschedError

_HANDLE, _SIZE, _ENUM = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

NOT_SUPPORTED = 15  # CUBLAS_STATUS_NOT_SUPPORTED
COMPUTE_FLOAT32, FLOAT32 = 68, 0  # CUBLAS_COMPUTE_32F, CUDA_R_32F
TYPES = {torch.bfloat16: 14, torch.float16: 2}  # CUDA_R_16BF, CUDA_R_16F
TRANSPOSE_A, IS_TRANSPOSED = 3, 1  # CUBLASLT_MATMUL_DESC_TRANSA, CUBLAS_OP_T
MAX_WORKSPACE, ALIGNMENTS = 1, (5, 6, 7, 8)  # CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, ..._MIN_ALIGNMENT_A to D_BYTES
# CUBLASLT_ALGO_CONFIG_SPLITK_NUM, _REDUCTION_SCHEME, _CTA_SWIZZLING and _CLUSTER_SHAPE_ID
SPLITS, REDUCTION, ORDER, CLUSTER = 2, 3, 4, 8
CLUSTERS = (2, 3, 5)  # CUBLASLT_CLUSTER_SHAPE_1x1x1, 2x1x1, 1x2x1
ORDERS = (0, 1)  # in which tiles are taken
GUESSES = 16  # asked for; the library has 8
ALIGNMENT = 16  # bytes, of all operands
WORKSPACE = 1024  # bytes: some count the tiles that are taken


class Algorithm(ctypes.Structure):
    """cublasLtMatmulAlgo_t."""

    _fields_ = (("data", ctypes.c_uint64 * 8),)

    def key(self) -> bytes:
        return bytes(self)


class _Guess(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", Algorithm),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


class Shape(NamedTuple):
    """x [rows, depth], W [columns, depth], both of `dtype`."""

    rows: int
    columns: int
    depth: int
    dtype: torch.dtype


class Products:
    """Products of one shape on the current device, which sum each result up in one part."""

    def __init__(self, shape: Shape) -> None:
        """Raises AsyncschedError where there is no such library, or it knows no such product."""
        self._calls = _calls()
        self._handle = _handle(torch.cuda.current_device())
        self._description = self._made("cublasLtMatmulDescCreate", COMPUTE_FLOAT32, FLOAT32)
        self._set("cublasLtMatmulDescSetAttribute", self._description, TRANSPOSE_A, ctypes.c_int32(IS_TRANSPOSED))
        rows, columns, depth, dtype = shape
        self._weight, self._x, self._output = (  # by columns, as the library sees them: all are transposed
            self._made("cublasLtMatrixLayoutCreate", TYPES[dtype], *map(ctypes.c_uint64, size), ctypes.c_int64(size[0]))
            for size in ((depth, columns), (depth, rows), (columns, rows))
        )

    def guesses(self) -> list[Algorithm]:
        """What the library takes to be quick, the quickest first; none where it has nothing that splits no sum."""
        preference = self._made("cublasLtMatmulPreferenceCreate")
        alignments = [(name, ctypes.c_uint32(ALIGNMENT)) for name in ALIGNMENTS]
        settings = [(MAX_WORKSPACE, ctypes.c_uint64(WORKSPACE)), *alignments]
        for name, value in settings:
            self._set("cublasLtMatmulPreferenceSetAttribute", preference, name, value)
        found, count = (_Guess * GUESSES)(), ctypes.c_int()
        operands = (self._weight, self._x, self._output, self._output)
        wanted = (self._handle, self._description, *operands, preference, GUESSES, found, ctypes.byref(count))
        status = self._calls.cublasLtMatmulAlgoGetHeuristic(*wanted)
        self._check("cublasLtMatmulPreferenceDestroy", preference)
        if status not in (0, NOT_SUPPORTED):
            raise AsyncschedError(f"cublasLtMatmulAlgoGetHeuristic failed with status {status}")
        copies = [self._with(one.algorithm, {}) for one in found[: count.value] if one.state == 0]
        return [one for one in copies if self._is_possible(one)]

    def variants(self, algorithms: Sequence[Algorithm]) -> list[Algorithm]:
        """They, and others that differ in the clusters and the order of their tiles, as far as the library has them."""
        changes = [{}, *({CLUSTER: cluster, ORDER: order} for cluster in CLUSTERS for order in ORDERS)]
        tried = {one.key(): one for algorithm in algorithms for one in self._changed(algorithm, changes)}
        return [one for one in tried.values() if self._is_possible(one)]

    def multiply(self, algorithm: Algorithm, x: Tensor, weight: Tensor, output: Tensor) -> None:
        """Writes x W^T on the current stream. Operands are contiguous, and begin at multiples of ALIGNMENT bytes.

        Raises AsyncschedError where the library refuses.
        """
        operands = weight.data_ptr(), self._weight, x.data_ptr(), self._x
        result = output.data_ptr(), self._output, output.data_ptr(), self._output
        workspace = x.new_empty(WORKSPACE, dtype=torch.uint8)  # on this stream, so its memory is nobody's until then
        stream = torch.cuda.current_stream().cuda_stream
        one, nothing = ctypes.byref(ctypes.c_float(1.0)), ctypes.byref(ctypes.c_float(0.0))
        self._check(
            "cublasLtMatmul",
            *(self._handle, self._description, one, *operands, nothing, *result),
            *(ctypes.byref(algorithm), workspace.data_ptr(), WORKSPACE, stream),
        )

    def _changed(self, algorithm: Algorithm, changes: Sequence[dict[int, int]]) -> Iterator[Algorithm]:
        for change in changes:
            try:
                yield self._with(algorithm, change)
            except AsyncschedError:  # it has no such setting
                continue

    def _with(self, algorithm: Algorithm, change: dict[int, int]) -> Algorithm:
        """A copy with these settings, that sums up in one part."""
        copy = Algorithm.from_buffer_copy(algorithm)
        for name, value in {SPLITS: 1, REDUCTION: 0, **change}.items():
            number = ctypes.c_uint16(value) if name == CLUSTER else ctypes.c_uint32(value)
            self._set("cublasLtMatmulAlgoConfigSetAttribute", ctypes.byref(copy), name, number)
        return copy

    def _is_possible(self, algorithm: Algorithm) -> bool:
        result = _Guess()
        operands = (self._weight, self._x, self._output, self._output)
        call = self._calls.cublasLtMatmulAlgoCheck
        refused = call(self._handle, self._description, *operands, ctypes.byref(algorithm), ctypes.byref(result))
        return not refused and result.state == 0 and result.workspace <= WORKSPACE

    def _made(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._check(name, ctypes.byref(made), *arguments)
        return made

    def _set(self, name: str, of: Any, attribute: int, value: Any) -> None:
        self._check(name, of, attribute, ctypes.byref(value), ctypes.sizeof(value))

    def _check(self, name: str, *arguments: Any) -> None:
        if status := getattr(self._calls, name)(*arguments):
            raise AsyncschedError(f"{name} failed with status {status}")


@cache
def _calls() -> Any:
    """The library that torch uses. Raises AsyncschedError where torch has none of its own in the process."""
    name = f"libcublasLt.so.{(torch.version.cuda or '').split('.')[0]}"
    try:
        library = ctypes.PyDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError as error:
        raise AsyncschedError(f"torch {torch.__version__} has not loaded {name}: {error}") from None
    pointers = {
        "cublasLtCreate": (_HANDLE,),
        "cublasLtMatmulDescCreate": (_HANDLE, _ENUM, _ENUM),
        "cublasLtMatmulDescSetAttribute": (_HANDLE, _ENUM, _HANDLE, _SIZE),
        "cublasLtMatrixLayoutCreate": (_HANDLE, _ENUM, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
        "cublasLtMatmulPreferenceCreate": (_HANDLE,),
        "cublasLtMatmulPreferenceSetAttribute": (_HANDLE, _ENUM, _HANDLE, _SIZE),
        "cublasLtMatmulPreferenceDestroy": (_HANDLE,),
        "cublasLtMatmulAlgoGetHeuristic": (*(_HANDLE,) * 7, ctypes.c_int, _HANDLE, _HANDLE),
        "cublasLtMatmulAlgoConfigSetAttribute": (_HANDLE, _ENUM, _HANDLE, _SIZE),
        "cublasLtMatmulAlgoCheck": (_HANDLE,) * 8,
        "cublasLtMatmul": (*(_HANDLE,) * 14, _SIZE, _HANDLE),
    }
    for function, types in pointers.items():
        call = getattr(library, function)
        call.argtypes, call.restype = types, _ENUM
    return library


@cache
def _handle(device: int) -> ctypes.c_void_p:
    """For the process's time."""
    handle = ctypes.c_void_p()
    if status := _calls().cublasLtCreate(ctypes.byref(handle)):
        raise AsyncschedError(f"cublasLtCreate failed with status {status}")
    return handle
