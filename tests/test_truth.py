"""From a recording to its validation, by commands: real runs on the CPU, and planted ones whose truth is known."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import PLANTED, happened, wanted, workloads

from asyncsched.cli.app import run as command
from asyncsched.run_files import read_run, write_archive, write_run
from sim.predict import predict, replay
from sim.profile import Profile, read_profile, to_toml
from sim.validate import first_difference, judge

ROOT = Path(__file__).parent.parent
TRUTH = Profile.from_dict(PLANTED)
TINY = ("--config", "llama-tiny", "--dummy-weights", "--device", "cpu")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with real runs, synchronous and asynchronous, one of them with too few KV blocks; and their profile."""
    folder = tmp_path_factory.mktemp("recorded")
    load = ("--requests", "14", "--prompt-tokens", "5-30", "--new-tokens", "4-12", "--rate", "150")
    tight = ("--set", "num_blocks=9", "--set", "block_size=8", "--set", "max_model_len=64", "--set", "max_num_seqs=4")
    for name, options in {"sync": ("--mode", "sync"), "async": (), "tight": tight}.items():
        assert command(["record", *TINY, *load, *options, "-o", str(folder / name)]) == 0
    runs = [str(folder / name) for name in ("sync", "async", "tight")]
    assert command(["calibrate", *runs, "-o", str(folder / "profile.toml")]) == 0
    return folder


# ---- real runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sync", "async", "tight"])
def test_decisions_of_a_real_run_are_the_simulators(recorded: Path, name: str) -> None:
    """I12: requests enter before the same plans, so every line is equal."""
    run = read_run(recorded / name)
    assert len(run.decisions) == len(run.steps) > 15
    assert replay(run) == run.decisions
    if name != "tight":  # seats for everybody: a request that enters a plan later is in another step
        entered = run.requests.entered_plan
        later = type(run.requests)(**{**_fields(run.requests), "entered_plan": entered + (entered > entered[0])})
        assert replay(type(run)(info=run.info, requests=later)) != run.decisions
    assert (run.info.preemptions > 0) == (name == "tight")


def test_a_decision_that_differs_is_found(recorded: Path) -> None:
    run = read_run(recorded / "async")
    late = run.requests.entered_plan.copy()
    late[-1] += 200  # when all others are done
    moved = type(run.requests)(**{**_fields(run.requests), "entered_plan": late})
    other = replay(type(run)(info=run.info, requests=moved, steps=run.steps, decisions=run.decisions))
    difference = first_difference(run.decisions, other)
    assert difference is not None
    assert " 13[0:" in difference.measured
    assert " 13[0:" not in difference.predicted


