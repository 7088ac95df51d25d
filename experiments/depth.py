"""Depth 1, 2 and 3, with and without jitter: when does a third step in flight pay? (preset hf-8b-bs32)

With constant times a step takes the longest of: its GPU time, its host time, a synchronous step divided by the depth.
So a third step pays only where copies are longer than the difference of host and GPU. With jitter a late host stalls
the GPU unless more work is queued up: a third step pays wherever the host is nearly as slow as the GPU.
"""

from __future__ import annotations

from typing import Any

from study import Row, options, report, sweep

PRESET = "hf-8b-bs32"
GPU_MS, HOST_MS = 27.887695, 8.806641  # of the preset
STEPS = 2048  # a quarter of the preset's
RATIOS = [0.32, 0.6, 0.8, 0.9, 1.0, 1.1, 1.3]  # host over GPU; 0.32 is the published run

COPIES = {"copy.h2d_latency_us": 2000.0, "copy.d2h_latency_us": 2000.0}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("no jitter, no copies", {}),
    ("copies of 2 ms each way", COPIES),
    ("host jitter, sigma 0.25", {"jitter.kind": "lognormal", "jitter.host_sigma": 0.25}),
    ("host jitter, sigma 0.5", {"jitter.kind": "lognormal", "jitter.host_sigma": 0.5}),
]


def compare() -> list[Row]:
    """One row per case and cost of the host; times are per step."""
    rows = []
    scales = [ratio * GPU_MS / HOST_MS for ratio in RATIOS]
    for name, overrides in CASES:
        fixed = {"workload.output.tokens": STEPS, **overrides}
        runs = sweep(PRESET, {"host.scale": scales, "depth": [1, 2, 3]}, ("makespan_s", "steps", "gpu_active"), fixed)
        for one, two, three in zip(runs[::3], runs[1::3], runs[2::3], strict=True):
            times = {f"depth {run['depth']}": 1e3 * run["makespan_s"] / run["steps"] for run in (one, two, three)}
            rows.append(
                {
                    "case": name,
                    "host/GPU": one["host.scale"] * HOST_MS / GPU_MS,
                    **times,
                    "2 over 1": one["makespan_s"] / two["makespan_s"] - 1,
                    "3 over 2": two["makespan_s"] / three["makespan_s"] - 1,
                }
            )
    return rows


def main() -> None:
    chosen = options(__doc__)
    rows = compare()
    columns = {
        "case": "{}",
        "host/GPU": "{:.2f}",
        "depth 1": "{:.2f} ms",
        "depth 2": "{:.2f} ms",
        "depth 3": "{:.2f} ms",
        "2 over 1": "{:+.1%}",
        "3 over 2": "{:+.1%}",
    }
    report(chosen.json, f"{PRESET}: time per step and what each further step in flight gains", rows, columns, {})
    if chosen.plot:
        from asyncsched.plotting import plot_curve

        plot_curve(
            [{**row, "percent": 100 * row["3 over 2"]} for row in rows],
            "host/GPU",
            "percent",
            chosen.plot,
            series="case",
            x_label="host time over GPU time of a step",
            y_label="throughput gained by depth 3 over depth 2 (%)",
            title="A third step in flight pays near balance",
        )


if __name__ == "__main__":
    main()
