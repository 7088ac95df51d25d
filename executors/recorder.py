"""Records a run of an `LLM` in real time: requests arrive when the workload says, and everything that happens is noted.

What the recording costs is kept out of the steps: plans and deliveries are kept as they are, and made into tables when
the run is over. Requests are greedy, of random tokens, and get exactly the tokens they ask for.

One thing is done beside: behind a delivery, PROBE_EVERY_MS and more after the last time, one step of the host's probe.
That takes tens of microseconds with cold caches, 0.3% of the time of runs on an H200. Behind most deliveries the device
computes meanwhile; a step is longer by as much where the host is what the device waits for, and in a synchronous run
where requests have just arrived. It is no work of the engine's: when each reading was taken is kept, and `calibrate`
leaves it out of the delivery's price.
"""

from __future__ import annotations

import gc
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from asyncsched.errors import AsyncschedError, ConfigError
from asyncsched.pipeline import Deliver, Effect, Host
from asyncsched.request import SamplingParams
from asyncsched.run_log import RunLog
from asyncsched.runs import Run, RunInfo
from asyncsched.timeline import Span
from executors.garbage import old_objects_stay
from executors.host_probe import Probe, Reading, read_host_speed
from executors.llm import LLM

PROBE_EVERY_MS = 20  # or less often: where steps take longer than that
LEAD_S = 0.002  # the clock starts so much before the first arrival
SPIN_S = 0.0005  # sleeping ends so long before an arrival; the rest is waited for without sleep
WARM_UP_PROMPT = 16  # tokens
EAGER_ROWS = 8  # numbers of sequences that are warmed up for steps launched kernel by kernel: multiples of this one


class TimedRequest(NamedTuple):
    """One request of a workload. `arrival_ns` counts from the start of the run."""

    arrival_ns: int
    prompt_tokens: int
    output_tokens: int


class Recorder:
    """One recording of an idle LLM, which needs a timeline. `host_delay_us` is a busy-wait after each plan."""

    def __init__(self, llm: LLM, *, host_delay_us: float = 0.0) -> None:
        if llm.timeline is None:
            raise AsyncschedError("an LLM without a timeline cannot be recorded: make it with timeline=True")
        if llm.scheduler.has_requests or len(llm.engine.inbox):
            raise AsyncschedError("the LLM has requests of somebody else: record an idle one")
        if not 0 <= host_delay_us <= 1e6:
            raise ConfigError("host_delay_us", host_delay_us, "use a number of microseconds from 0 to 1,000,000")
        self._llm = llm
        self._delay_us = host_delay_us
        self._log = RunLog(llm.scheduler)
        self._num_graphs = llm.num_graphs
        self._probe = Probe()
        self._probed: list[tuple[int, int]] = []  # when a reading began, and how long it took

    def run(
        self, workload: Sequence[TimedRequest], *, name: str, seed: int = 0, about: Mapping[str, Any] | None = None
    ) -> Run:
        """Serves the workload, in order of arrival, and returns what happened. `about` describes it for the reader.

        Raises ConfigError, before anything runs, for requests that the engine would reject.
        """
        llm = self._llm
        check_workload(llm, workload)
        requests = _requests(llm, workload, name, seed)
        first_span = len(llm.timeline.spans)  # type: ignore[union-attr]  # checked when the recorder was made
        memory = _allocations(llm)
        clock = [_Reading.of(llm)]
        gc.collect()
        with self._watching(), old_objects_stay():
            before, began = read_host_speed(), time.time()
            started, on_cpu = time.perf_counter_ns() + round(LEAD_S * 1e9), time.thread_time_ns()
            self._probed.clear()
            _serve(llm, requests, started)
            share = (time.thread_time_ns() - on_cpu) / (time.perf_counter_ns() - started)
            after = read_host_speed()
        clock.append(_Reading.of(llm))
        spans = _on_one_clock(llm.timeline.spans[first_span:], *clock)  # type: ignore[union-attr]
        host = {
            **_host(before, after),
            **_during(self._probed, started),
            "thread_share": round(share, 4),
            "began_unix_s": round(began + LEAD_S, 3),
        }
        grown = [now - once for now, once in zip(_allocations(llm), memory, strict=True)]
        return self._collect(workload, spans, started, name, seed, about or {}, host, grown)

    # ---- while it runs ---------------------------------------------------------------------------------------------

    @contextmanager
    def _watching(self) -> Iterator[None]:
        engine = self._llm.engine
        engine.observer, engine.inbox.observer = self._effect, self._log.entered
        engine.host_delay_ns = round(self._delay_us * 1e3)
        try:
            yield
        finally:
            engine.observer = engine.inbox.observer = None
            engine.host_delay_ns = 0

    def _effect(self, effect: Effect) -> None:
        if isinstance(effect, Host):
            if effect.kind == "plan":
                self._log.planned(effect.plan)
        elif isinstance(effect, Deliver):
            now = time.perf_counter_ns()
            self._log.delivered(now, effect.output)
            if not self._probed or now - self._probed[-1][0] >= PROBE_EVERY_MS * 1_000_000:
                self._probed.append((now, self._probe.step_ns()))

    # ---- afterwards ------------------------------------------------------------------------------------------------

    def _collect(
        self,
        workload: Sequence[TimedRequest],
        spans: Sequence[Span],
        started: int,
        name: str,
        seed: int,
        about: Mapping[str, Any],
        host: Mapping[str, Any],
        grown: Sequence[int],
    ) -> Run:
        llm, log = self._llm, self._log
        captured = llm.num_graphs - self._num_graphs
        notes = (f"{captured} CUDA graphs were captured, or prepared, during the run",) if captured else ()
        if any(grown):
            notes += (f"device memory was asked for {grown[0]} times and given back {grown[1]} times during the run",)
        ended = log.last_delivery_ns
        info = RunInfo(
            name=name,
            source="asyncsched",
            engine=asdict(llm.config),
            device=_device(llm),
            versions=_versions(),
            model=_model(llm),
            workload=about,
            host_delay_us=float(self._delay_us),
            host=host,
            seed=seed,
            makespan_ns=0 if ended is None else ended - started,
            preemptions=log.preemptions,
            notes=notes,
        )
        return Run(
            info=info,
            requests=log.requests([one.arrival_ns for one in workload], spans, started),
            steps=log.steps(spans, started, llm.captures),
            decisions=log.decisions(),
        )


