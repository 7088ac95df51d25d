"""`asyncsched generate`: text from a real model, for one prompt, a file of them, or a conversation."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from asyncsched.cli.answers import Answers, LineFile
from asyncsched.cli.chatting import chat as run_chat
from asyncsched.cli.files import PICTURES, check_distinct, check_output
from asyncsched.cli.loading import (
    ENGINE,
    BatchInvariant,
    Compile,
    Device,
    ModelName,
    Nvtx,
    Plot,
    Settings,
    Trace,
    check_engine,
    engine_settings,
    load_llm,
    parse_depth,
    require_torch,
    say,
)
from asyncsched.cli.measured import write_timelines
from asyncsched.cli.progress import progress_bar
from asyncsched.cli.prompts import Job, job_of, parse_number, read_jobs
from asyncsched.cli.running import BAD_INPUT, complain, complain_if_interrupted, run_jobs
from asyncsched.errors import MISSING, ConfigError

SAMPLING = "Sampling"  # a panel of the help


def _sampled(metavar: str, description: str) -> Any:
    return typer.Option(metavar=metavar, help=description, rich_help_panel=SAMPLING, show_default=False)


def generate(
    model: ModelName = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="A prompt.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="A prompt and its sampling parameters per line, as JSON objects."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="A conversation: one turn per line of stdin.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print text as it is generated.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE.jsonl", help="Write a line per prompt as it ends.")] = None,
    trace: Trace = None,
    plot: Plot = None,
    mode: Annotated[
        str | None,
        typer.Option(metavar="sync|async", help="One step in flight, or two: the default.", rich_help_panel=ENGINE),
    ] = None,
    depth: Annotated[
        str | None, typer.Option(metavar="K", help="Steps in flight; instead of --mode.", rich_help_panel=ENGINE)
    ] = None,
    device: Device = "auto",
    compile: Compile = None,
    batch_invariant: BatchInvariant = False,
    settings: Settings = None,
    nvtx: Nvtx = False,
    max_tokens: Annotated[str | None, _sampled("N", "Tokens at most. Without it: 256, or what fits.")] = None,
    temperature: Annotated[str | None, _sampled("T", "0 takes the likeliest token.")] = None,
    top_p: Annotated[str | None, _sampled("P", "Keep the likeliest tokens of this probability in all.")] = None,
    top_k: Annotated[str | None, _sampled("K", "Keep the K likeliest tokens.")] = None,
    min_p: Annotated[str | None, _sampled("P", "Keep tokens this likely relative to the likeliest.")] = None,
    seed: Annotated[str | None, _sampled("S", "Equal seeds draw equal tokens.")] = None,
    n: Annotated[str | None, _sampled("N", "Outputs per prompt.")] = None,
    stop: Annotated[list[str] | None, _sampled("TEXT", "End before this text. Repeatable.")] = None,
    stop_token_id: Annotated[list[str] | None, _sampled("ID", "End with this token. Repeatable.")] = None,
    min_tokens: Annotated[str | None, _sampled("N", "No stop before so many tokens.")] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the end of the sequence.", rich_help_panel=SAMPLING)
    ] = False,
    repetition_penalty: Annotated[str | None, _sampled("R", "Divide logits of tokens that were there.")] = None,
    presence_penalty: Annotated[str | None, _sampled("P", "Subtract from logits of tokens in the output.")] = None,
    frequency_penalty: Annotated[str | None, _sampled("P", "The same, once per occurrence.")] = None,
    logprobs: Annotated[str | None, _sampled("N", "Report log-probabilities, and the N likeliest tokens.")] = None,
) -> None:
    """Generate text with a real model."""
    _check_one_of({"--prompt": prompt is not None, "--prompts": prompts is not None, "--chat": chat})
    if not model or not model.isprintable():
        raise ConfigError(
            "--model", MISSING if model is None else model, "name a folder, a .gguf file, or a model on the Hub"
        )
    check_output("--out", out, (".jsonl",))
    check_output("--trace", trace, (".json",))
    check_output("--plot", plot, PICTURES)
    check_distinct({"--prompts": prompts, "--out": out, "--trace": trace, "--plot": plot})
    numbers = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "seed": seed,
        "n": n,
        "min_tokens": min_tokens,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "logprobs": logprobs,
    }
    sampling = _sampling(numbers, stop, stop_token_id, ignore_eos)
    more = {**({"batch_invariant": True} if batch_invariant else {}), **engine_settings(settings)}
    steps = None if depth is None else parse_depth("--depth", depth)
    engine = {
        "mode": mode,
        "depth": steps,
        "device": device,
        "compile": compile,
        "timeline": trace is not None or plot is not None,
        "nvtx": nvtx,
        **more,
    }
    jobs, problems = _jobs(prompt, prompts, sampling, one_text=stream or chat)
    for problem in problems:
        complain("", problem)
    if not jobs:
        raise typer.Exit(BAD_INPUT)
    check_engine(model, mode, steps, device, more)
    require_torch(device=device == "cuda" and device, nvtx=nvtx, batch_invariant=batch_invariant)
    llm = load_llm(model, **engine)
    started = time.perf_counter()
    with LineFile("--out", out) if out is not None else nullcontext() as file:
        if chat:
            ended = run_chat(llm, sampling, file)
        else:
            listener = Answers(text=prompts is None, stream=stream, file=file)
            with nullcontext() if stream else progress_bar("generating") as progress:
                ended = run_jobs(llm, jobs, listener, progress)
    complain_if_interrupted(ended)
    seconds = time.perf_counter() - started
    say(f"{ended.finished} requests, {ended.tokens} tokens in {seconds:.1f} s: {ended.tokens / seconds:.1f} tokens/s")
    if llm.timeline is not None:
        label = f"{Path(model).name}, depth {llm.config.depth}: measured"
        write_timelines({label: llm.timeline}, trace=trace, plot=plot, on_cpu=llm.model.device.type == "cpu")
    ended.bad += len(problems)
    if ended.status:
        raise typer.Exit(ended.status)


def _check_one_of(given: dict[str, bool]) -> None:
    named = [option for option, is_given in given.items() if is_given]
    if len(named) != 1:
        raise ConfigError("prompt", named, f"give one of {', '.join(given)}")


def _sampling(
    numbers: dict[str, str | None], stop: list[str] | None, stop_token_ids: list[str] | None, ignore_eos: bool
) -> dict[str, Any]:
    """The sampling parameters that were given, by their names."""
    sampling: dict[str, Any] = {
        name: parse_number(f"--{name.replace('_', '-')}", text) for name, text in numbers.items() if text is not None
    }
    if stop:
        sampling["stop"] = tuple(stop)
    if stop_token_ids:
        sampling["stop_token_ids"] = tuple(parse_number("--stop-token-id", token) for token in stop_token_ids)
    if ignore_eos:
        sampling["ignore_eos"] = True
    return sampling


def _jobs(
    prompt: str | None, prompts: Path | None, sampling: dict[str, Any], *, one_text: bool
) -> tuple[list[Job], list[str]]:
    """What to run, and problems with lines. For a conversation, a job that only shows that its parameters are good."""
    job = job_of("", 1, prompt or "", sampling)
    if prompts is not None:
        return read_jobs(prompts, sampling)
    if one_text and job.params.n > 1:
        raise ConfigError("n", job.params.n, "the outputs' text would mix: use 1, or --prompts, or no --stream")
    return [job], []
