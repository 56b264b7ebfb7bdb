"""Joining a Ray cluster, or starting a private one on this machine."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ray
from ray.exceptions import RayError

from raysim import preflight
from raysim.config import Config
from raysim.errors import ClusterError

_ENVIRONMENT = {
    # Ray's own future default, chosen now so that it need not warn.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Nothing is reported to anyone.
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray starts workers at the lowest priority (15), where any other job halves their speed.
    "RAY_worker_niceness": "0",
    # Replaced states make room at once, not a second later.
    "RAY_free_objects_period_milliseconds": "50",
    # Ray's processes have dozens of threads; a heap for each few of them is enough.
    "MALLOC_ARENA_MAX": "2",
}


@contextmanager
def connected(config: Config, prints: bool = True) -> Iterator[str | None]:
    """A connection for a block; yields the dashboard's address. A cluster that was already joined
    by this process is used as it is and left alone. Without `prints`, what actors print stays in
    Ray's log files."""
    if ray.is_initialized():
        yield None
        return
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    address = config.address
    context = _attach(address, prints) if address else _start(config.dashboard, prints)
    try:
        yield context.dashboard_url or None
    finally:
        ray.shutdown()


def _start(dashboard: bool, prints: bool) -> "ray._private.worker.BaseContext":
    with _no_idle_daemons(dashboard):
        return ray.init(
            address="local",  # never join a cluster the user did not name
            include_dashboard=dashboard,
            dashboard_host="127.0.0.1",
            logging_level=logging.ERROR,
            log_to_driver=prints,
            namespace="raysim",
        )


@contextmanager
def _no_idle_daemons(dashboard: bool) -> Iterator[None]:
    """One machine needs no autoscaler, and without a dashboard no server for one; Ray would start
    both all the same: 116 MiB and most of a second. There is no public way to ask, so this is only
    tried."""
    node = getattr(getattr(ray._private, "node", None), "Node", None)
    names = ("start_monitor",) if dashboard else ("start_monitor", "start_api_server")
    theirs = {name: getattr(node, name) for name in names if hasattr(node, name)}
    for name in theirs:
        setattr(node, name, lambda self, **options: None)
    try:
        yield
    finally:
        for name, function in theirs.items():
            setattr(node, name, function)


def node_resources() -> list[dict[str, float]]:
    """What each living node has."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return [node["Resources"] for node in nodes if node["Alive"]]


def _require_answer(address: str) -> None:
    """Ray itself would try for minutes before it gives up."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdecimal():
        return  # such as `auto`, which Ray looks up on this machine
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise ClusterError(
            f"cannot reach a Ray cluster at --address {address}: {error.strerror or error}. "
            "Start one with 'ray start --head', or leave --address out to run on this machine alone"
        ) from error


def _attach(address: str, prints: bool) -> "ray._private.worker.BaseContext":
    """The other nodes get this code, whatever is installed there."""
    _require_answer(address)
    preflight.knock(address)
    root = Path(__file__).resolve().parent.parent
    packages = [str(root / name) for name in ("raysim", "methods", "zoo")]
    try:
        return ray.init(
            address=address,
            runtime_env={"py_modules": packages, "excludes": ["__pycache__"]},
            logging_level=logging.ERROR,
            log_to_driver=prints,
            namespace="raysim",
        )
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        raise ClusterError(preflight.explain(error, address)) from error
