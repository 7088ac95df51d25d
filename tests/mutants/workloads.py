"""Cases beside those of docs/known-faults.md: ordinary runs, and kinds of fault that nobody there has shipped."""

from __future__ import annotations

from asyncsched.faults import Fault, FaultKind
from asyncsched.fuzz_policies import full_name
from asyncsched.fuzz_scenario import Control
from mutants.cases import (
    ask,
    batch,
    both,
    case,
    counted,
    engine,
    evictions,
    held_back,
    holds_back,
    order_of_starts,
    overlaps,
    says,
)
from mutants.watching import Commanded, Committed, Ended, Planned, Played, Returning

# ---- ordinary runs ---------------------------------------------------------------------------------------------------

MIXED = tuple(ask(number, 2 * number + 1, 6) for number in range(5))

case("plain", engine(), *MIXED, occurred=counted(carried_tokens=10, prefill_chunks=6), right=overlaps)
case("alone in flight", engine(depth=1), *MIXED, occurred=counted(delivered_tokens=30))
case("deep", engine(depth=4), *MIXED, occurred=counted(carried_tokens=10, prefill_chunks=6), right=overlaps)


case(
    "decodes around a prefill",
    engine(max_num_seqs=3),
    *(ask(number, *sizes) for number, sizes in enumerate(((2, 12), (2, 12), (2, 5), (3, 6)))),
    occurred=lambda played: any(
        [one.num_seqs, two.num_seqs, three.num_seqs] == [3] * 3 and two.num_decodes == 2 and two.num_tokens > 3
        for one, two, three in zip(played.plans, played.plans[2:], played.plans[4:], strict=False)
    ),
)


case(
    "a prefill ends between decodes",
    engine(max_num_batched_tokens=4),
    ask(0, 2, 14),
    ask(1, 2, 14),
    ask(2, 16, 2, at=6),
    Control(8, "abort", "2"),
    occurred=lambda played: any(
        one.rows is three.rows and two.num_decodes < two.num_seqs
        for one, two, three in zip(played.plans, played.plans[2:], played.plans[4:], strict=False)
    ),
)


def is_whole(played: Played) -> bool:
    """Every prompt is computed by one step."""
    return all(played.rows_of(number)[0][2] == 2 * number + 1 for number in range(5))


def waits_for_budget(played: Played) -> bool:
    """Someone waits though there is a seat, a block and some of the budget."""
    config = played.scenario.config
    return any(
        event.waiting and event.seated < config.max_num_seqs and event.plan.num_tokens < config.max_num_batched_tokens
        for event in played.all(Planned)
    )


case(
    "whole prompts",
    engine(enable_chunked_prefill=False, max_num_batched_tokens=14),
    *MIXED,
    occurred=waits_for_budget,
    right=is_whole,
)


def one_batch_at_a_time(played: Played) -> bool:
    """Whoever starts does so with others that start, or with nobody."""
    running: set[int] = set()
    ends = {number: max(step for step, _, _ in played.rows_of(number)) for number in range(6)}
    for plan in played.plans:
        running = {number for number in running if ends[number] >= plan.step}
        new = set(plan.requests.tolist()) - running
        if new and running:
            return False
        running |= new
    return True


case(
    "static",
    engine(depth=1, batching="static", max_num_seqs=3),
    *(ask(number, 2, 3 + number) for number in range(6)),
    occurred=lambda played: any(event.waiting and event.seated < 3 for event in played.all(Planned)),
    right=one_batch_at_a_time,
)
case(
    "priorities",
    engine(max_num_seqs=2, num_blocks=8, admission="priority", victim="lowest-priority"),
    *(ask(number, 3, 10, priority=priority) for number, priority in enumerate((3, 1, 2, 0))),
    occurred=lambda played: len(evictions(played)) > 0,
    right=lambda played: (
        order_of_starts(played) == [3, 1, 2, 0] and [event.request for event in evictions(played)] == [1, 2, 0]
    ),
)
case(
    "worst case",
    engine(num_blocks=8, reservation="worst-case"),
    *batch(3, 3, 8),
    occurred=lambda played: any(event.waiting and event.available > 2 for event in played.all(Planned)),
    right=lambda played: not evictions(played),
)


def could_come_back(played: Played) -> bool:
    """There is room for an evicted request before its late token is in."""
    config = played.scenario.config
    return any(
        event.last in plan.before
        and plan.available * config.block_size > event.known
        and plan.seated < config.max_num_seqs
        for event in evictions(played)
        for plan in played.after(event, Planned)
    )


