"""What `make demo` runs: synchronous against asynchronous batching, on the published workload, on a real trace, and for
real on the device there is.

Writes out/demo-timeline.png, the lanes of both over a few steps, out/demo-trace.json, the same for Perfetto, and
out/demo-generation.png, the lanes of the real runs beside those of the simulated ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from demo_generation import real_generation
from study import check, run

from asyncsched.cli.figures import FIGURES, look_up, write
from asyncsched.cli.files import write_output
from asyncsched.cli.tables import print_table
from asyncsched.plotting import plot_timeline
from asyncsched.timeline import Timeline

PICTURE, TRACE = Path("out/demo-timeline.png"), Path("out/demo-trace.json")
REAL_PICTURE = Path("out/demo-generation.png")
PUBLISHED, AZURE = "hf-8b-bs32", "h200-llama-8b"
DRAWN = (100, 104)  # steps; any would do once the pipeline is full
TRACED = (0, 199)

# What the table shows of each workload: figure and remark.
PUBLISHED_ROWS = {
    "makespan_s": "published: 300.6 (input), 234.5",
    "gpu_active": "published: 76.0% (input), 99.4%",
    "output_throughput": "the same tokens in less time",
}
AZURE_ROWS = {
    "exposed_host_s": "the GPU waited for a batch",
    "tpot_ms.p50": "the gap between two tokens",
    "e2el_ms.p50": "from arrival to the last token",
    "ttft_ms.p50": "the price: one more step is ahead",
}


def compare(
    workload: str, sync: Mapping[str, Any], overlapped: Mapping[str, Any], remarks: Mapping[str, str]
) -> list[tuple[str, ...]]:
    """The workload in one row, then one row per figure."""
    rows: list[tuple[str, ...]] = [(workload,)]
    for key, remark in remarks.items():
        figure, before, after = FIGURES[key], look_up(sync, key), look_up(overlapped, key)
        is_share = figure.unit == "share"
        change = f"{100 * (after - before):+.1f} points" if is_share else f"{after / before - 1:+.1%}"
        rows.append((f"  {figure.label}", write(key, before), write(key, after), change, remark))
    return rows


def side_by_side(timelines: Mapping[str, Timeline]) -> dict[str, object]:
    """One trace with a process per timeline."""
    events: list[object] = []
    for process, (name, timeline) in enumerate(timelines.items()):
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}})
        events += [{**event, "pid": process} for event in timeline.to_perfetto()["traceEvents"]]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    PICTURE.parent.mkdir(exist_ok=True)
    check(PICTURE, TRACE, REAL_PICTURE)
    print("Simulating the published run (8,192 steps) and a real trace (500 requests) ...", file=sys.stderr)
    published = {mode: run(PUBLISHED, f"mode={mode}", spans=True) for mode in ("sync", "async")}
    azure = {mode: run(AZURE, f"mode={mode}").summary() for mode in ("sync", "async")}
    timelines = {
        "synchronous: host and GPU take turns": published["sync"].timeline,
        "asynchronous: the host prepares one step ahead": published["async"].timeline,
    }
    plot_timeline(list(timelines.items()), PICTURE, steps=DRAWN)
    windows = {name: timeline.window(*TRACED) for name, timeline in timelines.items()}
    write_output("trace", TRACE, json.dumps(side_by_side(windows)).encode())
    summaries = [published[mode].summary() for mode in ("sync", "async")]
    rows = compare("published run, 8B at batch 32", *summaries, PUBLISHED_ROWS)
    rows += [(), *compare("Azure trace, 8B on one H200", azure["sync"], azure["async"], AZURE_ROWS)]
    columns = ("workload", "sync", "async", "change", "in words")
    print_table("What asynchronous batching buys: simulated, async predicted", columns, rows, numbers=columns[1:4])
    real_generation(REAL_PICTURE)
    print(f"See where the time goes: open {PICTURE} and {REAL_PICTURE}")
    print(f"Look closer:             open {TRACE} at https://ui.perfetto.dev")
    print("Ask what if:             .venv/bin/asyncsched simulate --preset hf-8b-bs32 --set host.scale=4")


if __name__ == "__main__":
    main()
