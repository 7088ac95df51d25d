"""The probe of the host: what it reads, how far hosts follow it, and that predictions use it and nothing else."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planted import happened, wanted

from asyncsched.cli.runs import check_subject
from asyncsched.errors import ConfigError
from asyncsched.inputs import SlotInputs
from asyncsched.plan import StepPlan
from asyncsched.run_files import read_run, write_run
from asyncsched.runs import Run, StepLog
from executors import host_probe
from executors.host_probe import SEQS, STEPS, Probe, read_host_speed
from executors.recorder import PROBE_EVERY_MS
from sim.calibrate import calibrate
from sim.host_speed import all_during, fit_probe, probe_us, probe_warning, probed
from sim.predict import predict
from sim.profile import HostPrice, HostProfile, Profile

PRICE = HostPrice(us=300.0)
BASE = Profile(host=HostProfile(plan=PRICE, fill=PRICE, launch=PRICE, commit=PRICE, deliver=PRICE))


def slowed(profile: Profile, scale: float) -> Profile:
    return profile.model_copy(update={"host": profile.host.model_copy(update={"scale": scale})})


def at(scale: float, readings: list[float], size: int = 4) -> Run:
    run = happened(wanted(f"at-{scale}-{readings}", 1, [40] * size, [30] * size), slowed(BASE, scale))
    return replace(run, info=replace(run.info, host={"probe_us": readings}))


def with_host(run: Run, **host: object) -> Run:
    return replace(run, info=replace(run.info, host={**run.info.host, **host}))


def read_in(scale: float, during: list[float], beside: list[float]) -> Run:
    """A run with readings of both kinds."""
    times = [20.0 * (1 + number) for number in range(len(during))]
    return with_host(at(scale, beside), probe_during_us=during, probe_during_at_ms=times)


def test_a_reading_is_a_time_that_was_taken() -> None:
    reading = read_host_speed()
    assert 1 < reading.step_us < 1e5
    assert 0 < reading.thread_share <= 1.05
    assert reading.cpu >= -1
    assert STEPS * reading.step_us > 2000  # long enough to be no chance


def test_a_probe_does_the_same_step_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt among them would take longer, and a sequence that has ended would be missing."""
    seen: list[tuple[int, int, int]] = []
    fill = SlotInputs.fill

    def noted(inputs: SlotInputs, plan: StepPlan) -> None:
        seen.append((plan.num_seqs, plan.num_decodes, plan.num_prefill_tokens))
        fill(inputs, plan)

    monkeypatch.setattr(SlotInputs, "fill", noted)
    probe, timed = Probe(lasts=7), []
    for _ in range(3 * 7 + 2):
        assert probe.step_ns() > 0
        timed.append(seen[-1])
    assert set(timed) == {(SEQS, SEQS, 0)}
    assert len(seen) == 23 + 4 * host_probe.WARM_UP  # one step each, and it began anew three times


def test_beginning_anew_is_not_in_the_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Probe._begin

    def slow(probe: Probe) -> None:
        begin(probe)
        time.sleep(0.2)

    monkeypatch.setattr(Probe, "_begin", slow)
    probe = Probe(lasts=3)
    assert sorted(probe.step_ns() for _ in range(8))[-1] < 150_000_000


def test_a_probe_of_a_recording_lasts_for_minutes() -> None:
    assert host_probe.LASTS * PROBE_EVERY_MS > 120_000


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
    assert probe_us(without, during=False) == probe_us(without, during=True) == 0
    assert probed(known, without) is known
    assert probed(BASE, at(1.0, [9.0])) is BASE


def test_readings_in_a_run_are_used_where_all_runs_have_them() -> None:
    """What is read beside these runs says the opposite."""
    scales = (0.6, 0.8, 1.0, 1.2, 1.5, 1.9)
    runs = [read_in(scale, [200 * scale] * 3, [100 / scale]) for scale in scales]
    profile = calibrate(runs)
    assert profile.host.probe_during
    assert profile.host.probe_power == pytest.approx(1.0, abs=0.02)
    slow = read_in(1.7, [300.0, 380.0, 340.0], [58.0])
    assert predict(slow, probed(profile, slow)).info.makespan_ns == pytest.approx(slow.info.makespan_ns, rel=0.02)
    assert probe_warning(profile, slow) == ""


