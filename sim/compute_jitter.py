"""What varies of steps on the compute lane, once they are priced: tables of measured over predicted.

A fit is closer to its own samples than to others. Where a workload has the share h in its own prediction, errors of a
fit that knows it spread too little by the root of 1 - h, and errors of one that has lost it too far by as much: the
geometric mean of the two is what others will see.
"""

from __future__ import annotations

import numpy as np

from sim.compute_fit import FEW, HOT_MS, ComputeFit, ComputeSteps, Mask
from sim.fitting import FloatArray, hats, table_of, widened
from sim.profile import GpuProfile

FEW_RUNS = 3  # runs that say something about runs
FEW_DECODES = 100  # decode steps, from which large and small ones, hot and cold ones have a table each
FEW_IN_TAILS = 40  # prefills, mixed steps, hot ones, from which these have a table each: 5% of them are two


def compute_jitter(steps: ComputeSteps, found: ComputeFit, gpu: GpuProfile) -> dict[str, tuple[float, ...]]:
    """Keys of JitterProfile: those of steps, and of whole runs."""
    large = _apart(steps.large, steps.decode, FEW_DECODES)
    tables, within = _of_runs(steps, found, {"decode": steps.decode & ~large, "decode_large": large})
    heat = steps.heat[:, HOT_MS.index(gpu.hot_ms)] > 0 if gpu.hot_ms else np.zeros_like(large)
    small = steps.decode & ~large
    hot = _apart(small & heat, small, FEW_DECODES)
    for name, rows in {"decode": small & ~hot, "decode_hot": hot, "decode_large": large}.items():
        unknowns = _corners_near(steps, rows, gpu.decode_seqs) + len(gpu.kv_us)
        tables[name] = table_of(widened(steps.duration[rows] / within[rows], unknowns))
    for name, price, more in (("eager", gpu.eager, 3), ("padded", gpu.padded, 4)):
        rows = ~steps.decode & steps.free & (steps.padded == (name == "padded"))
        knowing = steps.duration[rows] / found.predicted[rows]
        unseen = steps.duration[rows] / found.unseen[rows]
        usual = widened(knowing, _corners_near(steps, rows, price.tokens) + more)
        errors = np.where(np.isnan(unseen), usual, _as_others_see(knowing, unseen))
        everybody = np.ones(len(errors), dtype=bool)
        hot = _apart(heat[rows] & (name == "padded"), everybody, FEW_IN_TAILS)
        alone = _apart(~hot & ~steps.beside[rows], ~hot, FEW_IN_TAILS)
        of = {name: ~hot & ~alone, f"{name}_prefill": alone, f"{name}_hot": hot}
        tables |= {table: table_of(errors[mine], "weibull") for table, mine in of.items() if mine.any()}
    return tables


def _apart(some: Mask, of: Mask, least: int) -> Mask:
    """Some of these steps; none where there are fewer than that of them, or of the others."""
    enough = min(np.count_nonzero(some), np.count_nonzero(of & ~some)) >= least
    return some if enough else np.zeros_like(some)


def _of_runs(
    steps: ComputeSteps, found: ComputeFit, kinds: dict[str, Mask]
) -> tuple[dict[str, tuple[float, ...]], FloatArray]:
    """Tables of whole runs, and each step as it is predicted once it is known how slow its run was (unless runs have no
    table). Large steps are in a table with the others where there are too few runs of either."""
    tables, within = {}, found.predicted.copy()
    of = {"run": kinds["decode"], "run_large": kinds["decode_large"]}
    if min(len(_runs(steps, rows)) for rows in of.values()) < FEW_RUNS:
        of = {"run": steps.decode}
    unseen = np.where(np.isnan(found.unseen), found.predicted, found.unseen)
    for name, rows in of.items():
        runs = _runs(steps, rows)
        if len(runs) < FEW_RUNS:
            continue
        errors = np.zeros((2, len(runs)))
        for place, run in enumerate(runs):
            mine = rows & (steps.run == run)
            took = steps.duration[mine].sum()
            errors[:, place] = took / found.predicted[mine].sum(), took / unseen[mine].sum()
            within[mine] *= errors[0, place]
        tables[name] = table_of(_as_others_see(*errors))
    return tables, within


def _runs(steps: ComputeSteps, rows: Mask) -> list[int]:
    """Those that have enough of these steps."""
    found: list[int] = np.flatnonzero(np.bincount(steps.run[rows]) >= FEW).tolist()
    return found


def _corners_near(steps: ComputeSteps, rows: Mask, corners: tuple[int, ...]) -> int:
    return sum(bool(hat.any()) for hat in hats(steps.size[rows], corners))


def _as_others_see(knowing: FloatArray, unseen: FloatArray) -> FloatArray:
    """Measured over predicted: the geometric mean of the errors of both fits, on the side of the first."""
    first, second = np.log(knowing), np.log(unseen)
    return np.asarray(np.exp(np.sign(first) * np.sqrt(np.abs(first * second))))
