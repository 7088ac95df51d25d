"""The fuzzer: deterministic, finds what is planted, shrinks it to a file that reproduces it, and finds nothing else."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from asyncsched import stops
from asyncsched.cli.app import run as run_command
from asyncsched.config import EngineConfig
from asyncsched.errors import ConfigError
from asyncsched.fuzz import Episode, Finding, fuzz, run_episode, run_scenario
from asyncsched.fuzz_checks import COUNTED
from asyncsched.fuzz_draw import FAULT_NAMES, FuzzOptions, draw_scenario
from asyncsched.fuzz_policies import FAULTY, HONEST, full_name
from asyncsched.fuzz_scenario import Control, Scenario, Submission
from asyncsched.fuzz_shrink import shrink
from asyncsched.plan import StepPlan
from asyncsched.policy_set import PolicySet
from asyncsched.request import Finished, Request
from asyncsched.residency import Residency
from asyncsched.scheduler import Scheduler

ROOT = Path(__file__).parent.parent


def test_100_000_steps_without_a_finding_exercise_everything() -> None:
    report = fuzz(steps=100_000)
    assert report.failure is None, report.failure
    assert report.steps >= 100_000
    assert [name for name in COUNTED if not report.counts[name]] == []


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_depths_without_faults(depth: int) -> None:
    report = fuzz(7_000_000, FuzzOptions(depths=(depth,), faults=()), episodes=12)
    assert report.failure is None, report.failure
    assert report.counts["failed_steps"] == report.counts["failed_requests"] == report.counts["policy_faults"] == 0
    assert (report.counts["carried_tokens"] > 0) == (depth > 1)


@pytest.mark.parametrize("name", FAULT_NAMES)
def test_each_fault_occurs(name: str) -> None:
    options = FuzzOptions(faults=(name,))
    report = fuzz(8_000_000, options, episodes=25)
    assert report.failure is None, report.failure
    planted = {draw_scenario(seed, options).faults for seed in range(8_000_000, 8_000_025)}
    kinds = {fault.kind.value for faults in planted for fault in faults}
    occurred = {
        "token": report.counts["bad_tokens"],
        "host-stall": "host-stall" in kinds,
        "lane-stall": report.counts["stuck_steps"],
        "policy": report.counts["policy_faults"],
    }
    assert occurred.get(name, report.counts["failed_steps"]) > 0
    if name != "policy":
        assert kinds <= {name, "time-out"}


# ---- determinism -----------------------------------------------------------------------------------------------------

PROBE = """
from asyncsched.fuzz import run_episode
for seed in (3, 64, 65, 66):
    episode = run_episode(seed)
    print(seed, episode.steps, episode.digest, sorted(episode.counts.items()), episode.finding)
"""


def test_same_seed_same_episode_whatever_hashes_are() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PROBE],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hash_seed in ("0", "1", "424242")
    }
    assert len(outputs) == 1
    assert outputs.pop().count("\n") == 4


def test_seeds_differ() -> None:
    assert len({run_episode(seed).digest for seed in range(20)}) == 20


@pytest.mark.parametrize("seed", range(40))
def test_scenarios_survive_json(seed: int) -> None:
    scenario = draw_scenario(seed, FuzzOptions())
    assert Scenario.from_dict(json.loads(json.dumps(scenario.to_dict()))) == scenario


def test_files_that_are_no_scenarios_are_refused() -> None:
    data = draw_scenario(0, FuzzOptions()).to_dict()
    for broken in (
        [],
        {},
        {**data, "faults": [{"kind": "fire", "step": 1}]},
        {**data, "config": {**data["config"], "depth": 0}},
        {**data, "adversary": "kind"},
        {**data, "commands": [{"at": 0}]},
    ):
        with pytest.raises(ConfigError):
            Scenario.from_dict(broken)  # type: ignore[arg-type]


# ---- findings --------------------------------------------------------------------------------------------------------


def plant_stop_one_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A content stop is noticed a token late, for requests with several stop tokens."""
    scrutinise = stops.scrutinise
    newest: dict[Request, int] = {}

    def late(request: Request, position: int, token: int) -> tuple[bool, int]:
        previous, newest[request] = newest.get(request), token
        stopped, held = scrutinise(request, position, token)
        return previous in request.params.stop_token_ids or (stopped and held > 0), held

    monkeypatch.setattr(stops, "scrutinise", late)


def plant_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a request that is offloaded and then aborted stay on the host."""
    monkeypatch.setattr(Residency, "drop_host_copy", lambda self, request, settled: None)


def plant_second_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Aborting a request that has ended tells the user again."""
    end, abort = Scheduler._end, Scheduler.abort

    def remember(self: Scheduler, *args: object, **keys: object) -> Finished:
        notice = end(self, *args, **keys)  # type: ignore[arg-type]
        vars(self).setdefault("ended", {})[notice.request_id] = notice
        return notice

    def twice(self: Scheduler, request_id: str) -> Finished | None:
        notice = abort(self, request_id)
        return vars(self).get("ended", {}).get(request_id) if notice is None else notice

    monkeypatch.setattr(Scheduler, "_end", remember)
    monkeypatch.setattr(Scheduler, "abort", twice)


