"""One request of a trace, and the fields that trace formats have in common.

Numbers are taken from their decimal digits, so a time is exact to the nanosecond. Whatever is wrong with a field is a
`ValueError` whose text says what is needed; who reads the file adds where.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

MOST_TOKENS = 999_999_999
LATEST_DIGITS = 12  # before the decimal point, of a time in its unit

_DECIMAL = re.compile(r"(\d+)(?:\.(\d*))?")
_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class TraceRow(NamedTuple):
    """Lengths in tokens. `time_ns` counts from wherever the trace's clock starts.

    prefix  ids of the prompt's leading blocks, the last one perhaps partial: two prompts are alike for as long as their
            ids are. () says nothing about the prompt
    """

    time_ns: int
    prompt_tokens: int
    output_tokens: int
    prefix: tuple[int, ...] = ()


def tokens(name: str, value: str) -> int:
    digits = value.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) < 10 and int(digits) > 0):
        raise ValueError(f"{name} must be a whole number from 1 to {MOST_TOKENS}, not {value!r}")
    return int(digits)


def time_ns(name: str, value: str, digits_per_unit: int) -> int:
    """A time such as 12.75 in a unit of 10**digits_per_unit ns. What is below a nanosecond is cut off."""
    match = _DECIMAL.fullmatch(value.strip())
    if match is None or len(match[1]) > LATEST_DIGITS or not value.isascii():
        raise ValueError(f"{name} must be a number of at least 0 without an exponent, not {value!r}")
    fraction = (match[2] or "")[:digits_per_unit].ljust(digits_per_unit, "0")
    whole: int = int(match[1]) * 10**digits_per_unit
    return whole + int(fraction or "0")


def date_ns(name: str, value: str) -> int:
    """Nanoseconds since 1970 of 2023-11-16 18:15:46.6805900, with a zone or in UTC."""
    match = _TIMESTAMP.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"{name} must be like 2023-11-16 18:15:46.6805900, not {value!r}")
    seconds, fraction, zone = match.groups()
    try:
        moment = datetime.fromisoformat(seconds + (zone or "+00:00"))
    except ValueError as error:
        raise ValueError(f"{name} {value!r} is no date ({error})") from None
    whole: int = (moment - _EPOCH) // timedelta(seconds=1)
    return whole * 10**9 + int((fraction or "").ljust(9, "0"))
