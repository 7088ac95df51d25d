"""Sweeps: rows in grid order whatever the workers, and failures that stay in their row."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from asyncsched.errors import AsyncschedError, ConfigError
from sim.design import Point, Range, grid, parse_vary, random_points
from sim.scenario import Scenario, override_values, read_preset
from sim.sweep import run_sweep

BASE = read_preset("hf-8b-bs32")
COLUMNS = ("depth", "ttft_ms.p50")
VARY = {"depth": [1, 2, 3], "host.scale": [0.5, 1.0]}


def price(scenario: Scenario) -> Mapping[str, object]:
    """Stands in for a simulation: its figures name the scenario they come from."""
    return {"depth": scenario.depth, "ttft_ms": {"p50": scenario.depth * scenario.host.scale}, "other": "unused"}


def price_or_fail(scenario: Scenario) -> Mapping[str, object]:
    if scenario.depth == 2:
        raise AsyncschedError("no such luck")
    if scenario.depth == 3:
        raise ZeroDivisionError("of a user's policy")
    return price(scenario)


def test_grid_order_is_the_order_of_the_keys():
    assert grid({"a": [1, 2], "b": ["x", "y"]}) == [
        {"a": 1, "b": "x"},
        {"a": 1, "b": "y"},
        {"a": 2, "b": "x"},
        {"a": 2, "b": "y"},
    ]


def test_rows_do_not_depend_on_the_number_of_workers():
    seen: list[tuple[int, int]] = []
    alone = run_sweep(
        BASE, grid(VARY), simulate=price, columns=COLUMNS, progress=lambda done, total: seen.append((done, total))
    )
    assert seen == [(n, 6) for n in range(7)]
    assert [(row["depth"], row["host.scale"], row["ttft_ms.p50"]) for row in alone] == [
        (1, 0.5, 0.5),
        (1, 1.0, 1.0),
        (2, 0.5, 1.0),
        (2, 1.0, 2.0),
        (3, 0.5, 1.5),
        (3, 1.0, 3.0),
    ]
    assert {tuple(row) for row in alone} == {("depth", "host.scale", "ttft_ms.p50", "error")}
    assert run_sweep(BASE, grid(VARY), simulate=price, columns=COLUMNS, jobs=2) == alone


def test_a_failing_point_keeps_the_others():
    rows = run_sweep(BASE, grid({"depth": [1, 2, 3]}), simulate=price_or_fail, columns=COLUMNS, jobs=2)
    assert [row["error"] for row in rows] == ["", "no such luck", "ZeroDivisionError: of a user's policy"]
    assert [row["ttft_ms.p50"] for row in rows] == [1.0, None, None]
    assert {tuple(row) for row in rows} == {("depth", "ttft_ms.p50", "error")}


def never(scenario: Scenario) -> Mapping[str, object]:
    raise AssertionError("nothing may run")


@pytest.mark.parametrize(
    ("points", "error"),
    [
        (grid({"depth": [1, 0, 2]}), "depth: 0 is not allowed; it must be greater than or equal to 1"),
        (grid({"max_num_seqs": [0, 4], "depth": [1, 2]}), "engine.max_num_seqs: 0 is not allowed; use a whole number"),
        (grid({"depth": [1, 2], "host.scale": [1.0, float("nan")]}), "host.scale: nan is not allowed"),
        (grid({"admission": ["fcfs", "fcsf"]}), "engine.admission: 'fcsf' is not allowed"),
        (grid({"mode": ["static", "async"], "depth": [2, 3]}), "depth: 2 is not allowed; mode 'static' has depth 1"),
        (random_points({"max_num_seqs": Range(-8, 8, False)}, {}, 40, 0), "engine.max_num_seqs: -"),
        (random_points({"host.scale": Range(-1.0, 1.0, False)}, {"depth": [1, 2]}, 40, 0), "host.scale: -0"),
    ],
)
def test_a_value_that_no_point_can_have_is_refused_before_any_runs(points: list[Point], error: str):
    with pytest.raises(ConfigError) as caught:
        run_sweep(BASE, points, simulate=never)
    assert str(caught.value).startswith(error)


def test_a_trace_that_is_none_is_refused_before_any_runs(tmp_path: Path):
    (tmp_path / "empty.csv").write_text("")
    base = override_values(read_preset("h200-llama-8b"), {"workload.limit": 2})
    for name in ("empty.csv", "missing.csv"):
        points = grid({"workload.trace": ["azure-conv-500", str(tmp_path / name)]})
        with pytest.raises(ConfigError, match=f"workload.trace: .*{name}"):
            run_sweep(base, points, simulate=never)
    assert [row["error"] for row in run_sweep(base, points[:1], simulate=price, columns=COLUMNS)] == [""]


@pytest.mark.parametrize(
    "points",
    [
        grid({"mode": ["static", "async"], "depth": [1, 2]}),
        random_points({"host.scale": Range(0.5, 2.0, False)}, {"mode": ["static", "async"], "depth": [1, 2]}, 12, 1),
    ],
)
def test_values_that_do_not_go_together_keep_their_row(points: list[Point]):
    """Each of them is good for another point."""
    rows = run_sweep(BASE, points, simulate=price, columns=COLUMNS)
    bad = [(row["mode"], row["depth"]) for row in rows if row["error"]]
    assert set(bad) == {("static", 2), ("async", 1)}
    assert len(bad) < len(rows)


def test_a_fault_that_all_points_share_is_an_error():
    with pytest.raises(ConfigError, match=r"^host.plan_ms: 1 is not allowed; unknown key"):
        run_sweep(BASE, grid({"host.plan_ms": [1, 2]}), simulate=price)


def test_real_simulations_are_repeated_exactly_in_any_number_of_workers():
    base = override_values(BASE, {"workload.output.tokens": 4, "workload.num_requests": 2})
    vary = {"mode": ["sync", "async"], "jitter.kind": ["none", "lognormal"], "jitter.host_sigma": [0.3]}
    rows = run_sweep(base, grid(vary))
    assert [row["error"] for row in rows] == [""] * 4
    assert len({row["makespan_s"] for row in rows}) == 4
    assert run_sweep(base, grid(vary), jobs=2) == rows


def test_jobs_zero_is_refused():
    with pytest.raises(ConfigError, match=r"^jobs: 0 is not allowed"):
        run_sweep(BASE, grid(VARY), simulate=price, jobs=0)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("host.scale=0.5,1,2", ("host.scale", [0.5, 1, 2])),
        ("mode=sync,async, depth=3", ("mode", ["sync", "async", "depth=3"])),
        ("engine.decode_buckets=[1,2],[4]", ("engine.decode_buckets", [[1, 2], [4]])),
        ("x=1,two", ("x", [1, "two"])),
        ("x=1,true,'1'", ("x", [1, True, "1"])),
    ],
)
def test_vary_options(text, parsed):
    assert parse_vary(text) == parsed


@pytest.mark.parametrize("text", ["host.scale", "host.scale=", "=1,2"])
def test_vary_options_without_key_or_values_are_refused(text):
    with pytest.raises(ConfigError, match=r"^--vary: .* is not allowed; use key=value,value"):
        parse_vary(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("host.scale=1,1", "1"),
        ("host.scale=2,1,1.0", "1.0"),
        ("host.scale=1.0,2,1e0", "1.0"),
        ("mode=sync,async, sync", "'sync'"),
        ("decode_buckets=[1,2],[4],[1,2.0]", "[1, 2.0]"),
        ("enable_prefix_caching=true,true", "True"),
    ],
)
def test_a_value_that_is_varied_twice_is_refused(text, value):
    """Its points would be run and shown twice."""
    with pytest.raises(ConfigError) as caught:
        parse_vary(text)
    key = text.partition("=")[0]
    said = f"--vary: {text!r} is not allowed; {value} is there twice; give each value of {key} once"
    assert str(caught.value) == said
