"""The probe of the host: what it reads, how far hosts follow it, and that predictions use it and nothing else."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from planted import happened, wanted

from asyncsched.errors import ConfigError
from asyncsched.run_files import read_run, write_run
from asyncsched.runs import Run
from executors.host_probe import STEPS, read_host_speed
from sim.calibrate import calibrate
from sim.host_speed import fit_probe, probe_us, probed
from sim.predict import predict
from sim.profile import HostPrice, HostProfile, Profile

PRICE = HostPrice(us=300.0)
BASE = Profile(host=HostProfile(plan=PRICE, fill=PRICE, launch=PRICE, commit=PRICE, deliver=PRICE))


def slowed(profile: Profile, scale: float) -> Profile:
    return profile.model_copy(update={"host": profile.host.model_copy(update={"scale": scale})})


def at(scale: float, readings: list[float], size: int = 4) -> Run:
    run = happened(wanted(f"at-{scale}-{readings}", 1, [40] * size, [30] * size), slowed(BASE, scale))
    return replace(run, info=replace(run.info, host={"probe_us": readings}))


def test_a_reading_is_a_time_that_was_taken() -> None:
    reading = read_host_speed()
    assert 1 < reading.step_us < 1e5
    assert 0 < reading.thread_share <= 1.05
    assert reading.cpu >= -1
    assert STEPS * reading.step_us > 2000  # long enough to be no chance


def test_a_planted_power_is_found() -> None:
    random = np.random.default_rng(0)
    probes = 80 * np.exp(random.normal(0, 0.4, 40))
    usual, power = fit_probe(probes, (probes / 90) ** 0.7)
    assert power == pytest.approx(0.7)
    assert usual == pytest.approx(90)


def test_a_probe_that_says_nothing_is_not_used() -> None:
    random = np.random.default_rng(1)
    probes = 80 * np.exp(random.normal(0, 0.4, 40))
    assert fit_probe(probes, 1 / probes) == (0.0, 0.0)
    assert fit_probe(np.zeros(40), np.ones(40)) == (0.0, 0.0)
    assert fit_probe(probes[:5], probes[:5]) == (0.0, 0.0)


def test_predictions_follow_the_probe_and_not_the_run() -> None:
    scales = (0.6, 0.8, 1.0, 1.2, 1.5, 1.9)
    profile = calibrate([at(scale, [100 * scale, 100 * scale]) for scale in scales])
    assert profile.host.probe_power == pytest.approx(1.0, abs=0.02)
    slow = at(1.7, [160.0, 180.0])
    assert predict(slow, probed(profile, slow)).info.makespan_ns == pytest.approx(slow.info.makespan_ns, rel=0.02)
    assert predict(slow, profile).info.makespan_ns < 0.75 * slow.info.makespan_ns
    other = replace(slow, info=replace(slow.info, makespan_ns=1, host={"probe_us": [85.0, 85.0]}))
    assert probed(profile, other).host.scale == pytest.approx(probed(profile, slow).host.scale / 2, rel=0.02)


def test_runs_and_profiles_without_a_probe_stay_as_they_are() -> None:
    known = slowed(BASE, 1.0).model_copy(update={"host": BASE.host.model_copy(update={"probe_us": 50.0})})
    without = replace(at(1.0, [9.0]), info=replace(at(1.0, [9.0]).info, host={}))
    assert probe_us(without) == 0
    assert probed(known, without) is known
    assert probed(BASE, at(1.0, [9.0])) is BASE


def test_readings_are_written_and_read(tmp_path: Path) -> None:
    run = at(1.0, [70.5, 81.25])
    write_run(tmp_path / "run", run)
    assert read_run(tmp_path / "run").info.host == run.info.host


@pytest.mark.parametrize("readings", ["70", [70, "x"], [0.0], [-1], [float("nan")], [True], 7, None])
def test_readings_that_cannot_be_are_refused(readings: object) -> None:
    info = at(1.0, [70.0]).info
    with pytest.raises(ConfigError, match=r"host\.probe_us"):
        replace(info, host={"probe_us": readings})
