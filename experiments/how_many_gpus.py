"""How many GPUs does a service level need, and what do tokens cost? Sync, async and depth 3 at the same level.

Llama 8B on H200s by roofline, requests drawn from a real chat trace, Poisson arrivals. Each search is one seed's
highest rate on one GPU at which 99% of the requests keep the levels; GPUs and costs are reckoned with the lowest.
"""

from __future__ import annotations

import math

from study import Row, report, trace_options

from sim.capacity import Search, find_capacity, usd_per_million
from sim.scenario import Scenario, override_values, read_preset

LEVELS = {"strict": {"ttft_ms": 200.0, "tpot_ms": 15.0}, "easy": {"ttft_ms": 1000.0, "tpot_ms": 30.0}}
MODES = ("sync", "async", "depth=3")
SEARCH = Search(attainment=0.99, tolerance=0.02, seeds=5)
RATE = 100.0  # requests/s to serve
GPU_HOUR_USD = 3.50


def compare(trace: str, requests: int, jobs: int, rate: float) -> list[Row]:
    arrivals = {"kind": "poisson", "rate_per_s": 20.0}  # where the searches begin
    workload = {"kind": "trace", "trace": trace, "arrivals": arrivals, "num_requests": requests}
    asked = [
        (
            name,
            mode,
            override_values(read_preset("h200-llama-8b"), {"workload": workload, "mode": mode, "goodput": levels}),
        )
        for name, levels in LEVELS.items()
        for mode in MODES
    ]
    capacities = find_capacity([Scenario.from_dict(data) for _, _, data in asked], SEARCH, jobs=jobs)
    rows = []
    for (name, mode, _), capacity in zip(asked, capacities, strict=True):
        summary = capacity.summary()
        lowest, figures = summary["rate_low_per_s"], summary["figures"]
        rows.append(
            {
                "levels": name,
                "mode": mode,
                "requests/s": summary["rate_per_s"],
                "lowest": lowest,
                "highest": summary["rate_high_per_s"],
                "GPU active": figures["gpu_active"],
                "TTFT p99 ms": figures["ttft_ms.p99"],
                "TPOT p99 ms": figures["tpot_ms.p99"],
                "GPUs": math.ceil(rate / lowest),
                "$/1M output": usd_per_million(GPU_HOUR_USD, 1, lowest * figures["output_tokens"]),
            }
        )
    return rows


def main() -> None:
    chosen = trace_options(__doc__)
    rows = compare(chosen.trace, chosen.requests, chosen.jobs, RATE)
    columns = {
        "levels": "{}",
        "mode": "{}",
        "requests/s": "{:.2f}",
        "lowest": "{:.2f}",
        "highest": "{:.2f}",
        "GPU active": "{:.1%}",
        "TTFT p99 ms": "{:.0f}",
        "TPOT p99 ms": "{:.1f}",
        "GPUs": "{}",
        "$/1M output": "{:.3f}",
    }
    notes = {}
    for name, levels in LEVELS.items():
        best = min(
            (row for row in rows if row["levels"] == name), key=lambda row: (row["GPUs"], MODES.index(row["mode"]))
        )
        said = f"TTFT {levels['ttft_ms']:g} ms, TPOT {levels['tpot_ms']:g} ms"
        notes[f"decision_{name}"] = f"{said}: {best['mode']}, {best['GPUs']} GPUs for {RATE:g} requests/s"
    report(chosen.json, f"{chosen.trace}: capacity of one H200 (simulated)", rows, columns, notes)


if __name__ == "__main__":
    main()
