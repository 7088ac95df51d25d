"""The results of a sweep on disk: a file that is only ever appended to, a line per point, safe once written.

    {"asyncsched": "sweep", "version": "0.1.0"}
    {"key": "5f...", "point": {"host.scale": 2}, "summary": {...}, "error": ""}

The key is a digest of everything a point's result depends on, so a line found in the file need not be run again,
whatever sweep it came from. A sweep that was killed while writing leaves half a line, which the next one cuts off.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

from asyncsched import __version__
from asyncsched.errors import ConfigError
from sim.scenario import Scenario
from sim.trace import path_of

HEADER = {"asyncsched": "sweep", "version": __version__}


class Record(NamedTuple):
    """What a point gave: its summary, or the reason why there is none."""

    point: dict[str, Any]
    summary: dict[str, Any]
    error: str


def point_key(scenario: Scenario) -> str:
    """Equal for equal scenarios, whatever way they were written; a trace counts with its content."""
    data: dict[str, Any] = {**scenario.to_dict(), "description": ""}
    trace = data["workload"].get("trace")
    if trace is not None:
        data["workload"]["trace"] = _content(trace)
    return hashlib.blake2b(json.dumps(data, sort_keys=True).encode(), digest_size=16).hexdigest()


class ResultFile:
    """Opens or makes the file and holds it alone until the `with` block ends. Raises ConfigError.

    records  by key, of what was there and what was added; the last line of a key counts
    cut      whether half a line was cut off its end
    """

    def __init__(self, option: str, path: Path) -> None:
        self.records: dict[str, Record] = {}
        self.cut = False
        self._option, self._path = option, path
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self._file = self._path.open("a+b")
        except OSError as error:
            raise self._refusal(f"it cannot be written ({error.strerror})") from None
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        assert self._file is not None  # the block was entered
        self._file.close()

    def add(self, key: str, record: Record) -> None:
        """Returns when the line is on the disk."""
        self._append({"key": key, **record._asdict()})
        self.records[key] = record

    def _lock(self) -> None:
        assert self._file is not None
        try:
            import fcntl
        except ImportError:  # not a POSIX system: then nobody keeps two sweeps from one file
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise self._refusal("another sweep is writing to it; wait for it, or name another file") from None

    def _read(self) -> None:
        assert self._file is not None
        self._file.seek(0)
        content = self._file.read()
        whole = content.rfind(b"\n") + 1
        if _line(HEADER).startswith(content) and not whole:  # new, or killed while it was
            self._file.truncate(0)
            self._append(HEADER)
            return
        lines = content[:whole].splitlines()
        if not lines or self._parse(lines[0], 1).get("asyncsched") != HEADER["asyncsched"]:
            raise self._refusal("it is no result file of a sweep; name a new file")
        if (version := self._parse(lines[0], 1).get("version")) != __version__:
            raise self._refusal(f"it was written by asyncsched {version}, this is {__version__}; name a new file")
        for number, line in enumerate(lines[1:], 2):
            data = self._parse(line, number)
            try:
                self.records[data["key"]] = Record(data["point"], data["summary"], data["error"])
            except KeyError as error:
                raise self._refusal(f"line {number} has no {error}; name a new file") from None
        if whole < len(content):
            self._file.truncate(whole)
            self.cut = True

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            data = json.loads(line)
        except ValueError:
            data = None
        if not isinstance(data, dict):
            raise self._refusal(f"line {number} is no JSON object; name a new file")
        return data

    def _append(self, value: Mapping[str, object]) -> None:
        assert self._file is not None
        try:
            self._file.write(_line(value))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise self._refusal(f"it cannot be written ({error.strerror})") from None

    def _refusal(self, allowed: str) -> ConfigError:
        return ConfigError(self._option, str(self._path), allowed)


def _line(value: Mapping[str, object]) -> bytes:
    return json.dumps(value, allow_nan=False).encode() + b"\n"


def _content(trace: str) -> str:
    """A digest of a trace's file. One that is not there cannot be run either, and says so then."""
    path = path_of(trace)
    try:
        return _digest(path, path.stat().st_mtime_ns)
    except OSError:
        return trace


@lru_cache(maxsize=16)
def _digest(path: Path, changed: int) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
