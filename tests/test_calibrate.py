"""Costs that were planted in simulated runs are found again, and what a wrong one does to a prediction is known."""

import math
import tomllib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from planted import ENGINE, PLANTED, happened, wanted, workloads

from asyncsched.errors import ConfigError
from asyncsched.plan import StepShape
from asyncsched.runs import NO_STEPS, Run
from sim.calibrate import calibrate
from sim.fitting import corners_of, fit, hats, ratios
from sim.measured import MeasuredCosts
from sim.profile import HOT_TOKENS, LARGE_SEQS, QUANTILES, Profile, to_toml
from sim.scenario import override_values
from sim.validate import Validation, coverage, judge

TRUTH = Profile.from_dict(PLANTED)
SMALL = (16, 64, 128, 256, 512)
NOISE = {
    "decode": 0.02,
    "eager": 0.03,
    "padded": 0.01,
    "plan": 0.1,
    "fill": 0.1,
    "launch": 0.1,
    "eager_launch": 0.05,
    "commit": 0.1,
    "deliver": 0.1,
}


def noisy() -> Profile:
    """The planted costs with jitter: normal around 1, cut at 3 standard deviations."""
    z = np.array([-3.0, -2.326, -1.645, -1.282, -0.674, 0.0, 0.674, 1.282, 1.645, 2.326, 3.0])
    assert len(z) == len(QUANTILES)
    tables = {name: (1 + sigma * z).tolist() for name, sigma in NOISE.items()}
    return Profile.from_dict({**PLANTED, "jitter": tables})


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return [happened(run, TRUTH) for depth in (1, 2) for run in workloads(depth)]


@pytest.fixture(scope="module")
def found(runs: list[Run]) -> Profile:
    """Calibrated, written and read again: what is not in the file does not count."""
    return Profile.from_dict(tomllib.loads(to_toml(calibrate(runs))))


def held_out(depth: int) -> list[Run]:
    """Another batch size, other lengths and another rate than any that was fitted."""
    closed = wanted("held-closed", depth, [200] * 20, [50] * 20)
    arrivals = [8.0 * number for number in range(24)]
    return [closed, wanted("held-open", depth, [100, 300] * 12, [50, 20] * 12, arrivals)]


# ---- planted costs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plan", "fill", "launch", "eager_launch", "commit", "deliver"])
def test_host_prices_are_found(found: Profile, kind: str) -> None:
    mine, theirs = getattr(found.host, kind), getattr(TRUTH.host, kind)
    assert mine.us == pytest.approx(theirs.us, rel=1e-3)
    assert mine.us_per_seq == pytest.approx(theirs.us_per_seq, rel=1e-3, abs=1e-3)
    assert mine.us_per_prefill_token == pytest.approx(theirs.us_per_prefill_token, rel=1e-3, abs=1e-5)
    assert mine.busy_factor == pytest.approx(theirs.busy_factor, rel=1e-3)


@pytest.mark.parametrize(
    "name", ["launch_head_us", "eager_head_us", "eager_tail_us", "collect_us", "wake_us", "submit_us"]
)
def test_parts_of_the_host_path_are_found(found: Profile, name: str) -> None:
    assert getattr(found.host, name) == pytest.approx(getattr(TRUTH.host, name), rel=1e-3)


def test_copies_are_found(found: Profile) -> None:
    for name in ("h2d_us", "h2d_us_per_token", "d2h_us", "d2h_us_per_sample"):
        assert getattr(found.copies, name) == pytest.approx(getattr(TRUTH.copies, name), rel=0.01), name


