"""`LLM` and `AsyncEngine` on the CPU: the tokens are those of `generate`, whatever is in flight.

The pool is tight on purpose: requests are evicted and computed again while others go on, and every test that depends on
it checks that it happened.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from decision_logs import check_decisions
from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError, HFValidationError, OfflineModeIsEnabled, RepositoryNotFoundError
from tiny_models import TINY, VOCAB, generate, reference_of
from tiny_tokenizers import chatty_tokenizer, matching_config, save_tiny_model
from transformers import GenerationConfig

from asyncsched import AsyncEngine, SamplingParams, Scheduler
from asyncsched.config import EngineConfig
from asyncsched.errors import AsyncschedError, ConfigError
from asyncsched.inputs import Buckets
from asyncsched.timeline import LANES
from executors import hub
from executors.async_engine import EngineStoppedError
from executors.compute import ComputeLane
from executors.cpu import CpuLanes
from executors.errors import EngineDeadError, ModelLoadError
from executors.llm import LLM
from executors.models import Model
from executors.outputs import CompletionOutput, RequestOutput, StreamPiece
from executors.sampling_state import SamplerState

torch.set_num_threads(1)

DEPTHS = (1, 2, 3)
NEW_TOKENS = 16
PROMPT_LENGTHS = (3, 14, 9, 21, 5, 12, 17)
SIZES = {"block_size": 4, "max_num_seqs": 5, "max_model_len": 64, "max_num_batched_tokens": 20}
ROOMY = {**SIZES, "num_blocks": 90}
TIGHT = {**SIZES, "num_blocks": 18}
DRAW = random.Random(0)  # transformers' greedy tokens vary with these prompts, whatever the model
PROMPTS = [[DRAW.randrange(1, VOCAB) for _ in range(length)] for length in PROMPT_LENGTHS]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)

RESPONSE = httpx.Response(404, request=httpx.Request("GET", "https://hub"))

Tokens = list[tuple[int, ...]]


def tiny_llm(name: str = "llama", *, config: Any = None, **options: Any) -> LLM:
    options = {**TIGHT, "device": "cpu", "dummy_weights": True, **options}
    return LLM(config or TINY[name](), **options)


def texty_llm(**options: Any) -> LLM:
    """One with a tokenizer."""
    return tiny_llm(config=matching_config(), tokenizer=chatty_tokenizer(), **options)


def tokens_of(outputs: Sequence[RequestOutput]) -> Tokens:
    return [output.outputs[0].token_ids for output in outputs]


def expected_tokens(llm: LLM, prompts: Sequence[list[int]] = PROMPTS, count: int = NEW_TOKENS) -> Tokens:
    """What transformers generates greedily, one request at a time."""
    reference = reference_of(llm.model)
    return [tuple(generate(reference, prompt, count)) for prompt in prompts]


def is_clean(llm: LLM) -> bool:
    """Nobody is left in the engine, and every block and row is free."""
    scheduler = llm.scheduler
    counts = scheduler.counts
    pool = scheduler.residency.pool
    nobody = counts.waiting == counts.running == 0 and not llm.frontend._outputs and not llm._claims
    return nobody and pool.available == pool.num_usable and scheduler.rows.num_free == scheduler.rows.capacity


# ---- the same tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_every_depth_gives_the_tokens_of_generate(name: str) -> None:
    """With evictions: in a window of 8 tokens few blocks are enough, so that model gets fewer, and shorter prompts."""
    windowed = name == "mistral-window"
    prompts, blocks = ([prompt[:4] for prompt in PROMPTS], 9) if windowed else (PROMPTS, TIGHT["num_blocks"])
    expected = None
    for mode in ({"mode": "sync"}, {"mode": "async"}, {"depth": 3}):
        llm = tiny_llm(name, **mode, num_blocks=blocks)
        if expected is None:
            expected = expected_tokens(llm, prompts)
            assert len(set(expected)) == len(expected)
            assert all(len(set(tokens)) >= 4 for tokens in expected)
        outputs = llm.generate(prompts, GREEDY)
        assert tokens_of(outputs) == expected
        assert llm.scheduler.preemptions > 0
        assert {one.finish_reason for output in outputs for one in output.outputs} == {"length"}
        assert is_clean(llm)


@pytest.mark.parametrize("depth", DEPTHS)
def test_offloaded_kv_comes_back(depth: int) -> None:
    llm = tiny_llm(depth=depth, preemption="offload", timeline=True)
    assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected_tokens(llm)
    assert llm.timeline is not None
    names = [span.name for span in llm.timeline.spans]
    assert llm.scheduler.preemptions > 0
    assert names.count("offload") > 0
    assert names.count("restore") > 0


@pytest.mark.parametrize("depth", [2, 3])
def test_late_arrivals_and_shared_prefixes_change_nothing(depth: int) -> None:
    """Requests arrive while others run, the later ones with the prompt of an earlier one before their own."""
    prompts = [*PROMPTS[:4], *([*PROMPTS[3], *prompt[:9]] for prompt in PROMPTS[4:])]
    llm = tiny_llm(depth=depth, enable_prefix_caching=True, num_blocks=24)
    done: dict[str, RequestOutput] = {}
    waiting = list(enumerate(prompts))
    while len(done) < len(prompts):
        if waiting:
            number, prompt = waiting.pop(0)
            llm.check(prompt, GREEDY)
            llm.submit(str(number), prompt, GREEDY)
        for _ in range(3):
            done |= {result.request_id: result for result in llm.run() or () if isinstance(result, RequestOutput)}
    assert tokens_of([done[str(number)] for number in range(len(prompts))]) == expected_tokens(llm, prompts)


# ---- sampling --------------------------------------------------------------------------------------------------------

SAMPLED = [
    SamplingParams(seed=1, max_tokens=NEW_TOKENS),
    SamplingParams(seed=2, temperature=0.7, top_p=0.9, max_tokens=NEW_TOKENS),
    SamplingParams(seed=3, temperature=1.5, top_k=9, max_tokens=NEW_TOKENS),
    SamplingParams(seed=4, min_p=0.05, frequency_penalty=1.0, presence_penalty=0.5, max_tokens=NEW_TOKENS),
    SamplingParams(seed=5, repetition_penalty=1.3, top_p=0.8, logprobs=2, max_tokens=NEW_TOKENS),
    SamplingParams(seed=6, min_tokens=10, stop_token_ids=tuple(range(0, VOCAB, 2)), max_tokens=NEW_TOKENS),
    SamplingParams(seed=7, logit_bias={5: 100.0, 6: 100.0, 7: -100.0}, temperature=3.0, max_tokens=NEW_TOKENS),
]


def test_seeds_give_equal_tokens_at_every_depth() -> None:
    by_depth = []
    for depth in DEPTHS:
        llm = tiny_llm(depth=depth)
        by_depth.append(llm.generate(PROMPTS, SAMPLED))
        assert llm.scheduler.preemptions > 0
    first = tokens_of(by_depth[0])
    assert all(tokens_of(outputs) == first for outputs in by_depth)
    assert all(len(set(tokens)) >= 5 for tokens in first[:6])
    assert len(first[5]) >= 10
    assert set(first[6]) == {5, 6}


def test_who_shares_the_batch_does_not_matter_and_the_seed_does() -> None:
    together, alone, others = tiny_llm(), tiny_llm(), tiny_llm()
    first = tokens_of(together.generate(PROMPTS, SAMPLED))
    for prompt, params, tokens in zip(PROMPTS, SAMPLED, first, strict=True):
        assert tokens_of(alone.generate([prompt], params)) == [tokens]
    unlike = [SamplingParams(seed=seed, max_tokens=NEW_TOKENS) for seed in range(7)]
    assert len(set(tokens_of(others.generate([PROMPTS[0]] * 7, unlike)))) == 7


PENALISED = SamplingParams(temperature=0.0, repetition_penalty=1.4, max_tokens=NEW_TOKENS)


def penalised_reference(llm: LLM) -> Tokens:
    reference = reference_of(llm.model)
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=None, pad_token_id=0, repetition_penalty=1.4
    )
    result = []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        output = reference.generate(tokens, attention_mask=torch.ones_like(tokens), generation_config=settings)
        result.append(tuple(output[0, len(prompt) :].tolist()))
    return result


def test_penalties_see_tokens_that_were_carried_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """They count on the device: while a token is in flight, the host does not know it."""
    expected = None
    for depth in DEPTHS:
        llm = tiny_llm(depth=depth)
        if expected is None:
            expected = penalised_reference(llm)
            assert expected != expected_tokens(llm)
        assert tokens_of(llm.generate(PROMPTS, PENALISED)) == expected
        assert llm.scheduler.preemptions > 0
    monkeypatch.setattr(SamplerState, "count", lambda *_: None)
    assert tokens_of(tiny_llm().generate(PROMPTS, PENALISED)) != expected


@pytest.mark.parametrize("depth", DEPTHS)
def test_logprobs_are_the_models_and_stand_beside_their_tokens(depth: int) -> None:
    llm = tiny_llm(depth=depth)
    reference = reference_of(llm.model)
    params = [SamplingParams(seed=i, temperature=0.8, logprobs=i, max_tokens=NEW_TOKENS) for i in range(len(PROMPTS))]
    params[2] = SamplingParams(seed=2, max_tokens=NEW_TOKENS)
    outputs = llm.generate(PROMPTS, params)
    assert llm.scheduler.preemptions > 0
    for prompt, asked, output in zip(PROMPTS, params, outputs, strict=True):
        (one,) = output.outputs
        if asked.logprobs is None:
            assert one.logprobs is None
            continue
        assert one.logprobs is not None
        assert len(one.logprobs) == len(one.token_ids) == NEW_TOKENS
        with torch.no_grad():
            logits = reference(torch.tensor([[*prompt, *one.token_ids[:-1]]])).logits[0, len(prompt) - 1 :].float()
        expected = logits.log_softmax(-1)
        for token, row, found in zip(one.token_ids, expected, one.logprobs, strict=True):
            assert found.logprob == pytest.approx(float(row[token]), abs=1e-4)
            assert found.rank == 1 + int((row > row[token]).sum())
            values = row.topk(asked.logprobs).values.tolist()
            assert [logprob for _, logprob in found.top] == pytest.approx(values, abs=1e-4)
            assert [float(row[other]) for other, _ in found.top] == pytest.approx(values, abs=1e-4)


def test_n_outputs_are_drawn_from_one_prompt() -> None:
    llm = tiny_llm()
    several = SamplingParams(n=4, seed=11, max_tokens=8)
    first, second = llm.generate([PROMPTS[1], PROMPTS[2]], several)
    assert [one.index for one in first.outputs] == [0, 1, 2, 3]
    assert len({one.token_ids for one in (*first.outputs, *second.outputs)}) == 8
    alone = llm.generate([PROMPTS[1]] * 4, [SamplingParams(seed=11 + i, max_tokens=8) for i in range(4)])
    assert tokens_of(alone) == [one.token_ids for one in first.outputs]
    unseeded = llm.generate(PROMPTS[1], SamplingParams(n=3, max_tokens=8))[0]
    assert len({one.token_ids for one in unseeded.outputs}) == 3


# ---- text and stops --------------------------------------------------------------------------------------------------

TEXT = "the quick brown fox"


def test_text_in_and_text_out() -> None:
    llm = texty_llm()
    tokenizer = llm.frontend.tokenizer
    (output,) = llm.generate(TEXT, GREEDY)
    (one,) = output.outputs
    assert output.prompt == TEXT
    assert list(output.prompt_token_ids) == tokenizer.encode(TEXT)
    assert (one.token_ids,) == tuple(expected_tokens(llm, [tokenizer.encode(TEXT)]))
    assert one.text == tokenizer.decode(one.token_ids)
    assert one.metrics.first_token_s is not None
    assert 0 < one.metrics.first_token_s < one.metrics.finished_s
    messages = [{"role": "user", "content": TEXT}]
    chat = llm.chat(messages, GREEDY)
    assert tokenizer.decode(list(chat.prompt_token_ids)) == f"user: {TEXT}\n> "
    assert tokens_of([chat]) == expected_tokens(llm, [list(chat.prompt_token_ids)])


def test_an_array_of_tokens_is_one_prompt() -> None:
    llm = tiny_llm()
    assert tokens_of(llm.generate(np.array(PROMPTS[0]), GREEDY)) == expected_tokens(llm, PROMPTS[:1])
    assert tokens_of(llm.generate(torch.tensor(PROMPTS[0]), GREEDY)) == expected_tokens(llm, PROMPTS[:1])
    assert llm.generate([], GREEDY) == []
    assert tokens_of(llm.generate((one for one in PROMPTS[:2]), GREEDY)) == expected_tokens(llm, PROMPTS[:2])


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_stop_string_is_held_back_and_cut(depth: int) -> None:
    """The string begins inside one token and ends inside another; no piece of a stream shows any of it."""
    llm = texty_llm(depth=depth)
    ids = llm.frontend.tokenizer.encode(TEXT)
    whole = texty_llm().generate([ids], GREEDY)[0].outputs[0].text
    stop = whole[5:9]
    stopped = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, stop=(stop, "never there"))
    pieces = list(llm.stream([ids, *PROMPTS], [stopped, *[GREEDY] * len(PROMPTS)]))
    mine = [piece for piece in pieces if piece.request_id == "0"]
    last = mine[-1].output
    assert last is not None
    assert (last.finish_reason, last.stop_reason, last.text) == ("stop", stop, whole[: whole.index(stop)])
    shown = ""
    for piece in mine:
        shown += piece.text
        assert last.text.startswith(shown)
    assert shown == last.text
    assert sum((piece.token_ids for piece in mine), ()) == last.token_ids
    assert is_clean(llm)


def test_a_stop_that_never_comes_loses_no_text() -> None:
    llm = texty_llm()
    whole = llm.generate(TEXT, GREEDY)[0].outputs[0].text
    nearly = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, stop=f"{whole[-3:]}, and more")
    pieces = list(llm.stream(TEXT, nearly))
    assert "".join(piece.text for piece in pieces) == whole
    assert not pieces[-2].text.endswith(whole[-1])


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_end_of_sequence_ends_and_may_be_ignored(depth: int) -> None:
    reference = expected_tokens(tiny_llm())
    eos = reference[1][5]
    config = TINY["llama"]()
    config.eos_token_id = [reference[3][9], eos]
    llm = tiny_llm(config=config, depth=depth)
    cut = []
    for tokens in reference:
        end = next((place for place, token in enumerate(tokens) if token in config.eos_token_id), NEW_TOKENS)
        cut.append(tokens[: end + 1])
    outputs = llm.generate(PROMPTS, GREEDY)
    assert tokens_of(outputs) == cut
    assert len(cut[1]) <= 6
    assert (outputs[1].outputs[0].finish_reason, outputs[1].outputs[0].stop_reason) == ("stop", eos)
    ignoring = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    assert tokens_of(llm.generate(PROMPTS, ignoring)) == reference


# ---- streams, aborts, interrupts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
def test_leaving_a_stream_aborts_it(depth: int) -> None:
    llm = tiny_llm(depth=depth)
    stream = llm.stream(PROMPTS, SamplingParams(seed=1, n=2, max_tokens=NEW_TOKENS))
    for _ in range(9):
        next(stream)
    assert not is_clean(llm)
    stream.close()
    assert not llm.frontend._outputs
    assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected_tokens(llm)
    assert is_clean(llm)


def test_streams_of_one_engine_may_be_read_in_turn() -> None:
    """And somebody may generate meanwhile: each gets its own."""
    llm = tiny_llm()
    expected = expected_tokens(llm)
    first, second = (llm.stream([prompt], GREEDY) for prompt in PROMPTS[:2])
    pieces: list[list[StreamPiece]] = [[next(first)], [next(second)]]
    assert tokens_of(llm.generate(PROMPTS[2:4], GREEDY)) == expected[2:4]
    for one, other in zip(first, second, strict=True):
        pieces[0].append(one)
        pieces[1].append(other)
    joined = [sum((piece.token_ids for piece in mine), ()) for mine in pieces]
    assert joined == expected[:2]
    assert is_clean(llm)


@contextmanager
def forward_that(act: Callable[[int], None]) -> Iterator[list[int]]:
    """Calls `act` with the number of each forward pass before it runs; gives the list of their sizes."""
    forward, sizes = Model.forward, list[int]()

    def wrapped(self: Model, view: Any, kv: Any) -> torch.Tensor:
        sizes.append(view.num_seqs)
        act(len(sizes) - 1)
        return forward(self, view, kv)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Model, "forward", wrapped)
        yield sizes


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_interrupt_stops_after_the_step_and_the_engine_lives_on(depth: int) -> None:
    llm = tiny_llm(depth=depth)

    def interrupt(step: int) -> None:
        if step == 6:
            os.kill(os.getpid(), signal.SIGINT)

    with forward_that(interrupt) as sizes, pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    assert len(sizes) <= 6 + depth
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected_tokens(llm)
    assert is_clean(llm)


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_step_that_raises_fails_its_requests_and_no_others(depth: int) -> None:
    llm = tiny_llm(depth=depth, max_num_seqs=3)

    def fail(step: int) -> None:
        if step == 7:
            raise RuntimeError("out of memory\nTried to allocate")

    with forward_that(fail):
        outputs = llm.generate(PROMPTS, GREEDY)
    failed = [output.outputs[0] for output in outputs if output.outputs[0].finish_reason == "error"]
    assert 1 <= len(failed) <= 3
    assert {one.message for one in failed} == {
        "RuntimeError: out of memory Tried to allocate; the engine is still usable"
    }
    assert llm.usable
    for output, expected in zip(outputs, expected_tokens(llm), strict=True):
        (one,) = output.outputs
        if one.finish_reason == "error":
            assert expected[: len(one.token_ids)] == one.token_ids
        else:
            assert (one.finish_reason, one.token_ids) == ("length", expected)
    assert is_clean(llm)


ILLEGAL = "CUDA error: an illegal memory access was encountered"
DEATH = f"RuntimeError: {ILLEGAL}; the device does not answer any more: {ILLEGAL}"


@contextmanager
def device_that_dies(after: int) -> Iterator[None]:
    """From some synchronize on, every call that asks the device says what a broken CUDA context says."""
    calls: list[object] = []

    def dying(work: Callable[..., None]) -> Callable[..., None]:
        def asked(*arguments: object) -> None:
            calls.append(arguments)
            if len(calls) > after:
                raise RuntimeError(ILLEGAL)
            work(*arguments)

        return asked

    with pytest.MonkeyPatch.context() as patch:
        for name in ("synchronize", "drain"):
            patch.setattr(CpuLanes, name, dying(getattr(CpuLanes, name)))
        yield


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_device_that_dies_ends_every_request_and_the_engine_says_so(depth: int) -> None:
    llm = tiny_llm(depth=depth, max_num_seqs=3)
    with device_that_dies(7):
        outputs = [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY)]
    assert {one.finish_reason for one in outputs} == {"error"}
    messages = {one.message for one in outputs}
    assert messages == {
        f"{DEATH}; the engine is not usable any more: start a new one",
        "every I/O slot is held by a step that never came back: start a new engine",
    }
    for one, expected in zip(outputs, expected_tokens(llm), strict=True):
        assert expected[: len(one.token_ids)] == one.token_ids
    assert sum(len(one.token_ids) for one in outputs) >= 3
    assert not llm.usable
    ran = llm.engine.steps
    for again in (lambda: llm.generate(PROMPTS, GREEDY), lambda: next(llm.stream(PROMPTS, GREEDY))):
        with pytest.raises(EngineDeadError) as error:
            again()
        assert str(error.value) == f"the engine is not usable any more: start a new one; it died of {DEATH}"
    assert llm.engine.steps == ran


def test_a_dead_engine_takes_no_prompt_from_asyncio_either() -> None:
    async def main() -> list[Any]:
        async with AsyncEngine(tiny_llm()) as engine:
            with device_that_dies(3):
                failed = await collect(engine.generate(PROMPTS[0], GREEDY))
            assert failed.finish_reason == "error"
            tasks = [collect(engine.generate(prompt, GREEDY)) for prompt in PROMPTS]
            return await asyncio.gather(*tasks, return_exceptions=True)

    assert {type(error) for error in run(main())} == {EngineDeadError}


def test_an_engine_that_broke_off_takes_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Scheduler, *_: Any) -> Any:
        raise ZeroDivisionError("a fault of the scheduler")

    llm = tiny_llm()
    other = llm.stream([PROMPTS[0]], GREEDY)
    next(other)
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "commit", broken)
        with pytest.raises(ZeroDivisionError):
            llm.generate(PROMPTS, GREEDY)
    assert not llm.usable
    with pytest.raises(AsyncschedError, match="the engine stopped with 1 requests unfinished"):
        next(other)
    with pytest.raises(EngineDeadError, match="it died of ZeroDivisionError: a fault of the scheduler"):
        llm.generate(PROMPTS, GREEDY)


def test_logits_that_are_no_numbers_fail_their_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny_llm()
    expected = expected_tokens(llm)
    forward = Model.forward

    def poisoned(self: Model, view: Any, kv: Any) -> torch.Tensor:
        logits = forward(self, view, kv)
        if len(logits) == 3 and not done:
            done.append(True)
            logits[1] = torch.nan
        return logits

    done: list[bool] = []
    monkeypatch.setattr(Model, "forward", poisoned)
    outputs = llm.generate(PROMPTS, GREEDY)
    bad = [output.outputs[0] for output in outputs if output.outputs[0].finish_reason == "error"]
    assert len(bad) == 1
    assert bad[0].message == "no token could be sampled: the logits are NaN, or infinite"
    good = [tokens for output, tokens in zip(outputs, expected, strict=True) if output.outputs[0] is not bad[0]]
    assert [t for t in tokens_of(outputs) if len(t) == NEW_TOKENS] == good


# ---- bad input -------------------------------------------------------------------------------------------------------

# Settings of the engine, and what the error must say.
BAD_SETTINGS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "mode": ({"mode": "asink"}, ("mode: 'asink'", "sync, async")),
    "mode against depth": ({"mode": "sync", "depth": 2}, ("depth: 2", "mode 'sync' means depth 1")),
    "depth": ({"depth": 0}, ("depth: 0", "at least 1")),
    "device": ({"device": "tpu"}, ("device: 'tpu'", "auto, cpu or cuda")),
    "dtype": ({"dtype": "int3"}, ("dtype: 'int3'", "float32")),
    "unknown setting": ({"num_block": 3}, ("num_block: 3", "num_host_blocks")),
    "setting of the model": ({"vocab_size": 3}, ("vocab_size: 3", "no such setting")),
    "block size": ({"block_size": 0}, ("block_size: 0", "at least 1")),
    "buckets": ({"decode_buckets": "many"}, ("decode_buckets: 'many'", "list")),
    "buckets beyond the batch": ({"decode_buckets": (1, 99)}, ("decode_buckets: (1, 99)", "max_num_seqs 5")),
    "longer than the context": ({"max_model_len": 300}, ("max_model_len: 300", "256 tokens")),
    "window of a model that sees all": ({"sliding_window": 4}, ("sliding_window: 4", "all of its context")),
    "policy": ({"victim": "nobody"}, ("victim: 'nobody'", "latest-arrival")),
    "pool that does not fit": (
        {"num_blocks": 10**6, "block_size": 10**6},
        ("num_blocks: 1000000", "blocks of 1000000 tokens would fit"),
    ),
    "attention": ({"attention": "flash"}, ("attention: 'flash'", "plain")),
    "seed": ({"seed": -1}, ("seed: -1", "2**63 - 1")),
    "warm_up": ({"warm_up": SamplingParams()}, ("warm_up: SamplingParams(", "list of SamplingParams")),
    "warm_up of something else": ({"warm_up": [{"top_k": 3}]}, ("warm_up: [{'top_k': 3}]", "list of SamplingParams")),
    "warm_up for what cannot be": ({"warm_up": [SamplingParams(logprobs=21)]}, ("logprobs: 21", "up to 20")),
    "compile": ({"compile": "yes"}, ("compile: 'yes'", "True, False or None")),
    "weights that nobody asked for": ({"dummy_weights": False}, ("dummy_weights: False", "no weights")),
}

PLAIN = SamplingParams()
BAD_PROMPTS: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "empty": ([PROMPTS[0], []], PLAIN, ("prompt: []", "at least one token")),
    "token beyond the vocabulary": ([[1, VOCAB]], PLAIN, (f"prompt: {VOCAB}", f"0 to {VOCAB - 1}")),
    "token far beyond it": ([[1, 2**32 + 5]], PLAIN, (f"prompt: [1, {2**32 + 5}]", "2**31 - 1")),
    "negative token": ([[1, -1]], PLAIN, ("prompt: [1, -1]", "0 to")),
    "no tokens at all": ([[1.5]], PLAIN, ("prompt: [1.5]", "token ids")),
    "text without a tokenizer": ("hello", PLAIN, ("prompt: 'hello'", "no tokenizer")),
    "stop without a tokenizer": ([[1]], SamplingParams(stop="x"), ("stop: ('x',)", "no tokenizer")),
    "more logprobs than are kept": ([[1]], SamplingParams(logprobs=21), ("logprobs: 21", "up to 20")),
    "bias beyond the vocabulary": ([[1]], SamplingParams(logit_bias={500: 1.0}), ("logit_bias", "500", "128")),
    "too few parameters": ([[1], [2]], [PLAIN], ("params: 1", "2 prompts")),
    "parameters of another kind": ([[1]], {"top_k": 3}, ("params: {'top_k': 3}", "SamplingParams")),
    "no prompts": (None, PLAIN, ("prompts: None", "list of such prompts")),
    "a mapping": ({"prompt": "hello"}, PLAIN, ("prompts: {'prompt': 'hello'}", "list of such prompts")),
}


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_bad_settings_are_named(case: str) -> None:
    settings, said = BAD_SETTINGS[case]
    with pytest.raises(ConfigError) as error:
        tiny_llm(**settings)
    assert "\n" not in str(error.value)
    assert all(part in str(error.value) for part in said), error.value


def test_bad_prompts_are_named_before_anything_runs() -> None:
    llm = tiny_llm()
    for prompts, params, said in BAD_PROMPTS.values():
        with pytest.raises(ConfigError) as error:
            llm.generate(prompts, params)
        assert all(part in str(error.value) for part in said), error.value
    with pytest.raises(ConfigError, match="chat template"):
        llm.chat([{"role": "user", "content": "?"}])
    assert llm.engine.steps == 0
    assert is_clean(llm)


def test_bad_texts_and_conversations_are_named() -> None:
    llm = texty_llm()
    with pytest.raises(ConfigError, match=r"prompt: '\\ud800' is not allowed; it is no valid text"):
        llm.generate("\ud800", GREEDY)
    llm.frontend.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    for messages in ([{"role": "user", "content": "?"}], [], None):
        with pytest.raises(ConfigError, match=r"messages: .*; the model's chat template refuses them: ") as error:
            llm.chat(messages)
        assert "\n" not in str(error.value)
    assert is_clean(llm)


def test_a_tokenizer_that_cannot_be_read_is_named_once_text_is_wanted(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    llm = LLM(tmp_path, device="cpu", num_blocks=64)
    assert len(llm.generate([1, 2], GREEDY)[0].outputs[0].token_ids) == NEW_TOKENS
    with pytest.raises(
        ConfigError, match=r"the model has no tokenizer \(Expecting value: .*\): give prompts as token ids"
    ):
        llm.generate("hello", GREEDY)


@pytest.mark.parametrize("mode", [[], {}, 2, "fast"])
def test_what_is_no_mode(mode: Any) -> None:
    with pytest.raises(ConfigError, match=r"mode: .* is not allowed; use one of sync, async"):
        tiny_llm(num_blocks=8, mode=mode)


@pytest.mark.parametrize("model", [None, 5, b"folder"])
def test_what_is_no_model(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"model: .* is not allowed; use a folder"):
        LLM(model, device="cpu")


def test_a_prompt_that_is_too_long_is_rejected_with_the_numbers() -> None:
    llm = tiny_llm(num_blocks=8)
    long, large, fine = llm.generate([[1] * 60, [1] * 30, [1]], GREEDY)
    assert long.outputs[0].finish_reason == large.outputs[0].finish_reason == "rejected"
    assert long.outputs[0].message == "prompt 60 + max_tokens 16 = 76 tokens, over max_model_len 64"
    assert "12 KV blocks of 4, over num_blocks 8" in large.outputs[0].message
    assert len(fine.outputs[0].token_ids) == NEW_TOKENS


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such model folder"):
        LLM(f"{tmp_path}/nothing", device="cpu")


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Whatever asks the Hub fails at once; gives the names that were asked for."""
    asked: list[str] = []

    def unreachable(self: HfApi, name: str, **_: object) -> None:
        asked.append(name)
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(HfApi, "model_info", unreachable)
    monkeypatch.setattr("huggingface_hub.file_download.get_hf_file_metadata", unreachable)
    hub.fault.cache_clear()
    yield asked
    hub.fault.cache_clear()


