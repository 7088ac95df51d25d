"""What does halving the host's work buy? Capacity of a 1B and an 8B model, sync and async, at the same service levels.

One H200 by roofline, requests drawn from a real chat trace, Poisson arrivals; host costs of transformers' continuous
batching, and half of them.
"""

from __future__ import annotations

from study import Row, report, trace_options

from sim.capacity import Search, find_capacity
from sim.scenario import Scenario, override_values, read_preset

LEVELS = {"llama-1b": {"ttft_ms": 200.0, "tpot_ms": 8.0}, "llama-8b": {"ttft_ms": 200.0, "tpot_ms": 15.0}}
HOST_SCALES = (1.0, 0.5)
SEARCH = Search(attainment=0.99, tolerance=0.02, seeds=5)


def compare(trace: str, requests: int, jobs: int) -> list[Row]:
    """A row per model and mode: the highest rate with the host as it is and with half its work."""
    arrivals = {"kind": "poisson", "rate_per_s": 20.0}  # where the searches begin
    workload = {"kind": "trace", "trace": trace, "arrivals": arrivals, "num_requests": requests}
    asked = [(model, mode, scale) for model in LEVELS for mode in ("sync", "async") for scale in HOST_SCALES]
    scenarios = [
        Scenario.from_dict(
            override_values(
                read_preset(f"h200-{model}"),
                {
                    "workload": workload,
                    "mode": mode,
                    "host.scale": scale,
                    "goodput": LEVELS[model],
                    "max_model_len": 16_384,
                },
            )
        )
        for model, mode, scale in asked
    ]
    found = dict(zip(asked, find_capacity(scenarios, SEARCH, jobs=jobs), strict=True))
    rows = []
    for model in LEVELS:
        for mode in ("sync", "async"):
            whole, half = (found[model, mode, scale].summary() for scale in HOST_SCALES)
            pairs = zip(found[model, mode, 1.0].rates, found[model, mode, 0.5].rates, strict=True)
            gains = sorted(after / before - 1 for before, after in pairs)
            rows.append(
                {
                    "model": model,
                    "mode": mode,
                    "requests/s": whole["rate_per_s"],
                    "with half": half["rate_per_s"],
                    "gain": half["rate_per_s"] / whole["rate_per_s"] - 1,
                    "least": gains[0],
                    "most": gains[-1],
                    "GPU active": whole["figures"]["gpu_active"],
                    "GPU active, half": half["figures"]["gpu_active"],
                }
            )
    return rows


def main() -> None:
    chosen = trace_options(__doc__)
    rows = compare(chosen.trace, chosen.requests, chosen.jobs)
    columns = {
        "model": "{}",
        "mode": "{}",
        "requests/s": "{:.2f}",
        "with half": "{:.2f}",
        "gain": "{:+.1%}",
        "least": "{:+.1%}",
        "most": "{:+.1%}",
        "GPU active": "{:.1%}",
        "GPU active, half": "{:.1%}",
    }
    notes = {}
    for model in LEVELS:
        gains = {row["mode"]: row["gain"] for row in rows if row["model"] == model}
        notes[f"decision_{model}"] = (
            f"halving host cost buys {gains['sync']:+.1%} in sync, {gains['async']:+.1%} in async"
        )
    report(chosen.json, f"{chosen.trace}: half the host's work (simulated)", rows, columns, notes)


if __name__ == "__main__":
    main()
