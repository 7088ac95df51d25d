"""Reads request traces in the Azure CSV format, exactly: times are integer nanoseconds, from their decimal digits.

    TIMESTAMP,ContextTokens,GeneratedTokens
    2023-11-16 18:15:46.6805900,374,44

Other columns are ignored. A row that cannot be scheduled is an error, never skipped: a trace with rows dropped in
silence would no longer be that trace.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from asyncsched.errors import ConfigError

FIELD = "workload.trace"
COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
PACKAGED = {"azure-conv-500": "azure-conv-500.csv"}

_TIMESTAMP = re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d)?")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class TraceRow(NamedTuple):
    """time_ns counts from 1970; the lengths are in tokens."""

    time_ns: int
    prompt_tokens: int
    output_tokens: int


def read_trace(trace: str, limit: int | None = None) -> list[TraceRow]:
    """The first `limit` rows of a packaged trace or of a file, in file order. Raises ConfigError."""
    source = Path(__file__).parent / "traces" / PACKAGED[trace] if trace in PACKAGED else Path(trace)
    try:
        with source.open(newline="", encoding="utf-8-sig") as lines:
            return list(_rows(trace, lines, limit))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        allowed = f"it cannot be read ({reason}); use a CSV file or one of {', '.join(PACKAGED)}"
        raise ConfigError(FIELD, trace, allowed) from None


def _rows(trace: str, lines: Iterable[str], limit: int | None) -> Iterator[TraceRow]:
    reader = csv.reader(lines)
    header = [name.strip() for name in next(reader, [])]
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        raise ConfigError(FIELD, trace, f"line 1 must name the columns {', '.join(COLUMNS)}; {missing[0]} is missing")
    time, prompt, output = (header.index(name) for name in COLUMNS)
    count = 0
    for row in reader:
        if not row:
            continue
        if count == limit:
            return
        try:
            if len(row) != len(header):
                raise ValueError(f"{len(header)} columns are needed, not {len(row)}")
            yield TraceRow(
                _time_ns(row[time]), _tokens("ContextTokens", row[prompt]), _tokens("GeneratedTokens", row[output])
            )
        except ValueError as error:
            raise ConfigError(FIELD, f"{trace}, line {reader.line_num}", str(error)) from None
        count += 1
    if not count:
        raise ConfigError(FIELD, trace, "it must hold at least one request")


def _time_ns(text: str) -> int:
    match = _TIMESTAMP.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"TIMESTAMP must be like 2023-11-16 18:15:46.6805900, not {text!r}")
    seconds, fraction, zone = match.groups()
    try:
        moment = datetime.fromisoformat(seconds + (zone or "+00:00"))
    except ValueError as error:
        raise ValueError(f"TIMESTAMP {text!r} is no date ({error})") from None
    return (moment - _EPOCH) // timedelta(seconds=1) * 10**9 + int((fraction or "").ljust(9, "0"))


def _tokens(name: str, text: str) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) < 10 and int(digits) > 0):
        raise ValueError(f"{name} must be a whole number from 1 to 999999999, not {text!r}")
    return int(digits)