def test_a_model_that_is_nowhere_is_one_question(no_network: list[str]) -> None:
    with pytest.raises(ModelLoadError) as error:
        LLM("no/model", device="cpu")
    assert str(error.value) == (
        "no/model: no model can be loaded from there; there is no such folder, it is not in the Hub's cache, and "
        "the Hub cannot be reached (Name or service not known)"
    )
    assert no_network == ["no/model"]


def test_a_model_in_the_cache_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: list[str]
) -> None:
    revision = "0" * 40
    folder = tmp_path / "models--some--model"
    save_tiny_model(folder / "snapshots" / revision)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(revision)
    for module in ("huggingface_hub.constants", "transformers.utils.hub.constants"):
        monkeypatch.setattr(f"{module}.HF_HUB_CACHE", str(tmp_path))
    llm = LLM("some/model", device="cpu")
    assert llm.generate(TEXT, GREEDY)[0].outputs[0].text
    assert no_network == ["some/model"]


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (RepositoryNotFoundError("404", response=RESPONSE), "the Hub has no such model, or asks for a token for it"),
        (GatedRepoError("403", response=RESPONSE), "the Hub asks for a token for it"),
        (HFValidationError("no"), "it is no name that the Hub could have"),
        (OfflineModeIsEnabled("no"), "HF_HUB_OFFLINE is set"),
    ],
)
def test_why_the_hub_has_no_model(cause: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise cause

    monkeypatch.setattr(HfApi, "model_info", fail)
    hub.fault.cache_clear()
    assert hub.fault("no/model") == said
    hub.fault.cache_clear()


def test_each_prompt_is_encoded_once() -> None:
    llm = texty_llm()
    encode, encoded = llm.frontend.tokenizer, list[str]()

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(encode, name)

        def __call__(self, text: str) -> Any:
            encoded.append(text)
            return encode(text)

    llm.frontend.tokenizer = Counting()
    expected = llm.generate(["the", "quick fox"], GREEDY)
    assert encoded == ["the", "quick fox"]

    async def main() -> list[CompletionOutput]:
        async with AsyncEngine(llm) as engine:
            return [await collect(engine.generate(prompt, GREEDY)) for prompt in ("the", "quick fox")]

    outputs = run(main())
    assert [output.token_ids for output in outputs] == [one.outputs[0].token_ids for one in expected]
    assert encoded == ["the", "quick fox"] * 2


def test_pieces_say_whose_they_are() -> None:
    """Whatever was generated before with the same engine."""
    llm = tiny_llm()
    llm.generate(PROMPTS[:2], GREEDY)
    several = SamplingParams(seed=1, n=2, max_tokens=NEW_TOKENS)
    pieces = list(llm.stream(PROMPTS[:3], [GREEDY, several, GREEDY]))
    tokens = {(piece.prompt_index, piece.index): () for piece in pieces}
    for piece in pieces:
        tokens[piece.prompt_index, piece.index] += piece.token_ids
    assert sorted(tokens) == [(0, 0), (1, 0), (1, 1), (2, 0)]
    assert [tokens[0, 0], tokens[2, 0]] == [expected_tokens(llm)[place] for place in (0, 2)]
    assert {piece.prompt_index for piece in llm.stream(PROMPTS[0], GREEDY)} == {0}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_cuda_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        tiny_llm(device="cuda")
    assert tiny_llm(device="auto").model.device.type == "cpu"


def test_the_import_without_torch_says_what_to_install() -> None:
    program = "import sys; sys.modules['torch'] = None\nfrom asyncsched import SamplingParams, LLM"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=SOURCES)
    assert done.stderr.splitlines()[-1] == "ImportError: LLM needs torch: pip install -e '.[torch]' in the clone"


