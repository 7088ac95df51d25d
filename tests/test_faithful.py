"""The token-faithful executor: right tokens for every legal order, wrong ones or a finding for every fault planted."""

import sys
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncsched import inputs, program, residency, scheduler
from asyncsched.adversary import DOWNSTREAM_FIRST, ORDERS, Drawn, Eager, Lazy, Seeded
from asyncsched.config import EngineConfig
from asyncsched.faithful import NO_OUTPUT, FaithfulExecutor
from asyncsched.faults import NEVER, Fault, FaultKind
from asyncsched.fuzz import Episode, run_scenario
from asyncsched.fuzz_draw import FuzzOptions, draw_scenario
from asyncsched.fuzz_scenario import Control, Scenario, Submission
from asyncsched.lanes import DeadlockError, Lanes, Ticket
from asyncsched.oracle import PatternMatcher, new_key, reference, sample, weights
from asyncsched.pipeline import StepFailure
from asyncsched.plan import NO_SOURCE
from asyncsched.program import Event, EventKind, Lane, Op, OpKind, Template, build_program
from asyncsched.request import FinishReason, SamplingParams
from asyncsched.scheduler import Scheduler

# ---- the model -------------------------------------------------------------------------------------------------------


def naive_outputs(prompt: list[int], count: int, window: int | None, vocab_size: int) -> list[int]:
    """The definition, written out: every token from the beginning."""
    tokens = list(prompt)
    factors = weights(len(prompt) + count)
    while len(tokens) < len(prompt) + count:
        keys: list[int] = []
        for position, token in enumerate(tokens):
            first = 0 if window is None else max(0, position - window + 1)
            digest = sum(factors[seen] * keys[seen] for seen in range(first, position))
            keys.append(new_key(token, position, digest, 0))
        tokens.append(sample(keys[-1], vocab_size))
    return tokens[len(prompt) :]


@given(
    prompt=st.lists(st.integers(0, 5), min_size=1, max_size=9),
    count=st.integers(1, 9),
    window=st.none() | st.integers(1, 6),
)
def test_reference_is_the_definition(prompt: list[int], count: int, window: int | None) -> None:
    alone = reference(prompt, SamplingParams(max_tokens=count), window=window, vocab_size=1000)
    assert alone.outputs == naive_outputs(prompt, count, window, 1000)
    assert alone.reason is FinishReason.LENGTH


@pytest.mark.parametrize("place", range(12))
def test_every_visible_key_changes_the_tokens(place: int) -> None:
    prompt = list(range(12))
    changed = [*prompt[:place], 99, *prompt[place + 1 :]]
    params = SamplingParams(max_tokens=3)
    vocab = 2**31 - 1
    assert reference(prompt, params, vocab_size=vocab).outputs != reference(changed, params, vocab_size=vocab).outputs


def test_reference_honours_stops() -> None:
    outputs = naive_outputs([1, 2], 6, None, 1000)
    stop = SamplingParams(max_tokens=6, stop_token_ids=(outputs[2],))
    assert reference([1, 2], stop, vocab_size=1000).outputs == outputs[:3]
    late = SamplingParams(max_tokens=6, min_tokens=4, stop_token_ids=(outputs[2],))
    assert reference([1, 2], late, vocab_size=1000).outputs == outputs
    pattern = reference([1, 2], SamplingParams(max_tokens=6), pattern=outputs[1:3], vocab_size=1000)
    assert pattern.outputs == outputs[:3]
    assert pattern.reason is FinishReason.STOP


def test_pattern_matcher_holds_back_what_may_still_match() -> None:
    matcher = PatternMatcher((1, 1, 2))
    assert [tuple(matcher.feed(token)) for token in (1, 1, 1, 3, 1, 1, 2, 2)] == [
        (1, False),
        (2, False),
        (2, False),
        (0, False),
        (1, False),
        (2, False),
        (0, True),
        (0, False),
    ]


# ---- lanes -----------------------------------------------------------------------------------------------------------

FIRST, SECOND = Event(EventKind.H2D_DONE, 0), Event(EventKind.COMPUTE_DONE, 0)


def lanes_of(adversary: object, ran: list[OpKind]) -> Lanes:
    runs = {kind: (lambda ticket, kind=kind: ran.append(kind)) for kind in OpKind}
    return Lanes(adversary, runs)  # type: ignore[arg-type]


def ticket() -> Ticket:
    return Ticket(None, 0)  # type: ignore[arg-type]  # these lanes run nothing that looks at a plan


def test_a_wait_for_an_event_never_recorded_passes_at_once() -> None:
    ran: list[OpKind] = []
    lanes = lanes_of(Lazy(), ran)
    ops = (Op(Lane.COMPUTE, OpKind.WAIT, event=FIRST), Op(Lane.COMPUTE, OpKind.FORWARD), Op(Lane.H2D, OpKind.H2D))
    lanes.enqueue(Template(0, 0, ops), ticket())
    lanes.drain()
    assert sorted(kind.value for kind in ran) == ["forward", "h2d"]