case(
    "room before the late token",
    engine(depth=3, max_num_seqs=2, max_num_batched_tokens=2, num_blocks=9),
    ask(0, 1, 11),
    ask(1, 1, 7, at=4),
    occurred=could_come_back,
)

# ---- offload ---------------------------------------------------------------------------------------------------------

case(
    "offload",
    engine(depth=3, max_num_seqs=3, num_blocks=9, preemption="offload"),
    *batch(5, 3, 8),
    occurred=counted(offloaded_blocks=7, restored_blocks=7),
)
case(
    "offload, then abort",
    engine(max_num_seqs=2, num_blocks=8, preemption="offload"),
    *batch(2, 3, 12),
    Control(14, "abort", "1"),
    occurred=lambda played: counted(offloaded_blocks=2, aborts=1)(played) and not counted(restored_blocks=1)(played),
)
case(
    "restored soon",
    engine(depth=3, max_num_seqs=3, max_num_batched_tokens=4, num_blocks=6, preemption=full_name("EveryOther")),
    *(ask(number, *sizes) for number, sizes in enumerate(((1, 2), (1, 2), (1, 4), (1, 1), (2, 2)))),
    occurred=lambda played: any(
        not event.is_restored and event.blocks <= event.quiet for event in played.all(Returning)
    ),
)
case(
    "host blocks reused",
    engine(
        depth=3,
        max_num_seqs=2,
        max_num_batched_tokens=2,
        block_size=3,
        num_blocks=3,
        preemption="offload",
        num_host_blocks=1,
    ),
    *(ask(number, 1, max_tokens) for number, max_tokens in enumerate((1, 3, 7, 3))),
    occurred=counted(offloaded_blocks=1, restored_blocks=1),
)


def shared_while_copied(played: Played) -> bool:
    """The last owner of a block gives it up while the offload that another owner asked for is in flight."""
    in_flight: dict[int, set[int]] = {}
    for event in played.happened:
        if isinstance(event, Planned):
            in_flight[event.plan.step] = set(event.plan.offload.device.tolist())
        if isinstance(event, Committed):
            in_flight.pop(event.plan.step)
        if isinstance(event, Ended) and any(not copied.isdisjoint(event.blocks) for copied in in_flight.values()):
            return True
    return False


case(
    "shared block offloaded",
    engine(
        max_num_batched_tokens=6,
        block_size=3,
        num_blocks=11,
        enable_prefix_caching=True,
        preemption=full_name("EveryOther"),
    ),
    ask(0, 1, 10, text=0),
    ask(1, 1, 10, text=0),
    ask(2, 3, 10),
    ask(1, 1, 1),  # rejected, the id is in use
    ask(4, 1, 1, text=0),
    ask(5, 3, 7, text=3),
    occurred=shared_while_copied,
)

# ---- prefixes --------------------------------------------------------------------------------------------------------

case(
    "equal blocks",
    engine(enable_prefix_caching=True, max_num_seqs=1),
    ask(0, 2, 1)._replace(prompt=(7, 7)),
    ask(1, 5, 2, at=3)._replace(prompt=(7, 7, 7, 7, 7)),
    occurred=counted(prefix_hits=1),
)
case(
    "late commit",
    engine(max_num_seqs=2, max_num_batched_tokens=2, max_model_len=32, num_blocks=9, enable_prefix_caching=True),
    *(ask(number, *sizes, text=0) for number, sizes in enumerate(((3, 13), (1, 2), (1, 1), (2, 6)))),
    occurred=lambda played: any(event.late for event in evictions(played)) and counted(prefix_hits=1)(played),
)
case(
    "shared blocks",
    engine(max_num_seqs=3, num_blocks=14, enable_prefix_caching=True),
    ask(0, 6, 3, text=1),
    ask(1, 8, 8, at=2, text=1),
    ask(2, 7, 2, at=2, text=1),
    *(ask(number, 7, 4, at=4) for number in range(3, 6)),
    occurred=counted(prefix_hits=2),
)
case(
    "failed admission",
    engine(num_blocks=6, max_num_seqs=2, enable_prefix_caching=True),
    ask(0, 4, 9, text=1),
    ask(1, 9, 2, at=4, text=1),
    occurred=lambda played: (
        any(event.waiting and event.seated == 1 for event in played.all(Planned)) and counted(prefix_hits=1)(played)
    ),
)

# ---- new weights -----------------------------------------------------------------------------------------------------

