"""Each scenario of docs/known-faults.md, and those that nobody there has shipped: it occurs, and all is right."""

import pytest
from mutants import CASES
from mutants.watching import play

PEERS = [name for name in CASES if name[:2].isdigit()]
# Not here: 24 is a figure to report, not a fault. Of 21, penalties are the sampler's: tests/gpu/test_generation.py and
# tests/test_sampling.py; of 19 and 23, graphs and features are the executors'.


def check(name: str) -> None:
    case = CASES[name]
    for adversary in case.adversaries:
        played = play(case.scenario, adversary)
        assert played.episode.finding is None, played.episode.finding
        assert case.occurred(played), f"it did not occur against {adversary}"
        assert case.right(played), f"it went wrong against {adversary}"


@pytest.mark.parametrize("name", PEERS)
def test_scenario(name: str) -> None:
    check(name)


@pytest.mark.parametrize("name", [name for name in CASES if name not in PEERS])
def test_workload(name: str) -> None:
    check(name)


def test_all_of_them_are_here() -> None:
    assert [int(name[:2]) for name in PEERS] == list(range(1, 24))
