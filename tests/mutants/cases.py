"""Small scenarios, each about one thing that can go wrong, with a test that it occurred and what else must be right.

Those of docs/known-faults.md have its number in their name. Whether tokens, blocks and order are right is what every
episode
checks; `right` is for what no invariant says: who goes first, who waits, what stays on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from asyncsched.config import EngineConfig
from asyncsched.faults import Fault
from asyncsched.fuzz_scenario import Control, Scenario, Submission
from asyncsched.oracle import PatternMatcher, reference
from asyncsched.plan import NO_SOURCE
from mutants.watching import (
    Commanded,
    Committed,
    Evicted,
    Fed,
    Planned,
    Played,
)

Test = Callable[[Played], bool]
Command = Submission | Control
VOCABULARY = 1000
ADVERSARIES = ("eager", "lazy", "1", "2", "3", "4")


class Case(NamedTuple):
    """`occurred` says that what the case is about took place, `right` what must hold beyond all checks."""

    name: str
    scenario: Scenario
    occurred: Test
    right: Test
    adversaries: tuple[str, ...] = ADVERSARIES

    def __str__(self) -> str:
        return self.name


CASES: dict[str, Case] = {}


def case(
    name: str,
    config: EngineConfig,
    *commands: Command,
    occurred: Test,
    right: Test = lambda played: True,
    faults: tuple[Fault, ...] = (),
    adversaries: tuple[str, ...] = ADVERSARIES,
) -> None:
    CASES[name] = Case(name, Scenario(config, commands, faults), occurred, right, adversaries)


def engine(**changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "depth": 2,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 8,
        "max_model_len": 24,
        "block_size": 2,
        "num_blocks": 40,
        "num_host_blocks": 20,
        "vocab_size": VOCABULARY,
    }
    return EngineConfig(**{**values, **changes})


def ask(number: int, prompt: int, max_tokens: int, *, at: int = 0, text: int | None = None, **more: Any) -> Submission:
    """A request named by its number. Its prompt is its own, or the `text` it shares with others."""
    return Submission(at, str(number), words(prompt, number + 1 if text is None else text), max_tokens, **more)


def words(count: int, text: int) -> tuple[int, ...]:
    return tuple(100 * text + place for place in range(count))


def says(prompt: int, count: int, *, number: int) -> list[int]:
    """What the model says to the request with this number."""
    submission = ask(number, prompt, count)
    return reference(submission.prompt, submission.params, vocab_size=VOCABULARY).outputs


def batch(count: int, prompt: int, max_tokens: int) -> list[Submission]:
    return [ask(number, prompt, max_tokens) for number in range(count)]


# ---- questions -------------------------------------------------------------------------------------------------------


def counted(**least: int) -> Test:
    """At least so many of what an episode counts."""
    return lambda played: all(played.episode.counts[name] >= count for name, count in least.items())


def evictions(played: Played) -> list[Evicted]:
    return [event for event in played.all(Evicted) if not event.by_pause]


def overlaps(played: Played) -> bool:
    """As many steps are in flight as the engine has slots."""
    return max(len(event.before) for event in played.all(Planned)) == played.scenario.config.depth - 1


def late_tokens_are_out(played: Played) -> bool:
    """Every request that was evicted while a step sampled for it got that token from the step."""
    late = [event for event in evictions(played) if event.samples]
    return all(
        any(event.request in commit.output.requests.tolist() for commit in played.after(event, Committed))
        for event in late
    )


def sources_are_newest(played: Played) -> bool:
    """Each carry-over names where the newest step in flight that sampled for the request leaves its token."""
    seats, in_flight = played.scenario.config.max_num_seqs, {}
    newest: dict[int, tuple[int, int]] = {}
    for event in played.happened:
        if isinstance(event, Committed):
            del in_flight[event.plan.step]
        if not isinstance(event, Planned):
            continue
        plan = event.plan
        for place, request in enumerate(plan.requests[: plan.num_decodes].tolist()):
            step, source = newest.get(request, (-1, NO_SOURCE))
            if int(plan.carry[place]) != (source if step in in_flight else NO_SOURCE):
                return False
        in_flight[plan.step] = plan
        for index, request in enumerate(plan.requests[[r in plan.sampled for r in plan.rows]].tolist()):
            newest[request] = plan.step, plan.slot * seats + index
    return True


def carried_over_a_gap(played: Played) -> bool:
    """A token is carried over from a step before the one before."""
    seats = played.scenario.config.max_num_seqs
    by_slot: dict[int, int] = {}
    for plan in played.plans:
        for source in plan.carry.tolist():
            if source != NO_SOURCE and by_slot[source // seats] < plan.step - 1:
                return True
        by_slot[plan.slot] = plan.step
    return False


def order_of_starts(played: Played) -> list[int]:
    """Requests in the order in which they are first computed."""
    return list(dict.fromkeys(number for plan in played.plans for number in plan.requests.tolist()))


def nothing_between(played: Played, first: str, last: str) -> bool:
    """No plan is made between two commands."""
    is_between = False
    for event in played.happened:
        if isinstance(event, Commanded) and event.kind in (first, last):
            is_between = event.kind == first
        if isinstance(event, Planned) and is_between:
            return False
    return True


def held_back(played: Played) -> bool:
    """Nobody is given tokens that may still become a stop."""
    got: Counter[int] = Counter()
    for event in played.all(Committed):
        got.update(event.output.requests.tolist())
        ended = {notice.number for notice in event.output.finished}
        spans = dict(zip(event.plan.requests.tolist(), event.plan.ends.tolist(), strict=True))
        for number in got.keys() - ended:
            spec = played.scenario.commands[number]
            assert isinstance(spec, Submission)
            if spec.pattern and number in spans and spans[number] >= len(spec.prompt):
                known = spans[number] + 1 - len(spec.prompt)
                matcher = PatternMatcher(spec.pattern)
                said = reference(spec.prompt, spec.params, pattern=spec.pattern, vocab_size=VOCABULARY).outputs
                held = [matcher.feed(token).held for token in said[:known]][-1]
                if known <= len(said) and got[number] > known - held:
                    return False
    return True


def holds_back(played: Played) -> bool:
    return any(event.match.held and not event.match.stopped for event in played.all(Fed))


def both(*tests: Test) -> Test:
    return lambda played: all(test(played) for test in tests)
