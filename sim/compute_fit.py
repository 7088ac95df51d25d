"""What steps take on the compute lane, fitted: decode steps by sequences and KV read, others by tokens and attention.

All steps of a fit have some numbers in common: contention (the factor on steps that overlap with the host), how long a
device is slower behind a large prefill, from which batch size on a sequence is not split. They are those that leave the
least over. How far off a fit is for a workload that it has not seen is found by leaving each out once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncsched.runs import IntArray
from sim.fitting import FloatArray, corners_of, fit, hats, ramps
from sim.profile import LARGE_SEQS, splits

FEW = 8  # steps that say something about a factor on them
NEAR = 3  # steps near a corner that say what it is
TOKEN_CORNERS = (16, 32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12_288, 16_384)
KV_CORNERS = tuple(1024 * 4**power for power in range(7))
WHOLE_SEQS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
LIMIT_TRUST = 0.02  # in a sample that is an upper limit only
# how long a large prefill may be felt; one of these is chosen
HOT_MS = (40.0, 60.0, 80.0, 100.0, 125.0, 160.0)

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class ComputeSteps:
    """Steps that computed, one entry each; durations in microseconds.

    decode    whether the step is of decodes alone
    size      its sequences or, where it prefills, its tokens; padded ones count
    padded    to a bucket
    context   KV positions that it reads and does not compute; `longest` is of the longest decode
    rows      sequences among whose programs that one is split: of a decode step its size, of a captured one that
              prefills as many decodes as it has seats for
    heat      when the step began, as `measured.Heat` says, for each of HOT_MS: [steps, len(HOT_MS)]
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
    rows: IntArray
    heat: FloatArray
    attn_pairs: IntArray
    overlap: Mask
    idle: Mask
    free: Mask
    beside: Mask
    run: IntArray
    workload: IntArray
    inline: bool

    @property
    def large(self) -> Mask:
        """Decode steps, padded ones included, of LARGE_SEQS and more."""
        return self.decode & (self.size >= LARGE_SEQS)


@dataclass(frozen=True, slots=True, eq=False)
class ComputeFit:
    """`values` are keys of GpuProfile. `predicted` is of every step, those that were not fitted too; `unseen` by a fit
    that has lost the step's workload, NaN where the others do not tell what such a step takes."""

    values: dict[str, Any]
    predicted: FloatArray
    unseen: FloatArray


class _Common(NamedTuple):
    """Keys of GpuProfile that all steps have in common."""

    contention: float = 1.0
    whole_seqs: int = 1
    hot_decode: float = 0.0
    hot_padded: float = 0.0
    hot_ms: float = HOT_MS[0]

    def factor(self, steps: ComputeSteps) -> FloatArray:
        """Of each step, over its price."""
        return np.where(steps.overlap, self.contention, 1.0) * self.slower(steps)

    def slower(self, steps: ComputeSteps) -> FloatArray:
        """Because of the prefill before."""
        hot = np.where(steps.decode, self.hot_decode, np.where(steps.padded, self.hot_padded, 0.0))
        return np.asarray(1 + hot * self.heat(steps))

    def heat(self, steps: ComputeSteps) -> FloatArray:
        """The share of the last `hot_ms` that was spent in large prefills."""
        return np.asarray(steps.heat[:, HOT_MS.index(self.hot_ms)])


def fit_compute(steps: ComputeSteps) -> ComputeFit:
    """The fit to all steps."""
    everything = np.ones(len(steps.duration), dtype=bool)
    common = _Common()
    for _ in range(2):  # one depends on the other, weakly
        common = common._replace(whole_seqs=_whole_seqs(steps, common))
        common = common._replace(contention=_contention(steps, everything, common))
        common = _hot(steps, common)
    values, predicted = _fit(steps, everything, common)
    return ComputeFit(values, predicted, _unseen(steps, common, values))


