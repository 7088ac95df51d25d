"""Runs jobs on a loaded model until all have ended, or until the user interrupts."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from asyncsched.cli.prompts import Job, fitted
from asyncsched.errors import AsyncschedError, ConfigError

if TYPE_CHECKING:
    from executors.llm import LLM
    from executors.outputs import RequestOutput, StreamPiece

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130
Progress = Callable[[int, int], None]


@dataclass(slots=True)
class Ended:
    """How many jobs ended how. `tokens` were generated; `bad` could never run, `failed` broke off.

    interrupted  the user stopped the rest of the `started` ones
    """

    started: int = 0
    finished: int = 0
    tokens: int = 0
    bad: int = 0
    failed: int = 0
    interrupted: bool = False

    def add(self, other: Ended) -> None:
        self.started += other.started
        self.finished += other.finished
        self.tokens += other.tokens
        self.bad += other.bad
        self.failed += other.failed
        self.interrupted |= other.interrupted

    @property
    def status(self) -> int:
        """The command's exit status."""
        if self.interrupted:
            return INTERRUPTED
        return FAILED if self.failed else BAD_INPUT if self.bad else 0


class Listener:
    """Gets what the jobs produce, as it comes."""

    def piece(self, job: Job, piece: StreamPiece) -> None:
        """New text of an output."""

    def output(self, job: Job, output: RequestOutput) -> None:
        """All of a job's outputs have ended, whether well or not."""


def complain(where: str, reason: object) -> None:
    """One line about a job, on stderr; the others go on."""
    line = f"{where}: {reason}" if where else str(reason)
    print("error:", " ".join(line.split()), file=sys.stderr, flush=True)


def run_jobs(llm: LLM, jobs: Sequence[Job], listener: Listener, progress: Progress | None = None) -> Ended:
    """Runs all jobs at once. What is wrong with one of them is one line on stderr."""
    from executors.outputs import RequestOutput

    ended = Ended()
    running = _submit(llm, jobs, ended)
    ended.started = len(running)
    most = sum(job.params.max_tokens * job.params.n for job in running.values())
    left = len(running)
    with _interruptible() as interrupted:
        while left and not interrupted():
            results = llm.run()
            if results is None:
                raise AsyncschedError(f"the engine stopped with {left} requests unfinished")
            for result in results:
                job = running[result.request_id]
                if isinstance(result, RequestOutput):
                    left -= 1
                    listener.output(job, result)
                    _account(job, result, ended)
                else:
                    ended.tokens += len(result.token_ids)
                    listener.piece(job, result)
            if progress is not None:
                progress(ended.tokens, most)
        if left:
            ended.interrupted = True
            _stop(llm, running)
    return ended


def complain_if_interrupted(ended: Ended) -> None:
    if ended.interrupted:
        complain("", f"interrupted; {ended.finished} of {ended.started} requests had finished")


def _submit(llm: LLM, jobs: Sequence[Job], ended: Ended) -> dict[str, Job]:
    running: dict[str, Job] = {}
    for number, job in enumerate(jobs):
        try:
            params, tokens = fitted(llm, job)
        except ConfigError as error:
            ended.bad += 1
            complain(job.where, error)
            continue
        running[f"job-{number}"] = replace(job, params=params)
        llm.submit(f"job-{number}", job.prompt, params, token_ids=tokens)
    return running


def _account(job: Job, output: RequestOutput, ended: Ended) -> None:
    """Counts a job by its worst output, and says what was wrong with it."""
    reasons = {one.finish_reason: one.message for one in output.outputs}
    if "error" in reasons:
        ended.failed += 1
        complain(job.where, reasons["error"])
    elif "rejected" in reasons:
        ended.bad += 1
        complain(job.where, reasons["rejected"])
    else:
        ended.finished += 1


def _stop(llm: LLM, running: dict[str, Job]) -> None:
    """Aborts what is left; what the engine has in flight is collected, and nobody is told of it."""
    for request_id, job in running.items():
        llm.abort(request_id, job.params.n)
    while llm.run() is not None:
        pass


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Ctrl-C is noted for whoever asks between two steps; a second one interrupts at once."""
    asked = False

    def note(*_: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
