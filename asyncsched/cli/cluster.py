"""Where a sweep's runs go: processes of this machine, or a Ray or Dask cluster through joblib's backends.

    local  joblib's own processes
    ray    the cluster that RAY_ADDRESS names, else one started on this machine for the sweep
    dask   the scheduler that DASK_SCHEDULER_ADDRESS names, else one started on this machine for the sweep

Workers import this project, so it must be installed where they run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import joblib

from asyncsched.errors import ConfigError

BACKENDS = ("local", "ray", "dask")


@contextmanager
def cluster(name: str, jobs: int) -> Iterator[str | None]:
    """The name of joblib's backend while it is up; None is joblib's default. Raises ConfigError.

    jobs  processes of a cluster that is started here, -1 being one per core
    """
    if name not in BACKENDS:
        raise ConfigError("--backend", name, f"use one of {', '.join(BACKENDS)}")
    if name == "local":
        yield None
        return
    processes = jobs if jobs > 0 else joblib.cpu_count()
    try:
        with _ray(processes) if name == "ray" else _dask(processes):
            yield name
    except ImportError as error:
        allowed = f"it needs a package that is not installed ({error.name}); pip install 'asyncsched[{name}]'"
        raise ConfigError("--backend", name, allowed) from None


@contextmanager
def _ray(processes: int) -> Iterator[None]:
    import ray
    from ray.util.joblib import register_ray

    register_ray()
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    else:
        ray.init(num_cpus=processes, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _dask(processes: int) -> Iterator[None]:
    from dask.distributed import Client, LocalCluster

    if os.environ.get("DASK_SCHEDULER_ADDRESS"):
        with Client(set_as_default=True):
            yield
        return
    with (
        LocalCluster(n_workers=processes, threads_per_worker=1, dashboard_address=None) as local,
        Client(local, set_as_default=True),
    ):
        yield
