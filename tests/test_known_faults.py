"""Kinds of fault that asynchronous schedulers were shipped with, one scenario each.

Every test asserts that its scenario occurred: a run that merely went well proves nothing. That tokens, blocks and rows
were right all along is what the harness checks.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from faithful import VOCABULARY, tell
from harness import Ask, Entry, Eviction, Run
from strategies import family_text

from asyncsched.config import EngineConfig
from asyncsched.pipeline import Abort, Pause, Resume
from asyncsched.plan import NO_SOURCE, StepPlan
from asyncsched.request import NO_TOKENS, FinishReason, Request, SamplingParams
from asyncsched.scheduler import Scheduler

EVERY_TOKEN = tuple(range(VOCABULARY))


def engine(**changes: object) -> EngineConfig:
    values = {"depth": 2, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 40, "block_size": 2}
    return EngineConfig(**{**values, "num_blocks": 64, **changes})


def ask(name: str, prompt: int, max_tokens: int, *, priority: int = 0, text: int | None = None, **stops: object) -> Ask:
    """`text` chooses the prompt's text; by default each name has its own."""
    tokens = family_text(ord(name) if text is None else text, prompt)
    pattern = stops.pop("pattern", None)
    params = SamplingParams(max_tokens=max_tokens, **stops)
    return Ask(name, tokens, params, priority, pattern)


def run(config: EngineConfig, *asks: Ask, **more: object) -> Run:
    """Everybody submits at once."""
    return Run(config, [Entry(0, each) for each in asks], **more).run()


def chosen(result: Run) -> list[Eviction]:
    """Evictions that no pause asked for."""
    return [eviction for eviction in result.evictions if not eviction.cleared]


def spans(result: Run, name: str) -> list[tuple[int, int, int]]:
    """(step, start, end) of every row of a request."""
    number = next(n for n, life in enumerate(result.lives) if life.ask.request_id == name)
    found = []
    for plan in result.plans:
        for index in np.flatnonzero(plan.requests == number).tolist():
            found.append((plan.step, int(plan.starts[index]), int(plan.ends[index])))
    return found


# ---- eviction ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_1_the_late_tokens_of_an_evicted_request_are_delivered_and_computed_again(depth):
    result = run(engine(depth=depth, block_size=8, num_blocks=3), ask("a", 3, 10), ask("b", 3, 10))
    (eviction,) = chosen(result)
    assert (eviction.request_id, eviction.prefilling) == ("b", False)
    assert eviction.in_flight == depth - 1
    computed = spans(result, "b")
    restart = next(index for index in range(1, len(computed)) if computed[index][1] == 0)
    known = 3 + eviction.outputs + eviction.in_flight
    assert computed[restart - 1][2] + 1 == computed[restart][2] == known


def test_2_a_request_evicted_during_its_second_prefill_keeps_its_outputs():
    config = engine(block_size=1, num_blocks=12, max_num_batched_tokens=3)
    result = run(config, ask("a", 1, 12), ask("b", 1, 5), ask("c", 1, 5))
    again = chosen(result)[-1]
    assert (again.request_id, again.prefilling, again.outputs, again.in_flight) == ("c", True, 4, 1)
    assert [start for _, start, _ in spans(result, "c")].count(0) == 3
    assert len(result.life("c").delivered) == 5


def test_5_the_smallest_pool_with_evictions_before_the_step_is_committed():
    asks = [ask(name, 3, 8) for name in "abcd"]
    result = run(engine(depth=3, num_blocks=5), *asks)  # one request alone needs all five
    assert any(eviction.in_flight for eviction in chosen(result))
    assert [life.notice.reason for life in result.lives] == [FinishReason.LENGTH] * 4


