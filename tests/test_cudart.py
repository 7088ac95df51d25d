"""What a step asks of the CUDA runtime, call by call: CUDA's lanes on a machine without CUDA, over a runtime that
writes down its calls, copies at once and fails when told to. What a real one makes of them is a matter of tests/gpu.
"""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from test_llm import GREEDY, PROMPTS, expected_tokens, tiny_llm, tokens_of

from asyncsched.errors import AsyncschedError
from asyncsched.pipeline import Effect, Launch
from asyncsched.program import Lane, OpKind, StepProgram
from executors.cpu import CpuLanes, CpuStream
from executors.cuda import CudaLanes, CudaStream
from executors.cudart import CudaError, Runtime, loaded_library
from executors.garbage import nothing_is_collected
from executors.llm import LLM
from executors.streams import Transfer

P, INT = ctypes.c_void_p, ctypes.c_int
NAME, TEXT = (ctypes.create_string_buffer(text) for text in (b"cudaErrorIllegalAddress", b"an illegal address"))
ILLEGAL = 700


class FakeLibrary:
    """Functions as ctypes has them. `calls` are their names and arguments; `failing`, a name, gives an error code."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.failing = ""
        self.taken_back = 0
        self.cudaMemcpyAsync = ctypes.CFUNCTYPE(INT, P, P, ctypes.c_size_t, INT, P)(self._copy)
        self.cudaEventRecord = ctypes.CFUNCTYPE(INT, P, P)(partial(self._call, "record"))
        self.cudaStreamWaitEvent = ctypes.CFUNCTYPE(INT, P, P, ctypes.c_uint)(partial(self._call, "wait"))
        self.cudaGraphLaunch = ctypes.CFUNCTYPE(INT, P, P)(partial(self._call, "launch"))
        self.cudaGetLastError = ctypes.CFUNCTYPE(INT)(self._take_back)
        self.cudaGetErrorName = ctypes.CFUNCTYPE(P, INT)(lambda code: ctypes.addressof(NAME))
        self.cudaGetErrorString = ctypes.CFUNCTYPE(P, INT)(lambda code: ctypes.addressof(TEXT))

    def _call(self, name: str, *arguments: object) -> int:
        self.calls.append((name, *arguments))
        return ILLEGAL if name == self.failing else 0

    def _copy(self, to: int, source: int, num_bytes: int, kind: int, stream: int) -> int:
        assert kind == 4  # cudaMemcpyDefault
        code = self._call("copy", num_bytes, stream)
        if not code:
            ctypes.memmove(to, source, num_bytes)
        return code

    def _take_back(self) -> int:
        self.taken_back += 1
        return ILLEGAL


class FakeEvent:
    """Has a handle once it was recorded, as torch's events do."""

    handles = count(100)

    def __init__(self, **_: object) -> None:
        self.cuda_event = 0

    def record(self, stream: object) -> None:
        self.cuda_event = self.cuda_event or next(self.handles)

    def synchronize(self) -> None:
        """What was enqueued has run."""


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLibrary]:
    fake, handles = FakeLibrary(), count(1)
    stream = partial(SimpleNamespace, device_index=0, synchronize=lambda: None)
    monkeypatch.setattr("executors.cuda.loaded_library", lambda: fake)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream(cuda_stream=next(handles)))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return fake


def on_cuda_lanes(depth: int = 2) -> tuple[LLM, CudaLanes]:
    llm = tiny_llm(depth=depth)
    lanes = CudaLanes(torch.device("cpu"))
    llm.engine.executor.lanes = lanes
    return llm, lanes


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_step_makes_the_calls_of_its_program(depth: int, library: FakeLibrary) -> None:
    llm, lanes = on_cuda_lanes(depth)
    launched: list[StepProgram] = []

    def observe(effect: Effect) -> None:
        if isinstance(effect, Launch):
            launched.append(effect.program)

    llm.engine.observer = observe
    assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected_tokens(llm)
    assert {len(plan.sampled) for _, plan in launched} > {0, 3}
    stream = {lane: lanes.streams[lane].cuda_stream for lane in (Lane.H2D, Lane.COMPUTE, Lane.D2H)}
    assert len(set(stream.values())) == 3
    events = {(event.kind, event.slot): made.cuda_event for event, made in lanes._events.items()}
    assert len(set(events.values())) == 3 * depth
    assert 0 not in events.values()
    calls = [call if call[0] != "copy" else (call[0], call[2]) for call in library.calls]
    for template, plan in launched:
        expected = []
        for op in template.launched:
            if op.kind is OpKind.H2D or (op.kind is OpKind.D2H and len(plan.sampled)):
                expected.append(("copy", stream[op.lane]))
            elif op.event is not None:
                event = events[op.event.kind, op.event.slot]
                lane = stream[op.lane]
                expected.append(("record", event, lane) if op.kind is OpKind.RECORD else ("wait", lane, event, 0))
        assert calls[: len(expected)] == expected
        del calls[: len(expected)]
    assert calls == []


@pytest.mark.parametrize(("failing", "function"), [("copy", "cudaMemcpyAsync"), ("wait", "cudaStreamWaitEvent")])
def test_a_call_that_cuda_refuses_fails_its_step(failing: str, function: str, library: FakeLibrary) -> None:
    llm, _ = on_cuda_lanes()
    library.failing = failing
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY)]
    cause = f"CudaError: {function}: cudaErrorIllegalAddress: an illegal address"
    assert {(one.finish_reason, one.message) for one in outputs} == {("error", f"{cause}; the engine is still usable")}
    assert library.taken_back == sum(call[0] == failing for call in library.calls) > 0
    library.failing = ""
    assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected_tokens(llm)