def test_steps_on_the_compute_lane_are_found(found: Profile) -> None:
    mine, theirs = found.gpu, TRUTH.gpu
    for tokens in (500, 2000, 6000):
        assert np.interp(tokens, mine.kv_tokens, mine.kv_us) == pytest.approx(0.04 * tokens, rel=0.02)
    assert mine.contention == pytest.approx(1.02, abs=3e-4)
    assert mine.gap_us == pytest.approx(3.0, rel=1e-3)
    assert mine.idle_start_us == pytest.approx(40.0, rel=0.03)
    for size in (1, 4, 12, 20, 28, 32):
        expected = np.interp(size, theirs.decode_seqs, theirs.decode_us)
        assert np.interp(size, mine.decode_seqs, mine.decode_us) == pytest.approx(expected, rel=1e-3)
    assert mine.us_per_longest == pytest.approx(0.9, rel=0.02)
    assert mine.whole_seqs == 32
    for size in (600, 800, 1000):  # shorter ones wait for their launch: nobody can tell
        expected = np.interp(size, theirs.eager.tokens, theirs.eager.tokens_us)
        assert np.interp(size, mine.eager.tokens, mine.eager.tokens_us) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_held_out_runs_are_predicted(found: Profile, depth: int) -> None:
    for run in held_out(depth):
        validation = judge(happened(run, TRUTH), found).validation
        assert validation.timed is None
        for row in validation.rows:
            assert abs(row.error) < 0.1, (run.info.name, row)


def test_captured_steps_with_prefills_are_found() -> None:
    """They are padded to a number of tokens and launched like decode steps; larger ones kernel by kernel."""
    buckets = (64, 128, 256, 512)
    runs = [happened(run, TRUTH) for depth in (1, 2) for run in workloads(depth, mixed_buckets=buckets)]
    padded = np.concatenate([run.steps["mixed_bucket"] for run in runs])
    assert set(padded.tolist()) >= {0, 128, 256, 512}
    found = calibrate(runs)
    for size in (128, 256, 512):
        expected = np.interp(size, TRUTH.gpu.padded.tokens, TRUTH.gpu.padded.tokens_us)
        mine = found.gpu.padded
        assert np.interp(size, mine.tokens, mine.tokens_us) == pytest.approx(expected, rel=5e-3)
    assert found.host.launch.us == pytest.approx(300.0, rel=1e-3)
    arrivals = [8.0 * number for number in range(24)]
    run = wanted("open", 2, [100, 300] * 12, [50, 20] * 12, arrivals, mixed_buckets=buckets)
    for row in judge(happened(run, TRUTH), found).validation.rows:
        assert abs(row.error) < 0.5, row


def test_engines_with_other_seats_have_other_captured_steps() -> None:
    """Their longest decode is split among as many programs as there are seats; with 8, a quarter of it counts."""
    few: dict[str, Any] = {"max_num_seqs": 8, "decode_buckets": (1, 2, 4, 8)}
    asked = [run for depth in (1, 2) for other in ({}, few) for run in workloads(depth, mixed_buckets=SMALL, **other)]
    runs = [happened(run, TRUTH) for run in asked]
    found = calibrate(runs)
    assert found.gpu.whole_seqs == 32
    assert found.gpu.padded.us_per_longest == pytest.approx(1.5, rel=0.01)


def test_no_batch_needs_to_be_whole_for_the_splits_to_be_found() -> None:
    """From 48 sequences on, planted, where no run has more than 32: 24 and 16 are halved, 8 are quartered."""
    truth = Profile.from_dict({**PLANTED, "gpu": {**PLANTED["gpu"], "whole_seqs": 48}})  # type: ignore[dict-item]
    found = calibrate([happened(run, truth) for depth in (1, 2) for run in workloads(depth)]).gpu
    assert (found.whole_seqs, found.us_per_longest) == (48, pytest.approx(0.9, rel=0.02))


