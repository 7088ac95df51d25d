"""The end of `make demo`: real generation on the device there is, beside a simulation that is fed with its costs.

The costs are those of the synchronous run, step by step; the simulated asynchronous run is predicted from them. On a
CPU one thread prepares the steps and computes them, so nothing can overlap: the simulation then shows what the same
work would gain on a device of its own.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncsched.cli.figures import number, percent
from asyncsched.cli.loading import say
from asyncsched.cli.tables import print_table
from asyncsched.errors import INSTALL_TORCH
from asyncsched.plotting import GPU, plot_timeline
from asyncsched.timeline import Timeline
from sim.run import Result, simulate
from sim.scenario import Scenario

if TYPE_CHECKING:
    from executors.bench import BenchRun
    from executors.llm import LLM

DEPTHS = {"sync": 1, "async": 2}
SHAPES = {"cpu": "llama-tiny", "cuda": "llama-1b"}  # of random weights: nothing is downloaded
SIZES = {"requests": 8, "prompt_tokens": 32, "new_tokens": 96}
DRAWN_STEPS = 4  # from the middle


def real_generation(picture: Path) -> None:
    """Generates, simulates the same, writes the picture and prints the table; one line where torch is missing."""
    try:
        import torch
        from transformers.utils import logging

        from executors.named_configs import named_config
    except ModuleNotFoundError as error:
        print(f"{error.name} is not installed, so nothing was generated: {INSTALL_TORCH}")
        return
    logging.set_verbosity_error()
    torch.set_num_threads(1)  # so small a model gains nothing from more, and loses much where they are not free
    device = "cuda" if torch.cuda.is_available() else "cpu"
    where = torch.cuda.get_device_name() if device == "cuda" else "the CPU"
    print(f"Generating on {where}: {SHAPES[device]}, random weights, {SIZES['requests']} requests ...", file=sys.stderr)
    measured: dict[str, tuple[BenchRun, Timeline]] = {}
    model: Any = named_config(SHAPES[device])
    for mode, depth in DEPTHS.items():
        llm = _engine(model, depth, device)
        model = llm.model  # both modes run over the same weights
        measured[mode] = _measure(llm)
    costs = measured_costs(measured["sync"][1], on_cpu=device == "cpu")
    simulated = {mode: _simulate(mode, costs) for mode in DEPTHS}
    _draw(measured, simulated, device, picture)
    title = f"Real generation: {SHAPES[device]} on {where}, simulated with the costs of sync"
    _print(measured, simulated, title, on_cpu=device == "cpu")


def _engine(model: Any, depth: int, device: str) -> LLM:
    """Says what it does, at a terminal. Uncompiled: what overlap gains needs no minute of start-up to be seen."""
    from executors.llm import LLM

    return LLM(
        model,
        depth=depth,
        device=device,
        dummy_weights=True,
        timeline=True,
        compile=False,
        report=say,
        max_num_seqs=SIZES["requests"],
        max_model_len=SIZES["prompt_tokens"] + SIZES["new_tokens"],
    )


def _measure(llm: LLM) -> tuple[BenchRun, Timeline]:
    """A run and its timeline, after a short one that warms up."""
    from executors.bench import run_bench

    assert llm.timeline is not None  # it was asked for
    run_bench(llm, **{**SIZES, "new_tokens": 8}, seed=1)
    steps, spans = llm.engine.steps, len(llm.timeline.spans)
    run = run_bench(llm, **SIZES)
    return run, Timeline([span._replace(step=span.step - steps) for span in llm.timeline.spans[spans:]])


def measured_costs(timeline: Timeline, *, on_cpu: bool) -> dict[str, Any]:
    """Sections `host`, `copy` and `gpu` of a scenario: medians over the steps of a synchronous run, prefill apart.

    on_cpu  what ran on the other lanes was run by `launch` itself, and counts there
    """
    by_name: dict[str, dict[int, float]] = {}
    for span in timeline.spans:
        steps = by_name.setdefault(span.name, {})
        steps[span.step] = steps.get(span.step, 0.0) + (span.end_ns - span.start_ns) / 1e3
    compute = {step: us + by_name["carry"].get(step, 0.0) for step, us in by_name["forward"].items()}
    lanes = (by_name["h2d"], compute, by_name["d2h"])
    inside = {step: sum(lane[step] for lane in lanes) if on_cpu else 0.0 for step in compute}
    launch = {step: us - inside[step] for step, us in by_name["launch"].items()}
    prefill = SIZES["requests"] * SIZES["prompt_tokens"]  # all of it is in step 0

    def decode(steps: Mapping[int, float]) -> float:
        return statistics.median(us for step, us in steps.items() if step)

    return {
        "host": {f"{kind}_us": decode(by_name[kind]) for kind in ("plan", "fill", "commit")}
        | {"launch_us": max(decode(launch), 0.0)},
        "copy": {"h2d_latency_us": decode(by_name["h2d"]), "d2h_latency_us": decode(by_name["d2h"])},
        "gpu": {
            "kind": "constant",
            "step_us": decode(compute),
            "us_per_prefill_token": max(compute[0] - decode(compute), 0.0) / prefill,
        },
    }


def _simulate(mode: str, costs: Mapping[str, Any]) -> Result:
    workload = {
        "kind": "synthetic",
        "num_requests": SIZES["requests"],
        "prompt": {"kind": "fixed", "tokens": SIZES["prompt_tokens"]},
        "output": {"kind": "fixed", "tokens": SIZES["new_tokens"]},
        "arrivals": {"kind": "all-at-once"},
    }
    engine = {"max_num_seqs": SIZES["requests"]}
    return simulate(Scenario.from_dict({"mode": mode, "engine": engine, "workload": workload, **costs}), spans=True)


def _draw(
    measured: Mapping[str, tuple[BenchRun, Timeline]], simulated: Mapping[str, Result], device: str, picture: Path
) -> None:
    other = "the same work, and a device" if device == "cpu" else "the same costs"
    panels: list[tuple[str, Timeline]] = []
    for mode in DEPTHS:
        timeline = simulated[mode].timeline
        assert timeline is not None  # it was asked for
        panels += [(f"{mode}, measured", measured[mode][1]), (f"{mode}, simulated: {other}", timeline)]
    first = SIZES["new_tokens"] // 2
    title = (
        "Measured on a CPU, where one thread does all in turn, and simulated with a device beside it"
        if device == "cpu"
        else "Measured, and simulated with the costs that were measured in sync"
    )
    lane = "compute lane" if device == "cpu" else GPU
    plot_timeline(panels, picture, steps=(first, first + DRAWN_STEPS - 1), title=title, device=lane)


def _print(
    measured: Mapping[str, tuple[BenchRun, Timeline]], simulated: Mapping[str, Result], title: str, *, on_cpu: bool
) -> None:
    from executors.bench import steady_decode

    first = measured["sync"][0].token_ids
    columns: list[str] = []
    figures: list[Sequence[str]] = []
    for mode in DEPTHS:
        run, result = measured[mode][0], simulated[mode]
        steady = steady_decode(result.timeline, SIZES["requests"])
        equal = sum(mine == other for mine, other in zip(run.token_ids, first, strict=True))
        same = "yes" if equal == len(first) else f"NO, in {len(first) - equal} of {len(first)} sequences"
        columns += [f"{mode}, measured", f"{mode}, simulated"]
        figures += [
            [*_figures(run.result.to_dict()), "" if mode == "sync" else same],
            [*_figures({**steady, "output_throughput": result.summary()["output_throughput"]}), ""],
        ]
    names = ("a decode step (ms)", "tokens/s", "compute lane active", "same tokens as sync")
    rows = [[name, *values] for name, *values in zip(names, *figures, strict=True)]
    print_table(title, ["", *columns], rows, numbers=columns)
    if on_cpu:
        print(
            "One thread prepares the steps and computes them: only the simulated ones have a device, and can overlap."
        )
    for mode in DEPTHS:
        shown = " ".join(map(str, measured[mode][0].token_ids[0][:12]))
        print(f"{mode:5s} generated, request 0: {shown} ...")


def _figures(figures: Mapping[str, Any]) -> list[str]:
    return [number(figures["ms_per_step"]), number(figures["output_throughput"]), percent(figures["gpu_active"])]
