"""`LLM`: real generation in vLLM's shape, synchronous, asynchronous or at any depth, on CUDA or on the CPU."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import numpy as np
import torch

from asyncsched.errors import AsyncschedError, ConfigError
from asyncsched.inputs import Buckets
from asyncsched.pipeline import Abort
from asyncsched.plan import StepPlan
from asyncsched.program import Lane
from asyncsched.request import SamplingParams, TokenArray
from asyncsched.scheduler import Scheduler
from asyncsched.timeline import Timeline
from executors import few_rows
from executors.asked import check_seed, check_settings, check_warm_up, depth_of
from executors.compiled import CompileSettings
from executors.compute import ComputeLane, variant
from executors.construction import whole_or_gone
from executors.cpu import CpuLanes
from executors.cuda import CudaLanes
from executors.engine import DEAD, Deliverer, Engine
from executors.errors import EngineDeadError, one_line
from executors.executor import Executor, Lanes
from executors.frontend import Frontend, core_id
from executors.garbage import old_objects_stay
from executors.model_files import load_tokenizer
from executors.models import Model
from executors.nvtx import mark, recorder
from executors.outputs import RequestOutput, StreamPiece
from executors.sampling_layout import Features
from executors.sampling_rows import SamplingRows
from executors.sampling_state import SamplerState
from executors.settings import (
    check_model,
    compile_settings,
    device_of,
    dtype_of,
    engine_config,
    eos_token_ids,
)
from executors.slots import Slot

Prompt = str | Sequence[int]
Report = Callable[[str], None]
Result = StreamPiece | RequestOutput


class LLM:
    """One model, ready to generate. Every setting of `EngineConfig` may be given by name.

    model       folder, .gguf file or hub name; or a transformers configuration, with dummy_weights; or a loaded
                `Model`, which several LLMs may share
    mode, depth "sync" is depth 1, "async" depth 2; a depth given alone decides
    device      "auto" is CUDA where there is one
    dtype       "auto" is the checkpoint's on CUDA, float32 on the CPU
    num_blocks  KV blocks; None takes what fits the free memory
    seed        for requests without a seed of their own, and for dummy weights
    timeline    record spans of every lane
    decisions   keep the scheduler's decision log, in `log`; without a choice, where there is a timeline
    compile     compile the model's layers; None means on CUDA
    warm_up     parameters like those that requests will have: CUDA graphs for them are captured now. The others are
                captured when they are needed: the first steps of each shape take as long as launching them does
    nvtx        mark steps and lanes for Nsight Systems; needs CUDA
    report      called with one line for each stage of start-up

    startup_s   seconds that all of this took; imports came before
    stages      what `report` was told, each line with the seconds from the call to it
    graphs      whether decode steps run as CUDA graphs

    One that cannot be made gives its memory back before whoever made it handles the error.
    """

    @whole_or_gone
    def __init__(
        self,
        model: Any,
        *,
        mode: str | None = None,
        depth: int | None = None,
        device: str = "auto",
        dtype: str = "auto",
        dummy_weights: bool = False,
        tokenizer: Any = "auto",
        num_blocks: int | None = None,
        seed: int = 0,
        timeline: bool = False,
        nvtx: bool = False,
        decisions: bool | None = None,
        report: Report | None = None,
        attention: str = "auto",
        compile: bool | CompileSettings | None = None,
        warm_up: Sequence[SamplingParams] = (),
        **engine: Any,
    ) -> None:
        started = time.perf_counter()
        self.stages: list[tuple[str, float]] = []

        def say(line: str) -> None:
            self.stages.append((line, time.perf_counter() - started))
            if report is not None:
                report(line)

        model = os.fspath(model) if isinstance(model, os.PathLike) else model
        check_model(model, dummy_weights)
        check_seed(seed)
        check_warm_up(warm_up)
        steps = depth_of(mode, depth)
        check_settings(steps, num_blocks, engine)
        where = device_of(device)
        marks = recorder(where) if nvtx else None
        weights = dtype_of(dtype, where)
        self.model = (
            model
            if isinstance(model, Model)
            else Model.load(
                model,
                device=where,
                dtype=weights,
                dummy_weights=dummy_weights,
                seed=seed,
                attention=attention,
                compile=compile_settings(compile, where),
                report=say,
            )
        )
        if engine.get("batch_invariant"):
            say("comparing steps of each size")
        self.config = engine_config(self.model, steps, num_blocks, engine)
        say(f"allocating {self.config.num_blocks} KV blocks of {self.config.block_size} tokens")
        kv = self.model.allocate_kv(self.config.num_blocks, self.config.block_size)
        why = ""
        if tokenizer == "auto" and isinstance(model, str):
            say("loading the tokenizer")
            tokenizer, why = load_tokenizer(model)
        self.timeline = Timeline() if timeline else None
        self.log: list[str] = []
        logged = timeline if decisions is None else decisions
        self.scheduler = Scheduler(self.config, log=self.log if logged else None)
        self.frontend = Frontend(None if tokenizer == "auto" else tokenizer, eos_token_ids(self.model), why)
        lanes: Lanes = CudaLanes(where, timed=timeline) if where.type == "cuda" else CpuLanes()
        self._sampling_rows = SamplingRows(self.scheduler.rows.capacity, self.model.vocab_size, seed=seed)
        for params in warm_up:
            self._sampling_rows.check(params)
        executor = self._executor(kv, lanes)
        if marks is not None:
            mark(executor, marks)
        self._results: list[Result] = []
        self.engine = Engine(self.scheduler, executor, _deliverer(self.frontend, self._results))
        self._claims: dict[str, deque[Result]] = {}  # who drives the engine for a prompt gets its results
        self._ids = (str(number) for number in itertools.count())
        refusal = self._capture(lanes, warm_up, say) if lanes.graphs else ""
        if refusal:
            say(f"CUDA graphs are off, decode steps are launched kernel by kernel: {refusal}")
        self.graphs = lanes.graphs and not refusal
        say("ready")
        self.startup_s = self.stages[-1][1]

    # ---- users -----------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """One output per prompt, in the order of the prompts. Raises ConfigError before anything runs."""
        ids = self._submit(prompts, params, is_streamed=False)
        done = {result.request_id: result for result in self._drive(ids) if isinstance(result, RequestOutput)}
        return [done[request_id] for request_id in ids]

    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[StreamPiece]:
        """Pieces as they arrive; `prompt_index` says whose each is. Leaving early aborts what has not finished."""
        ids = self._submit(prompts, params)
        for result in self._drive(ids):
            if isinstance(result, StreamPiece):
                yield result

    def chat(self, messages: Sequence[Mapping[str, str]], params: SamplingParams | None = None) -> RequestOutput:
        """The answer to a conversation, through the tokenizer's template."""
        return self.generate([self.chat_prompt(messages)], params)[0]

    def chat_prompt(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The conversation as token ids."""
        tokenizer = self.frontend.tokenizer
        if tokenizer is None or not getattr(tokenizer, "chat_template", None):
            raise ConfigError("messages", len(messages), "the model's tokenizer has no chat template: give a prompt")
        try:
            encoded = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=True)
        except Exception as cause:  # a template is a program of the model's: it may raise anything
            reason = f"the model's chat template refuses them: {one_line(cause)}"
            raise ConfigError("messages", messages, reason) from cause
        return list(encoded["input_ids"])

    # ---- what a recording asks --------------------------------------------------------------------------------------

    def captures(self, plan: StepPlan) -> bool:
        """Whether the step runs as one CUDA graph."""
        return self._compute.is_captured(plan)

    @property
    def num_graphs(self) -> int:
        """Graphs captured so far, and shapes of steps that ran once to be captured."""
        return self._compute.num_graphs

    # ---- requests --------------------------------------------------------------------------------------------------

    @property
    def usable(self) -> bool:
        """Whether it takes prompts. A step that fails leaves it usable unless the device has stopped answering."""
        return not self.engine.death

    def require_usable(self) -> None:
        """Raises EngineDeadError."""
        if self.engine.death:
            raise EngineDeadError(f"{DEAD}; it died of {self.engine.death}")

    def check(self, prompt: Prompt, params: SamplingParams) -> TokenArray:
        """The prompt's tokens; raises ConfigError for a prompt or parameters that this model cannot take."""
        if not isinstance(params, SamplingParams):
            raise ConfigError("params", params, "use a SamplingParams, or one for each prompt")
        self._sampling_rows.check(params)
        if params.stop and self.frontend.tokenizer is None:
            raise ConfigError("stop", params.stop, f"{self.frontend.no_tokenizer}, so no text: use stop_token_ids")
        tokens = self.frontend.encode(prompt)
        if not len(tokens):
            raise ConfigError("prompt", prompt, "it must have at least one token")
        bad = tokens[(tokens < 0) | (tokens >= self.model.vocab_size)]
        if len(bad):
            raise ConfigError("prompt", int(bad[0]), f"use token ids from 0 to {self.model.vocab_size - 1}")
        return tokens

    def submit(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        token_ids: TokenArray | None = None,
        prompt_index: int = 0,
        is_streamed: bool = True,
    ) -> None:
        """Puts one checked prompt into the inbox; `run` drives it. Raises EngineDeadError.

        token_ids     what `check` gave, which saves encoding the prompt again
        prompt_index  what the pieces of its stream say about it
        is_streamed   whether anybody wants them; without, they are not made
        """
        self.require_usable()
        for command in self.frontend.requests(
            request_id, prompt, params, token_ids, prompt_index, is_streamed=is_streamed
        ):
            self.engine.inbox.put(command)

    def run(self) -> list[Result] | None:
        """Drives the engine until something is delivered; None when it has nothing to do."""
        if not self.engine.run():
            return None
        results = self._results.copy()
        self._results.clear()
        return results

    def abort(self, request_id: str, n: int = 1) -> None:
        """Ends a prompt's outputs; the engine delivers their last notices."""
        for index in range(n):
            self.engine.inbox.put(Abort(core_id(request_id, index)))

    def _submit(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        is_streamed: bool = True,
    ) -> list[str]:
        self.require_usable()
        several = _as_list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(several)
        if len(each) != len(several):
            raise ConfigError("params", len(each), f"give one, or one for each of the {len(several)} prompts")
        tokens = [self.check(prompt, one) for prompt, one in zip(several, each, strict=True)]
        ids = [next(self._ids) for _ in several]
        for place, (request_id, prompt, one) in enumerate(zip(ids, several, each, strict=True)):
            self.submit(request_id, prompt, one, token_ids=tokens[place], prompt_index=place, is_streamed=is_streamed)
        return ids

    def _drive(self, ids: Sequence[str]) -> Iterator[Result]:
        """Results of these prompts until all of them are complete. Whoever leaves before aborts the rest."""
        left = set(ids)
        mine: deque[Result] = deque()
        self._claims.update(dict.fromkeys(ids, mine))
        with old_objects_stay():
            try:
                while left:
                    if not mine and not self._step():
                        raise AsyncschedError(f"the engine stopped with {len(left)} requests unfinished")
                    while mine:
                        result = mine.popleft()
                        if isinstance(result, RequestOutput):
                            left.discard(result.request_id)
                        yield result
            finally:
                for request_id in ids:
                    del self._claims[request_id]
                self._abort([request_id for request_id in ids if request_id in left])

    def _step(self) -> bool:
        """Runs, and gives the results to whoever drives the engine for them. False when there is nothing to do."""
        with _interrupts_wait():
            results = self.run()
            for result in results or ():
                if result.request_id in self._claims:
                    self._claims[result.request_id].append(result)
        return results is not None

    def _abort(self, ids: Sequence[str]) -> None:
        """Aborts what has not finished, and lets the engine settle it."""
        for request_id in ids:
            self.abort(request_id, self.frontend.num_outputs(request_id))
        while len(self.engine.inbox) and self._step():
            pass

    # ---- parts -----------------------------------------------------------------------------------------------------

    def _capture(self, lanes: Lanes, warm_up: Sequence[SamplingParams], say: Report) -> str:
        """Finds out whether the model's decode steps can be captured, and returns why not; captures what is asked."""
        stream, slots, shapes = lanes.stream(Lane.COMPUTE), self.engine.executor.slots, self._compute.shapes
        say("trying the library's products")
        sizes = sorted({max(shape) for shape in shapes})
        samples = sorted({decodes or self.config.max_num_seqs for decodes, _ in shapes})
        with few_rows.alike() if self.config.batch_invariant else nullcontext():
            if why := few_rows.choose(self.model.module, sizes, samples):
                say(f"products are as the library would have them: {why}")
        say("capturing the first CUDA graph")
        try:
            refusal = self._compute.capture(stream, slots[:1], shapes[:1], Features.NONE)
            for features, needed in self._needs(warm_up):
                if not refusal:
                    say(f"capturing {len(slots) * len(needed)} CUDA graphs")
                    refusal = self._compute.capture(stream, slots, needed, features)
        except BaseException:
            with suppress(RuntimeError):  # what is enqueued touches memory that is about to be given back
                lanes.drain()
            raise
        torch.cuda.synchronize(lanes.device)
        return refusal

    def _needs(self, warm_up: Sequence[SamplingParams]) -> list[tuple[int, list[Buckets]]]:
        """Sampling features, and the shapes of the steps that have them, of requests with such parameters."""
        shapes, eos = self._compute.shapes, eos_token_ids(self.model)
        asked = {variant(used) for params in warm_up for used in self._sampling_rows.needs(params.with_eos(eos))}
        needs = [(features, shapes) for features in sorted(asked)]
        fullest = (0, self.config.max_num_batched_tokens)  # what is not the end of a prompt fills its step: no samples
        if asked and Features.NONE not in asked and fullest in shapes:
            needs.insert(0, (Features.NONE, [fullest]))
        return needs

    def _executor(self, kv: Any, lanes: Lanes) -> Executor:
        config, rows, device, frontend = self.config, self.scheduler.rows, self.model.device, self.frontend
        tokens_out = torch.zeros(config.depth, config.max_num_seqs, dtype=torch.int32, device=device)
        slots = [
            Slot(index, config, rows, self._sampling_rows, tokens_out[index], pinned=lanes.pinned)
            for index in range(config.depth)
        ]
        sampler = SamplerState(rows.capacity, self.model.vocab_size, device)
        self._compute = ComputeLane(config, self.model, kv, sampler, tokens_out, graphs=lanes.graphs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the buffers above were made on another stream
        return Executor(
            lanes,
            self._compute,
            slots,
            on_logprobs=lambda plan, words: frontend.on_logprobs(plan, words, rows),
            timeline=self.timeline,
        )


def _deliverer(frontend: Frontend, results: list[Result]) -> Deliverer:
    """Adds what comes of a step to the results. It knows no LLM: one that is gone gives its memory back at once, and
    not when the collector finds it, which may be never while another engine drives."""
    return lambda output: results.extend(frontend.deliver(output))


def _as_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt or many: a text, or token ids in a row, is one. Raises ConfigError for what is neither."""
    if isinstance(prompts, str) or (isinstance(prompts, np.ndarray | torch.Tensor) and prompts.ndim == 1):
        return [prompts]  # type: ignore[list-item]  # it is one prompt
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise ConfigError("prompts", prompts, "use a text, token ids, or a list of such prompts")
    several = list(prompts)
    return [several] if several and isinstance(several[0], int | np.integer) else several  # type: ignore[list-item]


@contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Ctrl-C inside takes effect at the end: a step that breaks off would be the engine's last. Twice is at once."""
    usual = signal.default_int_handler
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is not usual:
        yield
        return
    asked = False

    def ask(*_: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
    if asked:
        raise KeyboardInterrupt
