"""A scenario learned from somebody else's log of requests: its settings, its prices, and its requests as a trace.

What was learned from is also what it is compared with: errors say how well prices and log agree, and predict nothing.
`experiments/validate_external.py` holds requests back, and says how good predictions from such logs are.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from asyncsched.config import EngineConfig
from asyncsched.errors import ConfigError
from asyncsched.runs import UNKNOWN, IntArray, Run
from sim.replay import replay
from sim.request_fit import Fitted, Progress, fit, kv_per_weight, seen_before, workload_of

HOST_INSIDE = "host work is in the price of a step: what another depth or host would change, this scenario cannot say"
NO_ADMISSIONS = (
    "the log does not say when requests were admitted: what prompts cost is learned from the steps of others alone"
)
_ELSEWHERE = ("depth", "batching")  # a scenario says them as its mode


class Row(NamedTuple):
    """One figure over all requests, measured and simulated with the learned prices; `error` is in percent."""

    figure: str
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        return 100 * (self.simulated / self.measured - 1) if self.measured else 0.0


class Learned(NamedTuple):
    fitted: Fitted
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


def learn(run: Run, progress: Progress | None = None) -> Learned:
    """Raises ConfigError for a run that does not tell enough."""
    log = run.requests
    seen = seen_before(log, run.info.makespan_ns)
    try:
        fitted = fit(seen, run.info.engine, kv_per_weight=kv_per_weight(run), progress=progress)
    except ConfigError as error:
        if error.field != "cut":  # nothing was cut off here
            raise
        allowed = "nothing in it tells how long a step takes: use a log of requests with several tokens"
        raise ConfigError("run", run.info.name, allowed) from None
    replayed = replay(workload_of(run), fitted.engine, fitted.prices)
    measured, simulated = (
        _figures(log.arrival_ns, times.first_ns, times.last_ns, log.output_tokens) for times in (log, replayed)
    )
    rows = tuple(Row(name, value, simulated[name]) for name, value in measured.items())
    more = (NO_ADMISSIONS,) if (log.scheduled_ns == UNKNOWN).all() else ()
    return Learned(fitted, rows, (*run.info.notes, *fitted.notes, *more, HOST_INSIDE))


def scenario_of(run: Run, fitted: Fitted, trace: str) -> dict[str, Any]:
    """The scenario as it is written; `trace` is the file that `trace_of` fills."""
    engine = fitted.engine
    told = [f.name for f in fields(EngineConfig) if f.name in run.info.engine or getattr(engine, f.name) != f.default]
    return {
        "description": f"{run.info.name}: {len(run.requests)} requests, and prices learned from them",
        **({"mode": "static"} if engine.batching == "static" else {"depth": engine.depth}),
        "engine": {name: getattr(engine, name) for name in told if name not in _ELSEWHERE},
        "gpu": fitted.prices.gpu_section(),
        "workload": {"kind": "trace", "trace": trace, "format": "csv"},
    }


def trace_of(run: Run) -> str:
    """The requests as a trace in the plain CSV format."""
    log = run.requests
    columns = (column.tolist() for column in (log.arrival_ns, log.prompt_tokens, log.output_tokens))
    lines = [f"{arrival},{prompt},{output}\n" for arrival, prompt, output in zip(*columns, strict=True)]
    return "".join(["arrival_ns,input,output\n", *lines])


def _figures(arrival: IntArray, first: IntArray, last: IntArray, tokens: IntArray) -> dict[str, float]:
    """Means, in milliseconds, and the makespan, by the keys of a summary."""
    many = tokens > 1
    means = {
        "ttft_ms.mean": first - arrival,
        "tpot_ms.mean": (last - first)[many] / (tokens[many] - 1),
        "e2el_ms.mean": last - arrival,
    }
    found = {name: float(np.mean(values)) / 1e6 for name, values in means.items() if len(values)}
    return {**found, "makespan_s": int(last.max()) / 1e9}
