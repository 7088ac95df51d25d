"""The fuzzer: whole-system episodes, each from one seed, with every check on.

An episode runs the real loop, scheduler and programs on the token-faithful executor under an adversary, with faults
planted where its scenario says. A failure is a seed; it is shrunk to a small scenario that can be run again.
"""

from __future__ import annotations

import gc
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from asyncsched.adversary import Adversary, Eager, Lazy, Seeded
from asyncsched.faithful import FaithfulExecutor, IllegalAccessError
from asyncsched.fuzz_accounts import FindingError
from asyncsched.fuzz_checks import COUNTED, Checker
from asyncsched.fuzz_draw import FuzzOptions, draw_scenario
from asyncsched.fuzz_scenario import Control, Scenario, Submission
from asyncsched.hazards import HazardChecker
from asyncsched.lanes import DeadlockError
from asyncsched.oracle import PatternMatcher
from asyncsched.pipeline import (
    Abort,
    Collect,
    Command,
    Deliver,
    Host,
    Idle,
    Inbox,
    Launch,
    Pause,
    Resume,
    StepFailure,
    Submit,
    pipeline,
)
from asyncsched.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Finding:
    """What went wrong: the check, one line, and the step that was being planned or settled."""

    check: str
    message: str
    step: int

    def __str__(self) -> str:
        return f"{self.check} at step {self.step}: {self.message}"


@dataclass(frozen=True, slots=True)
class Episode:
    """What one scenario did. `digest` is equal for equal plans and tokens; `counts` says what was exercised."""

    steps: int
    digest: int
    counts: dict[str, int]
    finding: Finding | None


def run_episode(seed: int, options: FuzzOptions | None = None) -> Episode:
    return run_scenario(draw_scenario(seed, options or FuzzOptions()))


def run_scenario(scenario: Scenario, adversary: Adversary | None = None) -> Episode:
    """Runs to the end, or to the first finding. Equal scenarios give equal episodes.

    `adversary` replaces the scenario's own.
    """
    run = _Run(scenario, adversary or _adversary(scenario))
    finding = None
    try:
        run.to_the_end()
    except FindingError as error:
        finding = Finding(error.check, error.message, run.checker.steps - 1)
    except DeadlockError as error:
        finding = Finding("I8", str(error), run.checker.steps - 1)
    except IllegalAccessError as error:
        finding = Finding("access", str(error), run.checker.steps - 1)
    except Exception as error:  # the core's own fault: it may raise anything
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{where.filename.rsplit('/', 1)[-1]}:{where.lineno} in {where.name}"
        finding = Finding("raised", f"{type(error).__name__}: {error} ({place})", run.checker.steps - 1)
    return Episode(run.checker.steps, run.checker.digest, run.checker.counts, finding)


NO_PLAN = 2**63  # has this number


class _Run:
    """One scenario on one engine."""

    def __init__(self, scenario: Scenario, adversary: Adversary) -> None:
        config = scenario.config
        self.scheduler = Scheduler(config)
        self.executor = FaithfulExecutor(config, self.scheduler.rows, adversary, scenario.faults)
        self.checker = Checker(scenario, self.scheduler, self.executor)
        self.hazards = HazardChecker(config)
        self.inbox = Inbox()
        self._commands = deque(scenario.commands)
        self._epoch = 0
        self._paused = False

    def to_the_end(self) -> None:
        scheduler, executor, checker, hazards = self.scheduler, self.executor, self.checker, self.hazards
        commands, rows, due = self._commands, scheduler.rows, self._due
        loop = pipeline(scheduler, self.inbox)
        send = loop.send
        reply: object = None
        while True:
            if due <= scheduler.plans:
                self._enter(commands.popleft())
                due = self._due
                continue
            try:
                effect = send(reply)
            except StopIteration:
                break
            reply = None
            if isinstance(effect, Host):
                if effect.kind == "plan":
                    executor.epoch = self._epoch  # commands that came before this plan have been applied
                    if self._paused:
                        raise FindingError("pause", f"step {effect.plan.step} is planned while the engine is paused")
                    checker.planned(effect.plan, self._epoch)
                    hazards.planned(effect.plan, rows)
            elif isinstance(effect, Launch):
                reply = executor.launch(effect.program)
                hazards.launched(effect.program)  # a refused one too, as one that fails: later steps carry over from it
            elif isinstance(effect, Collect):
                result = executor.collect(effect.ticket)  # type: ignore[arg-type]  # what Launch answered
                checker.collected(effect.ticket, result)  # type: ignore[arg-type]
                if isinstance(result, StepFailure):
                    hazards.failed(effect.plan, stuck=result.stuck)
                else:
                    hazards.collected(effect.plan)
                if hazards.findings:
                    raise FindingError("I4", str(hazards.findings[0]))
                reply = result
            elif isinstance(effect, Deliver):
                checker.delivered(effect.output)
            elif isinstance(effect, Idle):
                self._idle()
                due = self._due
        executor.finish()
        checker.finish()

    @property
    def _due(self) -> int:
        """Before which plan the next command enters."""
        return self._commands[0].at if self._commands else NO_PLAN

    def _enter(self, command: Submission | Control) -> None:
        if isinstance(command, Submission):
            self.checker.submitted(command)
            matcher = PatternMatcher(command.pattern) if command.pattern else None
            prompt = np.array(command.prompt, dtype=np.int32)
            self.inbox.put(Submit(command.request_id, prompt, command.params, command.priority, matcher))
        elif command.kind == "abort":
            self.checker.aborting(command.request_id)
            self.inbox.put(Abort(command.request_id))
        else:
            self.inbox.put(CONTROLS[command.kind])
            self._paused = command.kind != "resume"
            self.checker.counts["pauses"] += command.kind == "pause"
            if command.kind == "clear":
                self.checker.counts["clears"] += 1
                self._epoch += 1  # new weights

    def _idle(self) -> None:
        """Nothing can run: time jumps to the next command. After the last a pause ends, and then the inbox closes."""
        self.checker.idle(len(self.inbox))
        commands = self._commands
        if len(self.inbox):
            return
        if commands:
            at = commands[0].at
            while commands and commands[0].at == at:
                self._enter(commands.popleft())
        elif self.scheduler.is_paused and self.scheduler.has_requests:
            self.inbox.put(Resume())
            self._paused = False
        elif self.inbox.closed:
            raise FindingError("I8", f"the inbox is closed and the loop does not end: {self.scheduler.counts}")
        else:
            self.inbox.close()