SOURCES = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}


# ---- AsyncEngine -----------------------------------------------------------------------------------------------------


def run(main: Coroutine[Any, Any, Any]) -> Any:
    """Whatever hangs is an error."""
    return asyncio.run(asyncio.wait_for(main, 30))


async def collect(pieces: AsyncIterator[StreamPiece]) -> CompletionOutput:
    """The last piece's output, after checking that the pieces make it up."""
    tokens: tuple[int, ...] = ()
    async for piece in pieces:
        tokens += piece.token_ids
        if piece.output is not None:
            assert piece.output.token_ids == tokens
            output = piece.output
    return output


def num_engine_threads() -> int:
    return sum(thread.name == "asyncsched-engine" for thread in threading.enumerate())


def test_concurrent_prompts_get_the_tokens_of_generate() -> None:
    llm = tiny_llm()

    async def one(engine: AsyncEngine, number: int) -> CompletionOutput:
        await asyncio.sleep(0.01 * number)
        return await collect(engine.generate(PROMPTS[number], GREEDY))

    async def main() -> list[CompletionOutput]:
        async with AsyncEngine(llm) as engine:
            return await asyncio.gather(*(one(engine, number) for number in range(len(PROMPTS))))

    outputs = run(main())
    assert [output.token_ids for output in outputs] == expected_tokens(llm)
    assert is_clean(llm)
    assert num_engine_threads() == 0


