"""What each figure of a summary is called, how it is written, and what it means in a phrase."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Figure(NamedTuple):
    """`key` is dotted; a unit of "share" is a part of 1, shown in percent."""

    key: str
    label: str
    unit: str
    meaning: str

    @property
    def axis_label(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit else self.label


_LATENCIES = (
    Figure("ttft_ms", "time to first token", "ms", "from arrival, queueing included"),
    Figure("tpot_ms", "time per output token", "ms", "after the first token, averaged over a request"),
    Figure("itl_ms", "inter-token latency", "ms", "between two tokens of a request"),
    Figure("e2el_ms", "end-to-end latency", "ms", "from arrival to the last token"),
)
_STATISTICS = {"mean": "mean", "p50": "median", "p90": "p90", "p95": "p95", "p99": "p99"}

FIGURES = {
    figure.key: figure
    for figure in (
        Figure("makespan_s", "total time", "s", "from the start to the last token"),
        Figure("output_throughput", "throughput", "tokens/s", "output tokens over total time"),
        Figure("gpu_active", "GPU active", "share", "of the total time, the GPU computed"),
        Figure("exposed_host_s", "exposed host time", "s", "the GPU waited for the host to prepare a batch"),
        Figure("idle_s.host", "GPU idle: host", "s", "it waited for the host to prepare a batch"),
        Figure("idle_s.h2d", "GPU idle: input copy", "s", "it waited for a batch to be copied in"),
        Figure("idle_s.output_sync", "GPU idle: output", "s", "it was held until the output had reached the host"),
        Figure("idle_s.no_work", "GPU idle: no work", "s", "no request was there to work on"),
        Figure("busy_s.host", "host busy", "s", "the host planned, filled, launched or committed"),
        Figure("busy_s.h2d", "input copies busy", "s", "the lane of input copies was busy"),
        Figure("busy_s.compute", "GPU busy", "s", "the GPU computed"),
        Figure("busy_s.d2h", "output copies busy", "s", "the lane of output copies was busy"),
        Figure("limiting_lane", "limiting lane", "", "was busy longest: no schedule can be shorter than its work"),
        Figure("steps", "steps", "", "forward passes, each over one batch"),
        Figure("output_tokens", "output tokens", "", "delivered to users"),
        *(
            Figure(f"{figure.key}.{key}", f"{figure.label}, {name}", figure.unit, figure.meaning)
            for figure in _LATENCIES
            for key, name in _STATISTICS.items()
        ),
        Figure("requests", "requests", "", "arrived"),
        Figure("completed", "requests completed", "", "reached their end"),
        Figure("rejected", "requests rejected", "", "could never run"),
        Figure("goodput.share", "requests that were good", "share", "of all, met every service level"),
        Figure("goodput.per_s", "goodput", "requests/s", "requests that met every service level, over total time"),
        Figure("goodput.requests", "good requests", "", "met every service level"),
        Figure("prompt_tokens", "prompt tokens", "", "of the requests that arrived"),
        Figure("preemptions", "preemptions", "", "requests put back in the queue for lack of KV blocks"),
        Figure("overshoot_tokens", "overshoot", "tokens", "computed after a request had ended, and dropped"),
        Figure("prefix_cache.hit_rate", "prefix cache hits", "share", "of the prompt tokens needed no computing"),
        Figure("prefix_cache.ideal_hit_rate", "prefix cache, ideal", "share", "the same, if no block were given up"),
        Figure("prefix_cache.ideal_block_rate", "trace's own reuse", "share", "of the blocks that it has ids for"),
        Figure("kv_peak", "KV peak", "share", "of the KV blocks were in use at most"),
    )
}


def look_up(summary: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; None where a parent of it is None, as latencies of nobody are."""
    value: Any = summary
    for part in key.split("."):
        value = None if value is None else value[part]
    return value


def write(key: str, value: object) -> str:
    """`value` as a table shows it, with its unit."""
    figure = FIGURES.get(key)
    if value is None:
        return "-"
    if figure is None or isinstance(value, str | bool):
        return str(value)
    if figure.unit == "share" and isinstance(value, float):
        return percent(value)
    return f"{number(value)} {figure.unit}".strip()


def percent(share: float) -> str:
    """Nearly all is not all, and nearly nothing is not nothing."""
    if 0.9995 <= share < 1:
        return "> 99.9%"
    return "< 0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


def number(value: object) -> str:
    """About four significant digits, no exponent."""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    if value == 0:
        return "0"
    decimals = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 3
    return f"{value:,.{decimals}f}"
