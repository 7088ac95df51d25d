"""The invariants of the design over random engines and workloads, checked at every effect of the pipeline.

What is checked stands in `harness.py`; here is over what. Each property asks for a part of the space, so that rare
states are not rare in all of them.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from faithful import VOCABULARY
from harness import Ask, Entry, Run
from hypothesis import HealthCheck, given, settings
from strategies import ADMISSION, VICTIM, Case, cases, family_text

from asyncsched.config import EngineConfig
from asyncsched.pipeline import Abort
from asyncsched.request import FinishReason, SamplingParams

ROOT = Path(__file__).parent.parent
SLOW = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def run(case: Case) -> Run:
    return Run(case.config, case.script, failing=case.failing).run()


@settings(SLOW, max_examples=500)
@given(cases())
def test_invariants_hold_over_everything_the_design_allows(case):
    run(case)


@settings(SLOW, max_examples=200)
@given(cases(alike=True, enable_prefix_caching=True))
def test_invariants_hold_with_shared_prefixes(case):
    run(case)


@settings(SLOW, max_examples=200)
@given(cases(faults=False, reservation="optimistic", sliding_window=None, max_num_batched_tokens=32, max_num_seqs=6))
def test_invariants_hold_when_blocks_run_out(case):
    run(case)


@settings(SLOW, max_examples=150)
@given(cases(reservation="worst-case", max_num_seqs=6))
def test_worst_case_reservation_never_preempts(case):
    """The harness fails at the first preemption that no pause asked for."""
    run(case)


@settings(SLOW, max_examples=100)
@given(cases(max_requests=4, sliding_window=3, reservation="worst-case", alike=True))
def test_worst_case_reservation_never_preempts_behind_a_sliding_window(case):
    run(case)


@settings(SLOW, max_examples=100)
@given(cases(depth=1, batching="static"))
def test_a_static_batch_takes_nobody_in_who_was_not_there_when_it_opened(case):
    run(case)


@settings(SLOW, max_examples=60)
@given(cases())
def test_equal_inputs_give_equal_decisions_and_deliveries(case):
    first, second = run(case), run(case)
    assert first.log == second.log
    assert [repr(output) for output in first.deliveries] == [repr(output) for output in second.deliveries]


def fingerprint() -> str:
    """A digest of the decision logs of some tight runs."""
    digest = hashlib.sha256()
    for admission, victim in zip(ADMISSION, VICTIM, strict=True):
        for depth in (1, 2, 3):
            digest.update("\n".join(_tight_run(depth, admission, victim).log).encode())
    return digest.hexdigest()


def _tight_run(depth: int, admission: str, victim: str) -> Run:
    config = EngineConfig(
        depth=depth,
        max_num_seqs=4,
        max_num_batched_tokens=8,
        max_model_len=32,
        block_size=2,
        num_blocks=14,
        enable_prefix_caching=True,
        admission=admission,
        victim=victim,
    )
    script = [
        Entry(
            7 * number,
            Ask(name, family_text(number % 2, 3 + number), SamplingParams(max_tokens=9), number * 2 % 3),
        )
        for number, name in enumerate(("one", "two", "three", "four", "five", "six", "seven", "eight"))
    ]
    result = Run(config, [*script, Entry(25, Abort("three"))]).run()
    assert result.evictions
    return result


@pytest.mark.parametrize("hash_seed", ["1", "2"])
def test_decisions_do_not_depend_on_the_hash_seed_of_the_process(hash_seed):
    result = subprocess.run(
        [sys.executable, "-c", "from test_invariants import fingerprint; print(fingerprint())"],
        env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.strip() == fingerprint()


def small(prompt: int, max_tokens: int, name: str = "a", **params: object) -> Ask:
    return Ask(name, family_text(0, prompt), SamplingParams(max_tokens=max_tokens, **params))


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_as_many_steps_are_in_flight_as_the_depth_allows(depth):
    result = Run(EngineConfig(depth=depth, max_model_len=32), [Entry(0, small(3, 12))]).run()
    assert max(result.flight_sizes) == depth
    assert result.flight_sizes[depth - 1 : -depth] == [depth] * (12 - 2 * depth + 1)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_a_length_stop_costs_exactly_its_steps(depth, max_tokens):
    """Neither one step too many nor one too few: the prompt samples the first token, each decode one more."""
    result = Run(EngineConfig(depth=depth, max_model_len=32), [Entry(0, small(4, max_tokens))]).run()
    assert len(result.plans) == max_tokens
    assert len(result.life("a").delivered) == max_tokens
    assert result.life("a").overshoot == 0


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_content_stop_is_found_depth_minus_one_steps_late(depth):
    every_token = {"stop_token_ids": tuple(range(VOCABULARY))}
    result = Run(
        EngineConfig(depth=depth, max_model_len=32), [Entry(0, small(4, 12, min_tokens=3, **every_token))]
    ).run()
    life = result.life("a")
    assert life.notice.reason is FinishReason.STOP
    assert len(life.delivered) == 3
    assert life.overshoot == depth - 1 == sum(output.overshoot for output in result.deliveries)
    assert len(result.plans) == 3 + depth - 1
