"""`asyncsched record`: serve a workload on a real model in real time, and keep everything that happened."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncsched.cli.figures import number
from asyncsched.cli.inputs import MODES, AsJson, parse_count, print_json
from asyncsched.cli.loading import (
    ENGINE,
    Device,
    ModelName,
    Settings,
    check_engine,
    check_model,
    engine_settings,
    load_llm,
    parse_depth,
    require_torch,
    say,
)
from asyncsched.errors import ConfigError

if TYPE_CHECKING:
    from asyncsched.runs import Run
    from sim.workload import SyntheticWorkload, TraceWorkload

WORKLOAD = "Workload"  # a panel of the help


def record(
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="A new folder for the run.")],
    model: ModelName = None,
    config: Annotated[
        str | None, typer.Option(metavar="NAME", help="A shape instead of a model: llama-8b, llama-1b, llama-tiny.")
    ] = None,
    dummy_weights: Annotated[
        bool, typer.Option("--dummy-weights", help="Random weights, made on the device: no download.")
    ] = False,
    requests: Annotated[str, typer.Option(metavar="N", help="Requests in all.", rich_help_panel=WORKLOAD)] = "32",
    prompt_tokens: Annotated[
        str, typer.Option(metavar="N|A-B", help="Random tokens per prompt.", rich_help_panel=WORKLOAD)
    ] = "128",
    new_tokens: Annotated[
        str, typer.Option(metavar="N|A-B", help="Tokens generated per request.", rich_help_panel=WORKLOAD)
    ] = "128",
    rate: Annotated[
        str | None,
        typer.Option(
            metavar="R", help="Requests per second, Poisson; without it, all at once.", rich_help_panel=WORKLOAD
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Arrivals and lengths from a trace, instead; --requests takes its first ones.",
            rich_help_panel=WORKLOAD,
        ),
    ] = None,
    seed: Annotated[str, typer.Option(metavar="N", help="Of lengths, arrivals and tokens.")] = "0",
    host_delay_us: Annotated[
        str,
        typer.Option(
            metavar="US", help="Testing aid: keep the host busy so long in each step.", rich_help_panel=ENGINE
        ),
    ] = "0",
    mode: Annotated[
        str | None, typer.Option(metavar="sync|async", help="async without a choice.", rich_help_panel=ENGINE)
    ] = None,
    depth: Annotated[str | None, typer.Option(metavar="K", help="Steps in flight.", rich_help_panel=ENGINE)] = None,
    device: Device = "auto",
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Serve a workload on a real model and record it: what `calibrate` and `validate` learn from."""
    check_folder("--out", out)
    what = check_model(model, config, dummy_weights)
    steps = _depth(mode, depth)
    delay = _number("--host-delay-us", host_delay_us, 0, 1e6)
    first = parse_count("--seed", seed, 0)
    workload = _workload(requests, prompt_tokens, new_tokens, rate, trace)
    from sim.workload import build_workload

    arrivals, notes = build_workload(workload, first)
    for note in notes:
        print("note:", note, file=sys.stderr)
    more = {"max_num_seqs": min(len(arrivals), 256), **engine_settings(settings)}
    check_engine(model, None, steps, device, more)
    require_torch(device=device == "cuda" and device)
    from executors.recorder import Recorder, TimedRequest, check_workload, warm_up

    shape: Any = model
    if config is not None:
        from executors.named_configs import named_config

        shape = named_config(config)
    load = {"depth": steps, "device": device, "dummy_weights": dummy_weights, **more}
    llm = load_llm(shape, timeline=True, decisions=False, **load)
    timed = [TimedRequest(one.arrival_ns, one.prompt_tokens, one.output_tokens) for one in arrivals]
    check_workload(llm, timed)
    say("warming up")
    warm_up(llm)
    say(f"recording {len(arrivals)} requests")
    about = {"model": what, **workload.model_dump(mode="json")}
    run = Recorder(llm, host_delay_us=delay).run(timed, name=out.name, seed=first, about=about)
    from asyncsched.run_files import write_run

    write_run(out, run)
    _report(run, out, as_json)