def test_bad_prompts_raise_in_their_own_coroutine() -> None:
    async def main() -> tuple[list[Any], CompletionOutput]:
        async with AsyncEngine(tiny_llm()) as engine:
            bad = [engine.generate([]), engine.generate([1, 999]), engine.generate("text")]
            good = asyncio.ensure_future(collect(engine.generate(PROMPTS[0], GREEDY)))
            errors = await asyncio.gather(*(collect(pieces) for pieces in bad), return_exceptions=True)
            rejected = await collect(engine.generate([1] * 60, GREEDY))
            assert rejected.finish_reason == "rejected"
            return errors, await good

    errors, good = run(main())
    assert [type(error) for error in errors] == [ConfigError] * 3
    assert good.finish_reason == "length"


def test_abort_from_outside_and_by_leaving() -> None:
    llm = tiny_llm()
    long = SamplingParams(temperature=0.0, max_tokens=40)

    async def main() -> tuple[CompletionOutput, CompletionOutput]:
        async with AsyncEngine(llm) as engine:
            aborted = asyncio.ensure_future(collect(engine.generate(PROMPTS[0], long, request_id="mine")))
            other = asyncio.ensure_future(collect(engine.generate(PROMPTS[1], long)))
            stream = engine.generate(PROMPTS[2], long, request_id="left")
            async for piece in stream:
                assert piece.request_id == "left"
                break
            await stream.aclose()
            with pytest.raises(AsyncschedError, match="'mine' is in use"):
                await collect(engine.generate(PROMPTS[0], long, request_id="mine"))
            await engine.abort("mine")
            await engine.abort("nobody")
            return await aborted, await other

    aborted, other = run(main())
    assert aborted.finish_reason == "abort"
    assert len(aborted.token_ids) < 40
    assert [other.token_ids] == expected_tokens(llm, PROMPTS[1:2], 40)
    assert is_clean(llm)