def plant_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(self: Residency, *args: object) -> bool:
        raise KeyError("no such block")

    monkeypatch.setattr(Residency, "offload", crash)


def plant_deaf_to_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are planned while the engine is paused, as long as somebody has a seat."""
    plan = Scheduler.plan

    def deaf(self: Scheduler, slot: int) -> StepPlan | None:
        paused, self._paused = self._paused, self._paused and not self.num_seated
        try:
            return plan(self, slot)
        finally:
            self._paused = paused

    monkeypatch.setattr(Scheduler, "plan", deaf)


def plant_nothing_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What may still become a stop string is handed out; tokens and notices are right."""
    scrutinise = stops.scrutinise
    monkeypatch.setattr(stops, "scrutinise", lambda *args: (scrutinise(*args)[0], 0))


def plant_held_back_in_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The notice of an abort has tokens that a matcher held back."""
    end = Scheduler._end

    def generous(self: Scheduler, request: Request, *args: object) -> Finished:
        request.num_released = request.params.max_tokens
        return end(self, request, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Scheduler, "_end", generous)


PLANTED = {
    "deaf to pauses": (plant_deaf_to_pauses, ("pause",)),
    "nothing held back": (plant_nothing_held_back, ("hold-back",)),
    "held back in a notice": (plant_held_back_in_notice, ("I6",)),
    "stop one late": (plant_stop_one_late, ("I1", "I5")),
    "leak": (plant_leak, ("I3",)),
    "second notice": (plant_second_notice, ("I6",)),
    "crash": (plant_crash, ("raised",)),
}


MOST_COMMANDS = {"held back in a notice": 12}  # an abort has to come between two tokens of a stop string


@pytest.mark.parametrize("name", PLANTED)
def test_planted_fault_is_found_shrunk_and_replayed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, checks = PLANTED[name]
    with monkeypatch.context() as planted:
        plant(planted)
        report = fuzz(1, FuzzOptions(faults=()), episodes=1500)
        failure = report.failure
        assert failure is not None
        assert failure.finding.check in checks
        again = run_episode(failure.seed, FuzzOptions(faults=()))
        assert again.finding == failure.finding
        text = json.dumps(failure.shrunk.to_dict())
        assert run_scenario(Scenario.from_dict(json.loads(text))).finding == failure.shrunk_finding
        assert failure.shrunk_finding.check == failure.finding.check
        assert len(failure.shrunk.commands) <= MOST_COMMANDS.get(name, 6)
        assert run_scenario(failure.shrunk).steps <= 40
    assert run_scenario(failure.shrunk).finding is None


def test_shrinking_is_bounded_and_keeps_what_fails() -> None:
    scenario = draw_scenario(5, FuzzOptions())
    never = Finding("I1", "nothing of the kind happens", 0)
    assert shrink(scenario, never, most_runs=10) == scenario


def test_a_second_run_that_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def differs(scenario: Scenario) -> object:
        calls.append(scenario)
        return replace(run_scenario(scenario), digest=len(calls))

    monkeypatch.setattr("asyncsched.fuzz.run_scenario", differs)
    monkeypatch.setattr("asyncsched.fuzz_shrink.MOST_RUNS", 0)
    report = fuzz(64, episodes=1)
    assert report.failure is not None
    assert report.failure.finding.check == "I9"


# ---- policies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "name"), [(field, name) for kinds in (HONEST, FAULTY) for field, names in kinds.items() for name in names]
)
def test_policies_of_the_fuzzer_load_and_cost_nobody_a_token(field: str, name: str) -> None:
    config = EngineConfig(
        max_num_seqs=2, max_num_batched_tokens=6, max_model_len=16, block_size=2, num_blocks=9, num_host_blocks=9
    )
    config = replace(config, **{"preemption": "offload", field: full_name(name)})
    PolicySet(config)
    requests = [Submission(0, str(number), (1,) * (1 + number % 3), 10) for number in range(8)]
    for depth in (1, 2, 3):
        scenario = Scenario(replace(config, depth=depth), tuple(requests))
        episode = run_scenario(scenario)
        assert episode.finding is None, episode.finding
        assert episode.counts["length_stops"] == len(requests)
        if field in ("victim", "preemption"):
            assert episode.counts["evictions"] > 0


# ---- what enters -----------------------------------------------------------------------------------------------------


def test_a_pause_that_nobody_ends_is_ended_when_nothing_else_will_come() -> None:
    scenario = Scenario(
        EngineConfig(max_model_len=8, num_blocks=8), (Control(0, "pause"), Submission(0, "a", (1, 2), 4))
    )
    episode = run_scenario(scenario)
    assert episode.finding is None
    assert episode.counts["length_stops"] == 1


def test_options_are_kept() -> None:
    for seed in range(60):
        scenario = draw_scenario(seed, FuzzOptions(depths=(3,), faults=("copy",), avoid=("offload", "window")))
        assert scenario.config.depth == 3
        assert scenario.config.preemption == "recompute"
        assert scenario.config.sliding_window is None
        assert {fault.kind.value for fault in scenario.faults} <= {"copy"}


# ---- the command -----------------------------------------------------------------------------------------------------


def command(*arguments: str) -> tuple[int, str]:
    """Status and output of `asyncsched fuzz`."""
    pytest.importorskip("asyncsched.cli.inputs", reason="the other commands are not merged yet")
    import typer
    from typer.testing import CliRunner

    from asyncsched.cli.fuzz import fuzz as function

    app = typer.Typer()
    app.command()(function)
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, ConfigError):
        return 2, str(result.exception)
    return result.exit_code, result.output


def test_command_prints_what_was_exercised() -> None:
    status, output = command("--episodes", "3", "--seed", "10")
    assert status == 0
    assert output.startswith("3 episodes, ")
    assert "evictions in flight" in output


def test_command_prints_json() -> None:
    status, output = command("--steps", "300", "--json", "--depth", "2", "--faults", "none")
    data = json.loads(output)
    assert status == 0
    assert data["steps"] >= 300
    assert data["failure"] is None
    assert data["exercised"]["failed_steps"] == 0


@pytest.mark.parametrize(
    ("arguments", "field", "allowed"),
    [
        (("--episodes", "0"), "--episodes: '0'", "at least 1"),
        (("--steps", "many"), "--steps: 'many'", "at least 1"),
        (("--minutes", "-1"), "--minutes: '-1'", "above 0"),
        (("--minutes", "nan"), "--minutes: 'nan'", "above 0"),
        (("--seed", "x"), "--seed: 'x'", "at least 0"),
        (("--depth", "1,0"), "--depth: '1,0'", "from 1 to 16"),
        (("--depth", ""), "--depth: ''", "from 1 to 16"),
        (("--faults", "raise,fire"), "--faults: 'fire'", "host-stall"),
        (("--episodes", "1", "--steps", "2"), "--steps: '2'", "one of the two"),
        (("--replay", "no such file"), "--replay: 'no such file'", "No such file"),
    ],
)
def test_command_names_bad_input(arguments: tuple[str, ...], field: str, allowed: str) -> None:
    status, message = command(*arguments)
    assert status == 2
    assert message.startswith(field)
    assert allowed in message
    assert "\n" not in message


def test_command_writes_a_failure_that_it_can_replay(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as planted:
        plant_second_notice(planted)
        status, output = command("--episodes", "200", "--seed", "1", "--faults", "none")
        assert status == 1
        (path,) = tmp_path.glob("fuzz-*.json")
        seed = path.stem.removeprefix("fuzz-")
        assert f"replay: asyncsched fuzz --seed {seed} --episodes 1 --depth 1,2,3,4 --faults none" in output
        assert f"replay: asyncsched fuzz --replay {path.name}" in output
        status, output = command("--seed", seed, "--episodes", "1", "--faults", "none")
        assert status == 1
        status, output = command("--replay", path.name)
        assert status == 1
        assert "FAILED: I6" in output
    status, output = command("--replay", path.name)
    assert status == 0
    assert (
        output
        == f"{path.name}: {run_scenario(Scenario.from_dict(json.loads(path.read_text()))).steps} steps, no finding\n"
    )


# ---- what was found --------------------------------------------------------------------------------------------------

CASES = sorted((ROOT / "tests" / "fuzz_cases").glob("*.json"))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_shrunk_cases_of_faults_that_were_fixed(path: Path) -> None:
    episode = run_scenario(Scenario.from_dict(json.loads(path.read_text("utf-8"))))
    assert episode.finding is None, episode.finding
    assert episode.steps > 0


def test_there_are_shrunk_cases() -> None:
    assert len(CASES) >= 11


def test_an_interrupt_says_what_was_done_and_where_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    episodes = [run_episode(seed) for seed in (41, 42, 43)]
    rest = iter(episodes)

    def until_interrupted(scenario: Scenario) -> Episode:
        episode = next(rest, None)
        if episode is None:
            raise KeyboardInterrupt
        return episode

    monkeypatch.setattr("asyncsched.fuzz.run_scenario", until_interrupted)
    assert run_command(["fuzz", "--seed", "41", "--json"]) == 130
    out, err = capsys.readouterr()
    assert out == ""
    steps = sum(episode.steps for episode in episodes)
    assert err == f"error: interrupted; 3 episodes, {steps} steps without a finding; --seed 44 goes on from there\n"
