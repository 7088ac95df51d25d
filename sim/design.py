"""Which points a sweep visits: every combination of some values, or points drawn at random.

A random point depends on the seed and on its own number alone, so the first hundred of a thousand are the hundred.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import NamedTuple

import numpy as np

from asyncsched.errors import ConfigError
from sim.draws import Stream, exp, generator
from sim.scenario import parse_value

Point = dict[str, object]
"""Dotted keys of a scenario, and their values."""


class Range(NamedTuple):
    """Values from low to high, both included; whole numbers if both are. `log`: equal factors are equally likely."""

    low: float
    high: float
    log: bool

    def at(self, share: float) -> float:
        """The value that `share` of the others, 0 up to 1, stay below."""
        whole = isinstance(self.low, int) and isinstance(self.high, int)
        if self.log:
            ratio = (Decimal(self.high) / Decimal(self.low)).ln()  # equal on every machine, as math.log is not
            value = self.low * float(exp(np.array([float(ratio) * share]))[0])
            return min(round(value), self.high) if whole else min(value, self.high)
        if whole:
            return int(self.low + int(share * (self.high - self.low + 1)))
        return self.low + share * (self.high - self.low)


def parse_vary(text: str) -> tuple[str, list[object]]:
    """`host.scale=0.5,1,2` or `mode=sync,async`: the key and its values. Raises ConfigError, also where two of them are
    equal, as 1 and 1.0 are."""
    key, separator, values = text.partition("=")
    if not separator or not key.strip() or not values.strip():
        raise ConfigError("--vary", text, "use key=value,value,... as in host.scale=0.5,1,2")
    try:
        parsed = tomllib.loads(f"values = [{values}]")
    except tomllib.TOMLDecodeError:  # bare words such as sync,async
        parsed = {"values": [parse_value(value) for value in values.split(",")]}
    found: list[object] = parsed["values"]
    for place, value in enumerate(found):
        if any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in found[:place]):
            raise ConfigError("--vary", text, f"{value!r} is there twice; give each value of {key.strip()} once")
    return key.strip(), found


def parse_range(text: str) -> tuple[str, Range]:
    """`host.scale=0.1:10:log` or `max_num_seqs=16:256`: the key and its range. Raises ConfigError."""
    allowed = "use key=low:high or key=low:high:log, as in host.scale=0.1:10:log"
    key, separator, ends = text.partition("=")
    low, _, rest = ends.partition(":")
    high, _, scale = rest.partition(":")
    numbers = [parse_value(end) for end in (low, high)]
    if not separator or not key.strip() or scale not in ("", "log"):
        raise ConfigError("--range", text, allowed)
    if not all(isinstance(end, int | float) and not isinstance(end, bool) for end in numbers):
        raise ConfigError("--range", text, allowed)
    first, last = numbers
    assert isinstance(first, int | float)  # as was just checked; for the type checker
    assert isinstance(last, int | float)
    if not -1e15 < first <= last < 1e15 or (scale and not (first > 0 and last / first < 1e15)):
        raise ConfigError("--range", text, f"{allowed}; low must not be above high, and above 0 with log")
    return key.strip(), Range(first, last, bool(scale))


def grid(vary: Mapping[str, Sequence[object]]) -> list[Point]:
    """Every combination of the varied keys' values; the last key varies fastest."""
    return [dict(zip(vary, values, strict=True)) for values in itertools.product(*vary.values())]


def random_points(
    ranges: Mapping[str, Range], choices: Mapping[str, Sequence[object]], samples: int, seed: int
) -> list[Point]:
    """`samples` points: a value of each range, and one of each key's choices."""
    points = []
    for number in range(samples):
        shares = generator(seed, Stream.DESIGN, number).random(len(ranges) + len(choices)).tolist()
        drawn: Point = {key: values.at(share) for (key, values), share in zip(ranges.items(), shares, strict=False)}
        rest = shares[len(ranges) :]
        chosen = {
            key: values[int(share * len(values))] for (key, values), share in zip(choices.items(), rest, strict=True)
        }
        points.append({**drawn, **chosen})
    return points
