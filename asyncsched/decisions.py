"""The decision log: one line per decision, equal for equal decisions, whatever executes the plans."""

from __future__ import annotations

from asyncsched.plan import BlockCopies, StepPlan


def describe(plan: StepPlan) -> str:
    """A plan as one line: who computes which positions, where carried tokens come from, which blocks are copied."""
    rows = zip(plan.requests.tolist(), plan.starts.tolist(), plan.ends.tolist(), strict=True)
    parts = " ".join(f"{request}[{start}:{end}]" for request, start, end in rows)
    carry = ",".join(map(str, plan.carry.tolist()))
    padded = f"mixed bucket {plan.mixed_bucket}" if plan.mixed_bucket else f"bucket {plan.bucket}"
    line = f"step {plan.step} slot {plan.slot} {padded}: {parts} carry {carry}"
    return line + _copies("offload", plan.offload) + _copies("restore", plan.restore)


def _copies(name: str, copies: BlockCopies) -> str:
    pairs = zip(copies.device.tolist(), copies.host.tolist(), strict=True)
    return f" {name} " + ",".join(f"{device}:{host}" for device, host in pairs) if len(copies.host) else ""
