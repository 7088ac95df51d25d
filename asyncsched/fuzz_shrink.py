"""Shrinking: the smallest scenario found, greedily, that still fails the same check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from asyncsched.errors import ConfigError
from asyncsched.fuzz_scenario import Control, Scenario, Submission

if TYPE_CHECKING:
    from asyncsched.fuzz import Finding

MOST_RUNS = 2000
MOST_STEPS = 100_000


def shrink(
    scenario: Scenario, finding: Finding, *, most_runs: int | None = None, most_steps: int = MOST_STEPS
) -> Scenario:
    """Tries simpler scenarios in a fixed order and keeps each that fails the same check, until none does.

    After a success it goes on from there, and comes back to the start at the end. Bounded by runs and steps, not
    by time.
    """
    from asyncsched.fuzz import run_scenario

    best, place, improved = scenario, 0, False
    most_runs = MOST_RUNS if most_runs is None else most_runs
    while True:
        simpler = next(islice(_smaller(best), place, None), None)
        if simpler is None:
            if not improved:
                return best
            place, improved = 0, False
            continue
        episode = run_scenario(simpler)
        most_runs, most_steps = most_runs - 1, most_steps - episode.steps
        if episode.finding is not None and episode.finding.check == finding.check:
            best, improved = simpler, True
        else:
            place += 1
        if most_runs <= 0 or most_steps <= 0:
            return best


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Scenarios that are simpler in one respect, the boldest first."""
    commands = scenario.commands
    size = len(commands) // 2
    while size >= 1:
        for first in range(0, len(commands), size):
            yield replace(scenario, commands=commands[:first] + commands[first + size :])
        size //= 2
    for place in range(len(scenario.faults)):
        yield replace(scenario, faults=scenario.faults[:place] + scenario.faults[place + 1 :])
    for place, fault in enumerate(scenario.faults):
        for less in _less(fault.step, 0):
            sooner = fault._replace(step=less)
            yield replace(scenario, faults=(*scenario.faults[:place], sooner, *scenario.faults[place + 1 :]))
    yield from _simpler_engines(scenario)
    for gone in range(1, min((command.at for command in commands), default=0) + 1):
        yield replace(scenario, commands=tuple(command._replace(at=command.at - gone) for command in commands))
    for place, command in enumerate(commands):
        for simpler in _simpler_commands(command):
            yield replace(scenario, commands=(*commands[:place], simpler, *commands[place + 1 :]))


def _simpler_engines(scenario: Scenario) -> Iterator[Scenario]:
    config = scenario.config
    if scenario.adversary == "seeded":
        yield replace(scenario, adversary="eager")
        yield replace(scenario, adversary="lazy")
        for seed in range(min(scenario.adversary_seed, 8)):
            yield replace(scenario, adversary_seed=seed)
    plain = {
        "batching": "continuous",
        "enable_prefix_caching": False,
        "enable_chunked_prefill": True,
        "sliding_window": None,
        "decode_buckets": (),
        "mixed_buckets": (),
        "admission": "fcfs",
        "victim": "latest-arrival",
        "reservation": "optimistic",
        "preemption": "recompute",
    }
    changes: list[dict[str, object]] = [
        {field: value} for field, value in plain.items() if getattr(config, field) != value
    ]
    changes += [{"depth": depth} for depth in range(1, config.depth)]
    for field in ("max_num_seqs", "num_blocks", "num_host_blocks", "max_num_batched_tokens", "block_size"):
        value = getattr(config, field)
        changes += [{field: less} for less in sorted({1, value // 2, value - 1}) if 1 <= less < value]
    for change in changes:
        try:
            yield replace(scenario, config=replace(config, **change))  # type: ignore[arg-type]  # they fit
        except ConfigError:
            continue


def _simpler_commands(command: Submission | Control) -> Iterator[Submission | Control]:
    if isinstance(command, Submission):
        for less in _less(len(command.prompt), 1):
            yield command._replace(prompt=command.prompt[:less])
        for less in _less(command.max_tokens, 1):
            yield command._replace(max_tokens=less, min_tokens=min(command.min_tokens, less))
        plain = (
            command._replace(min_tokens=0),
            command._replace(stop_token_ids=()),
            command._replace(pattern=()),
            command._replace(priority=0),
        )
        yield from (simpler for simpler in plain if simpler != command)
        if any(command.prompt):
            yield command._replace(prompt=(0,) * len(command.prompt))
    for less in _less(command.at, 0):
        yield command._replace(at=less)


def _less(value: int, least: int) -> list[int]:
    return [less for less in sorted({least, value // 2, value - 1}) if least <= less < value]
