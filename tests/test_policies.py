"""Policies, the built-in ones and users' own: what they decide, and what happens when one cannot be used."""

from __future__ import annotations

import math

import pytest
from harness import Ask, Entry, Run
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import cases, family_text

from asyncsched.config import EngineConfig
from asyncsched.errors import ConfigError
from asyncsched.policies import load_admission, load_reservation, load_victim
from asyncsched.request import FinishReason, RequestView, SamplingParams


def engine(**changes: object) -> EngineConfig:
    values = {"depth": 1, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, "block_size": 2}
    return EngineConfig(**{**values, "num_blocks": 64, **changes})


def ask(name: str, prompt: int, max_tokens: int = 6, priority: int = 0) -> Ask:
    return Ask(name, family_text(ord(name), prompt), SamplingParams(max_tokens=max_tokens), priority)


def run(config: EngineConfig, *asks: Ask) -> Run:
    return Run(config, [Entry(0, each) for each in asks]).run()


# ---- users' own, found by `module:Class` -----------------------------------------------------------------------------


class LongestPrompt:
    def admission_key(self, request: RequestView) -> int:
        return -request.num_prompt_tokens


class ByName:
    def victim_key(self, request: RequestView) -> str:
        return request.request_id


class TwoBlocks:
    def reserved_tokens(self, request: RequestView) -> int:
        return 4


class TooGreedy:
    def reserved_tokens(self, request: RequestView) -> int:
        return 10**9


class AllForTheFirst:
    def reserved_tokens(self, request: RequestView) -> int:
        return 10**9 if request.number == 0 else 4


class NothingAtAll:
    def reserved_tokens(self, request: RequestView) -> int:
        return -(10**9)


class RaisesEverywhere:
    def admission_key(self, request: RequestView) -> int:
        raise KeyError(request.request_id)

    def victim_key(self, request: RequestView) -> int:
        raise KeyError(request.request_id)

    def reserved_tokens(self, request: RequestView) -> int:
        raise KeyError(request.request_id)


class MixedKeys:
    """Keys that do not compare with each other."""

    def admission_key(self, request: RequestView) -> object:
        return request.number if request.number % 2 else "text"

    def victim_key(self, request: RequestView) -> object:
        return request.number if request.number % 2 else "text"


class TextForTokens:
    def reserved_tokens(self, request: RequestView) -> str:
        return "many"


class NotANumber:
    def reserved_tokens(self, request: RequestView) -> float:
        return math.nan


class NeedsArguments:
    def __init__(self, weight: int) -> None:
        self.weight = weight

    def victim_key(self, request: RequestView) -> int:
        return self.weight


class HasNoMethod:
    victim_key = 3


# ---- admission -------------------------------------------------------------------------------------------------------

THREE = (ask("a", 6, priority=2), ask("b", 2, priority=1), ask("c", 4, priority=0))


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("fcfs", "abc"),
        ("priority", "cba"),
        ("shortest-prompt", "bca"),
        ("tests.test_policies:LongestPrompt", "acb"),
    ],
)
def test_admission_order(policy, order):
    result = run(engine(admission=policy, max_num_seqs=1), *THREE)
    assert "".join(admission.request_id for admission in result.admissions()) == order


@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest-prompt"])
def test_equals_are_admitted_by_arrival(policy):
    result = run(engine(admission=policy, max_num_seqs=1), *(ask(name, 3) for name in "dbca"))
    assert "".join(admission.request_id for admission in result.admissions()) == "dbca"


def test_a_preempted_request_keeps_its_place_before_later_arrivals():
    result = run(engine(num_blocks=6, max_num_seqs=2), ask("a", 4, 8), ask("b", 4, 8), ask("c", 4, 8))
    assert result.evictions[0].request_id == "b"
    assert [admission.request_id for admission in result.admissions()][:4] == ["a", "b", "b", "c"]


# ---- victims ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "victim"),
    [
        ("latest-arrival", "c"),
        ("lowest-priority", "b"),
        ("tests.test_policies:ByName", "c"),
    ],
)
def test_first_victim(policy, victim):
    asks = ask("a", 4, 8, priority=1), ask("b", 4, 8, priority=2), ask("c", 4, 8, priority=0)
    result = run(engine(num_blocks=8, victim=policy), *asks)
    assert result.evictions[0].request_id == victim


