"""Runs as files: a folder of small tables, or many runs in one compressed archive.

    run.json        settings, device, versions, model (`RunInfo`), with the schema's number
    requests.csv    one line per request (`RequestLog`); gaps_ns is a list separated by spaces
    steps.csv       one line per step (`StepLog`); a field without a value is empty
    decisions.txt   the scheduler's decision log

A folder holds the tables compressed (`.gz`); an archive (`.tar.xz`) holds a folder of plain tables per run, and
`archive.tar.xz::name` is one of them. Whatever cannot be read is one ConfigError that names file, line and field.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import lzma
import math
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from asyncsched.errors import ConfigError
from asyncsched.runs import FINISHES, NO_STEPS, STEP_COLUMNS, UNKNOWN, IntArray, RequestLog, Run, RunInfo, StepLog

SCHEMA = 1
INFO, REQUESTS, STEPS, DECISIONS = "run.json", "requests.csv", "steps.csv", "decisions.txt"
ARCHIVE = ".tar.xz"
IN_ARCHIVE = "::"
MAX_BYTES = 2**29  # of one table, unpacked

_TEXTS = ("request_id", "finish")
_REQUEST_COLUMNS = tuple(one.name for one in fields(RequestLog))
_OPTIONAL = (
    "gaps_ns",
    "priority",
    "scheduled_ns",
    "entered_plan",
    "entered_commits",
    "aborted_plan",
    "aborted_commits",
)
_Files = Mapping[str, bytes]


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_run(folder: Path, run: Run) -> None:
    """Makes the folder, which must not exist or be empty; raises ConfigError. A failure leaves no run.json."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError("record", str(folder), "the folder is not empty; name a new one")
        files = encode(run)
        for name in (REQUESTS, STEPS, DECISIONS):
            if name in files:
                (folder / f"{name}.gz").write_bytes(gzip.compress(files[name], mtime=0))
        (folder / INFO).write_bytes(files[INFO])
    except OSError as error:
        raise ConfigError("record", str(folder), f"it cannot be written ({error.strerror})") from None


