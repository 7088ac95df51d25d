"""A conversation: turns from stdin, answers as they are generated to stdout, until the input ends."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from asyncsched.cli.answers import Answers, LineFile
from asyncsched.cli.prompts import Job, check_text, job_of
from asyncsched.cli.running import Ended, run_jobs
from asyncsched.errors import ConfigError

if TYPE_CHECKING:
    from executors.llm import LLM
    from executors.outputs import StreamPiece


def chat(llm: LLM, sampling: Mapping[str, Any], file: LineFile | None) -> Ended:
    """Answers each line of stdin. A turn that fails is forgotten; the conversation goes on without it.

    At a terminal Ctrl-C stops the answer alone, and the model remembers what it had said.
    """
    llm.chat_prompt([{"role": "user", "content": "?"}])  # no template: an error before anybody has written a word
    all_ended, listener, messages = Ended(), _Listener(file), list[dict[str, str]]()
    for number, text in enumerate(_turns(), start=1):
        messages.append({"role": "user", "content": text})
        listener.answer = ""
        ended = run_jobs(llm, [job_of("", number, llm.chat_prompt(messages), sampling)], listener)
        stopped = ended.interrupted and sys.stdin.isatty()
        if stopped:
            print(flush=True)  # the answer's line ends here
            ended.interrupted = False
        if ended.finished or (stopped and listener.answer):
            messages.append({"role": "assistant", "content": listener.answer})
        else:
            messages.pop()
        all_ended.add(ended)
        if ended.interrupted:
            break
    return all_ended


class _Listener(Answers):
    """Remembers the answer that it hears."""

    def __init__(self, file: LineFile | None) -> None:
        super().__init__(text=True, stream=True, file=file)
        self.answer = ""

    def piece(self, job: Job, piece: StreamPiece) -> None:
        super().piece(job, piece)
        self.answer += piece.text


def _turns() -> Iterator[str]:
    """The lines of stdin that say something."""
    asks = sys.stdin.isatty()
    while True:
        if asks:
            print("> ", end="", file=sys.stderr, flush=True)
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as error:
            raise ConfigError("--chat", "stdin", f"it is no valid text ({error.reason})") from None
        if not line:
            break
        text = line.strip()
        check_text("--chat", text)
        if text:
            yield text
    if asks:
        print(file=sys.stderr)
