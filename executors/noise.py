"""Noise of the sampler: a pure function of (seed, position, token), so a draw never depends on who shares the batch.

Counter-based: no state, nothing to rewind after an eviction, the same at every depth. Up to the last step it is
integer arithmetic, which wraps the same way everywhere; the last step, a logarithm, works on each element alone.

The host mixes seed and position into one key per sampled row; the device mixes key and token.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31 = np.uint64(30), np.uint64(27), np.uint64(31)


def mix64(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64-bit numbers in which every input bit moves every output bit (splitmix64's finaliser)."""
    values = (values ^ (values >> _30)) * _MIX_1
    values = (values ^ (values >> _27)) * _MIX_2
    return values ^ (values >> _31)


def stream_of(seed: int, number: int = 0) -> np.uint64:
    """The random stream of a seed, or of request `number` under an engine's seed."""
    start = mix64(np.array([seed % 2**64], dtype=np.uint64))
    return mix64(start + np.array([number], dtype=np.uint64) * _GOLDEN)[0]  # type: ignore[no-any-return]


def step_keys(streams: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.int32]:
    """A key per sampled row, int32[m, 2], from its stream and the position its token will have."""
    keys = mix64(streams + positions.astype(np.uint64) * _GOLDEN)
    return keys.view(np.int32).reshape(-1, 2)


def token_hashes(vocab_size: int, device: torch.device) -> Tensor:
    """The token's share of the hash, int32[V]; computed once."""
    x = torch.arange(vocab_size, dtype=torch.int32, device=device)
    x = (x ^ _shifted(x, 16)) * 0x7FEB352D
    x = (x ^ _shifted(x, 15)) * -0x7B935975  # 0x846ca68b
    return x ^ _shifted(x, 16)


def exponentials(keys: Tensor, hashes: Tensor) -> Tensor:
    """Exponential variates, float32[m, V], from keys int32[m, 2] and `token_hashes`; all above 0 and below 17.

    31 random bits each, finest near 0: that is where a rare token wins.
    """
    x = hashes ^ keys[:, :1]
    x.mul_(0x7FEB352D)
    x.bitwise_xor_(_shifted(x, 15)).bitwise_xor_(keys[:, 1:])
    x.mul_(-0x7B935975)
    x.bitwise_xor_(_shifted(x, 16)).bitwise_and_(0x7FFFFFFF)
    uniform = x.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_()


def _shifted(x: Tensor, bits: int) -> Tensor:
    """A logical shift to the right; torch's is arithmetic."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)
