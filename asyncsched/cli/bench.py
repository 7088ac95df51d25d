"""`asyncsched bench`: the same requests on a real model in several modes, measured."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncsched.cli.figures import number, percent
from asyncsched.cli.files import PICTURES, check_distinct, check_output, write_output
from asyncsched.cli.inputs import MODES, AsJson, parse_count, print_json
from asyncsched.cli.kernels import kernel_share
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
    check_model,
    engine_settings,
    load_llm,
    parse_depth,
    require_torch,
    say,
)
from asyncsched.cli.measured import write_timelines
from asyncsched.cli.record import check_folder
from asyncsched.errors import ConfigError
from asyncsched.timeline import Timeline

if TYPE_CHECKING:
    from executors.bench import BenchRun
    from executors.llm import LLM

CPU = "CPU"  # how the name of the device begins
WARM_UP_TOKENS = 16
PROFILED_TOKENS = 64
HOST_KINDS = ("plan", "fill", "launch", "commit")


@dataclass(frozen=True, slots=True)
class _Measured:
    """One mode's run, its timeline without the warm-up, and the kernel-level share where it was asked for."""

    name: str
    run: BenchRun
    startup_s: float
    stages: Sequence[tuple[str, float]]
    timeline: Timeline
    kernels: float | None


def bench(
    model: ModelName = None,
    config: Annotated[
        str | None, typer.Option(metavar="NAME", help="A shape instead of a model: llama-8b, llama-1b, llama-tiny.")
    ] = None,
    dummy_weights: Annotated[
        bool, typer.Option("--dummy-weights", help="Random weights, made on the device: no download.")
    ] = False,
    requests: Annotated[str, typer.Option(metavar="N", help="Requests, all there from the start.")] = "32",
    prompt_tokens: Annotated[str, typer.Option(metavar="N", help="Random tokens per prompt.")] = "128",
    new_tokens: Annotated[str, typer.Option(metavar="N", help="Tokens generated per request.")] = "512",
    mode: Annotated[
        str | None,
        typer.Option(metavar="MODE,...", help="Of sync, async; both without --depth.", rich_help_panel=ENGINE),
    ] = None,
    depth: Annotated[
        str | None, typer.Option(metavar="K,...", help="Steps in flight, as in 1,2,3.", rich_help_panel=ENGINE)
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Sequences in a step at most; without it, all requests.", rich_help_panel=ENGINE
        ),
    ] = None,
    device: Device = "auto",
    compile: Compile = None,
    batch_invariant: BatchInvariant = False,
    settings: Settings = None,
    nvtx: Nvtx = False,
    as_json: AsJson = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write the JSON object to a file.")] = None,
    record: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Serve the requests once more in each mode and keep it all, in DIR/MODE."),
    ] = None,
    trace: Trace = None,
    plot: Plot = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also measure the share of time in which kernels run (CUDA).")
    ] = False,
) -> None:
    """Measure a real model: the same requests in several modes, and whether their tokens are the same."""
    check_output("--out", out, (".json",))
    check_output("--trace", trace, (".json",))
    if record is not None:
        check_folder("--record", record)
    check_output("--plot", plot, PICTURES)
    check_distinct({"--out": out, "--trace": trace, "--plot": plot})
    sizes = {
        "requests": parse_count("--requests", requests, 1),
        "prompt_tokens": parse_count("--prompt-tokens", prompt_tokens, 1),
        "new_tokens": parse_count("--new-tokens", new_tokens, 1),
    }
    depths = _depths(mode, depth)
    seats = sizes["requests"] if batch is None else parse_count("--batch", batch, 1)
    more = engine_settings(settings)
    if "max_num_seqs" in more:
        raise ConfigError("--set", f"max_num_seqs={more['max_num_seqs']}", "use --batch")
    more = {"max_num_seqs": seats, **({"batch_invariant": True} if batch_invariant else {}), **more}
    engine = {**more, "device": device, "compile": compile, "nvtx": nvtx}
    what = check_model(model, config, dummy_weights)
    for steps in depths.values():
        check_engine(model, None, steps, device, more)
    require_torch(device=device == "cuda" and device, nvtx=nvtx, batch_invariant=batch_invariant, profile=profile)
    shape: Any = model
    if config is not None:
        from executors.named_configs import named_config

        shape = named_config(config)
    measured = []
    about: dict[str, Any] = {}
    for name, steps in depths.items():
        llm = load_llm(shape, depth=steps, dummy_weights=dummy_weights, timeline=True, **engine)
        about = about or {"model": what, "dummy_weights": dummy_weights, **_about(llm), **sizes, "batch": seats}
        measured.append(_measure(name, llm, sizes, profile=profile))
        if record is not None:
            _record(name, llm, sizes, what, record)
        del llm
        _release()
    report = {**about, "runs": [_run_json(one) for one in measured], **_comparison(measured)}
    if out is not None:
        write_output("--out", out, (json.dumps(report, indent=2, allow_nan=False) + "\n").encode())
    timelines = {f"{one.name}: measured": one.timeline for one in measured}
    write_timelines(timelines, trace=trace, plot=plot, on_cpu=about["device"].startswith(CPU))
    if as_json:
        print_json(report)
    else:
        _print_report(measured, report)


# ---- input -----------------------------------------------------------------------------------------------------------