def test_a_wait_captures_the_newest_record_enqueued_before_it() -> None:
    ran: list[OpKind] = []
    lanes = lanes_of(Lazy(), ran)
    first = Template(0, 0, (Op(Lane.H2D, OpKind.H2D), Op(Lane.H2D, OpKind.RECORD, event=FIRST)))
    waits = (
        Op(Lane.COMPUTE, OpKind.WAIT, event=FIRST),
        Op(Lane.COMPUTE, OpKind.FORWARD),
        Op(Lane.COMPUTE, OpKind.RECORD, event=SECOND),
        Op(Lane.H2D, OpKind.RESTORE),
        Op(Lane.H2D, OpKind.RECORD, event=FIRST),
        Op(Lane.HOST, OpKind.SYNCHRONIZE, event=SECOND),
    )
    lanes.enqueue(first, ticket())
    second = ticket()
    lanes.enqueue(Template(0, 0, waits), second)
    assert second.synchronize is not None
    assert lanes.wait_for(second.synchronize)
    assert ran == [OpKind.H2D, OpKind.FORWARD]  # the restore, and the record behind it, need not have run


def test_a_lane_held_by_a_stall_goes_on_when_its_time_is_up() -> None:
    ran: list[OpKind] = []
    lanes = lanes_of(Eager(), ran)
    lanes.stall(0, 2, ticket())
    lanes.enqueue(Template(0, 0, (Op(Lane.H2D, OpKind.H2D),)), ticket())
    lanes.advance()
    assert lanes.is_stalled
    assert not ran
    lanes.advance()
    assert ran == [OpKind.H2D]


# ---- every order gives the tokens of a request alone -----------------------------------------------------------------

PROMPTS = ((1, 2, 3), (4,), (1, 2, 3, 4, 5, 6, 7, 8), (7, 7))


def small_scenario(depth: int, num_blocks: int, **engine: object) -> Scenario:
    config = EngineConfig(
        depth=depth,
        max_num_seqs=3,
        max_num_batched_tokens=5,
        max_model_len=16,
        block_size=2,
        num_blocks=num_blocks,
        vocab_size=1000,
        **engine,  # type: ignore[arg-type]
    )
    requests = [Submission(at, str(at), prompt, 8 - at) for at, prompt in enumerate(PROMPTS)]
    return Scenario(config, tuple(requests))


def check(episode: Episode) -> Episode:
    assert episode.finding is None, episode.finding
    return episode


@settings(max_examples=60)
@given(
    data=st.data(),
    depth=st.integers(1, 4),
    preemption=st.sampled_from(["recompute", "offload"]),
    enable_prefix_caching=st.booleans(),
)
def test_tokens_are_right_in_every_order(
    data: st.DataObject, depth: int, preemption: str, enable_prefix_caching: bool
) -> None:
    scenario = small_scenario(depth, 8, preemption=preemption, enable_prefix_caching=enable_prefix_caching)
    adversary = Drawn(lambda count: data.draw(st.integers(0, count - 1)))
    episode = check(run_scenario(scenario, adversary))
    assert episode.counts["evictions"] > 0
    assert episode.counts["length_stops"] == len(PROMPTS)


@pytest.mark.parametrize("adversary", [Eager(), Lazy(), Seeded(3)], ids=["eager", "lazy", "seeded"])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_orders_do_not_change_decisions(adversary: object, window: int | None) -> None:
    scenario = small_scenario(3, 8, sliding_window=window, decode_buckets=(2, 3))
    episode = check(run_scenario(scenario, adversary))  # type: ignore[arg-type]
    assert episode.digest == check(run_scenario(scenario, Eager())).digest


def test_adversaries_reach_different_orders() -> None:
    orders = {Seeded(seed).order(True) for seed in range(60)}
    assert orders >= set(ORDERS)
    assert Lazy().order(False) is None
    assert Lazy().order(True) == DOWNSTREAM_FIRST


# ---- faults of the device --------------------------------------------------------------------------------------------


def with_fault(kind: FaultKind, step: int, where: int = 0, value: int = 0, *, depth: int = 2) -> Episode:
    scenario = replace(small_scenario(depth, 24), faults=(Fault(kind, step, where, value),))
    return check(run_scenario(scenario))


@pytest.mark.parametrize("kind", [FaultKind.RAISE, FaultKind.COPY, FaultKind.MEMORY])
def test_a_failed_step_fails_its_requests_and_nobody_else(kind: FaultKind) -> None:
    episode = with_fault(kind, 3)
    assert episode.counts["failed_steps"] == 1
    assert 0 < episode.counts["failed_requests"] < len(PROMPTS)
    assert episode.counts["failed_requests"] + episode.counts["length_stops"] == len(PROMPTS)


