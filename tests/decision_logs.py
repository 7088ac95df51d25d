"""I12 for real executors: an engine runs while prompts arrive, are aborted, and stop at their tokens. Then the
simulator gets the same commands before the same plans, and must decide the same.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import simpy
from tiny_models import VOCAB, generate, reference_of

from asyncsched import SamplingParams, Scheduler
from asyncsched.pipeline import Abort, Inbox, Submit
from executors.llm import LLM
from executors.outputs import CompletionOutput, StreamPiece
from sim.engine import END, SimEngine
from sim.scenario import load_preset

Commands = list[tuple[int, Submit | Abort]]
Outputs = dict[str, CompletionOutput]

NUM_PROMPTS = 20
LENGTHS = (2, 7, 13, 20)
TO_THE_END = SamplingParams(temperature=0.0, max_tokens=16)
STOPS = SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=tuple(range(0, VOCAB, 8)))


class ReplayInbox(Inbox):
    """Hands out each command before the plan that it was taken before."""

    def __init__(self, scheduler: Scheduler, commands: Sequence[tuple[int, Submit | Abort]]) -> None:
        super().__init__()
        self._scheduler, self._due = scheduler, list(commands)
        self.closed = True

    def take(self) -> Submit | Abort | None:
        return self._due.pop(0)[1] if self._due and self._due[0][0] <= self._scheduler.plans else None

    def __len__(self) -> int:
        return len(self._due)


def eventful_run(llm: LLM) -> tuple[Commands, Outputs]:
    """The commands that the engine took, each with the number of plans before it, and all outputs by the core's ids."""
    draw, taken, outputs = random.Random(3), _record_commands(llm), Outputs()
    waiting = [(str(i), [draw.randrange(VOCAB) for _ in range(draw.choice(LENGTHS))]) for i in range(NUM_PROMPTS)]
    while waiting or llm.scheduler.has_requests or len(llm.engine.inbox):
        for _ in range(min(draw.choice((0, 0, 1, 3)), len(waiting))):
            llm.submit(*waiting.pop(0), STOPS if draw.random() < 0.7 else TO_THE_END)
        if draw.random() < 0.15:
            llm.abort(str(draw.randrange(NUM_PROMPTS)))
        for result in llm.run() or ():
            if isinstance(result, StreamPiece) and result.output is not None:
                outputs[f"{result.request_id}/0"] = result.output
    return taken, outputs


def other_tokens(llm: LLM, taken: Commands, outputs: Outputs) -> list[str]:
    """Requests whose tokens are not those that transformers generates for each alone, as far as they went."""
    reference = reference_of(llm.model).to(llm.model.device)
    prompts = {command.request_id: command.prompt.tolist() for _, command in taken if isinstance(command, Submit)}
    tokens = {name: list(output.token_ids) for name, output in outputs.items() if output.token_ids}
    return [name for name, found in tokens.items() if found != generate(reference, prompts[name], len(found))]


def simulated_log(llm: LLM, taken: Commands, outputs: Outputs) -> list[str]:
    """The decisions of the simulator's engine, given the commands before the same plans and the same ends."""
    log: list[str] = []
    scheduler = Scheduler(llm.config, log=log)
    submits = [command for _, command in taken if isinstance(command, Submit)]
    ends = [_last_position(command, outputs[command.request_id]) for command in submits]
    env = simpy.Environment(initial_time=0)
    engine = SimEngine(env, scheduler, load_preset("hf-8b-bs32").costs(), leaps=False)  # commands come by plan
    engine.inbox = ReplayInbox(scheduler, [(plan, _simulated(command, outputs)) for plan, command in taken])
    for end in ends:
        engine.arrived(end)
    env.run(env.process(engine.run()))
    return log


def check_decisions(llm: LLM) -> None:
    """All of it, and that what it is about has happened."""
    taken, outputs = eventful_run(llm)
    assert {"length", "stop", "abort"} <= {output.finish_reason for output in outputs.values()}
    assert llm.scheduler.preemptions > 0
    assert other_tokens(llm, taken, outputs) == []
    assert len(llm.log) > 100
    for line, (expected, found) in enumerate(zip(llm.log, simulated_log(llm, taken, outputs), strict=True)):
        assert found == expected, line


def _record_commands(llm: LLM) -> Commands:
    """Fills as the engine takes commands."""
    taken: Commands = []

    def note(command: Any) -> None:
        taken.append((llm.scheduler.plans, command))

    llm.engine.inbox.observer = note
    return taken


def _last_position(command: Submit, output: CompletionOutput) -> int:
    """Where the simulated model ends the request; nowhere if it was aborted."""
    return len(command.prompt) + len(output.token_ids) - 1 if output.finish_reason == "stop" else 10**6


def _simulated(command: Submit | Abort, outputs: Outputs) -> Submit | Abort:
    if isinstance(command, Abort):
        return command
    stop = (END,) if outputs[command.request_id].finish_reason == "stop" else ()
    params = SamplingParams(max_tokens=command.params.max_tokens, stop_token_ids=stop)
    return Submit(command.request_id, np.zeros_like(command.prompt), params)
