"""A predicted run beside the measured one: signed errors of every figure, how often intervals hold, and where
decisions part. Knows only `Run`: who made the prediction makes no difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncsched.plan import StepShape
from asyncsched.runs import SIZES, UNKNOWN, Run
from sim.host_speed import SLOWEST, probed
from sim.measured import MeasuredCosts, jitter_of, step_kind
from sim.predict import heats, longest_contexts, predict, replay, seats
from sim.profile import QUANTILES, STEP_KINDS, Profile

STATISTICS = ("mean", "p50", "p90", "p99")
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2el_ms")
IDLE = ("host", "h2d", "back_to_back", "no_work")
POINTS = ("gpu_active", *(f"idle.{cause}" for cause in IDLE))
"""Figures that are shares of the makespan: their errors are differences, in points."""
COVERED = 0.9

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `predicted` is without jitter, where every step takes its mean. `error` is that over measured - 1 in
    percent, or the difference in points or in counts.

    low, middle, high   what 5, 50 and 95% of the predictions with jitter are below; None without such predictions.
                        Figures that live of slow steps (ITL p90) may be predicted below all three
    """

    figure: str
    measured: float
    predicted: float
    error: float
    unit: str
    low: float | None = None
    middle: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Coverage:
    """Of `count` steps of a kind, the share whose time on the compute lane lies in the predicted 90% interval."""

    kind: str
    count: int
    share: float


@dataclass(frozen=True, slots=True)
class Difference:
    """The first decision that differs: its number, and both sides' words ("" where one has no more)."""

    number: int
    measured: str
    predicted: str


@dataclass(frozen=True, slots=True)
class Validation:
    """`timed` is the first difference where arrivals come by the clock, `replayed` where they enter before the same
    plans; None for none. `decisions` counts the measured ones; 0 where nobody kept them."""

    run: str
    rows: tuple[Row, ...]
    coverage: tuple[Coverage, ...]
    decisions: int
    timed: Difference | None
    replayed: Difference | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def row(self, figure: str) -> Row:
        return next(row for row in self.rows if row.figure == figure)


def figures(run: Run) -> dict[str, float]:
    """Every figure that the run can tell, by dotted name; latencies in milliseconds, shares of 1."""
    requests, seconds = run.requests, run.info.makespan_ns / 1e9
    found: dict[str, float] = {"makespan_s": seconds}
    if seconds:
        found["output_throughput"] = float(requests.output_tokens.sum()) / seconds
    for name, values in latencies(run).items():
        if len(values):
            found[f"{name}.mean"] = float(values.mean())
            found |= {f"{name}.p{p}": float(np.percentile(values, p)) for p in (50, 90, 99)}
    if len(run.steps):
        found["gpu_active"] = float(run.steps.duration("compute").sum()) / max(run.info.makespan_ns, 1)
        found |= {f"idle.{cause}": share for cause, share in idle_shares(run).items()}
        found["steps"] = float(len(run.steps))
    if run.info.preemptions != UNKNOWN:
        found["preemptions"] = float(run.info.preemptions)
    return found


def latencies(run: Run) -> dict[str, FloatArray]:
    """TTFT, TPOT, ITL and E2EL of completed requests, in milliseconds; ITL per token."""
    requests = run.requests
    done = requests.completed & (requests.output_tokens > 0)
    many = done & (requests.output_tokens > 1)
    gaps = [requests.gaps_ns[number] for number in np.flatnonzero(many)] if requests.gaps_ns else []
    span = (requests.last_ns - requests.first_ns)[many]
    return {
        "ttft_ms": (requests.first_ns - requests.arrival_ns)[done] / 1e6,
        "tpot_ms": span / (requests.output_tokens[many] - 1) / 1e6,
        "itl_ms": np.concatenate(gaps) / 1e6 if gaps else np.zeros(0),
        "e2el_ms": (requests.last_ns - requests.arrival_ns)[done] / 1e6,
    }