def test_a_real_run_is_validated(recorded: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Structure only: how long a loaded machine takes is nobody's to predict."""
    picture = tmp_path / "picture.png"
    options = ["--profile", str(recorded / "profile.toml"), "--draws", "2", "--plot", str(picture)]
    assert command(["validate", str(recorded / "async"), *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {row["figure"]: row for row in found["rows"]}
    assert {"makespan_s", "output_throughput", "gpu_active", "idle.host", "preemptions", "ttft_ms.p99"} <= set(rows)
    assert all(row["low"] <= row["middle"] <= row["high"] for row in rows.values())
    assert {one["kind"] for one in found["coverage"]} >= {"decode"}
    assert (found["replayed"], found["decisions"]) == (None, rows["steps"]["measured"])
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert command(["validate", str(recorded / "async"), *options[:2], "--draws", "2"]) == 0
    shown = capsys.readouterr().out
    assert "with jitter (90%)" in shown
    line = next(line for line in shown.splitlines() if line.strip().startswith("steps"))
    low, middle, high = (f"{rows['steps'][name]:,.0f}" for name in ("low", "middle", "high"))
    assert f" {middle} ({low} to {high})" in line
    assert "time to first token, median" in shown
    assert "decisions, arrivals before the same plans: all" in shown


def test_a_profile_of_a_cpu_says_that_lanes_are_inline(recorded: Path) -> None:
    profile = read_profile(recorded / "profile.toml")
    assert profile.host.inline
    assert profile.gpu.contention == 1
    assert profile.fit["gpu.decode"].count > 10


def test_a_real_run_is_asked_what_if(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["whatif", str(recorded / "async"), "--set", "gpu.scale=50", "--set", "depth=1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["what if"]["makespan_s"] > found["predicted"]["makespan_s"]


def test_a_bench_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each mode in a folder of its own, and each may be calibrated and validated."""
    sizes = ("--requests", "3", "--prompt-tokens", "9", "--new-tokens", "12")
    assert command(["bench", *TINY, *sizes, "--record", str(tmp_path / "runs")]) == 0
    runs = {mode: read_run(tmp_path / "runs" / mode) for mode in ("sync", "async")}
    assert {mode: run.info.engine["depth"] for mode, run in runs.items()} == {"sync": 1, "async": 2}
    for run in runs.values():
        assert run.requests.output_tokens.tolist() == [12] * 3
        assert replay(run) == run.decisions
    folders = [str(tmp_path / "runs" / mode) for mode in runs]
    assert command(["calibrate", *folders, "-o", str(tmp_path / "profile.toml")]) == 0
    capsys.readouterr()
    assert command(["bench", *TINY, *sizes, "--record", str(tmp_path / "runs")]) == 2
    assert "--record: " in capsys.readouterr().err


# ---- planted runs ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The truth as a profile, and runs of it as an archive."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "truth.toml").write_text(to_toml(TRUTH))
    runs = [happened(run, TRUTH) for depth in (1, 2) for run in workloads(depth)]
    write_archive(folder / "runs.tar.xz", runs)
    write_run(folder / "one", runs[-1])
    return folder


def test_the_truth_is_validated_without_an_error(planted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run in ("one", "runs.tar.xz::closed-8-sync"):
        options = ["--profile", str(planted / "truth.toml"), "--draws", "0", "--json"]
        assert command(["validate", str(planted / run), *options]) == 0
        found = json.loads(capsys.readouterr().out)
        assert all(abs(row["error"]) < 1e-9 for row in found["rows"])
        assert all(row["low"] is None for row in found["rows"])
        assert found["timed"] is None


def test_what_if_is_what_happens_then(planted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The truth of a what-if is the same workload on an engine where it is so."""
    run = read_run(planted / "one")
    slow = TRUTH.model_copy(update={"host": TRUTH.host.model_copy(update={"scale": 3.0})})
    truth = predict(run, slow, depth=1)
    options = ["--profile", str(planted / "truth.toml"), "--set", "host.scale=3", "--set", "depth=1", "--json"]
    assert command(["whatif", str(planted / "one"), *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["what if"]["makespan_s"] == pytest.approx(truth.info.makespan_ns / 1e9)
    assert found["what if"]["makespan_s"] > 1.1 * found["predicted"]["makespan_s"]
    assert found["measured"]["makespan_s"] == pytest.approx(found["predicted"]["makespan_s"])


def test_a_what_if_says_which_requests_could_not_run(planted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests = read_run(planted / "one").requests
    blocks = [-(-int(tokens) // 16) for tokens in requests.prompt_tokens + requests.max_tokens]
    most = sorted(blocks)[len(blocks) // 2]
    options = ["--profile", str(planted / "truth.toml"), "--set", f"num_blocks={most}", "--json"]
    assert command(["whatif", str(planted / "one"), *options]) == 0
    out, err = capsys.readouterr()
    (said,) = json.loads(out)["notes"]
    rejected, of, total = said.removeprefix(f"with num_blocks={most} ").split()[:3]
    assert (of, int(total)) == ("of", len(blocks))
    assert 0 < int(rejected) < len(blocks)
    assert err == f"warning: {said}\n"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("gpu.scale=2", "gpu.scale=3"), "--set: 'gpu.scale=3' is not allowed; gpu.scale=2 is set already"),
        (("mode=sync", "depth=3"), "--set: 'depth=3' is not allowed; depth is set already"),
        (("engine.depth=1", "depth=3"), "--set: 'depth=3' is not allowed; depth is set already"),
    ],
)
def test_a_change_is_asked_for_once(
    changes: tuple[str, ...], said: str, planted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [part for change in changes for part in ("--set", change)]
    assert command(["whatif", str(planted / "one"), *options]) == 2
    out, err = capsys.readouterr()
    assert (out, err.startswith(f"error: {said}"), err.count("\n")) == ("", True, 1)


def test_simulate_takes_a_profile(planted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = ["simulate", "--preset", "hf-8b-bs32", "--set", "workload.num_requests=8", "--json"]
    scenario += [
        "--set",
        "workload.output.tokens=20",
        "--set",
        "decode_buckets=[8]",
        "--set",
        "workload.prompt.tokens=9",
    ]
    found = []
    for more in ([], ["--set", "gpu.scale=2"], ["--set", "jitter.kind=profile"]):
        assert command([*scenario, "--profile", str(planted / "truth.toml"), *more]) == 0
        found.append(json.loads(capsys.readouterr().out)["makespan_s"])
    assert found[1] > 1.3 * found[0]
    assert found[2] == found[0]  # the truth has no tables of jitter
    assert command(["simulate", "--preset", "hf-8b-bs32", "--set", "jitter.kind=profile"]) == 2
    assert "it needs a profile" in capsys.readouterr().err


def test_a_delay_is_predicted(planted: Path) -> None:
    """Synchronous steps take longer by the delay; asynchronous ones once the host is what limits them."""
    for depth, delay_us, longer_us in ((1, 1000.0, 1000.0), (2, 500.0, 0.0)):
        plain = happened(wanted("plain", depth, [50] * 32, [80] * 32), TRUTH)
        late = TRUTH.model_copy(update={"host": TRUTH.host.model_copy(update={"delay_us": delay_us})})
        row = judge(plain, late).validation.row("itl_ms.p50")
        assert 1e3 * (row.predicted - row.measured) == pytest.approx(longer_us, abs=2)


def test_the_study_meets_every_figure_where_the_truth_is_planted(
    planted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "experiments")
    import validate_h200

    groups: dict[str, list[Any]] = {"fit": [], "heldout": [], "delay": []}
    for depth, mode in ((1, "sync"), (2, "async")):
        groups["fit"] += [happened(run, TRUTH) for run in workloads(depth)]
        groups["heldout"].append(happened(wanted(f"closed-20-{mode}", depth, [80] * 20, [30] * 20), TRUTH))
        for delay in (0.0, 1000.0, 4000.0, 8000.0):
            late = TRUTH.model_copy(update={"host": TRUTH.host.model_copy(update={"delay_us": delay})})
            run = happened(wanted(f"closed-32-{mode}-{delay:g}", depth, [60] * 32, [40] * 32), late)
            info = type(run.info)(**{**_fields(run.info), "host_delay_us": delay})
            groups["delay"].append(
                type(run)(info=info, requests=run.requests, steps=run.steps, decisions=run.decisions)
            )
    for group, runs in groups.items():
        write_archive(tmp_path / f"cpu-planted-{group}.tar.xz", runs)
    picture, profile = tmp_path / "errors.png", tmp_path / "profile.toml"
    given = {"shape": "planted", "runs": tmp_path, "device": "cpu", "profile_out": profile, "plot": picture, "draws": 5}
    validate_h200.main(**given, as_json=True)
    report = json.loads(capsys.readouterr().out)
    limited = [row for row in report["rows"] if row["limit"] is not None]
    assert len(limited) == 2 * 5 + 8 * 2 + 1
    assert all(abs(row["error"]) < 0.25 for row in limited), limited
    crossover = next(row for row in limited if row["figure"].startswith("step at the crossover"))
    assert crossover["measured"] == pytest.approx(3.1, rel=0.1)
    assert picture.exists()
    assert read_profile(profile).gpu.contention == pytest.approx(1.02, abs=1e-3)
    validate_h200.main(**given)
    assert "27 of 27 figures met" in capsys.readouterr().out


# ---- bad input -------------------------------------------------------------------------------------------------------


BAD = {
    "record -o {new} --config llama-tiny": "--config: 'llama-tiny' is not allowed; a shape has no weights",
    "record -o {new}": "--model: missing",
    "record -o {one} --config llama-tiny --dummy-weights": "--out: .*name a new folder",
    "record -o {new} --config llama-tiny --dummy-weights --rate 0": "--rate: '0'",
    "record -o {new} --config llama-tiny --dummy-weights --rate inf": "--rate: 'inf'",
    "record -o {new} --config llama-tiny --dummy-weights --requests -1": "--requests: '-1'",
    "record -o {new} --config llama-tiny --dummy-weights --new-tokens 9-3": "--new-tokens: '9-3'",
    "record -o {new} --config llama-tiny --dummy-weights --prompt-tokens x": "--prompt-tokens: 'x'",
    "record -o {new} --config llama-tiny --dummy-weights --host-delay-us nan": "--host-delay-us: 'nan'",
    "record -o {new} --config llama-tiny --dummy-weights --mode fast": "--mode: 'fast'",
    "record -o {new} --config llama-tiny --dummy-weights --mode sync --depth 1": "--depth: '1'",
    "record -o {new} --config llama-tiny --dummy-weights --trace azure-conv-500 --rate 3": "--rate: '3'",
    "record -o {new} --config llama-tiny --dummy-weights --trace nowhere": "workload.trace: 'nowhere'",
    "calibrate {one} -o {new}": "--out: .*must end in .toml",
    "calibrate {new} -o {new}.toml": "run: .*use the folder of a run",
    "calibrate {truth} -o {new}.toml": "run: .*use the folder of a run",
    "calibrate {one} {one} -o {new}.toml": "RUN: .*it is named twice",
    "validate {one}": "--profile: missing",
    "validate {one} --profile {new}": "profile: .*cannot be read, .*use a TOML file or h200-llama-8b",
    "validate {one} --profile {one}": "profile: .*cannot be read",
    "validate {one} --profile {empty}": "profile: .*it is empty",
    "validate {one} --profile {binary}": "profile: .*cannot be read",
    "validate {one} --profile {truth} --draws -1": "--draws: '-1'",
    "validate {one} --profile {truth} --plot {new}.jpg": "--plot: .*must end in .png",
    "validate {archive} --profile {truth}": "run: .*with one of closed-1-async",
    "validate {archive}::nobody --profile {truth}": "run: .*with one of closed-1-async",
    "whatif {one}": "--set: missing",
    "whatif {one} --set host.scale": "--set: 'host.scale'",
    "whatif {one} --set host.scale=-1": "host.scale: -1.0",
    "whatif {one} --set hots.scale=2": "--set: 'hots.scale=2'",
    "whatif {one} --set host.scael=2": "host.scael: 2.0 .*did you mean scale",
    "whatif {one} --set depth=0": "depth: 0",
    "whatif {one} --set mode=fast": "mode: 'fast'",
    "whatif {one} --set num_blocks=x": "num_blocks: 'x'",
    "whatif {one} --set num_blocks=1": "--set: 'num_blocks=1' .*none of the run's 60 requests can ever run",
    "advise {new}": "SCENARIO.RUN: .*no such file or folder",
    "simulate --preset hf-8b-bs32 --profile {new}": "profile: .*cannot be read",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_line(planted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str) -> None:
    (tmp_path / "empty.toml").touch()
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    names = {
        "new": tmp_path / "new",
        "one": planted / "one",
        "truth": planted / "truth.toml",
        "archive": planted / "runs.tar.xz",
        "empty": tmp_path / "empty.toml",
        "binary": tmp_path / "binary.toml",
    }
    assert command(line.format(**names).split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert re.search(BAD[line], err), err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["binary.toml", "empty.toml"]


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__slots__}
