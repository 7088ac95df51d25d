"""The scheduler without its pipeline: any legal order of calls, with as many plans outstanding as the depth allows.

I/O slots are taken in any order and steps fail at any moment; what must hold is what holds in `harness.py`.
"""

from __future__ import annotations

import numpy as np
from harness import Ask, Invariants
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from strategies import BLOCK_SIZES, MAX_OUTPUT, MAX_PROMPT, asks, configs

from asyncsched.plan import NO_SOURCE, StepOutput, StepPlan
from asyncsched.scheduler import Scheduler


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        data=st.data(), block_size=st.sampled_from(BLOCK_SIZES), largest=st.integers(8, MAX_PROMPT + MAX_OUTPUT)
    )
    def start(self, data: st.DataObject, block_size: int, largest: int) -> None:
        self.config = data.draw(configs(block_size, largest))
        self.scheduler = Scheduler(self.config)
        self.checks = Invariants(self.config, self.scheduler)

    @rule(data=st.data(), name=st.sampled_from("abcdef"))
    def submit(self, data: st.DataObject, name: str) -> None:
        ask: Ask = data.draw(asks(self.config.block_size, name, alike=data.draw(st.booleans())))
        _, prompt, params, priority, matcher = ask.command()
        self.checks.submitted(ask)
        self.tell(self.scheduler.submit(name, prompt, params, priority=priority, matcher=matcher))

    @rule(name=st.sampled_from("abcdefz"))
    def abort(self, name: str) -> None:
        self.checks.aborted(name)
        self.tell(self.scheduler.abort(name))
        self.checks.check_aborted()

    @rule(clear=st.booleans())
    def pause(self, clear: bool) -> None:
        self.checks.clearing(clear)
        self.scheduler.pause(clear=clear)
        self.checks.clearing(False)

    @rule()
    def resume(self) -> None:
        self.scheduler.resume()

    @precondition(lambda self: len(self.checks.in_flight) < self.config.depth)
    @rule(data=st.data())
    def plan(self, data: st.DataObject) -> None:
        used = {plan.slot for plan in self.checks.in_flight}
        self.plan_in(data.draw(st.sampled_from([slot for slot in range(self.config.depth) if slot not in used])))

    @precondition(lambda self: self.checks.in_flight)
    @rule()
    def commit(self) -> None:
        plan = self.checks.collected(failed=False)
        self.checks.delivered(self.scheduler.commit(plan, self.sample(plan)))

    @precondition(lambda self: self.checks.in_flight)
    @rule(chance=st.integers(0, 3))
    def fail(self, chance: int) -> None:
        if chance == 0:
            self.checks.delivered(self.scheduler.fail(self.checks.collected(failed=True), "a fault"))

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "checks"):
            self.checks.check_state()

    def teardown(self) -> None:
        """I8: from wherever the rules left it, everything ends."""
        if not hasattr(self, "checks"):
            return
        self.scheduler.resume()
        for _ in range(100 * (1 + len(self.checks.lives))):
            used = {plan.slot for plan in self.checks.in_flight}
            free = [slot for slot in range(self.config.depth) if slot not in used]
            if not (free and self.plan_in(free[-1])):
                if not self.checks.in_flight:
                    break
                self.commit()
            self.checks.check_state()
        self.checks.check_idle()
        self.checks.check_all_ended()

    def plan_in(self, slot: int) -> bool:
        settled = {row: int(known) for row, known in enumerate(self.scheduler.rows.known.tolist())}
        plan = self.scheduler.plan(slot)
        if plan is None:
            self.checks.nothing_planned()
            return False
        assert plan.carry.tolist() == self.sources(plan, settled)
        self.checks.planned(plan)
        return True

    def sources(self, plan: StepPlan, settled: dict[int, int]) -> list[int]:
        """The carry-over mask, derived from the plans in flight alone."""
        expected = []
        for row, position in zip(plan.rows[: plan.num_decodes].tolist(), plan.starts.tolist(), strict=False):
            sources = [
                earlier.slot * self.config.max_num_seqs + index
                for earlier in self.checks.in_flight
                for index, (sampled, end) in enumerate(zip(earlier.sampled, earlier.sampled_ends, strict=True))
                if (sampled, end) == (row, position)
            ]
            assert len(sources) == (settled[row] <= position)
            expected += sources or [NO_SOURCE]
        return expected

    def sample(self, plan: StepPlan) -> np.ndarray:
        """The reference's tokens."""
        numbers = dict(zip(plan.rows.tolist(), plan.requests.tolist(), strict=True))
        ends = zip(plan.sampled.tolist(), plan.sampled_ends.tolist(), strict=True)
        return np.array([self.checks.lives[numbers[row]].story.tokens[end] for row, end in ends], dtype=np.int32)

    def tell(self, notice: object) -> None:
        if notice is not None:
            self.checks.delivered(StepOutput.of_notices((notice,)))


SchedulerMachine.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
test_every_legal_order_of_calls_keeps_the_invariants = SchedulerMachine.TestCase
