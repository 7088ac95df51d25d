"""The paged KV cache: per layer, keys and values of every block, and what a block costs.

Block 0 is the null block: padding rows of a captured batch write there. What a block holds before its
positions are written is undefined, and may be NaN: whoever reads the cache masks what a sequence has not written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from asyncsched.errors import ConfigError


class LayerShape(NamedTuple):
    """One layer's attention, as its calls of the attention hook show it. Dimensions are per head.

    window  keys a query sees, itself included; None means all
    """

    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    @property
    def elements_per_token(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True, slots=True, eq=False)
class KvCache:
    """keys[i] is [num_blocks + 1, block_size, kv_heads, key_dim] of layer i; values[i] has the values' dimension."""

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]
    block_size: int


def bytes_per_token(layers: Sequence[LayerShape], dtype: torch.dtype) -> int:
    """KV of one token in all layers."""
    return sum(layer.elements_per_token for layer in layers) * dtype.itemsize


def blocks_that_fit(layers: Sequence[LayerShape], free_bytes: int, *, block_size: int, dtype: torch.dtype) -> int:
    """Usable blocks, the null block not counted, that `free_bytes` have room for."""
    return max(0, free_bytes // (bytes_per_token(layers, dtype) * block_size) - 1)


def free_memory(device: torch.device) -> int | None:
    """Bytes that an allocation may still take on the device; None where the system does not say."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def allocate(
    layers: Sequence[LayerShape], num_blocks: int, block_size: int, *, dtype: torch.dtype, device: torch.device
) -> KvCache:
    """The cache for `num_blocks` usable blocks; raises ConfigError with the number that would fit where they don't."""
    needed = bytes_per_token(layers, dtype) * block_size * (num_blocks + 1)
    free = free_memory(device)
    if free is not None and needed > free:
        fit = blocks_that_fit(layers, free, block_size=block_size, dtype=dtype)
        raise ConfigError(
            "num_blocks",
            num_blocks,
            f"the KV pool would take {needed / 2**30:.2f} GiB and {free / 2**30:.2f} GiB are free on {device}: "
            f"{fit} blocks of {block_size} tokens would fit",
        )

    def pool(layer: LayerShape, dim: int) -> torch.Tensor:
        return torch.empty((num_blocks + 1, block_size, layer.kv_heads, dim), dtype=dtype, device=device)

    keys = tuple(pool(layer, layer.key_dim) for layer in layers)
    values = tuple(pool(layer, layer.value_dim) for layer in layers)
    return KvCache(keys, values, block_size)
