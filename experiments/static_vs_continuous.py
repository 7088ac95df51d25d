"""Continuous over static batching: where "4 to 8 times" holds, and where it does not (preset hf-8b-mixed).

A static batch lasts as long as its longest output. With an endless queue continuous batching therefore gains
(longest output of a batch) / (mean output): 1 where all outputs are equally long, below 2 where they are uniform, more
only with a long tail and a large batch. A queue that ends gains less, since the last long outputs run almost alone.

Both run synchronously, so that nothing else differs; a step costs the same at every batch size, as in the preset.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from study import Row, options, report, sweep

from sim.scenario import Scenario, override_values, read_preset

PRESET = "hf-8b-mixed"
BATCHES = [8, 32, 128]
BATCHES_PER_RUN = 16
MEAN, LONGEST = 256, 2048  # tokens, before clipping; at most
SPREADS: dict[str, dict[str, Any]] = {
    "all equal": {"kind": "fixed", "tokens": MEAN},
    "uniform, 1 to 511": {"kind": "uniform", "min_tokens": 1, "max_tokens": 2 * MEAN - 1},
    **{
        f"lognormal {sigma}": {"kind": "lognormal", "mean_tokens": MEAN, "sigma": sigma, "max_tokens": LONGEST}
        for sigma in (0.5, 1.0, 1.5, 2.0)
    },
}


def endless_gain(preset: dict[str, Any], batch: int) -> float:
    """Longest output of a batch over the mean output, from the lengths alone."""
    outputs = [arrival.output_tokens for arrival in Scenario.from_dict(preset).workload_arrivals()]
    return float(np.reshape(outputs, (-1, batch)).max(axis=1).mean() / np.mean(outputs))


def compare(batch: int) -> list[Row]:
    """One row per spread of lengths."""
    fixed = {
        "engine.max_num_seqs": batch,
        "engine.num_blocks": 528 * batch,  # room for everybody at full length
        "workload.num_requests": BATCHES_PER_RUN * batch,
    }
    vary = {"workload.output": list(SPREADS.values()), "mode": ["static", "sync", "async"]}
    runs = sweep(PRESET, vary, ("output_throughput",), fixed)
    rows = []
    for name, static, sync, overlapped in zip(SPREADS, runs[::3], runs[1::3], runs[2::3], strict=True):
        scenario = override_values(read_preset(PRESET), {**fixed, "workload.output": static["workload.output"]})
        rows.append(
            {
                "batch": batch,
                "outputs": name,
                "static tok/s": static["output_throughput"],
                "continuous tok/s": sync["output_throughput"],
                "times faster": sync["output_throughput"] / static["output_throughput"],
                "endless queue": endless_gain(scenario, batch),
                "and async": overlapped["output_throughput"] / static["output_throughput"],
            }
        )
    return rows


def main() -> None:
    chosen = options(__doc__)
    rows = [row for batch in BATCHES for row in compare(batch)]
    columns = {
        "batch": "{}",
        "outputs": "{}",
        "static tok/s": "{:,.0f}",
        "continuous tok/s": "{:,.0f}",
        "times faster": "{:.2f}",
        "endless queue": "{:.2f}",
        "and async": "{:.2f}",
    }
    report(chosen.json, f"{PRESET}: continuous over static batching (simulated)", rows, columns, {})
    if chosen.plot:
        from asyncsched.plotting import plot_heatmap

        plot_heatmap(
            rows,
            "batch",
            "outputs",
            "times faster",
            chosen.plot,
            x_label="batch size (sequences)",
            y_label="output lengths",
            z_label="continuous over static (times)",
            title="Continuous batching gains what lengths spread",
        )


if __name__ == "__main__":
    main()
