"""Learns what a step costs from a log of requests alone, for engines whose steps nobody recorded.

What a log shows of a request is a sum: from first to last token the steps that it was in, from admission to first token
the step in flight and those of its prompt. Which steps those were, and how large, the simulator says, running the same
arrivals and lengths; so prices make steps and steps make prices, and both are repeated until they agree. Each request
gives one equation per sum, linear in the prices:

    measured seconds = sum over its steps of (step + tokens + KV tokens read + prefill in it + prompt tokens + pairs)

Prices cannot be negative. A token of a prompt costs what a token of a decode costs, and something on top: so many rows
in a decode step are never dearer than as many prompt tokens. Equations count by the inverse root of their number of
steps, and less where they are off (Huber). Host work is not told apart: it is in the price of the step it delays.

A fit sees a log through `seen_before` only: what happened after the cut is not there. Of a request that was not
finished by then it knows what was asked for, not what it got.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from asyncsched.config import EngineConfig
from asyncsched.errors import ConfigError
from asyncsched.plan import StepShape
from asyncsched.runs import UNKNOWN, IntArray, RequestLog, Run
from sim.costs import Around, DecodePricer, DecodePrices
from sim.hardware import shape_by_name
from sim.replay import NO_STEP, Replayed, Workload, replay

FloatArray = NDArray[np.float64]
Progress = Callable[[int, int], None]

PRICES = ("step", "token", "kv_token", "prefill_step", "prefill_token", "attn_pair")
STEP, KV_TOKEN = PRICES.index("step"), PRICES.index("kv_token")
ROUNDS = 12  # of simulating and fitting; the change of the last one is reported
DAMPING = 0.5  # share of a round's answer that is taken over: undamped, prices and steps swing about the solution
HUBER = 1.345  # in standard deviations: 95% efficient where errors are normal
PRIOR_SPREAD = 0.5  # matrix products and attention do not reach the same share of the memory's speed
QUIET = 3.0  # a prompt may take this many times as long as is usual
UNLIMITED_POOL = "KV block count unknown: nobody waited for blocks before the cut, so it is taken as unlimited"
LONGEST_CONTEXT = 131_072  # where a log does not say max_model_len: only there not to be in the way


class Seen(NamedTuple):
    """What of a log was known at `cut_ns`: requests that had come, UNKNOWN for whatever had not happened."""

    cut_ns: int
    arrival_ns: IntArray
    prompt_tokens: IntArray
    max_tokens: IntArray
    output_tokens: IntArray
    scheduled_ns: IntArray
    first_ns: IntArray
    last_ns: IntArray


def seen_before(log: RequestLog, cut_ns: int) -> Seen:
    come = log.arrival_ns <= cut_ns
    scheduled, first, last = (
        np.where(times[come] <= cut_ns, times[come], UNKNOWN) for times in (log.scheduled_ns, log.first_ns, log.last_ns)
    )
    output = np.where((last != UNKNOWN) & log.completed[come], log.output_tokens[come], UNKNOWN)
    asked = log.max_tokens[come]
    return Seen(cut_ns, log.arrival_ns[come], log.prompt_tokens[come], asked, output, scheduled, first, last)


@dataclass(frozen=True, slots=True)
class StepPrices:
    """A cost model: the forward pass has all of it. Seconds per unit of each of PRICES."""

    seconds: tuple[float, ...]

    def gpu_section(self) -> dict[str, Any]:
        """The same prices as a scenario's `gpu`."""
        us = dict(zip(PRICES, (1e6 * price for price in self.seconds), strict=True))
        return {
            "kind": "constant",
            "step_us": us["step"],
            "us_per_decode_seq": us["token"],
            "us_per_prefill_token": us["token"] + us["prefill_token"],
            "us_per_kv_token": us["kv_token"],
            "prefill_step_us": us["prefill_step"],
            "us_per_attn_pair": us["attn_pair"],
        }

    def forward_ns(self, shape: StepShape, step: int) -> int:
        return round(1e9 * sum(price * size for price, size in zip(self.seconds, sizes(shape), strict=True)))

    def host_ns(self, kind: str, shape: StepShape, step: int) -> int:
        return 0

    def h2d_ns(self, shape: StepShape, step: int) -> int:
        return 0

    def d2h_ns(self, shape: StepShape, step: int) -> int:
        return 0

    def offload_ns(self, shape: StepShape, step: int) -> int:
        return 0

    def restore_ns(self, shape: StepShape, step: int) -> int:
        return 0

    def output_sync_ns(self) -> int:
        return 0

    def decode_pricer(self, shape: StepShape) -> DecodePricer:
        n, free = shape.num_seqs, (Around(0, 0, 0, 0, 0, 0),)

        def prices(kv_tokens: int, step: int, count: int) -> DecodePrices:
            shapes = [
                shape._replace(kv_tokens=read, attn_pairs=read) for read in range(kv_tokens, kv_tokens + n * count, n)
            ]
            return DecodePrices(free, [self.forward_ns(one, step) for one in shapes])

        return prices


