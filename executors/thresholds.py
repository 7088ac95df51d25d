"""top_k and top_p without sorting: the threshold is found digit by digit, with one pass over the logits for each.

A float32 compares like an integer made from its bits. A histogram over the leading bits tells in which bin the
threshold lies, and one within that bin gives the next digit; three of them find it exactly. Everything that is summed
is an integer: no order of summation, and so no batch, changes a result. Shapes are static and the host learns nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

_DIGITS = ((21, 11), (10, 11), (0, 10))  # lowest bit and number of bits
_ONE = 2.0**44  # a weight of 1 as an integer: 2**18 of them still fit 63 bits, and 2**-44 is nothing to top_p


def top_k_keep(logits: Tensor, k: Tensor) -> Tensor:
    """Which logits are among the k largest of their row: bool[m, V], from float32[m, V] and int32[m, 1] of 1 to V.

    Logits equal to the k-th largest are all kept.
    """
    bits = (logits + 0.0).view(torch.int32)  # 0.0 and -0.0 are one number
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return keys >= _highest(keys, torch.ones_like(k).expand_as(keys), k)


def top_p_keep(weights: Tensor, p: Tensor) -> Tensor:
    """Which tokens make up the share p of their row, the heaviest first: bool[m, V], from weights float32[m, V], from 0
    to 1 with the largest of each row 1, and p, float32[m, 1].

    The fewest tokens that reach p are kept, and all whose weight equals that of the last one; at p = 1, every token.
    """
    parts = (weights * _ONE).to(torch.int64)
    needed = (p.double() * parts.sum(-1, keepdim=True)).ceil().clamp(min=1).to(torch.int64)
    keys = weights.view(torch.int32)  # none is negative, so the bits are in order
    return (keys >= _highest(keys, parts, needed)) | (p >= 1)


def _highest(keys: Tensor, parts: Tensor, needed: Tensor) -> Tensor:
    """The highest threshold of each row, int32[m, 1], at which the parts of the keys that reach it sum up to `needed`.

    keys int32[m, V]; parts and needed integers, [m, V] and [m, 1]. A row that cannot have a threshold gets some number.
    """
    threshold = torch.zeros_like(needed, dtype=torch.int32)
    above = torch.zeros_like(needed)  # parts of the keys in higher bins
    for shift, num_bits in _DIGITS:
        num_bins = 1 << num_bits
        digits = keys >> shift
        if shift + num_bits == 32:
            counted, lowest = parts, -num_bins // 2  # the leading digit has the sign
        else:
            counted, lowest = torch.where(digits >> num_bits == threshold, parts, 0), 0
            digits &= num_bins - 1
        sums = parts.new_zeros(len(keys), num_bins).scatter_add_(1, (digits - lowest).long(), counted)
        down_to = above + sums.sum(-1, keepdim=True) - sums.cumsum(-1) + sums
        bins = ((down_to >= needed).sum(-1, keepdim=True) - 1).clamp(min=0)
        above = down_to.gather(1, bins) - sums.gather(1, bins)
        threshold = threshold * num_bins + (bins + lowest).to(torch.int32)
    return threshold