class _Request(NamedTuple):
    """What is submitted at `arrival_ns` after the start."""

    arrival_ns: int
    request_id: str
    prompt: Any
    params: SamplingParams


def _requests(llm: LLM, workload: Sequence[TimedRequest], name: str, seed: int) -> list[_Request]:
    random = np.random.default_rng(seed)
    return [
        _Request(
            one.arrival_ns,
            f"{name}-{number}",
            random.integers(0, llm.model.vocab_size, one.prompt_tokens),
            SamplingParams(temperature=0.0, max_tokens=one.output_tokens, ignore_eos=True),
        )
        for number, one in enumerate(workload)
    ]


def _serve(llm: LLM, requests: Sequence[_Request], started: int) -> None:
    """Submits each request when it is due, and drives the engine until all have ended."""
    left = iter(requests)
    upcoming = next(left, None)
    while upcoming is not None or llm.scheduler.has_requests or len(llm.engine.inbox):
        now = time.perf_counter_ns() - started
        while upcoming is not None and upcoming.arrival_ns <= now:
            llm.submit(upcoming.request_id, upcoming.prompt, upcoming.params)
            upcoming = next(left, None)
        if llm.run() is None:
            if upcoming is None:
                break
            _wait_until(started + upcoming.arrival_ns)


class _Reading(NamedTuple):
    """How far the device's clock was off, and when that was read. Nanoseconds."""

    at: int
    error: int

    @classmethod
    def of(cls, llm: LLM) -> _Reading:
        error = llm.engine.executor.lanes.clock_error_ns()
        return cls(time.perf_counter_ns(), error)


def _on_one_clock(spans: Sequence[Span], first: _Reading, last: _Reading) -> list[Span]:
    """The spans with those of the device on the host's clock, which drifted away evenly between two readings."""
    drift = (last.error - first.error) / max(last.at - first.at, 1)

    def moved(span: Span) -> Span:
        shift = first.error + round(drift * (span.start_ns - first.at))
        return span._replace(start_ns=span.start_ns + shift, end_ns=span.end_ns + shift)

    return [span if span.lane == "host" else moved(span) for span in spans]


def check_workload(llm: LLM, workload: Sequence[TimedRequest]) -> None:
    """Raises ConfigError for requests that the engine would reject."""
    config = llm.config
    room = min(config.max_model_len, config.num_blocks * config.block_size)
    for number, one in enumerate(workload):
        size = one.prompt_tokens + one.output_tokens
        if size > room:
            raise ConfigError(f"request {number}", size, f"prompt and output must fit {room} tokens")


def warm_up(llm: LLM) -> list[tuple[int, float]]:
    """Runs steps of every size that the LLM captures or compiles for, in every slot, and many that are launched
    kernel by kernel, so that no recorded step pays for what happens once. Returns what `warm_up_eager` does."""
    config = llm.config
    phase = 2 * config.depth + 1  # steps of one size: enough for every slot to have one
    sizes = config.decode_buckets or (config.max_num_seqs,)
    room = min(config.max_model_len, config.num_blocks * config.block_size)
    alive = [sum(size > number for size in sizes) for number in range(max(sizes))]
    closed = [_fitting(0, WARM_UP_PROMPT, 1 + phase * phases, room) for phases in alive]
    mixed = [_fitting(number * 30_000_000, WARM_UP_PROMPT * (1 + number), 8, room) for number in range(8)]
    # A prompt is one step, and steps take turns in the slots; the first of a shape is not captured yet.
    prompts = [[TimedRequest(0, size, 1)] * (1 + config.depth) for size in config.mixed_buckets if size < room]
    one_by_one = [[request] for same in prompts for request in same]
    for number, workload in enumerate((closed, mixed, *one_by_one)):
        _serve(llm, _requests(llm, workload, f"warm-up-{number}", number), time.perf_counter_ns())
    launches = warm_up_eager(llm)
    if llm.timeline is not None:
        llm.timeline.spans.clear()
    return launches


