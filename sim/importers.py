"""Reads what other engines recorded about themselves, as runs of this project (`asyncsched.runs`).

    a folder with meta.json and requests.jsonl   LLMServingSim's bench of vLLM: one line per request, engine's own times
    a .json file                                 `vllm bench serve --save-result --save-detailed`: the client's times

Nothing is guessed in silence: what a file does not say is left out of `engine`, and `notes` says so. A line that cannot
be used is an error with file and line, never skipped. Steps are in neither format, so imported runs have none.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from asyncsched.config import FIELD_NAMES
from asyncsched.errors import ConfigError
from asyncsched.runs import RequestLog, Run, RunInfo

META, REQUESTS = "meta.json", "requests.jsonl"
TOKENS = ("input_toks", "output_toks")
TIMES = ("arrival_time", "queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
DETAILS = ("input_lens", "output_lens", "ttfts", "itls", "start_times")
MOST_TOKENS = 10**9
LATEST_S = 1e11  # seconds; every clock in use is far below, and nanoseconds still fit an int64
NULL_BLOCKS = 1  # vLLM's num_gpu_blocks counts one that is never handed out
ASYNC_SINCE = (0, 14)  # from this version on, vLLM schedules asynchronously unless told not to

# vLLM's name -> the name here. Looked up in the resolved configuration, which has them all, then in what was asked for.
_SETTINGS = {
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_model_len": "max_model_len",
    "block_size": "block_size",
    "enable_prefix_caching": "enable_prefix_caching",
    "enable_chunked_prefill": "enable_chunked_prefill",
    "policy": "admission",
}
# vLLM's defaults, for what a file does not say. There is none for the number of KV blocks.
_DEFAULTS = {"block_size": 16, "enable_prefix_caching": True, "enable_chunked_prefill": True, "admission": "fcfs"}
# What changes decisions in ways that the scheduler here has no word for, and the value that does not.
_PLAIN = {
    "data_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "speculative_config": None,
    "kv_transfer_config": None,
    "long_prefill_token_threshold": 0,
}


def import_run(source: str | Path, engine: Mapping[str, Any] | None = None) -> Run:
    """Any of the formats above. `engine` adds settings, by EngineConfig's names, and overrides the file's.

    Raises ConfigError.
    """
    path = Path(source)
    for name in engine or {}:
        if name not in FIELD_NAMES:
            raise ConfigError(f"engine.{name}", (engine or {})[name], f"use one of {', '.join(FIELD_NAMES)}")
    if path.suffix == ".json" and not path.is_dir():
        return import_vllm_serve(path, engine or {})
    return import_bench_folder(path, engine or {})


def import_bench_folder(folder: Path, engine: Mapping[str, Any]) -> Run:
    """One run of LLMServingSim's bench. Raises ConfigError.

    Its arrival times are on the wall clock and the rest on the engine's. The two are aligned on the first request,
    which is taken to be queued as it arrives; whatever comes later plays no part in that.
    """
    where = folder / META
    meta = _object(where, _text(where))
    requests = _bench_requests(folder / REQUESTS)
    resolved = meta.get("resolved_config")
    asked = meta.get("engine_kwargs")
    tables = [t for t in (*(resolved.values() if isinstance(resolved, dict) else ()), asked) if isinstance(t, dict)]
    facts: dict[str, Any] = {}
    for table in reversed(tables):
        facts |= {key: value for key, value in table.items() if value is not None or key not in facts}
    _check_plain(where, facts)
    kv_cache = meta.get("kv_cache")
    settings = {ours: facts[theirs] for theirs, ours in _SETTINGS.items() if facts.get(theirs) is not None}
    notes = []
    blocks = kv_cache.get("num_gpu_blocks") if isinstance(kv_cache, dict) else None
    blocks = facts.get("num_gpu_blocks") if blocks is None else blocks
    if blocks is not None:
        settings["num_blocks"] = _whole(f"{where}: num_gpu_blocks", blocks, least=NULL_BLOCKS + 1) - NULL_BLOCKS
    if isinstance(facts.get("async_scheduling"), bool):
        settings["depth"] = 2 if facts["async_scheduling"] else 1
    elif (version := _version(meta.get("vllm_version"))) is not None:
        settings["depth"] = 2 if version >= ASYNC_SINCE else 1
        notes.append(f"depth {settings['depth']} follows from vLLM's version {meta['vllm_version']}")
    settings |= engine
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if name not in settings:
            raise ConfigError(f"{where}: engine_kwargs.{name}", None, "it is missing")
        _whole(f"{where}: {name}", settings[name], least=1)
    for name in ("num_blocks", "max_model_len", "depth"):
        if name not in settings:
            notes.append(f"the file does not say {name}")
    for name, value in _DEFAULTS.items():
        if name not in settings:
            settings[name] = value
            notes.append(f"{name} = {value} is vLLM's default, the file does not say")
    times = requests["times"]
    offset = times[0, 1] - times[0, 0]
    start = times[0, 1]
    times[:, 0] += offset
    nanoseconds = np.rint((times - start) * 1e9).astype(np.int64)
    arrival = np.maximum(nanoseconds[:, 0], 0)
    log = _log(
        folder / REQUESTS,
        requests["ids"],
        arrival_ns=arrival,
        prompt_tokens=requests["tokens"][:, 0],
        output_tokens=requests["tokens"][:, 1],
        scheduled_ns=np.maximum(nanoseconds[:, 2], 0),
        first_ns=nanoseconds[:, 3],
        last_ns=nanoseconds[:, 4],
    )
    info = RunInfo(
        name=folder.name or folder.resolve().name,
        source="llmservingsim-bench",
        engine=settings,
        device=meta["hardware"] if isinstance(meta.get("hardware"), dict) else {},
        versions={"vllm": meta["vllm_version"]} if isinstance(meta.get("vllm_version"), str) else {},
        model={"name": meta["model"]} if isinstance(meta.get("model"), str) else {},
        workload={"dataset": meta["dataset_path"]} if isinstance(meta.get("dataset_path"), str) else {},
        makespan_ns=int(log.last_ns.max()),
        notes=tuple(notes),
    )
    return Run(info=info, requests=log)


def import_vllm_serve(path: Path, engine: Mapping[str, Any]) -> Run:
    """A result of vLLM's serving benchmark. It says nothing about the engine's settings: `engine` has to. Requests that
    failed are left out, with a note. Raises ConfigError."""
    data = _object(path, _text(path))
    missing = [name for name in DETAILS if name not in data]
    if missing:
        allowed = "it is missing: the benchmark must run with --save-result --save-detailed"
        raise ConfigError(f"{path}: {missing[0]}", None, allowed)
    columns = {name: data[name] for name in DETAILS}
    count = len(columns["input_lens"]) if isinstance(columns["input_lens"], list) else 0
    for name, column in columns.items():
        if not isinstance(column, list) or len(column) != count or not count:
            raise ConfigError(f"{path}: {name}", column, "each of the lists needs one entry per request")
    errors = data.get("errors")
    failed = [bool(e) for e in errors] if isinstance(errors, list) and len(errors) == count else [False] * count
    rows = []
    for number in range(count):
        at = f"{path}: request {number}"
        if failed[number]:
            continue
        gaps = columns["itls"][number]
        if not isinstance(gaps, list):
            raise ConfigError(f"{at}: itls", gaps, "it must be a list of seconds")
        gaps = [_seconds(f"{at}: itls", gap) for gap in gaps]
        rows.append(
            (
                _seconds(f"{at}: start_times", columns["start_times"][number]),
                _whole(f"{at}: input_lens", columns["input_lens"][number], least=1),
                _whole(f"{at}: output_lens", columns["output_lens"][number], least=1),
                _seconds(f"{at}: ttfts", columns["ttfts"][number]),
                gaps,
                number,
            )
        )
    if not rows:
        raise ConfigError(f"{path}: errors", f"{count} requests", "all of them failed")
    rows.sort(key=lambda row: (row[0], row[5]))
    start = np.array([row[0] for row in rows])
    arrival = np.rint((start - start[0]) * 1e9).astype(np.int64)
    first = arrival + np.rint(np.array([row[3] for row in rows]) * 1e9).astype(np.int64)
    steps = [np.rint(np.array(row[4]) * 1e9).astype(np.int64) for row in rows]
    last = first + np.array([int(gaps.sum()) for gaps in steps])
    outputs = np.array([row[2] for row in rows], dtype=np.int64)
    notes = ["times are the client's: they include the way to the server and back"]
    if sum(failed):
        notes.append(f"{sum(failed)} of {count} requests failed and are left out")
    whole = all(len(gaps) == tokens - 1 for gaps, tokens in zip(steps, outputs.tolist(), strict=True))
    if not whole:
        notes.append("some chunks held several tokens: only first and last token are kept")
    log = _log(
        path,
        [f"{row[5]}" for row in rows],
        arrival_ns=arrival,
        prompt_tokens=np.array([row[1] for row in rows], dtype=np.int64),
        output_tokens=outputs,
        first_ns=first,
        last_ns=last,
        gaps_ns=tuple(steps) if whole else (),
    )
    info = RunInfo(
        name=path.stem,
        source="vllm-bench-serve",
        engine=dict(engine),
        model={"name": data["model_id"]} if isinstance(data.get("model_id"), str) else {},
        workload={key: data[key] for key in ("request_rate", "burstiness", "max_concurrency") if key in data},
        makespan_ns=int(last.max()),
        notes=tuple(notes),
    )
    return Run(info=info, requests=log)


# ---- reading ---------------------------------------------------------------------------------------------------------


def _bench_requests(path: Path) -> dict[str, Any]:
    """ids, tokens int64[n, 2] and times float64[n, 5] in the order of TOKENS and TIMES, by arrival."""
    ids, tokens, times = [], [], []
    for number, line in enumerate(_text(path).splitlines(), 1):
        if not line.strip():
            continue
        at = f"{path}:{number}"
        row = _object(at, line)
        for name in ("request_id", *TOKENS, *TIMES):
            if name not in row:
                raise ConfigError(f"{at}: {name}", None, "it is missing")
        if not isinstance(row["request_id"], str) or not row["request_id"]:
            raise ConfigError(f"{at}: request_id", row["request_id"], "it must be text")
        if row["request_id"] in ids:
            raise ConfigError(f"{at}: request_id", row["request_id"], "it is in the file twice")
        moments = [_seconds(f"{at}: {name}", row[name]) for name in TIMES]
        for earlier, later in zip(range(1, 4), range(2, 5), strict=True):
            if moments[later] < moments[earlier]:
                allowed = f"it cannot be before {TIMES[earlier]} {moments[earlier]!r}"
                raise ConfigError(f"{at}: {TIMES[later]}", moments[later], allowed)
        ids.append(row["request_id"])
        tokens.append([_whole(f"{at}: {name}", row[name], least=1) for name in TOKENS])
        times.append(moments)
    if not ids:
        raise ConfigError(str(path), "", "it must hold at least one request")
    order = sorted(range(len(ids)), key=lambda n: (times[n][0], n))
    return {
        "ids": [ids[n] for n in order],
        "tokens": np.array(tokens, dtype=np.int64)[order],
        "times": np.array(times, dtype=np.float64)[order],
    }


def _log(where: Path, ids: list[str], **columns: Any) -> RequestLog:
    """The requests; what is wrong with them names the file."""
    try:
        return RequestLog.from_outside(ids, **columns)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.field}", error.value, error.allowed) from None


def _check_plain(where: Path, facts: Mapping[str, Any]) -> None:
    for name, plain in _PLAIN.items():
        if facts.get(name, plain) not in (plain, None):
            allowed = f"only {name} = {plain} can be simulated"
            raise ConfigError(f"{where}: {name}", facts[name], allowed)


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = path.read_bytes().count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}", "a byte", "it must be UTF-8 text") from None
    except OSError as error:
        use = f"use a .json of vllm bench serve, or a folder with {META} and {REQUESTS}"
        raise ConfigError("log", str(path), f"it cannot be read ({error.strerror}); {use}") from None


def _object(where: str | Path, text: str) -> dict[str, Any]:
    """One JSON object; NaN, infinities and keys that appear twice are refused."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as error:
        place = where if isinstance(where, str) else f"{where}:{error.lineno}"
        raise ConfigError(str(place), error.msg, "it must be one JSON object") from None
    except RecursionError:
        raise ConfigError(str(where), "nested too deeply", "it must be one JSON object") from None
    except ValueError as error:
        raise ConfigError(str(where), str(error), "it must be one JSON object of finite numbers") from None
    if not isinstance(value, dict):
        raise ConfigError(str(where), value, "it must be one JSON object")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)} twice")
    return value


def _number(field: str, value: object, good: Callable[[float], bool], allowed: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not good(value):  # type: ignore[arg-type]  # checked before
        raise ConfigError(field, value, allowed)
    return value  # type: ignore[return-value]  # checked above


def _seconds(field: str, value: object) -> float:
    return float(_number(field, value, lambda x: 0 <= x <= LATEST_S, f"use seconds from 0 to {LATEST_S:g}"))


def _version(text: object) -> tuple[int, ...] | None:
    match = re.match(r"(\d+)\.(\d+)", text) if isinstance(text, str) else None
    return tuple(int(part) for part in match.groups()) if match else None


def _whole(field: str, value: object, *, least: int) -> int:
    allowed = f"use a whole number from {least} to {MOST_TOKENS}"
    return int(_number(field, value, lambda x: isinstance(x, int) and least <= x <= MOST_TOKENS, allowed))
