"""`asyncsched generate` and `asyncsched bench` as their users meet them, on tiny models saved to a folder.

Most run in this process, since importing torch takes seconds; what only a real process can show has one.
"""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_tokenizers import save_tiny_model

from asyncsched.cli import main
from asyncsched.cli.answers import LineFile
from asyncsched.cli.bench import _comparison
from asyncsched.cli.kernels import _kernels, busy_share
from asyncsched.errors import ConfigError
from asyncsched.plotting import _view
from asyncsched.request import SamplingParams
from asyncsched.timeline import LANES, Span, Timeline
from executors.bench import run_bench
from executors.errors import UnsupportedModelError
from executors.llm import LLM
from executors.models import Model
from executors.named_configs import named_config

torch.set_num_threads(1)

ROOT = Path(__file__).parent.parent
TEXT = "the quick brown fox"
GREEDY = ("--temperature", "0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a model and its tokenizer."""
    return str(save_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder of the commands."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return tmp_path


Captured = pytest.CaptureFixture[str]


def status_of(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert isinstance(end.value.code, int)
    return end.value.code


def output_of(*arguments: str, capsys: Captured) -> str:
    """What a command that ends well prints; it says nothing else."""
    capsys.readouterr()
    assert status_of(*arguments) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def records_in(text: str) -> dict[int, dict[str, Any]]:
    """The JSON lines by the line of their prompt."""
    records = [json.loads(line) for line in text.splitlines()]
    assert len({record["line"] for record in records}) == len(records)
    return {record["line"]: record for record in records}


def write_prompts(folder: Path, *lines: object) -> str:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / "prompts.jsonl").write_text("\n".join(texts) + "\n")
    return "prompts.jsonl"


def expected_text(model: str, prompt: Any, **sampling: Any) -> str:
    llm = LLM(model, device="cpu")
    return llm.generate([prompt], SamplingParams(**{"temperature": 0.0, **sampling}))[0].outputs[0].text


# ---- one prompt ------------------------------------------------------------------------------------------------------


def test_text_is_the_same_in_every_mode_and_streamed(model: str, capsys: Captured) -> None:
    arguments = ("generate", "--model", model, "--prompt", TEXT, "--max-tokens", "20", *GREEDY)
    expected = expected_text(model, TEXT, max_tokens=20)
    assert len(expected) > 10
    for more in ((), ("--mode", "sync"), ("--mode", "async"), ("--depth", "3"), ("--stream",), ("--device", "cpu")):
        assert output_of(*arguments, *more, capsys=capsys) == f"{expected}\n"


@pytest.mark.parametrize(("given", "wanted"), [((), None), (("--compile",), True), (("--no-compile",), False)])
def test_whether_to_compile_reaches_the_engine(
    given: tuple[str, ...], wanted: bool | None, model: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    asked: list[bool | None] = []

    def unfit(*_: Any, compile: bool | None, **__: Any) -> None:
        asked.append(compile)
        raise UnsupportedModelError("no model today")

    monkeypatch.setattr("executors.llm.LLM", unfit)
    for command in (("generate", "--prompt", TEXT), ("bench",)):
        assert status_of(*command, "--model", model, *given) == 2
    assert asked == [wanted, wanted]
    assert "no model today" in capsys.readouterr().err


def test_the_length_that_nobody_gave_fits_the_context(model: str, capsys: Captured) -> None:
    out = output_of("generate", "--model", model, "--prompt", TEXT, "--seed", "4", "--out", "o.jsonl", capsys=capsys)
    (record,) = records_in(Path("o.jsonl").read_text()).values()
    (one,) = record["outputs"]
    assert record["prompt"] == TEXT
    assert (one["text"] + "\n", one["finish_reason"]) == (out, "length")
    assert 200 < len(one["token_ids"]) < 256


def test_sampling_options_reach_the_model(model: str, capsys: Captured) -> None:
    options = "--max-tokens 9 --temperature 0.8 --top-p 0.9 --top-k 40 --min-p 0.01 --seed 5 --n 3 --min-tokens 4"
    options += " --repetition-penalty 1.2 --presence-penalty 0.5 --frequency-penalty 0.2 --stop-token-id 7 --stop zzz"
    command = ("generate", "--model", model, "--prompt", TEXT, "--ignore-eos", "--logprobs", "2", *options.split())
    out = output_of(*command, "--out", "o.jsonl", capsys=capsys)
    params = SamplingParams(
        max_tokens=9,
        temperature=0.8,
        top_p=0.9,
        top_k=40,
        min_p=0.01,
        seed=5,
        n=3,
        min_tokens=4,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.2,
        stop_token_ids=(7,),
        stop="zzz",
        ignore_eos=True,
        logprobs=2,
    )
    expected = LLM(model, device="cpu").generate(TEXT, params)[0].outputs
    (record,) = records_in(Path("o.jsonl").read_text()).values()
    assert [one["token_ids"] for one in record["outputs"]] == [list(one.token_ids) for one in expected]
    assert out == "".join(f"[{one.index}] {one.text}\n" for one in expected)
    logprobs = record["outputs"][1]["logprobs"]
    assert expected[1].logprobs is not None
    assert [entry["rank"] for entry in logprobs] == [entry.rank for entry in expected[1].logprobs]
    assert all(len(entry["top"]) == 2 and entry["logprob"] <= 0 for entry in logprobs)


def watch_llms(monkeypatch: pytest.MonkeyPatch) -> list[LLM]:
    """Fills with every LLM that is made."""
    built, made = LLM.__init__, list[LLM]()

    def noting(self: LLM, *arguments: Any, **options: Any) -> None:
        built(self, *arguments, **options)
        made.append(self)

    monkeypatch.setattr(LLM, "__init__", noting)
    return made


def test_settings_reach_the_engine(model: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    made = watch_llms(monkeypatch)
    settings = ("num_blocks=40", "block_size=8", "decode_buckets=[1, 2]", "victim=least-progress", "max_num_seqs=2")
    options = [part for setting in settings for part in ("--set", setting)]
    output_of("generate", "--model", model, "--prompt", TEXT, *options, "--depth", "3", capsys=capsys)
    (config,) = (llm.config for llm in made)
    assert (config.num_blocks, config.block_size, config.depth, config.max_num_seqs) == (40, 8, 3, 2)
    assert (list(config.decode_buckets), config.victim) == ([1, 2], "least-progress")


# ---- a file of prompts -----------------------------------------------------------------------------------------------


def test_lines_run_with_their_own_parameters(model: str, folder: Path, capsys: Captured) -> None:
    lines = [
        {"prompt": TEXT},
        {"prompt_token_ids": [5, 6, 7], "max_tokens": 3},
        {"prompt": "größer 😀", "temperature": 1.0, "seed": 3, "n": 2, "stop": ["x", "y"]},
        {"prompt": TEXT, "logit_bias": {"65": 100}, "max_tokens": 2},
    ]
    prompts = write_prompts(folder, lines[0], "", *lines[1:])
    records = records_in(
        output_of("generate", "--model", model, "--prompts", prompts, "--max-tokens", "8", *GREEDY, capsys=capsys)
    )
    assert sorted(records) == [1, 3, 4, 5]
    assert records[1]["outputs"][0]["text"] == expected_text(model, TEXT, max_tokens=8)
    assert records[3]["prompt_token_ids"] == [5, 6, 7]
    assert records[3]["outputs"][0]["text"] == expected_text(model, [5, 6, 7], max_tokens=3)
    assert records[4]["prompt"] == "größer 😀"
    assert [one["index"] for one in records[4]["outputs"]] == [0, 1]
    assert records[5]["outputs"][0]["token_ids"] == [65, 65]
    one = records[1]["outputs"][0]
    assert (one["finish_reason"], one["stop_reason"]) == ("length", None)
    assert 0 < one["first_token_s"] < one["finished_s"]


# Lines that are no requests, and what is said about them.
BROKEN: tuple[tuple[object, str], ...] = (
    ('{"prompt": }', "cannot be read (Expecting value"),
    ("[1, 2]", "use an object"),
    ({"prompt": TEXT, "temprature": 1}, "'temprature' is not allowed; there is no such field; there are temperature"),
    ({"max_tokens": 3}, "give one of prompt and prompt_token_ids"),
    ({"prompt": TEXT, "prompt_token_ids": [1]}, "give one of"),
    ({"prompt": 5}, "prompt: 5 is not allowed; use a string"),
    ({"prompt_token_ids": [1, True]}, "use a list of token ids"),
    ({"prompt_token_ids": [1, 300]}, "prompt: 300 is not allowed; use token ids from 0 to 299"),
    ({"prompt_token_ids": []}, "at least one token"),
    ({"prompt": ""}, "prompt: '' is not allowed; it must have at least one token"),
    ('{"prompt": "\\ud800"}', "no valid text"),
    ({"prompt": TEXT, "temperature": -1}, "temperature: -1 is not allowed"),
    ('{"prompt": "x", "top_p": NaN}', "top_p: nan is not allowed"),
    ({"prompt": TEXT, "logit_bias": {"x": 1}}, "logit_bias: ('x', 1) is not allowed"),
    ({"prompt": TEXT, "logit_bias": {"300": 1}}, "logit_bias"),
    ({"prompt": TEXT, "logprobs": 50}, "logprobs: 50 is not allowed"),
    ({"prompt": TEXT, "max_tokens": 1000}, "+ max_tokens 1000 ="),
    ({"prompt_token_ids": [1] * 300}, "prompt 300 + max_tokens 1 = 301 tokens, over max_model_len 256"),
    ("[" * 100_000, "cannot be read"),
    ('{"prompt": "x", "max_tokens": 2, "max_tokens": 3}', "field: 'max_tokens' is not allowed; it is there twice"),
    ({"prompt": TEXT, "n": 10**6}, "n: 1000000 is not allowed; use a whole number from 1 to 16384"),
)


def test_broken_lines_are_named_and_the_others_run(model: str, folder: Path, capsys: Captured) -> None:
    lines = [line for line, _ in BROKEN]
    prompts = write_prompts(folder, {"prompt": TEXT}, *lines, {"prompt": "fox"})
    with (folder / prompts).open("ab") as file:
        file.write(b'{"prompt": "\xff"}\n')
    text = (folder / prompts).read_bytes().replace(b"\n", b"\r\n")
    (folder / prompts).write_bytes(b"\xef\xbb\xbf" + text)  # as an editor on Windows saves it
    status = status_of("generate", "--model", model, "--prompts", prompts, "--out", "o.jsonl", "--seed", "1")
    captured = capsys.readouterr()
    assert (status, captured.out) == (2, "")
    records = records_in((folder / "o.jsonl").read_text())
    finished = {line for line, record in records.items() if record["outputs"][0]["finish_reason"] in ("length", "stop")}
    assert finished == {1, len(BROKEN) + 2}
    rejected = {line: record["outputs"][0]["message"] for line, record in records.items() if line not in finished}
    assert all("tokens, over max_model_len 256" in message for message in rejected.values())
    errors = {int(line.split(": ")[1].split()[-1]): line for line in captured.err.splitlines()}
    assert sorted(errors) == [*range(2, len(BROKEN) + 2), len(BROKEN) + 3]
    for number, (_, said) in enumerate(BROKEN, start=2):
        assert errors[number].startswith(f"error: prompts.jsonl, line {number}: ")
        assert said in errors[number]
        assert len(errors[number]) < 400


def test_a_file_without_a_good_line_loads_no_model(folder: Path, capsys: Captured) -> None:
    prompts = write_prompts(folder, "{", "7")
    assert status_of("generate", "--model", "./nowhere", "--prompts", prompts, "--out", "o.jsonl") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 2
    assert "nowhere" not in err
    assert not (folder / "o.jsonl").exists()


def test_pieces_are_streamed_as_lines(model: str, folder: Path, capsys: Captured) -> None:
    prompts = write_prompts(folder, {"prompt": TEXT, "n": 2, "temperature": 1.0}, {"prompt": "fox", "temperature": 0})
    command = ("generate", "--model", model, "--prompts", prompts, "--max-tokens", "6", "--seed", "1", "--stream")
    pieces = [json.loads(line) for line in output_of(*command, "--out", "o.jsonl", capsys=capsys).splitlines()]
    for line, record in records_in((folder / "o.jsonl").read_text()).items():
        for one in record["outputs"]:
            mine = [piece for piece in pieces if (piece["line"], piece["index"]) == (line, one["index"])]
            assert len(mine) > 1
            assert "".join(piece["text"] for piece in mine) == one["text"]
            assert [token for piece in mine for token in piece["token_ids"]] == one["token_ids"]
            assert [piece.get("finish_reason") for piece in mine] == [None] * (len(mine) - 1) + ["length"]


def act_at(monkeypatch: pytest.MonkeyPatch, step: int, act: Any) -> None:
    """Calls `act` before one of the forward passes."""
    forward, passes = Model.forward, []

    def wrapped(self: Model, view: Any, kv: Any) -> torch.Tensor:
        passes.append(view)
        if len(passes) == step:
            act()
        return forward(self, view, kv)

    monkeypatch.setattr(Model, "forward", wrapped)


FIRST_STEPS = 10  # the load-time self-check's are before it


def test_a_step_that_fails_is_status_1_and_the_others_are_kept(
    model: str, folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    act_at(monkeypatch, FIRST_STEPS + 5, fail)
    prompts = write_prompts(folder, {"prompt": "a", "max_tokens": 2}, {"prompt": TEXT, "max_tokens": 20}, "{")
    status = status_of("generate", "--model", model, "--prompts", prompts, "--out", "o.jsonl", *GREEDY)
    captured = capsys.readouterr()
    assert status == 1
    lines = captured.err.splitlines()
    assert lines[0].startswith("error: prompts.jsonl, line 3: JSON")
    cause = "RuntimeError: CUDA error: an illegal memory access; the engine is still usable"
    assert lines[1:] == [f"error: prompts.jsonl, line 2: {cause}"]
    records = records_in((folder / "o.jsonl").read_text())
    assert records[1]["outputs"][0]["finish_reason"] == "length"
    assert records[2]["outputs"][0]["finish_reason"] == "error"
    assert 0 < len(records[2]["outputs"][0]["token_ids"]) < 20


def test_a_device_that_dies_is_a_line_for_each_prompt(
    model: str, folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn of a conversation after that is one line, and its end."""

    def dead(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr("executors.cpu.CpuLanes.synchronize", dead)
    monkeypatch.setattr("executors.cpu.CpuLanes.drain", dead)
    prompts = write_prompts(folder, {"prompt": "a"}, {"prompt": TEXT})
    assert status_of("generate", "--model", model, "--prompts", prompts) == 1
    captured = capsys.readouterr()
    for number, line in enumerate(captured.err.splitlines(), start=1):
        assert line.startswith(f"error: prompts.jsonl, line {number}: RuntimeError: CUDA error: an illegal memory")
        assert line.endswith("; the engine is not usable any more: start a new one")
    assert [record["outputs"][0]["finish_reason"] for record in records_in(captured.out).values()] == ["error"] * 2

    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nand?\nand now?\n"))
    assert status_of("generate", "--model", model, "--chat") == 1
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("error: RuntimeError: CUDA error")
    assert second.startswith("error: the engine is not usable any more: start a new one; it died of RuntimeError")


def test_an_engine_that_breaks_keeps_what_was_written(
    model: str, folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    from asyncsched.scheduler import Scheduler

    commit, commits = Scheduler.commit, []

    def broken(self: Scheduler, *arguments: Any) -> Any:
        commits.append(1)
        if len(commits) == 6:
            raise ZeroDivisionError("a fault of ours")
        return commit(self, *arguments)

    monkeypatch.setattr(Scheduler, "commit", broken)
    prompts = write_prompts(folder, {"prompt": "a", "max_tokens": 2}, {"prompt": TEXT, "max_tokens": 20})
    assert status_of("generate", "--model", model, "--prompts", prompts, "--out", "o.jsonl") == 1
    assert capsys.readouterr().err == "error: the run failed: ZeroDivisionError: a fault of ours\n"
    assert list(records_in((folder / "o.jsonl").read_text())) == [1]


def test_an_interrupt_stops_and_keeps_what_finished(
    model: str, folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = watch_llms(monkeypatch)
    act_at(monkeypatch, FIRST_STEPS + 8, lambda: os.kill(os.getpid(), signal.SIGINT))
    prompts = write_prompts(folder, {"prompt": "a", "max_tokens": 2}, {"prompt": TEXT}, {"prompt": "b"})
    command = ("generate", "--model", model, "--prompts", prompts, "--out", "o.jsonl", "--trace", "t.json")
    assert status_of(*command) == 130
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "error: interrupted; 1 of 3 requests had finished\n")
    assert list(records_in((folder / "o.jsonl").read_text())) == [1]
    events = json.loads((folder / "t.json").read_text())["traceEvents"]
    steps = {event["args"]["step"] for event in events if event["ph"] == "X"}
    assert len(steps) <= 10
    assert not made[0].scheduler.has_requests
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_text_that_the_terminal_cannot_show_is_escaped(model: str, folder: Path) -> None:
    """Generated or not: what was computed is not thrown away for it."""
    process = start("generate", "--model", model, "--prompt", TEXT, "--max-tokens", "8", *GREEDY, encoding="ascii")
    out, err = process.communicate(timeout=60)
    wanted = expected_text(model, TEXT, max_tokens=8)
    assert not wanted.isascii()
    assert (process.returncode, err) == (0, "")
    assert out.rstrip("\n") == wanted.encode("ascii", "backslashreplace").decode()


def test_an_interrupt_while_the_command_is_loaded(folder: Path) -> None:
    code = """
import sys
from asyncsched.cli import main
class Interrupted:
    def find_spec(self, name, *_):
        if name == "asyncsched.cli.app":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
main([])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted\n")


def test_an_interrupt_of_a_real_process(model: str, folder: Path) -> None:
    """And its streams: lines on stdout, one line on stderr, no traceback."""
    prompts = write_prompts(folder, {"prompt": "a", "max_tokens": 2}, *[{"prompt": TEXT, "ignore_eos": True}] * 6)
    process = start("generate", "--model", model, "--prompts", prompts, "--device", "cpu")
    assert process.stdout is not None
    first = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (130, "", "error: interrupted; 1 of 7 requests had finished\n")
    assert list(records_in(first)) == [1]


def start(*arguments: str, encoding: str = "utf-8", **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    environment["PYTHONIOENCODING"] = encoding
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([sys.executable, "-m", "asyncsched.cli", *arguments], env=environment, text=True, **streams)


# ---- a conversation --------------------------------------------------------------------------------------------------


def test_a_conversation_remembers_its_turns(
    model: str, folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(model, device="cpu")
    params = SamplingParams(temperature=0.0, max_tokens=6)
    first = [{"role": "user", "content": "hello"}]
    answer = llm.chat(first, params).outputs[0].text
    second = [*first, {"role": "assistant", "content": answer}, {"role": "user", "content": "the fox"}]
    expected = [answer, llm.chat(second, params).outputs[0].text]
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\n  the fox"))
    command = ("generate", "--model", model, "--chat", "--max-tokens", "6", *GREEDY, "--out", "o.jsonl")
    assert output_of(*command, capsys=capsys) == f"{expected[0]}\n{expected[1]}\n"
    records = records_in((folder / "o.jsonl").read_text())
    assert [record["outputs"][0]["text"] for record in records.values()] == expected
    assert list(records[2]["prompt_token_ids"]) == llm.chat_prompt(second)


def test_a_turn_that_is_too_long_is_forgotten(model: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{'x ' * 300}\nhello\n"))
    assert status_of("generate", "--model", model, "--chat", "--max-tokens", "6", *GREEDY) == 2
    captured = capsys.readouterr()
    expected = LLM(model, device="cpu").chat(
        [{"role": "user", "content": "hello"}], SamplingParams(temperature=0.0, max_tokens=6)
    )
    assert captured.out == f"{expected.outputs[0].text}\n"
    assert captured.err.count("\n") == 1
    assert "over max_model_len 256" in captured.err


def test_a_terminal_is_told_what_happens(model: str) -> None:
    """A real process: stages and the prompt of a conversation on stderr, nothing but answers on stdout."""
    ours, theirs = pty.openpty()
    process = start(
        "generate", "--model", model, "--chat", "--max-tokens", "6", *GREEDY, stdin=subprocess.PIPE, stderr=theirs
    )
    os.close(theirs)
    out, _ = process.communicate("hello\n", timeout=60)
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    assert process.returncode == 0
    assert out.count("\n") >= 1
    for stage in (
        "importing torch",
        "reading the configuration",
        "loading the weights on cpu",
        "checking its logits",
        "allocating 256 KV blocks of 16 tokens",
        "loading the tokenizer",
        "ready",
        "1 requests, 6 tokens in",
    ):
        assert stage in shown


# A terminal's foreground process, with a model whose steps take a while, so that there is time to press Ctrl-C.
AT_A_TERMINAL = """
import fcntl, sys, termios, time
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from asyncsched.cli import main
from executors.models import Model
forward = Model.forward
Model.forward = lambda *arguments: (time.sleep(0.02), forward(*arguments))[1]
main(sys.argv[1:])
"""


class Terminal:
    """A command at a terminal, and somebody who types. `shown` is all that was on the screen."""

    def __init__(self, *arguments: str) -> None:
        self._keyboard, screen = pty.openpty()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", AT_A_TERMINAL, *arguments],
            stdin=screen,
            stdout=screen,
            stderr=screen,
            env=environment,
            start_new_session=True,
        )
        os.close(screen)
        self.shown = b""

    def type(self, keys: str) -> None:
        os.write(self._keyboard, keys.encode())

    def wait_for(self, pattern: bytes, timeout_s: float = 120.0) -> bytes:
        """What comes up to the pattern, and is not looked at again."""
        seen, deadline = b"", time.monotonic() + timeout_s
        while re.search(pattern, seen) is None:
            ready, _, _ = select.select([self._keyboard], [], [], max(deadline - time.monotonic(), 0))
            assert ready, f"{pattern!r} did not come: {self.shown!r}"
            try:
                seen += os.read(self._keyboard, 1)
            except OSError:  # the command has ended, and with it the terminal
                raise AssertionError(f"it ended before {pattern!r}: {self.shown!r}") from None
        self.shown += seen
        return seen

    def end(self) -> int:
        """Its exit status, once everything is on the screen."""
        while True:
            try:
                self.shown += os.read(self._keyboard, 65536)
            except OSError:
                break
        os.close(self._keyboard)
        return self.process.wait(60)


@pytest.fixture
def chat_at_a_terminal(model: str) -> Iterator[Terminal]:
    terminal = Terminal("generate", "--model", model, "--chat", *GREEDY, "--ignore-eos", "--max-tokens", "60")
    terminal.wait_for(b"> ")
    yield terminal
    if terminal.process.poll() is None:
        terminal.process.kill()
        terminal.process.wait()


def answer_in(screen: bytes) -> str:
    """What was said up to the next prompt, without the terminal's ways."""
    return screen.replace(b"^C", b"").replace(b"\r\n", b"\n").decode().removesuffix("\n> ")


def test_ctrl_c_stops_an_answer_and_ctrl_d_ends_a_conversation(model: str, chat_at_a_terminal: Terminal) -> None:
    terminal = chat_at_a_terminal
    llm = LLM(model, device="cpu")
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    messages = [{"role": "user", "content": "hello"}]
    whole = llm.chat(messages, params).outputs[0].text

    terminal.type("hello\n")
    terminal.wait_for(b"hello\r\n")  # the terminal's echo
    begun = terminal.wait_for(b"(?s).{8}")
    terminal.type("\x03")
    said = answer_in(begun + terminal.wait_for(b"\r\n> "))
    assert 2 <= len(said) < len(whole)
    assert whole.startswith(said)

    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "and?"}]
    terminal.type("and?\n")
    terminal.wait_for(b"and\\?\r\n")
    assert answer_in(terminal.wait_for(b"\r\n> ")) == llm.chat(messages, params).outputs[0].text
    terminal.type("\x04")
    assert terminal.end() == 0
    assert b"Traceback" not in terminal.shown


def test_ctrl_c_at_the_prompt_ends_a_conversation(chat_at_a_terminal: Terminal) -> None:
    chat_at_a_terminal.type("\x03")
    assert chat_at_a_terminal.end() == 130
    assert b"error: interrupted\r\n" in chat_at_a_terminal.shown
    assert b"Traceback" not in chat_at_a_terminal.shown


# ---- traces and pictures ---------------------------------------------------------------------------------------------


def test_a_trace_and_a_picture_of_what_was_measured(model: str, folder: Path, capsys: Captured) -> None:
    command = ("generate", "--model", model, "--prompt", TEXT, "--max-tokens", "12", "--ignore-eos")
    output_of(*command, "--trace", "t.json", "--plot", "p.png", capsys=capsys)
    events = json.loads((folder / "t.json").read_text())["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(tracks.values()) == sorted(LANES)
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        f"{Path(model).name}, depth 2: measured"
    }
    spans = [event for event in events if event["ph"] == "X"]
    assert {tracks[span["tid"]] for span in spans} == set(LANES)
    assert {span["args"]["step"] for span in spans} == set(range(12))
    assert min(span["ts"] for span in spans) == 0
    assert (folder / "p.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_a_picture_of_one_step(model: str, folder: Path, capsys: Captured) -> None:
    output_of("generate", "--model", model, "--prompt", TEXT, "--max-tokens", "1", "--plot", "p.svg", capsys=capsys)
    assert "svg" in (folder / "p.svg").read_text()


def test_a_carry_over_is_no_step_of_its_own() -> None:
    """In the pictures' count of steps."""
    spans = [Span("compute", "carry", 0, 0, 0, 10, 4), Span("compute", "forward", 0, 0, 10, 100, 4)]
    assert _view("", Timeline(spans), 0, 100).steps_computed == 1.0


# ---- bad input -------------------------------------------------------------------------------------------------------

ONE = ("generate", "--model", "{model}", "--prompt", TEXT)
SHAPE = ("bench", "--config", "llama-tiny", "--dummy-weights")

# Arguments, and what the one line must say.
BAD_INPUT: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no model": (("generate", "--prompt", "x"), ("--model: missing", "folder")),
    "a model without a name": (("generate", "--model", "", "--prompt", "x"), ("--model: ''", "folder")),
    "a model that is a file": (
        ("generate", "--model", "bare/config.json", "--prompt", "x"),
        ("bare/config.json: it is a file", "name the folder"),
    ),
    "too many outputs": ((*ONE, "--n", "1000000"), ("n: 1000000", "from 1 to 16384")),
    "bench of a model without a name": (("bench", "--model", "\0"), ("--model: '\\x00'", "folder")),
    "no prompt": (("generate", "--model", "{model}"), ("prompt: []", "--prompt, --prompts, --chat")),
    "two prompts": ((*ONE, "--chat"), ("prompt: ['--prompt', '--chat']", "give one of")),
    "model that is not there": (("generate", "--model", "./no", "--prompt", "x"), ("./no: there is no such model",)),
    "model that is not on the hub": (
        ("generate", "--model", "no/model", "--prompt", "x"),
        ("no/model: no model can be",),
    ),
    "architecture that cannot run": (
        ("generate", "--model", "t5", "--prompt", "x"),
        ("t5: is an encoder-decoder; only decoder-only models can run",),
    ),
    "folder without weights": (
        ("generate", "--model", "bare", "--prompt", "x"),
        ("bare: its weights cannot be loaded",),
    ),
    "missing prompts": (
        ("generate", "--model", "{model}", "--prompts", "no.jsonl"),
        ("--prompts: 'no.jsonl'", "No such"),
    ),
    "empty prompts": (
        ("generate", "--model", "{model}", "--prompts", "empty.jsonl"),
        ("--prompts: 'empty.jsonl'", "no line"),
    ),
    "empty prompt": (("generate", "--model", "{model}", "--prompt", ""), ("prompt: ''", "at least one token")),
    "prompt that is no text": (
        ("generate", "--model", "{model}", "--prompt", "\udcff"),
        ("prompt: '\\udcff'", "UTF-8"),
    ),
    "prompt too long": ((*ONE, "--max-tokens", "300"), ("+ max_tokens 300 =", "tokens, over max_model_len 256")),
    "prompt larger than the pool": ((*ONE, "--set", "num_blocks=2"), ("KV blocks of 16, over num_blocks 2",)),
    "pool that does not fit": ((*ONE, "--set", "num_blocks=9999999"), ("num_blocks: 9999999", "would fit")),
    "temperature": ((*ONE, "--temperature", "-1"), ("temperature: -1", "at least 0")),
    "no number": ((*ONE, "--top-p", "high"), ("--top-p: 'high'", "use a number")),
    "no whole number": ((*ONE, "--max-tokens", "1.5"), ("max_tokens: 1.5", "whole number")),
    "NaN": ((*ONE, "--min-p", "nan"), ("min_p: nan", "from 0 to 1")),
    "outputs alike": ((*ONE, *GREEDY, "--n", "2"), ("n: 2", "temperature 0")),
    "outputs that mix": ((*ONE, "--n", "2", "--stream"), ("n: 2", "would mix")),
    "min above max": ((*ONE, "--min-tokens", "9", "--max-tokens", "5"), ("min_tokens: 9", "max_tokens 5")),
    "mode": ((*ONE, "--mode", "static"), ("mode: 'static'", "sync, async")),
    "mode against depth": ((*ONE, "--mode", "async", "--depth", "3"), ("depth: 3", "mode 'async' means depth 2")),
    "depth": ((*ONE, "--depth", "0"), ("--depth: '0'", "at least 1")),
    "more depth than there is": ((*ONE, "--depth", "9999"), ("depth: 9999", "at most 64")),
    "device": ((*ONE, "--device", "tpu"), ("device: 'tpu'", "auto, cpu or cuda")),
    "unknown setting": ((*ONE, "--set", "num_block=5"), ("--set: 'num_block=5'", "num_blocks")),
    "setting without value": ((*ONE, "--set", "num_blocks"), ("--set: 'num_blocks'", "key=value")),
    "setting given twice": (
        (*ONE, "--set", "block_size=8", "--set", "block_size=16"),
        ("--set: 'block_size=16'", "block_size=8 is set already"),
    ),
    "batch as a setting": ((*SHAPE, "--set", "max_num_seqs=4"), ("--set: 'max_num_seqs=4'", "use --batch")),
    "depth as a setting": ((*ONE, "--set", "depth=2"), ("--set: 'depth=2'", "use --depth")),
    "setting of another type": ((*ONE, "--set", "block_size=large"), ("block_size: 'large'", "whole number")),
    "output of another kind": ((*ONE, "--out", "o.json"), ("--out: 'o.json'", "must end in .jsonl")),
    "output into nowhere": ((*ONE, "--out", "no/o.jsonl"), ("--out: 'no/o.jsonl'", "does not exist")),
    "answers over the prompts": (
        ("generate", "--model", "{model}", "--prompts", "empty.jsonl", "--out", "empty.jsonl"),
        ("--out: 'empty.jsonl'", "it is the file of --prompts too"),
    ),
    "trace over the result": (
        (*SHAPE, "--out", "o.json", "--trace", "o.json"),
        ("--trace: 'o.json'", "it is the file of --out too"),
    ),
    "plot of another kind": ((*ONE, "--plot", "p.gif"), ("--plot: 'p.gif'", ".png or .svg or .pdf")),
    "conversation without a template": (("generate", "--model", "plain", "--chat"), ("chat template",)),
    "bench of nothing": (("bench",), ("--model: missing", "--config NAME --dummy-weights")),
    "bench of a shape without weights": (
        ("bench", "--config", "llama-8b"),
        ("--config: 'llama-8b'", "--dummy-weights"),
    ),
    "bench of an unknown shape": (("bench", "--config", "llama", "--dummy-weights"), ("config: 'llama'", "llama-8b")),
    "bench without requests": ((*SHAPE, "--requests", "0"), ("--requests: '0'", "at least 1")),
    "bench in no mode": ((*SHAPE, "--mode", "sync,fast"), ("--mode: 'sync,fast'", "sync, async")),
    "bench in a mode twice": ((*SHAPE, "--mode", "sync,sync"), ("--mode: 'sync,sync'", "twice")),
    "bench at a depth twice": ((*SHAPE, "--depth", "1,3,1"), ("--depth: '1,3,1'", "twice")),
    "bench at a depth twice, in other words": ((*SHAPE, "--depth", "1,01"), ("--depth: '1,01'", "twice")),
    "bench of too many requests": ((*SHAPE, "--requests", "9999999999"), ("--requests: '9999999999'", "at most 999,")),
    "record between no lengths": (
        ("record", "-o", "run", *SHAPE[1:], "--new-tokens", "5-"),
        ("--new-tokens: '5-'", "use N, or A-B"),
    ),
    "bench at no depth": ((*SHAPE, "--depth", "1,"), ("--depth: ''", "at least 1")),
    "bench beyond the context": (
        (*SHAPE, "--requests", "1", "--new-tokens", "2000"),
        ("new_tokens: 2000", "prompt 128 + max_tokens 2000 = 2128 tokens, over max_model_len 2048"),
    ),
    "bench into another kind of file": ((*SHAPE, "--out", "o.jsonl"), ("--out: 'o.jsonl'", "must end in .json")),
}
if not torch.cuda.is_available():
    BAD_INPUT["cuda"] = ((*ONE, "--device", "cuda"), ("device: 'cuda'", "no CUDA device"))
    BAD_INPUT["ranges without cuda"] = ((*ONE, "--nvtx"), ("nvtx: True", "CUDA"))
    BAD_INPUT["bench's ranges without cuda"] = ((*SHAPE, "--nvtx"), ("nvtx: True", "CUDA"))
    BAD_INPUT["profile without cuda"] = ((*SHAPE, "--profile"), ("--profile", "needs CUDA"))


def test_bad_input_is_one_line_and_status_2(
    model: str, folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "t5").mkdir()
    (folder / "t5" / "config.json").write_text('{"model_type": "t5"}')
    (folder / "bare").mkdir()
    shutil.copy(Path(model, "config.json"), folder / "bare")
    shutil.copytree(model, folder / "plain")
    (folder / "plain" / "chat_template.jinja").unlink()
    (folder / "empty.jsonl").write_text("\n\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("never read"))
    before = sorted(folder.rglob("*"))
    for case, (arguments, said) in BAD_INPUT.items():
        status = status_of(*(argument.format(model=model) for argument in arguments))
        captured = capsys.readouterr()
        assert (status, captured.out) == (2, ""), case
        assert captured.err.startswith("error: "), case
        assert captured.err.count("\n") == 1, case
        assert all(part in captured.err for part in said), (case, captured.err)
        assert sorted(folder.rglob("*")) == before, case


def test_without_torch_it_says_what_to_install(folder: Path) -> None:
    program = "import sys; sys.modules['torch'] = None\nfrom asyncsched.cli import main\nmain(sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", program, "generate", "--model", "m", "--prompt", "x"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    expected = "error: torch is not installed, and a real model needs it: pip install -e '.[torch]' in the clone\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


EARLY: tuple[tuple[str, str], ...] = (
    ("generate --prompt x --model /no/where", "/no/where: there is no such model folder"),
    ("generate --prompt x --model here.txt", "here.txt: it is a file; name the folder"),
    ("generate --prompt x --model m --mode static", "mode: 'static'"),
    ("generate --prompt x --model m --depth 9999", "depth: 9999"),
    ("generate --prompt x --model m --device tpu", "device: 'tpu'"),
    ("generate --prompt x --model m --set block_size=large", "block_size: 'large'"),
    ("generate --prompt x --model m --set num_blocks=0", "num_blocks: 0"),
    ("generate --prompt x --model m --set victim=nobody", "victim: 'nobody'"),
    ("generate --prompt x --model m --temperature -1", "temperature: -1"),
    ("generate --prompts none.jsonl --model m", "--prompts: 'none.jsonl'"),
    ("generate --prompt x --model m --out no/o.jsonl", "--out: 'no/o.jsonl'"),
    ("bench --config llama --dummy-weights", "config: 'llama'"),
    ("bench --config llama-tiny --dummy-weights --depth 2,9999", "depth: 9999"),
    ("bench --config llama-tiny --dummy-weights --set admission=nobody", "admission: 'nobody'"),
    ("bench --model /no/where", "/no/where: there is no such model folder"),
    ("record -o run --config llama --dummy-weights", "config: 'llama'"),
    ("record -o run --config llama-tiny --dummy-weights --device tpu", "device: 'tpu'"),
    ("record -o run --config llama-tiny --dummy-weights --set num_blocks=-1", "num_blocks: -1"),
    ("record -o run --model /no/where", "/no/where: there is no such model folder"),
)


def test_what_needs_no_torch_to_be_refused_is_refused_before_it_is_imported(folder: Path) -> None:
    program = """
import sys
sys.modules["torch"] = None
from asyncsched.cli import main
for line in sys.stdin:
    try:
        main(line.split())
    except SystemExit as end:
        print(end.code, file=sys.stderr)
"""
    (folder / "here.txt").touch()
    done = subprocess.run(
        [sys.executable, "-c", program],
        input="\n".join(arguments for arguments, _ in EARLY),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 2 * len(EARLY), done.stderr
    for (arguments, said), error, status in zip(EARLY, lines[::2], lines[1::2], strict=True):
        assert status == "2", arguments
        assert error.startswith(f"error: {said}"), arguments


def test_requests_that_do_not_fit_are_refused_before_the_model_is_warm(
    folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("it was to be refused before")

    monkeypatch.setattr(LLM, "run", never)
    for command in (("bench", "--requests", "1"), ("record", "-o", "run", "--requests", "1")):
        assert (
            status_of(command[0], "--config", "llama-tiny", "--dummy-weights", "--new-tokens", "2000", *command[1:])
            == 2
        )
        assert "2048" in capsys.readouterr().err
    assert not (folder / "run").exists()


def test_help_loads_no_torch(capsys: Captured) -> None:
    program = """
import sys
from asyncsched.cli import main
try:
    main([sys.argv[1], "--help"])
finally:
    heavy = {"torch", "transformers", "executors", "matplotlib", "sim"}
    print("loaded:", sorted(heavy & set(sys.modules)), file=sys.stderr)
"""
    for command in ("generate", "bench"):
        done = subprocess.run(
            [sys.executable, "-c", program, command],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert "Usage: asyncsched" in done.stdout
        assert done.stderr == "loaded: []\n"


# ---- files of lines --------------------------------------------------------------------------------------------------


def write_lines(path: Path, *values: object, fault: Exception | None = None) -> None:
    with LineFile("--out", path) as file:
        for value in values:
            file.write(value)
        if fault is not None:
            raise fault


def test_a_file_of_lines_is_put_in_place_at_the_end(folder: Path) -> None:
    path = folder / "o.jsonl"
    path.write_text("old\n")
    with LineFile("--out", path) as file:
        file.write({"a": "größer"})
        assert path.read_text() == "old\n"
        (part,) = folder.glob(".o.jsonl.*.part")
        assert json.loads(part.read_text()) == {"a": "größer"}  # what a process that is killed leaves
    assert path.read_text() == '{"a": "größer"}\n'
    with pytest.raises(ZeroDivisionError):
        write_lines(path, {"b": 1}, fault=ZeroDivisionError())
    assert path.read_text() == '{"b": 1}\n'
    with pytest.raises(ZeroDivisionError):
        write_lines(path, fault=ZeroDivisionError())
    assert path.read_text() == '{"b": 1}\n'
    assert sorted(folder.iterdir()) == [path]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here is always full")
def test_a_full_disk_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "open", lambda *_, **__: os.fdopen(os.open("/dev/full", os.O_WRONLY), "w"))
    with pytest.raises(ConfigError, match=r"--out: .*No space left on device"):
        write_lines(folder / "o.jsonl", {"a": 1})


# ---- bench -----------------------------------------------------------------------------------------------------------

SMALL = (*SHAPE, "--requests", "4", "--prompt-tokens", "6", "--new-tokens", "40", "--device", "cpu")


def test_a_benchmark_measures_every_mode(folder: Path, capsys: Captured) -> None:
    files = ("--out", "o.json", "--trace", "t.json", "--plot", "p.png")
    report = json.loads(output_of(*SMALL, "--mode", "sync,async", "--depth", "2,3", "--json", *files, capsys=capsys))
    assert json.loads((folder / "o.json").read_text()) == report
    assert [(run["mode"], run["depth"]) for run in report["runs"]] == [("sync", 1), ("async", 2), ("depth 3", 3)]
    assert report["identical_sequences"] == {"async": 4, "depth 3": 4}
    assert report["tokens_identical"] is True
    assert (report["model"], report["batch"], report["requests"]) == ("llama-tiny", 4, 4)
    assert report["device"].startswith("CPU")
    assert report["cuda_graphs"] is False
    for run in report["runs"]:
        assert (run["steps"], run["output_tokens"]) == (40, 160)
        assert run["output_throughput"] == pytest.approx(160 / run["wall_s"])
        assert 0 < run["compute_ms"] < run["ms_per_step"]
        assert 0 < run["gpu_active"] < 1
        assert set(run["host_us"]) == {"plan", "fill", "launch", "commit", "deliver"}
        assert run["kernels_active"] is None
        assert 0 < run["startup_s"] < 120
        assert run["startup"][0]["stage"] == "reading the configuration"
        assert run["startup"][-1] == {"stage": "ready", "since_start_s": run["startup_s"]}
    events = json.loads((folder / "t.json").read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["name"] == "process_name"] == [
        f"{name}: measured" for name in ("sync", "async", "depth 3")
    ]
    for process in range(3):
        assert {e["args"]["step"] for e in events if e["ph"] == "X" and e["pid"] == process} == set(range(40))
    assert (folder / "p.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_each_mode_has_the_memory_to_itself(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU there is no room for the weights of two."""
    built, made = LLM.__init__, list[weakref.ref[LLM]]()

    def noting(self: LLM, *arguments: Any, **options: Any) -> None:
        assert all(other() is None for other in made)
        built(self, *arguments, **options)
        made.append(weakref.ref(self))

    monkeypatch.setattr(LLM, "__init__", noting)
    output_of(*SHAPE, "--requests", "2", "--new-tokens", "3", "--depth", "1,2,3", capsys=capsys)
    assert len(made) == 3


def test_a_steady_stretch_is_found_among_more_requests_than_seats() -> None:
    llm = LLM(named_config("llama-tiny"), device="cpu", dummy_weights=True, max_num_seqs=2, timeline=True)
    run = run_bench(llm, requests=4, prompt_tokens=5, new_tokens=32)
    assert run.result.ms_per_step is not None
    assert run.result.gpu_active is not None
    assert run.result.ms_per_step >= run.result.compute_ms > 0
    assert 0 < run.result.gpu_active < 1
    assert [len(tokens) for tokens in run.token_ids] == [32] * 4


def test_a_benchmark_as_a_table(model: str, capsys: Captured) -> None:
    command = (
        "bench",
        "--model",
        model,
        "--requests",
        "3",
        "--prompt-tokens",
        "5",
        "--new-tokens",
        "6",
        "--batch",
        "2",
    )
    out = output_of(*command, "--set", "num_blocks=30", capsys=capsys)
    assert out.startswith(f"{model} on CPU")
    assert "3 requests, batch 2" in out
    assert "sync" in out
    assert re.search(r"a decode step \(ms\) +- +-\n", out)  # too short to be steady
    assert "async has the same tokens as sync in all 3 sequences" in out


def test_other_tokens_are_reported() -> None:
    runs = {"sync": ((1, 2), (3, 4)), "async": ((1, 2), (3, 5)), "depth 3": ((1, 2), (3, 4))}
    measured: Any = [SimpleNamespace(name=name, run=SimpleNamespace(token_ids=ids)) for name, ids in runs.items()]
    assert _comparison(measured) == {"identical_sequences": {"async": 1, "depth 3": 2}, "tokens_identical": False}
    assert _comparison(measured[:1]) == {"identical_sequences": {}, "tokens_identical": True}


def test_the_share_of_kernels_is_of_the_middle() -> None:
    """Overlapping kernels count once; a gap in the middle counts, one at the ends does not."""
    steady = [(float(start), start + 8.0) for start in range(0, 100, 10)]
    assert busy_share([(0.0, 100.0)]) == 1.0
    assert busy_share([(0.0, 1.0), (10.0, 90.0), (30.0, 95.0), (99.0, 100.0)]) == 1.0
    assert busy_share([*steady, (98.0, 100.0)]) == pytest.approx((3 + 8 * 4 + 5) / 50)
    assert busy_share([(0.0, 30.0), (70.0, 100.0)]) == pytest.approx(10 / 50)
    assert busy_share([]) is None


def test_copies_and_host_calls_are_no_kernels() -> None:
    from torch.autograd import DeviceType

    def event(name: str, device: DeviceType) -> SimpleNamespace:
        return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(start=1.0, end=2.0))

    events = [
        event("gemm", DeviceType.CUDA),
        event("Memcpy HtoD (Pinned -> Device)", DeviceType.CUDA),
        event("Memset (Device)", DeviceType.CUDA),
        event("cudaGraphLaunch", DeviceType.CPU),
    ]
    assert _kernels(events) == [(1.0, 2.0)]


@pytest.fixture(autouse=True)
def quiet_transformers() -> Iterator[None]:
    """The commands turn its bars off for their process, which here is everybody's."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    yield
    logging.set_verbosity(level)
    logging.enable_progress_bar()
