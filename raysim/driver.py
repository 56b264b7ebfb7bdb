"""The driver actor: simulates inside the cluster and streams events to whoever watches."""

import secrets
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import zoo
from raysim.backends.plan import make_plan
from raysim.backends.ray import RayBackend, node_resources
from raysim.cluster import connected
from raysim.config import Config
from raysim.console import Console
from raysim.errors import ClientError, ClusterError, RaysimError
from raysim.events import Event, Failed, Finished, Note
from raysim.fleet import gpu_shares
from raysim.record import FILES, SUMMARY
from raysim.simulation import Simulation, resolved


class DriverActor:
    """`run` simulates in one thread; `poll` answers watchers in others."""

    def __init__(self, config: dict[str, Any], name: str, started: float) -> None:
        self._config = config
        self._name = name
        self._started = started
        self._events: list[Event] = []
        self._load = (0, 0)
        self._told = 0.0
        self._news = threading.Condition()
        self._done = False

    def run(self) -> None:
        """Simulate to the end. Whatever happens reaches the watchers as an event."""
        torch.set_num_threads(1)
        backend = RayBackend(self._name, self._watch)
        try:
            Simulation(Config.from_tree(self._config), backend, self._emit, self._started).run()
        except Exception as error:
            self._emit(failed(error))
        finally:
            backend.close()
            with self._news:
                self._done = True
                self._news.notify_all()

    def poll(self, after: int) -> tuple[list[Event], tuple[int, int], bool]:
        """Sleep until something happened after the first `after` events; return it, how many
        clients run and wait, and whether the run is over."""
        with self._news:
            load = self._load
            self._news.wait_for(
                lambda: self._done or len(self._events) > after or self._load != load, timeout=30
            )
            return self._events[after:], self._load, self._done

    def files(self) -> dict[str, bytes]:
        """What the run wrote, for a launcher that does not share this node's disk."""
        out = Path(self._config["out"])
        return {n: (out / n).read_bytes() for n in (*FILES, SUMMARY) if (out / n).exists()}

    def _emit(self, event: Event) -> None:
        with self._news:
            self._events.append(event)
            self._news.notify_all()

    def _watch(self, running: int, waiting: int) -> None:
        """Watchers hear of the load a few times a second; more would only cost."""
        now = time.monotonic()
        if now - self._told > 0.25:
            self._told = now
            with self._news:
                self._load = (running, waiting)
                self._news.notify_all()

    def __repr__(self) -> str:
        return "driver"


def failed(error: Exception) -> Failed:
    """An exception as an event: what the user typed wrong needs no traceback, a client's own comes
    first."""
    if isinstance(error, ClientError):
        return Failed(str(error), error.cause, error.exit_code)
    if isinstance(error, RaysimError) and error.exit_code == 2:
        return Failed(str(error), "", error.exit_code)
    return Failed(f"{type(error).__name__}: {error}", traceback.format_exc(), 1)


def drive(config: Config, console: Console, started: float) -> Finished | Failed:
    """Run a simulation on a cluster and show what happens until it ends."""
    config = resolved(config)
    assert config.out is not None
    with connected(config) as dashboard:
        models = zoo.expand(config.fleet.models)
        make_plan(config, models, dict(gpu_shares(config.fleet.gpus, models)), node_resources())
        if dashboard:
            console.show(
                Note(f"dashboard: http://{dashboard} (its token: ray get-auth-token --generate)")
            )
        name = f"raysim-{config.out.name}-{secrets.token_hex(2)}"
        driver = _create_driver(config, name, started)
        try:
            return _follow(driver, console, config.out)
        except RayActorError as error:
            raise ClusterError(f"the driver actor {name} died: {error}") from error
        finally:
            ray.kill(driver)


def _create_driver(config: Config, name: str, started: float) -> Any:
    options: dict[str, Any] = {}
    if not _remote_client():
        # On the launcher's own node, so that --out means the same disk to both.
        node = ray.get_runtime_context().get_node_id()
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
            node, soft=config.driver.gpus > 0
        )
    actor = ray.remote(DriverActor).options(
        name=name,
        namespace="raysim",
        num_cpus=config.driver.cpus,
        num_gpus=config.driver.gpus,
        max_concurrency=8,
        max_restarts=0,
        **options,
    )
    return actor.remote(config.to_tree(), name, started)


def _follow(driver: Any, console: Console, out: Path) -> Finished | Failed:
    driver.run.remote()
    seen, over, end = 0, False, None
    while not over:
        events, load, over = ray.get(driver.poll.remote(seen))
        seen += len(events)
        for event in events:
            if isinstance(event, Finished | Failed):
                end = event
            if not isinstance(
                event, Failed
            ):  # the launcher reports those, whichever backend they came from
                console.show(event)
        console.status(*load)
    if end is None:
        raise ClusterError("the driver ended without a result")
    if not out.exists() and isinstance(end, Finished):
        _fetch(driver, out)
    return end


def _fetch(driver: Any, out: Path) -> None:
    """The driver ran on another machine: bring its files here."""
    files: dict[str, bytes] = ray.get(driver.files.remote())
    out.mkdir(parents=True)
    for name, content in files.items():
        (out / name).write_bytes(content)


def _remote_client() -> bool:
    """Whether this process is a Ray Client (ray://), which is on no node of the cluster."""
    return bool(ray.util.client.ray.is_connected())  # type: ignore[no-untyped-call]
