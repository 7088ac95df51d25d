"""Runs of an engine whose costs are known, because the simulator made them."""

import numpy as np

from asyncsched.runs import RequestLog, Run, RunInfo
from sim.predict import predict
from sim.profile import Profile

BUCKETS = (1, 2, 4, 8, 16, 24, 32)
ENGINE = {
    "max_num_seqs": 32,
    "max_num_batched_tokens": 1024,
    "max_model_len": 1024,
    "num_blocks": 2048,
    "decode_buckets": BUCKETS,
}
PREFILL = {
    "tokens": [64, 256, 512, 1024],
    "tokens_us": [7000.0, 8000.0, 12000.0, 23000.0],
    "us_per_attn_pair": 0.0005,
    "us_per_context_token": 0.05,
    "us_per_token_and_decode": 0.8,
}
PLANTED = {
    "schema": 2,
    "host": {
        "plan": {"us": 60.0, "us_per_seq": 1.5, "us_per_prefill_token": 0.02, "busy_factor": 1.2},
        "fill": {"us": 40.0, "us_per_seq": 0.5},
        "launch": {"us": 300.0, "us_per_seq": 1.0, "busy_factor": 2.0},
        "eager_launch": {"us": 9000.0, "us_per_seq": 10.0},
        "commit": {"us": 50.0, "us_per_seq": 1.0, "busy_factor": 1.1},
        "deliver": {"us": 30.0, "us_per_seq": 2.0},
        "launch_head_us": 200.0,
        "eager_head_us": 150.0,
        "eager_tail_us": 25.0,
        "collect_us": 20.0,
        "wake_us": 15.0,
        "submit_us": 12.0,
    },
    "copy": {"h2d_us": 8.0, "h2d_us_per_token": 0.01, "d2h_us": 6.0, "d2h_us_per_sample": 0.05},
    "gpu": {
        "decode_seqs": [1, 8, 16, 32],
        "decode_us": [2000.0, 2200.0, 2500.0, 3100.0],
        "kv_tokens": [0, 100_000],
        "kv_us": [0.0, 4000.0],
        "us_per_longest": 0.9,
        "whole_seqs": 32,
        "eager": PREFILL,
        "padded": {**PREFILL, "us_per_longest": 1.5},
        "idle_start_us": 40.0,
        "gap_us": 3.0,
        "contention": 1.02,
    },
}


def wanted(
    name: str,
    depth: int,
    prompts: list[int],
    outputs: list[int],
    arrivals_ms: list[float] | None = None,
    **engine: object,
) -> Run:
    """A run that has not happened: what is asked for."""
    arrival = np.array([round(ms * 1e6) for ms in arrivals_ms or [0.0] * len(prompts)], dtype=np.int64)
    requests = RequestLog.from_outside(
        [f"{name}-{number}/0" for number in range(len(prompts))],
        arrival_ns=arrival,
        prompt_tokens=np.array(prompts, dtype=np.int64),
        output_tokens=np.array(outputs, dtype=np.int64),
        first_ns=arrival,
        last_ns=arrival,
    )
    info = RunInfo(
        name=name,
        source="planned",
        engine={**ENGINE, "depth": depth, **engine},
        device={"name": "planted", "inline": False},
        makespan_ns=0,
    )
    return Run(info=info, requests=requests)


def happened(run: Run, profile: Profile, seed: int | None = None) -> Run:
    """The run on an engine with these costs, as a recording of it: padded decode steps are captured."""
    done = predict(run, profile, seed=seed)
    done.steps.columns["captured"][:] = done.steps["bucket"] + done.steps["mixed_bucket"] > 0
    return done


def workloads(depth: int, suffix: str = "", **engine: object) -> list[Run]:
    """Closed batches of several sizes, and arrivals over time."""
    random = np.random.default_rng(5 + depth)
    mode = {1: "sync", 2: "async"}.get(depth, f"depth-{depth}") + suffix
    closed = [
        wanted(f"closed-{size}-{mode}", depth, [60 + size] * size, [40] * size, **engine) for size in (1, 8, 16, 32)
    ]
    gaps = random.exponential(20.0, 60)
    gaps[0] = 0.0
    prompts, outputs = random.integers(16, 700, 60), random.integers(10, 60, 60)
    arrivals = wanted(f"open-{mode}", depth, prompts.tolist(), outputs.tolist(), np.cumsum(gaps).tolist(), **engine)
    return [*closed, arrivals]