@pytest.mark.parametrize("token", [-1, -(2**31), 1000])
def test_a_token_outside_the_vocabulary_fails_its_request(token: int) -> None:
    episode = with_fault(FaultKind.TOKEN, 3, where=1, value=token)
    assert episode.counts["bad_tokens"] == 1
    assert episode.counts["failed_requests"] == 1


@pytest.mark.parametrize("lane", [0, 1, 2])
def test_a_lane_stalled_for_ever_ends_the_engine(lane: int) -> None:
    episode = with_fault(FaultKind.LANE_STALL, 3, where=lane, value=NEVER)
    assert episode.counts["stuck_steps"] == 2
    assert episode.counts["failed_requests"] == len(PROMPTS) - episode.counts["length_stops"]


def test_a_step_that_comes_back_late_touches_nothing_in_use() -> None:
    episode = with_fault(FaultKind.TIME_OUT, 3, depth=3)
    assert episode.counts["stuck_steps"] == 1
    assert episode.counts["quarantined_blocks"] > 0
    assert episode.counts["length_stops"] > 0


# ---- faults of the core: each ends in wrong tokens, or in a read of what nobody wrote --------------------------------


class NoHazards:
    """The executor must find these on its own."""

    findings = ()

    def __init__(self, config: EngineConfig) -> None: ...
    def planned(self, *_: object) -> None: ...
    def launched(self, *_: object) -> None: ...
    def collected(self, *_: object) -> None: ...
    def failed(self, *_: object, stuck: bool = False) -> None: ...


def without(kind: OpKind, event: EventKind | None = None) -> Callable[[Template], Template]:
    """Drops operations of a program."""

    def change(template: Template) -> Template:
        ops = tuple(op for op in template.ops if not (op.kind is kind and (op.event is None or op.event.kind is event)))
        return replace(template, ops=ops)

    return change


def plant_in_programs(monkeypatch: pytest.MonkeyPatch, change: Callable[[Template], Template]) -> None:
    changed: dict[int, Template] = {}

    def build(plan: object) -> program.StepProgram:
        built = build_program(plan)  # type: ignore[arg-type]
        template = changed.setdefault(id(built.template), change(built.template))
        return built._replace(template=template)

    monkeypatch.setattr(sys.modules["asyncsched.pipeline"], "build_program", build)


def carry_from_next_row(monkeypatch: pytest.MonkeyPatch) -> None:
    seal = Scheduler._seal

    def wrong(self: Scheduler, *args: object) -> object:
        plan = seal(self, *args)  # type: ignore[arg-type]
        seats = self.config.max_num_seqs
        carry = np.where(plan.carry == NO_SOURCE, NO_SOURCE, plan.carry - plan.carry % seats + (plan.carry + 1) % seats)
        return replace(plan, carry=carry)

    monkeypatch.setattr(Scheduler, "_seal", wrong)


def positions_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = inputs.SlotInputs.fill

    def wrong(self: inputs.SlotInputs, plan: object) -> None:
        fill(self, plan)  # type: ignore[arg-type]
        self.positions += 1

    monkeypatch.setattr(inputs.SlotInputs, "fill", wrong)


def tables_of_the_last_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """One change of the block tables in five is lost."""
    fill = inputs.SlotInputs.fill

    def wrong(self: inputs.SlotInputs, plan: object) -> None:
        if len(self._changes) % 5 == 4:
            self._changes.pop(0)
        fill(self, plan)  # type: ignore[arg-type]

    monkeypatch.setattr(inputs.SlotInputs, "fill", wrong)


def blocks_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are handed out that somebody holds."""

    def wrong(self: residency.Residency, rows: object) -> None:
        if len(rows):  # type: ignore[arg-type]
            blocks = self.pool.allocate(len(rows))  # type: ignore[arg-type]
            taken = [max(blocks[0] - 1, 1)] * len(blocks)
            self.rows.write_table(self.rows.table_base[rows] + self.rows.num_blocks[rows], taken)  # type: ignore[index]
            self.rows.num_blocks[rows] += 1  # type: ignore[index]

    monkeypatch.setattr(residency.Residency, "grow", wrong)


def prefixes_of_anybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "block_hash", lambda parent, tokens: bytes(parent[:15]) + b"x")


def late_token_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request evicted with a step in flight goes on as if that step had not been."""
    unseat = Scheduler._unseat

    def wrong(self: Scheduler, request: scheduler.Request) -> None:
        evicted = request.status is scheduler.Status.WAITING and len(request.tokens) > 3
        unseat(self, request)
        if evicted:
            request.tokens = request.tokens[:-1]

    monkeypatch.setattr(Scheduler, "_unseat", wrong)


