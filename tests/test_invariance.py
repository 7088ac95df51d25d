"""Which sizes of steps give a token the same bits, and what batch-invariant engines are then padded to. On a GPU:
tests/gpu/test_generation.py."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from test_llm import GREEDY, PROMPTS, tiny_llm
from tiny_models import tiny_model

from asyncsched.errors import ConfigError
from executors import few_rows, settings
from executors.invariance import LEAST_TOKENS, alike
from executors.kv_cache import KvCache
from executors.models import Model
from executors.settings import INVARIANT_SIZES, INVARIANT_TOKENS, engine_config
from executors.step_view import StepView

llama = cache(lambda: tiny_model("llama"))


class Watched:
    """A model whose logits are off by `off[size]` in steps of that size, all of them or one row of the step `where`;
    keeps what it was shown."""

    def __init__(self, off: dict[int, float], where: tuple[int, int] | None = None) -> None:
        self._model = llama()
        self._off = off
        self._where = where
        self.views: list[StepView] = []
        self.vocab_size, self.device = self._model.vocab_size, self._model.device
        self.max_model_len = self._model.max_model_len
        self.allocate_kv = self._model.allocate_kv

    def forward(self, view: StepView, kv: KvCache) -> torch.Tensor:
        assert few_rows.is_alike()
        self.views.append(view)
        # In float64's place: a float32 product on a CPU has bits that depend on the number of rows.
        logits = self._model.forward(view, kv).round(decimals=3)
        wrong = logits if self._where is None else logits[self._where[1]]
        step = [seen.num_tokens for seen in self.views].count(view.num_tokens) - 1
        if self._where is None or step == self._where[0]:
            wrong += self._off.get(view.num_tokens, 0.0)
        return logits


def sizes_of(model: Watched, *sizes: int) -> tuple[int, ...]:
    return alike(cast("Model", model), sizes)


def test_sizes_that_agree_with_the_largest_are_found() -> None:
    assert sizes_of(Watched({}), 16, 70, 130) == (16, 70, 130)
    assert sizes_of(Watched({70: 1e-3}), 16, 70, 130) == (16, 130)
    assert sizes_of(Watched({130: 1e-3}), 16, 70, 130) == (130,)
    assert not few_rows.is_alike()


@pytest.mark.parametrize("where", [(step, row) for step in range(3) for row in range(2)])
def test_every_step_of_both_sequences_counts(where: tuple[int, int]) -> None:
    assert sizes_of(Watched({16: 1e-3}, where), 16, 70) == (70,)


def test_steps_have_the_size_and_no_decodes_and_show_the_same_rows() -> None:
    model = Watched({})
    sizes_of(model, LEAST_TOKENS, 66, 129)
    assert {view.num_tokens for view in model.views} == {LEAST_TOKENS, 66, 129}
    for view in model.views:
        assert view.leading_decodes == 0
        assert len(view.logits_at) == 2  # as many rows of logits in every size
        assert int(view.seq_lens.max()) <= 64  # no longer than a small context
        rows = view.kv_positions.tolist()
        assert len(set(rows)) == len(rows)  # no sequence writes over another
    assert any(int(view.seq_lens[-1]) > int(view.query_start[-1] - view.query_start[-2]) for view in model.views)


def test_a_step_of_hardly_any_tokens_is_not_tried() -> None:
    assert sizes_of(Watched({}), 1, 2, 16) == (16,)


def test_where_nothing_can_be_compared_nothing_runs() -> None:
    model = Watched({})
    assert sizes_of(model, 8) == (8,)
    model.max_model_len = 8
    assert sizes_of(model, 16, 70) == (70,)
    assert model.views == []
    model.max_model_len = 9
    assert sizes_of(model, 16, 70) == (16, 70)
    assert max(int(view.positions.max()) for view in model.views) == 8


def of_model(monkeypatch: pytest.MonkeyPatch, agree: Any, **given: Any) -> tuple[int, tuple[int, ...], int]:
    """A batch-invariant engine's budget, buckets and seats, where those sizes agree."""
    monkeypatch.setattr(settings, "alike", lambda model, sizes: tuple(size for size in sizes if agree(size, sizes)))
    checked: list[bool] = []
    monkeypatch.setattr(Model, "self_check", lambda self: checked.append(few_rows.is_alike()))
    on_gpu = SimpleNamespace(type="cuda")
    model = replace(llama(), device=on_gpu, backend=SimpleNamespace(captures_mixed=True))  # type: ignore[arg-type]
    config = engine_config(model, 2, 64, {"batch_invariant": True, "max_model_len": 64, **given})
    assert config.decode_buckets == ()
    assert checked == [True]  # its products are the model's own
    return config.max_num_batched_tokens, config.mixed_buckets, config.max_num_seqs


