"""What lanes at measured prices do, against sums worked out by hand."""

from typing import Any

import numpy as np
import pytest
from planted import wanted

from asyncsched.plan import StepShape
from asyncsched.runs import Run
from sim.measured import Heat, MeasuredCosts, jitter_of
from sim.predict import predict
from sim.profile import HOT_TOKENS, Profile
from sim.validate import coverage

HOST = {"plan": 70, "fill": 50, "commit": 40, "deliver": 30}
PATH = sum(HOST.values()) - HOST["deliver"]  # what is delivered is handed over behind the next launch
BASE: dict[str, Any] = {
    "schema": 2,
    "host": {
        **{kind: {"us": float(us)} for kind, us in HOST.items()},
        "launch": {"us": 100.0},
        "eager_launch": {"us": 900.0},
        "launch_head_us": 60.0,
        "eager_head_us": 80.0,
        "eager_tail_us": 5.0,
        "collect_us": 11.0,
        "wake_us": 7.0,
        "submit_us": 3.0,
    },
    "copy": {"h2d_us": 4.0, "d2h_us": 6.0},
    "gpu": {
        "decode_seqs": [1, 9],
        "decode_us": [1000.0, 1800.0],
        "eager": {"tokens": [10], "tokens_us": [500.0]},
        "idle_start_us": 20.0,
        "gap_us": 2.0,
        "contention": 1.1,
    },
}


def priced(**changes: Any) -> Profile:
    """The base with whole sections or keys of `host` and `gpu` changed."""
    sections = {name: {**BASE[name], **changes.get(name, {})} for name in ("host", "gpu")}
    return Profile.from_dict({**BASE, **sections})


def steps_of(profile: Profile, depth: int, requests: int = 1, tokens: int = 30, **engine: Any) -> Run:
    return predict(wanted("one", depth, [10] * requests, [tokens] * requests, **engine), profile)


def period_us(run: Run) -> float:
    """From the end of one decode step to the next, in the middle of the run."""
    ends = run.steps.end("compute")[run.steps.kind == "decode"]
    return float(np.diff(ends)[10:-4].mean()) / 1e3


def test_a_synchronous_step_is_the_sum_of_what_is_on_its_path() -> None:
    """The rest of the launch and the delivery are not: the device computes meanwhile."""
    expected = PATH + 60 + (1000 + 20) + 6 + 7 + 11
    assert period_us(steps_of(priced(), 1)) == pytest.approx(expected)


def test_the_host_works_at_another_speed_beside_the_device() -> None:
    """Synchronously nothing but the rest of the launch is beside it; asynchronously all of it."""
    busy = {"host": {"plan": {"us": 70.0, "busy_factor": 2.0}}}
    assert period_us(steps_of(priced(**busy), 1)) == pytest.approx(period_us(steps_of(priced(), 1)))
    for depth, expected in ((1, 70.0), (2, 140.0)):
        plans = steps_of(priced(**busy), depth).steps.duration("plan")
        assert np.median(plans) / 1e3 == pytest.approx(expected)


def test_an_asynchronous_step_is_the_devices_while_the_host_is_quicker() -> None:
    assert period_us(steps_of(priced(), 2)) == pytest.approx(1000 * 1.1 + 2)


@pytest.mark.parametrize("delay_us", [1000.0, 5000.0])
def test_an_asynchronous_step_is_the_hosts_where_that_is_slower(delay_us: float) -> None:
    """All of the launch counts, waking up does not: the tokens are there already."""
    run = steps_of(priced(host={"delay_us": delay_us}), 2)
    assert period_us(run) == pytest.approx(sum(HOST.values()) + delay_us + 100 + 11)


def test_host_scale_stretches_the_host_alone() -> None:
    for depth, expected in ((1, 3 * (PATH + 60 + 7 + 11) + 1026), (2, 1102.0)):
        assert period_us(steps_of(priced(host={"scale": 3.0}), depth)) == pytest.approx(expected)


def test_a_step_launched_kernel_by_kernel_ends_after_its_launch() -> None:
    first = steps_of(priced(), 1).steps  # 10 tokens of prefill: 500 us of computing, 900 us of launching
    assert first.kind[0] == "prefill"
    assert (first.start("compute") - first.end("fill"))[0] == 80_000
    assert (first.end("compute") - first.end("launch"))[0] == 5_000
    quick = steps_of(priced(host={"eager_launch": {"us": 300.0}}), 1).steps
    assert quick.duration("compute")[0] == 520_000