def deliver_overshoot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of requests that a content stop has ended are handed out."""
    commit = Scheduler.commit

    def wrong(self: Scheduler, plan: object, tokens: object) -> object:
        output = commit(self, plan, tokens)  # type: ignore[arg-type]
        if not output.overshoot:
            return output
        numbers = plan.requests[np.isin(plan.rows, plan.sampled)]  # type: ignore[attr-defined]
        return output._replace(requests=numbers, tokens=tokens)

    monkeypatch.setattr(Scheduler, "commit", wrong)


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "no wait for h2d": lambda m: plant_in_programs(m, without(OpKind.WAIT, EventKind.H2D_DONE)),
    "no wait for compute": lambda m: plant_in_programs(m, without(OpKind.WAIT, EventKind.COMPUTE_DONE)),
    "no synchronize": lambda m: plant_in_programs(m, without(OpKind.SYNCHRONIZE, EventKind.D2H_DONE)),
    "no record of h2d": lambda m: plant_in_programs(m, without(OpKind.RECORD, EventKind.H2D_DONE)),
    "no carry-over": lambda m: plant_in_programs(m, without(OpKind.CARRY)),
    "no offload": lambda m: plant_in_programs(m, without(OpKind.OFFLOAD)),
    "carry from the next row": carry_from_next_row,
    "positions off by one": positions_off_by_one,
    "tables of the last fill": tables_of_the_last_fill,
    "blocks of others": blocks_of_others,
    "prefixes of anybody": prefixes_of_anybody,
    "late token is lost": late_token_is_lost,
    "deliver overshoot": deliver_overshoot,
}


@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault_is_caught_by_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncsched.fuzz.HazardChecker", NoHazards)
    monkeypatch.setattr("asyncsched.fuzz_checks.Accounts.check", lambda *_: None)
    PLANTED[name](monkeypatch)
    for seed in range(300):
        finding = run_scenario(draw_scenario(seed, FuzzOptions(depths=(2, 3), faults=()))).finding
        if finding is not None:
            assert finding.check in ("I1", "I5", "I6", "I8", "I11", "access"), finding
            return
    pytest.fail("nothing was found in 300 episodes")


def test_a_read_of_what_nobody_wrote_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncsched.fuzz.HazardChecker", NoHazards)
    forward = FaithfulExecutor._forward

    def forgetful(self: FaithfulExecutor, ticket: Ticket) -> None:
        forward(self, ticket)
        if ticket.plan.step == 0:
            self.kv[int(ticket.plan.rows[0]) + 1] = [0] * self.config.block_size

    monkeypatch.setattr(FaithfulExecutor, "_forward", forgetful)
    finding = run_scenario(small_scenario(1, 40)).finding
    assert finding is not None
    assert finding.check == "I11"


def test_an_event_that_nobody_records_is_a_deadlock() -> None:
    config = EngineConfig(depth=1, max_num_seqs=1, max_model_len=8, num_blocks=4)
    engine = Scheduler(config)
    executor = FaithfulExecutor(config, engine.rows, Lazy())
    engine.submit("a", np.array([1, 2], dtype=np.int32), SamplingParams(max_tokens=2))
    plan = engine.plan(0)
    assert plan is not None
    ticket = executor.launch(build_program(plan))
    ticket.synchronize = ([False], 0)
    with pytest.raises(DeadlockError, match="step 0 waits"):
        executor.collect(ticket)


def test_output_of_a_step_that_did_not_run_is_not_a_token() -> None:
    config = EngineConfig(depth=1, max_num_seqs=1, max_model_len=8, num_blocks=4)
    engine = Scheduler(config)
    executor = FaithfulExecutor(config, engine.rows, Lazy())
    engine.submit("a", np.array([1, 2], dtype=np.int32), SamplingParams(max_tokens=2))
    plan = engine.plan(0)
    assert plan is not None
    ticket = executor.launch(build_program(plan))
    ticket.synchronize = None
    result = executor.collect(ticket)
    assert not isinstance(result, StepFailure)
    assert result.tolist() == [NO_OUTPUT]


def test_new_parameters_take_effect_with_the_next_plan() -> None:
    """A clear between steps: tokens sampled before keep, everything after comes from keys computed again."""
    base = small_scenario(2, 12, enable_prefix_caching=True)
    commands = sorted((*base.commands, Control(5, "clear"), Control(9, "resume")), key=lambda command: command.at)
    episode = check(run_scenario(replace(base, commands=tuple(commands))))
    assert episode.counts["clears"] == 1
    assert episode.counts["evictions"] > 0
    assert episode.digest != check(run_scenario(base)).digest