CONTROLS: dict[str, Command] = {"pause": Pause(), "clear": Pause(clear=True), "resume": Resume()}


def _adversary(scenario: Scenario) -> Adversary:
    if scenario.adversary == "lazy":
        return Lazy()
    return Eager() if scenario.adversary == "eager" else Seeded(scenario.adversary_seed)


@dataclass(frozen=True, slots=True)
class FuzzReport:
    """Episodes of consecutive seeds, in numbers. `counts` says what was exercised, `failure` how it ended early.

    cpu_seconds  of this process: what `seconds` would be on a machine that does nothing else
    """

    episodes: int
    steps: int
    seconds: float
    cpu_seconds: float
    counts: dict[str, int]
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """`seed` draws the episode that failed; `shrunk` is the smallest scenario found that fails the same check."""

    seed: int
    finding: Finding
    shrunk: Scenario
    shrunk_finding: Finding


COLLECT_EVERY = 256  # episodes; looking for garbage all the time would take a twentieth of it
RERUN_EVERY = 64  # an episode whose seed is a multiple of this runs twice, and must do the same (I9)


def fuzz(
    seed: int = 0,
    options: FuzzOptions | None = None,
    *,
    episodes: int | None = None,
    steps: int | None = None,
    seconds: float | None = None,
    progress: Callable[[int, int, float], None] | None = None,
) -> FuzzReport:
    """Episodes of seeds `seed`, `seed + 1`, ... up to the first limit given, or the first finding.

    `progress` is told episodes, steps and seconds after each episode. Second runs count as steps, not as episodes.
    """
    with _garbage_waits():
        return _fuzz(seed, options or FuzzOptions(), episodes, steps, seconds, progress)


def _fuzz(
    seed: int,
    options: FuzzOptions,
    episodes: int | None,
    steps: int | None,
    seconds: float | None,
    progress: Callable[[int, int, float], None] | None,
) -> FuzzReport:
    counts = dict.fromkeys(COUNTED, 0)
    start, cpu_start = time.perf_counter(), time.process_time()
    done = total = 0
    while True:
        scenario = draw_scenario(seed + done, options)
        episode = run_scenario(scenario)
        finding = episode.finding
        total += episode.steps
        if finding is None and (seed + done) % RERUN_EVERY == 0:
            again = run_scenario(scenario)
            total += again.steps
            if again != episode:
                finding = Finding("I9", "a second run of the same scenario differs", episode.steps)
        done += 1
        if done % COLLECT_EVERY == 0:
            gc.collect()
            gc.freeze()  # what is there by now stays
        for name, count in episode.counts.items():
            counts[name] += count
        elapsed, on_cpu = time.perf_counter() - start, time.process_time() - cpu_start
        if finding is not None:
            return FuzzReport(done, total, elapsed, on_cpu, counts, _failure(seed + done - 1, scenario, finding))
        if progress is not None:
            progress(done, total, elapsed)
        if (
            (episodes is not None and done >= episodes)
            or (steps is not None and total >= steps)
            or (seconds is not None and elapsed >= seconds)
        ):
            return FuzzReport(done, total, elapsed, on_cpu, counts)


@contextmanager
def _garbage_waits() -> Iterator[None]:
    """Python looks for no garbage by itself meanwhile."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def _failure(seed: int, scenario: Scenario, finding: Finding) -> Failure:
    from asyncsched.fuzz_shrink import shrink

    shrunk = shrink(scenario, finding)
    return Failure(seed, finding, shrunk, run_scenario(shrunk).finding or finding)
