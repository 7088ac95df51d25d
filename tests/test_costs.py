"""Prices of operations: formulas, the floors measured on a real device, and jitter that no call order can change."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncsched.errors import ConfigError
from asyncsched.plan import StepShape
from sim.costs import (
    ConstantGpu,
    CopyCosts,
    HostCosts,
    Jitter,
    JitteredCosts,
    LaneCosts,
    Overlap,
    RooflineGpu,
)
from sim.draws import Stream, exp, generator
from sim.hardware import Device, ModelShape
from sim.spec import validate

H200_8B = {"kind": "roofline", "model": "llama-8b", "device": "h200"}
CONSTANT = ConstantGpu(kind="constant", step_us=100.0)


def decode(batch: int, context: int, bucket: int = 0) -> StepShape:
    return StepShape(batch, batch, 0, batch, batch, batch * context, batch * context, bucket)


def prefill(tokens: int, samples: int = 1) -> StepShape:
    return StepShape(1, 0, tokens, tokens, samples, tokens, tokens * (tokens + 1) // 2, 0)


def lanes(host=None, copy=None, gpu=CONSTANT, overlap=None, depth=2) -> LaneCosts:
    return LaneCosts(host or HostCosts(), copy or CopyCosts(), gpu, overlap or Overlap(), depth=depth, block_size=16)


def roofline(**keys) -> RooflineGpu:
    return validate(RooflineGpu, {**H200_8B, **keys})


@pytest.mark.parametrize(("context", "ms"), [(512, 4.0), (2048, 5.5), (4096, 7.5), (8192, 11.5)])
def test_roofline_gives_the_known_floors_of_llama_8b_at_batch_32(context, ms):
    assert lanes(gpu=roofline()).forward_ns(decode(32, context), 0) / 1e6 == pytest.approx(ms, abs=0.05)


def test_roofline_of_a_long_prefill_is_limited_by_compute():
    flops = 2 * 6_979_321_856 * 8192 + 2 * 4096 * 128_256 + 4 * 32 * 32 * 128 * 8192 * 8193 // 2
    head_extra = 4096 * 128_256 * 2 / 4.28e3 - 2 * 4096 * 128_256 / 790e3  # one sample: the head only reads its weights
    expected_ns = flops / 790e3 + head_extra
    assert lanes(gpu=roofline()).forward_ns(prefill(8192), 0) == pytest.approx(expected_ns, abs=1)


def test_head_costs_nothing_when_no_row_samples():
    costs = lanes(gpu=roofline())
    saved = costs.forward_ns(prefill(512, samples=1), 0) - costs.forward_ns(prefill(512, samples=0), 0)
    assert saved == pytest.approx(4096 * 128_256 * 2 / 4.28e3, abs=1)


def test_attention_reads_the_kv_cache_and_writes_its_new_positions():
    costs = lanes(gpu=roofline())
    kv_ns = 2 * 32 * 8 * 128 * 2 / 4.28e3  # keys and values of one position
    read = costs.forward_ns(decode(32, 8192), 0) - costs.forward_ns(decode(32, 192), 0)
    assert read == pytest.approx(32 * 8000 * kv_ns, abs=1)
    weights_ns = (6_979_321_856 + 4096 * 128_256) * 2 / 4.28e3
    assert costs.forward_ns(decode(100, 1), 0) == pytest.approx(weights_ns + 100 * 2 * kv_ns, abs=1)


def test_efficiencies_and_overhead():
    floor = lanes(gpu=roofline()).forward_ns(decode(32, 512), 0)
    assert lanes(gpu=roofline(memory_efficiency=0.5)).forward_ns(decode(32, 512), 0) == pytest.approx(2 * floor, abs=1)
    assert lanes(gpu=roofline(kernel_overhead_us=7.0)).forward_ns(decode(32, 512), 0) == pytest.approx(
        floor + 7000, abs=1
    )
    slow = lanes(gpu=roofline(compute_efficiency=0.5)).forward_ns(prefill(8192, samples=0), 0)
    assert slow == pytest.approx(2 * lanes(gpu=roofline()).forward_ns(prefill(8192, samples=0), 0), abs=1)


def test_padded_rows_are_computed_but_read_no_kv():
    costs = lanes(gpu=roofline(device={"name": "h200", "dense_tflop_s": 1.0}))  # so slow that compute decides
    params = 6_979_321_856 + 4096 * 128_256
    extra = costs.forward_ns(decode(5, 64, bucket=8), 0) - costs.forward_ns(decode(5, 64), 0)
    assert extra == pytest.approx(3 * 2 * params / 1e3, abs=1)
    constant = lanes(gpu=ConstantGpu(kind="constant", step_us=0.0, us_per_decode_seq=2.0))
    assert constant.forward_ns(decode(5, 64, bucket=8), 0) == 16_000


def test_constant_gpu_prices_every_size():
    gpu = ConstantGpu(
        kind="constant", step_us=100.0, us_per_decode_seq=10.0, us_per_prefill_token=1.0, us_per_kv_token=0.1
    )
    mixed = StepShape(4, 3, 50, 53, 4, 1000, 5000, 0)
    assert lanes(gpu=gpu).forward_ns(mixed, 0) == 100_000 + 30_000 + 50_000 + 100_000


def test_host_costs_per_kind_and_sequence_times_scale():
    host = HostCosts(
        scale=0.5,
        plan_us=1.0,
        plan_us_per_seq=0.1,
        fill_us=2.0,
        fill_us_per_seq=0.2,
        launch_us=8.0,
        commit_us=4.0,
        commit_us_per_seq=0.4,
    )
    prices = {kind: lanes(host).host_ns(kind, decode(10, 1), 0) for kind in ("plan", "fill", "launch", "commit")}
    assert prices == {"plan": 1000, "fill": 2000, "launch": 4000, "commit": 4000}


def test_an_unknown_kind_of_host_work_is_not_free():
    with pytest.raises(KeyError):
        lanes().host_ns("detokenise", decode(1, 1), 0)


def test_copies_are_latency_and_int32_arrays_over_bandwidth():
    copy = CopyCosts(h2d_latency_us=5.0, h2d_gb_s=1.0, d2h_latency_us=6.0, d2h_gb_s=0.5)
    shape = StepShape(3, 2, 10, 12, 3, 40, 60, 0)
    assert lanes(copy=copy).h2d_ns(shape, 0) == 5000 + 4 * (4 * 12 + 3 * 3)
    assert lanes(copy=copy).d2h_ns(shape, 0) == 6000 + 2 * 4 * 3


def test_bandwidth_not_given_is_the_devices_link_or_none():
    shape = prefill(100_000)
    slow = {"name": "h200", "pcie_gb_s": 0.5}
    assert lanes(gpu=roofline(device=slow)).h2d_ns(shape, 0) == 2 * (16 * 100_000 + 12)
    assert lanes(copy=CopyCosts(h2d_gb_s=1.0), gpu=roofline(device=slow)).h2d_ns(shape, 0) == 16 * 100_000 + 12
    assert lanes(gpu=roofline(device=slow)).d2h_ns(decode(1000, 1), 0) == 2 * 4 * 1000
    assert lanes().h2d_ns(shape, 0) == lanes().d2h_ns(shape, 0) == 0


def test_overlap_counts_only_when_steps_overlap():
    overlap = Overlap(gpu_contention=1.5, exposed_output_sync_us=7.0)
    sync, asynchronous = lanes(overlap=overlap, depth=1), lanes(overlap=overlap, depth=2)
    assert (sync.forward_ns(decode(1, 1), 0), sync.output_sync_ns()) == (100_000, 0)
    assert (asynchronous.forward_ns(decode(1, 1), 0), asynchronous.output_sync_ns()) == (150_000, 7000)


@given(st.sampled_from(sorted(ModelShape.registry)), st.sampled_from(sorted(Device.registry)), st.data())
def test_more_work_never_takes_less_time(model, device, data):
    costs = lanes(gpu=roofline(model=model, device=device))
    sizes = st.integers(1, 512), st.integers(1, 8192)
    batch, context = data.draw(sizes[0]), data.draw(sizes[1])
    now = costs.forward_ns(decode(batch, context), 0)
    assert now <= costs.forward_ns(decode(batch + 1, context), 0)
    assert now <= costs.forward_ns(decode(batch, context + 1), 0)
    assert now > 0


def test_a_registered_model_takes_replaced_keys_and_a_shape_of_its_own_needs_all():
    assert validate(RooflineGpu, {**H200_8B, "model": {"name": "llama-8b", "layers": 16}}).model.layers == 16
    with pytest.raises(ConfigError, match=r"^model.hidden_size: missing; a value is required"):
        roofline(model={"layers": 16})
    with pytest.raises(ConfigError, match=r"^device.name: 'h300' .* did you mean h"):
        roofline(device="h300")


def jittered(seed=1, **sigmas) -> JitteredCosts:
    host = HostCosts(plan_us=1000.0, fill_us=1000.0)
    copy = CopyCosts(h2d_latency_us=1000.0, d2h_latency_us=1000.0)
    gpu = ConstantGpu(kind="constant", step_us=1000.0)
    return JitteredCosts(lanes(host, copy, gpu), Jitter(kind="lognormal", **sigmas), seed)


@given(st.permutations([("plan", 0), ("plan", 1023), ("plan", 1024), ("plan", 5000), ("fill", 0), ("forward", 1024)]))
def test_jitter_does_not_depend_on_the_order_of_calls(calls):
    def price(costs: JitteredCosts, kind: str, step: int) -> int:
        return costs.forward_ns(decode(1, 1), step) if kind == "forward" else costs.host_ns(kind, decode(1, 1), step)

    shared = jittered(host_sigma=0.3, gpu_sigma=0.2)
    assert [price(shared, *call) for call in calls] == [
        price(jittered(host_sigma=0.3, gpu_sigma=0.2), *call) for call in calls
    ]


def test_jitter_is_seeded_and_each_operation_has_its_own():
    def draw(seed: int) -> list[int]:
        costs, shape = jittered(seed, host_sigma=0.1, copy_sigma=0.1, gpu_sigma=0.1), decode(1, 1)
        return [
            costs.host_ns("plan", shape, 0),
            costs.host_ns("fill", shape, 0),
            costs.h2d_ns(shape, 0),
            costs.d2h_ns(shape, 0),
            costs.forward_ns(shape, 0),
            costs.forward_ns(shape, 1),
        ]

    assert draw(1) == draw(1)
    assert len({*draw(1), *draw(2)}) == 12


def test_jitter_is_the_same_on_every_machine():
    costs = jittered(seed=7, host_sigma=0.25)
    assert [costs.host_ns("plan", decode(1, 1), step) for step in (0, 1, 1024)] == [625_832, 1_118_945, 599_595]


def test_jitter_keeps_the_mean_and_touches_only_what_it_names():
    costs = jittered(host_sigma=0.5)
    prices = np.array([costs.host_ns("plan", decode(1, 1), step) for step in range(20_000)])
    assert prices.mean() == pytest.approx(1e6, rel=0.02)
    assert np.log(prices).std() == pytest.approx(0.5, rel=0.02)
    assert {costs.forward_ns(decode(1, 1), step) for step in range(100)} == {1_000_000}
    for kind in ("h2d_ns", "d2h_ns"):
        assert {getattr(costs, kind)(decode(1, 1), step) for step in range(100)} == {1_000_000}
        assert len({getattr(jittered(copy_sigma=0.5), kind)(decode(1, 1), step) for step in range(100)}) == 100


def test_streams_and_blocks_do_not_overlap():
    draws = [generator(3, stream, block).random(4).tolist() for stream in Stream for block in (0, 1, 2)]
    assert len({value for draw in draws for value in draw}) == 4 * len(draws)


def test_exp_is_exp():
    x = np.linspace(-50, 50, 1001)
    assert np.allclose(exp(x), np.exp(x), rtol=2e-12, atol=0)
