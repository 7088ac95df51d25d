"""Generation on a GPU: the same tokens at every depth, under evictions and offload, and no accidental synchronize."""

from __future__ import annotations

import gc
import random

import pytest
import torch
from tiny_models import TINY, generate, reference_of

from asyncsched.request import SamplingParams
from executors import few_rows
from executors.llm import LLM
from executors.named_configs import named_config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
EVERYTHING = SamplingParams(
    seed=3,
    temperature=0.9,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    logit_bias={5: 2.0},
    logprobs=2,
    max_tokens=24,
    min_tokens=24,
    stop_token_ids=(1, 2),
)
SMALL = {"block_size": 16, "max_num_seqs": 8, "num_blocks": 64, "max_model_len": 128}
TIGHT = {**SMALL, "num_blocks": 9, "max_num_batched_tokens": 24}


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(128) for _ in range(draw.choice([1, 5, 16, 31, 40]))] for _ in range(count)]


def tokens(name: str, depth: int, **engine: object) -> tuple[list[tuple[int, ...]], LLM]:
    options = {"dtype": "float32", "compile": False, **engine}
    llm = LLM(TINY[name](), depth=depth, device="cuda", dummy_weights=True, **options)
    return [output.outputs[0].token_ids for output in llm.generate(prompts(12), GREEDY)], llm


@pytest.mark.parametrize("params", [GREEDY, EVERYTHING])
@pytest.mark.parametrize("depth", [1, 2])
def test_after_a_warm_up_no_step_is_captured_and_tokens_stay(depth: int, params: SamplingParams) -> None:
    options = {"dtype": "float32", "compile": False, **SMALL, "mixed_buckets": (16, 64), "max_num_batched_tokens": 64}
    made = [
        LLM(TINY["llama"](), depth=depth, device="cuda", dummy_weights=True, warm_up=warm_up, **options)
        for warm_up in ([], [params])
    ]
    graphs = [llm._compute._graphs.copy() for llm in made]
    assert len(graphs[0]) == 1
    assert len(graphs[1]) >= depth * (len(made[1].config.decode_buckets) + 2)
    cold, warm = ([output.outputs[0] for output in llm.generate(prompts(12), params)] for llm in made)
    assert [output.token_ids for output in warm] == [output.token_ids for output in cold]
    assert [output.logprobs for output in warm] == [output.logprobs for output in cold]
    features = {key[2] for key in graphs[1]} - {0}
    late = [key for key in made[1]._compute._graphs.keys() - graphs[1].keys() if not features or key[2] in features]
    assert not late
    assert made[0]._compute._graphs.keys() - graphs[0].keys()


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral-window", "gpt-oss-sinks"])
def test_every_depth_gives_the_tokens_of_generate(name: str) -> None:
    expected = None
    for depth in (1, 2, 3):
        got, llm = tokens(name, depth, **SMALL)
        if expected is None:
            reference = reference_of(llm.model).to("cuda")
            expected = [tuple(generate(reference, prompt, 24)) for prompt in prompts(12)]
            assert len(set(expected)) > 6
        assert got == expected


@pytest.mark.parametrize("preemption", ["recompute", "offload"])
def test_evictions_change_no_token(preemption: str) -> None:
    expected, _ = tokens("llama", 1, **SMALL)
    for depth in (2, 3):
        got, llm = tokens("llama", depth, **TIGHT, preemption=preemption)
        assert llm.scheduler.preemptions > 0
        assert got == expected


@pytest.mark.parametrize("params", [GREEDY, EVERYTHING], ids=["greedy", "everything"])
@pytest.mark.parametrize(
    "engine",
    [
        SMALL,
        {**TIGHT, "preemption": "recompute"},
        {**TIGHT, "preemption": "offload"},
        {**TIGHT, "mixed_buckets": (24,)},
    ],
    ids=["roomy", "recompute", "offload", "captured"],
)
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_synchronizes_by_accident(params: SamplingParams, engine: dict[str, object]) -> None:
    """Whole generations: prefills, decodes, evictions, and all that a request may ask of the sampler."""
    options = {"depth": 2, "dtype": "float32", "compile": False, **engine}
    llm = LLM(TINY["llama"](), device="cuda", dummy_weights=True, **options)
    expected = llm.generate(prompts(12), params)  # captures its graphs, and allocates what it needs
    try:
        torch.cuda.set_sync_debug_mode("error")
        outputs = llm.generate(prompts(12), params)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not llm._compute.refusal
    assert [output.outputs[0].token_ids for output in outputs] == [output.outputs[0].token_ids for output in expected]
    assert all(len(output.outputs[0].token_ids) == 24 for output in outputs)  # a step that raises ends its requests
    assert engine is SMALL or llm.scheduler.preemptions > 0


