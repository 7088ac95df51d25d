"""The trace formats: how a line of each becomes a request.

    azure     TIMESTAMP,ContextTokens,GeneratedTokens            dates with up to nine fractional digits
    burstgpt  Timestamp,Model,Request tokens,Response tokens,... seconds
    csv       arrival,input,output                               seconds; or arrival_ms, arrival_us, arrival_ns
    mooncake  {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]} per line

Columns of a CSV format are found by name, in any order; other columns are ignored. A mooncake row without hash_ids says
nothing about its prompt. This module knows lines and no files.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from sim.trace_rows import MOST_TOKENS, TraceRow, date_ns, time_ns, tokens

PREFIX_BLOCK = 512  # tokens that a mooncake hash id stands for
LONGEST_TIME_MS = 10**15


class BadRow(NamedTuple):
    """A line that is no request, and what would be one."""

    line: int
    reason: str


Rows = Iterator[TraceRow | BadRow]
Time = Callable[[str, str], int]
"""The time in ns from the column's name and its text."""


class HeaderError(ValueError):
    """The file does not begin as its format should."""


class _Csv(NamedTuple):
    """Spellings of each column, the first being the one to recommend; with how its time is written."""

    times: Mapping[str, Time]
    prompt: str
    output: str


def _unit(digits: int) -> Time:
    return lambda name, value: time_ns(name, value, digits)


_CSV = {
    "azure": _Csv({"TIMESTAMP": date_ns}, "ContextTokens", "GeneratedTokens"),
    "burstgpt": _Csv({"Timestamp": _unit(9)}, "Request tokens", "Response tokens"),
    "csv": _Csv(
        {
            "arrival": _unit(9),
            "arrival_s": _unit(9),
            "arrival_ms": _unit(6),
            "arrival_us": _unit(3),
            "arrival_ns": _unit(0),
        },
        "input",
        "output",
    ),
}
FORMATS = (*_CSV, "mooncake")


def detect(first_line: str) -> str:
    """The format of a file that begins so. Raises HeaderError."""
    if first_line.lstrip().startswith("{"):
        return "mooncake"
    header = _header(first_line)
    for name, form in _CSV.items():
        if not _missing(form, header):
            return name
    near = [name for name, form in _CSV.items() if header & {*form.times, form.prompt, form.output}]
    if near:
        raise HeaderError(
            f"line 1 must name the columns {_columns(near[0])}; {_missing(_CSV[near[0]], header)} is missing"
        )
    known = "; ".join(f"{name}: {_columns(name)}" for name in _CSV)
    raise HeaderError(f"line 1 must name the columns of a known format ({known}), or be a JSON object (mooncake)")


def read_rows(form: str, lines: Iterable[str]) -> Rows:
    """Every line's request, or what is wrong with it, in order. Raises HeaderError and csv.Error."""
    return _mooncake(lines) if form == "mooncake" else _csv(form, lines)


def _csv(name: str, lines: Iterable[str]) -> Rows:
    form, reader = _CSV[name], csv.reader(lines)
    header = [column.strip() for column in next(reader, [])]
    missing = _missing(form, set(header))
    if missing:
        raise HeaderError(f"line 1 must name the columns {_columns(name)}; {missing} is missing")
    time_name = next(column for column in form.times if column in header)
    read_time = form.times[time_name]
    time, prompt, output = header.index(time_name), header.index(form.prompt), header.index(form.output)
    for row in reader:
        if not row:
            continue
        try:
            if len(row) != len(header):
                raise ValueError(f"{len(header)} columns are needed, not {len(row)}")
            yield TraceRow(
                read_time(time_name, row[time]), tokens(form.prompt, row[prompt]), tokens(form.output, row[output])
            )
        except ValueError as error:
            yield BadRow(reader.line_num, str(error))


def _mooncake(lines: Iterable[str]) -> Rows:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield _object(json.loads(line.strip()))
        except json.JSONDecodeError as error:
            yield BadRow(number, f"it is no JSON object ({error.msg} at character {error.pos + 1})")
        except (ValueError, RecursionError) as error:
            yield BadRow(number, str(error))


def _object(data: Any) -> TraceRow:
    if not isinstance(data, dict):
        raise ValueError("it must be a JSON object")
    time = data.get("timestamp")
    if isinstance(time, bool) or not isinstance(time, int | float) or not 0 <= time <= LONGEST_TIME_MS:
        raise ValueError(f"timestamp must be milliseconds of at least 0, not {time!r}")
    prompt, output = _length(data, "input_length"), _length(data, "output_length")
    prefix = data.get("hash_ids", [])
    if not isinstance(prefix, list) or not all(type(item) is int and 0 <= item < 2**31 - 2 for item in prefix):
        raise ValueError("hash_ids must be a list of whole numbers from 0 to 2147483645")
    if prefix and len(prefix) != -(-prompt // PREFIX_BLOCK):
        blocks = -(-prompt // PREFIX_BLOCK)
        raise ValueError(f"hash_ids must be {blocks}, one per {PREFIX_BLOCK} tokens of {prompt}, not {len(prefix)}")
    return TraceRow(round(time * 10**6), prompt, output, tuple(prefix))


def _length(data: Mapping[str, Any], name: str) -> int:
    value = data.get(name)
    if type(value) is not int or not 1 <= value <= MOST_TOKENS:
        raise ValueError(f"{name} must be a whole number from 1 to {MOST_TOKENS}, not {value!r}")
    return value


def _header(line: str) -> set[str]:
    return {column.strip() for column in next(csv.reader([line]), [])}


def _missing(form: _Csv, header: set[str]) -> str:
    """The first column that is not there, "" if all are."""
    if not header & set(form.times):
        return next(iter(form.times))
    return next((column for column in (form.prompt, form.output) if column not in header), "")


def _columns(name: str) -> str:
    form = _CSV[name]
    return ", ".join((next(iter(form.times)), form.prompt, form.output))
