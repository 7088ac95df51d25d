"""A profile that meets a scenario or a run of another model or device: it is said, on stderr and in the JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asyncsched.cli.app import run as command
from asyncsched.cli.runs import load_profile, load_run
from asyncsched.errors import ConfigError
from asyncsched.run_files import write_run
from asyncsched.runs import Run
from sim.calibrate import calibrate
from sim.scenario import read_preset
from sim.subject import Subject, of_profile, of_run, of_scenario, warning

NAME = "h200-llama-8b"
RUN = f"{NAME}-heldout::closed-38-long-async"
SMALLER = "num_hidden_layers 32 and not 16, hidden_size 4096 and not 2048, intermediate_size 14336 and not 8192"
Captured = pytest.CaptureFixture[str]


def other_run(**changes: Any) -> Run:
    """A recorded run of which something else is said."""
    run = load_run(RUN)
    return replace(run, info=replace(run.info, **changes))


def scenario_with(model: object, device: object) -> dict[str, Any]:
    return {"gpu": {"kind": "roofline", "model": model, "device": device}}


@pytest.mark.parametrize(
    ("scenario", "said"),
    [
        (read_preset(NAME), ""),
        (read_preset("hf-8b-bs32"), ""),  # constant prices, of nobody
        (scenario_with("llama-8b", "h200"), ""),
        (
            read_preset("h200-llama-1b"),
            f"another model than the scenario ({SMALLER}); its prices are taken all the same",
        ),
        (
            scenario_with({"name": "llama-8b", "layers": 33}, "h200"),
            "(num_hidden_layers 32 and not 33, kv_bytes_per_token 131072 and not 135168)",
        ),
        (scenario_with({"name": "llama-8b", "dtype_bytes": 1.0}, "h200"), "(kv_bytes_per_token 131072 and not 65536)"),
        (scenario_with("llama-8b", "h100"), "another device than the scenario (NVIDIA H200 and not h100)"),
        (
            scenario_with("llama-1b", "a100"),
            "8192), and of another device than the scenario (NVIDIA H200 and",
        ),
        (scenario_with("llama-8b", {"hbm_tb_s": 1.0, "dense_tflop_s": 100.0, "pcie_gb_s": 30.0}), ""),
        ({"gpu": {"kind": "roofline", "model": "lama-8b", "device": "h200"}}, ""),  # its prices are not asked for
        ({"gpu": 3}, ""),
    ],
)
def test_a_scenario_of_something_else(scenario: dict[str, Any], said: str) -> None:
    found = warning(of_profile(load_profile(NAME)), of_scenario(scenario), "scenario")
    assert bool(found) == bool(said)
    assert said in found
    assert "\n" not in found


def test_a_scenario_with_a_profile_of_its_own() -> None:
    mine = load_profile(NAME)
    theirs = mine.model_copy(update={"device": {"name": "NVIDIA B200"}})
    found = warning(of_profile(mine), of_scenario({"profile": theirs.to_dict()}), "scenario")
    assert found.startswith("the profile is of another device than the scenario (NVIDIA H200 and not NVIDIA B200)")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({}, ""),
        ({"name": "meta-llama/Llama-3.1-8B"}, ""),  # as imported logs say it
        ({"name": "meta-llama/Llama-3.2-1B-Instruct"}, "another model than the run (num_hidden_layers 32 and not 16"),
        ({"name": "Qwen/Qwen3-8B"}, "another model than the run (num_hidden_layers 32 and not 36"),
        ({"name": "mistralai/x"}, "is of llama, and nobody can tell whether that is the run's model, mistralai/x; its"),
        ({"name": "llama", "dtype": "float16"}, "another model than the run (dtype bfloat16 and not float16)"),
    ],
)
def test_a_run_of_another_model(model: dict[str, Any], said: str) -> None:
    found = warning(of_profile(load_profile(NAME)), of_run(other_run(model=model)), "run")
    assert bool(found) == bool(said)
    assert said in found


@pytest.mark.parametrize(
    ("device", "other"),
    [
        ("H200", "NVIDIA H200"),
        ("rtx4090", "NVIDIA GeForce RTX 4090"),
        ("a100", "NVIDIA A100-SXM4-80GB"),
        ("", "CPU"),
        ("NVIDIA H200", "NVIDIA  H200"),
        ("RTX4090", "RTX 4090"),
        ("h200", "nvidia-h200-141gb"),
    ],
)
def test_one_device_by_two_names(device: str, other: str) -> None:
    assert not warning(Subject({}, device), Subject({}, other), "run")
    assert not warning(Subject({}, other), Subject({}, device), "run")


@pytest.mark.parametrize(
    ("device", "other"),
    [
        ("h100", "NVIDIA H200"),
        ("a100", "NVIDIA RTX A1000"),
        ("NVIDIA H200", "NVIDIA H200 NVL"),
        ("h200", "CPU"),
        ("l40", "NVIDIA L40S"),
        ("a10", "NVIDIA A10G"),
        ("h20", "NVIDIA H200"),
    ],
)
def test_two_devices(device: str, other: str) -> None:
    assert f"another device than the run ({device} and not {other})" in warning(
        Subject({}, device), Subject({}, other), "run"
    )


def test_simulate_says_it_and_goes_on(capsys: Captured) -> None:
    some = ["--set", "workload.num_requests=4", "--json"]
    assert command(["simulate", "--preset", "h200-llama-1b", "--profile", NAME, *some]) == 0
    captured = capsys.readouterr()
    (note,) = json.loads(captured.out)["notes"]
    assert note == f"the profile is of another model than the scenario ({SMALLER}); its prices are taken all the same"
    assert captured.err == f"warning: {note}\n"


@pytest.mark.parametrize("ask", [["validate", "--draws", "0"], ["whatif", "--set", "depth=1"], ["advise"]])
def test_commands_on_a_run_say_it_and_go_on(ask: list[str], tmp_path: Path, capsys: Captured) -> None:
    name, *options = ask
    write_run(tmp_path / "run", other_run(device={"name": "NVIDIA H100 80GB HBM3"}))
    assert command([name, str(tmp_path / "run"), "--profile", NAME, *options, "--json"]) == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    (note,) = answer["notes"]
    assert note.startswith(
        "the profile is of another device than the run (NVIDIA H200 and not NVIDIA H100 80GB HBM3); its"
    )
    assert captured.err == f"warning: {note}\n"
    if name == "advise":  # a page that quotes the advice says it as well
        (tmp_path / "advice.json").write_text(captured.out)
        assert command(["report", str(tmp_path / "advice.json"), "-o", str(tmp_path / "page.html")]) == 0
        assert "another device than the run" in (tmp_path / "page.html").read_text()
    assert command([name, RUN, "--profile", NAME, *options, "--json"]) == 0
    captured = capsys.readouterr()
    assert (json.loads(captured.out)["notes"], captured.err) == ([], "")


def test_no_profile_is_learnt_from_two_models() -> None:
    """Both are called llama."""
    smaller = other_run(model={**load_run(RUN).info.model, "num_hidden_layers": 16})
    with pytest.raises(ConfigError, match=r"model.num_hidden_layers: 16 .* closed-38-long-async had 32"):
        calibrate([load_run(RUN), smaller])