def test_8_a_victim_that_frees_nothing_is_not_evicted():
    """An owner outside the running batch holds all blocks of the policy's first choice."""
    run = Run(engine(depth=1, num_blocks=6, victim="lowest-priority"), [])
    scheduler = run.scheduler
    submit(run, *(ask(name, 3, 8, priority=priority) for priority, name in enumerate("abc")))
    step(run)
    pinned = scheduler.rows.blocks_of(seated(scheduler, "c").row)
    scheduler.residency.pool.share(pinned)
    while not run.evictions:
        step(run)
    assert [eviction.request_id for eviction in run.evictions] == ["b"]
    assert seated(scheduler, "c")
    scheduler.residency.pool.release(pinned)


def test_8_nobody_is_evicted_when_every_victim_frees_nothing_and_a_step_in_flight_may():
    run = Run(engine(depth=2, num_blocks=4, victim="lowest-priority"), [])
    scheduler = run.scheduler
    submit(run, ask("a", 4, 5, priority=0), ask("b", 3, 5, priority=1))
    scheduler.plan(0)
    pinned = [block for name in "ab" for block in scheduler.rows.blocks_of(seated(scheduler, name).row)]
    scheduler.residency.pool.share(pinned)
    assert scheduler.residency.pool.available == 0
    plan = scheduler.plan(1)
    assert plan is not None
    assert plan.requests.tolist() == [1]  # a lacks a block and sits this step out, b has room in its own
    assert not run.evictions


def test_17_a_victim_that_is_already_in_the_plan_is_not_evicted():
    """The long prefill of `b` runs out of blocks while `c`, whom the policy would give up, decodes in the same plan."""
    config = engine(depth=1, num_blocks=11, max_num_batched_tokens=5, victim="lowest-priority", admission="priority")
    result = Run(
        config, [Entry(0, ask("c", 2, 12, priority=2)), Entry(6, ask("b", 16, 2)), Entry(6, ask("d", 2, 5))]
    ).run()
    shortfalls = [
        plan
        for plan in result.plans
        if 0 < plan.num_decodes < plan.num_seqs and plan.num_tokens < config.max_num_batched_tokens
    ]
    assert any({0, 1} <= set(plan.requests.tolist()) for plan in shortfalls)
    assert "c" in {eviction.request_id for eviction in chosen(result)}  # it was wanted, and taken later


def test_18_running_out_of_blocks_evicts():
    result = run(engine(depth=1, num_blocks=6), ask("a", 4, 8), ask("b", 4, 8))
    assert len(chosen(result)) == 1
    assert all(eviction.freed for eviction in chosen(result))


def test_16_waiting_requests_hold_no_blocks_that_the_head_of_the_queue_needs():
    """Three are evicted on the way; the head then needs nearly the whole pool."""
    result = Run(
        engine(num_blocks=8, admission="priority", victim="lowest-priority"),
        [Entry(0, ask(name, 3, 10, priority=1)) for name in "abc"] + [Entry(9, ask("h", 14, 2))],
    ).run()
    assert {eviction.request_id for eviction in chosen(result)} >= {"b", "c"}
    admitted = result.admissions("h")[0]
    assert any(admission.plan > admitted.plan for admission in result.admissions("b") + result.admissions("c"))


# ---- carry-over ----------------------------------------------------------------------------------------------------


def test_3_a_request_that_skipped_a_step_carries_over_from_the_step_it_was_in():
    """`b` sits out for want of a block that a finishing request holds; its own newest step is still in flight."""
    result = run(engine(depth=4, num_blocks=7, block_size=1), ask("a", 3, 2), ask("b", 1, 4))
    steps = {plan.step: plan for plan in result.plans}
    assert result.idle_slots, "nobody ever sat out"
    resumed = [
        plan
        for plan in result.plans
        if plan.num_decodes and plan.carry[0] != NO_SOURCE and plan.step in {after for after, _ in result.idle_slots}
    ]
    assert resumed
    for plan in resumed:
        assert plan.carry[0] // result.config.max_num_seqs == steps[plan.step - 1].slot


