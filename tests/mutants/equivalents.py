"""Changes that look like faults and are none: what they leave out is done by something else. They do not count.

tests/test_mutants.py proves it: the situation in which they would matter occurs, and no token changes; where order is
what makes up for them, the hazard checker says so, and says that they are faults without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mutants.cases import counted
from mutants.catalogue import Mutant, rewrite
from mutants.watching import Planned, Played


@dataclass(frozen=True)
class Equivalent(Mutant):
    """`matters` says of a run with the change that the situation occurred in which it would do harm."""

    matters: Callable[[Played], bool] = lambda played: True


def reused_in_flight(played: Played) -> bool:
    """An offload overwrites host blocks that a restore of a step in flight reads."""
    restored = {plan.step: set(plan.restore.host.tolist()) for plan in played.plans}
    return any(
        not restored[step].isdisjoint(event.plan.offload.host.tolist())
        for event in played.all(Planned)
        for step in event.before
    )


EQUIVALENT = (
    Equivalent(
        "host blocks that a restore reads are not fenced",  # offloads of later steps are behind it, lane by lane
        (rewrite("residency.Residency.restore", ("release(copy.blocks, fence=step)", "release(copy.blocks)")),),
        "host blocks reused",
        matters=reused_in_flight,
    ),
    Equivalent(
        "no placeholder",  # whatever stands there, the carry-over overwrites it before anything reads it
        (
            rewrite(
                "rows.Rows.give_back",
                ("self.tokens[row, : self.known.item(row)] = PLACEHOLDER", "pass"),
            ),
        ),
        "plain",
        matters=counted(carried_tokens=10),
    ),
)
