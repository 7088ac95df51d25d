"""Notes what happens while an engine runs, real or simulated, and makes the tables of a `Run` of it afterwards.

While the engine runs, plans and deliveries are only kept; nothing is worked out. Numbers of steps, slots, plans and
requests count from the start of the log: the engine may have had a life before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from asyncsched.decisions import describe
from asyncsched.pipeline import Abort, Command, Submit
from asyncsched.plan import NO_STEP, StepOutput, StepPlan, StepShape
from asyncsched.request import FinishReason
from asyncsched.runs import HOST_SPANS, SIZES, STEP_COLUMNS, UNKNOWN, IntArray, RequestLog, StepLog
from asyncsched.scheduler import Scheduler
from asyncsched.timeline import Span

COMPUTE = ("carry", "forward")  # operations that are one span, compute
_FINISH = {
    FinishReason.LENGTH: "length",
    FinishReason.STOP: "stop",
    FinishReason.ABORT: "abort",
    FinishReason.REJECTED: "rejected",
    FinishReason.ERROR: "error",
}


class Entry(NamedTuple):
    """When a command entered: calls of plan, and steps that were committed or had failed, before it."""

    plan: int
    commits: int


NO_ENTRY = Entry(UNKNOWN, UNKNOWN)


class RunLog:
    """Call `entered` for each command that the pipeline takes, `planned` for each plan, `delivered` for each delivery.

    All requests must be submitted after the log was made.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._first_plan = scheduler.plans
        self._first_request = scheduler.counts.submitted
        self._preemptions = scheduler.preemptions
        self._plans: list[tuple[int, StepPlan]] = []
        self._outputs: list[tuple[int, StepOutput]] = []
        self._submitted: list[tuple[Submit, Entry]] = []
        self._aborted: dict[str, Entry] = {}
        self.commits = 0

    # ---- while it runs ---------------------------------------------------------------------------------------------

    def entered(self, command: Command) -> None:
        entry = Entry(self._scheduler.plans - self._first_plan, self.commits)
        if isinstance(command, Submit):
            self._submitted.append((command, entry))
        elif isinstance(command, Abort):
            self._aborted.setdefault(command.request_id, entry)  # a second abort ends nothing

    def planned(self, plan: StepPlan) -> None:
        self._plans.append((self._scheduler.plans, plan))

    def delivered(self, now_ns: int, output: StepOutput) -> None:
        self._outputs.append((now_ns, output))
        self.commits += output.step != NO_STEP

    # ---- afterwards ------------------------------------------------------------------------------------------------

    @property
    def preemptions(self) -> int:
        return self._scheduler.preemptions - self._preemptions

    @property
    def last_delivery_ns(self) -> int | None:
        return max((at for at, _ in self._outputs), default=None)

    def requests(self, arrival_ns: Sequence[int], spans: Iterable[Span], start_ns: int) -> RequestLog:
        """The requests, whose arrivals count from `start_ns` already; all else is on the clock of the spans."""
        count = len(self._submitted)
        commands = [command for command, _ in self._submitted]
        entries = [entry for _, entry in self._submitted]
        aborted = [self._aborted.get(command.request_id, NO_ENTRY) for command in commands]
        times: list[list[int]] = [[] for _ in commands]
        finish = ["error"] * count
        for at, output in self._outputs:
            for number in output.requests.tolist():
                times[number - self._first_request].append(at - start_ns)
            for notice in output.finished:
                finish[notice.number - self._first_request] = _FINISH[notice.reason]
        return RequestLog(
            request_id=tuple(command.request_id for command in commands),
            arrival_ns=_integers(arrival_ns),
            prompt_tokens=_integers(len(command.prompt) for command in commands),
            max_tokens=_integers(command.params.max_tokens for command in commands),
            output_tokens=_integers(map(len, times)),
            priority=_integers(command.priority for command in commands),
            scheduled_ns=self._scheduled(count, spans, start_ns),
            first_ns=_integers(one[0] if one else UNKNOWN for one in times),
            last_ns=_integers(one[-1] if one else UNKNOWN for one in times),
            entered_plan=_integers(entry.plan for entry in entries),
            entered_commits=_integers(entry.commits for entry in entries),
            aborted_plan=_integers(entry.plan for entry in aborted),
            aborted_commits=_integers(entry.commits for entry in aborted),
            finish=tuple(finish),
            gaps_ns=tuple(np.diff(_integers(one)) for one in times),
        )

    def steps(self, spans: Iterable[Span], start_ns: int, captures: Callable[[StepPlan], bool]) -> StepLog:
        """The steps. `captures` says which of them run as one captured graph."""
        window = self._scheduler.config.sliding_window
        columns = {name: np.full(len(self._plans), UNKNOWN, dtype=np.int64) for name in STEP_COLUMNS}
        for row, ((number, _), plan) in enumerate(zip(self._plans, self._normal_plans(), strict=True)):
            sizes = StepShape.of(plan, window)._asdict()
            sizes |= {"step": plan.step, "slot": plan.slot, "captured": captures(plan)}
            sizes |= {"plan": number - self._first_plan - 1}
            for name in SIZES:
                columns[name][row] = sizes[name]
        first = self._base()[0]
        for span in spans:
            name = "compute" if span.name in COMPUTE else span.name
            row = span.step - first
            if not 0 <= row < len(self._plans) or (name not in HOST_SPANS and span.end_ns == span.start_ns):
                continue
            start, end = columns[f"{name}_start_ns"], columns[f"{name}_end_ns"]
            start[row] = max(span.start_ns - start_ns, 0) if start[row] == UNKNOWN else start[row]
            end[row] = max(span.end_ns - start_ns, 0)
        return StepLog(columns)

    def decisions(self) -> tuple[str, ...]:
        return tuple(map(describe, self._normal_plans()))

    def _base(self) -> tuple[int, int]:
        """Number and slot of the first step."""
        return (self._plans[0][1].step, self._plans[0][1].slot) if self._plans else (0, 0)

    def _normal_plans(self) -> list[StepPlan]:
        """The plans as they would be if the engine had been new. Slots take turns: they are off by a constant."""
        first_step, first_slot = self._base()
        depth, seats = self._scheduler.config.depth, self._scheduler.config.max_num_seqs
        normal = []
        for _, plan in self._plans:
            source, place = np.divmod(plan.carry, seats)
            normal.append(
                replace(
                    plan,
                    step=plan.step - first_step,
                    slot=(plan.slot - first_slot) % depth,
                    requests=plan.requests - self._first_request,
                    carry=np.where(plan.carry < 0, plan.carry, (source - first_slot) % depth * seats + place),
                )
            )
        return normal

    def _scheduled(self, count: int, spans: Iterable[Span], start_ns: int) -> IntArray:
        """When each request was first part of a plan."""
        planned = {span.step: span.end_ns - start_ns for span in spans if span.name == "plan"}
        scheduled = np.full(count, UNKNOWN, dtype=np.int64)
        for _, plan in self._plans:
            fresh = plan.requests[scheduled[plan.requests - self._first_request] == UNKNOWN] - self._first_request
            scheduled[fresh] = planned[plan.step]
        return scheduled


def _integers(values: Iterable[int]) -> IntArray:
    return np.fromiter(values, dtype=np.int64)