def _depths(mode: str | None, depth: str | None) -> dict[str, int]:
    """Depths by the name of their run, in order; one that is a mode's runs under the mode's name."""
    modes = mode.split(",") if mode is not None else [] if depth is not None else list(MODES)
    depths = [parse_depth("--depth", text) for text in depth.split(",")] if depth is not None else []
    for option, text, several in (("--mode", mode, modes), ("--depth", depth, depths)):
        if len(set(several)) < len(several):
            raise ConfigError(option, text, "one is there twice; name each once")
    for name in modes:
        if name not in MODES:
            raise ConfigError("--mode", mode, f"use {', '.join(MODES)}, or both; other depths are for --depth")
    named = {name: MODES[name] for name in modes}
    for steps in depths:
        if steps not in named.values():
            named[f"depth {steps}"] = steps
    return named


# ---- measuring -------------------------------------------------------------------------------------------------------


def _measure(name: str, llm: LLM, sizes: Mapping[str, int], *, profile: bool) -> _Measured:
    """A short run to warm up, captured graphs included, then the one that counts."""
    from executors.bench import check_sizes, run_bench

    check_sizes(llm, sizes["prompt_tokens"], sizes["new_tokens"])
    say(f"{name}: warming up")
    run_bench(llm, **{**sizes, "new_tokens": min(WARM_UP_TOKENS, sizes["new_tokens"])}, seed=1)
    before = len(llm.timeline.spans)
    say(f"{name}: measuring {sizes['requests']} requests of {sizes['new_tokens']} new tokens")
    run = run_bench(llm, **sizes)
    timeline = Timeline(llm.timeline.spans[before:])
    kernels = None
    if profile:
        say(f"{name}: profiling")
        short = {**sizes, "new_tokens": min(PROFILED_TOKENS, sizes["new_tokens"])}
        kernels = kernel_share(lambda: run_bench(llm, **short))
    return _Measured(name, run, llm.startup_s, llm.stages, timeline, kernels)


def _record(name: str, llm: LLM, sizes: Mapping[str, int], model: str, folder: Path) -> None:
    """What `calibrate` and `validate` learn from."""
    from asyncsched.run_files import write_run
    from executors.recorder import Recorder, TimedRequest

    say(f"{name}: recording")
    requests = [TimedRequest(0, sizes["prompt_tokens"], sizes["new_tokens"])] * sizes["requests"]
    write_run(folder / name, Recorder(llm).run(requests, name=name, about={"model": model, **sizes}))


def _about(llm: LLM) -> dict[str, Any]:
    """Where the figures come from."""
    import platform

    import torch
    import transformers

    cuda = llm.model.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(llm.model.device) if cuda else f"{CPU}, {torch.get_num_threads()} threads",
        "dtype": str(llm.model.dtype).removeprefix("torch."),
        "compiled": llm.model.compiled is not None,
        "cuda_graphs": llm.graphs,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _release() -> None:
    """Gives the memory of the last model back, so that the next one has room."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---- output ----------------------------------------------------------------------------------------------------------


def _run_json(one: _Measured) -> dict[str, Any]:
    result = one.run.result.to_dict()
    stages = [{"stage": stage, "since_start_s": seconds} for stage, seconds in one.stages]
    return {"mode": one.name, "startup_s": one.startup_s, "startup": stages, **result, "kernels_active": one.kernels}


def _comparison(measured: Sequence[_Measured]) -> dict[str, Any]:
    """How many sequences of each run have the tokens of the first run."""
    first, *others = (one.run.token_ids for one in measured)
    same = {
        one.name: sum(mine == expected for mine, expected in zip(tokens, first, strict=True))
        for one, tokens in zip(measured[1:], others, strict=True)
    }
    return {"identical_sequences": same, "tokens_identical": all(count == len(first) for count in same.values())}


def _print_report(measured: Sequence[_Measured], report: Mapping[str, Any]) -> None:
    from asyncsched.cli.tables import print_table

    lane = "compute lane" if report["device"].startswith(CPU) else "GPU"
    results = [one.run.result for one in measured]
    rows = [
        ["start-up (s)", *(number(one.startup_s) for one in measured)],
        ["wall time (s)", *(number(result.wall_s) for result in results)],
        ["throughput (tokens/s)", *(number(result.output_throughput) for result in results)],
        ["a decode step (ms)", *(_or_dash(result.ms_per_step) for result in results)],
        ["of which it computes (ms)", *(_or_dash(result.compute_ms) for result in results)],
        [f"{lane} active, by events", *(_share(result.gpu_active) for result in results)],
        *([f"host: {kind} (us)", *(_or_dash(result.host_us.get(kind)) for result in results)] for kind in HOST_KINDS),
        ["steps", *(number(result.steps) for result in results)],
    ]
    if any(one.kernels is not None for one in measured):
        rows.insert(6, ["GPU active, by kernels", *(_share(one.kernels) for one in measured)])
    names = [one.name for one in measured]
    typer.echo(f"{report['model']} on {report['device']}, {report['requests']} requests, batch {report['batch']}")
    print_table("measured", ["", *names], rows, numbers=names)
    requests = report["requests"]
    for name, count in report["identical_sequences"].items():
        verdict = "the same tokens as" if count == requests else "OTHER tokens than"
        where = (
            f"in all {requests} sequences" if count == requests else f"in {requests - count} of {requests} sequences"
        )
        typer.echo(f"{name} has {verdict} {names[0]} {where}")


def _or_dash(value: float | None) -> str:
    return "-" if value is None else number(value)


def _share(value: float | None) -> str:
    return "-" if value is None else percent(value)