def test_an_engine_is_padded_to_what_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = lambda size, sizes: True  # noqa: E731
    assert of_model(monkeypatch, everything)[:2] == (2048, INVARIANT_SIZES)
    assert of_model(monkeypatch, everything, max_num_batched_tokens=100)[:2] == (100, (16, 32, 64, 100))
    assert of_model(monkeypatch, everything, max_num_seqs=3000)[0] == 3000
    some = lambda size, sizes: size not in (32, 64)  # noqa: E731
    assert of_model(monkeypatch, some, max_num_batched_tokens=128)[1] == (16, 128)


def test_where_no_sizes_agree_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    none = lambda size, sizes: size == sizes[-1]  # noqa: E731
    assert of_model(monkeypatch, none)[:2] == (INVARIANT_TOKENS, (INVARIANT_TOKENS,))
    assert of_model(monkeypatch, none, max_num_batched_tokens=100)[:2] == (100, (100,))
    assert of_model(monkeypatch, none, max_num_seqs=300)[:2] == (300, (300,))


def test_where_only_large_sizes_agree_decodes_are_not_padded_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    large = lambda size, sizes: size >= 1280 or size == sizes[-1]  # noqa: E731
    assert of_model(monkeypatch, large)[:2] == (INVARIANT_TOKENS, (INVARIANT_TOKENS,))
    assert of_model(monkeypatch, large, max_num_batched_tokens=1536)[1] == (1280, 1536)
    apart = lambda size, sizes: size in (16, sizes[-1])  # noqa: E731
    assert of_model(monkeypatch, apart, max_num_seqs=17)[:2] == (INVARIANT_TOKENS, (INVARIANT_TOKENS,))
    assert of_model(monkeypatch, apart, max_num_seqs=16)[:2] == (2048, (16, 2048))
    assert of_model(monkeypatch, lambda size, sizes: size != 256, max_num_seqs=300)[1][-1] == 2048


def test_one_size_that_was_asked_for_is_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = lambda size, sizes: True  # noqa: E731
    assert of_model(monkeypatch, everything, mixed_buckets=(24,))[:2] == (24, (24,))
    for sizes, budget in (((24,), {"max_num_batched_tokens": 64}), ((), {})):
        with pytest.raises(ConfigError, match=r"batch_invariant: .*up to max_num_batched_tokens"):
            of_model(monkeypatch, everything, mixed_buckets=sizes, **budget)


def test_sizes_that_were_asked_for_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = lambda size, sizes: True  # noqa: E731
    assert of_model(monkeypatch, everything, mixed_buckets=(24, 48))[:2] == (48, (24, 48))
    with pytest.raises(ConfigError, match=r"mixed_buckets: .*the same only in \(48,\)"):
        of_model(monkeypatch, lambda size, sizes: size != 24, mixed_buckets=(24, 48))
    with pytest.raises(ConfigError, match=r"batch_invariant: .*up to max_num_batched_tokens 64"):
        of_model(monkeypatch, everything, mixed_buckets=(24, 48), max_num_batched_tokens=64)


@pytest.mark.parametrize("is_invariant", [False, True])
def test_steps_compute_alike_products_where_the_engine_is_batch_invariant(is_invariant: bool) -> None:
    llm = tiny_llm(depth=2)
    compute = llm._compute
    budget = compute.config.max_num_batched_tokens
    sizes = {"decode_buckets": (), "mixed_buckets": (budget,)}
    compute.config = replace(compute.config, batch_invariant=is_invariant, **sizes)
    seen: list[bool] = []

    def forward(view: StepView, kv: KvCache) -> torch.Tensor:
        seen.append(few_rows.is_alike())
        return llm.model.forward(view, kv)

    compute.model = cast("Model", SimpleNamespace(forward=forward, backend=llm.model.backend))
    llm.generate(PROMPTS, GREEDY)
    assert set(seen) == {is_invariant}
    assert not few_rows.is_alike()


def test_alike_ends_with_an_error_and_is_of_its_thread() -> None:
    seen = []
    with suppress(KeyError), few_rows.alike():
        seen.append(few_rows.is_alike())
        with ThreadPoolExecutor(1) as other:
            seen.append(other.submit(few_rows.is_alike).result())
        raise KeyError
    assert [*seen, few_rows.is_alike()] == [True, False, False]
