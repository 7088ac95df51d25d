"""Result files, as `report` takes them: what the commands print with --json, sweeps' result files, and traces.

A file is told by its content, never by its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from asyncsched.errors import ConfigError

Data = Mapping[str, Any]

KINDS = {
    "run": "the --json of simulate",
    "sweep": "the --json or the --results of sweep",
    "capacity": "the --json of capacity",
    "advise": "the --json of advise",
    "trace": "the --trace of simulate",
}


class Result(NamedTuple):
    """`kind` is a key of KINDS, `name` what the page calls the result."""

    kind: str
    name: str
    data: Data


def read_result(path: Path) -> Result:
    """Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _refusal(path, f"it cannot be read ({reason})") from None
    data = _parse(path, text)
    if "traceEvents" in data:
        return Result("trace", path.stem, data)
    if data.get("asyncsched") in ("capacity", "advise", "sweep"):
        return Result(str(data["asyncsched"]), path.stem, data)
    if {"vary", "points", "scenario"} <= data.keys():
        return Result("sweep", path.stem, data)
    if {"makespan_s", "idle_s", "busy_s", "scenario"} <= data.keys():
        return Result("run", path.stem, data)
    raise _refusal(path, f"it is none of: {'; '.join(KINDS.values())}")


def _parse(path: Path, text: str) -> dict[str, Any]:
    """One JSON object; the lines of a sweep's result file become one."""
    if not text.strip():
        raise _refusal(path, "it is empty")
    try:
        data = json.loads(text)
    except ValueError as error:
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            objects = [json.loads(line) for line in lines]
        except ValueError:
            raise _refusal(path, f"it is no JSON ({error})") from None
        if not all(isinstance(item, dict) for item in objects) or "asyncsched" not in objects[0]:
            raise _refusal(path, "its lines are not those of a sweep's result file") from None
        return _sweep(objects[1:])
    if not isinstance(data, dict):
        raise _refusal(path, "it is no JSON object")
    return _sweep([]) if data.keys() == {"asyncsched", "version"} else data


def _sweep(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Points as the --json of a sweep has them, the last line of each key counting."""
    latest = {line.get("key"): line for line in lines}
    points = [
        {**line.get("summary", {}), **line.get("point", {}), "error": line.get("error", "")} for line in latest.values()
    ]
    keys = dict.fromkeys(key for line in latest.values() for key in line.get("point", {}))
    return {"asyncsched": "sweep", "vary": {key: [] for key in keys}, "points": points, "scenario": {}}


def _refusal(path: Path, allowed: str) -> ConfigError:
    return ConfigError("RESULT", str(path), allowed)
