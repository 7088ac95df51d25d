"""Records the runs that profiles are fitted to and judged by: one model in memory, a synchronous and an asynchronous
engine over it, workloads that arrive in real time.

    python experiments/record_h200.py --out DIR [--pack FILE.tar] [--config llama-8b --config llama-1b]
        [--only fit,heldout,...]

Needs a CUDA device; `--dry-run` does the same with a tiny model and small workloads wherever it is started. Writes
one archive per shape and group, each as soon as its runs are over, and what there is of it when something ends it. Runs
that an archive holds are kept, so that a campaign that broke off is continued by the same command. Each run says how
quick its host was before, during and after it (`executors/host_probe.py`). Groups and their workloads are in
`h200_workloads.py`. `--pack` keeps one file of everything in DIR, written anew after each group: bring that one back
from a machine that gives few files back, and unpack it with tar.
"""

from __future__ import annotations

import gc
import io
import math
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from h200_workloads import DRY, DRY_TIGHT, ENGINE, GROUPS, MODES, ON_TIGHT, SPECS, TIGHT
from one_line import errors_in_one_line

from asyncsched.cli.files import check_output, write_output
from asyncsched.errors import AsyncschedError, ConfigError
from asyncsched.run_files import ARCHIVE, read_runs, write_archive
from asyncsched.runs import Run
from executors.llm import LLM
from executors.models import Model
from executors.named_configs import check_name, named_config
from executors.recorder import Recorder, TimedRequest, warm_up, warm_up_eager
from executors.settings import device_of
from sim.workload import build_workload

CLOCKS_MS = 20


def main(
    out: Annotated[Path, typer.Option(help="Folder for the archives; it must exist.")],
    pack: Annotated[Path | None, typer.Option(help="Put all files of that folder into one, too: .tar.")] = None,
    config: Annotated[list[str] | None, typer.Option(help="Named model shapes.")] = None,
    only: Annotated[str, typer.Option(help="Groups, separated by commas.")] = ",".join(GROUPS),
    minutes: Annotated[float, typer.Option(help="Start no run after this time.")] = 8.0,
    dry_run: Annotated[bool, typer.Option(help="A tiny model and small workloads, wherever this is.")] = False,
) -> None:
    """Record everything that is not there yet."""
    groups = only.split(",")
    with errors_in_one_line():
        if unknown := [group for group in groups if group not in GROUPS]:
            raise ConfigError("--only", unknown[0], f"use {', '.join(GROUPS)}")
        if not out.is_dir():
            raise ConfigError("--out", str(out), "name a folder that exists")
        check_output("--pack", pack, (".tar",))
        if not 0 < minutes < math.inf:
            raise ConfigError("--minutes", minutes, "use a number above 0")
        shapes = ["llama-tiny"] if dry_run else config or ["llama-8b", "llama-1b"]
        for shape in shapes:
            check_name(shape)
        device_of("cpu" if dry_run else "cuda")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what there is gets written
        _record(shapes, groups, _Results(out, pack), _Clock(minutes * 60), dry_run)


def _record(shapes: list[str], groups: list[str], results: _Results, clock: _Clock, dry_run: bool) -> None:
    for shape in shapes:
        missing = [group for group in groups if not _is_complete(results.archive(shape, group), group)]
        if missing:
            _record_shape(shape, missing, results, clock, dry_run)
    results.packed()
    clock.say("out of time: start it again for the rest" if clock.is_over else "done")


class _Results(NamedTuple):
    """Where results go: a folder, and one file of everything in it."""

    folder: Path
    pack: Path | None

    def archive(self, shape: str, group: str) -> Path:
        return self.folder / f"{'cpu' if shape == 'llama-tiny' else 'h200'}-{shape}-{group}{ARCHIVE}"

    def packed(self) -> None:
        """The file is replaced when it is whole. Archives are compressed; it is not."""
        if self.pack is None:
            return
        data = io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as file:
            for path in sorted(self.folder.iterdir()):
                if path.is_file() and path.resolve() != self.pack.resolve():
                    file.add(path, path.name)
        write_output("--pack", self.pack, data.getvalue())


class _Clock:
    def __init__(self, budget_s: float) -> None:
        self.started, self.budget_s = time.perf_counter(), budget_s

    @property
    def is_over(self) -> bool:
        return time.perf_counter() - self.started > self.budget_s

    def say(self, line: str) -> None:
        print(f"{time.perf_counter() - self.started:6.1f} s  {line}", flush=True)


def _record_shape(shape: str, groups: list[str], results: _Results, clock: _Clock, dry_run: bool) -> None:
    model: Any = named_config(shape)  # until the first engine has loaded it
    for tight in (False, True):
        wanted = [group for group in groups if (group in ON_TIGHT) == tight]
        if wanted:
            engine = (DRY_TIGHT if tight else DRY) if dry_run else TIGHT if tight else ENGINE
            model = _record_groups(model, shape, wanted, engine, results, clock, dry_run)
            _release()
    del model
    _release()