WRONG: dict[str, tuple[dict[str, object], Callable[[Validation], bool]]] = {
    # decode steps are 5% dearer: an asynchronous closed batch of decodes takes 5% longer per token
    "gpu": ({"gpu.scale": 1.05}, lambda v: abs(v.row("tpot_ms.p50").error - 5.0) < 0.5),
    # a slower host is hidden behind the device
    "hidden": ({"host.scale": 1.2}, lambda v: abs(v.row("itl_ms.p50").error) < 0.05),
    # 10 ms per arriving request go into the time to first token of a closed batch
    "submit": ({"host.submit_us": 10_012.0}, lambda v: v.row("ttft_ms.p50").error > 100),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_price_gives_the_error_it_must(found: Profile, name: str) -> None:
    change, expected = WRONG[name]
    wrong = Profile.from_dict(override_values(found.to_dict(), change))
    run = happened(wanted("closed", 2, [100] * 32, [60] * 32), TRUTH)
    assert expected(judge(run, wrong).validation)
    assert not expected(judge(run, found).validation) or name == "hidden"


def test_synchronous_steps_feel_a_slower_host(found: Profile) -> None:
    """All of the host's work is exposed: the prediction is longer by as much as the host needs more."""
    run = happened(wanted("closed", 1, [100] * 32, [60] * 32), TRUTH)
    slow = Profile.from_dict(override_values(found.to_dict(), {"host.scale": 2.0}))
    host = TRUTH.host
    per_step = sum(getattr(host, kind).us + 32 * getattr(host, kind).us_per_seq for kind in ("plan", "fill"))
    per_step += host.commit.us + 32 * host.commit.us_per_seq  # a delivery is behind the next launch
    per_step += host.launch_head_us + host.collect_us + host.wake_us
    validation = judge(run, slow).validation
    active = validation.row("gpu_active")
    assert active.error == pytest.approx(100 * (active.predicted - active.measured))
    assert (active.error < -3, active.unit) == (True, "points")
    row = validation.row("itl_ms.p50")
    assert 1e3 * (row.predicted - row.measured) == pytest.approx(per_step, rel=0.02)


def test_how_long_a_large_prefill_slows_what_is_behind_it_is_found(found: Profile) -> None:
    """Decodes, captured steps with prefills, and for how long; nothing where nothing is."""
    hot = {"hot_decode": 0.06, "hot_padded": 0.12, "hot_ms": 80.0}
    truth = Profile.from_dict({**PLANTED, "gpu": {**PLANTED["gpu"], **hot}})  # type: ignore[dict-item]
    sizes: dict[str, Any] = {
        "max_num_batched_tokens": 2048,
        "max_model_len": 2048,
        "mixed_buckets": (64, 128, 256, 512),
    }
    prompts, arrivals = [HOT_TOKENS, 200, 50, 400, 90, 30] * 8, [20.0 * number for number in range(48)]
    runs = [
        happened(run, truth)
        for depth in (1, 2)
        for run in (
            *workloads(depth, **sizes),
            wanted(f"closed-large-{depth}", depth, [150] * 12, [60] * 12, **sizes),
            wanted(f"open-large-{depth}", depth, prompts, [20] * 48, arrivals, **sizes),
        )
    ]
    mine = calibrate(runs).gpu
    assert (mine.hot_decode, mine.hot_padded, mine.hot_ms) == pytest.approx((0.06, 0.12, 80.0), rel=0.03)
    assert found.gpu.hot_decode == pytest.approx(0, abs=2e-4)
    assert found.gpu.hot_padded == 0  # it has none of these


# ---- jitter ----------------------------------------------------------------------------------------------------------


def test_intervals_hold_nine_tenths_of_what_varies_as_it_did() -> None:
    truth = noisy()
    learnt = [happened(run, truth, seed=seed) for seed in (1, 2, 3) for depth in (1, 2) for run in workloads(depth)]
    fitted = calibrate(learnt)
    counts: dict[str, list[float]] = {}
    for depth in (1, 2):
        for number, run in enumerate(workloads(depth, "-again")):
            for one in coverage(happened(run, truth, seed=100 + 10 * depth + number), fitted):
                counts.setdefault(one.kind, []).append(one.share * one.count)
                counts.setdefault(one.kind + " of", []).append(one.count)
    assert 0.85 <= sum(counts["decode"]) / sum(counts["decode of"]) <= 0.95
    assert 0.80 <= sum(counts["mixed"]) / sum(counts["mixed of"]) <= 0.98
    narrow = fitted.model_copy(update={"jitter": type(fitted.jitter)()})
    shares = [one.share for one in coverage(happened(workloads(1)[3], truth, seed=5), narrow) if one.kind == "decode"]
    assert shares[0] < 0.2  # without tables nothing is covered


def test_a_step_is_asked_for_its_price_as_it_was_run() -> None:
    """Behind a large prefill or not, on an engine with few seats: at the true prices, which vary by nothing, every step
    is in its interval, and at others none that they are about."""
    sizes: dict[str, Any] = {"max_num_seqs": 8, "decode_buckets": (1, 2, 4, 8), "mixed_buckets": SMALL}
    sizes |= {"max_num_batched_tokens": 2048, "max_model_len": 2048}
    run = wanted("open", 2, [HOT_TOKENS, 200, 50, 90] * 6, [20] * 24, [12.0 * number for number in range(24)], **sizes)
    hot = {"hot_decode": 0.06, "hot_padded": 0.12, "hot_ms": 80.0}
    truth = Profile.from_dict({**PLANTED, "gpu": {**PLANTED["gpu"], **hot}})  # type: ignore[dict-item]
    run = happened(run, truth)
    assert {one.kind: one.share for one in coverage(run, truth)} == {"decode": 1.0, "mixed": 1.0, "prefill": 1.0}
    for change, kind in (({"gpu.hot_ms": 0.0}, "decode"), ({"gpu.whole_seqs": 8}, "mixed")):
        wrong = Profile.from_dict(override_values(truth.to_dict(), change))
        assert {one.kind: one.share for one in coverage(run, wrong)}[kind] < 0.6


def test_large_decode_steps_vary_by_a_table_of_their_own() -> None:
    """Planted three times as wide as that of small ones, whose table would hold too few of them."""
    truth = noisy()
    wide = tuple(1 + 3 * (ratio - 1) for ratio in truth.jitter.decode)
    truth = truth.model_copy(update={"jitter": truth.jitter.model_copy(update={"decode_large": wide})})
    settings: dict[str, Any] = {"max_num_seqs": 96, "decode_buckets": (8, 32, LARGE_SEQS, 96)}
    asked = [(size, prompt) for size in (8, 32, LARGE_SEQS, 96) for prompt in (60, 200)]  # two workloads of each
    closed = [wanted(f"closed-{size}-{prompt}", 2, [prompt] * size, [50] * size, **settings) for size, prompt in asked]
    fitted = calibrate([happened(run, truth, seed=seed) for seed in (1, 2) for run in closed])
    for name, ratio in (("decode", 1), ("decode_large", 3)):
        table = np.array(getattr(fitted.jitter, name))
        assert table[-3] - table[2] == pytest.approx(2 * 1.645 * ratio * NOISE["decode"], rel=0.25)
    one_table = fitted.model_copy(update={"jitter": fitted.jitter.model_copy(update={"decode_large": ()})})
    large = happened(wanted("again", 2, [60] * 72, [90] * 72, **settings), truth, seed=7)
    held, missed = (
        next(one.share for one in coverage(large, profile) if one.kind == "decode") for profile in (fitted, one_table)
    )
    assert held > 0.8
    assert missed < 0.6
    few = calibrate([happened(run, truth, seed=1) for run in closed[:4]])
    assert few.jitter.decode_large == ()


def test_slow_times_of_large_batches_are_not_paid_for_by_small_ones() -> None:
    """A twelfth of large steps takes a quarter longer, and a robust fit does not follow: the sum over large steps is
    right all the same, and that over small ones."""
    table = np.array([0.96] * 7 + [1.0, 1.25, 1.3, 1.3])
    slow = tuple((table / np.trapezoid(table, QUANTILES)).tolist())
    truth = TRUTH.model_copy(
        update={"jitter": TRUTH.jitter.model_copy(update={"decode_large": slow, "decode": (1.0,) * 11})}
    )
    settings: dict[str, Any] = {"max_num_seqs": 96, "decode_buckets": (8, 32, LARGE_SEQS, 96)}
    asked = [(size, prompt) for size in (8, 32, LARGE_SEQS, 96) for prompt in (60, 200)]
    closed = [wanted(f"closed-{size}-{prompt}", 2, [prompt] * size, [90] * size, **settings) for size, prompt in asked]
    runs = [happened(run, truth, seed=10 * seed + number) for seed in (1, 2) for number, run in enumerate(closed)]
    fitted = calibrate(runs)
    for size in (8, 32, LARGE_SEQS, 96):
        shape = StepShape(size, size, 0, size, size, 150 * size, 150 * size, size)
        found, expected = (
            MeasuredCosts(one, depth=2, seats=96, seed=None).forward_ns(shape, 150, 0, False, 0.0)
            for one in (fitted, truth)
        )
        assert found == pytest.approx(expected, rel=0.015 if size >= LARGE_SEQS else 0.006), size


def test_jitter_keeps_its_mean_and_its_spread() -> None:
    truth = noisy()
    fitted = calibrate([happened(run, truth, seed=depth) for depth in (1, 2) for run in workloads(depth)])
    for name in ("plan", "launch", "decode"):
        table = np.array(getattr(fitted.jitter, name))
        assert np.trapezoid(table, QUANTILES) == pytest.approx(1.0, abs=1e-9)
        assert table[-3] - table[2] == pytest.approx(2 * 1.645 * NOISE[name], rel=0.25)


def test_steps_with_prefills_vary_as_they_are_launched_and_by_whether_they_have_decodes() -> None:
    """Captured ones were planted a third as wide as others, and those of them without decodes a third of that."""
    truth, sizes = noisy(), {"mixed_buckets": (64, 128, 256)}
    alone = tuple(1 + (ratio - 1) / 3 for ratio in truth.jitter.padded)
    truth = truth.model_copy(update={"jitter": truth.jitter.model_copy(update={"padded_prefill": alone})})
    prompts, arrivals = [40, 200, 600] * 40, [15.0 * number for number in range(120)]
    asked = [wanted(f"open-{depth}", depth, prompts, [12] * 120, arrivals, **sizes) for depth in (1, 2)]
    asked += [wanted(f"idle-{depth}", depth, prompts, [2] * 120, arrivals, **sizes) for depth in (1, 2)]
    runs = [happened(run, truth, seed=seed) for seed in (1, 2) for run in asked]
    fitted = calibrate(runs)
    for name, sigma in (
        ("eager", NOISE["eager"]),
        ("padded", NOISE["padded"]),
        ("padded_prefill", NOISE["padded"] / 3),
    ):
        table = np.array(getattr(fitted.jitter, name))
        assert table[-3] - table[2] == pytest.approx(2 * 1.645 * sigma, rel=0.25), name
    shares: dict[str, list[tuple[int, float]]] = {}
    for run in asked:
        for one in coverage(happened(run, truth, seed=7), fitted):
            shares.setdefault(one.kind, []).append((one.count, one.share))
    for kind in ("mixed", "prefill"):
        count, share = np.array(shares[kind]).T
        assert np.average(share, weights=count) == pytest.approx(0.9, abs=0.05), kind


def test_what_a_run_has_in_common_is_counted_once() -> None:
    """Runs vary by 3%, steps within them by 2%: the intervals hold nine tenths, and not more."""
    truth = noisy()
    runs = tuple(1 + 1.5 * (ratio - 1) for ratio in truth.jitter.decode)
    truth = truth.model_copy(update={"jitter": truth.jitter.model_copy(update={"run": runs})})
    asked = [wanted(f"closed-{size}", 2, [60 + size] * size, [60] * size) for size in (1, 8, 16)] * 15
    fitted = calibrate([happened(run, truth, seed=seed) for seed, run in enumerate(asked)])
    table = np.array(fitted.jitter.run)
    assert table[-3] - table[2] == pytest.approx(2 * 1.645 * 0.03, rel=0.3)
    again = [happened(run, truth, seed=1000 + seed) for seed, run in enumerate(asked)]
    shares = [one.share for run in again for one in coverage(run, fitted) if one.kind == "decode"]
    assert np.mean(shares) == pytest.approx(0.9, abs=0.03)


def test_runs_of_large_batches_vary_by_a_table_of_their_own() -> None:
    """Runs vary by 0.5%, those of large batches by 4%, steps within them by 0.5%: one table for both would be too wide
    for the small ones, and too narrow for the large."""
    truth = noisy()

    def spread(sigma: float) -> tuple[float, ...]:
        return tuple(1 + sigma / NOISE["decode"] * (ratio - 1) for ratio in truth.jitter.decode)

    steps = {name: spread(0.005) for name in ("decode", "decode_large")}
    planted = truth.jitter.model_copy(update={**steps, "run": spread(0.005), "run_large": spread(0.04)})
    truth = truth.model_copy(update={"jitter": planted})
    settings: dict[str, Any] = {"max_num_seqs": 96, "decode_buckets": (8, 32, LARGE_SEQS, 96)}
    sizes = (8, 32, LARGE_SEQS, 96)
    asked = [wanted(f"closed-{size}", 2, [60 + size] * size, [25] * size, **settings) for size in sizes] * 20
    fitted = calibrate([happened(run, truth, seed=seed) for seed, run in enumerate(asked)])
    for name, sigma in (("run", 0.005), ("run_large", 0.04)):
        table = np.array(getattr(fitted.jitter, name))
        assert table[-3] - table[2] == pytest.approx(2 * 1.645 * sigma, rel=0.4), name
    one_table = fitted.model_copy(update={"jitter": fitted.jitter.model_copy(update={"run_large": ()})})
    shares: dict[tuple[bool, bool], list[float]] = {}
    for seed, run in enumerate(asked):
        again = happened(run, truth, seed=1000 + seed)
        is_large = len(again.requests) >= LARGE_SEQS
        for profile in (fitted, one_table):
            (share,) = (one.share for one in coverage(again, profile) if one.kind == "decode")
            shares.setdefault((is_large, profile is fitted), []).append(share)
    assert np.mean(shares[False, True]) == pytest.approx(0.9, abs=0.06)
    assert np.mean(shares[True, True]) == pytest.approx(0.9, abs=0.06)
    assert np.mean(shares[True, False]) < 0.6
    for size, least, most in ((32, 0.0, 0.01), (96, 0.02, 0.06)):  # predictions draw from these tables, too
        shape = StepShape(size, size, 0, size, size, 90 * size, 90 * size, size)
        costs = [MeasuredCosts(fitted, depth=2, seats=96, seed=seed) for seed in range(20)]
        of_runs = [np.mean([one.forward_ns(shape, 90, step, False, 0.0) for step in range(100)]) for one in costs]
        assert least < np.std(of_runs) / np.mean(of_runs) < most


def test_the_same_seed_predicts_the_same() -> None:
    run = wanted("closed", 2, [50] * 8, [20] * 8)
    one, again, other = (happened(run, noisy(), seed=seed) for seed in (1, 1, 2))
    assert one.requests.last_ns.tolist() == again.requests.last_ns.tolist()
    assert one.requests.last_ns.tolist() != other.requests.last_ns.tolist()


# ---- fits ------------------------------------------------------------------------------------------------------------


def test_a_fit_is_not_below_zero_and_ignores_what_is_far_off() -> None:
    random = np.random.default_rng(0)
    x = random.uniform(1, 100, 400)
    y = 50 + 2 * x
    y[::40] *= 30
    found = fit([np.ones(400), x, -x], y)
    assert (found.coefficients >= 0).all()
    assert found.coefficients[1] / found.coefficients[0] == pytest.approx(2 / 50, rel=1e-3)
    assert found.predicted.sum() == pytest.approx(y.sum())  # far off, but it happened


def test_nothing_to_fit() -> None:
    with pytest.raises(ValueError, match="nothing"):
        fit([np.zeros(0)], np.zeros(0))


def test_hats_are_a_line_through_corners() -> None:
    sizes = np.array([1, 5, 10, 20, 99])
    line = np.stack(hats(sizes, (5, 10, 20)), axis=1) @ np.array([1.0, 2.0, 10.0])
    assert line.tolist() == [1.0, 1.0, 2.0, 10.0, 10.0]
    assert corners_of(np.array([3] * 5 + [30] * 5 + [300] * 5), (16, 64, 256), 3) == [3, 64, 300]
    assert corners_of(np.array([7, 7]), (16,), 1) == [7]


def test_ratios_of_one_sample_are_no_table() -> None:
    assert ratios(np.ones(1), np.ones(1)) == ()
    assert ratios(np.array([1.0, 3.0]), np.array([1.0, 1.0]))[0] == pytest.approx(0.5)


# ---- what cannot be learnt from --------------------------------------------------------------------------------------


def test_runs_that_cannot_be_learnt_from(runs: list[Run]) -> None:
    with pytest.raises(ConfigError, match="at least one run"):
        calibrate([])
    with pytest.raises(ConfigError, match="nobody saw its steps"):
        calibrate([Run(info=runs[0].info, requests=runs[0].requests, steps=NO_STEPS)])
    other = runs[1].info
    changed = Run(
        info=type(other)(**{**_fields(other), "device": {"name": "H100"}}),
        requests=runs[1].requests,
        steps=runs[1].steps,
    )
    with pytest.raises(ConfigError, match="one device, and closed-1-sync had 'planted'"):
        calibrate([runs[0], changed])


def _fields(info: Any) -> dict[str, Any]:
    return {name: getattr(info, name) for name in info.__slots__}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 1}, "schema.* 1.*fit the profile again from its runs"),
        ({"schema": 1, "an_old_key": 5}, "fit the profile again from its runs"),
        ({"schema": 3}, "schema"),
        ({"schema": "2"}, "schema"),
        ({"schema": None}, "schema"),
        ({"schema": math.nan}, "schema"),
        ({"more": 1}, "unknown key"),
        ({"gpu": {"decode_seqs": [1, 1], "decode_us": [1.0, 2.0]}}, "gpu.decode_seqs"),
        ({"gpu": {"decode_seqs": [1], "decode_us": [1.0, 2.0]}}, "gpu.decode_us"),
        ({"gpu": {"idle_start_us": -1.0}}, "gpu.idle_start_us"),
        ({"gpu": {"idle_start_us": math.nan}}, "gpu.idle_start_us"),
        ({"gpu": {"contention": 0.5}}, "gpu.contention"),
        ({"host": {"plan": {"us": "5"}}}, "host.plan.us"),
        ({"host": {"plan": 5.0}}, "host.plan"),
        ({"host": {"paln": {}}}, "did you mean plan"),
        ({"jitter": {"decode": [1.0, 2.0]}}, "jitter.decode"),
        ({"jitter": {"decode": [1.0] * 10 + [0.5]}}, "jitter.decode"),
    ],
)
def test_profiles_that_cannot_be(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Profile.from_dict({**PLANTED, **change})
    assert "\n" not in str(caught.value)


def test_a_profile_says_where_it_comes_from(runs: list[Run], found: Profile) -> None:
    assert found.runs == tuple(run.info.name for run in runs)
    assert found.device["name"] == "planted"
    assert found.engine["num_blocks"] == ENGINE["num_blocks"]
    assert found.fit["gpu.decode"].count == sum((run.steps.kind == "decode").sum() for run in runs)
    assert found.fit["gpu.decode"].seen["num_seqs"] == (1.0, 32.0)


def test_the_speeds_of_a_host_are_found() -> None:
    """Which ones it has, and how long it keeps one."""
    table = [0.6] * 6 + [1.4] * 5
    host = {**PLANTED["host"], "hold_ms": 300.0}  # type: ignore[dict-item]
    truth = Profile.from_dict({**PLANTED, "host": host, "jitter": {"host": table}})
    shapes = [wanted(f"long-{seed}", 2 - seed % 2, [60] * 8, [400] * 8) for seed in range(12)]
    found = calibrate([happened(run, truth, seed) for seed, run in enumerate(shapes)])
    speeds = np.array(found.jitter.host)
    assert speeds[-2] / speeds[1] == pytest.approx(1.4 / 0.6, rel=0.1)
    assert found.host.hold_ms == pytest.approx(300, rel=0.1)
    average = float(np.trapezoid(table, QUANTILES))
    plan = found.host.plan.us + 8 * found.host.plan.us_per_seq
    assert plan == pytest.approx((60 + 8 * 1.5) * average, rel=0.15)
    steady = calibrate([happened(run, TRUTH, seed) for seed, run in enumerate(shapes)])
    assert steady.jitter.host == ()
    assert steady.host.hold_ms == 0