def test_a_name_is_in_use_until_its_last_notice_is_out() -> None:
    """Else the notice of one that was left would end the next of that name."""

    async def main() -> CompletionOutput:
        llm = tiny_llm()
        async with AsyncEngine(llm) as engine:
            while True:
                stream = engine.generate(PROMPTS[0], GREEDY, request_id="again")
                try:
                    await anext(stream)
                except AsyncschedError:
                    await asyncio.sleep(0)
                    continue
                await stream.aclose()
                break
            for _ in range(1000):
                try:
                    return await collect(engine.generate(PROMPTS[1], GREEDY, request_id="again"))
                except AsyncschedError:
                    await asyncio.sleep(0.01)
        raise AssertionError("the name never became free")

    assert len(run(main()).token_ids) == NEW_TOKENS


def test_a_coroutine_that_is_cancelled_aborts_its_prompt() -> None:
    llm = tiny_llm()

    async def main() -> None:
        async with AsyncEngine(llm) as engine:
            task = asyncio.ensure_future(collect(engine.generate(PROMPTS[0], SamplingParams(max_tokens=50))))
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            await collect(engine.generate(PROMPTS[1], GREEDY))

    run(main())
    assert llm.scheduler.counts.aborted == 1
    assert is_clean(llm)


def test_shutdown_while_running_ends_every_stream() -> None:
    async def main() -> list[Any]:
        engine = AsyncEngine(tiny_llm())
        long = SamplingParams(temperature=0.0, max_tokens=50)
        tasks = [asyncio.ensure_future(collect(engine.generate(prompt, long))) for prompt in PROMPTS[:3]]
        await asyncio.sleep(0.05)
        await engine.shutdown()
        await engine.shutdown()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(EngineStoppedError):
            await collect(engine.generate(PROMPTS[0], long))
        with pytest.raises(EngineStoppedError):
            await engine.abort("x")
        return results

    assert [type(result) for result in run(main())] == [EngineStoppedError] * 3
    assert num_engine_threads() == 0