def _hot(steps: ComputeSteps, common: _Common) -> _Common:
    """How much longer steps take behind large prefills, and for how long: what leaves the least of the decodes over."""
    everything = np.ones(len(steps.duration), dtype=bool)
    kinds = {"hot_decode": steps.decode, "hot_padded": ~steps.decode & steps.padded}
    if not steps.heat.any():
        return common
    found = []
    for hot_ms in HOT_MS:
        tried = common._replace(hot_ms=hot_ms)
        heat = tried.heat(steps)
        for _ in range(4):  # prices without them depend on them
            plain = _fit(steps, everything, tried)[1] / tried.slower(steps)
            for name, rows in kinds.items():
                if min(np.count_nonzero(heat[rows]), np.count_nonzero(heat[rows] == 0)) >= FEW:
                    base, more = fit([plain[rows], plain[rows] * heat[rows]], steps.duration[rows]).coefficients
                    tried = _Common(**{**tried._asdict(), name: float(more / base)})
        errors = np.abs(_fit(steps, everything, tried)[1] / steps.duration - 1)[steps.decode]
        found.append((float(np.minimum(errors, 0.2).sum()), tried))
    return min(found, key=lambda one: one[0])[1]


def _whole_seqs(steps: ComputeSteps, common: _Common) -> int:
    """The batch size from which on the longest sequence counts whole: the one that leaves the least over, of workloads
    that a fit knows and of those that it does not."""
    if not steps.decode.any():
        return 1

    def leftover(whole: int) -> float:
        total, tried = 0.0, common._replace(whole_seqs=whole)
        values, known = _fit(steps, steps.decode, tried)
        for guess in (known, _unseen(steps, tried, values, decodes_only=True)):
            errors = np.abs(guess / steps.duration - 1)[steps.decode & ~np.isnan(guess)]
            total += float(np.minimum(errors, 0.2).sum())
        return total

    largest = int(steps.size[steps.decode].max())
    candidates = WHOLE_SEQS[: bisect_left(WHOLE_SEQS, 2 * largest)]  # twice as many halve all shares: no other fit
    return min(candidates, key=leftover)


def _contention(steps: ComputeSteps, train: Mask, common: _Common) -> float:
    """Searched coarsely, then finely; the smaller one where it makes no difference."""
    if steps.inline or steps.overlap.all() or not steps.overlap.any():
        return 1.0
    weighed = steps.free & train

    def leftover(contention: float) -> float:
        predicted = _fit(steps, train, common._replace(contention=contention))[1]
        errors = np.abs(predicted[weighed] / steps.duration[weighed] - 1)
        total: float = np.minimum(errors, 0.2).sum() * (1 + 1e-3 * contention)
        return total

    found = 1.0
    for step, places in ((0.01, range(11)), (0.0025, range(-4, 5)), (0.0005, range(-5, 6))):
        tried = [found + step * place for place in places]
        found = min((one for one in tried if one >= 1), key=leftover)
    return found


def _unseen(steps: ComputeSteps, common: _Common, values: Mapping[str, Any], decodes_only: bool = False) -> FloatArray:
    """Each step as fits predict it that know nothing of its workload; NaN where these have too few of its size.
    `values` are of the fit to all."""
    predicted = np.full(len(steps.duration), np.nan)
    workloads = np.unique(steps.workload)
    if len(workloads) < 3:
        return predicted
    prefills = [(~steps.decode & (steps.padded == (name == "padded")), name) for name in ("eager", "padded")]
    kinds = [(steps.decode, values.get("decode_seqs", ()))] if steps.decode.any() else []
    kinds += [(rows, values[name]["tokens"]) for rows, name in prefills if rows.any() and not decodes_only]
    for workload in workloads:
        mine = steps.workload == workload
        guess = _fit(steps, ~mine & (steps.decode | (not decodes_only)), common)[1]
        for rows, corners in kinds:
            told = rows & mine & _told(steps.size, rows & ~mine, corners)
            predicted[told] = guess[told]
    return predicted


def _told(sizes: IntArray, others: Mask, corners: Sequence[int]) -> Mask:
    """Sizes of which others tell what they take: they have larger and smaller ones, and enough near each corner that a
    size is near. Without them that corner would be missing, which says nothing of fits that have it."""
    if not others.any():
        return np.zeros_like(others)
    near = np.stack(hats(sizes, corners), axis=1) > 0
    enough = np.count_nonzero(near[others], axis=0) >= NEAR
    between = (sizes[others].min() <= sizes) & (sizes <= sizes[others].max())
    return np.asarray(between & (enough | ~near).all(axis=1))