def test_least_progress_is_counted_in_outputs_and_not_in_prompt():
    """`b` has the longest text, and the fewest outputs when blocks run out."""
    config = engine(num_blocks=12, victim="least-progress", max_num_batched_tokens=12)
    result = Run(config, [Entry(0, ask("a", 2, 14)), Entry(8, ask("b", 9, 6)), Entry(0, ask("c", 3, 14))]).run()
    first = result.evictions[0]
    assert (first.request_id, first.prefilling) == ("b", False)
    assert 9 + first.outputs > max(2, 3) + 6


@pytest.mark.parametrize("policy", ["latest-arrival", "lowest-priority", "least-progress"])
def test_among_equals_the_latest_is_the_victim(policy):
    result = run(engine(num_blocks=8, victim=policy), *(ask(name, 4, 8) for name in "cab"))
    assert result.evictions[0].request_id == "b"


# ---- reservation -----------------------------------------------------------------------------------------------------


def test_worst_case_admits_when_the_length_limit_fits_and_optimistic_when_the_prompt_does():
    asks = ask("a", 4, 8), ask("b", 4, 8)  # 6 blocks each at their longest, 2 at first
    optimistic, worst_case = (
        run(engine(num_blocks=11, reservation=name), *asks) for name in ("optimistic", "worst-case")
    )
    assert optimistic.plans[0].requests.tolist() == [0, 1]
    assert optimistic.evictions
    assert worst_case.plans[0].requests.tolist() == [0]
    assert not worst_case.evictions
    assert run(engine(num_blocks=12, reservation="worst-case"), *asks).plans[0].requests.tolist() == [0, 1]


def test_a_promise_is_kept_though_it_is_for_more_than_one_sequence_can_use():
    asks = [ask("a", 4), ask("b", 4)]
    together = run(engine(reservation="tests.test_policies:TwoBlocks"), *asks)
    assert together.plans[0].requests.tolist() == [0, 1]
    greedy = run(engine(reservation="tests.test_policies:AllForTheFirst"), *asks)
    assert [plan.requests.tolist() for plan in greedy.plans] == [[0]] * 6 + [[1]] * 6


@pytest.mark.parametrize("policy", ["TwoBlocks", "TooGreedy", "NothingAtAll"])
@settings(max_examples=25)
@given(data=st.data())
def test_any_number_of_reserved_tokens_keeps_the_invariants(policy, data):
    case = data.draw(cases(reservation=f"tests.test_policies:{policy}"))
    Run(case.config, case.script, failing=case.failing).run()


# ---- what cannot be used ---------------------------------------------------------------------------------------------

LOADERS = {"admission": load_admission, "victim": load_victim, "reservation": load_reservation}


@pytest.mark.parametrize("field", LOADERS)
@pytest.mark.parametrize(
    "name",
    [
        "",
        "nobody",
        "FCFS",
        "no.such.module:Class",
        "asyncsched.policies:NoSuchClass",
        "asyncsched.policies:",
        ":Fcfs",
        "tests.test_policies:HasNoMethod",
        "tests.test_policies:NeedsArguments",
        "asyncsched.policies:Key",
        "a\nb:C",
    ],
)
def test_a_policy_that_does_not_load_is_one_line(field, name):
    with pytest.raises(ConfigError) as caught:
        LOADERS[field](name)
    assert caught.value.field == field
    assert caught.value.value == name
    assert "\n" not in str(caught.value)
    assert "module:Class" in caught.value.allowed


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("admission", "RaisesEverywhere"),
        ("admission", "MixedKeys"),
        ("victim", "RaisesEverywhere"),
        ("victim", "MixedKeys"),
        ("reservation", "RaisesEverywhere"),
        ("reservation", "TextForTokens"),
        ("reservation", "NotANumber"),
    ],
)
def test_a_policy_that_raises_or_answers_nonsense_is_named_and_costs_nobody_a_token(field, name):
    config = engine(num_blocks=8, **{field: f"tests.test_policies:{name}"})
    result = run(config, ask("a", 4, 8), ask("b", 4, 8), ask("c", 4, 8))
    (fault,) = result.scheduler.policies.faults
    assert fault.startswith(f"{field}: ")
    assert name in fault
    assert "\n" not in fault
    assert all(life.notice.reason is FinishReason.LENGTH for life in result.lives)


def test_custom_policies_finish_everything():
    names = {"admission": "LongestPrompt", "victim": "ByName", "reservation": "TwoBlocks"}
    config = engine(depth=3, num_blocks=8, **{field: f"tests.test_policies:{name}" for field, name in names.items()})
    result = run(config, *(ask(name, length, 8) for name, length in zip("abcd", (1, 4, 7, 3), strict=True)))
    assert result.evictions
    assert all(life.notice.reason is FinishReason.LENGTH for life in result.lives)
