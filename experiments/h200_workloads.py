"""The workloads that are recorded on an H200, and the settings of the engines that serve them. Needs no torch: whoever
predicts a run builds the same requests from its name.

    fit        batch sizes, lengths and arrival rates to learn from; some with a busy host, some with an idle engine
    fit-tight  the same for the engine of the group tight: fewer seats, and prefills of requests that were preempted
    heldout    other batch sizes, lengths and rates
    delay      one workload with the host kept busy for longer and longer in each step, and once more with the longest
               first: the host's speed changes
    clocks     two large batches once more, while nvidia-smi writes clocks and power to a table; neither learnt from nor
               judged. Large steps slow down by a tenth for 0.15 s, 0.9 s after a run began: is that the power limit?
    tight      a KV pool that is too small for everybody, so that requests are preempted
"""

from __future__ import annotations

from typing import Any, NamedTuple

from sim.spec import validate
from sim.workload import SyntheticWorkload

GROUPS = ("fit", "heldout", "delay", "clocks", "fit-tight", "tight")
ON_TIGHT = ("fit-tight", "tight")
MODES = {"sync": 1, "async": 2}
DELAYS_US = (0, 500, 1000, 2000, 3000, 5000, 8000)
ENGINE = {"max_num_seqs": 128, "max_num_batched_tokens": 8192, "max_model_len": 4096, "num_blocks": 16_384}
TIGHT = {**ENGINE, "max_num_seqs": 64, "num_blocks": 1024}
DRY = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "max_model_len": 256, "num_blocks": 512}
DRY_TIGHT = {**DRY, "max_model_len": 96, "num_blocks": 9}


class Spec(NamedTuple):
    """A workload: requests all at once, or at a rate; lengths are fixed, or (least, most)."""

    name: str
    requests: int
    prompt: int | tuple[int, int]
    output: int | tuple[int, int]
    rate: float | None = None
    delays_us: tuple[float, ...] = (0,)

    def workload(self) -> SyntheticWorkload:
        arrivals = {"kind": "all-at-once"} if self.rate is None else {"kind": "poisson", "rate_per_s": self.rate}
        lengths = {"prompt": _length(self.prompt), "output": _length(self.output)}
        data = {"kind": "synthetic", "num_requests": self.requests, "arrivals": arrivals, **lengths}
        return validate(SyntheticWorkload, data)

    def run_name(self, mode: str, delay: float) -> str:
        return f"{self.name}-{mode}" + (f"-delay-{delay:g}us" if len(self.delays_us) > 1 else "")

    def smaller(self) -> Spec:
        """For a tiny model on a CPU."""
        requests = max(self.requests // 8, 1)
        shrink = lambda size: max(size // 16, 3) if isinstance(size, int) else tuple(max(s // 16, 3) for s in size)  # noqa: E731
        rate = None if self.rate is None else 4 * self.rate
        return self._replace(
            requests=requests,
            prompt=shrink(self.prompt),
            output=shrink(self.output),
            rate=rate,
        )


BUSY_US = (700, 1500, 3500, 6500)
"""Delays to learn from; none of them is predicted."""

SPECS: dict[str, tuple[Spec, ...]] = {
    "fit": (
        Spec("closed-1", 1, 128, 96),
        Spec("closed-8", 8, 256, 128),
        Spec("closed-16-long", 16, 2048, 96),
        Spec("closed-32", 32, 128, 192),
        Spec("closed-64", 64, 400, 144),
        Spec("closed-128", 128, 128, 128),
        Spec("closed-112-ending", 112, (16, 400), (8, 240)),
        Spec("open-10", 40, (32, 768), (32, 160), rate=10.0),
        Spec("open-4-long", 14, (512, 2500), (64, 128), rate=4.0),
        Spec("closed-20", 20, 300, 96),
        Spec("closed-40-spread", 40, (32, 800), 96),
        Spec("closed-56", 56, 160, 96),
        Spec("closed-80-spread", 80, (32, 400), 96),
        Spec("open-5-idle", 20, (32, 512), 12, rate=5.0),
        Spec("closed-12-busy", 12, 128, 80, delays_us=BUSY_US),
        # a few of every number of tokens that steps are padded to: each has kernels of its own
        Spec("open-12-all-lengths", 60, (16, 1100), 40, rate=12.0),
        Spec("open-7-all-lengths", 30, (900, 2048), 40, rate=7.0),
    ),
    "heldout": (
        Spec("closed-38-long", 38, 600, 124),
        Spec("closed-84", 84, 230, 120),
        Spec("closed-108", 108, 140, 116),
        Spec("closed-46-mixed-lengths", 46, (36, 880), (44, 185)),
        Spec("open-5", 40, (56, 740), (48, 165), rate=5.5),
        Spec("open-11", 64, (40, 500), (24, 160), rate=11.0),
        Spec("open-8-idle", 28, (48, 580), 14, rate=8.0),
        Spec("open-9-short-answers", 56, (64, 1700), (5, 13), rate=9.0),
    ),
    "delay": (
        Spec("closed-26", 26, 190, 104, delays_us=DELAYS_US),
        Spec("closed-26-again", 26, 190, 104, delays_us=DELAYS_US[::-1]),
    ),
    "clocks": (Spec("closed-128-clocks", 128, 128, 128), Spec("closed-64-clocks", 64, 400, 144)),
    "fit-tight": (Spec("closed-50", 50, 240, 120), Spec("open-14", 36, (64, 400), (64, 200), rate=14.0)),
    "tight": (Spec("closed-62", 62, 225, 138), Spec("open-20", 44, (80, 440), (60, 200), rate=20.0)),
}
"""What is judged was chosen before it was measured, and no earlier campaign had it."""

EARLIER = {
    **SPECS,
    "fit": tuple(spec for spec in SPECS["fit"] if not spec.name.endswith("-all-lengths")),
    "heldout": (
        Spec("closed-28-long", 28, 700, 128),
        Spec("closed-72", 72, 240, 144),
        Spec("closed-104", 104, 200, 112),
        Spec("closed-44-mixed-lengths", 44, (30, 1000), (40, 200)),
        Spec("open-8", 40, (64, 900), (40, 180), rate=8.0),
        Spec("open-18", 72, (16, 450), (16, 180), rate=18.0),
        Spec("open-4-idle", 18, (48, 640), 16, rate=4.0),
    ),
    "delay": (
        Spec("closed-24", 24, 200, 112, delays_us=DELAYS_US),
        Spec("closed-24-again", 24, 200, 112, delays_us=DELAYS_US[::-1]),
    ),
    "tight": (Spec("closed-58", 58, 220, 144), Spec("open-17", 44, (80, 450), (70, 220), rate=17.0)),
}
"""What the second and the third campaign judged."""


def _length(size: int | tuple[int, int]) -> dict[str, Any]:
    if isinstance(size, int):
        return {"kind": "fixed", "tokens": size}
    return {"kind": "uniform", "min_tokens": size[0], "max_tokens": size[1]}
