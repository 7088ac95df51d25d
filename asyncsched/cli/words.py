"""What limited a run, in words: from a summary alone, as `simulate --json` prints it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncsched.cli.figures import number, percent

Summary = Mapping[str, Any]

NOTEWORTHY = 0.02  # shares of the time below this are not worth a sentence
IDLE = 0.1  # a larger share without work: the arrivals decide how long the run is
_LIMITS = {
    "compute": "The GPU is the limit: its lane was busy longest, {busy} of {total}. Hiding other work cannot make the "
    "run shorter than that; fewer or cheaper tokens, or a faster GPU, can.",
    "host": "The host is the limit: its lane was busy longest, {busy} of {total}. More steps in flight cannot help; "
    "less work per step, or larger batches, can.",
    "h2d": "Copies to the GPU are the limit: their lane was busy longest, {busy} of {total}. Fewer bytes per step, or "
    "larger batches, can help.",
    "d2h": "Copies to the host are the limit: their lane was busy longest, {busy} of {total}. Fewer bytes per step, or "
    "larger batches, can help.",
}
_NAMES = {"compute": "the GPU", "host": "the host", "h2d": "copying in", "d2h": "copying out"}
_CAUSES = {
    "host": "for the host to prepare a batch",
    "h2d": "for a batch to be copied in",
    "output_sync": "for its output to reach the host",
    "no_work": "for requests to arrive",
}


def explain(summary: Summary) -> list[str]:
    """Sentences on where the time went, the limiting lane, and what could help."""
    count = len(summary.get("replicas") or [1])
    total = summary["makespan_s"] * count  # lanes and waits are sums over all replicas
    if not total:
        return ["The run took no time."]
    active = percent(summary["busy_s"]["compute"] / total)
    if count == 1:
        lines = [f"The GPU computed for {active} of the {number(total)} s."]
    else:
        lines = [
            f"{count} GPUs computed for {active} of the {number(summary['makespan_s'])} s. Times below are of all."
        ]
    waits = sorted(((seconds, cause) for cause, seconds in summary["idle_s"].items()), reverse=True)
    said = [
        f"{number(seconds)} s ({percent(seconds / total)}) {_CAUSES[cause]}"
        for seconds, cause in waits
        if seconds / total >= NOTEWORTHY
    ]
    if said:
        lines.append(f"It waited {', '.join(said)}.")
    lane = summary["limiting_lane"]
    busy = f"{number(summary['busy_s'][lane])} s"
    if summary["idle_s"]["no_work"] / total >= IDLE:
        slow = "Requests come more slowly than it could serve them, so no lane is the limit"
        lines.append(f"{slow}; busiest, for {busy}, was {_NAMES[lane]}.")
    else:
        lines.append(_LIMITS[lane].format(busy=busy, total=f"{number(total)} s"))
    exposed = summary["exposed_host_s"] / total
    if exposed >= NOTEWORTHY and summary["depth"] == 1:
        lines.append(
            f"Host and GPU took turns. A second step in flight could hide up to {percent(exposed)} of the time."
        )
    if summary["preemptions"]:
        lines.append(f"KV blocks ran out: {summary['preemptions']:,} times a request was put back in the queue.")
    if summary["rejected"]:
        lines.append(f"{summary['rejected']:,} of {summary['requests']:,} requests could never run and were rejected.")
    return lines