def test_nothing_of_an_engine_that_was_shut_down_stays_in_the_llm() -> None:
    llm = tiny_llm()

    async def main() -> None:
        engine = AsyncEngine(llm)
        stream = engine.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True))
        await anext(stream)
        await engine.shutdown()
        with pytest.raises(EngineStoppedError):
            await collect(stream)

    run(main())
    assert is_clean(llm)
    assert llm.scheduler.counts.aborted == 1
    assert tokens_of(llm.generate(PROMPTS, GREEDY)) == expected_tokens(llm)


def test_a_stop_that_comes_just_before_the_thread_looks_is_seen() -> None:
    """Between asking whether to stop and clearing what wakes it, it would sleep for ever."""

    class StoppedThen(threading.Event):
        def clear(self) -> None:
            if self.armed:
                engine._stopping = True
                self.set()
                self.armed = False
            super().clear()

        armed = False

    wake = StoppedThen()
    engine = AsyncEngine(tiny_llm())
    before, engine._wake = engine._wake, wake
    wake.armed = True
    before.set()
    engine._thread.join(5)
    hangs = engine._thread.is_alive()
    engine._wake.set()
    asyncio.run(engine.shutdown())
    assert not hangs


def test_a_program_that_ends_without_a_shutdown_ends_well() -> None:
    """A thread inside torch that outlives the interpreter would abort the process."""
    code = """
import asyncio, torch
from tiny_models import TINY
from asyncsched import LLM, AsyncEngine
from executors.models import Model
llm = LLM(TINY["llama"](), device="cpu", dummy_weights=True, max_num_seqs=2, num_blocks=64)
forward, large = Model.forward, torch.ones(2500, 2500)
Model.forward = lambda *args: (large @ large, forward(*args))[1]
async def main():
    first = asyncio.ensure_future(anext(AsyncEngine(llm).generate([1, 2])))
    await asyncio.sleep(0.1)
asyncio.run(main())
"""
    paths = os.pathsep.join((SOURCES["PYTHONPATH"], str(Path(__file__).parent)))
    environment = {**SOURCES, "PYTHONPATH": paths}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_failure_of_the_engine_reaches_everybody_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Scheduler, *_: Any) -> Any:
        raise ZeroDivisionError("a fault of the scheduler")

    async def main() -> list[Any]:
        async with AsyncEngine(tiny_llm()) as engine:
            await collect(engine.generate(PROMPTS[0], GREEDY))
            monkeypatch.setattr(Scheduler, "commit", broken)
            tasks = [collect(engine.generate(prompt, GREEDY)) for prompt in PROMPTS]
            return await asyncio.gather(*tasks, return_exceptions=True)

    errors = run(main())
    assert {type(error) for error in errors} == {EngineStoppedError}
    assert any("ZeroDivisionError: a fault of the scheduler" in str(error) for error in errors)
    assert num_engine_threads() == 0