def test_3_a_carry_over_reaches_back_over_a_step_that_others_ran():
    """`a` is in step 0, lacks a block for step 1, which `b` runs alone, and is back in step 2 with step 0 in flight."""
    run = Run(engine(depth=3, num_blocks=4), [])
    scheduler = run.scheduler
    submit(run, ask("a", 4, 5), ask("b", 3, 5))
    scheduler.plan(0)
    pinned = [block for name in "ab" for block in scheduler.rows.blocks_of(seated(scheduler, name).row)]
    scheduler.residency.pool.share(pinned)  # nobody frees a block, so nobody is evicted
    second = scheduler.plan(1)
    assert second is not None
    assert second.requests.tolist() == [1]
    scheduler.residency.pool.release(pinned)
    scheduler.abort("b")
    third = scheduler.plan(2)
    assert third is not None
    assert third.requests.tolist() == [0]
    assert third.carry.tolist() == [0]  # slot 0, first sampled row


@pytest.mark.parametrize(("depth", "pause", "resume"), [(3, 18, 20), (4, 20, 22)])
def test_3_a_pause_of_one_step_in_mid_flight_keeps_the_carry_over(depth, pause, resume):
    script = [Entry(0, ask("a", 3, 14)), Entry(pause, Pause()), Entry(resume, Resume())]
    result = Run(engine(depth=depth), script).run()
    step, in_flight = result.idle_slots[0]
    assert in_flight == depth - 2
    plan, newest = result.plans[step], result.plans[step - 1]
    assert plan.carry.tolist() == [newest.slot * result.config.max_num_seqs]


def test_4_the_first_token_after_pause_and_clear_with_nothing_in_flight_is_delivered():
    script = [Entry(0, ask("a", 3, 8)), Entry(10, Pause(clear=True)), Entry(11, Resume())]
    result = Run(engine(depth=1), script).run()
    assert [(e.cleared, e.in_flight) for e in result.evictions] == [(True, 0)]
    assert len(result.admissions("a")) == 2
    assert len(result.life("a").delivered) == 8


# ---- blocks and rows that outlive their request --------------------------------------------------------------------


def test_7_a_block_is_reused_while_the_overshoot_step_still_writes_it():
    stops = ask("a", 3, 12, min_tokens=2, stop_token_ids=EVERY_TOKEN)
    result = Run(engine(), [Entry(0, stops), Entry(10, ask("b", 7, 4))]).run()
    assert result.life("a").overshoot == 1
    assert {(reuse.former, reuse.latter) for reuse in result.reuses} == {("a", "b")}


def test_9_a_window_moves_on_the_settled_count():
    """With three steps in flight the optimistic count would free a block that the oldest of them still reads."""
    windows: list[int] = []

    class Watch(Run):
        def planned(self, plan: StepPlan) -> None:
            super().planned(plan)
            row, rows, config = int(plan.rows[0]), self.scheduler.rows, self.config
            behind = max(0, int(rows.planned[row]) - config.sliding_window + 1) // config.block_size
            windows.append(behind - int(rows.freed[row]))

    result = Watch(engine(depth=3, sliding_window=3), [Entry(0, ask("a", 5, 14))]).run()
    assert max(windows) > 0
    assert result.life("a").notice.reason is FinishReason.LENGTH


def test_10_a_row_is_not_recycled_before_the_step_that_names_it_is_collected():
    """One seat: `b` is seated while a step still computes overshoot for `a`, hence in another row."""
    named: list[tuple[set[int], set[int]]] = []

    class Watch(Run):
        def planned(self, plan: StepPlan) -> None:
            named.append((set(plan.rows.tolist()), {row for other in self.in_flight for row in other.rows.tolist()}))
            super().planned(plan)

    stops = ask("a", 3, 12, min_tokens=2, stop_token_ids=EVERY_TOKEN)
    result = Watch(engine(max_num_seqs=1, depth=3), [Entry(0, each) for each in (stops, ask("b", 3, 4))]).run()
    first_of_b = spans(result, "b")[0][0]
    rows, in_flight = named[first_of_b]
    assert in_flight
    assert not rows & in_flight


