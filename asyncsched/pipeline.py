"""The loop, written once: keep up to `depth` steps in flight, collect the oldest, commit it, plan the next.

A generator that yields what it wants done and is sent the result. It does no I/O and knows no clock: one driver gives
it a GPU, another virtual time, another a hundred engines at once. With depth 1 it is synchronous batching, with
depth 2 the asynchronous batching in which step N+1 is planned and launched while step N computes.

What a step gives to users is handed over behind the next launch, where there is one: turning tokens into text may take
long, and the device has work meanwhile.

Host work is done inside the generator and reported with `Host` when it is done: a real driver has timed it by then,
a simulated one lets that much virtual time pass. Planning that finds nothing to do is not reported.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from asyncsched import leaps
from asyncsched.plan import StepOutput, StepPlan
from asyncsched.program import StepProgram, build_program
from asyncsched.request import NO_TOKENS, Finished, SamplingParams, StopMatcher, TokenArray
from asyncsched.scheduler import Scheduler
from asyncsched.stretch import Passed, Stretch


class Submit(NamedTuple):
    request_id: str
    prompt: TokenArray
    params: SamplingParams
    priority: int = 0
    matcher: StopMatcher | None = None


class Abort(NamedTuple):
    request_id: str


class Pause(NamedTuple):
    """`clear` also evicts everybody and forgets cached prefixes."""

    clear: bool = False


class Resume(NamedTuple):
    pass


Command = Submit | Abort | Pause | Resume


class Inbox:
    """Commands for an engine; the pipeline takes them before a plan. `close` says that no more will come but aborts.

    `observer`, where there is one, is told of each command when it is taken.
    """

    def __init__(self) -> None:
        self._commands: deque[Command] = deque()
        self.closed = False
        self.observer: Callable[[Command], None] | None = None

    def put(self, command: Command) -> None:
        if self.closed and not isinstance(command, Abort):
            raise ValueError("the inbox is closed")
        self._commands.append(command)

    def close(self) -> None:
        self.closed = True

    def take(self) -> Command | None:
        if not self._commands:
            return None
        command = self._commands.popleft()
        if self.observer is not None:
            self.observer(command)
        return command

    def __len__(self) -> int:
        return len(self._commands)


@dataclass(slots=True, eq=False)
class Host:
    """Host work of this kind (plan, commit) was done for `plan`."""

    kind: Final[str]
    plan: Final[StepPlan]


@dataclass(slots=True, eq=False)
class Launch:
    """Run the program up to its `synchronize`, without blocking. Send back a ticket."""

    program: Final[StepProgram]


@dataclass(slots=True, eq=False)
class Collect:
    """Block until the step is done. Send back its tokens, int32[m], copied out of the slot; or a StepFailure."""

    ticket: Final[object]
    plan: Final[StepPlan]


@dataclass(slots=True, eq=False)
class Deliver:
    """Hand tokens and notices to their users now."""

    output: Final[StepOutput]


class Idle(NamedTuple):
    """Nothing can run until a command arrives or the inbox is closed."""


class Leap(NamedTuple):
    """Only to drivers that leap. Nothing is decided in the next `stretch.steps` iterations of the loop: each plans and
    launches a step of the stretch, hands over `output`, then collects and commits the oldest, `in_flight` first, which
    gives the `output` of the next iteration. Send back `Leaped`."""

    stretch: Stretch
    in_flight: tuple[StepPlan, ...]
    output: StepOutput | None


class Leaped(NamedTuple):
    """So many iterations passed, none if the loop is to go on step by step.

    tokens  of the plans in flight that were collected
    token   what every collected step of the stretch sampled for every row
    last_tokens  int32[n], what a row of the stretch samples instead where it reaches its length limit
    """

    steps: int
    tokens: Sequence[TokenArray] = ()
    token: int = 0
    last_tokens: TokenArray = NO_TOKENS


class Landed(NamedTuple):
    """What came of a leap, to hand to users: `output` behind the first launch, and so on; `passed.last` not yet. Send
    back a ticket for each plan of `passed.in_flight`."""

    stretch: Stretch
    passed: Passed
    output: StepOutput | None


@dataclass(frozen=True, slots=True)
class StepFailure:
    """Why a step has no tokens. `stuck`: it may still touch its slot, rows and blocks (it timed out, say)."""

    cause: str
    stuck: bool = False


NO_SLOT = "every I/O slot is held by a step that never came back: start a new engine"

Effect = Host | Launch | Collect | Deliver | Idle | Leap | Landed
Pipeline = Generator[Effect, object, None]


def pipeline(scheduler: Scheduler, inbox: Inbox, *, can_leap: bool = False) -> Pipeline:
    """Runs until the inbox is closed and everything submitted has ended. `can_leap`: the driver can take a `Leap`."""
    slots = deque(range(scheduler.config.depth))  # free ones; a step that never came back keeps its slot
    in_flight: deque[tuple[StepPlan, object]] = deque()
    output: StepOutput | None = None  # not handed over yet
    while True:
        if output is not None and len(inbox):  # a command comes after what was there before it
            yield Deliver(output)
            output = None
        notices = _apply(scheduler, inbox) if len(inbox) else None
        if notices:
            if output is not None:  # the command came from another thread, just now
                yield Deliver(output)
                output = None
            yield Deliver(notices)
        if can_leap and len(slots) == 1 and len(in_flight) == scheduler.config.depth - 1 and not len(inbox):
            landed = yield from _leap(scheduler, slots[0], [plan for plan, _ in in_flight], output)
            if landed is not None:
                slots[0], in_flight, output = landed
                continue
        plan = scheduler.plan(slots[0]) if slots else None
        if plan is not None:
            slots.popleft()
            yield Host("plan", plan)
            ticket = yield Launch(build_program(plan))
            in_flight.append((plan, ticket))
        if output is not None:
            yield Deliver(output)
            output = None
            if plan is None and not in_flight and len(inbox):
                continue  # whoever got it has sent a command
        if plan is not None and slots:
            continue
        if in_flight:
            plan, ticket = in_flight.popleft()
            result = yield Collect(ticket, plan)
            output = _settle(scheduler, plan, result)
            if not (isinstance(result, StepFailure) and result.stuck):
                slots.append(plan.slot)
            yield Host("commit", plan)
        elif not slots and scheduler.has_requests:
            yield Deliver(scheduler.fail_all(NO_SLOT))
        elif inbox.closed and not len(inbox) and not scheduler.has_requests:
            return
        else:
            yield Idle()


def _leap(
    scheduler: Scheduler, slot: int, in_flight: list[StepPlan], output: StepOutput | None
) -> Generator[Effect, object, tuple[int, deque[tuple[StepPlan, object]], StepOutput] | None]:
    """Offers the driver a leap. The free slot, the steps in flight and what is not handed over yet where it lands; None
    where it takes none."""
    stretch = leaps.stretch(scheduler, [slot, *[plan.slot for plan in in_flight]])
    if stretch is None:
        return None
    leaped = yield Leap(stretch, tuple(in_flight), output)
    assert isinstance(leaped, Leaped)
    if not leaped.steps:
        return None
    passed = leaps.advance(scheduler, stretch, leaped.steps, in_flight, leaped.tokens, leaped.token, leaped.last_tokens)
    tickets = yield Landed(stretch, passed, output)
    pairs = zip(passed.in_flight, tickets, strict=True)  # type: ignore[call-overload]  # Landed's contract
    return stretch.slots[leaped.steps % len(stretch.slots)], deque(pairs), passed.last


def _settle(scheduler: Scheduler, plan: StepPlan, result: object) -> StepOutput:
    if isinstance(result, StepFailure):
        return scheduler.fail(plan, result.cause, stuck=result.stuck)
    tokens: TokenArray = result  # type: ignore[assignment]  # Collect's contract
    return scheduler.commit(plan, tokens)


def _apply(scheduler: Scheduler, inbox: Inbox) -> StepOutput | None:
    """Takes every waiting command; returns the notices they caused."""
    notices: list[Finished] = []
    while (command := inbox.take()) is not None:
        notice = _apply_one(scheduler, command)
        if notice is not None:
            notices.append(notice)
    return StepOutput.of_notices(tuple(notices)) if notices else None


def _apply_one(scheduler: Scheduler, command: Command) -> Finished | None:
    match command:
        case Submit(request_id, prompt, params, priority, matcher):
            return scheduler.submit(request_id, prompt, params, priority=priority, matcher=matcher)
        case Abort(request_id):
            return scheduler.abort(request_id)
        case Pause(clear):
            scheduler.pause(clear=clear)
        case Resume():
            scheduler.resume()
    return None