def test_a_padded_step_costs_what_its_bucket_does() -> None:
    period = period_us(steps_of(priced(), 1, requests=3))
    more = period_us(steps_of(priced(), 1, requests=3, decode_buckets=(1, 9)))
    assert more - period == pytest.approx(100 * (9 - 4))  # 3 sequences run in the bucket of 4


def test_on_a_cpu_lanes_run_in_the_hosts_thread() -> None:
    """Depth buys nothing: everything adds up."""
    for depth in (1, 2):
        profile = priced(host={"inline": True, "wake_us": 0.0}, gpu={"contention": 1.0, "gap_us": 0.0})
        expected = sum(HOST.values()) + 100 + 4 + 1020 + 6 + 11
        assert period_us(steps_of(profile, depth)) == pytest.approx(expected)


def test_requests_cost_the_host_as_they_come() -> None:
    one, five = (steps_of(priced(), 1, requests=count).steps.start("plan")[0] for count in (1, 5))
    assert (one, five) == (3_000, 15_000)


def test_beyond_the_last_corner_a_line_goes_on() -> None:
    narrow = steps_of(priced(), 1, requests=9, decode_buckets=(9, 25))
    wide = steps_of(priced(), 1, requests=10, decode_buckets=(9, 25))
    assert period_us(wide) - period_us(narrow) == pytest.approx(100 * (25 - 9))


def test_the_longest_sequence_is_split_among_a_power_of_two_of_programs() -> None:
    """Of a batch of 4: halved where that makes no more sequences than count whole, not cut in three, and never cut in
    more than MAX_SPLITS."""
    for whole, share in ((2, 1.0), (4, 1.0), (7, 1.0), (8, 0.5), (12, 0.5), (15, 0.5), (16, 0.25), (4000, 1 / 64)):
        slow = priced(gpu={"us_per_longest": 3.0, "whole_seqs": whole})
        runs = [predict(wanted("odd", 1, [10, 10, 10, 200], [30] * 4), profile) for profile in (priced(), slow)]
        plain, dear = (run.steps.duration("compute")[run.steps.kind == "decode"] for run in runs)
        assert (dear - plain).tolist()[:5] == [round(3000 * share * (201 + step)) for step in range(5)]


def test_steps_with_prefills_cost_what_they_read_and_have_beside_them() -> None:
    """20 tokens of a prefill beside a decode at position 12: it reads 12 positions, and computes 20."""
    eager = {"tokens": [10], "tokens_us": [500.0], "us_per_context_token": 2.0, "us_per_token_and_decode": 3.0}
    eager |= {"us_per_attn_pair": 0.5, "us_per_longest": 7.0}
    profile = priced(gpu={"eager": eager}, host={"eager_launch": {"us": 0.0}, "eager_tail_us": 0.0})
    run = predict(wanted("two", 1, [10, 20], [30, 30], [0.0, 0.5]), profile)
    row = int(np.flatnonzero(run.steps.kind == "mixed")[0])
    assert [run.steps[name][row] for name in ("num_decodes", "num_prefill_tokens", "kv_tokens")] == [1, 20, 32]
    pairs = 12 + 20 * 21 // 2
    assert run.steps["attn_pairs"][row] == pairs
    expected = 500 + 2 * 12 + 3 * 21 + 0.5 * pairs + 7 * 12 + 20
    assert run.steps.duration("compute")[row] / 1e3 == pytest.approx(expected)


@pytest.mark.parametrize(("seqs", "bucket", "large"), [(58, 64, True), (64, 0, True), (58, 0, False), (50, 56, False)])
def test_a_step_is_large_by_what_it_computes(seqs: int, bucket: int, large: bool) -> None:
    """Padded to 64 sequences it draws the power of 64."""
    slow, one = (2.0,) * 11, (1.0,) * 11
    shape = StepShape(seqs, seqs, 0, seqs, seqs, 10, 10, bucket)
    for name in ("decode_large", "run_large"):
        other = {"decode_large": one, "run_large": one, "decode": one, "run": one, name: slow}
        profile = Profile.from_dict({**BASE, "jitter": other})
        plain, drawn = (
            MeasuredCosts(profile, depth=1, seats=64, seed=seed).forward_ns(shape, 10, 0, False, 0.0)
            for seed in (None, 1)
        )
        assert drawn == plain * (2 if large else 1)


DECODE = StepShape(8, 8, 0, 8, 8, 10, 10, bucket=8)
PREFILL = StepShape(1, 0, 20, 20, 1, 20, 210, bucket=0, mixed_bucket=32)
MIXED = StepShape(2, 1, 20, 21, 2, 30, 220, bucket=0, mixed_bucket=32)