def _fit(steps: ComputeSteps, train: Mask, common: _Common) -> tuple[dict[str, Any], FloatArray]:
    """Keys of GpuProfile, and every step as they predict it."""
    factor = common.factor(steps)
    predicted = np.zeros(len(steps.duration))
    values: dict[str, Any] = {**common._asdict(), "idle_start_us": 0.0}
    if (steps.decode & train).any():
        _fit_decodes(steps, train, factor, values, predicted)
    for name, padded in (("eager", False), ("padded", True)):
        if (~steps.decode & train & (steps.padded == padded)).any():
            values[name] = _fit_prefills(steps, padded, train, factor, values, predicted)
    return values, predicted


def _fit_decodes(
    steps: ComputeSteps, train: Mask, factor: FloatArray, values: dict[str, Any], predicted: FloatArray
) -> None:
    fitted = steps.decode & train
    sizes, counts = np.unique(steps.size[fitted], return_counts=True)
    corners = [int(size) for size, count in zip(sizes, counts, strict=True) if count >= NEAR] or [int(sizes[0])]
    kv = steps.kv_tokens[fitted]
    kv_corners = corners_of(kv, KV_CORNERS, len(kv) // 20 + 3)[1:] or [int(kv.max())]
    idle = steps.idle[fitted]
    starts = not steps.inline and bool(idle.any() and not idle.all())

    def terms(rows: Mask) -> list[FloatArray]:
        own = [(steps.idle[rows] / factor[rows]).astype(float)] if starts else []
        share = _longest(steps, values)[rows]
        return [*hats(steps.size[rows], corners), share, *ramps(steps.kv_tokens[rows], kv_corners), *own]

    found = fit(terms(fitted), steps.duration[fitted] / factor[fitted], smooth=[range(len(corners))])
    left = steps.duration[fitted] / factor[fitted] - found.predicted
    for large in (False, True):  # sums are right for each of the tables that say what varies
        inside, chosen = (steps.size[fitted] >= LARGE_SEQS) == large, (np.array(corners) >= LARGE_SEQS) == large
        if inside.any() and chosen.any():
            found.coefficients[: len(corners)][chosen] += left[inside].mean()
    bases, slopes = np.split(found.coefficients, [len(corners) + 1])
    bases, values["us_per_longest"] = bases[:-1], float(bases[-1])
    if starts:
        slopes, values["idle_start_us"] = slopes[:-1], float(slopes[-1])
    values["decode_seqs"], values["decode_us"] = tuple(corners), tuple(bases.tolist())
    values["kv_tokens"], values["kv_us"] = (0, *kv_corners), (0.0, *np.cumsum(slopes).tolist())
    predicted[steps.decode] = np.stack(terms(steps.decode), axis=1) @ found.coefficients * factor[steps.decode]


def _longest(steps: ComputeSteps, values: dict[str, Any]) -> FloatArray:
    """KV positions of the longest decode that one program reads."""
    programs = np.array([splits(values["whole_seqs"], rows) for rows in range(int(steps.rows.max(initial=0)) + 1)])
    return np.asarray(steps.longest / programs[steps.rows])


def _fit_prefills(
    steps: ComputeSteps, padded: bool, train: Mask, factor: FloatArray, values: dict[str, Any], predicted: FloatArray
) -> dict[str, Any]:
    """Keys of PrefillPrice, for steps padded to a mixed bucket or for those launched kernel by kernel.

    A captured graph splits its decodes among as many programs as if it had one for each seat, so that the longest one
    counts; its buckets are corners, for they are steps and not a line. Where no step was launched kernel by kernel,
    captured ones of that size say what it takes.
    """
    rows = ~steps.decode & (steps.padded == padded)
    fitted = (rows if padded else ~steps.decode) & train
    sizes = steps.size[fitted]
    corners = np.unique(sizes).tolist() if padded else corners_of(sizes, TOKEN_CORNERS, NEAR)
    start = np.where(steps.idle, values["idle_start_us"], 0.0)
    names = ["us_per_attn_pair", "us_per_token_and_decode", "us_per_context_token", "us_per_longest"]

    def terms(chosen: Mask) -> list[FloatArray]:
        beside = np.where(steps.beside, steps.size, 0)
        linear = [steps.attn_pairs, beside, steps.context, *([_longest(steps, values)] if padded else [])]
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
