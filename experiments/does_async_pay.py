"""Does asynchronous batching pay for a 1B and an 8B model, at our rate? Lengths and arrivals of a real chat trace.

One H200 by roofline, host costs of transformers' continuous batching (presets h200-llama-1b and h200-llama-8b). Without
--trace: the packaged 500 requests of the Azure conversation trace, at their own rate and at multiples of it.
"""

from __future__ import annotations

from study import Row, report, trace_options

from sim.advise import Question, advise
from sim.rates import offered_rate
from sim.scenario import Scenario, override_values, read_preset

MODELS = ("llama-1b", "llama-8b")
SCALES = (1.0, 2.0, 4.0, 8.0)
WORTH = 0.02


def compare(trace: str, jobs: int) -> list[Row]:
    """A row per model and rate: what depth 2 gains over depth 1 and what it costs."""
    rows = []
    for model in MODELS:
        for scale in SCALES:
            workload = {"kind": "trace", "trace": trace, "rate_scale": scale}
            base = override_values(read_preset(f"h200-{model}"), {"workload": workload, "max_model_len": 16_384})
            advice = advise(base, Question((1, 2), "e2el_ms.mean", WORTH), jobs=jobs)
            sync, overlapped = advice.runs[1], advice.runs[2]
            threshold = advice.thresholds[0].pays_from
            gained = advice.gains[2]
            assert gained is not None  # it is, of every depth but the first
            rows.append(
                {
                    "model": model,
                    "requests/s": offered_rate(Scenario.from_dict(base)),
                    "sync E2EL ms": sync["e2el_ms"]["mean"],
                    "async E2EL ms": overlapped["e2el_ms"]["mean"],
                    "gain": gained,
                    "TPOT gain": sync["tpot_ms"]["mean"] / overlapped["tpot_ms"]["mean"] - 1,
                    "TTFT median ms": overlapped["ttft_ms"]["p50"] - sync["ttft_ms"]["p50"],
                    "GPU active, async": overlapped["gpu_active"],
                    "host us/step": advice.host_us_per_step,
                    "pays from us/step": None if threshold is None else threshold * advice.host_us_per_step,
                    "decision": "async" if advice.chosen == 2 else "sync",
                }
            )
    return rows


def main() -> None:
    chosen = trace_options(__doc__)
    rows = compare(chosen.trace, chosen.jobs)
    columns = {
        "model": "{}",
        "requests/s": "{:.2f}",
        "sync E2EL ms": "{:.0f}",
        "async E2EL ms": "{:.0f}",
        "gain": "{:+.1%}",
        "TPOT gain": "{:+.1%}",
        "TTFT median ms": "{:+.1f}",
        "GPU active, async": "{:.1%}",
        "host us/step": "{:.0f}",
        "pays from us/step": "{:.0f}",
        "decision": "{}",
    }
    decisions = {
        f"decision_{model}": ", ".join(
            f"{row['decision']} at {row['requests/s']:.1f}/s" for row in rows if row["model"] == model
        )
        for model in MODELS
    }
    report(chosen.json, f"{chosen.trace}: depth 2 over depth 1 (simulated)", rows, columns, decisions)


if __name__ == "__main__":
    main()
