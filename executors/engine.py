"""Drives one pipeline with a real executor: the loop's effects become launches, collections and deliveries.

The engine is passive: `run` goes on until something is delivered or nothing is left to do, so whoever calls it decides
in which thread and how long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from asyncsched.pipeline import Collect, Deliver, Effect, Host, Idle, Inbox, Launch, StepFailure, pipeline
from asyncsched.plan import NO_STEP, StepOutput, StepPlan
from asyncsched.scheduler import Scheduler
from asyncsched.timeline import Span
from executors.errors import one_line
from executors.executor import Executor

USABLE = "the engine is still usable"
DEAD = "the engine is not usable any more: start a new one"
Deliverer = Callable[[StepOutput], None]


class Engine:
    """A scheduler, its inbox and an executor.

    observer       is told of each effect before it happens, host work excepted: that is done by then
    host_delay_ns  a busy-wait after each plan, a testing aid: what would a slower host do? Its span is `delay`

    `death` says why it must not be used any more, and is empty while it may be: the device does not answer, or `run`
    broke off in the middle of a step. Requests that are there end with an error, one after the other or with `run`.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, deliver: Deliverer) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.inbox = Inbox()
        self.steps = 0
        self.death = ""
        self.observer: Callable[[Effect], None] | None = None
        self.host_delay_ns = 0
        self._deliver = deliver
        self._loop = pipeline(scheduler, self.inbox)
        self._reply: object = None
        self._broke_off = False
        self._collected = 0  # slot of the step that is delivered next
        self._host_since = time.perf_counter_ns()

    def run(self) -> bool:
        """Works until something was delivered (True), or nothing can run before another command arrives (False)."""
        if self._broke_off:
            return False
        try:
            return self._run()
        except BaseException as error:
            self._broke_off, self.death = True, f"{type(error).__name__}: {one_line(error)}"
            raise

    def _run(self) -> bool:
        self._host_since = time.perf_counter_ns()
        while True:
            try:
                effect: Effect = self._loop.send(self._reply)
            except StopIteration:
                return False
            self._reply = None
            if self.observer is not None:
                self.observer(effect)
            if isinstance(effect, Host):
                self._host(effect)
                if self.host_delay_ns and effect.kind == "plan":
                    self._delay(effect.plan)
            elif isinstance(effect, Launch):
                self.steps += 1
                self._reply = self.executor.launch(effect.program)
                self._host_since = time.perf_counter_ns()
            elif isinstance(effect, Collect):
                collected = self.executor.collect(effect.ticket)  # type: ignore[arg-type]  # launch gave it
                self._reply = self._noted(collected) if isinstance(collected, StepFailure) else collected
                self._collected = effect.plan.slot
                self._host_since = time.perf_counter_ns()
            elif isinstance(effect, Deliver):
                self._hand_over(effect.output)
                return True
            elif isinstance(effect, Idle) and not len(self.inbox):  # a command may have come after an early delivery
                return False

    def _noted(self, failure: StepFailure) -> StepFailure:
        """The failure, with what it means for the engine."""
        if failure.stuck and not self.death:
            self.death = failure.cause
        return replace(failure, cause=f"{failure.cause}; {DEAD if self.death else USABLE}")

    def _hand_over(self, output: StepOutput) -> None:
        started = time.perf_counter_ns()
        self._deliver(output)
        timeline = self.executor.timeline
        if timeline is not None and output.step != NO_STEP:
            ended, size = time.perf_counter_ns(), len(output.requests)
            timeline.spans.append(Span("host", "deliver", output.step, self._collected, started, ended, size))

    def _host(self, effect: Host) -> None:
        """Host work that the loop did since the last effect."""
        plan = effect.plan
        self._span(effect.kind, plan.step, plan.slot, plan.num_seqs)

    def _delay(self, plan: StepPlan) -> None:
        """Keeps the host's thread busy, as work in Python would."""
        end = self._host_since + self.host_delay_ns
        while time.perf_counter_ns() < end:
            pass
        self._span("delay", plan.step, plan.slot, plan.num_seqs)

    def _span(self, name: str, step: int, slot: int, size: int) -> None:
        """Host work from the last effect until now."""
        now = time.perf_counter_ns()
        if self.executor.timeline is not None:
            self.executor.timeline.spans.append(Span("host", name, step, slot, self._host_since, now, size))
        self._host_since = now