@pytest.mark.parametrize(
    ("shape", "hot", "cold"),
    [
        (DECODE, "decode_hot", "decode"),
        (DECODE._replace(num_seqs=64, num_decodes=64, bucket=64), "decode_large", "decode_large"),
        (PREFILL, "padded_hot", "padded_prefill"),
        (MIXED, "padded_hot", "padded"),
        (PREFILL._replace(mixed_bucket=0), "eager_prefill", "eager_prefill"),
    ],
)
def test_what_is_behind_large_prefills_varies_by_tables_of_its_own(shape: StepShape, hot: str, cold: str) -> None:
    """Decodes of small batches and captured steps that prefill do, where there are such tables."""
    names = ("decode", "decode_hot", "decode_large", "eager", "eager_prefill", "padded", "padded_prefill", "padded_hot")
    prices = priced(gpu={"padded": {"tokens": [32], "tokens_us": [500.0]}}).to_dict()
    for slow in names:
        profile = Profile.from_dict(
            {**prices, "jitter": {name: (2.0 if name == slow else 1.0,) * 11 for name in names}}
        )
        for heat, table in ((0.3, hot), (0.0, cold)):
            plain, drawn = (
                MeasuredCosts(profile, depth=1, seats=64, seed=seed).forward_ns(shape, 10, 0, False, heat)
                for seed in (None, 1)
            )
            assert drawn == plain * (2 if slow == table else 1) > 0, slow
    without = Profile.from_dict({**BASE, "jitter": {"decode": (2.0,) * 11, "padded": (2.0,) * 11}})
    assert jitter_of(without.jitter, shape, 0.3) == jitter_of(without.jitter, shape, 0.0)


def test_intervals_of_steps_behind_large_prefills_are_theirs() -> None:
    """Those of others are planted where no step is."""
    tables = dict.fromkeys(("decode", "padded", "padded_prefill", "eager"), (3.0,) * 11)
    hot = {"decode_hot": (1.0,) * 11, "padded_hot": (1.0,) * 11}
    gpu = {"hot_ms": 20.0, "eager": {"tokens": [10], "tokens_us": [4980.0]}}
    sizes = {"max_num_batched_tokens": 2 * HOT_TOKENS, "max_model_len": 2 * HOT_TOKENS, "mixed_buckets": (32,)}
    asked = wanted("hot", 1, [HOT_TOKENS, 20], [30] * 2, [0.0, 1.5], decode_buckets=(9,), **sizes)
    run = predict(asked, priced(gpu=gpu))
    begun = run.steps.start("compute")
    is_hot = (begun > begun[0]) & (begun < run.steps.end("compute")[0] + 20_000_000)
    profile = Profile.from_dict({**priced(gpu=gpu).to_dict(), "jitter": {**tables, **hot}})
    found = {one.kind: round(one.share * one.count) for one in coverage(run, profile)}
    decodes = run.steps.kind == "decode"
    assert found["decode"] == np.count_nonzero(is_hot & decodes)
    assert 3 < found["decode"] < np.count_nonzero(decodes)
    assert found["mixed"] == 1


def test_a_host_keeps_its_speed_for_a_while() -> None:
    """All host work at once is slow or quick, and other seeds have other times; without a seed it has one speed."""
    table = [0.5] * 6 + [1.5] * 5
    profile = Profile.from_dict({**BASE, "host": {**BASE["host"], "hold_ms": 20.0}, "jitter": {"host": table}})
    runs = [predict(wanted("one", 1, [10], [300]), profile, seed=seed) for seed in (1, 1, 2)]
    plans, commits = (
        np.array([run.steps.duration(kind) for run in runs]) / steps_of(profile, 1).steps.duration(kind)[0]
        for kind in ("plan", "commit")
    )
    assert (plans[0] == plans[1]).all()
    assert (plans[0] != plans[2]).any()
    for speeds in (plans[0], plans[2]):
        assert speeds.min() == pytest.approx(0.5)
        assert speeds.max() == pytest.approx(1.5)
        assert 5 < np.count_nonzero(np.diff(speeds.round(3))) < 40  # about 400 ms, in stretches of 20
    assert np.mean(plans[0].round(3) == commits[0].round(3)) > 0.9


def test_who_drives_the_engine_hands_arrivals_over_behind_a_delivery() -> None:
    """Steps take over a millisecond. What arrives within one waits for the delivery of its tokens, which
    is behind the next launch: not the next plan is its first, but the one after."""
    for depth in (1, 2):
        steps = steps_of(priced(), depth).steps
        middle = (steps.start("compute") + steps.end("compute"))[10] / 2e6
        run = predict(wanted("two", depth, [10, 10], [30, 10], [0.0, middle]), priced())
        taken = int(run.requests.entered_plan[1])
        delivered, plans = run.steps.end("deliver"), run.steps.start("plan")
        handed_over = delivered[delivered >= middle * 1e6].min()
        assert plans[taken] == plans[plans >= handed_over].min()
        assert plans[taken - 1] > middle * 1e6  # it was there before this plan, and is not in it
    idle = predict(wanted("two", 1, [10, 10], [3, 3], [0.0, 80.0]), priced())
    assert idle.steps.start("plan")[3] == 80_003_000  # an engine without work takes it at once, for 3 us