def idle_shares(run: Run) -> dict[str, float]:
    """Shares of the makespan in which the compute lane was idle, by cause.

    no_work       no request was there
    back_to_back  the next step was enqueued already: what the device needs between two steps
    h2d           the step was launched, its inputs were not there
    host          everything else: the host had not launched the step, or was delivering the last one
    """
    steps, makespan = run.steps, run.info.makespan_ns
    computed = steps.has("compute")
    start, end = steps.start("compute")[computed], steps.end("compute")[computed]
    launched, copied = steps.end("launch")[computed], steps.end("h2d")[computed]
    filled = steps.end("fill")[computed]
    before = np.concatenate(([0], np.maximum.accumulate(end)[:-1])) if len(end) else end
    gap = np.maximum(start - before, 0)
    nobody = np.array([_nobody(run, int(b), int(s)) for b, s in zip(before, start, strict=True)], dtype=np.int64)
    rest = gap - nobody
    queued = (filled <= before) & (before > 0)
    behind = np.where(queued, rest, 0)
    input_copy = np.where(queued, 0, np.clip(np.minimum(copied, start) - np.maximum(launched, before), 0, rest))
    tail = max(makespan - int(end.max(initial=0)), 0)
    total = max(makespan, 1)
    return {
        "host": float((rest - behind - input_copy).sum() + tail) / total,
        "h2d": float(input_copy.sum()) / total,
        "back_to_back": float(behind.sum()) / total,
        "no_work": float(nobody.sum()) / total,
    }


def _nobody(run: Run, start: int, end: int) -> int:
    """Time from start to end in which every request that had arrived was done."""
    requests = run.requests
    if end <= start:
        return 0
    done = int(requests.last_ns[requests.arrival_ns < start].max(initial=0))
    coming = requests.arrival_ns[requests.arrival_ns >= start]
    first = int(coming.min()) if len(coming) else end
    return max(min(first, end) - max(done, start), 0)


def compare(measured: Run, predicted: Run, drawn: Sequence[Run] = ()) -> tuple[Row, ...]:
    """A row for each figure that both can tell. `drawn` are predictions with jitter, for intervals."""
    truth, guess = figures(measured), figures(predicted)
    others = [figures(run) for run in drawn]
    rows = []
    for name, value in truth.items():
        if name not in guess:
            continue
        error, unit = _error(name, value, guess[name])
        spread = [other[name] for other in others if name in other]
        drawn_at = np.quantile(spread, (0.05, 0.5, 0.95)).tolist() if spread else (None, None, None)
        rows.append(Row(name, value, guess[name], error, unit, *drawn_at))
    return tuple(rows)


def _error(name: str, measured: float, predicted: float) -> tuple[float, str]:
    if name in POINTS:
        return 100 * (predicted - measured), "points"
    if name in ("preemptions", "steps"):
        return predicted - measured, "count"
    return (100 * (predicted / measured - 1) if measured else 0.0), "%"


def coverage(run: Run, profile: Profile) -> tuple[Coverage, ...]:
    """How many of the run's steps took a time on the compute lane that the profile expects of nine in ten."""
    steps = run.steps
    if not len(steps):
        return ()
    costs = MeasuredCosts(profile, depth=int(run.info.engine.get("depth", 2)), seats=seats(run), seed=None)
    before = np.concatenate(([0], np.maximum.accumulate(steps.end("compute"))[:-1]))
    idle = steps.end("fill") >= before
    inside: dict[str, list[bool]] = {kind: [] for kind in STEP_KINDS}
    interval = cache(lambda *tables: _interval(profile, *tables))
    longest, heat = longest_contexts(run), heats(run, profile.gpu.hot_ms)
    shapes = _shapes(run)
    for row in np.flatnonzero(steps.has("compute")).tolist():
        shape = shapes[row]
        kind = step_kind(shape)
        low, high = interval(*jitter_of(profile.jitter, shape, float(heat[row])))
        price = costs.forward_ns(shape, int(longest[row]), 0, bool(idle[row]), float(heat[row]))
        bounds = price * low, price * high
        if not shape.bucket and not shape.mixed_bucket and not costs.inline:
            head, rest = costs.launch_ns(shape, 0, busy=not idle[row])
            begun = max(int(before[row] - steps.end("fill")[row]), head)  # so far the launch is when the step starts
            least, most = (
                (head + rest) * ratio - begun + costs.eager_tail_ns for ratio in interval("eager_launch", "host")
            )
            bounds = max(bounds[0], least), max(bounds[1], most)
        duration = int(steps.duration("compute")[row])
        inside[kind].append(bounds[0] <= duration <= bounds[1])
    return tuple(Coverage(kind, len(one), float(np.mean(one))) for kind, one in inside.items() if one)


