"""Sync against async over the batch size, by roofline: an 8B and a 1B model on one H200.

The GPU's time is nearly flat while a step is bound by reading the weights; the host's grows with every sequence. So the
gain grows with the batch, and more so with a small model, whose steps are soon no longer than the host's work.
"""

from __future__ import annotations

from study import Row, options, report, sweep

from asyncsched.cli.figures import percent

PRESETS = ("h200-llama-8b", "h200-llama-1b")
BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
PROMPT, OUTPUT = 128, 512  # tokens, of every request


def compare(preset: str) -> list[Row]:
    """One row per batch size: as many requests, all at once and all alike."""
    workload = {
        "kind": "synthetic",
        "num_requests": 1,
        "prompt": {"kind": "fixed", "tokens": PROMPT},
        "output": {"kind": "fixed", "tokens": OUTPUT},
        "arrivals": {"kind": "all-at-once"},
    }
    columns = ("tpot_ms.p50", "output_throughput", "gpu_active", "limiting_lane", "busy_s.host", "steps")
    rows = []
    for batch in BATCHES:
        fixed = {"workload": {**workload, "num_requests": batch}, "engine.max_num_batched_tokens": 8192}
        sync, overlapped = sweep(preset, {"mode": ["sync", "async"]}, columns, fixed)
        rows.append(
            {
                "model": preset.removeprefix("h200-"),
                "batch": batch,
                "host ms/step": 1e3 * sync["busy_s.host"] / sync["steps"],
                "sync ms/step": sync["tpot_ms.p50"],
                "async ms/step": overlapped["tpot_ms.p50"],
                "async tokens/s": overlapped["output_throughput"],
                "gain": overlapped["output_throughput"] / sync["output_throughput"] - 1,
                "GPU active, sync": sync["gpu_active"],
                "GPU active, async": overlapped["gpu_active"],
                "async is limited by": overlapped["limiting_lane"],
            }
        )
    return rows


def main() -> None:
    chosen = options(__doc__)
    rows = [row for preset in PRESETS for row in compare(preset)]
    columns = {
        "model": "{}",
        "batch": "{:,}",
        "host ms/step": "{:.2f}",
        "sync ms/step": "{:.2f}",
        "async ms/step": "{:.2f}",
        "async tokens/s": "{:,.0f}",
        "gain": "{:+.1%}",
        "GPU active, sync": percent,
        "GPU active, async": percent,
        "async is limited by": "{}",
    }
    report(
        chosen.json, f"One H200 by roofline, prompts of {PROMPT}, {OUTPUT} new tokens (simulated)", rows, columns, {}
    )
    if chosen.plot:
        from asyncsched.plotting import plot_curve

        plot_curve(
            [{**row, "percent": 100 * row["gain"]} for row in rows],
            "batch",
            "percent",
            chosen.plot,
            series="model",
            x_label="batch size (sequences)",
            y_label="throughput gained by async over sync (%)",
            title="Larger batches cost the host more, so hiding it gains more",
        )


if __name__ == "__main__":
    main()
