"""One case for each scenario of docs/known-faults.md that concerns the core: 1 to 22."""

from __future__ import annotations

from itertools import pairwise

from asyncsched.fuzz_scenario import Control, Submission
from asyncsched.kv import NULL_BLOCK
from asyncsched.oracle import reference
from asyncsched.request import FinishReason
from mutants.cases import (
    VOCABULARY,
    ask,
    batch,
    both,
    carried_over_a_gap,
    case,
    counted,
    engine,
    evictions,
    late_tokens_are_out,
    nothing_between,
    says,
    sources_are_newest,
)
from mutants.watching import (
    Chosen,
    Commanded,
    Committed,
    Copied,
    Ended,
    Evicted,
    Fed,
    Filled,
    Planned,
    Played,
    Refused,
    Returning,
    Starved,
)

# ---- 1 to 6: eviction ------------------------------------------------------------------------------------------------

case(
    "01-evict-in-flight",
    engine(num_blocks=8),
    *batch(4, 3, 8),
    occurred=lambda played: any(event.samples and event.known >= event.prompt + 2 for event in evictions(played)),
    right=late_tokens_are_out,
)

case(
    "02-evict-during-chunked-prefill",
    engine(depth=3, max_num_batched_tokens=4, num_blocks=8),
    ask(0, 2, 12),
    ask(1, 13, 2),
    occurred=lambda played: any(event.late and 0 < event.planned < event.prompt for event in evictions(played)),
)

case(
    "03-skipped-then-planned-again",
    engine(depth=3, max_num_batched_tokens=16, block_size=4, num_blocks=8, preemption="offload"),
    *(ask(number, prompt, 9) for number, prompt in enumerate((3, 1, 2, 6))),
    occurred=carried_over_a_gap,
    right=sources_are_newest,
)

case(
    "04-clear-with-nothing-in-flight",
    engine(enable_prefix_caching=True),
    ask(0, 4, 8),
    ask(1, 5, 8),
    Control(4, "pause"),
    Control(50, "clear"),
    Control(100, "resume"),
    ask(2, 4, 8, at=100, text=1),
    occurred=lambda played: (
        any(
            event.kind == "clear" and not event.before and len(played.all(Evicted)) == 2
            for event in played.all(Commanded)
        )
        and all(event.delivered for event in played.all(Evicted))
    ),
    right=lambda played: nothing_between(played, "pause", "resume"),
)


def reused_at_once(played: Played) -> bool:
    """Blocks of a request with a step in flight are part of the plan for which it was evicted."""
    plans = [(event, next(played.after(event, Planned))) for event in evictions(played) if event.late]
    return any(
        plan.before and not set(event.blocks).isdisjoint(block for blocks in plan.blocks.values() for block in blocks)
        for event, plan in plans
    )


case(
    "05-evict-while-N-is-not-committed",
    engine(num_blocks=5, max_num_seqs=3),
    *batch(3, 2, 8),
    occurred=reused_at_once,
)


def goes_on_after_eviction(played: Played) -> bool:
    """A request whose user had tokens was evicted, and its user got the others later."""
    return any(
        event.delivered
        and event.request in [n for c in played.after(event, Committed) for n in c.output.requests.tolist()]
        for event in evictions(played)
    )


case(
    "06-evict-after-delivery",
    engine(num_blocks=8),
    *(submission._replace(pattern=(1, 2)) for submission in batch(4, 3, 8)),
    occurred=goes_on_after_eviction,
)

# ---- 7 to 12: what is in flight --------------------------------------------------------------------------------------


def waits_for_a_writer(played: Played) -> bool:
    """A request ends by its content while a later step writes to its blocks. Another, which could have them, waits."""
    ended = [event for event in played.all(Ended) if event.late and event.notice.reason is FinishReason.STOP]
    return any(
        other.quiet < other.blocks <= other.available for event in ended for other in played.after(event, Returning)
    )


case(
    "07-finish-at-N-while-N+1-writes",
    engine(num_blocks=6, max_num_seqs=2, preemption="offload"),
    ask(0, 1, 11, stop_token_ids=(says(1, 11, number=0)[9],)),
    ask(1, 2, 8),
    occurred=waits_for_a_writer,
)


case(
    "08-fenced-blocks-are-not-free",
    engine(depth=3, max_num_seqs=3, block_size=1, num_blocks=16, preemption="offload"),
    *batch(3, 3, 8),
    occurred=lambda played: any(event.coming >= event.decoding > 1 and event.before for event in played.all(Starved)),
    right=lambda played: all(event.coming < played.scenario.config.max_num_seqs for event in evictions(played)),
)

case(
    "09-window-freed-on-the-optimistic-count",
    engine(depth=3, max_num_seqs=3, block_size=1, num_blocks=9, sliding_window=4, preemption="offload"),
    *batch(5, 2, 8),
    occurred=lambda played: (
        any(event.optimist and event.behind for event in played.all(Committed)) and counted(restored_blocks=1)(played)
    ),
)


