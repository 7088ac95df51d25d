"""A trace as it is to be replayed: read, cut, its lines that are no requests left out and counted.

Whatever makes the replay differ from the file is said in a note, never done in silence: lines left out, requests put in
order of time, timestamps spread, lengths clipped.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from asyncsched.errors import ConfigError
from sim.draws import Stream, generator
from sim.trace_formats import PREFIX_BLOCK, BadRow, HeaderError, detect, read_rows
from sim.trace_rows import TraceRow

FIELD = "workload.trace"
FOLDER = Path(__file__).parent / "traces"
PACKAGED = {"azure-conv-500": "azure-conv-500.csv", "mooncake-conv-300": "mooncake-conv-300.jsonl"}
MOST_NAMED = 3  # bad lines that a note names; the others are counted


class Trace(NamedTuple):
    """Requests in order of time, the first at 0 ns, and what was done to the file's."""

    rows: list[TraceRow]
    notes: tuple[str, ...]


class Slice(NamedTuple):
    """Part of a file: `skip` and `limit` count requests in file order, times are seconds after the first request."""

    skip: int = 0
    limit: int | None = None
    start_s: float = 0.0
    duration_s: float | None = None


ALL = Slice()


def path_of(trace: str) -> Path:
    """The file of a packaged trace, or the one named. Raises ConfigError for what no file can be called."""
    if "\0" in trace:
        raise ConfigError(FIELD, trace, "no file has a null byte in its name")
    return FOLDER / PACKAGED[trace] if trace in PACKAGED else Path(trace)


def read_trace(trace: str, form: str = "auto", part: Slice = ALL, *, strict: bool = False) -> Trace:
    """A packaged trace or a file. `strict` stops at the first line that is no request. Raises ConfigError."""
    path = path_of(trace)
    try:
        changed = path.stat().st_mtime_ns
        rows, bad = _read(trace, path, form, part.skip, part.limit, strict, changed)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        allowed = f"it cannot be read ({reason}); use a trace file or one of {', '.join(PACKAGED)}"
        raise ConfigError(FIELD, trace, allowed) from None
    except HeaderError as error:
        raise ConfigError(FIELD, trace, str(error)) from None
    if not rows and part.skip and not bad:
        raise ConfigError("workload.skip", part.skip, f"{trace} has fewer requests")
    if not rows:
        first = f"; line {bad[0].line}: {bad[0].reason}" if bad else ""
        raise ConfigError(FIELD, trace, f"it must hold at least one request{first}")
    notes = _skipped(trace, bad)
    earlier = sum(after.time_ns < before.time_ns for before, after in itertools.pairwise(rows))
    if earlier:
        notes.append(f"{trace}: {earlier} of {len(rows)} requests are earlier than the one before; sorted by time")
    ordered = sorted(rows, key=lambda row: row.time_ns)
    return Trace(_cut(trace, ordered, part), tuple(notes))


def dequantise(rows: list[TraceRow], seed: int) -> tuple[list[TraceRow], str]:
    """Spreads requests that share a timestamp at random over the time up to the next one, and says what it did.

    The time is at most the usual gap between timestamps, their median. Requests keep their order.
    """
    times = np.array([row.time_ns for row in rows], dtype=np.int64)
    values, counts = np.unique(times, return_counts=True)
    if len(values) < 2:
        return rows, "all requests have one timestamp, so nothing says over what time to spread them"
    gaps = np.diff(values)
    usual = int(np.median(gaps))
    room = np.minimum(np.append(gaps, usual), usual)
    draws = generator(seed, Stream.DEQUANTISE).random(len(rows))
    offsets = draws[np.lexsort((draws, times))]  # in order within each timestamp
    spread = times + (offsets * np.repeat(room, counts)).astype(np.int64)
    spread -= spread[0]
    note = f"{len(rows)} requests had {len(values)} timestamps; spread at random over {usual / 1e9:g} s each"
    return [row._replace(time_ns=int(time)) for row, time in zip(rows, spread.tolist(), strict=True)], note