@dataclass(frozen=True, slots=True)
class Fitted:
    """
    prices      what was learned
    engine      the settings that the log left open are filled in, and `notes` says how
    equations   how many there were of each kind
    residual    root mean square of what is left, as a share of the measured seconds
    last_change of the newest round, relative to a step's price: near 0 where prices and steps agree
    """

    prices: StepPrices
    engine: EngineConfig
    equations: Mapping[str, int]
    residual: float
    last_change: float
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "prices_us": {name: 1e6 * price for name, price in zip(PRICES, self.prices.seconds, strict=True)},
            "equations": dict(self.equations),
            "residual": self.residual,
            "last_change": self.last_change,
            "notes": list(self.notes),
        }


def fit(
    seen: Seen, settings: Mapping[str, Any], *, kv_per_weight: float | None = None, progress: Progress | None = None
) -> Fitted:
    """Prices from what was seen. Raises ConfigError where that is not enough.

    kv_per_weight  bytes of KV per token over bytes of weights, where the model is known: see `solve`
    progress       called with rounds done and rounds in all
    """
    unlimited = _with_defaults(settings)
    if not (seen.first_ns != UNKNOWN).any():
        raise ConfigError("cut", seen.cut_ns / 1e9, "no request had a token by then: cut later")
    wait = first_wait_for_blocks(seen, unlimited) if "num_blocks" not in settings else None
    if wait is None:
        notes = () if "num_blocks" in settings else (UNLIMITED_POOL,)
        return replace(_fit(seen, unlimited, kv_per_weight, _part(progress, 0, 1)), notes=notes)
    held = wait.held(unlimited.block_size, wait.tokens_by_first_tokens(seen))
    guess = _fit(seen, replace(unlimited, num_blocks=sum(held) // 2), kv_per_weight, _part(progress, 0, 2))
    held = wait.held(unlimited.block_size, wait.tokens_by_simulation(seen, unlimited, guess.prices))
    pool = sum(held) // 2
    note = f"KV block count unknown: {pool} is the middle of {held[0]} to {held[1]}, from the first wait for blocks"
    known = replace(unlimited, num_blocks=pool)
    return replace(_fit(seen, known, kv_per_weight, _part(progress, 1, 2)), notes=(note,))


def _part(progress: Progress | None, part: int, of: int) -> Callable[[int], None]:
    """To be called with the rounds done of one of several fits."""
    return lambda done: None if progress is None else progress(part * ROUNDS + done, of * ROUNDS)


def _fit(seen: Seen, engine: EngineConfig, kv_per_weight: float | None, done: Callable[[int], None]) -> Fitted:
    workload, until = _workload(seen)
    prices = _first_guess(seen)
    kinds: dict[str, int] = {}
    change = left = 0.0
    for number in range(ROUNDS):
        replayed = replay(workload, engine, StepPrices(tuple(prices)), until=until)
        rows, seconds, kinds = equations(seen, replayed)
        answer = solve(rows, seconds, kv_per_weight, overlap=rows[:, STEP].sum() / len(replayed.shapes))
        share = 1.0 if number == 0 else DAMPING
        change = float(np.abs(rows @ (answer - prices)).sum() / np.abs(seconds).sum())
        prices = prices + share * (answer - prices)
        done(number + 1)
        left = float(np.sqrt(np.mean(np.square(rows @ prices - seconds))) / np.mean(seconds))
    return Fitted(StepPrices(tuple(prices.tolist())), engine, kinds, left, change, ())


def _with_defaults(settings: Mapping[str, Any]) -> EngineConfig:
    """What the log says, a context that is not in the way, and a pool that nobody has to wait for. Raises ConfigError
    where the log does not say what has no such value."""
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        if name not in settings:
            raise ConfigError(f"engine.{name}", None, "the run does not say it, and every prediction depends on it")
    full = {"max_model_len": LONGEST_CONTEXT, **settings}
    if "num_blocks" not in full:
        config = EngineConfig(**full)
        full["num_blocks"] = config.max_num_seqs * config.max_blocks_per_seq
    return EngineConfig(**full)


class Wait(NamedTuple):
    """At `now_ns` request `head` waits for KV blocks. Those in `decoding` have their first token, those in `starting`
    were admitted and have none."""

    now_ns: int
    head: int
    decoding: IntArray
    starting: IntArray
    prompt_tokens: IntArray

    def held(self, block_size: int, tokens: IntArray) -> tuple[int, int]:
        """Least and most blocks of the pool: what the others hold fits, with the prompt that waits it does not.
        `tokens` is how many output tokens each in `decoding` has."""
        held = -(-(self.prompt_tokens[self.decoding] + tokens) // block_size)
        more = -(-self.prompt_tokens[[*self.starting.tolist(), self.head]] // block_size)
        return int(held.sum()), int(held.sum() + more.sum())

    def tokens_by_first_tokens(self, seen: Seen) -> IntArray:
        """One for each moment since its first at which anybody got a first token: too few where steps have none."""
        moments = np.unique(seen.first_ns[(seen.first_ns != UNKNOWN) & (seen.first_ns <= self.now_ns)])
        return np.asarray(len(moments) - np.searchsorted(moments, seen.first_ns[self.decoding], side="left"))

    def tokens_by_simulation(self, seen: Seen, unlimited: EngineConfig, prices: StepPrices) -> IntArray:
        """One for each simulated step since its first token: nobody had to wait for blocks before."""
        came = np.sort(np.concatenate((self.decoding, self.starting)))
        lengths = np.where(seen.output_tokens != UNKNOWN, seen.output_tokens, seen.max_tokens)
        replayed = replay(Workload(seen.arrival_ns[came], seen.prompt_tokens[came], lengths[came]), unlimited, prices)
        first = replayed.first[np.searchsorted(came, self.decoding)]
        steps = np.searchsorted(replayed.ended_ns, self.now_ns, side="right")
        return np.asarray(np.maximum(steps - first, 1))


def first_wait_for_blocks(seen: Seen, config: EngineConfig) -> Wait | None:
    """None where nobody waited for any.

    A request waits for blocks when it has come and there is a seat, and yet for as long as it usually takes from
    admission to first token nobody is admitted and nobody gets a first token; while somebody's prompt may be what takes
    the time, for QUIET times as long.
    """
    scheduled, first = seen.scheduled_ns, seen.first_ns
    started = (first != UNKNOWN) & (scheduled != UNKNOWN)
    if not started.any():
        return None
    usual_ns = float(np.median((first - scheduled)[started]))
    moments = np.unique(np.concatenate((scheduled[scheduled != UNKNOWN], first[first != UNKNOWN], [seen.cut_ns])))
    for place in np.flatnonzero(np.diff(moments) > usual_ns).tolist():
        now = int(moments[place])
        waiting = np.flatnonzero((seen.arrival_ns <= now) & ((scheduled == UNKNOWN) | (scheduled > now)))
        seated = (scheduled != UNKNOWN) & (scheduled <= now) & ((seen.last_ns == UNKNOWN) | (seen.last_ns > now))
        has_token = (first != UNKNOWN) & (first <= now)
        decoding, starting = np.flatnonzero(seated & has_token), np.flatnonzero(seated & ~has_token)
        quiet_ns = usual_ns * (QUIET if len(starting) else 1)
        free_seat = np.count_nonzero(seated) < config.max_num_seqs
        if len(waiting) and free_seat and moments[place + 1] - now > quiet_ns:
            return Wait(now, int(waiting[0]), decoding, starting, seen.prompt_tokens)
    return None


def sizes(shape: StepShape) -> tuple[float, ...]:
    """Of a step, in the order of PRICES. Pairs are those that a prefill computes beyond one per KV token read."""
    prefill = shape.num_prefill_tokens
    return (
        1.0,
        float(shape.num_tokens),
        float(shape.kv_tokens),
        float(prefill > 0),
        float(prefill),
        float(shape.attn_pairs - shape.kv_tokens if prefill else 0),
    )


def equations(seen: Seen, replayed: Replayed) -> tuple[FloatArray, FloatArray, dict[str, int]]:
    """One row of sizes per measured sum, its seconds, and how many there are of each kind."""
    each = np.array([sizes(shape) for shape in replayed.shapes])
    up_to = np.vstack((np.zeros(len(PRICES)), np.cumsum(each, axis=0)))
    decoding = np.flatnonzero((seen.output_tokens > 1) & (replayed.last != NO_STEP))
    rows = [up_to[replayed.last[decoding] + 1] - up_to[replayed.first[decoding] + 1]]
    seconds = [(seen.last_ns - seen.first_ns)[decoding] / 1e9]
    starting = np.flatnonzero((seen.first_ns != UNKNOWN) & (seen.scheduled_ns != UNKNOWN) & (replayed.first != NO_STEP))
    admitted = replayed.admitted[starting]
    rows.append(up_to[replayed.first[starting] + 1] - up_to[admitted - _in_flight(replayed)[admitted]])
    seconds.append((seen.first_ns - seen.scheduled_ns)[starting] / 1e9)
    return np.vstack(rows), np.concatenate(seconds), {"decode": len(decoding), "prefill": len(starting)}


def solve(
    rows: FloatArray, seconds: FloatArray, kv_per_weight: float | None = None, *, overlap: float = 1.0
) -> FloatArray:
    """Prices of at least 0 with rows @ prices close to seconds: least squares, robust against a few wild equations.

    While the pool is full, every step reads as much KV, and no log of that time tells a step's fixed price from that of
    KV. Both are mostly the reading of memory, weights here and KV there. So with `kv_per_weight` there is one more
    equation: a KV token costs that much of a step, give or take PRIOR_SPREAD of it. A step is in `overlap` equations at
    once, which are that much less evidence than they seem.
    """
    even = 1 / np.sqrt(np.maximum(rows[:, 0], 1))
    weights = even.copy()
    prices = nonnegative_least_squares(rows * weights[:, None], seconds * weights)
    belief = np.zeros((0, rows.shape[1]))
    for _ in range(30):
        errors = np.abs(rows @ prices - seconds) * even
        spread = 1.4826 * float(np.median(errors))  # of a normal distribution, from its median deviation
        if spread == 0:
            break
        weights = even * np.sqrt(np.minimum(1, HUBER * spread / np.maximum(errors, 1e-300)))
        if kv_per_weight is not None and prices[STEP] > 0:
            belief = np.zeros((1, rows.shape[1]))
            belief[0, STEP], belief[0, KV_TOKEN] = -kv_per_weight, 1.0
            belief *= spread * np.sqrt(overlap) / (PRIOR_SPREAD * kv_per_weight * prices[STEP])
        prices = nonnegative_least_squares(
            np.vstack((rows * weights[:, None], belief)), np.concatenate((seconds * weights, np.zeros(len(belief))))
        )
    return prices


def nonnegative_least_squares(a: FloatArray, b: FloatArray) -> FloatArray:
    """x >= 0 that minimises |a x - b|, by Lawson and Hanson's active sets; a column of zeros gets 0."""
    scale = np.sqrt(np.square(a).sum(axis=0))
    used = scale > 0
    scale[~used] = 1
    gram, target = (a / scale).T @ (a / scale), (a / scale).T @ b
    x = np.zeros(len(target))
    free = np.zeros(len(target), dtype=np.bool_)
    for _ in range(3 * len(target)):
        gradient = np.where(used & ~free, target - gram @ x, -1.0)
        if gradient.max() <= 1e-12 * np.abs(target).max():
            break
        free[int(np.argmax(gradient))] = True
        while True:
            inside = np.flatnonzero(free)
            step = np.zeros_like(x)
            step[inside] = np.linalg.lstsq(gram[np.ix_(inside, inside)], target[inside], rcond=None)[0]
            leaving = inside[step[inside] <= 0]
            if not len(leaving):
                x = step
                break
            reach = float(np.min(x[leaving] / np.maximum(x[leaving] - step[leaving], 1e-300)))
            x = x + reach * (step - x)
            free &= x > 1e-14
            x[~free] = 0.0
    return np.asarray(x / scale)


def _in_flight(replayed: Replayed) -> IntArray:
    """Per step: 1 where the one before it was still running when it was planned."""
    planned = replayed.planned_ns
    return np.concatenate(([0], (planned[1:] < replayed.ended_ns[:-1]).astype(np.int64)))


def _first_guess(seen: Seen) -> FloatArray:
    """Every step takes the same: as one of the fastest decoding, or half of the shortest way to a first token."""
    many = seen.output_tokens > 1
    started = (seen.first_ns != UNKNOWN) & (seen.scheduled_ns != UNKNOWN)
    guess = np.zeros(len(PRICES))
    if many.any():
        guess[STEP] = ((seen.last_ns - seen.first_ns)[many] / (seen.output_tokens[many] - 1)).min() / 1e9
    elif started.any():
        guess[STEP] = (seen.first_ns - seen.scheduled_ns)[started].min() / 2e9
    if guess[STEP] <= 0:
        raise ConfigError("cut", seen.cut_ns / 1e9, "nothing was measured by then that tells how long a step takes")
    return guess


def _workload(seen: Seen) -> tuple[Workload, IntArray]:
    """What had come by the cut, and how many tokens of each must be out before the simulation may end."""
    finished = seen.output_tokens != UNKNOWN
    until = np.where(finished, seen.output_tokens, (seen.first_ns != UNKNOWN).astype(np.int64))
    output = np.where(finished, seen.output_tokens, seen.max_tokens)
    return Workload(seen.arrival_ns, seen.prompt_tokens, np.maximum(output, 1)), until


def workload_of(run: Run) -> Workload:
    """All of a run's requests, with the lengths they had."""
    log = run.requests
    return Workload(log.arrival_ns, log.prompt_tokens, np.maximum(log.output_tokens, 1))


def kv_per_weight(run: Run) -> float | None:
    """Bytes of KV per token over bytes of weights; None for a model that is not registered."""
    shape = shape_by_name(str(run.info.model.get("name", "")))
    if shape is None:
        return None
    return shape.kv_bytes_per_token / ((shape.body_params + shape.head_params) * shape.dtype_bytes)