def host_speed(run: Run, profile: Profile) -> float:
    """How long the host took over plans and commits, over what the profile says of them: plain Python, which touches no
    device. 1 for a run without steps."""
    steps = run.steps
    costs = MeasuredCosts(profile, depth=int(run.info.engine.get("depth", 2)), seats=seats(run), seed=None)
    took, usual = 0.0, 0.0
    ends = np.concatenate(([0], np.maximum.accumulate(steps.end("compute")))) if len(steps) else np.zeros(1)
    order = np.sort(steps.start("compute")) if len(steps) else np.zeros(0)
    for kind in ("plan", "commit"):
        begins = steps.start(kind)
        busy = ends[np.searchsorted(order, begins)] > begins
        for row, shape in enumerate(_shapes(run)):
            price = costs.host_ns(kind, shape, 0, bool(busy[row]))
            took += min(float(steps.duration(kind)[row]), SLOWEST * price)
            usual += price
    return took / usual if usual else 1.0


def _shapes(run: Run) -> list[StepShape]:
    steps = run.steps
    names = [name for name in StepShape._fields if name in SIZES]
    columns = [steps[name].tolist() for name in names]
    tokens = (steps["num_decodes"] + steps["num_prefill_tokens"]).tolist()
    return [
        StepShape(num_tokens=count, **dict(zip(names, values, strict=True)))
        for count, *values in zip(tokens, *columns, strict=True)
    ]


def _interval(profile: Profile, of_steps: str, of_runs: str) -> tuple[float, float]:
    """5 and 95% of measured over predicted, by the tables of these names: of steps within a run, and of runs."""
    tables = [np.array(getattr(profile.jitter, name)) if name else np.zeros(0) for name in (of_steps, of_runs)]
    even = (np.arange(400) + 0.5) / 400
    draws = [np.interp(even, QUANTILES, table) if len(table) else np.ones(1) for table in tables]
    margin = (1 - COVERED) / 2
    low, high = np.quantile(np.outer(*draws), (margin, 1 - margin))
    return float(low), float(high)


def first_difference(measured: Sequence[str], predicted: Sequence[str]) -> Difference | None:
    for number in range(max(len(measured), len(predicted))):
        mine = measured[number] if number < len(measured) else ""
        theirs = predicted[number] if number < len(predicted) else ""
        if mine != theirs:
            return Difference(number, mine, theirs)
    return None


def occupancy(run: Run) -> Mapping[str, tuple[FloatArray, NDArray[np.int64]]]:
    """Requests running and waiting over time: times in seconds, and how many from then on."""
    requests = run.requests
    seen = requests.scheduled_ns != UNKNOWN
    ended = requests.last_ns[seen]
    return {
        "running": _counts(requests.scheduled_ns[seen], ended),
        "waiting": _counts(requests.arrival_ns[seen], requests.scheduled_ns[seen]),
    }


def _counts(begins: NDArray[np.int64], ends: NDArray[np.int64]) -> tuple[FloatArray, NDArray[np.int64]]:
    times = np.concatenate((begins, ends))
    changes = np.concatenate((np.ones(len(begins), dtype=np.int64), -np.ones(len(ends), dtype=np.int64)))
    order = np.argsort(times, kind="stable")
    return times[order] / 1e9, np.cumsum(changes[order])


class Judged(NamedTuple):
    """A validation, and the runs it compared."""

    validation: Validation
    measured: Run
    predicted: Run


def judge(run: Run, profile: Profile, *, draws: int = 0) -> Judged:
    """Predicts the run, once without jitter and `draws` times with it, and says how far off that is. Where a probe was
    read, it is predicted for a host as quick as that says."""
    profile = probed(profile, run)
    predicted = predict(run, profile)
    drawn = [predict(run, profile, seed=seed) for seed in range(draws)]
    kept = bool(run.decisions)
    entered = kept and not (run.requests.entered_plan == UNKNOWN).any()
    validation = Validation(
        run.info.name,
        compare(run, predicted, drawn),
        coverage(run, profile),
        len(run.decisions),
        first_difference(run.decisions, predicted.decisions) if kept else None,
        first_difference(run.decisions, replay(run)) if entered else None,
    )
    return Judged(validation, run, predicted)