case(
    "clear in flight",
    engine(enable_prefix_caching=True),
    ask(0, 4, 1, text=1),
    Control(1, "clear"),
    Control(3, "resume"),
    ask(1, 5, 3, at=4, text=1),
    occurred=lambda played: any(event.kind == "clear" and event.before for event in played.all(Commanded)),
)
case(
    "clear with copies",
    engine(max_num_seqs=2, num_blocks=8, preemption="offload"),
    *batch(2, 3, 12),
    Control(14, "clear"),
    Control(16, "resume"),
    occurred=lambda played: counted(offloaded_blocks=2, clears=1)(played) and not counted(restored_blocks=1)(played),
)

# ---- stops -----------------------------------------------------------------------------------------------------------

SAID = {number: says(3, 9, number=number) for number in range(6)}

case(
    "stop tokens",
    engine(),
    ask(0, 3, 9, stop_token_ids=(SAID[0][3],)),
    ask(1, 3, 9),
    ask(2, 3, 9, stop_token_ids=(SAID[2][8],)),
    occurred=counted(content_stops=2, length_stops=1, overshoot_rows=1),
)
case(
    "second stop token",
    engine(),
    ask(0, 3, 9, stop_token_ids=(1, SAID[0][3])),
    occurred=counted(content_stops=1),
)
case(
    "several stop tokens",
    engine(),
    ask(0, 3, 9, stop_token_ids=(1, SAID[0][3])),
    ask(1, 3, 9, stop_token_ids=(SAID[1][2], 2), min_tokens=5),
    ask(2, 3, 9, stop_token_ids=(SAID[2][4], 3), min_tokens=5),
    ask(3, 3, 9, stop_token_ids=(SAID[3][3], SAID[3][5]), min_tokens=5),
    occurred=counted(content_stops=3, length_stops=1, overshoot_rows=1),
)
case(
    "patterns",
    engine(),
    ask(0, 3, 9, pattern=tuple(SAID[0][2:6])),
    ask(1, 3, 9, pattern=(*SAID[1][2:5], 1)),
    ask(2, 3, 9, pattern=(*SAID[2][7:9], 1)),
    ask(3, 3, 6),
    occurred=both(holds_back, counted(content_stops=1, length_stops=3, overshoot_rows=1)),
    right=held_back,
)

case(
    "a matcher joins",
    engine(),
    ask(0, 3, 9),
    ask(1, 3, 9, at=4, pattern=(1, 2)),
    occurred=lambda played: (
        any(plan.requests.tolist() == [0] for plan in played.plans[:2])
        and any({0, 1}.issubset(plan.requests) for plan in played.plans)
    ),
)

# ---- failures --------------------------------------------------------------------------------------------------------

case(
    "failed step",
    engine(depth=3, max_num_seqs=3),
    *batch(6, 2, 6),
    occurred=counted(failed_steps=1, failed_requests=3, length_stops=3),
    faults=(Fault(FaultKind.RAISE, 3),),
)
case(
    "stuck",
    engine(depth=3, max_num_seqs=2, num_blocks=12),
    *batch(8, 2, 6),
    occurred=counted(stuck_steps=1, quarantined_blocks=2, length_stops=5),
    faults=(Fault(FaultKind.TIME_OUT, 3),),
)
case(
    "stuck copy",
    engine(depth=3, max_num_seqs=3, num_blocks=9, preemption="offload"),
    *batch(5, 3, 8),
    occurred=lambda played: any(event.failed and len(event.plan.offload.host) for event in played.all(Committed)),
    faults=(Fault(FaultKind.TIME_OUT, 4),),
)
case(
    "stuck restore",
    engine(depth=3, max_num_seqs=3, num_blocks=9, preemption="offload"),
    *batch(5, 3, 8),
    occurred=lambda played: any(event.failed and len(event.plan.restore.host) for event in played.all(Committed)),
    faults=(Fault(FaultKind.TIME_OUT, 9),),
)
case(
    "stuck behind an end",
    engine(depth=3, max_num_seqs=1, num_blocks=8),
    ask(0, 2, 12),
    ask(1, 8, 4),
    Control(6, "abort", "0"),
    occurred=lambda played: counted(stuck_steps=1, aborts_in_flight=1)(played) and len(evictions(played)) == 1,
    faults=(Fault(FaultKind.TIME_OUT, 5),),
)
case(
    "bad token",
    engine(),
    *batch(3, 2, 6),
    occurred=counted(bad_tokens=1, length_stops=2),
    faults=(Fault(FaultKind.TOKEN, 3, 1, -1),),
)
case(
    "raising policy",
    engine(max_num_seqs=2, admission=full_name("RaisesInAdmission")),
    *batch(6, 2, 4),
    occurred=counted(policy_faults=1, length_stops=6),
)