def test_19_padding_needs_no_block_under_a_full_pool():
    full: list[int] = []

    class Watch(Run):
        def planned(self, plan: StepPlan) -> None:
            super().planned(plan)
            if plan.bucket > plan.num_seqs:
                full.append(self.scheduler.residency.pool.available)

    config = engine(num_blocks=6, decode_buckets=(4,))
    Watch(config, [Entry(0, ask(name, 4, 3)) for name in "ab"]).run()
    assert 0 in full


# ---- prefixes ------------------------------------------------------------------------------------------------------


def test_13_a_prefix_is_shared_once_its_step_is_committed_and_not_when_it_is_planned():
    same = [ask(name, 8, 3, text=1) for name in "abcd"]
    script = [
        Entry(0, same[0]),
        Entry(2, same[1]),  # a's step is in flight
        Entry(3, Abort("a")),
        Entry(20, same[2]),
    ]
    result = Run(engine(block_size=4, enable_prefix_caching=True), script).run()
    assert result.life("a").notice.reason is FinishReason.ABORT
    first_of_b = spans(result, "b")[0][0]
    assert first_of_b == 1
    assert result.flight_sizes[first_of_b] == 2
    assert [admission.cached for admission in result.admissions("b")] == [0]
    assert [admission.cached for admission in result.admissions("c")] == [4]


def test_13_nothing_is_shared_of_a_request_that_was_aborted_with_its_prefill_in_flight():
    script = [Entry(0, ask("a", 8, 3, text=1)), Entry(2, Abort("a")), Entry(9, ask("b", 8, 3, text=1))]
    result = Run(engine(block_size=4, enable_prefix_caching=True), script).run()
    assert len(spans(result, "a")) >= 1
    assert [admission.cached for admission in result.admissions("b")] == [0]


def test_13_nothing_is_shared_of_a_step_that_failed():
    script = [Entry(0, ask("a", 8, 3, text=1)), Entry(12, ask("b", 8, 3, text=1))]
    result = Run(engine(block_size=4, enable_prefix_caching=True), script, failing={0}).run()
    assert result.life("a").notice.reason is FinishReason.ERROR
    assert [admission.cached for admission in result.admissions("b")] == [0]
    assert result.life("b").notice.reason is FinishReason.LENGTH


def test_13_nothing_computed_before_a_clear_is_shared_after_it():
    """`a` has its last step in flight at the clear: it is not evicted, and commits blocks that no longer count."""
    script = [
        Entry(0, ask("a", 8, 1, text=1)),
        Entry(2, Pause(clear=True)),
        Entry(4, Resume()),
        Entry(14, ask("b", 8, 3, text=1)),
    ]
    result = Run(engine(block_size=4, enable_prefix_caching=True), script).run()
    assert not result.evictions
    assert result.deliveries[0].step == 0
    assert result.log.index("before plan 1: pause clear=True") < next(
        index for index, line in enumerate(result.log) if "end a" in line
    )
    assert [admission.cached for admission in result.admissions("b")] == [0]