@pytest.mark.parametrize(
    ("seats", "bucket", "share"), [(4, 32, 0.5), (5, 32, 1.0), (8, 32, 1.0), (32, 32, 1.0), (32, 4, 0.5)]
)
def test_a_captured_step_splits_its_longest_decode_as_if_every_seat_had_one(
    seats: int, bucket: int, share: float
) -> None:
    """Half of its positions count with half of the seats from which they count whole, all of them with more, and a
    bucket of 4 has no more decodes than 4. A prefill's positions do not count."""
    asked = wanted(
        "two", 1, [10, 3], [30, 30], [0.0, 0.5], max_num_seqs=seats, mixed_buckets=(bucket,), decode_buckets=()
    )
    padded = {"tokens": [32], "tokens_us": [500.0]}
    plain, dear = (
        predict(asked, priced(gpu={"padded": price, "whole_seqs": 8})).steps
        for price in (padded, {**padded, "us_per_longest": 7.0})
    )
    row = int(np.flatnonzero(plain.kind == "mixed")[0])
    assert (plain["mixed_bucket"][row], plain["num_prefill_tokens"][row]) == (bucket, 3)
    more = dear.duration("compute") - plain.duration("compute")
    assert (more[0], more[row]) == (0, round(7000 * share * (plain["kv_tokens"][row] - 3)))


def test_heat_is_the_share_of_a_time_that_went_into_large_prefills() -> None:
    """All of them, each as far as it is in the last 10 ms."""
    heat, none = Heat(10.0), Heat(0.0)
    for tokens, start_ms, end_ms in ((HOT_TOKENS, 0, 2), (HOT_TOKENS - 1, 2, 3), (HOT_TOKENS, 4, 7)):
        for one in (heat, none):
            one.computed(tokens, start_ms * 10**6, end_ms * 10**6)
    assert [heat.at(ms * 10**6) for ms in (7, 11, 12, 15, 17)] == [0.5, 0.4, 0.3, 0.2, 0.0]
    assert none.at(7 * 10**6) == 0


@pytest.mark.parametrize(("prompt", "hot"), [(HOT_TOKENS - 1, 0), (HOT_TOKENS, 1)])
def test_behind_a_large_prefill_steps_take_longer_for_a_while(prompt: int, hot: int) -> None:
    """Each by its share of the price, times the prefill's share of the time before; none that is launched kernel by
    kernel. The prefill takes a quarter of that time: it is felt in full until the rest of it is over."""
    gpu = {"hot_decode": 0.5, "hot_padded": 2.0, "hot_ms": 20.0, "padded": {"tokens": [32], "tokens_us": [500.0]}}
    gpu |= {"eager": {"tokens": [10], "tokens_us": [4980.0]}}
    sizes = {"max_num_batched_tokens": 2 * HOT_TOKENS, "max_model_len": 2 * HOT_TOKENS, "mixed_buckets": (32,)}
    asked = wanted("hot", 1, [prompt, 20, 40], [30] * 3, [0.0, 1.5, 12.0], decode_buckets=(9,), **sizes)
    steps = predict(asked, priced(gpu=gpu, host={"eager_launch": {"us": 100.0}})).steps
    begun, ended = steps.start("compute")[0], steps.end("compute")[0]
    assert ended - begun == 5_000_000
    since = steps.start("compute")[1:] - 20_000_000
    share = np.maximum(ended - np.maximum(begun, since), 0) / 20e6
    assert set(share.tolist()) > {0.0, 0.25}
    decode, captured = (steps.kind == "decode")[1:], steps["mixed_bucket"][1:] > 0
    assert np.count_nonzero(captured & (share > 0.1)) == np.count_nonzero(~decode & ~captured & (share > 0.1)) == 1
    assert 3 < np.count_nonzero(decode & (share > 0)) < 30 < np.count_nonzero(decode)
    price = np.where(decode, 1_800_000, np.where(captured, 500_000, 4_980_000))
    more = np.where(decode, 0.5, np.where(captured, 2.0, 0.0))
    took = steps.duration("compute")[1:] - 20_000
    assert took.tolist() == np.round(price * (1 + hot * more * share)).astype(int).tolist()
