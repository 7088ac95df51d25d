"""Drawing scenarios: one seed, one episode. What is drawn from is kept small, so that rare things meet."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from asyncsched.adversary import LANES
from asyncsched.config import EngineConfig
from asyncsched.faults import COPIES, NEVER, Fault, FaultKind
from asyncsched.fuzz_policies import FAULTY, HONEST, full_name
from asyncsched.fuzz_scenario import Control, Scenario, Submission
from asyncsched.oracle import reference
from asyncsched.policies import ADMISSION, PREEMPTION, RESERVATION, VICTIM

FAULT_NAMES = ("raise", "copy", "token", "host-stall", "lane-stall", "policy", "memory")


@dataclass(frozen=True, slots=True)
class FuzzOptions:
    """What episodes are drawn from. `avoid` leaves out what is known to be broken: see AVOIDABLE."""

    depths: tuple[int, ...] = (1, 2, 3, 4)
    faults: tuple[str, ...] = FAULT_NAMES
    avoid: tuple[str, ...] = ()


AVOIDABLE = ("offload", "prefix", "window", "clear", "chunked-off")


def draw_scenario(seed: int, options: FuzzOptions) -> Scenario:
    """The episode of this seed. Some are under pressure: shared prefixes, offload and a pool that is too small."""
    draw = random.Random(seed)
    pressed = draw.random() < 0.2
    longest = draw.choice((12, 32)) if pressed else draw.choice((12, 32, 64, 128))
    config = _draw_config(draw, options, longest)
    if pressed:
        config = _press(draw, options, config)
    submissions = _draw_submissions(draw, config, longest, shares=draw.choice((0.6, 1.0)) if pressed else None)
    config = _draw_pools(draw, config, submissions, spares=(0, 1, 2) if pressed else None)
    work = sum(submission.max_tokens for submission in submissions) // config.max_num_seqs
    horizon = max(submissions[-1].at, work) + 1  # about how many steps there will be
    ids = [submission.request_id for submission in submissions]
    commands: list[Submission | Control] = [*submissions]
    commands += _draw_aborts(draw, ids, horizon)
    commands += _draw_pauses(draw, horizon, may_clear="clear" not in options.avoid)
    commands.sort(key=lambda command: command.at)
    return Scenario(
        config,
        tuple(commands),
        _draw_faults(draw, options, config, horizon),
        adversary_seed=seed,
    )


# ---- what a scenario is drawn from -----------------------------------------------------------------------------------


def _draw_config(draw: random.Random, options: FuzzOptions, longest: int) -> EngineConfig:
    avoid = options.avoid
    depth = draw.choice(options.depths)
    seats = draw.choice((1, 2, 3, 3, 4, 4))
    block_size = draw.choice((1, 2, 3, 4) if longest < 20 else (2, 4, 8) if longest < 40 else (4, 8, 16))
    window = draw.choice((None,) * 9 + (1, 4, 9)) if "window" not in avoid else None
    chunked = draw.random() < 0.85 or "chunked-off" in avoid
    policies: dict[str, Any] = _draw_policies(draw, options)
    budget = draw.choice((1, 4, 16, longest, longest)) if chunked else longest + draw.randint(0, 8)
    return EngineConfig(
        depth=depth,
        batching="static" if depth == 1 and draw.random() < 0.2 else "continuous",
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        max_model_len=longest,
        block_size=block_size,
        enable_prefix_caching=draw.random() < 0.4 and "prefix" not in avoid,
        enable_chunked_prefill=chunked,
        sliding_window=window,
        decode_buckets=draw.choice(((), (), tuple(range(1, seats + 1)), (seats,), tuple(sorted({1, seats})))),
        mixed_buckets=draw.choice(((), (), (), (budget,), tuple(sorted({-(-budget // 2), budget})))),
        vocab_size=draw.choice((11, 97, 1000, 2**31 - 1)),
        **policies,
    )


def _press(draw: random.Random, options: FuzzOptions, config: EngineConfig) -> EngineConfig:
    """What makes evictions of requests that share blocks."""
    return replace(
        config,
        max_num_seqs=4,
        max_num_batched_tokens=max(config.max_num_batched_tokens, 8),
        block_size=draw.choice((2, 3, 4)),
        decode_buckets=(),
        enable_prefix_caching="prefix" not in options.avoid,
        reservation="optimistic",
        preemption="recompute" if "offload" in options.avoid else draw.choice(("offload", full_name("EveryOther"))),
    )


def _draw_pools(
    draw: random.Random, config: EngineConfig, submissions: list[Submission], spares: tuple[int, ...] | None
) -> EngineConfig:
    """Pools from the smallest in which every request can run to more than enough."""
    size, window = config.block_size, config.sliding_window
    most = max(-(-(len(s.prompt) + s.max_tokens - 1) // size) for s in submissions)
    is_bounded = window is not None and config.enable_chunked_prefill
    least = max(min(most, -(-((window or 1) - 1) // size) + 1) if is_bounded else most, 1)
    spare = draw.choice(spares or (0, 0, 1, 2, least // 2, least, 4 * most))
    return replace(config, num_blocks=least + spare, num_host_blocks=draw.choice((1, most + 1, 4 * most + 1)))


def _draw_policies(draw: random.Random, options: FuzzOptions) -> dict[str, str]:
    fields: dict[str, Iterable[str]] = {
        "admission": ADMISSION,
        "victim": VICTIM,
        "reservation": RESERVATION,
        "preemption": PREEMPTION,
    }
    policies = {}
    for field, known in fields.items():
        if field == "reservation" and draw.random() < 0.7:  # the other one never evicts
            continue
        names = [*known, *map(full_name, HONEST.get(field, ()))]
        if "policy" in options.faults and draw.random() < 0.08:
            names = [full_name(name) for name in FAULTY[field]]
        if field == "preemption" and "offload" in options.avoid:
            names = ["recompute"]
        policies[field] = draw.choice(names)
    return policies


def _draw_submissions(
    draw: random.Random, config: EngineConfig, longest: int, shares: float | None
) -> list[Submission]:
    """`shares`: how many prompts begin with a common prefix; drawn if None."""
    alphabet = min(draw.choice((2, 6, 1000)), config.vocab_size)
    prefixes = [_draw_tokens(draw, alphabet, draw.randrange(1, longest)) for _ in range(draw.randint(1, 3))]
    parts: tuple[int, ...] = (2, 2, 4)  # of the longest request that are prompt
    if shares is None:
        parts = (1, 4, 12, 12)
        shares = draw.choice((0.0, 0.6, 1.0)) if config.enable_prefix_caching else 0.1
    service = longest // (2 * config.max_num_seqs)  # plans between two that end, about
    gap = draw.choice((0, max(service // 2, 1), service, 2 * service))
    count = draw.randint(2, 6 + 400 // longest)
    eager_stops = draw.choice((0.0, 0.2, 0.6))
    submissions: list[Submission] = []
    at = 0
    for number in range(count):
        request_id = str(number)
        if number and draw.random() < 0.02:
            request_id = draw.choice(submissions).request_id  # in use, or used before
        most = longest - 1 if draw.random() > 0.02 else longest + 3  # the latter is rejected
        size = 0 if draw.random() < 0.01 else draw.randint(1, max(most // draw.choice(parts), 1))
        prompt = _draw_tokens(draw, alphabet, size)
        if draw.random() < shares:
            prompt = (draw.choice(prefixes)[: draw.choice((size, size - size % config.block_size))] + prompt)[:size]
        max_tokens = max(most + 1 - size, 1)
        if draw.random() < 0.6:
            max_tokens = draw.randint(1, max_tokens)
        submission = Submission(at, request_id, prompt, max_tokens, priority=draw.randint(0, 2))
        if prompt and draw.random() < eager_stops:
            submission = _draw_stops(draw, config, submission)
        submissions.append(submission)
        at += draw.randint(0, 2 * gap)
    return submissions


def _draw_tokens(draw: random.Random, alphabet: int, count: int) -> tuple[int, ...]:
    return tuple([int(draw.random() * alphabet) for _ in range(count)])


def _draw_stops(draw: random.Random, config: EngineConfig, submission: Submission) -> Submission:
    """Content stops that happen: taken from what the model says after this prompt."""
    alone = reference(
        submission.prompt, submission.params, window=config.sliding_window, vocab_size=config.vocab_size
    ).outputs
    at = draw.randrange(len(alone))
    stops: tuple[int, ...] = ()
    pattern: tuple[int, ...] = ()
    kind = draw.randrange(4)
    if kind < 2:
        stops = (alone[at],)
    if kind == 1:
        stops += (draw.choice(alone), draw.randrange(config.vocab_size))
    if kind >= 2:
        pattern = tuple(alone[at : at + draw.randint(1, 3)])
    if kind == 3 and len(pattern) > 1:
        pattern = (*pattern[:-1], draw.randrange(config.vocab_size))  # held back, and then no match
    min_tokens = draw.randint(0, submission.max_tokens) if draw.random() < 0.3 else 0
    return submission._replace(stop_token_ids=stops, pattern=pattern, min_tokens=min_tokens)


def _draw_aborts(draw: random.Random, ids: list[str], horizon: int) -> list[Control]:
    if draw.random() < 0.5:
        return []
    aborts = []
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(horizon)
        for _ in range(draw.randint(1, 4)):
            aborts.append(Control(at, "abort", draw.choice(ids) if draw.random() < 0.9 else "nobody"))
            if draw.random() < 0.2:
                aborts.append(aborts[-1])
    return aborts


def _draw_pauses(draw: random.Random, horizon: int, *, may_clear: bool) -> list[Control]:
    if draw.random() < 0.7:
        return []
    pauses = []
    for _ in range(draw.randint(1, 2)):
        at = draw.randrange(horizon)
        pauses.append(Control(at, draw.choice(("pause", "clear")) if may_clear else "pause"))
        pauses.append(Control(at + draw.randint(0, 6), "resume"))
    return pauses


def _draw_faults(draw: random.Random, options: FuzzOptions, config: EngineConfig, horizon: int) -> tuple[Fault, ...]:
    names = [name for name in options.faults if name != "policy"]
    if not names or draw.random() < 0.6:
        return ()
    faults: dict[int, Fault] = {}
    for _ in range(draw.randint(1, 3)):
        step = draw.randrange(horizon)
        name = draw.choice(names)
        where, value = draw.randrange(12), 0
        kind = FaultKind(name)
        if kind is FaultKind.TOKEN:
            value = draw.choice((-1, -(2**31), min(config.vocab_size, 2**31 - 1)))
        elif kind is FaultKind.LANE_STALL:
            where = where % len(LANES)
            value = draw.choice((NEVER, 1, 10, 100))
            if draw.random() < 0.3:
                kind = FaultKind.TIME_OUT
        elif kind is FaultKind.COPY:
            where = where % len(COPIES)
        faults[step] = Fault(kind, step, where, value)
    return tuple(faults[step] for step in sorted(faults))
