"""How the speed of a host changes while it works: which speeds it has, and how long it keeps one.

All host work of a step slows down together, by factors of two and for a good part of a second: the machine has other
guests, and clocks. What is learnt is a table of speeds and the time after which they are forgotten, not when they come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncsched.runs import IntArray, Run
from sim.fitting import FloatArray, ratios
from sim.profile import Profile

SLOWEST = 10  # times slower than usual is somebody else's work
LONGEST = 3  # times the median is what a reading counts at most
SPEED_KINDS = ("plan", "fill", "launch", "commit")
WINDOW_US = 50_000  # the speed of a time is that of so long around it
LAGS = 40  # windows
LEAST = 20  # windows that say how long a speed is kept
LEAST_POWER = 0.05  # a probe that says less says nothing
LEAST_PROBES = 6  # runs that say how far a host follows its probe
STEADY = 0.02  # a speed that varies by less is one

Mask = NDArray[np.bool_]


class Speed(NamedTuple):
    """`of_step`: how long host work takes in each step, over what it takes on average. `table`: of all windows, as
    quantiles; () for a host that has one speed. `hold_ms`: how long it keeps one, on average."""

    of_step: FloatArray
    table: tuple[float, ...]
    hold_ms: float


def fit_speed(work: Sequence[tuple[Mask, FloatArray, FloatArray]], planned_us: FloatArray, run: IntArray) -> Speed:
    """From kinds of host work: the steps that have it, what it took, and what it takes on average.

    planned_us  when each step was planned
    run         which run it is of
    """
    took, usual = np.zeros(len(run)), np.zeros(len(run))
    for chosen, measured, predicted in work:
        took[chosen] += measured
        usual[chosen] += predicted
    one = Speed(np.ones(len(run)), (), 0.0)
    window = (planned_us // WINDOW_US).astype(np.int64)
    count = int(window.max(initial=0)) + 1
    of_window = np.full((int(run.max(initial=-1)) + 1, count), np.nan)
    for place in np.unique(run * count + window).tolist():
        mine = (run == place // count) & (window == place % count) & (usual > 0)
        if mine.any():
            of_window[place // count, place % count] = np.median(took[mine] / usual[mine])
    known = of_window[~np.isnan(of_window)]
    if len(known) < LEAST or known.std() < STEADY * known.mean():
        return one
    of_step = of_window[run, window]
    of_step = np.where(np.isnan(of_step), known.mean(), of_step)
    return Speed(of_step, ratios(known, np.full(len(known), known.mean())), _hold_us(of_window, known) / 1e3)


def _hold_us(of_window: FloatArray, known: FloatArray) -> float:
    """The time after which two speeds of a run have no more than 1/e in common, as between runs."""
    before = 1.0
    for lag in range(1, min(LAGS, of_window.shape[1])):
        apart = (of_window[:, lag:] - of_window[:, :-lag]).ravel()
        apart = apart[~np.isnan(apart)]
        if len(apart) < LEAST:
            return float(lag * WINDOW_US)
        common = 1 - float(np.mean(apart * apart)) / 2 / float(known.var())
        if common < np.exp(-1):
            return float(WINDOW_US * (lag - 1 + (before - np.exp(-1)) / max(before - common, 1e-9)))
        before = common
    return float(LAGS * WINDOW_US)


def probe_us(run: Run, *, during: bool) -> float:
    """The run's probe, on average over its readings during the run, or over those beside it; 0 where nobody read one.

    The mean, because what a run takes is a sum: of a run that was slow for half of its time a median says that it was
    slow, or that it was not. A reading counts LONGEST times the median at most: hosts change their speed by factors of
    two, what is longer is somebody else's work, and weighs more in one of 50 readings than in one of 500 steps."""
    readings = run.info.host.get("probe_during_us" if during else "probe_us", ())
    return float(np.minimum(readings, LONGEST * np.median(readings)).mean()) if len(readings) else 0.0


def probing_ns(run: Run, begins: IntArray, ends: IntArray) -> IntArray:
    """How much of these times, which begin and end then, the recorder spent on readings during the run."""
    host = run.info.host
    at = np.asarray(host.get("probe_during_at_ms", ()), dtype=np.float64) * 1e6
    took = np.asarray(host.get("probe_during_us", ()), dtype=np.float64) * 1e3
    so_far = np.concatenate(([0], np.cumsum(took)))
    first, last = (np.searchsorted(at, times) for times in (begins, ends))
    return np.asarray(np.where(last > first, so_far[np.maximum(last, first)] - so_far[first], 0), dtype=np.int64)


def all_during(runs: Sequence[Run]) -> bool:
    """Whether every run that has a probe at all has it during the run. Where not, only readings beside runs can be
    compared: the caches are warm there, and the same host reads less."""
    of_runs = [(probe_us(run, during=True), probe_us(run, during=False)) for run in runs]
    return any(during for during, _ in of_runs) and all(during for during, beside in of_runs if during or beside)


def fit_probe(probes: FloatArray, speeds: FloatArray) -> tuple[float, float]:
    """From each run's probe (us) and how long its host took over what is usual: the usual probe, and by what power of
    a probe over that one the host is slower; (0, 0) where too few runs have a probe. The power is at most 1: a
    probe that is read for a moment only says less than that."""
    read = (probes > 0) & (speeds > 0)
    if np.count_nonzero(read) < LEAST_PROBES:
        return 0.0, 0.0
    x, y = np.log(probes[read]), np.log(speeds[read])
    slope = float(((x - x.mean()) * (y - y.mean())).sum() / max(((x - x.mean()) ** 2).sum(), 1e-12))
    slope = min(slope, 1.0)
    if slope < LEAST_POWER:
        return 0.0, 0.0
    return float(np.exp(x.mean() - y.mean() / slope)), slope


def probed(profile: Profile, run: Run) -> Profile:
    """The profile for a host as quick as the run's probe says, which knows nothing of the run. The same profile where
    the run has no probe of the kind that the profile's runs had, or they had none."""
    host = profile.host
    reading = probe_us(run, during=host.probe_during)
    if not reading or not host.probe_us:
        return profile
    slower = (reading / host.probe_us) ** host.probe_power
    return profile.model_copy(update={"host": host.model_copy(update={"scale": host.scale * slower})})


def probe_warning(profile: Profile, run: Run) -> str:
    """One line on a run whose probe cannot be used, because it is of another kind than the profile's; "" otherwise."""
    host = profile.host
    if not host.probe_us or probe_us(run, during=host.probe_during) or not probe_us(run, during=not host.probe_during):
        return ""
    mine, theirs = ("during", "beside")[:: 1 if host.probe_during else -1]
    return (
        f"the profile's host probe was read {mine} its runs, and this run's {theirs} it: they cannot be compared, and "
        "the run is predicted for the profile's usual host"
    )