def looks_quantised(rows: list[TraceRow]) -> str:
    """A note where most requests share their timestamp with another, else ""."""
    distinct = len({row.time_ns for row in rows})
    if len(rows) < 10 or distinct * 2 > len(rows) or distinct < 2:
        return ""
    return f"{len(rows)} requests have only {distinct} timestamps and come in bursts; workload.dequantise spreads them"


def clip(rows: list[TraceRow], max_prompt_tokens: int | None) -> tuple[list[TraceRow], str]:
    """Prompts cut to a longest length, with their prefix, and a note that says how many."""
    if max_prompt_tokens is None:
        return rows, ""
    most = max_prompt_tokens
    longer = sum(row.prompt_tokens > most for row in rows)
    lost = sum(max(row.prompt_tokens - most, 0) for row in rows)
    blocks = -(-most // PREFIX_BLOCK)
    clipped = [row._replace(prompt_tokens=min(row.prompt_tokens, most), prefix=row.prefix[:blocks]) for row in rows]
    total = sum(row.prompt_tokens for row in rows)
    note = f"{longer} of {len(rows)} prompts were clipped to {most} tokens, {lost / total:.1%} of all prompt tokens"
    return clipped, note if longer else ""


@lru_cache(maxsize=4)  # a sweep builds the same workload again and again
def _read(
    trace: str, path: Path, form: str, skip: int, limit: int | None, strict: bool, changed: int
) -> tuple[tuple[TraceRow, ...], tuple[BadRow, ...]]:
    """Requests and bad lines, up to the last request asked for. `changed` tells a file from what it was before."""
    with path.open(newline="", encoding="utf-8-sig") as lines:
        first = next(lines, "")
        whole = itertools.chain([first], lines)
        found = read_rows(detect(first) if form == "auto" else form, whole)
        rows: list[TraceRow] = []
        bad: list[BadRow] = []
        for row in _up_to(found, None if limit is None else skip + limit):
            if isinstance(row, TraceRow):
                rows.append(row)
            elif strict:
                raise ConfigError(FIELD, f"{trace}, line {row.line}", row.reason)
            else:
                bad.append(row)
    return tuple(rows[skip:]), tuple(bad)


def _up_to(found: Iterable[TraceRow | BadRow], most: int | None) -> Iterable[TraceRow | BadRow]:
    """Stops behind the last request asked for: what follows need not even be readable."""
    count = 0
    if most == count:
        return
    for row in found:
        yield row
        count += isinstance(row, TraceRow)
        if count == most:
            return


def _skipped(trace: str, bad: tuple[BadRow, ...]) -> list[str]:
    if not bad:
        return []
    named = "; ".join(f"line {row.line}: {row.reason}" for row in bad[:MOST_NAMED])
    more = f"; and {len(bad) - MOST_NAMED} more" if len(bad) > MOST_NAMED else ""
    lines = "line is no request and was" if len(bad) == 1 else "lines are no requests and were"
    return [f"{trace}: {len(bad)} {lines} left out ({named}{more})"]


def _cut(trace: str, rows: list[TraceRow], part: Slice) -> list[TraceRow]:
    """The rows in the slice's time, counted from its first."""
    begin = rows[0].time_ns + round(part.start_s * 1e9)
    end = None if part.duration_s is None else begin + round(part.duration_s * 1e9)
    kept = [row for row in rows if row.time_ns >= begin and (end is None or row.time_ns < end)]
    if not kept:
        last_s = (rows[-1].time_ns - rows[0].time_ns) / 1e9
        span = f"from {part.start_s:g} s" + ("" if part.duration_s is None else f" for {part.duration_s:g} s")
        raise ConfigError(FIELD, trace, f"no request comes {span}; the last one comes at {last_s:g} s")
    first = kept[0].time_ns
    return [row._replace(time_ns=row.time_ns - first) for row in kept]