def test_captured_mixed_steps_change_no_token() -> None:
    """Prompts arrive while others decode; captured or kernel by kernel, at every depth, the tokens are the same."""
    settings = {**SMALL, "max_num_seqs": 3, "max_num_batched_tokens": 48}
    expected, llm = tokens("llama", 1, **settings, mixed_buckets=())
    assert not llm.config.mixed_buckets
    for depth in (1, 2, 3):
        got, llm = tokens("llama", depth, **settings, mixed_buckets=(8, 24, 48))
        assert any(buckets[1] for _, buckets, _ in llm._compute._graphs)
        assert got == expected


def test_an_engine_that_is_gone_breaks_no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graphs are garbage, and the collector would give them up whenever it likes."""
    expected, gone = tokens("llama", 2, **SMALL)
    assert gone._compute._graphs
    llm = LLM(TINY["llama"](), depth=2, device="cuda", dummy_weights=True, dtype="float32", compile=False, **SMALL)
    compute, run_padded, captured = llm._compute, llm._compute._run_padded, []

    def run(*arguments: object) -> None:
        thresholds = gc.get_threshold()
        if is_capturing := torch.cuda.is_current_stream_capturing():
            gc.set_threshold(1, 1, 1)  # it would like to now
            captured.append(True)
        try:
            run_padded(*arguments)
        finally:
            if is_capturing:
                gc.set_threshold(*thresholds)

    monkeypatch.setattr(compute, "_run_padded", run)
    gone.itself = gone  # type: ignore[attr-defined]  # only the collector finds it
    del gone
    got = [output.outputs[0].token_ids for output in llm.generate(prompts(12), GREEDY)]
    assert captured
    assert not compute.refusal
    assert got == expected


def test_ranges_reach_nvtx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through torch's own functions; whether a tool listens, the library does not tell."""
    pushed, popped = [], []
    push, pop = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda msg: (pushed.append(msg), push(msg))[1])
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: (popped.append(True), pop())[1])
    expected, _ = tokens("llama", 2, **SMALL)
    assert pushed == []
    got, llm = tokens("llama", 2, **SMALL, nvtx=True)
    assert got == expected
    assert {"h2d: inputs", "compute: carry", "compute: forward", "d2h: outputs"} < set(pushed)
    last = llm.engine.steps - 1
    assert {name.split(":")[0] for name in pushed} >= {f"launch step {last}", f"collect step {last}"}
    assert len(popped) == len(pushed)


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3-moe", "gpt-oss-sinks"])
def test_start_up_says_where_there_are_no_graphs(name: str) -> None:
    said: list[str] = []
    _, llm = tokens(name, 2, **SMALL, report=said.append, compile=False)
    print(*said, sep="\n")
    assert "capturing the first CUDA graph" in said
    assert llm.graphs != any(line.startswith("CUDA graphs are off") for line in said)
    assert llm.graphs or name != "llama"


def test_batch_invariant_tokens_do_not_depend_on_company() -> None:
    """In bf16, with random weights whose near-ties any other order of sums would flip: alone, together, and evicted."""
    config = named_config("llama-1b")
    config.num_hidden_layers, config.vocab_size = 4, 8192
    settings = {"block_size": 16, "max_num_seqs": 32, "max_model_len": 512, "max_num_batched_tokens": 256, "depth": 2}
    draw = random.Random(1)
    asked = [[draw.randrange(8192) for _ in range(draw.choice([3, 40, 100, 130]))] for _ in range(24)]
    sampling = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, logprobs=1)

    def engine(**changes: object) -> LLM:
        return LLM(config, device="cuda", dtype="bfloat16", dummy_weights=True, **{**settings, **changes})

    def run(llm: LLM, prompts: list[list[int]]) -> list[object]:
        outputs = [output.outputs[0] for output in llm.generate(prompts, sampling)]
        return [(output.token_ids, output.logprobs) for output in outputs]

    roomy, tight = engine(num_blocks=512, batch_invariant=True), engine(num_blocks=60, batch_invariant=True)
    together = run(roomy, asked)
    if few_rows.pays_on(torch.device("cuda")):  # products of any number of rows give a row the same bits
        assert roomy.config.mixed_buckets == (16, 32, 64, 128, 192, 256)
    assert [run(roomy, [prompt])[0] for prompt in asked[:6]] == together[:6]
    assert run(tight, asked) == together
    assert tight.scheduler.preemptions > 0
    assert not roomy._compute.refusal
    assert not tight._compute.refusal
    assert run(engine(num_blocks=512), asked) != together  # so the comparison can fail


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_layers_give_the_same_tokens_at_every_depth(dtype: str) -> None:
    """Captured and bound, with prompts that arrive while others decode; in float32 those of the layers as written."""
    settings = {**SMALL, "max_num_seqs": 3, "max_num_batched_tokens": 48, "dtype": dtype, "compile": True}
    expected, llm = tokens("llama", 1, **settings)
    assert llm.model.compiled is not None
    assert llm.model.compiled.is_bound
    assert llm.model.compiled.num_beside == 2
    for depth in (2, 3):
        assert tokens("llama", depth, **settings)[0] == expected
    if dtype == "float32":
        assert tokens("llama", 1, **{**settings, "compile": False})[0] == expected
