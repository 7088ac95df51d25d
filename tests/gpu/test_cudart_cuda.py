"""What goes straight to the CUDA runtime on a GPU: the tokens of torch's own calls, errors that surface, and graphs
that draw random numbers. tests/test_cudart.py looks at the calls one by one.
"""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from tiny_models import TINY

from asyncsched.program import Event, Lane
from asyncsched.request import SamplingParams
from executors.cuda import CudaLanes, CudaStream
from executors.cudart import CudaError, Runtime, loaded_library
from executors.llm import LLM
from executors.streams import Transfer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SIZES = {"block_size": 16, "max_num_seqs": 8, "num_blocks": 64, "max_model_len": 128}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
ALL_KINDS = [
    GREEDY,
    SamplingParams(seed=3, max_tokens=24, ignore_eos=True),
    SamplingParams(seed=4, top_p=0.9, repetition_penalty=1.2, logprobs=2, max_tokens=24, ignore_eos=True),
]


def tiny(depth: int = 2, **settings: object) -> LLM:
    options = {"dtype": "float32", "compile": False, **SIZES, **settings}
    return LLM(TINY["llama"](), depth=depth, device="cuda", dummy_weights=True, **options)


def run(llm: LLM, params: SamplingParams = GREEDY) -> list[tuple[int, ...]]:
    draw = random.Random(0)
    prompts = [[draw.randrange(128) for _ in range(draw.choice([1, 5, 16, 31, 40]))] for _ in range(12)]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


def copy_by_torch(stream: CudaStream, transfer: Transfer) -> None:
    with stream.on():
        transfer.to.copy_(transfer.source, non_blocking=True)


def through_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every copy, replay, record and wait with torch's own calls."""

    def recorder(lanes: CudaLanes, event: Event, lane: Lane) -> object:
        return partial(lanes._event(event).record, lanes.streams[lane])

    def waiter(lanes: CudaLanes, event: Event, lane: Lane) -> object:
        return partial(lanes.streams[lane].wait_event, lanes._event(event))

    monkeypatch.setattr(CudaStream, "copy", copy_by_torch)
    monkeypatch.setattr(CudaStream, "replay", CudaStream._replay_by_torch)
    monkeypatch.setattr(CudaLanes, "recorder", recorder)
    monkeypatch.setattr(CudaLanes, "waiter", waiter)


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 9, "max_num_batched_tokens": 24, "preemption": "offload"}])
def test_tokens_are_those_of_the_calls_of_torch(settings: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    ours = [[run(llm, params) for params in ALL_KINDS] for llm in (tiny(1, **settings), tiny(3, **settings))]
    through_torch(monkeypatch)
    llm = tiny(2, **settings)
    expected = [run(llm, params) for params in ALL_KINDS]
    assert ours == [expected, expected]
    assert not llm.engine.executor.lanes.stream(Lane.COMPUTE)._launches  # they did go through torch


def test_captured_steps_are_launched_directly() -> None:
    llm = tiny()
    run(llm)
    lanes = llm.engine.executor.lanes
    launches = lanes.stream(Lane.COMPUTE)._launches
    assert len(launches) > 1
    assert all(call.func is lanes._runtime.launch for call in launches.values())  # none of ours draws from torch


def test_a_graph_that_draws_from_torch_stays_with_torch() -> None:
    lanes = CudaLanes(torch.device("cuda", 0))
    stream = lanes.stream(Lane.COMPUTE)
    drawn, fixed = (torch.zeros(64, device="cuda") for _ in range(2))
    torch.cuda.synchronize()
    graphs = []
    for work in (lambda: drawn.uniform_(), lambda: fixed.add_(1)):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=lanes.streams[Lane.COMPUTE]):
            work()
        graphs.append(graph)
    seen = []
    for _ in range(4):
        for graph in graphs:
            stream.replay(graph)
        lanes.drain()
        seen.append((tuple(drawn.tolist()), fixed[0].item()))
    assert len({values for values, _ in seen}) == 4
    assert [value for _, value in seen] == [1, 2, 3, 4]


def test_a_refused_call_fails_its_step_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny()
    expected = run(llm)
    executor = llm.engine.executor
    lanes = executor.lanes
    record = lanes._runtime.record
    with monkeypatch.context() as patch:
        no_event = 0
        patch.setattr(lanes, "recorder", lambda event, lane: partial(record, no_event, lanes.streams[lane].cuda_stream))
        executor._resolved.clear()
        outputs = [output.outputs[0] for output in llm.generate([[1, 2, 3]], GREEDY)]
        assert outputs[0].finish_reason == "error"
        assert outputs[0].message.startswith("CudaError: cudaEventRecord: cudaErrorInvalid")
        assert "the engine is still usable" in outputs[0].message
    executor._resolved.clear()
    assert torch.ones(3, device="cuda").sum().item() == 3  # nobody else is blamed for it
    assert run(llm) == expected


def test_the_runtime_is_torchs_own() -> None:
    runtime = Runtime(loaded_library())
    event, stream = torch.cuda.Event(), torch.cuda.Stream()
    event.record(stream)
    runtime.record(event.cuda_event, stream.cuda_stream)
    assert event.synchronize() is None
    assert event.query()
    with pytest.raises(CudaError, match=r"^cudaEventRecord: cudaErrorInvalid\w+: \w+"):
        runtime.record(0, stream.cuda_stream)


def test_only_pinned_memory_is_copied() -> None:
    device, host = torch.zeros(4, device="cuda"), torch.zeros(4)
    with pytest.raises(ValueError, match="is not pinned"):
        Transfer.of(device, host)
    with pytest.raises(ValueError, match="is not pinned"):
        Transfer.of(host, device)
    assert Transfer.of(device, host.pin_memory()).num_bytes == 16