def test_an_event_that_cannot_be_made_fails_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program is resolved in its first step: that is as much of a launch as the calls that follow."""
    llm = tiny_llm(depth=2, timeline=True)

    def refuse(*_: object) -> None:
        raise RuntimeError("no event")

    with monkeypatch.context() as patch:
        patch.setattr(CpuLanes, "recorder", refuse)
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY)]
    wanted = ("error", "RuntimeError: no event; the engine is still usable")
    assert {(one.finish_reason, one.message) for one in outputs} == {wanted}
    assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected_tokens(llm)


def test_a_step_that_samples_nothing_copies_nothing_out(library: FakeLibrary) -> None:
    llm, lanes = on_cuda_lanes(1)
    long = list(range(llm.config.max_num_batched_tokens + 1))
    assert tokens_of(llm.generate([long], GREEDY)) == expected_tokens(llm, [long])
    copied = [call[1:] for call in library.calls if call[0] == "copy"]
    d2h = [size for size, stream in copied if stream == lanes.streams[Lane.D2H].cuda_stream]
    assert d2h == [4] * (llm.engine.steps - 1)


class FakeGraph:
    """`draws` random numbers per replay from torch's generator."""

    def __init__(self, generator: SimpleNamespace, draws: int) -> None:
        self.generator, self.draws = generator, draws
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self.generator.offset += self.draws

    def raw_cuda_graph_exec(self) -> int:
        return 77


@pytest.mark.parametrize("draws", [0, 4])
def test_graphs_are_launched_directly_unless_they_draw(
    draws: int, library: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = SimpleNamespace(offset=8)
    generator.get_offset = lambda: generator.offset
    monkeypatch.setattr(torch.cuda, "default_generators", [generator])
    stream = CudaStream(torch.cuda.Stream(0), Runtime(library))
    graph = FakeGraph(generator, draws)
    for _ in range(3):
        stream.replay(graph)  # type: ignore[arg-type]
    assert graph.replays == (3 if draws else 1)
    assert library.calls == ([] if draws else [("launch", 77, stream._handle)] * 2)
    gone = weakref.ref(graph)
    with nothing_is_collected():
        del stream, graph
        assert gone() is None


def test_errors_name_the_call(library: FakeLibrary) -> None:
    runtime = Runtime(library)
    library.failing = "record"
    with pytest.raises(CudaError, match=r"^cudaEventRecord: cudaErrorIllegalAddress: an illegal address$"):
        runtime.record(1, 2)
    runtime.wait(2, 1, 0)
    with pytest.raises(ctypes.ArgumentError):
        runtime.record(1.5, 2)


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has a runtime of its own")
def test_a_torch_without_a_runtime_is_told() -> None:
    with pytest.raises(AsyncschedError, match=r"torch .* has not loaded libcudart\.so"):
        loaded_library()


def test_only_equal_and_whole_buffers_are_copied() -> None:
    a = torch.arange(6, dtype=torch.int32).view(2, 3)
    transfer = Transfer.of(torch.zeros_like(a), a)
    assert (transfer.source_ptr, transfer.num_bytes) == (a.data_ptr(), 24)
    for to in (torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 3), torch.zeros(3, 2, dtype=torch.int32).T):
        with pytest.raises(ValueError, match="as bytes"):
            Transfer.of(to, a)


@pytest.mark.parametrize("is_idle", [False, True])
def test_an_engine_that_is_dropped_waits_for_its_copies(is_idle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    drained = []
    monkeypatch.setattr(CpuLanes, "drain", lambda lanes: drained.append(lanes))
    llm = tiny_llm(depth=2)
    lanes = llm.engine.executor.lanes
    llm.submit("0", PROMPTS[0], GREEDY)
    assert llm.run() is not None
    while is_idle and llm.run() is not None:
        pass
    del llm
    gc.collect()
    assert drained.count(lanes) == (0 if is_idle else 1)  # engines of other tests may end here too


class OnLane(CpuStream):
    """Knows whether torch is to work on it just now."""

    depth = 0

    @contextmanager
    def on(self) -> Iterator[None]:
        self.depth += 1
        yield
        self.depth -= 1


def test_room_for_resets_is_of_the_lane_that_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that was given up on another stream may still be read there: nobody waits for that stream."""
    llm = tiny_llm(depth=1)
    slot, lane, taken = llm.engine.executor.slots[0], OnLane(), []
    empty = torch.empty

    def watched(*sizes: int, **options: object) -> torch.Tensor:
        taken.append((lane.depth, slot._host_resets.numel()))
        return empty(*sizes, **options)

    with monkeypatch.context() as patch:
        patch.setattr(CpuLanes, "stream", lambda lanes, of: lane)
        llm.submit("0", PROMPTS[0], replace(GREEDY, repetition_penalty=1.3))
        patch.setattr(torch, "empty", watched)
        assert llm.run() is not None
    assert slot.resets.numel() >= 4096
    assert taken
    assert all(entry == (1, slot.resets.numel()) for entry in taken)