def _record_groups(
    model: Any, shape: str, groups: list[str], engine: dict[str, int], results: _Results, clock: _Clock, dry_run: bool
) -> Model:
    """Returns the model, which the engines share."""
    llms = {}
    for mode, depth in MODES.items():
        clock.say(f"{shape} {mode}: making the engine")
        llms[mode] = LLM(
            model,
            depth=depth,
            device="cpu" if dry_run else "cuda",
            dummy_weights=True,
            tokenizer=None,
            timeline=True,
            decisions=False,
            report=clock.say,
            **engine,
        )
        model = llms[mode].model
        clock.say(f"{shape} {mode}: warming up")
        launches = {"first": warm_up(llms[mode])}
        if len(llms) == 1:  # the other engines of this process find the kernels loaded
            launches["again"] = warm_up_eager(llms[mode])
        for when, took in launches.items():
            each = " ".join(f"{rows}:{milliseconds:.0f}" for rows, milliseconds in took)
            clock.say(f"sequences:ms of launches kernel by kernel, {when}: {each}")
    for group in groups:
        if clock.is_over:
            break
        path = results.archive(shape, group)
        known = {run.info.name: run for run in read_runs(path)} if path.exists() else {}
        specs = [spec.smaller() for spec in SPECS[group]] if dry_run else SPECS[group]
        with (
            _packed_behind(results),
            _clocks(path.with_name(path.name.replace(ARCHIVE, ".csv")) if group == "clocks" else None),
        ):
            _record_archive(path, known, _record_group(llms, specs, clock, known), clock, len(_names(group)))
    return model


def _record_archive(path: Path, known: dict[str, Run], coming: Iterator[Run], clock: _Clock, wanted: int) -> None:
    """Writes the known runs and those that come, whatever ends them."""
    runs = list(known.values())
    try:
        for run in coming:
            runs.append(run)
    finally:
        if runs:
            write_archive(path, runs)
            clock.say(f"{path.name}: {len(runs)} of {wanted} runs, {path.stat().st_size:,} bytes")


def _release() -> None:
    """Gives the device memory of what is not used any more back, so that the next engine finds it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _record_group(llms: dict[str, LLM], specs: Any, clock: _Clock, known: Container[str]) -> Iterator[Run]:
    """Modes take turns, so that a drift of the clocks is in both of them."""
    for number, spec in enumerate(specs):
        workload = spec.workload()
        arrivals = build_workload(workload, number).arrivals
        timed = [TimedRequest(one.arrival_ns, one.prompt_tokens, one.output_tokens) for one in arrivals]
        for delay in spec.delays_us:
            for mode, llm in llms.items():
                if clock.is_over:
                    return
                name = spec.run_name(mode, delay)
                if name in known:
                    continue
                about = workload.model_dump(mode="json")
                run = Recorder(llm, host_delay_us=delay).run(timed, name=name, seed=number, about=about)
                _check(run)
                _forget(llm)
                seconds, probe = run.info.makespan_ns / 1e9, run.info.host["probe_us"]
                clock.say(
                    f"{name}: {len(run.steps)} steps, {seconds:.2f} s, {run.requests.output_tokens.sum() / seconds:.0f}"
                    f" tokens/s; probe {probe[0]:.0f} {probe[1]:.0f} us" + "".join(f"; {one}" for one in run.info.notes)
                )
                yield run


@contextmanager
def _packed_behind(results: _Results) -> Iterator[None]:
    """Whatever ends what is recorded."""
    try:
        yield
    finally:
        results.packed()


@contextmanager
def _clocks(table: Path | None) -> Iterator[None]:
    """Meanwhile, nvidia-smi writes the GPU's clocks and power; nothing where there is none, or no table is wanted."""
    if table is None or shutil.which("nvidia-smi") is None:
        yield
        return
    with table.open("wb") as file:
        asked = "timestamp,clocks.sm,clocks.mem,power.draw.instant,clocks_event_reasons.active,temperature.gpu"
        sampler = subprocess.Popen(
            ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,nounits", f"-lms={CLOCKS_MS}"], stdout=file
        )
        try:
            yield
        finally:
            sampler.terminate()
            sampler.wait()


def _names(group: str) -> list[str]:
    return [spec.run_name(mode, delay) for spec in SPECS[group] for delay in spec.delays_us for mode in MODES]


def _is_complete(path: Path, group: str) -> bool:
    return path.exists() and {run.info.name for run in read_runs(path)} >= set(_names(group))


def _check(run: Run) -> None:
    """A run in which requests broke off is no truth to learn from."""
    broken = [reason for reason in run.requests.finish if reason != "length"]
    if broken:
        raise AsyncschedError(f"{run.info.name}: {len(broken)} requests ended by {broken[0]}")


def _forget(llm: LLM) -> None:
    """Spans of runs that were recorded are not needed again."""
    assert llm.timeline is not None
    llm.timeline.spans.clear()


if __name__ == "__main__":
    typer.run(main)