def rows_are_private(played: Played) -> bool:
    """No row means another request than in a step in flight."""
    in_flight: dict[int, dict[int, int]] = {}
    for event in played.happened:
        if isinstance(event, Committed):
            in_flight.pop(event.plan.step, None)
        if isinstance(event, Planned):
            rows = dict(zip(event.plan.rows.tolist(), event.plan.requests.tolist(), strict=True))
            if any(other.get(row, number) != number for other in in_flight.values() for row, number in rows.items()):
                return False
            in_flight[event.plan.step] = rows
    return True


def row_is_recycled(played: Played) -> bool:
    """A request ends with a step in flight that names its row, and another gets the row later."""
    return any(
        event.row in plan.plan.rows and event.notice.number not in plan.plan.requests
        for event in played.all(Ended)
        if event.late
        for plan in played.after(event, Planned)
    )


case(
    "10-row-recycled-in-flight",
    engine(depth=3, max_num_seqs=2),
    *(ask(number, 2, 8, stop_token_ids=(says(2, 8, number=number)[2],)) for number in range(6)),
    occurred=row_is_recycled,
    right=rows_are_private,
)


def filled_before_copied(played: Played) -> bool:
    """The host writes the inputs of a step, with another block table, before those of the step before are copied."""
    blocks = {event.plan.step: event.blocks for event in played.all(Planned)}
    copied = -1
    for event in played.happened:
        if isinstance(event, Copied):
            copied = event.step
        if isinstance(event, Filled) and copied < event.step - 1 and blocks[event.step] != blocks[event.step - 1]:
            return True
    return False


case(
    "11-table-rewritten-before-its-copy",
    engine(depth=3, max_num_seqs=3),
    *batch(4, 3, 8),
    occurred=filled_before_copied,
    adversaries=("lazy",),
)


def wraps_while_padded(played: Played) -> bool:
    """Steps are padded beyond their rows, and slots come round while tokens of other slots are pending."""
    padded = [plan for plan in played.plans if plan.bucket > plan.num_seqs]
    return any(plan.carry.max(initial=-1) >= plan.slot * 4 + 4 for plan in padded)


case(
    "12-ring-of-tokens-wraps",
    engine(depth=3, decode_buckets=(4,)),
    *batch(3, 2, 12),
    occurred=wraps_while_padded,
    right=sources_are_newest,
)

# ---- 13 to 16: prefixes and admission --------------------------------------------------------------------------------


def hits_of(played: Played, request: int) -> int:
    """Where the first row of a request starts."""
    return played.rows_of(request)[0][1]


case(
    "13-prefix-registered-when-planned",
    engine(enable_prefix_caching=True),
    ask(0, 8, 4, text=1),
    Control(1, "abort", "0"),
    ask(1, 9, 4, at=1, text=1),
    ask(2, 9, 4, at=4, text=1),
    occurred=lambda played: any(
        event.notice.reason is FinishReason.ABORT and event.late and event.blocks for event in played.all(Ended)
    ),
    right=lambda played: (hits_of(played, 1), hits_of(played, 2)) == (0, 8),
)

case(
    "14-whole-prompt-cached",
    engine(enable_prefix_caching=True, max_num_seqs=2),
    ask(0, 8, 2, text=1),
    ask(1, 8, 2, at=4, text=1),
    ask(2, 6, 2, at=4, text=1),
    occurred=counted(prefix_hits=2),
    right=lambda played: [hits_of(played, number) for number in (1, 2)] == [6, 4],
)


def refusals(played: Played) -> list[str]:
    return [event.notice.message for event in played.all(Refused)]


case(
    "15-never-fits",
    engine(num_blocks=6),
    ask(0, 3, 4),
    ask(1, 12, 2),
    ask(2, 3, 4),
    occurred=lambda played: len(refusals(played)) == 1,
    right=lambda played: (
        all(figure in refusals(played)[0] for figure in ("12", "2", "14", "7", "6")) and counted(length_stops=2)(played)
    ),
)


def waits_for_blocks(played: Played) -> bool:
    """Requests wait though there is a seat and budget, some of them with blocks that they had or could share."""
    config = played.scenario.config
    return any(
        event.waiting > 1
        and event.seated < config.max_num_seqs
        and event.plan.num_tokens < config.max_num_batched_tokens
        for event in played.all(Planned)
    ) and counted(evictions=1, prefix_hits=1)(played)


case(
    "16-waiting-requests-hold-no-blocks",
    engine(num_blocks=8, enable_prefix_caching=True),
    *(ask(number, 5, 8, text=1) for number in range(2)),
    *(ask(number, 7, 4, text=1) for number in range(2, 5)),
    occurred=waits_for_blocks,
)

# ---- 17 to 22: plans, ends and aborts --------------------------------------------------------------------------------


def victims_are_not_planned(played: Played) -> bool:
    """Nobody is part of the plan for which they were evicted."""
    plans = [(event.request, next(played.after(event, Planned), None)) for event in evictions(played)]
    return all(event is None or request not in event.plan.requests for request, event in plans)


