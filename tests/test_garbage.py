"""The garbage collector stays out of the way of an engine, and is as it was behind it."""

from __future__ import annotations

import asyncio
import gc
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from test_compiled import TRACED
from test_llm import GREEDY, PROMPTS, tiny_llm
from tiny_models import TINY

from asyncsched.request import SamplingParams
from executors.async_engine import AsyncEngine
from executors.cpu import CpuLanes
from executors.errors import UnsupportedModelError
from executors.garbage import nothing_is_collected, old_objects_stay
from executors.kv_cache import KvCache
from executors.llm import LLM
from executors.models import Model

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def frozen_in_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each step, whether old objects stay."""
    seen: list[bool] = []
    run = llm.engine.run

    def watched() -> bool:
        seen.append(gc.get_freeze_count() > 0)
        return run()

    monkeypatch.setattr(llm.engine, "run", watched)
    return seen


def test_while_an_llm_generates_or_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm()
    seen = frozen_in_steps(llm, monkeypatch)
    llm.generate(PROMPTS, GREEDY)
    assert len(seen) > 2
    stream = llm.stream(PROMPTS, GREEDY)
    next(stream)
    assert gc.get_freeze_count() > 0
    stream.close()
    assert gc.get_freeze_count() == 0
    assert all(seen)


def test_while_an_engine_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve() -> int:
        engine = AsyncEngine(llm)
        async for _ in engine.generate(PROMPTS[0], GREEDY):
            pass
        frozen = gc.get_freeze_count()
        await engine.shutdown()
        return frozen

    llm = tiny_llm()
    seen = frozen_in_steps(llm, monkeypatch)
    assert asyncio.run(serve()) > 0
    assert seen
    assert all(seen)


def test_what_is_made_meanwhile_is_collected() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            gone.append(True)

    gone: list[bool] = []
    with old_objects_stay():
        Cycle()
        gc.collect()
    assert gone


def test_what_somebody_froze_for_good_stays_so() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    try:
        with old_objects_stay():
            assert gc.get_freeze_count() == before
        assert gc.get_freeze_count() == before
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("inside", [old_objects_stay, nothing_is_collected])
def test_who_leaves_first_ends_nothing_for_others(inside: Callable[[], AbstractContextManager[None]]) -> None:
    """Two engines, each in a thread of its own, of which one is shut down."""

    def state() -> tuple[bool, bool]:
        return gc.isenabled(), gc.get_freeze_count() > 0

    first, second = inside(), inside()
    before = state()
    first.__enter__()
    meanwhile = state()
    assert meanwhile != before
    second.__enter__()
    first.__exit__(None, None, None)
    assert state() == meanwhile
    second.__exit__(None, None, None)
    assert state() == before


class NoRanges:
    def range_push(self, msg: str) -> None:
        """Marks nothing."""

    def range_pop(self) -> None:
        """Marks nothing."""


@pytest.mark.parametrize(("compile", "nvtx"), [(False, False), (TRACED, False), (False, True)])
def test_the_memory_of_an_engine_that_is_gone_needs_no_collector(
    compile: object, nvtx: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which looks at nothing that is older than an engine that drives: a day later it would still be there."""
    monkeypatch.setattr("executors.llm.recorder", lambda device: NoRanges())
    llm = tiny_llm(depth=2, num_host_blocks=8, timeline=True, compile=compile, nvtx=nvtx)
    llm.generate(PROMPTS, [SamplingParams(temperature=0.0, max_tokens=9, logprobs=2)] * len(PROMPTS))
    stream = llm.stream(PROMPTS, GREEDY)
    next(stream)
    stream.close()
    layer = llm.model.module.model.layers[0]
    memory = {
        "KV": llm._compute.kv.keys[0],
        "outputs": llm._compute.tokens_out,
        "weights": layer.self_attn.o_proj.weight,
        "vocabulary": llm.model.module.lm_head.weight,
    }
    kept = {name: weakref.ref(tensor) for name, tensor in memory.items()}
    del stream, layer, memory
    gc.collect()  # what the compiler left
    with nothing_is_collected():
        del llm
        assert [name for name, tensor in kept.items() if tensor() is not None] == []


def failing(where: list[weakref.ref[torch.Tensor]]) -> Callable[..., torch.Tensor]:
    """A forward pass that fails, having noted what it was given: a weight and the KV."""

    def forward(model: Model, view: object, kv: KvCache) -> torch.Tensor:
        where.extend((weakref.ref(model.module.lm_head.weight), weakref.ref(kv.keys[0])))
        raise RuntimeError("the device is out of order")

    return forward


def somebody_elses() -> None:
    mine = 1
    raise KeyError(mine)


@pytest.mark.parametrize("is_loaded", [False, True])
def test_an_llm_that_cannot_be_made_keeps_nothing_while_its_error_is_there(
    is_loaded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading a model runs it for the self-check; of a model that is loaded, the first run is at start-up."""
    model = tiny_llm().model if is_loaded else TINY["llama"]()
    seen: list[weakref.ref[torch.Tensor]] = []
    monkeypatch.setattr(Model, "forward", failing(seen))
    monkeypatch.setattr(CpuLanes, "graphs", True)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    threads = threading.active_count()
    gc.collect()
    with nothing_is_collected():
        try:
            somebody_elses()
        except KeyError as error:
            with pytest.raises((RuntimeError, UnsupportedModelError), match="the device is out of order"):
                LLM(model, device="cpu", dummy_weights=not is_loaded, num_blocks=50, decode_buckets=(4,))
            weight, kv = seen
            assert kv() is None
            assert (weight() is not None) == is_loaded
            frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
            assert frames[-1].f_locals == {"mine": 1}
    assert threading.active_count() == threads


def test_what_is_garbage_when_an_engine_begins_does_not_stay_with_it() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    async def serve() -> bool:
        engine = AsyncEngine(llm)
        async for _ in engine.generate(PROMPTS[0], GREEDY):
            pass
        is_there = gone() is not None
        await engine.shutdown()
        return is_there

    llm = tiny_llm()
    gc.collect()
    gc.disable()
    try:
        gone = weakref.ref(Cycle())
        assert gone() is not None
        assert not asyncio.run(serve())
    finally:
        gc.enable()


@pytest.mark.parametrize("is_on", [True, False])
def test_the_collector_is_off_and_then_as_it_was(is_on: bool) -> None:
    (gc.enable if is_on else gc.disable)()
    try:
        with nothing_is_collected():
            assert not gc.isenabled()
        assert gc.isenabled() == is_on
    finally:
        gc.enable()