def check_folder(option: str, path: Path) -> None:
    """A run needs a folder of its own. Raises ConfigError."""
    try:
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(option, str(path), "it exists; name a new folder")
        whole = path.absolute()
        near = next(folder for folder in (whole, *whole.parents) if folder.exists())  # those below it will be made
        if not (near.is_dir() and _can_hold(near)):
            raise ConfigError(option, str(path), f"{near} is no folder that can be written to; name one elsewhere")
    except OSError as error:
        raise ConfigError(option, str(path), f"it cannot be made ({error.strerror})") from None


def _can_hold(folder: Path) -> bool:
    """Whether folders can be made there; leaves no trace."""
    probe = folder / f".asyncsched-{os.getpid()}.tmp"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return True


def _number(option: str, text: str, least: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value <= most:
        raise ConfigError(option, text, f"use a number from {least:g} to {most:g}")
    return value


def _depth(mode: str | None, depth: str | None) -> int:
    if mode is not None and mode not in MODES:
        raise ConfigError("--mode", mode, "use sync or async; other depths are for --depth")
    if mode is not None and depth is not None:
        raise ConfigError("--depth", depth, f"--mode {mode} is a depth too; leave one out")
    return parse_depth("--depth", depth) if depth is not None else MODES[mode or "async"]


def _length(option: str, text: str) -> dict[str, Any]:
    """N, or A-B for evenly drawn lengths."""
    low, separator, high = text.partition("-")
    if not separator:
        return {"kind": "fixed", "tokens": parse_count(option, low, 1)}
    if not low or not high:
        raise ConfigError(option, text, "use N, or A-B with A not above B")
    bounds = {"min_tokens": parse_count(option, low, 1), "max_tokens": parse_count(option, high, 1)}
    if bounds["max_tokens"] < bounds["min_tokens"]:
        raise ConfigError(option, text, "use N, or A-B with A not above B")
    return {"kind": "uniform", **bounds}


def _workload(
    requests: str, prompt_tokens: str, new_tokens: str, rate: str | None, trace: str | None
) -> SyntheticWorkload | TraceWorkload:
    from sim.spec import validate
    from sim.workload import SyntheticWorkload, TraceWorkload

    count = parse_count("--requests", requests, 1)
    if trace is not None:
        if rate is not None:
            raise ConfigError("--rate", rate, "a trace has times of its own; leave one out")
        return validate(TraceWorkload, {"kind": "trace", "trace": trace, "limit": count})
    arrivals = (
        {"kind": "all-at-once"}
        if rate is None
        else {"kind": "poisson", "rate_per_s": _number("--rate", rate, 1e-3, 1e6)}
    )
    lengths = {"prompt": _length("--prompt-tokens", prompt_tokens), "output": _length("--new-tokens", new_tokens)}
    return validate(SyntheticWorkload, {"kind": "synthetic", "num_requests": count, "arrivals": arrivals, **lengths})


def _report(run: Run, out: Path, as_json: bool) -> None:
    tokens = int(run.requests.output_tokens.sum())
    figures = {
        "run": str(out),
        "requests": len(run.requests),
        "output_tokens": tokens,
        "steps": len(run.steps),
        "makespan_s": run.info.makespan_ns / 1e9,
        "output_throughput": tokens / (run.info.makespan_ns / 1e9),
        "preemptions": run.info.preemptions,
        "notes": list(run.info.notes),
    }
    if as_json:
        print_json(figures)
        return
    typer.echo(
        f"{out}: {figures['requests']} requests, {tokens} tokens in {number(figures['makespan_s'])} s, "
        f"{number(figures['output_throughput'])} tokens/s, {figures['steps']} steps"
    )
    for note in run.info.notes:
        typer.echo(f"note: {note}")
