"""Random numbers that depend on (seed, stream, block) alone, never on who asked first.

Philox is counter-based, so a block is computed without its predecessors. The results must be equal on every machine:
integers, ziggurat normals and correctly rounded + and * are; the `exp` of a maths library is not (its last bit differs
between CPUs), so the one here is made of multiplications.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]


class Stream(IntEnum):
    """What is drawn. The numbers are part of every seeded result: append, never renumber."""

    PLAN = 0
    FILL = 1
    LAUNCH = 2
    COMMIT = 3
    H2D = 4
    D2H = 5
    FORWARD = 6
    PROMPT = 7
    OUTPUT = 8
    ARRIVAL = 9
    PRIORITY = 10
    TOKENS = 11
    OFFLOAD = 12
    RESTORE = 13
    DEQUANTISE = 14
    DESIGN = 15
    DELIVER = 16
    RUN = 17
    HOST_SPEED = 18


def generator(seed: int, stream: Stream, block: int = 0, replica: int = 0) -> np.random.Generator:
    """Blocks are 2**64 Philox counters apart, replicas 2**128: they never overlap."""
    key = np.array([seed, stream], dtype=np.uint64)
    counter = np.array([0, block, replica, 0], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def lognormal(random: np.random.Generator, sigma: float, size: int) -> FloatArray:
    """Multipliers with mean 1; sigma is the standard deviation of their logarithm."""
    return exp(sigma * random.standard_normal(size) - sigma * sigma / 2)


def exp(x: FloatArray) -> FloatArray:
    """e**x to a relative 2e-12 for |x| < 50: a short series for x / 2**12, squared twelve times."""
    y = x / 4096
    result = 1 + y * (1 + y / 2 * (1 + y / 3 * (1 + y / 4 * (1 + y / 5 * (1 + y / 6)))))
    for _ in range(12):
        result = result * result
    return np.asarray(result)
