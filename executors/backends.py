"""Which attention backend serves a device. Backends that need more than torch are imported when they are chosen."""

from __future__ import annotations

import warnings
from importlib.util import find_spec

import torch

from asyncsched.errors import ConfigError
from executors.attention import AttentionBackend
from executors.plain_attention import PlainAttention

BACKENDS = ("auto", "plain", "triton")
PROGRAMS_PER_MULTIPROCESSOR = 8  # of a decode launch: enough to hide how long single loads take, in one wave


def prefer_products(device: torch.device) -> None:
    """Matrix products through cuBLASLt: for few rows it splits none, which cuBLAS pays for with more kernels.

    The preference is torch's, and so the whole process's.
    """
    if device.type == "cuda":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is experimental
            torch.backends.cuda.preferred_blas_library("cublaslt")


def choose_backend(name: str, device: torch.device) -> AttentionBackend:
    """The backend called `name`; "auto" is Triton's on CUDA where it is installed. Raises ConfigError."""
    if name not in BACKENDS:
        raise ConfigError("attention", name, f"use one of {', '.join(BACKENDS)}")
    usable = device.type == "cuda" and find_spec("triton") is not None
    if name == "triton" and not usable:
        raise ConfigError("attention", name, "triton has to be installed and needs a CUDA device: use plain")
    if name == "plain" or not usable:
        return PlainAttention(reads_lengths=device.type == "cpu")
    from executors.triton_attention import TritonAttention

    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return TritonAttention(target_programs=PROGRAMS_PER_MULTIPROCESSOR * multiprocessors)
