"""Prompts and their sampling parameters, from options and from the lines of a file."""

from __future__ import annotations

import codecs
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncsched.errors import ConfigError
from asyncsched.request import SamplingParams, TokenArray

if TYPE_CHECKING:
    from executors.llm import LLM

DEFAULT_MAX_TOKENS = 256  # or what the context has left
SAMPLING = tuple(field.name for field in fields(SamplingParams))
PROMPTS = ("prompt", "prompt_token_ids")


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt to run. `where` says where it was written, "" on the command line; lines of a file count from 1.

    has_length  whether the user said how many tokens; if not, `params.max_tokens` is a default that must fit
    """

    where: str
    line: int
    prompt: str | list[int]
    params: SamplingParams
    has_length: bool


def parse_number(option: str, text: str) -> int | float:
    """A whole number where it is one; what it may be, the parameter it is for decides. Raises ConfigError."""
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    raise ConfigError(option, text, "use a number")


def job_of(where: str, line: int, prompt: str | list[int], sampling: Mapping[str, Any]) -> Job:
    """Raises ConfigError."""
    if isinstance(prompt, str):
        check_text("prompt", prompt)
    params = SamplingParams(**{"max_tokens": DEFAULT_MAX_TOKENS, **sampling})
    return Job(where, line, prompt, params, "max_tokens" in sampling)


def check_text(name: str, text: str) -> None:
    """Raises ConfigError for halves of characters, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(name, text, "it is no valid text: use UTF-8") from None


def fitted(llm: LLM, job: Job) -> tuple[SamplingParams, TokenArray]:
    """The job's parameters for this model and its prompt's tokens; where the user gave no length, one that fits.

    Raises ConfigError.
    """
    tokens = llm.check(job.prompt, job.params)
    if job.has_length:
        return job.params, tokens
    room = llm.config.max_model_len - len(tokens)
    return replace(job.params, max_tokens=max(1, min(DEFAULT_MAX_TOKENS, room))), tokens


def read_jobs(path: Path, sampling: Mapping[str, Any]) -> tuple[list[Job], list[str]]:
    """The lines of a JSONL file as jobs, and what is wrong with the lines that are none. Raises ConfigError.

    What a line says about sampling comes before `sampling`.
    """
    try:
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
    except OSError as error:
        raise ConfigError("--prompts", str(path), f"it cannot be read ({error.strerror}); use a JSONL file") from None
    jobs, problems = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path.name}, line {number}"
        try:
            jobs.append(_read_job(where, number, line, sampling))
        except ConfigError as error:
            problems.append(f"{where}: {error}")
    if not jobs and not problems:
        raise ConfigError("--prompts", str(path), 'there is no line in it; write one {"prompt": "..."} per line')
    return jobs, problems


def _read_job(where: str, number: int, line: bytes, sampling: Mapping[str, Any]) -> Job:
    try:
        data = json.loads(line.decode("utf-8"), object_pairs_hook=_object)
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError("JSON", _shortened(line), f"it cannot be read ({error})") from None
    if not isinstance(data, dict):
        raise ConfigError("JSON", _shortened(line), 'use an object, as in {"prompt": "..."}')
    for name in data:
        if name not in (*PROMPTS, *SAMPLING):
            near = difflib.get_close_matches(name, (*PROMPTS, *SAMPLING)) or (*PROMPTS, *SAMPLING)
            raise ConfigError("field", name, f"there is no such field; there are {', '.join(near)}")
    given = [name for name in PROMPTS if name in data]
    if len(given) != 1:
        raise ConfigError("prompt", given, "give one of prompt and prompt_token_ids")
    prompt = data.pop(given[0])
    if given == ["prompt"] and not isinstance(prompt, str):
        raise ConfigError("prompt", prompt, "use a string; token ids go into prompt_token_ids")
    if given == ["prompt_token_ids"] and not _is_token_ids(prompt):
        raise ConfigError("prompt_token_ids", prompt, "use a list of token ids")
    if isinstance(data.get("logit_bias"), dict):
        data["logit_bias"] = {_number_or_text(token): bias for token, bias in data["logit_bias"].items()}
    return job_of(where, number, prompt, {**sampling, **data})


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Raises ConfigError for a key that is there twice: one of its values would be lost."""
    data = dict(pairs)
    for name, _ in pairs if len(data) < len(pairs) else ():
        if sum(name == other for other, _ in pairs) > 1:
            raise ConfigError("field", name, "it is there twice")
    return data


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def _number_or_text(text: str) -> int | str:
    """JSON has no other keys than texts."""
    return int(text) if text.isascii() and text.isdigit() else text


def _shortened(line: bytes) -> str:
    text = line.decode("utf-8", errors="replace").strip()
    return text if len(text) <= 40 else f"{text[:37]}..."
