"""Small robust fits: durations as a sum of non-negative terms, and what is left over as a table of ratios.

Errors count relative to the duration, so that short steps matter as much as long ones; samples that are far off (the
machine did something else) lose their weight. numpy only: the problems have a dozen unknowns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.profile import QUANTILES, FitItem

FloatArray = NDArray[np.float64]

HUBER = 1.5  # standard deviations from which a sample counts less
ROUNDS = 10
SMOOTH = 1e-3  # how much a corner that few samples are near follows its neighbours
KEEP = 1e-9  # a coefficient that explains less of the durations than this is none


class Fit(NamedTuple):
    """`coefficients` of the terms; `predicted` of each sample, corrected so that its sum is that of the samples."""

    coefficients: FloatArray
    predicted: FloatArray


def fit(
    terms: Sequence[FloatArray],
    durations: FloatArray,
    *,
    smooth: Sequence[Sequence[int]] = (),
    trust: FloatArray | None = None,
) -> Fit:
    """Durations as `sum(c * term)` with no c below zero.

    smooth  lists terms that are corners of one line, in order
    trust   in each sample, 1 without; those below 1 decide only what no others do

    Raises ValueError without samples.
    """
    if not len(durations):
        raise ValueError("nothing to fit")
    matrix = np.stack([np.asarray(term, dtype=float) for term in terms], axis=1)
    floor = max(float(np.median(durations)) * 1e-3, 1e-12)
    trusted = np.ones(len(durations)) if trust is None else trust
    weights = trusted / np.maximum(durations, floor)
    counted = trusted >= 1 if (trusted >= 1).any() else trusted > 0
    huber = np.ones(len(durations))
    coefficients = np.zeros(matrix.shape[1])
    for _ in range(ROUNDS):
        coefficients = _non_negative(matrix, durations, weights * np.sqrt(huber), smooth)
        errors = (durations - matrix @ coefficients) * weights
        spread = 1.4826 * float(np.median(np.abs(errors - np.median(errors))[counted])) + 1e-12
        huber = np.minimum(1.0, HUBER * spread / np.maximum(np.abs(errors), 1e-15))
    predicted = matrix @ coefficients
    total = float(predicted[counted].sum())
    scale = float(durations[counted].sum()) / total if total > 0 else 1.0
    return Fit(coefficients * scale, predicted * scale)


def _non_negative(
    matrix: FloatArray, durations: FloatArray, weights: FloatArray, smooth: Sequence[Sequence[int]]
) -> FloatArray:
    """Least squares; the term that is most negative is dropped until none is."""
    rows, target = matrix * weights[:, None], durations * weights
    penalties = _penalties(matrix.shape[1], smooth, float(np.median(weights)) * np.sqrt(len(durations)) * SMOOTH)
    rows = np.concatenate((rows, penalties))
    target = np.concatenate((target, np.zeros(len(penalties))))
    scale = np.sqrt((rows * rows).sum(axis=0))
    active = scale > 0
    scaled = rows / np.where(active, scale, 1.0)
    products, wanted = scaled.T @ scaled, scaled.T @ target  # a dozen unknowns: solving these again costs nothing
    result = np.zeros(matrix.shape[1])
    while active.any():
        part = np.linalg.lstsq(products[np.ix_(active, active)], wanted[active], rcond=1e-13)[0] / scale[active]
        if (part >= 0).all():
            result[active] = part
            break
        worst = np.flatnonzero(active)[int(np.argmin(part * scale[active]))]
        active[worst] = False
    return result


def _penalties(count: int, smooth: Sequence[Sequence[int]], weight: float) -> FloatArray:
    """Rows that want each inner corner on the line between its neighbours."""
    rows = []
    for corners in smooth:
        for left, middle, right in zip(corners, corners[1:], corners[2:], strict=False):
            row = np.zeros(count)
            row[left], row[middle], row[right] = -0.5 * weight, weight, -0.5 * weight
            rows.append(row)
    return np.array(rows).reshape(len(rows), count)


def hats(sizes: NDArray[np.int64], corners: Sequence[int]) -> list[FloatArray]:
    """The terms of a line through corners: each is 1 at its own corner and 0 at all others. Ends stay level."""
    return [np.interp(sizes, corners, np.eye(len(corners))[place]) for place in range(len(corners))]


def ramps(sizes: NDArray[np.int64], corners: Sequence[int]) -> list[FloatArray]:
    """The terms of a line through (0, 0) that never falls: each grows by 1 between two corners, 0 before the first; the
    last one goes on."""
    terms = []
    for low, high in zip((0, *corners), corners, strict=False):
        share = np.maximum(sizes - low, 0) / (high - low)
        terms.append(share if high == corners[-1] else np.minimum(share, 1.0))
    return terms


def corners_of(sizes: NDArray[np.int64], wanted: Sequence[int], least: int) -> list[int]:
    """The ends of the sizes, and those of the wanted corners that have `least` samples on both sides."""
    low, high = int(sizes.min()), int(sizes.max())
    corners = [low]
    for corner in wanted:
        between = np.count_nonzero((sizes > corners[-1]) & (sizes <= corner))
        after = np.count_nonzero(sizes > corner)
        if low < corner < high and between >= least and after >= least:
            corners.append(corner)
    return corners if high == low else [*corners, high]


def ratios(measured: FloatArray, predicted: FloatArray) -> tuple[float, ...]:
    """The table of measured over predicted."""
    return table_of(measured / np.maximum(predicted, 1e-12))


def widened(ratios: FloatArray, unknowns: int) -> FloatArray:
    """Measured over predicted of samples that others are like: a fit of so many unknowns is closer to its own samples
    than to others, and ratios are farther from 1 by as much as that makes them too close."""
    spread = np.sqrt(len(ratios) / max(len(ratios) - unknowns, len(ratios) / 4, 1))
    return np.asarray(np.maximum(1 + spread * (ratios - 1), 0.0))


def table_of(ratios: FloatArray, method: Literal["linear", "weibull"] = "linear") -> tuple[float, ...]:
    """Ratios as the table that `MeasuredCosts` draws from, scaled to draw 1 on average; none of fewer than two.
    `weibull` is for few of them: another one is below each quantile as often as that says, and not less far out."""
    if len(ratios) < 2:
        return ()
    table = np.quantile(ratios, QUANTILES, method=method)
    mean = float(np.trapezoid(table, QUANTILES))
    return tuple((table / mean).tolist()) if mean > 0 else ()


def quality(measured: FloatArray, predicted: FloatArray, seen: Mapping[str, NDArray[np.int64]]) -> FitItem:
    """What a profile says about one of its fits."""
    errors = 100 * (predicted / np.maximum(measured, 1e-12) - 1)
    return FitItem(
        count=len(measured),
        bias_pct=float(100 * (predicted.sum() / measured.sum() - 1)) if measured.sum() > 0 else 0.0,
        rms_pct=float(np.sqrt(np.mean(errors * errors))),
        p05_pct=float(np.quantile(errors, 0.05)),
        p95_pct=float(np.quantile(errors, 0.95)),
        seen={name: (float(values.min()), float(values.max())) for name, values in seen.items() if len(values)},
    )