def test_a_step_that_fails_is_no_failure_of_the_engine() -> None:
    llm = tiny_llm()

    def fail(step: int) -> None:
        if step == 3:
            raise RuntimeError("boom")

    async def main() -> tuple[CompletionOutput, CompletionOutput]:
        async with AsyncEngine(llm) as engine:
            with forward_that(fail):
                failed = await collect(engine.generate(PROMPTS[0], GREEDY))
            return failed, await collect(engine.generate(PROMPTS[0], GREEDY))

    failed, good = run(main())
    assert (failed.finish_reason, failed.message) == ("error", "RuntimeError: boom; the engine is still usable")
    assert [good.token_ids] == expected_tokens(llm, PROMPTS[:1])


# ---- timeline and decisions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", DEPTHS)
def test_the_timeline_has_every_step_on_every_lane(depth: int) -> None:
    llm = tiny_llm(depth=depth, timeline=True)
    llm.generate(PROMPTS, GREEDY)
    assert llm.timeline is not None
    for lane in LANES:
        spans = sorted(span for span in llm.timeline.spans if span.lane == lane and span.name != "launch")
        assert {span.step for span in spans} == set(range(llm.engine.steps))
        spans.sort(key=lambda span: span.start_ns)
        assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(spans))
        assert all(0 <= span.slot < depth and span.start_ns <= span.end_ns for span in spans)
    names = {span.name for span in llm.timeline.spans}
    assert names == {"plan", "fill", "launch", "collect", "commit", "deliver", "h2d", "carry", "forward", "d2h"}


