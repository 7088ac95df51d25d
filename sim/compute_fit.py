"""What steps take on the compute lane, fitted: decode steps by sequences and KV read, others by tokens and attention.

One fit has the same contention for all steps (the factor on steps that overlap with the host); it is the one that
leaves the least over. How far off a fit is for a workload that it has not seen is found by leaving each out once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncsched.runs import IntArray
from sim.fitting import FloatArray, corners_of, fit, hats, ramps, ratios

FEW = 8  # steps of a run that say something about the run
TOKEN_CORNERS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12_288, 16_384)
KV_CORNERS = tuple(1024 * 4**power for power in range(7))
WHOLE_SEQS = (1, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LIMIT_TRUST = 0.02  # in a sample that is an upper limit only
BETWEEN = 1 / 3
"""Where truth lies between fits that know a workload, which are too sure, and fits that have lost it."""

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class ComputeSteps:
    """Steps that computed, one entry each; durations in microseconds.

    decode    whether the step is of decodes alone
    size      its sequences or, where it prefills, its tokens; padded ones count
    padded    to a bucket
    context   KV positions that it reads and does not compute; `longest` is of the longest sequence
    beside    it prefills, and has decodes as well
    overlap   several steps were in flight
    idle      the lane had nothing to do when the step was enqueued
    free      it cannot have waited for its launch; the others are upper limits
    workload  which workload its run was of
    inline    lanes run in the host's thread: nothing overlaps
    """

    duration: FloatArray
    decode: Mask
    size: IntArray
    padded: Mask
    kv_tokens: IntArray
    context: IntArray
    longest: IntArray
    attn_pairs: IntArray
    overlap: Mask
    idle: Mask
    free: Mask
    beside: Mask
    run: IntArray
    workload: IntArray
    inline: bool


@dataclass(frozen=True, slots=True, eq=False)
class ComputeFit:
    """`values` are keys of GpuProfile. `predicted` is of every step, those that were not fitted too.

    tables      measured over predicted as tables of ratios: of runs' decodes, and of their mixed steps
    within      each step as it is predicted once it is known how slow its run was (unless runs have no table), by fits
                that know its workload and, where `left_out` says so, by others that do not
    """

    values: dict[str, Any]
    predicted: FloatArray
    within: FloatArray
    left_out: Mask
    tables: tuple[tuple[float, ...], tuple[float, ...]]


def fit_compute(steps: ComputeSteps) -> ComputeFit:
    """The fit to all steps."""
    everything = np.ones(len(steps.duration), dtype=bool)
    contention = 1.0
    for _ in range(2):  # one depends on the other, weakly
        whole = _whole_seqs(steps, contention)
        contention = _contention(steps, everything, whole)
    values, predicted = _fit(steps, everything, contention, whole)
    unseen = _unseen(steps, contention, whole)
    left_out = ~np.isnan(unseen)
    within = _between_fits(predicted, unseen)
    tables = []
    for rows in (steps.decode, steps.beside & steps.free):
        known: list[float] = []
        normalised = within.copy()
        for number in range(int(steps.run.max(initial=-1)) + 1):
            mine = rows & (steps.run == number)
            if np.count_nonzero(mine) < FEW:
                continue
            took = steps.duration[mine].sum()
            knowing, without = took / predicted[mine].sum(), took / unseen[mine].sum()
            of_run = np.array([[knowing], [without]])
            normalised[mine] = _between_fits(*(np.stack([predicted[mine], unseen[mine]]) * of_run))
            known.append(float(_between_fits(*of_run)[0]))
        tables.append(ratios(np.array(known), np.ones(len(known))) if len(known) >= 3 else ())
        if len(known) >= 3:
            within = normalised
    return ComputeFit(values, predicted, within, left_out, (tables[0], tables[1]))


def _between_fits(knowing: FloatArray, without: FloatArray) -> FloatArray:
    """Of two predictions, one by a fit that knows the workload; that one where there is no other (NaN)."""
    return np.where(np.isnan(without), knowing, knowing ** (1 - BETWEEN) * without**BETWEEN)


def _whole_seqs(steps: ComputeSteps, contention: float) -> int:
    """The batch size from which on the longest sequence counts whole: the one that leaves the least over, of workloads
    that a fit knows and of those that it does not."""
    if not steps.decode.any():
        return 1

    def leftover(whole: int) -> float:
        total = 0.0
        for guess in (
            _fit(steps, steps.decode, contention, whole)[1],
            _unseen(steps, contention, whole, decodes_only=True),
        ):
            errors = np.abs(guess / steps.duration - 1)[steps.decode & ~np.isnan(guess)]
            total += float(np.minimum(errors, 0.2).sum())
        return total

    return min(WHOLE_SEQS, key=leftover)


def _contention(steps: ComputeSteps, train: Mask, whole: int) -> float:
    """Searched coarsely, then finely; the smaller one where it makes no difference."""
    if steps.inline or steps.overlap.all() or not steps.overlap.any():
        return 1.0
    weighed = steps.free & train

    def leftover(contention: float) -> float:
        predicted = _fit(steps, train, contention, whole)[1]
        errors = np.abs(predicted[weighed] / steps.duration[weighed] - 1)
        total: float = np.minimum(errors, 0.2).sum() * (1 + 1e-3 * contention)
        return total

    found = 1.0
    for step, places in ((0.01, range(11)), (0.0025, range(-4, 5)), (0.0005, range(-5, 6))):
        tried = [found + step * place for place in places]
        found = min((one for one in tried if one >= 1), key=leftover)
    return found


def _unseen(steps: ComputeSteps, contention: float, whole: int, decodes_only: bool = False) -> FloatArray:
    """Each step as fits predict it that know nothing of its workload; NaN where its sizes are beyond all they know."""
    predicted = np.full(len(steps.duration), np.nan)
    workloads = np.unique(steps.workload)
    if len(workloads) < 3:
        return predicted
    for workload in workloads:
        mine = steps.workload == workload
        guess = _fit(steps, ~mine & (steps.decode | (not decodes_only)), contention, whole)[1]
        for rows in (steps.decode, ~steps.decode):
            theirs, ours = steps.size[rows & ~mine], steps.size[rows & mine]
            if len(theirs) and len(ours) and theirs.min() <= ours.min() and ours.max() <= theirs.max():
                predicted[rows & mine] = guess[rows & mine]
    return predicted


def _fit(steps: ComputeSteps, train: Mask, contention: float, whole: int) -> tuple[dict[str, Any], FloatArray]:
    """Keys of GpuProfile, and every step as they predict it."""
    factor = np.where(steps.overlap, contention, 1.0)
    predicted = np.zeros(len(steps.duration))
    values: dict[str, Any] = {"contention": contention, "idle_start_us": 0.0, "whole_seqs": whole}
    if (steps.decode & train).any():
        _fit_decodes(steps, train, factor, values, predicted)
    for name, padded in (("eager", False), ("padded", True)):
        if (~steps.decode & train & (steps.padded == padded)).any():
            values[name] = _fit_prefills(steps, padded, train, factor, values["idle_start_us"], predicted)
    return values, predicted


def _fit_decodes(
    steps: ComputeSteps, train: Mask, factor: FloatArray, values: dict[str, Any], predicted: FloatArray
) -> None:
    fitted = steps.decode & train
    sizes, counts = np.unique(steps.size[fitted], return_counts=True)
    corners = [int(size) for size, count in zip(sizes, counts, strict=True) if count >= 3] or [int(sizes[0])]
    kv = steps.kv_tokens[fitted]
    kv_corners = corners_of(kv, KV_CORNERS, len(kv) // 20 + 3)[1:] or [int(kv.max())]
    idle = steps.idle[fitted]
    starts = not steps.inline and bool(idle.any() and not idle.all())

    def terms(rows: Mask) -> list[FloatArray]:
        own = [(steps.idle[rows] / factor[rows]).astype(float)] if starts else []
        share = np.minimum(steps.size[rows] / values["whole_seqs"], 1.0) * steps.longest[rows]
        return [*hats(steps.size[rows], corners), share, *ramps(steps.kv_tokens[rows], kv_corners), *own]

    found = fit(terms(fitted), steps.duration[fitted] / factor[fitted], smooth=[range(len(corners))])
    bases, slopes = np.split(found.coefficients, [len(corners) + 1])
    bases, values["us_per_longest"] = bases[:-1], float(bases[-1])
    if starts:
        slopes, values["idle_start_us"] = slopes[:-1], float(slopes[-1])
    values["decode_seqs"], values["decode_us"] = tuple(corners), tuple(bases.tolist())
    values["kv_tokens"], values["kv_us"] = (0, *kv_corners), (0.0, *np.cumsum(slopes).tolist())
    predicted[steps.decode] = np.stack(terms(steps.decode), axis=1) @ found.coefficients * factor[steps.decode]


def _fit_prefills(
    steps: ComputeSteps, padded: bool, train: Mask, factor: FloatArray, idle_start: float, predicted: FloatArray
) -> dict[str, Any]:
    """Keys of PrefillPrice, for steps padded to a mixed bucket or for those launched kernel by kernel.

    A captured graph computes its decodes as it does prefills, without splitting sequences among programs, so that the
    longest one counts; its buckets are corners, for they are steps and not a line. Where no step was launched kernel by
    kernel, captured ones of that size say what it takes.
    """
    rows = ~steps.decode & (steps.padded == padded)
    fitted = (rows if padded else ~steps.decode) & train
    sizes = steps.size[fitted]
    corners = np.unique(sizes).tolist() if padded else corners_of(sizes, TOKEN_CORNERS, 3)
    start = np.where(steps.idle, idle_start, 0.0)
    names = ["us_per_attn_pair", "us_per_token_and_decode", "us_per_context_token", "us_per_longest"]

    def terms(chosen: Mask) -> list[FloatArray]:
        beside = np.where(steps.beside, steps.size, 0)
        linear = [steps.attn_pairs, beside, steps.context, *([steps.longest] if padded else [])]
        return [*hats(steps.size[chosen], corners), *(term[chosen].astype(float) for term in linear)]

    measured = np.maximum(steps.duration - start, 0.0) / factor
    trust = np.where(steps.free & rows, 1.0, LIMIT_TRUST)[fitted]
    found = fit(terms(fitted), measured[fitted], smooth=[range(len(corners))], trust=trust)
    predicted[rows] = np.stack(terms(rows), axis=1) @ found.coefficients * factor[rows] + start[rows]
    bases, prices = np.split(found.coefficients, [len(corners)])
    line = {"tokens": tuple(corners), "tokens_us": tuple(bases.tolist())}
    return {**line, **dict(zip(names, prices.tolist(), strict=False))}


def workloads_of(keys: Sequence[object]) -> list[int]:
    """A number for each different key."""
    known: dict[object, int] = {}
    return [known.setdefault(key, len(known)) for key in keys]