def test_readings_in_runs_and_beside_them_are_never_compared() -> None:
    """In a run the same host reads twice as much."""
    scales = (0.6, 0.8, 1.0, 1.2, 1.5, 1.9)
    both = [read_in(scale, [200 * scale] * 3, [100 * scale]) for scale in scales]
    beside = [at(scale, [100 * scale]) for scale in scales]
    mixed = calibrate([*both[:3], *beside[3:]])
    assert not mixed.host.probe_during
    assert mixed.host.probe_power == pytest.approx(1.0, abs=0.02)
    assert probed(mixed, both[4]).host.scale == pytest.approx(probed(mixed, beside[4]).host.scale)
    assert probe_warning(mixed, both[4]) == ""
    during = calibrate(both)
    assert probed(during, beside[4]) is during
    assert "read during its runs, and this run's beside it" in probe_warning(during, beside[4])
    only = with_host(both[4], probe_us=[])
    assert probed(mixed, only) is mixed
    assert "read beside its runs, and this run's during it" in probe_warning(mixed, only)
    assert not all_during([])
    assert all_during([both[0], with_host(beside[0], probe_us=[])])  # who has none has none of another kind


def test_a_run_that_was_slow_for_half_of_it_is_half_as_slow() -> None:
    run = read_in(1.0, [20.0, 40.0, 20.0, 40.0, 40.0], [9.0])
    assert probe_us(run, during=True) == pytest.approx(32)
    stopped = read_in(1.0, [20.0] * 9 + [1e6], [9.0])  # somebody else's work counts three times, and not 50,000 times
    assert probe_us(stopped, during=True) == pytest.approx(24)


def probing(run: Run, took_ns: int) -> Run:
    """The run as it would have been with a reading before every second delivery, with nothing else to do meanwhile."""
    began = np.sort(run.steps.start("deliver"))[::2]
    columns = dict(run.steps.columns)
    for name, values in run.steps.columns.items():
        if name.endswith("_ns"):
            side: Any = "right" if name.endswith("start_ns") else "left"  # what ends there has ended
            columns[name] = np.where(values < 0, values, values + took_ns * np.searchsorted(began, values, side))
    times = (began + took_ns * np.arange(len(began))) / 1e6
    host = {"probe_during_us": [took_ns / 1e3] * len(began), "probe_during_at_ms": times.tolist()}
    return with_host(replace(run, steps=StepLog(columns)), **host)


def test_a_reading_is_no_part_of_a_delivery() -> None:
    plain = at(1.0, [], size=2)
    slower = probing(plain, 2_000_000)
    taken_for_work = with_host(slower, probe_during_us=[], probe_during_at_ms=[])
    prices = [calibrate([run]).host.deliver for run in (plain, slower, taken_for_work)]
    took = [price.us + 2 * price.us_per_seq for price in prices]
    assert took[:2] == pytest.approx([300, 300], rel=0.001)
    assert took[2] > 1000  # half of them took 2,300


def test_readings_are_written_and_read(tmp_path: Path) -> None:
    run = with_host(at(1.0, [70.5, 81.25]), probe_during_us=[88.125, 90.0], probe_during_at_ms=[1.5, 22.000001])
    write_run(tmp_path / "run", run)
    assert read_run(tmp_path / "run").info.host == run.info.host


@pytest.mark.parametrize("name", ["probe_us", "probe_during_us", "probe_during_at_ms"])
@pytest.mark.parametrize("readings", ["70", [70, "x"], [0.0], [-1], [float("nan")], [True], 7, None])
def test_readings_that_cannot_be_are_refused(name: str, readings: object) -> None:
    info = at(1.0, [70.0]).info
    with pytest.raises(ConfigError, match=rf"host\.{name}"):
        replace(info, host={name: readings})


@pytest.mark.parametrize("times", [[], [1.0], [2.0, 1.0], [1.0, 2.0, 3.0]])
def test_each_reading_has_its_time(times: list[float]) -> None:
    info = at(1.0, [70.0]).info
    with pytest.raises(ConfigError, match=r"host\.probe_during_at_ms.*times in order, one for each of 2"):
        replace(info, host={"probe_during_us": [1.0, 2.0], "probe_during_at_ms": times})


def test_commands_warn_of_a_probe_of_another_kind(capsys: pytest.CaptureFixture[str]) -> None:
    run = at(1.0, [70.0])
    known = BASE.model_copy(update={"host": BASE.host.model_copy(update={"probe_us": 50.0, "probe_during": True})})
    said = check_subject(known, run)
    assert said == [probe_warning(known, run)]
    assert capsys.readouterr().err == f"warning: {said[0]}\n"
    assert check_subject(BASE, run) == []
