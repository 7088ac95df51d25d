"""The order in which the loop does things: what the device waits for first, what users get behind a launch."""

from __future__ import annotations

import numpy as np
import pytest

from asyncsched.config import EngineConfig
from asyncsched.pipeline import Abort, Collect, Deliver, Effect, Host, Idle, Inbox, Launch, Submit, pipeline
from asyncsched.request import SamplingParams
from asyncsched.scheduler import Scheduler


class Drive:
    """Runs a loop to its end; `seen` names each effect and its step. `react` is called with every delivery."""

    def __init__(self, depth: int, max_tokens: int = 4) -> None:
        self.inbox = Inbox()
        self.scheduler = Scheduler(EngineConfig(depth=depth, max_num_seqs=2))
        self.seen: list[str] = []
        self.inbox.put(Submit("a", np.array([5], dtype=np.int32), SamplingParams(max_tokens=max_tokens)))

    def run(self, *, abort_after: int | None = None) -> list[str]:
        loop, reply = pipeline(self.scheduler, self.inbox), None
        while True:
            try:
                effect: Effect = loop.send(reply)
            except StopIteration:
                return self.seen
            reply = None
            match effect:
                case Host(kind, plan):
                    self.seen.append(f"{kind} {plan.step}")
                case Launch(program):
                    self.seen.append(f"launch {program.plan.step}")
                    reply = program.plan.step
                case Collect(_, plan):
                    self.seen.append(f"collect {plan.step}")
                    reply = np.full(len(plan.sampled), 7, dtype=np.int32)
                    if plan.step == abort_after:
                        self.inbox.put(Abort("a"))
                case Deliver(output):
                    ended = ", ".join(notice.reason.value for notice in output.finished)
                    self.seen.append(f"deliver {output.step} {output.tokens.tolist()} {ended}".rstrip())
                case Idle():
                    self.inbox.close()


def test_tokens_are_handed_over_while_the_next_step_computes() -> None:
    assert Drive(1).run()[:13] == [
        *("plan 0", "launch 0", "collect 0", "commit 0"),
        *("plan 1", "launch 1", "deliver 0 [7]", "collect 1", "commit 1"),
        *("plan 2", "launch 2", "deliver 1 [7]", "collect 2"),
    ]
    assert Drive(2).run() == [
        *("plan 0", "launch 0", "plan 1", "launch 1", "collect 0", "commit 0"),
        *("plan 2", "launch 2", "deliver 0 [7]", "collect 1", "commit 1"),
        *("plan 3", "launch 3", "deliver 1 [7]", "collect 2", "commit 2"),
        "deliver 2 [7]",  # nothing is left to launch
        *("collect 3", "commit 3", "deliver 3 [7] length"),
    ]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_command_comes_after_what_was_there_before_it(depth: int) -> None:
    seen = Drive(depth, max_tokens=50).run(abort_after=5)
    last = seen.index("deliver 5 [7]")
    assert seen[last + 1] == "deliver -1 [] abort"
    assert not any("[7]" in line for line in seen[last + 1 :])
    assert seen[last - 1] == "commit 5"


def test_every_token_is_handed_over_once_and_in_order() -> None:
    for depth in (1, 2, 3):
        delivered = [line for line in Drive(depth, max_tokens=9).run() if line.startswith("deliver")]
        assert delivered == [*(f"deliver {step} [7]" for step in range(8)), "deliver 8 [7] length"]