class Ranges:
    """Takes ranges as torch.cuda.nvtx does. `names` are all of them, each below those it was inside of."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.names: list[tuple[str, ...]] = []

    def range_push(self, msg: str) -> None:
        self.open.append(msg)
        self.names.append(tuple(self.open))

    def range_pop(self) -> None:
        self.open.pop()


def test_ranges_mark_every_step_and_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = Ranges()
    monkeypatch.setattr("executors.llm.recorder", lambda device: ranges)
    llm = tiny_llm(nvtx=True)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert tokens_of(outputs) == expected_tokens(llm)
    steps = range(llm.engine.steps)
    outer = [path[0] for path in ranges.names if len(path) == 1]
    assert sorted(name.split(":")[0] for name in outer) == sorted(
        f"{work} step {step}" for step in steps for work in ("launch", "collect")
    )
    assert outer[0] == "launch step 0: 3 sequences, 20 tokens, slot 0"
    for step in steps:
        mine = [path[1] for path in ranges.names if len(path) == 2 and path[0].startswith(f"launch step {step}:")]
        assert mine == ["h2d: inputs", "compute: carry", "compute: forward", "d2h: outputs"]
    assert {len(path) for path in ranges.names} == {1, 2}
    assert ranges.open == []


def test_ranges_are_closed_where_a_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = Ranges()
    monkeypatch.setattr("executors.llm.recorder", lambda device: ranges)
    llm = tiny_llm(nvtx=True)

    def fail(step: int) -> None:
        raise RuntimeError("out of memory")

    with forward_that(fail):
        assert llm.generate([PROMPTS[0]], GREEDY)[0].outputs[0].finish_reason == "error"
    assert ranges.names
    assert ranges.open == []


def test_offloads_are_marked_on_their_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges = Ranges()
    monkeypatch.setattr("executors.llm.recorder", lambda device: ranges)
    tiny_llm(nvtx=True, preemption="offload").generate(PROMPTS, GREEDY)
    assert {"d2h: offload", "h2d: restore"} < {path[-1] for path in ranges.names}


def test_nothing_is_marked_unless_asked_for() -> None:
    """What marks stands around methods of the executor and its parts; without it they are what they are."""
    executor = tiny_llm().engine.executor
    for part in (executor, executor.compute, *executor.slots):
        assert not [name for name, value in vars(part).items() if callable(value) and hasattr(type(part), name)]


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("preemption", ["recompute", "offload"])
def test_the_simulator_decides_as_the_executor_does(depth: int, preemption: str) -> None:
    """Arrivals and aborts enter before the same plans, requests stop at the same tokens: the logs are equal."""
    check_decisions(tiny_llm(depth=depth, preemption=preemption, decisions=True))


def test_every_stage_of_start_up_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    llm = tiny_llm(report=said.append, compile=False)
    assert said == [
        "reading the configuration",
        "making random weights on cpu",
        "checking its logits against those of its own attention",
        "allocating 18 KV blocks of 4 tokens",
        "ready",
    ]
    assert not llm.graphs
    assert [stage for stage, _ in llm.stages] == said
    assert 0 <= llm.stages[0][1] <= llm.stages[-1][1] == llm.startup_s


@pytest.mark.parametrize("refusal", ["", "experts wait for the device"])
def test_start_up_captures_what_it_was_told_of(refusal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuLanes, "graphs", True)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    asked: list[tuple[int, list[Buckets], int]] = []

    def capture(_: object, __: object, slots: list[Any], shapes: list[Buckets], features: int) -> str:
        asked.append((len(slots), shapes, features))
        return refusal

    monkeypatch.setattr(ComputeLane, "capture", capture)
    said: list[str] = []
    config = TINY["llama"]()
    config.eos_token_id = 2  # which the second request may not sample at first: an edit of logits
    warm_up = [SamplingParams(temperature=0.0), SamplingParams(top_p=0.5, min_tokens=2), SamplingParams(top_k=5)]
    options = {"compile": False, "depth": 2, "decode_buckets": (1, 5)}
    llm = tiny_llm(config=config, report=said.append, warm_up=warm_up, **options)
    first, several = (1, [(1, 0)], 0), [(2, [(1, 0), (5, 0)], features) for features in (0, 15, 63)]
    if refusal:
        assert asked == [first]
        stages = [f"CUDA graphs are off, decode steps are launched kernel by kernel: {refusal}"]
    else:
        assert asked == [first, *several]
        stages = ["capturing 4 CUDA graphs"] * 3
    assert said[-2 - len(stages) :] == ["capturing the first CUDA graph", *stages, "ready"]
    assert llm.graphs == (not refusal)


def test_the_defaults_follow_the_model() -> None:
    llm = LLM(TINY["mistral-window"](), device="cpu", dummy_weights=True, max_num_seqs=3)
    config = llm.config
    assert (config.depth, config.max_model_len, config.sliding_window, config.vocab_size) == (2, 256, 8, VOCAB)
    with pytest.raises(ConfigError, match=r"sliding_window: 7 .*some layer of the model sees 8 tokens"):
        LLM(TINY["mistral-window"](), device="cpu", dummy_weights=True, sliding_window=7)
    assert config.num_blocks == 3 * 256 // config.block_size
    assert config.decode_buckets == (1, 2, 3)
    assert config.max_num_batched_tokens == EngineConfig().max_num_batched_tokens
