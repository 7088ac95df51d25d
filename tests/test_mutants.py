"""Every planted fault is found by the standard checks, in a case that passes without it and that did take place."""

import importlib
import pkgutil
from functools import cache
from inspect import isclass

import pytest
from hazard_runs import bare_plan, copies, pairs_of, played, without
from mutants import CASES, EQUIVALENT, MUTANTS
from mutants.cases import engine
from mutants.catalogue import Mutant
from mutants.equivalents import Equivalent
from mutants.watching import play

import asyncsched
from asyncsched.clocks import Edge
from asyncsched.hazards import check
from asyncsched.program import EventKind, Lane, OpKind, build_program
from asyncsched.rows import Rows


@cache
def clean(name: str, adversary: str) -> tuple[Edge, ...]:
    """The case without any fault: nothing is found, what it is about occurred, and the rest is right too.

    Returns the edges of programs that no conflict needed.
    """
    case = CASES[name]
    run = play(case.scenario, adversary)
    assert run.episode.finding is None, run.episode.finding
    assert case.occurred(run), f"{name} did not occur"
    assert case.right(run), f"{name} is not right"
    return run.hazards.redundant_edges()


def killer(mutant: Mutant) -> str:
    """What finds the mutant, or nothing."""
    case = CASES[mutant.case]
    with mutant.planted():
        for adversary in case.adversaries:
            mutated = play(case.scenario, adversary)
            finding = mutated.episode.finding
            if finding is None and not case.right(mutated):
                return f"{case} is not right"
            if finding is not None and (finding.check != "raised" or (mutant.dies and mutant.dies in finding.message)):
                return str(finding)
            assert finding is None, f"the engine dies, and should not: {finding}"
    return ""


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_mutant_is_killed(mutant: Mutant) -> None:
    for adversary in CASES[mutant.case].adversaries:
        clean(mutant.case, adversary)
    assert killer(mutant), f"{mutant.name!r} survives {mutant.case}"


def test_there_are_enough_and_one_for_each_scenario() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40
    assert {mutant.scenario for mutant in MUTANTS} >= set(range(1, 23))
    modelled = {mutant.case for mutant in (*MUTANTS, *EQUIVALENT)}
    assert modelled == set(CASES)


# ---- nothing is equivalent unless it is proven so --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "deep", "alone in flight", "offload"])
def test_no_edge_is_redundant(name: str) -> None:
    """So no mutant that drops an edge is equivalent."""
    assert clean(name, "eager") == ()


@pytest.mark.parametrize("mutant", EQUIVALENT, ids=str)
def test_equivalent_mutant_survives_where_it_would_matter(mutant: Equivalent) -> None:
    case = CASES[mutant.case]
    for adversary in case.adversaries:
        clean(mutant.case, adversary)
        with mutant.planted():
            mutated = play(case.scenario, adversary)
        assert mutated.episode.finding is None
        assert mutant.matters(mutated)


def test_order_of_streams_makes_fences_of_restored_host_blocks_redundant() -> None:
    """The d2h lane waits for the step that restores before it offloads for a later one; without that, they race."""
    config = engine(preemption="offload")
    restore = bare_plan(0, 0, restore=copies((5, 1)))
    offload = bare_plan(1, 1, offload=copies((6, 1)))
    race = ("host_kv",)

    def races(build: object = build_program) -> set[object]:
        run = check(played([build(restore), build(offload)], Rows(config)), config)  # type: ignore[operator]
        return {memory for earlier, later, memory in pairs_of(run.findings) if earlier.step != later.step}

    assert race not in races()
    for edge in (
        Edge(Lane.D2H, OpKind.WAIT, EventKind.COMPUTE_DONE),
        Edge(Lane.COMPUTE, OpKind.WAIT, EventKind.H2D_DONE),
    ):
        assert race in races(without(edge))


# ---- patches ---------------------------------------------------------------------------------------------------------


def state() -> dict[tuple[str, str], object]:
    """Every attribute of every module and class of the core."""
    found: dict[tuple[str, str], object] = {}
    for info in pkgutil.iter_modules(asyncsched.__path__):
        if info.name in ("cli", "plotting"):
            continue
        module = importlib.import_module(f"asyncsched.{info.name}")
        for name, value in vars(module).items():
            found[info.name, name] = value
            if isclass(value) and value.__module__ == module.__name__:
                found |= {(f"{info.name}.{name}", key): attribute for key, attribute in vars(value).items()}
    return found


def test_patches_take_effect_and_are_undone() -> None:
    before = state()
    for mutant in (*MUTANTS, *EQUIVALENT):
        with mutant.planted():
            assert any(value is not before[key] for key, value in state().items()), mutant.name
        assert all(value is before[key] for key, value in state().items()), mutant.name
