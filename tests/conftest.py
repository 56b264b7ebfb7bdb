"""What all tests share: one thread, and one small private Ray cluster for those that need it."""

import os
from collections.abc import Iterator

import pytest
import torch

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A private cluster, 4 logical CPUs and 2 logical GPUs; `run` joins it as this process has."""
    import ray

    ray.init(
        address="local",
        num_cpus=4,
        num_gpus=2,
        include_dashboard=False,
        log_to_driver=False,
        namespace="raysim",
    )
    yield
    ray.shutdown()