def write_archive(path: Path, runs: Iterable[Run]) -> None:
    """All of them in one file, by name. Raises ConfigError."""
    content = io.BytesIO()
    names: set[str] = set()
    with tarfile.open(fileobj=content, mode="w:xz") as archive:
        for run in runs:
            if run.info.name in names:
                raise ConfigError("name", run.info.name, "two runs of an archive have this name")
            names.add(run.info.name)
            for name, data in encode(run).items():
                member = tarfile.TarInfo(f"{run.info.name}/{name}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.write_bytes(content.getvalue())
        temporary.replace(path)
    except OSError as error:
        raise ConfigError("archive", str(path), f"it cannot be written ({error.strerror})") from None
    finally:
        temporary.unlink(missing_ok=True)


def encode(run: Run) -> dict[str, bytes]:
    """The run's files by name, not compressed."""
    info = {"schema": SCHEMA, **asdict(run.info)}
    files = {INFO: (json.dumps(info, indent=1, allow_nan=False, default=_plain) + "\n").encode()}
    requests, log = io.StringIO(), run.requests
    columns = [name for name in _REQUEST_COLUMNS if name != "gaps_ns" or log.gaps_ns]
    writer = csv.writer(requests, lineterminator="\n")
    writer.writerow(columns)
    for number in range(len(log)):
        writer.writerow([_field(name, getattr(log, name)[number]) for name in columns])
    files[REQUESTS] = requests.getvalue().encode()
    if len(run.steps):
        steps = io.StringIO()
        writer = csv.writer(steps, lineterminator="\n")
        writer.writerow(STEP_COLUMNS)
        values = [run.steps[name].tolist() for name in STEP_COLUMNS]
        writer.writerows([["" if v == UNKNOWN else v for v in row] for row in zip(*values, strict=True)])
        files[STEPS] = steps.getvalue().encode()
    if run.decisions:
        files[DECISIONS] = ("\n".join(run.decisions) + "\n").encode()
    return files


def _field(name: str, value: Any) -> object:
    if name in _TEXTS:
        return value
    if name == "gaps_ns":
        return " ".join(map(str, value.tolist()))
    return "" if value == UNKNOWN else int(value)


def _plain(value: object) -> object:
    """Settings may hold tuples within tables, and numpy's numbers."""
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be written")


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_run(source: str | Path) -> Run:
    """A folder, `archive.tar.xz::name`, or an archive with one run. Raises ConfigError."""
    path, separator, name = str(source).partition(IN_ARCHIVE)
    if separator or path.endswith(ARCHIVE):
        runs = _read_archive(Path(path))
        if not separator and len(runs) == 1:
            name = next(iter(runs))
        if name not in runs:
            raise ConfigError("run", str(source), f"use {path}{IN_ARCHIVE} with one of {', '.join(sorted(runs))}")
        return decode(runs[name], f"{path}{IN_ARCHIVE}{name}")
    return decode(_read_folder(Path(path)), path)


def read_runs(source: str | Path) -> list[Run]:
    """Every run of an archive, in order of name, or the one that is named. Raises ConfigError."""
    path = str(source)
    if IN_ARCHIVE in path or not path.endswith(ARCHIVE):
        return [read_run(path)]
    runs = _read_archive(Path(path))
    return [decode(runs[name], f"{path}{IN_ARCHIVE}{name}") for name in sorted(runs)]


def decode(files: _Files, where: str) -> Run:
    """A run from its files by name. `where` begins the field in errors."""
    for name in (INFO, REQUESTS):
        if name not in files:
            raise ConfigError("run", where, f"it has no {name}")
    info = _info(files[INFO], f"{where}/{INFO}")
    try:
        requests = _requests(files[REQUESTS], f"{where}/{REQUESTS}")
        steps = _steps(files[STEPS], f"{where}/{STEPS}") if STEPS in files else NO_STEPS
    except _WhereError as error:
        raise error.problem from None
    decisions = _text(files.get(DECISIONS, b""), f"{where}/{DECISIONS}").splitlines()
    return Run(info=info, requests=requests, steps=steps, decisions=tuple(decisions))


def _read_folder(folder: Path) -> dict[str, bytes]:
    try:
        if not folder.is_dir():
            raise ConfigError("run", str(folder), f"use the folder of a run, or an archive that ends in {ARCHIVE}")
        files = {}
        for name in (INFO, REQUESTS, STEPS, DECISIONS):
            plain, packed = folder / name, folder / f"{name}.gz"
            if plain.exists():
                files[name] = plain.read_bytes()
            elif packed.exists():
                files[name] = _unpack(packed)
    except OSError as error:
        raise ConfigError("run", str(folder), f"it cannot be read ({error.strerror})") from None
    return files


def _unpack(path: Path) -> bytes:
    try:
        with gzip.open(path) as file:
            data = file.read(MAX_BYTES + 1)
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise ConfigError("run", str(path), "it is not a whole gzip file") from None
    if len(data) > MAX_BYTES:
        raise ConfigError("run", str(path), f"a table may have {MAX_BYTES} bytes at most")
    return data


def _read_archive(path: Path) -> dict[str, dict[str, bytes]]:
    runs: dict[str, dict[str, bytes]] = {}
    try:
        with tarfile.open(path, mode="r:xz") as archive:
            for member in archive:
                folder, _, name = member.name.rpartition("/")
                file = archive.extractfile(member) if member.isfile() else None
                if file is None or not folder or name not in (INFO, REQUESTS, STEPS, DECISIONS):
                    raise ConfigError(
                        "run", f"{path}{IN_ARCHIVE}{member.name}", "an archive holds folders of runs only"
                    )
                if member.size > MAX_BYTES:
                    raise ConfigError("run", f"{path}{IN_ARCHIVE}{member.name}", f"more than {MAX_BYTES} bytes")
                runs.setdefault(folder, {})[name] = file.read()
    except OSError as error:
        reason = error.strerror or "it is not a whole archive"
        raise ConfigError("run", str(path), f"it cannot be read ({reason})") from None
    except (tarfile.TarError, lzma.LZMAError, EOFError):
        raise ConfigError("run", str(path), "it is not a whole .tar.xz archive") from None
    if not runs:
        raise ConfigError("run", str(path), "the archive holds no run")
    return runs


def _text(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{where}:{line}", data[error.start : error.start + 1], "it must be UTF-8 text") from None


def _info(data: bytes, where: str) -> RunInfo:
    try:
        content = json.loads(_text(data, where))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}:{error.lineno}", error.msg, "it must be one JSON object") from None
    if not isinstance(content, dict):
        raise ConfigError(where, content, "it must be one JSON object")
    schema = content.pop("schema", None)
    if schema != SCHEMA:
        raise ConfigError(f"{where}: schema", schema, f"this version reads schema {SCHEMA}")
    known = {one.name: one for one in fields(RunInfo)}
    for key in content:
        if key not in known:
            raise ConfigError(f"{where}: {key}", content[key], f"unknown key; there are {', '.join(known)}")
    for key in ("name", "source", "engine", "makespan_ns"):
        if key not in content:
            raise ConfigError(f"{where}: {key}", None, "it is missing")
    for key, value in content.items():
        _check_type(f"{where}: {key}", str(known[key].type), value)
    if "notes" in content:
        content["notes"] = tuple(content["notes"])
    try:
        return RunInfo(**content)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.field}", error.value, error.allowed) from None


