"""Prices from request logs: known prices are found again, nothing after the cut is looked at, and faults show."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from request_logs import CONFIG, TIGHT, TRUTH, log_of, workload

from asyncsched.config import EngineConfig
from asyncsched.errors import ConfigError
from asyncsched.runs import IntArray, RequestLog
from sim.hardware import shape_by_name
from sim.replay import Replayed, Workload, replay
from sim.request_fit import (
    KV_TOKEN,
    PRICES,
    STEP,
    StepPrices,
    first_wait_for_blocks,
    fit,
    nonnegative_least_squares,
    seen_before,
    solve,
)


def run_of(config: EngineConfig, *, seed: int = 0) -> tuple[Workload, RequestLog]:
    work = workload(seed=seed)
    return work, log_of(work, replay(work, config, TRUTH))


def settings_of(config: EngineConfig) -> dict[str, object]:
    names = ("depth", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_blocks", "enable_prefix_caching")
    return {name: getattr(config, name) for name in names}


def without_pool(config: EngineConfig) -> dict[str, object]:
    return {name: value for name, value in settings_of(config).items() if name != "num_blocks"}


def errors(work: Workload, log: RequestLog, predicted: Replayed, cut_ns: int) -> tuple[float, float, float]:
    """Of the means of TTFT, TPOT and E2E after the cut, as shares."""
    first, last = log.first_ns > cut_ns, log.last_ns > cut_ns
    gaps = work.output_tokens - 1

    def figures(first_ns: IntArray, last_ns: IntArray) -> list[float]:
        ttft, tpot = (first_ns - work.arrival_ns)[first], ((last_ns - first_ns) / gaps)[last]
        return [float(ttft.mean()), float(tpot.mean()), float((last_ns - work.arrival_ns)[last].mean())]

    measured, simulated = figures(log.first_ns, log.last_ns), figures(predicted.first_ns, predicted.last_ns)
    ttft, tpot, e2e = (abs(s / m - 1) for s, m in zip(simulated, measured, strict=True))
    return ttft, tpot, e2e


@pytest.mark.parametrize("config", [CONFIG, replace(CONFIG, depth=1), TIGHT], ids=["async", "sync", "preempting"])
def test_a_run_of_the_simulator_itself_is_predicted_from_its_first_half(config: EngineConfig) -> None:
    work, log = run_of(config)
    cut_ns = int(log.last_ns.max() // 2)
    assert (log.last_ns > cut_ns).sum() > 15
    fitted = fit(seen_before(log, cut_ns), settings_of(config))
    predicted = replay(work, config, fitted.prices)
    assert predicted.preemptions == 0 or config is TIGHT
    assert max(errors(work, log, predicted, cut_ns)) < 0.01
    assert fitted.residual < 0.01


def test_the_preempting_run_preempts() -> None:
    assert replay(workload(), TIGHT, TRUTH).preemptions > 5


def test_another_run_is_predicted_from_all_of_one() -> None:
    _, log = run_of(CONFIG)
    fitted = fit(seen_before(log, int(log.last_ns.max())), settings_of(CONFIG))
    other = workload(seed=5, rate=9.0)
    truth = log_of(other, replay(other, CONFIG, TRUTH))
    assert max(errors(other, truth, replay(other, CONFIG, fitted.prices), -1)) < 0.005


@pytest.mark.parametrize("wrong", ["depth", "budget", "seats"])
def test_a_wrong_setting_shows(wrong: str) -> None:
    """A prediction with another scheduler than the measured one is off: the check can fail."""
    changed = {"depth": {"depth": 1}, "budget": {"max_num_batched_tokens": 256}, "seats": {"max_num_seqs": 6}}[wrong]
    work, log = run_of(CONFIG)
    cut_ns = int(log.last_ns.max() // 2)
    config = replace(CONFIG, **changed)
    fitted = fit(seen_before(log, cut_ns), settings_of(config))
    assert max(errors(work, log, replay(work, config, fitted.prices), cut_ns)) > 0.02


def test_prices_that_are_off_show() -> None:
    work, log = run_of(CONFIG)
    slower = StepPrices(tuple(1.05 * price for price in TRUTH.seconds))
    assert max(errors(work, log, replay(work, CONFIG, slower), -1)) > 0.04


_WORK, _LOG = run_of(TIGHT, seed=3)
_CUT = int(_LOG.last_ns.max() * 0.4)
_FITTED = fit(seen_before(_LOG, _CUT), settings_of(TIGHT))


@given(
    arrays(np.int64, len(_LOG), elements=st.integers(0, 10**10)),
    arrays(np.int64, len(_LOG), elements=st.integers(0, 10**10)),
    arrays(np.int64, len(_LOG), elements=st.integers(1, 4000)),
)
@settings(max_examples=4, deadline=None)
def test_nothing_after_the_cut_changes_what_is_learned(later: IntArray, longer: IntArray, tokens: IntArray) -> None:
    """Times after the cut, requests that came after it, and what unfinished requests got in the end."""
    come = _LOG.arrival_ns <= _CUT
    unfinished = _LOG.last_ns > _CUT
    first = np.where(_LOG.first_ns > _CUT, _CUT + 1 + later, _LOG.first_ns)
    changed = replace(
        _LOG,
        arrival_ns=np.where(come, _LOG.arrival_ns, _CUT + 1),
        prompt_tokens=np.where(come, _LOG.prompt_tokens, tokens),
        max_tokens=np.where(come, _LOG.max_tokens, tokens),
        output_tokens=np.where(come, np.where(unfinished, 1, _LOG.output_tokens), 1),
        scheduled_ns=np.where(_LOG.scheduled_ns > _CUT, _CUT + 1, _LOG.scheduled_ns),
        first_ns=first,
        last_ns=np.where(unfinished, np.maximum(first, _CUT + 1) + longer, _LOG.last_ns),
    )
    assert fit(seen_before(changed, _CUT), settings_of(TIGHT)) == _FITTED


def test_one_event_before_the_cut_does_change_it() -> None:
    """The property above is not true of everything."""
    number = int(np.flatnonzero(_LOG.last_ns <= _CUT)[0])
    last = _LOG.last_ns.copy()
    last[number] -= 300_000_000
    assert fit(seen_before(replace(_LOG, last_ns=last), _CUT), settings_of(TIGHT)) != _FITTED


def test_a_log_without_admissions_is_enough() -> None:
    """A client sees first and last tokens only."""
    work = workload()
    log = log_of(work, replay(work, CONFIG, TRUTH), planned=False)
    cut_ns = int(log.last_ns.max() // 2)
    fitted = fit(seen_before(log, cut_ns), settings_of(CONFIG))
    assert fitted.equations["prefill"] == 0
    assert max(errors(work, log, replay(work, CONFIG, fitted.prices), cut_ns)) < 0.02


@pytest.mark.parametrize("seed", [0, 1])
def test_an_unknown_pool_is_found_where_somebody_waited_for_blocks(seed: int) -> None:
    _, log = run_of(TIGHT, seed=seed)
    fitted = fit(seen_before(log, int(log.last_ns.max() // 2)), without_pool(TIGHT))
    assert fitted.engine.num_blocks == pytest.approx(TIGHT.num_blocks, rel=0.05)
    assert "KV block count unknown" in fitted.notes[0]


def test_a_pool_that_nobody_waited_for_is_unlimited() -> None:
    _, log = run_of(CONFIG)
    seen = seen_before(log, int(log.last_ns.max() // 3))
    assert first_wait_for_blocks(seen, CONFIG) is None
    fitted = fit(seen, without_pool(CONFIG))
    assert fitted.engine.num_blocks >= CONFIG.max_num_seqs * CONFIG.max_blocks_per_seq
    assert "unlimited" in fitted.notes[0]


def test_who_waits_for_a_seat_does_not_wait_for_blocks() -> None:
    few = replace(CONFIG, max_num_seqs=6)
    _, log = run_of(few)
    seen = seen_before(log, int(log.last_ns.max()))
    assert first_wait_for_blocks(seen, few) is None
    assert first_wait_for_blocks(seen, CONFIG) is not None  # the same log, had there been more seats


def test_a_known_model_settles_what_a_full_pool_leaves_open() -> None:
    """Steps that always read as much KV do not tell its price from a step's; the model's bytes do."""
    random = np.random.default_rng(0)
    rows = np.zeros((50, len(PRICES)))
    rows[:, STEP] = random.integers(100, 300, 50)
    rows[:, KV_TOKEN] = rows[:, STEP] * 40_000
    seconds = rows[:, STEP] * 0.025 * (1 + 0.001 * random.standard_normal(50))
    prices = solve(rows, seconds, 8e-6)
    assert prices[KV_TOKEN] == pytest.approx(8e-6 * prices[STEP], rel=0.05)
    assert prices[STEP] + 40_000 * prices[KV_TOKEN] == pytest.approx(0.025, rel=0.01)


@given(arrays(np.float64, (12, 4), elements=st.floats(0, 10)), arrays(np.float64, 12, elements=st.floats(-10, 10)))
def test_nonnegative_least_squares_is_optimal(a: np.ndarray, b: np.ndarray) -> None:
    """By the conditions of Karush, Kuhn and Tucker."""
    x = nonnegative_least_squares(a, b)
    gradient = a.T @ (a @ x - b)
    tolerance = 1e-6 * max(1.0, float(np.abs(a).sum()) * float(np.abs(b).sum()))
    assert (x >= 0).all()
    assert (gradient >= -tolerance).all()
    assert np.abs(gradient * x).max() <= tolerance * max(1.0, float(x.max()))


def test_one_wild_equation_does_not_matter() -> None:
    random = np.random.default_rng(1)
    rows = np.abs(random.standard_normal((60, len(PRICES)))) * 100
    truth = np.array(TRUTH.seconds)
    seconds = rows @ truth * (1 + 1e-4 * random.standard_normal(60))
    seconds[7] *= 30
    assert solve(rows, seconds) == pytest.approx(truth, rel=0.05, abs=1e-4)


def test_too_early_a_cut_is_refused() -> None:
    _, log = run_of(CONFIG)
    with pytest.raises(ConfigError, match="no request had a token"):
        fit(seen_before(log, int(log.first_ns.min()) - 1), settings_of(CONFIG))


def test_a_request_that_never_fits_is_named() -> None:
    with pytest.raises(ConfigError, match="num_blocks"):
        replay(workload(5), replace(CONFIG, num_blocks=10), TRUTH)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("meta-llama/Llama-3.1-8B", "llama-8b"),
        ("meta-llama/Meta-Llama-3-70B-Instruct", "llama-70b"),
        ("Qwen/Qwen3-32B", "qwen3-32b"),
        ("Qwen/Qwen3-30B-A3B", None),  # a mixture of experts
        ("mistralai/Mistral-7B-v0.1", None),
        ("", None),
    ],
)
def test_shapes_by_the_hubs_names(name: str, shape: str | None) -> None:
    found = shape_by_name(name)
    assert (found.name if found else None) == shape
