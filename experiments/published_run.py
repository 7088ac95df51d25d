"""The published run, beside what is simulated: 8B model, batch 32, 8K tokens (preset hf-8b-bs32).

The synchronous total and idle share are inputs. From them alone follows the prediction for the asynchronous run. The
two parameters that close its gap to the published figure are fitted to that very figure and predict nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from study import options, report, run

from asyncsched.cli.figures import percent

PRESET = "hf-8b-bs32"
SYNC_S, ASYNC_S, SYNC_ACTIVE, ASYNC_ACTIVE = 300.6, 234.5, 0.760, 0.994  # as published


class Case(NamedTuple):
    name: str
    overrides: tuple[str, ...]
    kind: str
    published_s: float
    published_active: float


CONTENTION, OUTPUT_SYNC = "overlap.gpu_contention=1.02", "overlap.exposed_output_sync_us=172"
CASES = (
    Case("sync", ("mode=sync",), "input", SYNC_S, SYNC_ACTIVE),
    Case("async", ("mode=async",), "predicted", ASYNC_S, ASYNC_ACTIVE),
    Case("async, GPU 2% slower", ("mode=async", CONTENTION), "fitted", ASYNC_S, ASYNC_ACTIVE),
    Case("and 172 us output sync", ("mode=async", CONTENTION, OUTPUT_SYNC), "fitted", ASYNC_S, ASYNC_ACTIVE),
)


def main() -> None:
    chosen = options(__doc__)
    rows, timelines = [], []
    for case in CASES:
        result = run(PRESET, *case.overrides, spans=chosen.plot is not None)
        summary = result.summary()
        timelines.append((f"{case.name} ({case.kind})", result.timeline))
        rows.append(
            {
                "run": case.name,
                "the figure is": case.kind,
                "simulated s": summary["makespan_s"],
                "published s": case.published_s,
                "GPU active": summary["gpu_active"],
                "published active": case.published_active,
                "gain over sync": 1 - summary["makespan_s"] / rows[0]["simulated s"] if rows else 0.0,
            }
        )
    columns = {
        "run": "{}",
        "the figure is": "{}",
        "simulated s": "{:.1f}",
        "published s": "{:.1f}",
        "GPU active": percent,
        "published active": "{:.1%}",
        "gain over sync": "{:.1%}",
    }
    report(chosen.json, f"{PRESET}: the published run", rows, columns, {})
    if chosen.plot:
        from asyncsched.plotting import plot_timeline

        plot_timeline(timelines, chosen.plot, steps=(100, 104))


if __name__ == "__main__":
    main()