def _check_type(field: str, kind: str, value: object) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    good = {
        "str": (isinstance(value, str), "text"),
        "int": (number and isinstance(value, int), "a whole number"),
        "float": (number, "a number"),
        "Mapping[str, Any]": (isinstance(value, dict), "a table of keys"),
        "tuple[str, ...]": (isinstance(value, list) and all(isinstance(v, str) for v in value), "a list of texts"),
    }[kind]
    if not good[0]:
        raise ConfigError(field, value, f"it must be {good[1]}")


class _WhereError(Exception):
    """A problem that already says where it is."""

    def __init__(self, problem: ConfigError) -> None:
        self.problem = problem


def _rows(data: bytes, where: str, required: Iterable[str], known: Iterable[str]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of a table whose columns are all known and include the required ones."""
    lines = list(csv.reader(io.StringIO(_text(data, where)), strict=False))
    if not lines:
        raise _WhereError(ConfigError(where, "", "the file is empty; its first line names the columns"))
    header, *rows = lines
    known = list(known)
    for name in header:
        if name not in known or header.count(name) > 1:
            raise _WhereError(ConfigError(f"{where}:1", name, f"use each of {', '.join(known)} once"))
    for name in required:
        if name not in header:
            raise _WhereError(ConfigError(f"{where}:1", header, f"column {name} is missing"))
    for number, row in enumerate(rows, 2):
        if len(row) != len(header):
            raise _WhereError(ConfigError(f"{where}:{number}", len(row), f"the line must have {len(header)} fields"))
    return header, rows


def _integers(rows: list[list[str]], column: int, name: str, where: str) -> IntArray:
    values = np.empty(len(rows), dtype=np.int64)
    for number, row in enumerate(rows):
        text = row[column]
        if not text:
            values[number] = UNKNOWN
        elif text.isascii() and text.isdigit() and len(text) <= 18:
            values[number] = int(text)
        else:
            allowed = "use a whole number of at least 0"
            raise _WhereError(ConfigError(f"{where}:{number + 2}: {name}", text, allowed))
    return values


def _requests(data: bytes, where: str) -> RequestLog:
    required = [name for name in _REQUEST_COLUMNS if name not in _OPTIONAL]
    header, rows = _rows(data, where, required, _REQUEST_COLUMNS)
    columns: dict[str, Any] = {}
    for column, name in enumerate(header):
        if name == "gaps_ns":
            columns[name] = tuple(_gaps(row[column], f"{where}:{number}") for number, row in enumerate(rows, 2))
        elif name in _TEXTS:
            columns[name] = tuple(row[column] for row in rows)
        else:
            columns[name] = _integers(rows, column, name, where)
    for number, finish in enumerate(columns["finish"], 2):
        if finish not in FINISHES:
            raise _WhereError(ConfigError(f"{where}:{number}: finish", finish, f"use one of {', '.join(FINISHES)}"))
    for name in _OPTIONAL:
        if name not in columns:
            columns[name] = () if name == "gaps_ns" else np.full(len(rows), UNKNOWN, dtype=np.int64)
    columns["priority"] = np.maximum(columns["priority"], 0)
    try:
        return RequestLog(**columns)
    except ConfigError as error:
        raise _WhereError(ConfigError(f"{where}: {error.field}", error.value, error.allowed)) from None


def _gaps(text: str, where: str) -> IntArray:
    parts = text.split()
    if not all(part.isascii() and part.isdigit() and len(part) <= 18 for part in parts):
        raise _WhereError(ConfigError(f"{where}: gaps_ns", text, "use whole numbers of at least 0"))
    return np.array([int(part) for part in parts], dtype=np.int64)


def _steps(data: bytes, where: str) -> StepLog:
    header, rows = _rows(data, where, STEP_COLUMNS, STEP_COLUMNS)
    columns = {name: _integers(rows, column, name, where) for column, name in enumerate(header)}
    try:
        return StepLog(columns)
    except ConfigError as error:
        raise _WhereError(ConfigError(f"{where}: {error.field}", error.value, error.allowed)) from None
