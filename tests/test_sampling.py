"""The sampler against plain references: sorted kept sets, naive penalties, distributions; and what must not matter to a
token: who shares the batch, which features are computed beside it, depth, evictions, prefix hits, recycled rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from asyncsched import ConfigError, EngineConfig, Inbox, SamplingParams, Scheduler, pipeline
from asyncsched.inputs import SlotInputs
from asyncsched.pipeline import Collect, Deliver, Idle, Launch, Submit
from asyncsched.plan import NO_SOURCE, StepPlan
from asyncsched.request import Request
from executors.logprobs import read_logprobs
from executors.noise import exponentials, step_keys, stream_of, token_hashes
from executors.sampling import Sampled, sample
from executors.sampling_layout import MAX_EDITS, NUM_WORDS, Features, Word
from executors.sampling_rows import SamplingRows, SlotSampling
from executors.sampling_state import SamplerState
from executors.thresholds import top_k_keep, top_p_keep

CPU = torch.device("cpu")
NO_TOKENS = np.zeros(0, dtype=np.int32)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def plan_of(rows: list[int], ends: list[int], bucket: int = 0) -> StepPlan:
    """A pure decode step in which every row samples."""
    at, positions = np.array(rows, dtype=np.int64), np.array(ends, dtype=np.int64)
    carry = np.full(len(rows), NO_SOURCE, dtype=np.int64)
    return StepPlan(0, 0, at, at, positions - 1, positions, len(rows), carry, at, positions, at, len(rows), bucket)


class Sampler:
    """Host rows and device state together, without an engine."""

    def __init__(self, capacity: int, vocab_size: int, **options: int) -> None:
        self.rows = SamplingRows(capacity, vocab_size, **options)
        self.state = SamplerState(capacity, vocab_size, CPU)
        self._number = 0

    def seat(self, row: int, params: SamplingParams, prompt: Any = NO_TOKENS, outputs: Any = NO_TOKENS) -> None:
        prompt, outputs = np.asarray(prompt, dtype=np.int32), np.asarray(outputs, dtype=np.int32)
        self.rows.seat(row, self._number, params, prompt, outputs)
        self._number += 1

    def step(
        self, logits: torch.Tensor, rows: list[int], ends: list[int], features: int | None = None, bucket: int = 0
    ) -> Sampled:
        resets = self.rows.take_resets()
        self.state.reset(torch.from_numpy(resets.words), resets)
        plan = plan_of(rows, ends, bucket)
        look = self.rows.look(plan)
        words = np.full((max(len(rows), bucket), NUM_WORDS), 77, dtype=np.int32)
        self.rows.pack(plan, look, words)
        if features is None:
            features = look.features
        assert look.features & ~features == 0
        self.state.allocate(features)
        return sample(logits, torch.from_numpy(words), self.state, features)


# ---- parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", bad) for bad in (-0.1, float("nan"), float("inf"), "1", None, True, 10**400)],
        *[("top_k", bad) for bad in (-1, 1.5, True)],
        *[("top_p", bad) for bad in (0.0, -0.1, 1.01, float("nan"))],
        *[("min_p", bad) for bad in (-0.01, 1.01, float("inf"))],
        *[("seed", bad) for bad in (-1, 2**63, 1.0)],
        *[("repetition_penalty", bad) for bad in (0.0, -1.0, float("nan"))],
        *[("presence_penalty", bad) for bad in (-2.1, 2.1)],
        *[("frequency_penalty", bad) for bad in (-2.1, 2.1, float("nan"))],
        *[("logit_bias", bad) for bad in ({1: 101.0}, {-1: 1.0}, {1: float("nan")}, {"1": 1.0}, {True: 1.0}, 5, "ab")],
        ("logit_bias", [(1, 1.0), (1, 2.0)]),
        *[("logprobs", bad) for bad in (-1, True, 1.0)],
        *[("max_tokens", bad) for bad in (0, 1.0)],
        *[("min_tokens", bad) for bad in (-1, 17)],
        *[("stop_token_ids", bad) for bad in ([1.5], 5, "1")],
        *[("stop", bad) for bad in ("", ["a", ""], [1], 5)],
        ("ignore_eos", 1),
        *[("n", bad) for bad in (0, 1.0)],
    ],
)
def test_bad_parameters_are_refused_in_one_line(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert caught.value.field == name
    assert "\n" not in str(caught.value)


def test_greedy_has_one_output() -> None:
    with pytest.raises(ConfigError, match="n: 2"):
        SamplingParams(temperature=0.0, n=2)


def test_parameters_are_frozen_values() -> None:
    listed = SamplingParams(logit_bias={7: 1, 3: -2.5}, stop_token_ids=[5], stop="end")  # type: ignore[arg-type]
    assert listed == SamplingParams(logit_bias=((3, -2.5), (7, 1.0)), stop_token_ids=(5,), stop=("end",))
    assert hash(listed) == hash(replace(listed))
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("params", "needed"),
    [
        ({"temperature": 0.0}, 0),
        ({"temperature": 0.0, "top_k": 5, "top_p": 0.5, "min_p": 0.5}, 0),
        ({}, Features.RANDOM),
        ({"top_k": 50}, Features.RANDOM),
        ({"top_k": 5}, Features.RANDOM | Features.TOP_K),
        ({"top_p": 0.5, "min_p": 0.1}, Features.RANDOM | Features.TOP_P | Features.MIN_P),
        ({"temperature": 0.0, "presence_penalty": 0.5}, Features.PENALTIES),
        ({"temperature": 0.0, "logit_bias": {1: 1.0}}, Features.EDITS),
        ({"temperature": 0.0, "min_tokens": 2, "stop_token_ids": (1,)}, (Features.EDITS, 0)),
        ({"logit_bias": {1: 1.0}, "min_tokens": 2, "stop_token_ids": (1,)}, Features.RANDOM | Features.EDITS),
        ({"temperature": 0.0, "min_tokens": 2}, 0),
        ({"temperature": 0.0, "logprobs": 0}, Features.LOGPROBS),
    ],
)
def test_what_a_request_needs_is_known_before_it_is_seated(
    params: dict[str, Any], needed: int | tuple[int, int]
) -> None:
    """And is what its steps use."""
    sampler = Sampler(2, 50)
    asked = SamplingParams(**params)
    needs = sampler.rows.needs(asked)
    assert set(needs) == (set(needed) if isinstance(needed, tuple) else {needed})
    sampler.seat(1, asked)
    assert {sampler.rows.features(plan_of([1], [end])) for end in (1, 2, 3)} == set(needs)


def test_end_of_sequence_joins_the_stop_ids() -> None:
    params = SamplingParams(stop_token_ids=(5,))
    assert params.with_eos((2, 5)).stop_token_ids == (5, 2)
    assert replace(params, ignore_eos=True).with_eos((2,)).stop_token_ids == (5,)


def test_every_output_of_a_prompt_has_its_own_seed() -> None:
    children = SamplingParams(seed=2**63 - 1, n=3).fan_out()
    assert [child.seed for child in children] == [2**63 - 1, 0, 1]
    assert [child.n for child in children] == [1, 1, 1]
    assert [child.seed for child in SamplingParams(n=2).fan_out()] == [None, None]


def test_what_the_vocabulary_cannot_serve_is_refused() -> None:
    rows = SamplingRows(1, 2000, max_logprobs=5)
    rows.check(SamplingParams(logprobs=5, logit_bias={1999: 1.0}, stop_token_ids=(5000,), min_tokens=1))
    for params, field in (
        (SamplingParams(logprobs=6), "logprobs"),
        (SamplingParams(logit_bias={2000: 1.0}), "logit_bias"),
        (SamplingParams(logit_bias=dict.fromkeys(range(MAX_EDITS + 1), 1.0)), "logit_bias"),
    ):
        with pytest.raises(ConfigError) as caught:
            rows.check(params)
        assert caught.value.field == field


# ---- kept sets -------------------------------------------------------------------------------------------------------


def logits_of(kind: str, rows: int, vocab: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, vocab, generator=draw) * 4
    if kind == "ties":
        logits = logits.round()
    elif kind == "bfloat16":
        logits = logits.bfloat16().float()
    elif kind == "tiny":
        logits = logits * 1e-30
    elif kind == "holes":
        logits[:, 1::3] = -torch.inf
    elif kind == "zeros":
        logits = torch.where(torch.rand(logits.shape, generator=draw) < 0.5, 0.0, -0.0)
    return logits


KINDS = ["plain", "ties", "bfloat16", "tiny", "holes", "zeros"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [1, 2, 7, 1000, 5003])
def test_top_k_keeps_the_sorted_reference(kind: str, vocab: int) -> None:
    logits = logits_of(kind, 12, vocab, seed=vocab)
    ks = torch.tensor([1, 2, 3, 5, 10, 50, 100, 999, 1000, 4000, 5002, vocab], dtype=torch.int32).clamp(max=vocab)
    kept = top_k_keep(logits, ks.unsqueeze(1))
    kth = logits.sort(-1, descending=True).values.gather(1, ks.long().unsqueeze(1) - 1)
    assert torch.equal(kept, logits >= kth)
    if kind == "plain":
        assert torch.equal(kept.sum(-1), ks)


def sorted_top_p(weights: NDArray[np.float64], p: float) -> tuple[NDArray[np.bool_], bool]:
    """Kept tokens of one row by sorting, ties with the last one included; and whether p is too near a step to tell."""
    order = np.argsort(-weights, kind="stable")
    shares = np.cumsum(weights[order]) / weights.sum()
    count = int(np.searchsorted(shares, p)) + 1
    return weights >= weights[order[min(count, len(order)) - 1]], bool(np.abs(shares - p).min() < 1e-7)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [1, 7, 1000, 5003])
def test_top_p_keeps_the_sorted_reference(kind: str, vocab: int) -> None:
    logits = logits_of(kind, 14, vocab, seed=vocab)
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    ps = torch.tensor(
        [1e-30, 1e-6, 0.0123, 0.1037, 0.3041, 0.5023, 0.7019, 0.9032, 0.9547, 0.9901, 0.9993, 0.99991, 1 - 2**-24, 1.0]
    )
    kept = top_p_keep(weights, ps.unsqueeze(1)).numpy()
    compared = 0
    for row, p in enumerate(ps.double().tolist()):
        expected, is_near = sorted_top_p(weights[row].double().numpy(), p)
        if p == 1:
            assert kept[row].all()
        elif not is_near:
            compared += 1
            assert (kept[row] == expected).all(), p
    assert compared >= 9


def reference_probabilities(logits: torch.Tensor, params: SamplingParams) -> NDArray[np.float64]:
    """Of one row, by sorting, in float64: temperature, min_p, top_k, top_p."""
    x = logits.double().numpy() / params.temperature
    p = np.exp(x - x.max())
    p[p < params.min_p] = 0
    if params.top_k:
        p[p < np.sort(p)[::-1][min(params.top_k, len(p)) - 1]] = 0
    if params.top_p < 1:
        kept, is_near = sorted_top_p(p, params.top_p)
        assert not is_near
        p[~kept] = 0
    return p / p.sum()


CHOICES = [
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=5.0),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.8),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=1.7, top_k=20, top_p=0.7),
    SamplingParams(temperature=2.0, min_p=0.05, top_k=12, top_p=0.85),
]


@pytest.mark.parametrize("params", CHOICES, ids=lambda params: f"{params.temperature}-{params.top_k}-{params.top_p}")
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    logits, draws, vocab = logits_of("plain", 1, 40, seed=5) / 2, 10_000, 40
    sampler = Sampler(1, vocab)
    sampler.seat(0, replace(params, seed=3))
    tokens = draw_many(sampler, logits, draws)
    counts = np.bincount(tokens, minlength=vocab)
    expected = reference_probabilities(logits[0], params) * draws
    assert (counts[expected == 0] == 0).all()
    big = expected >= 5
    rest = expected[~big].sum()
    statistic = ((counts[big] - expected[big]) ** 2 / expected[big]).sum()
    if rest >= 5:
        statistic += (counts[~big].sum() - rest) ** 2 / rest
    assert statistic < chi_square_bound(big.sum() - 1 + (rest >= 5)), (counts, expected)


def draw_many(sampler: Sampler, logits: torch.Tensor, draws: int) -> NDArray[np.int32]:
    """Tokens of row 0 at positions 0, 1, ..., all from the same logits, float32[1, V]."""
    some = range(0, draws, 500)
    ends = [list(range(first, first + 500)) for first in some]
    return torch.cat([sampler.step(logits.expand(500, -1), [0] * 500, at).tokens for at in ends]).numpy()


def chi_square_bound(freedom: int) -> float:
    """What a chi-square variate exceeds in one case of 1,000 (Wilson and Hilferty)."""
    return float(freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3)


def test_rare_tokens_are_drawn_as_often_as_they_should() -> None:
    """20,000 tokens of probability 1e-5 each: half of the draws, spread evenly."""
    rare, draws = 20_000, 3_000
    logits = torch.full((1, rare + 1), float(np.log(1e-5)))
    logits[0, -1] = float(np.log(1 - 1e-5 * rare))
    sampler = Sampler(1, rare + 1)
    sampler.seat(0, SamplingParams(seed=11))
    tokens = draw_many(sampler, logits, draws)
    is_rare = tokens < rare
    assert abs(is_rare.sum() - 0.2 * draws) < 4 * (draws * 0.16) ** 0.5
    blocks = np.bincount(tokens[is_rare] // (rare // 10), minlength=10)
    expected = is_rare.sum() / 10
    assert ((blocks - expected) ** 2 / expected).sum() < chi_square_bound(9)


def test_noise_is_exponential_and_unrelated_between_positions_seeds_and_tokens() -> None:
    hashes = token_hashes(2_000, CPU)
    streams = np.array([stream_of(seed) for seed in (0, 1, 2) for _ in range(40)], dtype=np.uint64)
    keys = step_keys(streams, np.tile(np.arange(40), 3))
    noise = exponentials(torch.from_numpy(keys), hashes).double()
    assert noise.min() > 0
    assert noise.max() < 17
    for power, moment in ((1, 1.0), (2, 2.0), (3, 6.0)):
        assert (noise**power).mean().item() == pytest.approx(moment, rel=0.03)
    scaled = noise - 1
    neighbours = {
        "token": (scaled[:, :-1] * scaled[:, 1:]).mean(),
        "position": (scaled[:39] * scaled[1:40]).mean(),
        "seed": (scaled[:40] * scaled[40:80]).mean(),
        "token bits": (scaled[:, :1024] * scaled[:, 512 : 512 + 1024]).mean(),
    }
    for name, correlation in neighbours.items():
        assert abs(correlation.item()) < 0.015, name
    assert len(set(noise.flatten().tolist())) > 0.98 * noise.numel()


# ---- what must not matter --------------------------------------------------------------------------------------------

MIXED = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(seed=1, top_p=0.9),
    SamplingParams(seed=2, top_k=3),
    SamplingParams(seed=3, temperature=0.7, min_p=0.02, logprobs=2),
    SamplingParams(seed=4, repetition_penalty=1.3, presence_penalty=0.5),
    SamplingParams(temperature=0.0, frequency_penalty=1.5),
    SamplingParams(seed=5, top_k=40, top_p=0.5, logit_bias={3: 2.0, 5: -100.0}),
    SamplingParams(temperature=0.0, stop_token_ids=(1, 2), min_tokens=9),
    SamplingParams(),
]


@pytest.mark.parametrize("vocab", [37, 1003])
def test_a_token_depends_neither_on_the_batch_nor_on_what_else_is_computed(vocab: int) -> None:
    logits = logits_of("plain", len(MIXED), vocab, seed=8) / 3
    prompts = [np.arange(i + 1) for i in range(len(MIXED))]
    ends = [i + 3 for i in range(len(MIXED))]

    def run(rows: list[int], features: int | None, bucket: int = 0) -> list[int]:
        sampler = Sampler(len(MIXED), vocab)
        for row, (params, prompt) in enumerate(zip(MIXED, prompts, strict=True)):
            sampler.seat(row, params, prompt, [4, 4])
        padded = torch.cat((logits[rows], torch.full((max(0, bucket - len(rows)), vocab), torch.nan)))
        out = sampler.step(padded, rows, [ends[row] for row in rows], features, bucket)
        return out.tokens.tolist()[: len(rows)]

    alone = [run([row], None)[0] for row in range(len(MIXED))]
    everybody = list(range(len(MIXED)))
    assert len(set(alone)) > len(alone) // 2
    assert run(everybody, None) == alone
    assert run(everybody[::-1], Features.ALL) == alone[::-1]
    assert [run([row], Features.ALL)[0] for row in everybody] == alone
    assert run([3, 1, 4, 1, 5], Features.ALL, bucket=8) == [alone[row] for row in (3, 1, 4, 1, 5)]


def test_weights_and_noise_have_the_same_bits_wherever_a_row_lies() -> None:
    vocab = 1003
    logits, hashes = logits_of("plain", 1, vocab, seed=1), token_hashes(vocab, CPU)
    key = torch.from_numpy(step_keys(np.array([stream_of(9)], dtype=np.uint64), np.array([17])))
    weights, noise = (logits - logits.max()).exp(), exponentials(key, hashes)
    for rows in (2, 3, 8, 129):
        many = (logits.expand(rows, -1) - logits.max()).exp()
        assert all(torch.equal(row, weights[0]) for row in many)
        assert all(torch.equal(row, noise[0]) for row in exponentials(key.expand(rows, -1), hashes))


def test_seed_and_position_decide() -> None:
    vocab = 5000
    logits = torch.zeros(1, vocab)
    sampler = Sampler(4, vocab, seed=6)
    for row, params in enumerate((SamplingParams(seed=1), SamplingParams(seed=2), SamplingParams(), SamplingParams())):
        sampler.seat(row, params)
    drawn = {
        (row, end): sampler.step(logits, [row], [end]).tokens.item() for row in range(4) for end in (1, 2, 2**20, 2**31)
    }
    assert len(set(drawn.values())) == len(drawn)
    again = Sampler(1, vocab, seed=7)
    again.seat(0, SamplingParams(seed=2))
    assert again.step(logits, [0], [2]).tokens.item() == drawn[1, 2]


def test_greedy_is_the_first_of_the_largest() -> None:
    for vocab in (9, 1000, 4099):
        logits = torch.randint(0, 4, (50, vocab), generator=torch.Generator().manual_seed(0)).float()
        sampler = Sampler(1, vocab)
        sampler.seat(0, SamplingParams(temperature=0.0))
        expected = logits.numpy().argmax(-1).tolist()
        out = sampler.step(logits, [0] * 50, [1] * 50)
        assert out.tokens.tolist() == expected
        assert out.logprobs is None
        assert sampler.step(logits, [0] * 50, [1] * 50, Features.ALL).tokens.tolist() == expected


@pytest.mark.parametrize("features", [None, Features.ALL])
def test_a_row_without_usable_logits_has_no_token_and_the_others_theirs(features: int | None) -> None:
    vocab, ends = 300, [1] * 7
    logits = logits_of("plain", 7, vocab, seed=3)
    for params in (SamplingParams(temperature=0.0), SamplingParams(seed=1, top_k=5, top_p=0.9, repetition_penalty=1.1)):
        sampler = Sampler(7, vocab)
        for row in range(7):
            sampler.seat(row, params, [1], [2])
        good = sampler.step(logits, list(range(7)), ends, features).tokens.tolist()
        assert min(good) >= 0
        bad = logits.clone()
        bad[0, 0] = torch.nan
        bad[2] = torch.nan
        bad[4] = -torch.inf
        bad[6, 10] = torch.inf
        for row in range(7):
            sampler.seat(row, params, [1], [2])
        tokens = sampler.step(bad, list(range(7)), ends, features).tokens.tolist()
        assert tokens == [-1, good[1], -1, good[3], -1, good[5], -1]


def test_extreme_parameters_still_draw_tokens() -> None:
    vocab = 50
    logits = logits_of("plain", 1, vocab, seed=2) * 1000
    best = int(logits.argmax())
    for params, expected in (
        (SamplingParams(temperature=1.1e-5, seed=0), best),
        (SamplingParams(top_p=1e-300, seed=0), best),
        (SamplingParams(min_p=1.0, seed=0), best),
        (SamplingParams(top_k=2**40, seed=0), best),  # the logits are far apart
        (SamplingParams(repetition_penalty=1e-300, seed=0), None),
        (SamplingParams(repetition_penalty=1e300, seed=0), None),
    ):
        sampler = Sampler(1, vocab)
        sampler.seat(0, params, range(vocab))
        token = sampler.step(logits, [0], [vocab]).tokens.item()
        assert token == expected or (expected is None and token >= 0)
    sampler = Sampler(1, vocab)
    sampler.seat(0, SamplingParams(temperature=1e300, seed=0))
    assert len(set(draw_many(sampler, logits, 500).tolist())) == vocab


def test_min_p_is_relative_to_the_most_likely_token() -> None:
    logits = torch.tensor([[1.0, 0.11, 0.104, 0.096, 0.05]]).log() + 3
    sampler = Sampler(1, 5)
    sampler.seat(0, SamplingParams(min_p=0.1, seed=0))
    assert set(draw_many(sampler, logits, 1000).tolist()) == {0, 1, 2}


# ---- penalties, bias, min_tokens, logprobs ---------------------------------------------------------------------------


def naive_logits(
    logits: NDArray[np.float32], params: SamplingParams, prompt: list[int], outputs: list[int]
) -> NDArray[np.float32]:
    """Bias, min_tokens and penalties, token by token."""
    edited = logits.copy()
    for token, bias in params.logit_bias or ():
        edited[token] += np.float32(bias)
    if len(outputs) < params.min_tokens:
        edited[list(params.stop_token_ids)] = -np.inf
    for token in set(prompt) | set(outputs):
        scale = np.float32(params.repetition_penalty)
        edited[token] = edited[token] / scale if edited[token] > 0 else edited[token] * scale
    for token in set(outputs):
        edited[token] -= np.float32(params.frequency_penalty) * np.float32(outputs.count(token))
        edited[token] -= np.float32(params.presence_penalty)
    return edited


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, repetition_penalty=1.5),
        SamplingParams(temperature=0.0, repetition_penalty=0.7),
        SamplingParams(temperature=0.0, presence_penalty=1.0),
        SamplingParams(temperature=0.0, presence_penalty=-1.0, frequency_penalty=0.3),
        SamplingParams(temperature=0.0, frequency_penalty=2.0),
        SamplingParams(temperature=0.0, frequency_penalty=0.5, logit_bias={1: 3.0, 7: -4.0, 0: 1.0}),
        SamplingParams(temperature=0.0, logit_bias={11: 100.0}, stop_token_ids=(11, 4), min_tokens=12, max_tokens=40),
    ],
)
@pytest.mark.parametrize("features", [None, Features.ALL])
def test_penalties_follow_the_naive_ones_while_the_output_grows(params: SamplingParams, features: int | None) -> None:
    """Also after the row was given to somebody else and the request came back to another one."""
    vocab, prompt = 24, [1, 1, 5, 9]
    draw = torch.Generator().manual_seed(4)
    sampler, outputs, row = Sampler(3, vocab), list[int](), 0
    sampler.seat(row, params, prompt)
    plain = 0
    for step in range(40):
        if step == 15:
            sampler.seat(0, MIXED[5], [2, 2], [3])
            row = 2
            sampler.seat(row, params, prompt, outputs)
        if step == 25:
            row = 0
            sampler.seat(row, params, prompt, outputs)
        logits = torch.randn(2, vocab, generator=draw) * 1.5
        expected = int(naive_logits(logits[0].numpy(), params, prompt, outputs).argmax())
        plain += expected == int(logits[0].argmax())
        sampler.seat(1, replace(params, frequency_penalty=-2.0), [7], [7] * step)
        token = sampler.step(logits, [row, 1], [4 + step, 1 + step], features).tokens[0].item()
        assert token == expected, step
        outputs.append(token)
    assert plain < 40
    if params.min_tokens:
        assert outputs.index(11) == 12


def test_edits_that_no_longer_apply_cost_nothing() -> None:
    sampler = Sampler(1, 30)
    sampler.seat(0, SamplingParams(temperature=0.0, stop_token_ids=(3,), min_tokens=2), [5, 6])
    assert [sampler.rows.features(plan_of([0], [end])) for end in (2, 3, 4)] == [Features.EDITS] * 2 + [Features.NONE]


def test_a_row_forgets_the_edits_of_its_former_owner() -> None:
    short = SamplingParams(temperature=0.0, stop_token_ids=(3,), min_tokens=9)
    sampler, logits = Sampler(2, 30), torch.zeros(2, 30)
    logits[:, 3] = 1
    sampler.seat(0, short)
    sampler.seat(1, short)
    assert sampler.step(logits, [0, 1], [0, 0]).tokens.tolist() == [0, 0]
    sampler.seat(0, SamplingParams(temperature=0.0))
    assert sampler.step(logits, [0, 1], [1, 1], Features.ALL).tokens.tolist() == [3, 0]


def test_logprobs_are_of_the_models_own_logits() -> None:
    vocab = 400
    logits = logits_of("plain", 6, vocab, seed=9)
    sampler = Sampler(6, vocab)
    asked = [3, 0, 20, 5, 1, 2]
    for row, count in enumerate(asked):
        sampler.seat(row, SamplingParams(logprobs=count, temperature=2.0, logit_bias={7: 50.0}, seed=row))
    out = sampler.step(logits, list(range(6)), [1] * 6)
    assert out.logprobs is not None
    expected = logits.double().log_softmax(-1)
    assert out.tokens.tolist() == [7] * 6  # the bias decides, and the log-probabilities do not know it
    for row, count in enumerate(asked):
        found = read_logprobs(out.logprobs[row].numpy(), count)
        assert found.logprob == pytest.approx(expected[row, 7].item(), abs=1e-5)
        assert found.rank == int((logits[row] > logits[row, 7]).sum()) + 1
        best = expected[row].topk(count)
        assert [token for token, _ in found.top] == best.indices.tolist()
        assert [value for _, value in found.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_logprobs_of_a_vocabulary_smaller_than_the_list() -> None:
    sampler = Sampler(1, 5)
    sampler.seat(0, SamplingParams(logprobs=5, temperature=0.0))
    out = sampler.step(torch.arange(5.0).unsqueeze(0), [0], [1])
    assert out.logprobs is not None
    assert [token for token, _ in read_logprobs(out.logprobs[0].numpy(), 5).top] == [4, 3, 2, 1, 0]


# ---- one slot's inputs, and a whole engine ---------------------------------------------------------------------------


def test_a_greedy_step_leaves_a_neutral_slot_alone() -> None:
    rows = SamplingRows(3, 50)
    slot = SlotSampling(rows, np.zeros((8, NUM_WORDS), dtype=np.int32))
    scheduler = Scheduler(EngineConfig(depth=1, max_num_seqs=3))
    for row, params in enumerate((SamplingParams(temperature=0.0), SamplingParams(seed=1))):
        rows.seat(row, row, params, NO_TOKENS, NO_TOKENS)
    assert slot.fill(plan_of([1, 0], [5, 6], bucket=4), scheduler.rows) == Features.RANDOM
    assert slot.words[:4, Word.ROW].tolist() == [1, 0, 3, 3]
    assert slot.words.view(np.float32)[:4, Word.INV_TEMPERATURE].tolist() == [1, 0, 0, 0]
    assert slot.fill(plan_of([0], [6], bucket=2), scheduler.rows) == Features.NONE
    assert slot.words[:2, Word.ROW].tolist() == [3, 3]
    slot.words[1] = 77  # neutral already: nothing is written
    assert slot.fill(plan_of([0], [7], bucket=2), scheduler.rows) == Features.NONE
    assert slot.words[1, Word.ROW] == 77
    assert slot.fill(plan_of([1], [7]), scheduler.rows) == Features.RANDOM
    assert slot.fill(plan_of([0], [8], bucket=2), scheduler.rows) == Features.NONE
    assert slot.words[:2, Word.ROW].tolist() == [3, 3]


def test_whoever_comes_back_to_a_row_is_seated_anew() -> None:
    """A request in row 0, in row 1, in row 0 again: what row 0 counted is out of date, although nobody else had it."""
    params, tokens = SamplingParams(presence_penalty=1.0), np.arange(5, dtype=np.int32)
    rows = Scheduler(EngineConfig(depth=1, max_num_seqs=2)).rows
    request = Request("a", 7, params, 0, tokens, 3, 20)
    rows.tokens[:, :5], rows.known[:] = tokens, 5
    rows.owner[:] = [request, request]
    rows.request[:] = 7
    sampling = SamplingRows(2, 50)
    seen = []
    for row in (0, 0, 1, 0, 0):
        at = np.array([row])
        plan = replace(plan_of([row], [5]), num_decodes=0, requests=rows.request[at])
        sampling.seat_new(plan, rows)
        resets = sampling.take_resets()
        seen.append(resets.words[: resets.num_rows].tolist())
    assert seen == [[0], [], [1], [0], []]
    sampling.seat(0, 8, params, tokens, NO_TOKENS)
    sampling.seat(1, 7, params, tokens, NO_TOKENS)
    assert sampling.take_resets().words[:2].tolist() == [0, 1]
    rows.request[:] = [8, 7, *rows.request[2:]]
    sampling.seat_new(replace(plan_of([0, 1], [5, 5]), num_decodes=0, requests=rows.request[:2]), rows)
    assert not sampling.take_resets().num_rows


VOCAB = 61


@dataclass(frozen=True)
class Case:
    prompt: NDArray[np.int32]
    params: SamplingParams


def fake_logits(tokens: NDArray[np.integer[Any]], positions: NDArray[np.integer[Any]]) -> torch.Tensor:
    """A model whose logits depend on the newest token and its position."""
    draw = np.random.default_rng(0)
    by_token, by_position = draw.normal(size=(VOCAB, VOCAB)) * 2, draw.normal(size=(512, VOCAB)) * 0.5
    return torch.from_numpy((by_token[tokens] + by_position[positions]).astype(np.float32))


def one_at_a_time(case: Case) -> list[int]:
    """The reference: naive edits; the draw from a batch of one that knows nothing of them."""
    params, prompt = case.params, case.prompt.tolist()
    plain = SamplingParams(
        temperature=params.temperature, seed=params.seed, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p
    )
    outputs: list[int] = []
    while len(outputs) < params.max_tokens:
        known = prompt + outputs
        logits = fake_logits(np.array(known[-1:]), np.array([len(known) - 1])).numpy()[0]
        sampler = Sampler(1, VOCAB)
        sampler.seat(0, plain)
        edited = torch.from_numpy(naive_logits(logits, params, prompt, outputs)).unsqueeze(0)
        outputs.append(sampler.step(edited, [0], [len(known)]).tokens.item())
        if outputs[-1] in params.stop_token_ids and len(outputs) >= params.min_tokens:
            break
    return outputs


class TinyEngine:
    """Runs the pipeline over the fake model. A step runs when it is launched, and is seen when it is collected."""

    def __init__(self, config: EngineConfig) -> None:
        self.scheduler = Scheduler(config)
        rows = self.scheduler.rows
        sampling = SamplingRows(rows.capacity, VOCAB)
        self.state = SamplerState(rows.capacity, VOCAB, CPU)
        self.slots = [
            (
                SlotInputs(config, rows),
                SlotSampling(sampling, np.zeros((config.max_num_seqs, NUM_WORDS), dtype=np.int32)),
            )
            for _ in range(config.depth)
        ]
        self.dev_out = torch.zeros(config.depth, config.max_num_seqs, dtype=torch.int32)
        self.features: set[int] = set()
        self.carried = 0
        self.owners: dict[int, list[int]] = {}  # of each row, one after the other
        self.penalised_hits = 0  # requests with penalties whose prompt was not computed from its beginning

    def run(self, cases: list[Case]) -> dict[int, list[int]]:
        inbox, outputs = Inbox(), dict[int, list[int]]()
        for i, case in enumerate(cases):
            inbox.put(Submit(str(i), case.prompt, case.params))
        inbox.close()
        loop = pipeline(self.scheduler, inbox)
        answer: object = None
        try:
            while True:
                effect = loop.send(answer)
                answer = None
                match effect:
                    case Launch(program):
                        answer = self.launch(program.plan)
                    case Collect(ticket, _):
                        answer = ticket
                    case Deliver(output):
                        outputs |= {finished.number: finished.token_ids.tolist() for finished in output.finished}
                    case Idle():
                        raise AssertionError("nothing to run")
        except StopIteration:
            return outputs

    def launch(self, plan: StepPlan) -> NDArray[np.int32]:
        inputs, sampling = self.slots[plan.slot]
        inputs.fill(plan)
        self.watch(plan)
        features = sampling.fill(plan, self.scheduler.rows)
        self.features.add(features)
        if sampling.resets.num_rows or sampling.resets.num_edits:
            self.state.reset(torch.from_numpy(sampling.resets.words), sampling.resets)
        tokens = torch.from_numpy(inputs.token_ids[: plan.num_tokens])
        carry = torch.from_numpy(inputs.carry[: plan.num_tokens]).long()
        self.carried += int((carry >= 0).sum())
        tokens = torch.where(carry >= 0, self.dev_out.view(-1)[carry.clamp(min=0)], tokens)
        count = len(plan.sampled)
        at = inputs.logits_at[:count]
        if count:
            logits = fake_logits(tokens.numpy()[at], inputs.positions[at])
            words = torch.from_numpy(sampling.words[:count].copy())
            self.dev_out[plan.slot, :count] = sample(logits, words, self.state, features).tokens
        return self.dev_out[plan.slot, :count].numpy().copy()

    def watch(self, plan: StepPlan) -> None:
        for row, number, start in zip(
            *(part[plan.num_decodes :].tolist() for part in (plan.rows, plan.requests, plan.starts)), strict=True
        ):
            owners = self.owners.setdefault(row, [])
            if number not in owners[-1:]:
                owners.append(number)
                request = self.scheduler.rows.owner[row]
                assert request is not None
                self.penalised_hits += start > 0 and request.params.repetition_penalty != 1


def cases_of(seed: int) -> list[Case]:
    """Prompts with common beginnings, every feature, stops."""
    draw = np.random.default_rng(seed)
    common = draw.integers(0, VOCAB, 24)
    cases = []
    for i in range(16):
        own = draw.integers(0, VOCAB, int(draw.integers(1, 20)))
        prompt = np.concatenate((common[: int(draw.integers(0, 25))], own)).astype(np.int32)
        params = MIXED[i % (len(MIXED) - 1)]
        stops = tuple(draw.integers(0, VOCAB, int(draw.integers(0, 3))).tolist())
        params = replace(params, max_tokens=int(draw.integers(10, 40)), stop_token_ids=stops or params.stop_token_ids)
        cases.append(Case(prompt, params))
    return cases


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_engine_gives_every_request_its_own_tokens(depth: int) -> None:
    """Chunked prefill, evictions, prefix hits, recycled rows, carried-over tokens."""
    cases = cases_of(1)
    config = EngineConfig(
        depth=depth,
        max_num_seqs=4,
        max_num_batched_tokens=12,
        max_model_len=128,
        block_size=4,
        num_blocks=40,
        enable_prefix_caching=True,
    )
    engine = TinyEngine(config)
    outputs = engine.run(cases)
    for number, case in enumerate(cases):
        assert outputs[number] == one_at_a_time(case), (number, case.params)
    assert engine.scheduler.preemptions > 0
    owned = [number for owners in engine.owners.values() for number in owners]
    assert any(len(owners) > 1 for owners in engine.owners.values())  # recycled rows
    assert len(owned) > len(set(owned))  # requests with a second row
    assert engine.penalised_hits > 0
    assert engine.carried > 0 or depth == 1
    assert len(engine.features) > 3
