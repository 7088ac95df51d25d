"""Tables of what varies are as wide as what they will be held against: workloads that the fit has not seen."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import ArrayLike

from sim.compute_fit import HOT_MS, ComputeFit, ComputeSteps, fit_compute
from sim.compute_jitter import FEW_IN_TAILS, compute_jitter
from sim.fitting import table_of
from sim.profile import QUANTILES, GpuProfile

BUCKETS = (64, 128, 192, 256)
LOW, HIGH = QUANTILES.index(0.05), QUANTILES.index(0.95)


def captured(sizes: Sequence[int], workload: Sequence[int], factor: ArrayLike) -> ComputeSteps:
    """Captured prefills that take 1 ms and 10 us per token, times a factor each."""
    count = len(sizes)
    zeros, false = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=bool)
    size, number = np.array(sizes), np.array(workload)
    return ComputeSteps(
        duration=(1000.0 + 10.0 * size) * np.array(factor),
        decode=false,
        size=size,
        padded=~false,
        kv_tokens=size,
        context=zeros,
        longest=zeros,
        rows=zeros,
        heat=np.zeros((count, len(HOT_MS))),
        attn_pairs=zeros,
        overlap=~false,
        idle=false,
        free=~false,
        beside=false,
        run=number,
        workload=number,
        inline=False,
    )


def width(steps: ComputeSteps, found: ComputeFit) -> float:
    """Of the middle nine tenths of captured steps with prefills."""
    table = compute_jitter(steps, found, GpuProfile(**found.values))["padded"]
    return table[HIGH] - table[LOW]


def test_what_workloads_have_in_common_is_in_the_table_of_captured_prefills_as_others_will_see_it() -> None:
    """Each of three workloads takes 3% more or less, by bucket. It has a third of its own prediction: errors within the
    fit are too close by a fifth, those of fits without it too far by as much."""
    random = np.random.default_rng(3)
    found = []
    for _ in range(30):
        of_workloads = 1 + 0.03 * random.standard_normal((3, len(BUCKETS)))
        asked = [(size, one, of_workloads[one, place]) for one in range(3) for place, size in enumerate(BUCKETS)] * 10
        steps = captured(*zip(*asked, strict=True))
        fitted = fit_compute(steps)
        found.append([width(steps, fitted), *_widths(steps, fitted)])
    mine, knowing, unseen = np.mean(found, axis=0) / (2 * 1.645 * 0.03)
    assert mine == pytest.approx(1.0, abs=0.08)
    assert knowing < 0.87
    assert unseen > 1.15


def _widths(steps: ComputeSteps, found: ComputeFit) -> list[float]:
    """Of measured over predicted, by fits that know the workload and by fits that do not."""
    both = (np.quantile(steps.duration / one, (0.05, 0.95)) for one in (found.predicted, found.unseen))
    return [float(high - low) for low, high in both]


def test_a_captured_size_that_one_workload_alone_has_says_nothing_of_others() -> None:
    """It takes a quarter less than the line through its neighbours, and without that workload nobody knew: but who
    has it in the profile does."""
    random = np.random.default_rng(4)
    asked = [(size, one, 1.0) for size in BUCKETS for one in range(4)] * 20 + [(160, 0, 0.75)] * 60
    sizes, workloads, factors = zip(*asked, strict=True)
    steps = captured(sizes, workloads, factors * (1 + 0.01 * random.standard_normal(len(asked))))
    found = fit_compute(steps)
    assert np.isnan(found.unseen).tolist() == (steps.size == 160).tolist()
    assert width(steps, found) == pytest.approx(2 * 1.645 * 0.01, rel=0.15)


def test_a_table_of_few_steps_holds_nine_tenths_of_others() -> None:
    """Quantiles of 40 samples are too close to the middle, taken as they come: they hold 0.9 * 39 / 41 of others."""
    random = np.random.default_rng(6)
    held = {}
    for method in ("linear", "weibull"):
        tables = np.array([table_of(1 + 0.01 * random.standard_normal(FEW_IN_TAILS), method) for _ in range(4000)])
        others = 1 + 0.01 * random.standard_normal((4000, 50))
        held[method] = np.mean((tables[:, [LOW]] <= others) & (others <= tables[:, [HIGH]]))
    assert held["weibull"] == pytest.approx(0.9, abs=0.01)
    assert held["linear"] == pytest.approx(0.9 * 39 / 41, abs=0.01)


@pytest.mark.parametrize("few", ["prefill", "mixed"])
def test_few_steps_of_one_kind_have_no_table_of_their_own(few: str) -> None:
    """39 of one and 200 of the other are in one table; 40 have theirs."""
    random = np.random.default_rng(7)

    def tables(count: int) -> set[str]:
        of_few = np.repeat([True, False], [count, 200])
        noise = 1 + 0.01 * random.standard_normal(len(of_few))
        steps = captured([64, 128] * (len(of_few) // 2) + [64] * (len(of_few) % 2), [0] * len(of_few), noise)
        steps = replace(steps, beside=of_few == (few == "mixed"))
        found = fit_compute(steps)
        return {name for name, table in compute_jitter(steps, found, GpuProfile(**found.values)).items() if table}

    assert "padded_prefill" not in tables(FEW_IN_TAILS - 1)
    assert {"padded", "padded_prefill"} <= tables(FEW_IN_TAILS)


@pytest.mark.parametrize("count", [FEW_IN_TAILS - 1, 2 * FEW_IN_TAILS])
def test_captured_steps_behind_large_prefills_have_a_table_where_there_are_enough(count: int) -> None:
    """They were planted five times as wide as the others, which stay as they are."""
    random = np.random.default_rng(8)
    hot = np.repeat([True, False], [count, 400])
    noise = 1 + np.where(hot, 0.05, 0.01) * random.standard_normal(len(hot))
    steps = captured(random.choice([64, 128], len(hot)).tolist(), [0] * len(hot), noise)
    steps = replace(steps, heat=np.where(hot[:, None], 0.5, 0.0) * np.ones((1, len(HOT_MS))))
    found = fit_compute(steps)
    values = {**found.values, "hot_ms": HOT_MS[2], "hot_padded": 0.0}  # that is what a share of them would be
    tables = {name: table for name, table in compute_jitter(steps, found, GpuProfile(**values)).items() if table}
    if count < FEW_IN_TAILS:
        assert set(tables) == {"padded"}
        return
    for name, sigma in (("padded_hot", 0.05), ("padded", 0.01)):
        assert tables[name][HIGH] - tables[name][LOW] == pytest.approx(2 * 1.645 * sigma, rel=0.3), name


def test_decodes_behind_large_prefills_have_a_table_and_large_ones_none() -> None:
    random = np.random.default_rng(9)
    hot = np.arange(1200) % 3 == 0
    large = np.arange(1200) >= 600
    noise = 1 + np.where(large, 0.15, np.where(hot, 0.05, 0.01)) * random.standard_normal(1200)
    size = np.where(large, 96, 8)
    steps = captured(size.tolist(), [0] * 1200, noise)
    steps = replace(
        steps,
        decode=np.ones(1200, dtype=bool),
        rows=size,
        kv_tokens=10 * size,
        heat=np.where(hot[:, None], 0.5, 0.0) * np.ones((1, len(HOT_MS))),
    )
    found = fit_compute(steps)
    values = {**found.values, "hot_ms": HOT_MS[2], "hot_decode": 0.0}
    tables = compute_jitter(steps, found, GpuProfile(**values))
    widths = {name: table[HIGH] - table[LOW] for name, table in tables.items() if table}
    assert set(widths) == {"decode", "decode_hot", "decode_large"}
    for name, sigma in (("decode", 0.01), ("decode_hot", 0.05), ("decode_large", 0.15)):
        assert widths[name] == pytest.approx(2 * 1.645 * sigma, rel=0.3), name
