"""What comes along with the package: runs of an H200, and the profile that was fitted to some of them. Needs no GPU."""

import json
from pathlib import Path

import numpy as np
import pytest

import sim
from asyncsched.cli.app import run as command
from asyncsched.cli.runs import load_profile, load_profile_data, load_run, load_runs
from sim.calibrate import calibrate
from sim.predict import replay
from sim.profile import Profile
from sim.scenario import read_preset, with_profile
from sim.validate import Validation, host_speed, judge

NAME = "h200-llama-8b"
LIMITS = {"makespan_s": 2.0, "output_throughput": 2.0, "tpot_ms.mean": 3.0, "ttft_ms.p50": 8.0, "gpu_active": 1.0}


@pytest.fixture(scope="module")
def profile() -> Profile:
    return load_profile(NAME)


def missed(validation: Validation) -> list[str]:
    return [figure for figure, limit in LIMITS.items() if abs(validation.row(figure).error) > limit]


@pytest.mark.parametrize("name", ["closed-84-async", "closed-84-sync", "closed-38-long-async"])
def test_a_held_out_run_is_predicted(profile: Profile, name: str) -> None:
    run = load_run(f"{NAME}-heldout::{name}")
    validation = judge(run, profile).validation
    assert missed(validation) == []
    assert (validation.replayed, validation.decisions) == (None, len(run.steps))
    slower = profile.model_copy(update={"gpu": profile.gpu.model_copy(update={"scale": 1.05})})
    assert {"makespan_s", "tpot_ms.mean"} <= set(missed(judge(run, slower).validation))


def test_the_profile_is_what_its_runs_give(profile: Profile) -> None:
    """Up to the digits that are written."""
    found = calibrate(load_runs([f"{NAME}-fit", f"{NAME}-fit-tight"]), profile.description)
    assert found.runs == profile.runs
    held_out = load_runs([f"{NAME}-{group}" for group in ("heldout", "delay")])
    assert not {run.info.name for run in held_out} & set(found.runs)
    for mine, theirs in ((found.gpu, profile.gpu), (found.gpu.padded, profile.gpu.padded), (found.host, profile.host)):
        for name in type(mine).model_fields:
            value = getattr(mine, name)
            if isinstance(value, float | int | tuple):
                assert np.allclose(value, getattr(theirs, name), rtol=2e-3, atol=1e-3), name
    assert len(found.jitter.decode_large) > 0
    for name in type(found.jitter).model_fields:
        assert getattr(found.jitter, name) == pytest.approx(getattr(profile.jitter, name), rel=2e-3, abs=1e-3), name


def test_a_run_makes_a_profile_that_launched_twice_kernel_by_kernel() -> None:
    """Of two heads none is in the middle nine tenths."""
    run = load_run(f"{NAME}-fit-tight::closed-50-sync")
    eager = (run.steps["bucket"] == 0) & (run.steps["mixed_bucket"] == 0)
    assert eager.sum() == 2
    assert calibrate([run], "one run").host.eager_head_us > 10


def test_every_recorded_decision_is_the_schedulers() -> None:
    """I12, for a run with preemptions and one with arrivals over time."""
    for name in ("fit-tight::closed-50-sync", "fit-tight::open-14-sync"):
        run = load_run(f"{NAME}-{name}")
        assert replay(run) == run.decisions
        assert len(run.decisions) > 150
        assert (run.info.preemptions > 0) == name.endswith("closed-50-sync")


def test_a_host_that_was_slow_is_seen_to_be(profile: Profile) -> None:
    """By its own plans and commits; one was recorded half a minute after the other."""
    fast, slow = (load_run(f"{NAME}-heldout::{name}") for name in ("closed-38-long-async", "open-8-idle-async"))
    assert host_speed(fast, profile) < 0.7
    assert host_speed(slow, profile) > 1.1


def test_a_profile_that_is_cut_off_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it leaves out would cost nothing."""
    whole = (Path(sim.__file__).parent / "profiles" / f"{NAME}.toml").read_text()
    for end in ("[host]", "[gpu]", "[jitter]", "[fit]"):
        cut = tmp_path / "cut.toml"
        cut.write_text(whole[: whole.index(end)])
        assert command(["simulate", "--preset", NAME, "--profile", str(cut)]) == 2
        assert "missing; `asyncsched calibrate` writes it; is " in capsys.readouterr().err


def test_commands_find_them_by_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = f"{NAME}-heldout::closed-84-async"
    assert command(["validate", run, "--profile", NAME, "--draws", "2", "--json"]) == 0
    judged = json.loads(capsys.readouterr().out)
    assert judged["run"] == "closed-84-async"
    assert command(["whatif", run, "--profile", NAME, "--set", "host.scale=2", "--set", "depth=1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["predicted"]["makespan_s"] == judged["rows"][0]["predicted"]  # for a host as quick as the probe says
    assert found["what if"]["makespan_s"] > 1.05 * found["predicted"]["makespan_s"]
    assert command(["whatif", run, "--profile", NAME, "--set", "max_num_seqs=24", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 1.5 < found["what if"]["makespan_s"] / found["predicted"]["makespan_s"] < 3
    none, made = f"{NAME}-heldout::none", tmp_path / "made.toml"
    for asked in (["validate", none, "--profile", NAME], ["calibrate", none, "-o", str(made)]):
        assert command(asked) == 2
        assert not made.exists()
        said = capsys.readouterr().err  # as it was named, and not where it lies
        allowed = f"use {NAME}-heldout:: with one of closed-108-a"
        assert said.startswith(f"error: run: '{none}' is not allowed; {allowed}")
    for nowhere in (f"{NAME}-nowhere::closed-1-sync", f"{NAME}-nowhere"):
        assert command(["validate", nowhere, "--profile", NAME]) == 2
        assert f"use the folder of a run, an archive that ends in .tar.xz, or {NAME}-delay," in capsys.readouterr().err


def test_the_published_table_is_of_these_runs() -> None:
    """All of them, and the misses are counted as they are."""
    root = Path(__file__).parent.parent
    report = json.loads((root / "experiments" / "results" / f"validate-{NAME}.json").read_text())
    judged = ("heldout", "delay", "tight")
    assert len(report["decisions"]) == sum(len(load_runs([f"{NAME}-{group}"])) for group in judged)
    limited = [row for row in report["rows"] if row["limit"] is not None]
    assert report["met"] == sum(abs(row["error"]) <= row["limit"] for row in limited)
    assert f"{report['met']} of {len(limited)} figures met" in (root / "docs" / "fidelity.md").read_text()


def test_a_scenario_at_a_profiles_prices_captures_the_sizes_they_are_for() -> None:
    scenario, profile = read_preset(NAME), load_profile_data(NAME)
    sizes = profile["engine"]
    engine = with_profile(scenario, profile)["engine"]
    assert engine["decode_buckets"] == sizes["decode_buckets"]
    assert engine["mixed_buckets"] == sizes["mixed_buckets"]
    small = {**scenario, "engine": {**scenario["engine"], "max_num_seqs": 20, "mixed_buckets": []}}
    engine = with_profile(small, profile)["engine"]
    assert engine["decode_buckets"] == [1, 2, 4, 8, 16]
    assert engine["mixed_buckets"] == []
    assert "decode_buckets" not in scenario["engine"]  # it is left as it was
