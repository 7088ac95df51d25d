"""What jobs produced: text or JSON lines on stdout, and a file of lines that keeps what there was whatever happens."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any

from asyncsched.cli.prompts import Job
from asyncsched.cli.running import Listener
from asyncsched.errors import ConfigError

if TYPE_CHECKING:
    from executors.outputs import CompletionOutput, RequestOutput, StreamPiece


class LineFile:
    """JSON lines, put in place of the file when the `with` block ends: all that were written, however it ends.

    They are written beside it meanwhile, so there is something left even where the process is killed. A block that
    fails before its first line leaves the old file alone.
    """

    def __init__(self, option: str, path: Path) -> None:
        self._option, self._path = option, path
        self._target = path.resolve()  # a link stays one
        self._temporary = self._target.with_name(f".{self._target.name}.{os.getpid()}.part")
        self._file: IO[str] | None = None
        self._lines = 0

    def __enter__(self) -> LineFile:
        try:
            self._file = self._temporary.open("x", encoding="utf-8")
        except OSError as error:
            raise self._unwritable(error) from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        assert self._file is not None  # the block was entered
        try:
            self._file.close()
            if error is None or self._lines:
                self._temporary.replace(self._target)
        except OSError as failure:
            if error is None:
                raise self._unwritable(failure) from None
        finally:
            self._temporary.unlink(missing_ok=True)

    def write(self, value: object) -> None:
        assert self._file is not None  # the block was entered
        try:
            self._file.write(as_line(value))
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from None
        self._lines += 1

    def _unwritable(self, error: OSError) -> ConfigError:
        return ConfigError(self._option, str(self._path), f"it cannot be written ({error.strerror})")


class Answers(Listener):
    """Writes as jobs go on.

    text    stdout gets the text of the outputs, not JSON
    stream  it gets them piece by piece
    file    gets one line per job as it ends; stdout then gets none
    """

    def __init__(self, *, text: bool, stream: bool, file: LineFile | None) -> None:
        self._text, self._stream, self._file = text, stream, file

    def piece(self, job: Job, piece: StreamPiece) -> None:
        if not self._stream:
            return
        if self._text:
            print(piece.text, end="", flush=True)
        elif piece.token_ids or piece.text or piece.output is not None:
            print(as_line(_piece(job, piece)), end="", flush=True)

    def output(self, job: Job, output: RequestOutput) -> None:
        if self._file is not None:
            self._file.write(_record(job, output))
        if self._text:
            self._print_text(output)
        elif not self._stream and self._file is None:
            print(as_line(_record(job, output)), end="", flush=True)

    def _print_text(self, output: RequestOutput) -> None:
        ran = [one for one in output.outputs if one.finish_reason != "rejected"]
        if self._stream:
            print(end="\n" if ran else "", flush=True)  # the pieces are out; this ends their line
            return
        for one in ran:
            print(one.text if len(output.outputs) == 1 else f"[{one.index}] {one.text}", flush=True)


def as_line(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"


def _piece(job: Job, piece: StreamPiece) -> dict[str, Any]:
    line = {"line": job.line, "index": piece.index, "text": piece.text, "token_ids": list(piece.token_ids)}
    return line if piece.output is None else {**line, **_ending(piece.output)}


def _record(job: Job, output: RequestOutput) -> dict[str, Any]:
    prompt: Mapping[str, Any] = (
        {"prompt_token_ids": list(output.prompt_token_ids)} if output.prompt is None else {"prompt": output.prompt}
    )
    return {"line": job.line, **prompt, "outputs": [_completion(one) for one in output.outputs]}


def _completion(one: CompletionOutput) -> dict[str, Any]:
    result = {"index": one.index, "text": one.text, "token_ids": list(one.token_ids), **_ending(one)}
    if one.logprobs is not None:
        result["logprobs"] = [
            {
                "logprob": _finite(token.logprob),
                "rank": token.rank,
                "top": [[other, _finite(logprob)] for other, logprob in token.top],
            }
            for token in one.logprobs
        ]
    result["first_token_s"] = one.metrics.first_token_s
    result["finished_s"] = one.metrics.finished_s
    return result


def _ending(one: CompletionOutput) -> dict[str, Any]:
    ending = {"finish_reason": one.finish_reason, "stop_reason": one.stop_reason}
    return {**ending, "message": one.message} if one.message else ending


def _finite(value: float) -> float | None:
    """JSON knows no infinity."""
    return value if math.isfinite(value) else None
