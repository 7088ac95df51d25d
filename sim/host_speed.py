"""How the speed of a host changes while it works: which speeds it has, and how long it keeps one.

All host work of a step slows down together, by factors of two and for a good part of a second: the machine has other
guests, and clocks. What is learnt is a table of speeds and the time after which they are forgotten, not when they come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncsched.runs import IntArray
from sim.fitting import FloatArray, ratios

SPEED_KINDS = ("plan", "fill", "launch", "commit")
WINDOW_US = 50_000  # the speed of a time is that of so long around it
LAGS = 40  # windows
LEAST = 20  # windows that say how long a speed is kept
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