def warm_up_eager(llm: LLM) -> list[tuple[int, float]]:
    """Steps beyond every mixed bucket, of more and more sequences, and then of all tokens that a step may have; returns
    how many sequences, and the milliseconds of the longest launch (0 without a timeline). A device loads a kernel when
    it is first launched, and libraries have others for other numbers of rows: such a launch may block for long."""
    config = llm.config
    smallest, seats = max(config.mixed_buckets, default=0) + 1, config.max_num_seqs
    sizes = [(rows, -(-smallest // rows)) for rows in range(EAGER_ROWS, seats + 1, EAGER_ROWS)]
    sizes.append((seats, 2 * config.max_num_batched_tokens // seats))  # 0 for so many seats that one token each is more
    room = min(config.max_model_len, config.num_blocks * config.block_size)
    launches = []
    for number, (rows, prompt) in enumerate(sizes):
        first = len(llm.timeline.spans) if llm.timeline is not None else 0
        workload = [_fitting(0, prompt, 2, room)] * rows
        _serve(llm, _requests(llm, workload, f"warm-up-eager-{number}", number), time.perf_counter_ns())
        spans = llm.timeline.spans[first:] if llm.timeline is not None else []
        launches.append((rows, max((s.end_ns - s.start_ns for s in spans if s.name == "launch"), default=0) / 1e6))
    return launches


def _fitting(arrival_ns: int, prompt: int, output: int, room: int) -> TimedRequest:
    """A request of these tokens, of fewer where the two must fit `room`: of the prompt first. At least one of each."""
    prompt = max(min(prompt, room - output), 1)
    return TimedRequest(arrival_ns, prompt, max(min(output, room - prompt), 1))


def _wait_until(end_ns: int) -> None:
    """Sleeping alone would be late by what the system's timer makes of it."""
    while (left := (end_ns - time.perf_counter_ns()) / 1e9) > 0:
        if left > SPIN_S:
            time.sleep(left - SPIN_S)


def _allocations(llm: LLM) -> tuple[int, int]:
    """How often torch has asked the device for memory, and has given some back: either may stop a launch for long."""
    import torch

    device = llm.model.device
    if device.type != "cuda":
        return 0, 0
    stats = torch.cuda.memory_stats(device)
    return stats.get("num_device_alloc", 0), stats.get("num_device_free", 0)


# ---- what it ran on --------------------------------------------------------------------------------------------------


def _host(before: Reading, after: Reading) -> dict[str, Any]:
    both = before, after
    return {
        "probe_us": [round(one.step_us, 3) for one in both],
        "probe_thread_share": [round(one.thread_share, 4) for one in both],
        "cpus": [one.cpu for one in both],
    }


def _during(probed: Sequence[tuple[int, int]], started: int) -> dict[str, Any]:
    return {
        "probe_during_us": [took / 1e3 for _, took in probed],
        "probe_during_at_ms": [(at - started) / 1e6 for at, _ in probed],
    }


def _device(llm: LLM) -> dict[str, Any]:
    import torch

    device = llm.model.device
    if device.type != "cuda":
        return {"name": "CPU", "threads": torch.get_num_threads(), "inline": True}
    memory = torch.cuda.get_device_properties(device).total_memory
    return {"name": torch.cuda.get_device_name(device), "memory_bytes": memory, "inline": False}


def _versions() -> dict[str, Any]:
    import platform

    import torch
    import transformers

    from asyncsched import __version__

    versions = {
        "asyncsched": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return {**versions, **_driver_and_commit()}


@cache  # asking takes as long as a short run
def _driver_and_commit() -> dict[str, str]:
    """What only other programs know: the driver of the GPU, and the commit of this code, with `-dirty` behind it where
    that was changed since. Left out where they don't."""
    asked = {
        "driver": ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        "commit": ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"],
    }
    found = {}
    for name, command in asked.items():
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and done.stdout.strip():
            found[name] = done.stdout.split()[0]
    return found


def _model(llm: LLM) -> dict[str, Any]:
    model, config = llm.model, llm.model.module.config.get_text_config(decoder=True)
    parameters = list(model.module.parameters())
    facts = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    return {
        "name": model.name,
        **{fact: getattr(config, fact) for fact in facts if hasattr(config, fact)},
        "vocab_size": model.vocab_size,
        "dtype": str(model.dtype).removeprefix("torch."),
        "parameters": sum(one.numel() for one in parameters),
        "weight_bytes": sum(one.numel() * one.element_size() for one in parameters),
        "kv_bytes_per_token": model.kv_bytes_per_token,
        "attention": model.backend.name if hasattr(model.backend, "name") else type(model.backend).__name__,
    }
