"""Work behind a wait takes longer: planted factors come back, slow times are not taken for them."""

from dataclasses import replace

import numpy as np
import pytest
from planted import happened, wanted

from asyncsched.runs import Run
from sim.calibrate import calibrate
from sim.cold import NOT_COLD, fit_cold
from sim.predict import predict
from sim.profile import HostPrice, HostProfile, Profile

PRICE = HostPrice(us=300.0)
COLD = {"cold_fill": 0.8, "cold_launch": 0.4, "cold_us": 3000.0}
HOST = HostProfile(plan=PRICE, fill=PRICE, launch=PRICE, commit=PRICE, deliver=PRICE, **COLD)


def delayed(delay_us: float, scale: float, **host: float) -> Run:
    profile = Profile(host=HOST.model_copy(update={"scale": scale, **host}))
    asked = wanted(f"delay-{delay_us}", 1, [40] * 4, [40] * 4)
    return happened(replace(asked, info=replace(asked.info, host_delay_us=delay_us)), profile)


def test_planted_factors_are_found_although_the_host_was_slow_in_delayed_runs() -> None:
    delays = {0.0: 1.0, 700.0: 1.8, 1500.0: 1.2, 3500.0: 1.6, 6500.0: 0.7}
    host = calibrate([delayed(delay, scale) for delay, scale in delays.items()]).host
    assert host.cold_us == 3000
    assert (host.cold_fill, host.cold_launch) == pytest.approx((0.8, 0.4), rel=0.01)


def test_a_delay_that_was_not_learnt_from_is_predicted() -> None:
    profile = calibrate([delayed(delay, 1.0) for delay in (0.0, 700.0, 1500.0, 3500.0, 6500.0)])
    unseen = delayed(5000.0, 1.0)
    assert predict(unseen, profile).info.makespan_ns == pytest.approx(unseen.info.makespan_ns, rel=0.002)
    none = profile.model_copy(update={"host": profile.host.model_copy(update={"cold_fill": 0.0, "cold_launch": 0.0})})
    short = 300 * (0.8 + 0.4) * 5000 / 8000 * len(unseen.steps)  # what the caches cost in all
    missing = unseen.info.makespan_ns - predict(unseen, none).info.makespan_ns
    assert missing == pytest.approx(1e3 * short, rel=0.02)


def test_nothing_is_learnt_without_delays_or_from_delays_alone() -> None:
    assert calibrate([delayed(0.0, 1.0)]).host.cold_fill == 0
    assert calibrate([delayed(900.0, 1.0), delayed(2000.0, 1.0)]).host.cold_fill == 0
    few = np.array([0.0] * 100 + [500.0] * 5)
    assert fit_cold({"fill": np.where(few > 0, 2.0, 1.0)}, np.ones(105), few) is NOT_COLD


def test_a_host_that_grows_quicker_behind_a_wait_is_not_believed() -> None:
    delay = np.repeat([0.0, 1000.0, 4000.0], 50)
    assert fit_cold({"fill": np.where(delay > 0, 0.8, 1.0)}, np.ones(150), delay).factors == {"fill": 0.0}