case(
    "17-victim-in-the-plan",
    engine(max_num_seqs=3, max_num_batched_tokens=4, num_blocks=8, victim="lowest-priority"),
    ask(0, 2, 12, priority=2),
    ask(1, 13, 2),
    ask(2, 2, 8, priority=1),
    occurred=lambda played: any(event.preferred in event.taken for event in played.all(Chosen)),
    right=victims_are_not_planned,
)


def evicts_when_full(played: Played) -> bool:
    """All seats are taken and no block is free; then someone is evicted for the next plan."""
    plans = played.all(Planned)
    return any(
        not one.available and one.seated == played.scenario.config.max_num_seqs and other.evicted
        for one, other in pairwise(plans)
    )


case(
    "18-evicts-when-full",
    engine(num_blocks=8, max_num_seqs=2),
    *batch(2, 3, 10),
    occurred=evicts_when_full,
)


def padding_is_null(played: Played) -> bool:
    """Padding rows write to the null block, and have the table that is all null."""
    config = played.scenario.config
    return all(
        position // config.block_size == NULL_BLOCK and row == config.max_num_seqs * config.depth
        for event in played.all(Filled)
        for position, row in event.padding
    )


case(
    "19-padding-row-in-a-full-pool",
    engine(num_blocks=12, decode_buckets=(4,)),
    *batch(3, 2, 7),
    occurred=lambda played: any(
        not event.available and event.plan.bucket > event.plan.num_seqs for event in played.all(Planned)
    ),
    right=both(padding_is_null, counted(padded_steps=5)),
)


case(
    "padding tokens in a full pool",
    engine(num_blocks=12, mixed_buckets=(6, 8)),
    *batch(3, 2, 7),
    occurred=lambda played: any(
        not event.available and event.plan.mixed_bucket > event.plan.num_tokens for event in played.all(Planned)
    ),
    right=counted(padded_mixed_steps=5),
)


def leaves_its_seat(played: Played) -> bool:
    """A plan is made without a request whose last step is in flight, and with others."""
    last = {n: max(step for step, _, _ in played.rows_of(n)) for n in range(len(played.notices()))}
    return any(last[n] in event.before and n not in event.plan.requests for event in played.all(Planned) for n in last)


case(
    "20-length-stops-exactly",
    engine(max_num_seqs=3),
    ask(0, 3, 1),
    ask(1, 4, 20),
    ask(2, 2, 5),
    ask(3, 23, 1),
    occurred=both(leaves_its_seat, counted(length_stops=4)),
    right=lambda played: [played.rows_of(number)[-1][2] for number in range(4)] == [3, 23, 6, 23],
)


def tokens_fed(played: Played) -> bool:
    """Each matcher sees the tokens of its request, each once and in order: placeholders when they were planned."""
    requests = [command for command in played.scenario.commands if isinstance(command, Submission)]
    for number, spec in enumerate(requests):
        said = reference(spec.prompt, spec.params, pattern=spec.pattern, vocab_size=VOCABULARY).outputs
        if [event.token for event in played.all(Fed) if event.matcher == number] != said:
            return False
    return True


case(
    "21-processors-see-tokens",  # penalties are the sampler's: tests/gpu/test_generation.py and tests/test_sampling.py
    engine(depth=3),
    ask(0, 3, 9, pattern=tuple(says(3, 9, number=0)[4:7])),
    ask(1, 5, 6, pattern=(1, 2)),
    ask(2, 2, 9, pattern=tuple(says(2, 9, number=2)[1:2])),
    occurred=counted(carried_tokens=10, content_stops=2, overshoot_rows=1),
    right=tokens_fed,
)

case(
    "22-late-abort-and-late-result",
    engine(max_num_seqs=2),
    ask(0, 2, 2),
    ask(1, 2, 12),
    ask(2, 2, 12),
    Control(5, "abort", "0"),
    Control(5, "abort", "1"),
    Control(5, "abort", "1"),
    ask(3, 2, 4, at=5),
    ask(4, 2, 4, at=5),
    Control(6, "abort", "1"),
    Control(6, "abort", "nobody"),
    Control(6, "abort", "3"),
    Control(6, "abort", "4"),
    occurred=lambda played: (
        [event.effect for event in played.all(Commanded)] == [False, True, *[False] * 3, True, True]
        and any(event.row < 0 for event in played.all(Ended))
        and any(event.late and event.notice.reason is FinishReason.ABORT for event in played.all(Ended))
    ),
)

case(
    "23-overlap-stays-on",
    engine(depth=3, enable_prefix_caching=True, decode_buckets=(2, 4), preemption="offload"),
    *(ask(number, 4, 9, text=1, stop_token_ids=(1, 2), pattern=(3, 4)) for number in range(4)),
    occurred=counted(padded_steps=1, carried_tokens=20),
    right=lambda played: all(len(event.before) == 2 for event in played.all(Planned)[2:]),
)