@pytest.mark.parametrize(("prompt", "cached"), [(4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_14_a_prompt_that_is_cached_whole_still_has_a_query_token(prompt, cached):
    first, second = ask("a", prompt, 2, text=1), ask("b", prompt, 2, text=1)
    result = Run(engine(block_size=4, enable_prefix_caching=True), [Entry(0, first), Entry(20, second)]).run()
    assert [admission.cached for admission in result.admissions("b")] == [cached]
    assert spans(result, "b")[0][1:] == (cached, prompt)


def test_14_the_budget_counts_what_is_left_to_compute_after_the_hit():
    first, second = ask("a", 13, 2, text=1), ask("b", 13, 2, text=1)
    config = engine(block_size=4, enable_prefix_caching=True, max_num_batched_tokens=5)
    result = Run(config, [Entry(0, first), Entry(40, second)]).run()
    assert [admission.cached for admission in result.admissions("b")] == [12]
    assert spans(result, "b")[0][1:] == (12, 13)
    assert len(spans(result, "a")) > len(spans(result, "b"))


# ---- the ends of requests ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "numbers"),
    [
        ({"num_blocks": 4}, ("8", "12", "6", "4")),
        ({"max_model_len": 11}, ("8", "12", "11")),
        ({"enable_chunked_prefill": False, "max_num_batched_tokens": 10}, ("8", "12", "10")),
    ],
)
def test_15_what_can_never_fit_is_rejected_with_the_numbers_and_the_queue_goes_on(changes, numbers):
    result = run(engine(**changes), ask("a", 8, 4), ask("b", 3, 2))
    notice = result.life("a").notice
    assert notice.reason is FinishReason.REJECTED
    assert set(numbers) <= set(notice.message.replace(":", " ").replace(",", " ").split())
    assert "\n" not in notice.message
    assert result.life("b").notice.reason is FinishReason.LENGTH


def test_15_an_empty_prompt_is_rejected():
    notice = Scheduler(engine()).submit("a", NO_TOKENS, SamplingParams())
    assert notice is not None
    assert notice.reason is FinishReason.REJECTED


def test_15_the_largest_request_that_fits_runs():
    result = run(engine(num_blocks=6), ask("a", 9, 4))  # 13 tokens, of which 12 leave KV behind
    assert result.life("a").notice.reason is FinishReason.LENGTH


def test_20_the_last_step_by_length_is_in_flight_and_gives_up_its_seat():
    result = run(engine(max_num_seqs=1), ask("a", 3, 3), ask("b", 3, 2))
    assert [plan.requests.tolist() for plan in result.plans] == [[0], [0], [0], [1], [1]]
    together = [size for plan, size in zip(result.plans, result.flight_sizes, strict=True) if plan.step == 3]
    assert together == [2]  # b was admitted before a's last token was collected


def test_22_aborts_of_what_has_ended_or_never_was_and_late_results_harm_nobody():
    script = [
        Entry(0, ask("a", 3, 2)),
        Entry(0, ask("b", 3, 9)),
        Entry(0, ask("c", 3, 9)),
        Entry(9, Abort("b")),
        Entry(9, Abort("b")),
        Entry(15, Abort("a")),
        Entry(15, Abort("b")),
        Entry(16, Abort("nobody")),
    ]
    result = Run(engine(), script).run()
    assert [life.notice.reason for life in result.lives] == [
        FinishReason.LENGTH,
        FinishReason.ABORT,
        FinishReason.LENGTH,
    ]
    reasons = [{notice.reason for notice in output.finished} for output in result.deliveries]
    before = result.deliveries[reasons.index({FinishReason.ABORT}) - 1].step
    assert any(1 in plan.requests for plan in result.plans if plan.step > before)  # a result came late


# ---- faults found by the properties, kept ----------------------------------------------------------------------------


def test_a_neighbour_with_stops_that_need_scrutiny_repeats_no_token():
    """`b` joins after `a` has delivered on the short path; both are then committed one by one."""
    script = [Entry(0, ask("a", 3, 9)), Entry(12, ask("b", 3, 4, min_tokens=2, stop_token_ids=(1, 2)))]
    result = Run(engine(), script).run()
    assert len(result.life("a").delivered) == 9


def test_a_stop_string_completed_before_min_tokens_and_overlapping_itself_repeats_no_token():
    """x y x is complete and does not count; with y after it two tokens are a beginning again, and one is out."""
    params = SamplingParams(max_tokens=30, min_tokens=30)
    prompt, pattern = next(
        (prompt, outputs[first : first + 3])
        for prompt in product(EVERY_TOKEN, repeat=2)
        for outputs in [tell(prompt, params, None, None).outputs]
        for first in range(10)
        if outputs[first] != outputs[first + 1] and outputs[first : first + 2] == outputs[first + 2 : first + 4]
    )
    result = run(engine(), Ask("a", prompt, params, pattern=pattern))
    assert len(result.life("a").delivered) == 30


def test_chunked_prefill_stays_off_behind_a_sliding_window():
    config = engine(num_blocks=3, sliding_window=2, enable_chunked_prefill=False)
    result = run(config, ask("a", 8, 1), ask("b", 6, 1))
    assert [life.notice.reason for life in result.lives] == [FinishReason.REJECTED, FinishReason.LENGTH]


def test_worst_case_reservation_counts_every_step_in_flight_behind_a_sliding_window():
    small = {"depth": 4, "num_blocks": 3, "block_size": 7, "sliding_window": 4, "max_num_batched_tokens": 3}
    asks = ask("a", 12, 4), ask("b", 3, 2)
    assert run(engine(**small), *asks).evictions
    assert not run(engine(**small, reservation="worst-case"), *asks).evictions


def test_the_seat_of_a_static_batch_that_ends_early_stays_empty():
    """Three seats, blocks for two; `a` is done first and `c` would fit, but waits for the rest of the batch."""
    config = engine(depth=1, batching="static", max_num_seqs=3, num_blocks=7)
    result = run(config, ask("a", 4, 2), ask("b", 4, 8), ask("c", 8, 2))
    assert [plan.requests.tolist() for plan in result.plans[:2]] == [[0, 1], [0, 1]]
    assert spans(result, "c")[0][0] > spans(result, "b")[-1][0]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("window", [2, 3, 4])
@pytest.mark.parametrize("block_size", [2, 3, 4])
def test_worst_case_reservation_counts_a_window_that_straddles_blocks(depth, window, block_size):
    """One token at a time, so that the window is at every offset; pools that hold one or two such windows."""
    shape = {"depth": depth, "sliding_window": window, "block_size": block_size, "max_num_batched_tokens": 2}
    for num_blocks in range(-(-(window - 1) // block_size) + 1, 6):  # from what one request needs
        config = engine(**shape, num_blocks=num_blocks, reservation="worst-case")
        result = run(config, ask("a", 1, 13), ask("b", 1, 13))
        assert not result.evictions
        assert [life.notice.reason for life in result.lives] == [FinishReason.LENGTH] * 2


# ---- stepping by hand ----------------------------------------------------------------------------------------------


def submit(run: Run, *asks: Ask) -> None:
    for each in asks:
        run.submitted(each)
        request_id, prompt, params, priority, _ = each.command()
        run.scheduler.submit(request_id, prompt, params, priority=priority)


def step(run: Run) -> None:
    """One synchronous step of a scheduler, without a device: the tokens are the reference's."""
    plan = run.scheduler.plan(0)
    assert plan is not None
    requests = dict(zip(plan.rows.tolist(), plan.requests.tolist(), strict=True))
    tokens = [
        run.lives[requests[row]].story.tokens[end]
        for row, end in zip(plan.sampled.tolist(), plan.sampled_ends.tolist(), strict=True)
    ]
    run.scheduler.commit(plan, np.array(tokens, dtype=np.int32))


def seated(scheduler: Scheduler, name: str) -> Request:
    return next(request for request in scheduler._seated.values() if request.request_id == name)


def test_a_static_batch_is_filled_over_several_steps_though_some_of_it_have_ended():
    """Six prompts of 10 tokens, a budget of 20: the first two have one output each, and are gone when the last come."""
    config = engine(depth=1, batching="static", max_num_seqs=6, max_num_batched_tokens=20)
    result = run(config, *(ask(name, 10, 1 if name in "ab" else 6) for name in "abcdefg"))
    assert spans(result, "f")[0][0] < spans(result, "c")[-1][0]  # the batch of six was running
    assert spans(result, "g")[0][0] > max(spans(result, name)[-1][0] for name in "cdef")
    assert spans(result, "a")[-1][0] < spans(result, "f")[0][0]  # somebody had ended before the last of them came
