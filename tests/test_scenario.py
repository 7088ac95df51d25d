"""Scenarios: one choice of depth, strict values, errors in one line, overrides, presets that say what they claim."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncsched.config import EngineConfig
from asyncsched.errors import ConfigError
from asyncsched.plan import StepShape
from sim.scenario import (
    Scenario,
    apply_overrides,
    load_preset,
    load_scenario,
    override_values,
    parse_value,
    presets,
    read_preset,
)

FIXED = {"kind": "fixed", "tokens": 10}
MINIMAL = {
    "gpu": {"kind": "constant", "step_us": 10},
    "workload": {
        "kind": "synthetic",
        "num_requests": 5,
        "prompt": FIXED,
        "output": FIXED,
        "arrivals": {"kind": "all-at-once"},
    },
}


def decode(batch: int, context: int) -> StepShape:
    return StepShape(batch, batch, 0, batch, batch, batch * context, batch * context, 0)


def test_engine_defaults_are_the_engines():
    assert Scenario.from_dict(MINIMAL).engine_config() == EngineConfig()
    section = Scenario.from_dict(MINIMAL).to_dict()["engine"]
    assert set(section) == {field.name for field in fields(EngineConfig)} - {"depth", "batching"}


def test_engine_keys_reach_the_engine():
    data = {**MINIMAL, "mode": "static", "engine": {"num_blocks": 7, "decode_buckets": [1, 2], "sliding_window": 64}}
    expected = EngineConfig(depth=1, batching="static", num_blocks=7, decode_buckets=(1, 2), sliding_window=64)
    assert Scenario.from_dict(data).engine_config() == expected


@pytest.mark.parametrize(
    ("given_keys", "mode", "depth"),
    [
        ({}, "async", 2),
        ({"mode": "static"}, "static", 1),
        ({"mode": "static", "depth": 1}, "static", 1),
        ({"mode": "sync"}, "sync", 1),
        ({"mode": "async"}, "async", 2),
        ({"mode": "async", "depth": 2}, "async", 2),
        ({"mode": "depth=1"}, "sync", 1),
        ({"mode": "depth=2"}, "async", 2),
        ({"mode": "depth=4"}, "depth=4", 4),
        ({"depth": 1}, "sync", 1),
        ({"depth": 2}, "async", 2),
        ({"depth": 3}, "depth=3", 3),
    ],
)
def test_mode_and_depth_are_one_choice(given_keys, mode, depth):
    scenario = Scenario.from_dict({**MINIMAL, **given_keys})
    assert (scenario.mode, scenario.depth, scenario.engine_config().depth) == (mode, depth, depth)
    assert scenario.engine_config().batching == ("static" if mode == "static" else "continuous")


@pytest.mark.parametrize(
    "given_keys", [{"mode": "sync", "depth": 2}, {"mode": "static", "depth": 2}, {"mode": "async", "depth": 1}]
)
def test_mode_and_depth_must_agree(given_keys):
    with pytest.raises(ConfigError, match=rf"^depth: \d is not allowed; mode '{given_keys['mode']}' has depth"):
        Scenario.from_dict({**MINIMAL, **given_keys})


def test_overriding_one_spelling_replaces_the_other():
    resolved = Scenario.from_dict(MINIMAL).to_dict()
    assert Scenario.from_dict(apply_overrides(resolved, ["depth=3"])).mode == "depth=3"
    assert Scenario.from_dict(apply_overrides(resolved, ["mode=static"])).depth == 1
    static = Scenario.from_dict(apply_overrides(resolved, ["mode=static"])).to_dict()
    for overrides, source in (["mode=sync", "depth=2"], resolved), (["depth=2"], static):
        with pytest.raises(ConfigError, match="leave one of the two out"):
            Scenario.from_dict(apply_overrides(source, overrides))


BAD = {
    "hosst.scale=1": "hosst: {'scale': 1} is not allowed; unknown key, did you mean host?",
    "host.plan_ms=3": "host.plan_ms: 3 is not allowed; unknown key, did you mean plan_us or launch_us?",
    "host.plan_us=nan": "host.plan_us: nan is not allowed; it must be a finite number",
    "host.plan_us=inf": "host.plan_us: inf is not allowed; it must be a finite number",
    "host.plan_us=-1": "host.plan_us: -1 is not allowed; it must be greater than or equal to 0",
    "host.plan_us=fast": "host.plan_us: 'fast' is not allowed; it must be a valid number",
    'host.plan_us="1"': "host.plan_us: '1' is not allowed; it must be a valid number",
    "host.plan_us=true": "host.plan_us: True is not allowed; it must be a valid number",
    "host=3": "host: 3 is not allowed; it must be a table of keys",
    "engine=3": "engine: 3 is not allowed; it must be a table of keys",
    "engine.num_blocks=0": "engine.num_blocks: 0 is not allowed; use a whole number of at least 1",
    "engine.num_blocks=1.5": "engine.num_blocks: 1.5 is not allowed; it must be a valid integer",
    "engine.blocks=3": "engine.blocks: 3 is not allowed; unknown key, did you mean num_blocks or block_size?",
    "engine.decode_buckets=[1, 2.5]": "engine.decode_buckets.1: 2.5 is not allowed; it must be a valid integer",
    "engine.decode_buckets=3": "engine.decode_buckets: 3 is not allowed; it must be a valid list",
    "engine.admission=nowhere:Policy": "engine.admission: 'nowhere:Policy' is not allowed; it could not be loaded",
    "engine.victim=nobody": "engine.victim: 'nobody' is not allowed; use one of latest-arrival",
    "engine.reservation=json:loads": "engine.reservation: 'json:loads' is not allowed; it could not be loaded",
    "depth=0": "depth: 0 is not allowed; it must be greater than or equal to 1",
    "depth=2.0": "depth: 2.0 is not allowed; it must be a valid integer",
    "depth=true": "depth: True is not allowed; it must be a valid integer",
    "mode=asink": "mode: 'asink' is not allowed; use static, sync, async, or depth=k with k at least 1",
    "mode=depth=0": "mode: 'depth=0' is not allowed; use static, sync, async, or depth=k with k at least 1",
    "mode=3": "mode: 3 is not allowed; it must be a valid string",
    "seed=-1": "seed: -1 is not allowed; it must be greater than or equal to 0",
    "gpu={}": "gpu.kind: missing; use one of 'constant', 'roofline'",
    "gpu=5": "gpu: 5 is not allowed; it must be a table of keys",
    "gpu.kind=tpu": "gpu.kind: 'tpu' is not allowed; use one of 'constant', 'roofline'",
    "gpu.kind=[1]": "gpu.kind: [1] is not allowed; use one of 'constant', 'roofline'",
    'gpu={kind="constant"}': "gpu.step_us: missing; a value is required, there is no default",
    "gpu.step_us.x=1": "gpu.step_us: 10 is not allowed; it must be a table for gpu.step_us.x to be set",
    "copy.h2d_gb_s=0": "copy.h2d_gb_s: 0 is not allowed; it must be greater than or equal to 0.001",
    "overlap.gpu_contention=0.9": "overlap.gpu_contention: 0.9 is not allowed; it must be greater than or equal to 1",
    "jitter.kind=normal": "jitter.kind: 'normal' is not allowed; it must be 'none', 'lognormal' or 'profile'",
    "workload.num_requests=0": "workload.num_requests: 0 is not allowed; it must be greater than or equal to 1",
    "workload.prompt.tokens=0": "workload.prompt.tokens: 0 is not allowed; it must be greater than or equal to 1",
    "workload.stop=eos": "workload.max_tokens: missing; stop = \"eos\" needs",
    "workload.arrivals={}": "workload.arrivals.kind: missing; use one of 'all-at-once', 'poisson', 'gamma', 'ramp'",
    "x": "--set: 'x' is not allowed; use key=value",
    "=3": "--set: '=3' is not allowed; use key=value",
}  # fmt: skip


@pytest.mark.parametrize("override", BAD)
def test_bad_values_are_one_line_with_field_value_and_what_is_allowed(override):
    with pytest.raises(ConfigError) as caught:
        Scenario.from_dict(apply_overrides(MINIMAL, [override]))
    message = str(caught.value)
    assert message.startswith(BAD[override])
    assert "\n" not in message


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["seed=1", "seed=2"], "'seed=2' is not allowed; seed=1 is set already"),
        (["seed=1", " seed = 1"], "' seed = 1' is not allowed; seed=1 is set already"),
        (["max_num_seqs=4", "engine.max_num_seqs=8"], "'engine.max_num_seqs=8' is not allowed; max_num_seqs=4 is set"),
        (
            ["workload.prompt.tokens=3", "workload.prompt={}"],
            "'workload.prompt={}' is not allowed; workload.prompt.tok",
        ),
        (["max_num_seqs=4", "engine={}"], "'engine={}' is not allowed; max_num_seqs=4 is set already"),
    ],
)
def test_an_override_that_would_undo_another_is_refused(overrides, said):
    with pytest.raises(ConfigError) as caught:
        apply_overrides(MINIMAL, overrides)
    assert str(caught.value).startswith(f"--set: {said}")


def test_a_table_may_be_set_and_then_refined():
    first, then = "workload.prompt={kind='fixed', tokens=3}", "workload.prompt.tokens=5"
    assert apply_overrides(MINIMAL, [first, then])["workload"]["prompt"] == {"kind": "fixed", "tokens": 5}
    assert apply_overrides(MINIMAL, ["host.scale=3", "host.scale_other=1"])["host"]["scale"] == 3


@pytest.mark.parametrize("missing", ["gpu", "workload"])
def test_gpu_and_workload_have_no_default(missing):
    data = {key: value for key, value in MINIMAL.items() if key != missing}
    with pytest.raises(ConfigError, match=rf"^{missing}: missing; a value is required"):
        Scenario.from_dict(data)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("0.5", 0.5),
        ("1e3", 1000.0),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ('{kind="fixed", tokens=3}', {"kind": "fixed", "tokens": 3}),
        ('"8"', "8"),
        ("sync", "sync"),
        ("depth=3", "depth=3"),
        ("some.module:Class", "some.module:Class"),
        ("1\nother = 2", "1\nother = 2"),
    ],
)
def test_values_are_toml_or_else_text(text, value):
    parsed = parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_overrides_leave_their_input_alone():
    before = json.dumps(MINIMAL)
    changed = apply_overrides(MINIMAL, ["host.plan_us=5", "workload.prompt.tokens=99"])
    assert changed["host"] == {"plan_us": 5}
    assert changed["workload"]["prompt"] == {"kind": "fixed", "tokens": 99}
    assert json.dumps(MINIMAL) == before


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "seed": st.integers(0, 2**63 - 1),
            "depth": st.integers(1, 9),
            "host.plan_us": st.floats(0, 1e9),
            "copy.h2d_gb_s": st.floats(1e-3, 1e9),
            "engine.sliding_window": st.integers(1, 9999),
            "engine.decode_buckets": st.sets(st.integers(1, 99)).map(sorted),
            "gpu": st.sampled_from(
                [{"kind": "roofline", "model": "llama-1b", "device": {"name": "a100", "hbm_tb_s": 1}}]
            ),
            "workload.output": st.sampled_from([{"kind": "lognormal", "mean_tokens": 9, "sigma": 1, "max_tokens": 50}]),
        },
    )
)
def test_a_resolved_scenario_survives_json(values):
    scenario = Scenario.from_dict(override_values(MINIMAL, values))
    again = Scenario.from_dict(json.loads(json.dumps(scenario.to_dict(), allow_nan=False)))
    assert again == scenario
    assert again.engine_config() == scenario.engine_config()
    assert again.workload_arrivals() == scenario.workload_arrivals()


def test_scenario_files(tmp_path):
    (tmp_path / "data.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2024-01-01 00:00:00,3,4\n")
    file = tmp_path / "some.toml"
    file.write_text('[gpu]\nkind = "constant"\nstep_us = 1\n[workload]\nkind = "trace"\ntrace = "data.csv"\n')
    scenario = load_scenario(file, ["depth=3"])
    assert scenario.depth == 3
    assert len(scenario.workload_arrivals()) == 1  # found beside the scenario, not in the current folder
    file.write_text("mode = \n")
    with pytest.raises(ConfigError, match=r"^scenario: '.*some.toml' is not allowed; it is not valid TOML: .*line 1"):
        load_scenario(file)
    with pytest.raises(ConfigError, match=r"^scenario: '.*none.toml' is not allowed; it cannot be read \(No such file"):
        load_scenario(tmp_path / "none.toml")


def test_jitter_is_used_when_asked_for():
    quiet, noisy = (
        Scenario.from_dict(MINIMAL),
        apply_overrides(MINIMAL, ["jitter.kind=lognormal", "jitter.gpu_sigma=0.5"]),
    )
    assert quiet.costs().forward_ns(decode(1, 1), 0) == 10_000
    assert len({Scenario.from_dict(noisy).costs().forward_ns(decode(1, 1), step) for step in range(9)}) == 9


def test_presets_load_and_say_what_they_are():
    assert {"hf-8b-bs32", "hf-8b-mixed", "h200-llama-8b"} <= set(presets())
    for name, description in presets().items():
        scenario = load_preset(name)
        assert scenario.description == description != ""
        assert {"mode", "depth"}.isdisjoint(read_preset(name))  # the choice is the user's
        config = scenario.engine_config()
        for arrival in scenario.workload_arrivals():  # nothing in a preset is rejected
            assert arrival.prompt_tokens + arrival.max_tokens <= config.max_model_len
        assert config.max_model_len <= config.num_blocks * config.block_size
    with pytest.raises(ConfigError, match=r"^preset: 'hf-8b' is not allowed; unknown preset, did you mean hf-8b-"):
        load_preset("hf-8b")


def test_the_published_run_is_reproduced_by_its_inputs():
    """Closed forms of constant lanes: sync adds all lanes up, async takes the longest and what nothing can hide."""

    def totals_s(*overrides: str) -> tuple[float, float, float]:
        costs, shape = load_preset("hf-8b-bs32", overrides).costs(), decode(32, 512)
        host = sum(costs.host_ns(kind, shape, 0) for kind in ("plan", "fill", "launch", "commit"))
        gpu = costs.forward_ns(shape, 0)
        assert costs.h2d_ns(shape, 0) == costs.d2h_ns(shape, 0) == 0
        steps = 8192
        return steps * (host + gpu) / 1e9, (steps * (gpu + costs.output_sync_ns()) + host) / 1e9, host / (host + gpu)

    sync_s, async_s, idle = totals_s()
    assert sync_s == pytest.approx(300.6, abs=1e-6)
    assert idle == pytest.approx(0.24, abs=1e-7)
    assert async_s == pytest.approx(228.5, abs=0.05)
    assert totals_s("overlap.gpu_contention=1.02")[1] == pytest.approx(233.0, abs=0.05)
    both = totals_s("overlap.gpu_contention=1.02", "overlap.exposed_output_sync_us=172")[1]
    assert both == pytest.approx(234.5, abs=0.1)
    assert list(load_preset("hf-8b-bs32").workload_arrivals()) == [(0, 128, 8192, 8192, 0, ())] * 32


@pytest.mark.parametrize(("context", "ms"), [(512, 6.0), (4096, 9.5), (8192, 13.4)])
def test_the_h200_preset_gives_the_measured_decode_steps(context, ms):
    forward_ns = load_preset("h200-llama-8b").costs().forward_ns(decode(32, context), 0)
    assert forward_ns / 1e6 == pytest.approx(ms, abs=0.1)


@pytest.mark.parametrize(("batch", "us"), [(32, 423), (256, 2543)])
def test_the_h200_preset_gives_the_measured_host_work(batch, us):
    costs, shape = load_preset("h200-llama-8b").costs(), decode(batch, 512)
    total_ns = sum(costs.host_ns(kind, shape, 0) for kind in ("plan", "fill", "commit"))
    assert total_ns / 1e3 == pytest.approx(us, abs=1)
