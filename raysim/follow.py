"""The launcher's side of a run on a cluster: start a driver, follow it, stop it. Without torch."""

import secrets
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorUnavailableError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysim import errors, preflight
from raysim.cluster import connected, node_resources
from raysim.config import Config, Sealed
from raysim.console import Console
from raysim.driver import DriverActor
from raysim.errors import ClusterError, ConfigError
from raysim.events import Failed, Finished, Note
from raysim.plan import make_plan

NAMESPACE = "raysim"
End = Finished | Failed


class Launch(NamedTuple):
    """A run that is ready to start: checked, its models named and their GPU shares known."""

    config: Config
    models: Sequence[str]
    shares: dict[str, float]
    started: float
    resume: bool


def drive(launch: Launch, console: Console) -> End | None:
    """Run a simulation on a cluster and show what happens until it ends; None if it goes on without
    us."""
    config = launch.config
    assert config.out is not None
    if config.detach and not config.address:
        raise ConfigError(
            "--detach needs a cluster that outlives this command: start one with "
            "'ray start --head' and add --address auto"
        )
    with connected(config) as dashboard:
        make_plan(config, launch.models, launch.shares, node_resources())
        for note in preflight.examine(config) if config.address else []:
            console.show(Note(note))
        if dashboard:
            token = "its token: ray get-auth-token"
            console.show(Note(f"dashboard: http://{dashboard} ({token})"))
        name = f"raysim-{config.out.name}-{secrets.token_hex(2)}"
        driver = _create(config, name, launch.started, launch.resume)
        if config.detach:
            console.show(Note(f"the run is {name}; follow it with --attach {name}"))
            ray.get(driver.out.remote())  # it lives
            return None
        try:
            return _follow(driver, name, console, config.out)
        finally:
            ray.kill(driver)


def attach(name: str, address: str | None, console: Console) -> End | None:
    """Follow a run that was left on a cluster."""
    with connected(_joining(address)):
        driver = _find(name)
        out = Path(ray.get(driver.out.remote()))
        end = _follow(driver, name, console, out, leave=True)
        if end is not None:
            ray.kill(driver)
        return end


def stop(name: str, address: str | None, console: Console) -> End | None:
    """Ask a run that was left on a cluster to save a checkpoint and end, and wait until it has."""
    with connected(_joining(address)):
        driver = _find(name)
        ray.get(driver.stop.remote())
        end = _follow(driver, name, console, Path(ray.get(driver.out.remote())))
        ray.kill(driver)
        return end


def report(end: End | None) -> None:
    """Raise what happened in the driver actor as an exception here."""
    if isinstance(end, Failed):
        kind: Any = getattr(errors, end.kind, errors.RaysimError)
        error = kind(end.message, end.traceback) if end.traceback else kind(end.message)
        error.exit_code = end.exit_code
        error.cause = end.traceback
        raise error


def _joining(address: str | None) -> Config:
    return Config(address=address or "auto", hp=Sealed())


def _find(name: str) -> Any:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError as error:
        actors = ray.util.list_named_actors(all_namespaces=True)
        names = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
        running = ", ".join(n for n in names if n.count("-client") + n.count("-pool") == 0)
        raise ClusterError(
            f"no run {name!r} on this cluster; running: {running or 'none'}"
        ) from error


def _create(config: Config, name: str, started: float, resume: bool) -> Any:
    options: dict[str, Any] = {"lifetime": "detached"} if config.detach else {}
    # On the launcher's own node, so that --out means the same disk to both; over ray://, on the
    # head.
    home = NodeAffinitySchedulingStrategy(preflight.driver_node(), soft=config.driver.gpus > 0)
    options["scheduling_strategy"] = home
    actor: Any = ray.remote(DriverActor).options(
        name=name,
        namespace=NAMESPACE,
        num_cpus=config.driver.cpus,
        num_gpus=config.driver.gpus,
        max_concurrency=8,
        max_restarts=-1,  # it goes on from its last checkpoint
        max_task_retries=0,
        **options,
    )
    return actor.remote(config.to_tree(), name, started, resume)


def _follow(driver: Any, name: str, console: Console, out: Path, leave: bool = False) -> End | None:
    """Show events until the run ends. Ctrl-C asks it to save and end; with `leave` it only stops
    following."""
    life, seen, over = "", 0, False
    end: End | None = None
    with _interrupts(driver, console, leave) as left:
        while not over and not left():
            try:
                now, events, load, over = ray.get(driver.poll.remote(life, seen))
            except ActorUnavailableError:
                console.show(Note("the driver died; it starts again from its last checkpoint"))
                continue
            except RayActorError as error:
                raise ClusterError(f"the driver actor {name} is gone: {error}") from error
            life, seen = now, (seen if now == life else 0) + len(events)
            for event in events:
                if isinstance(event, Finished | Failed):
                    end = event
                if not isinstance(event, Failed):  # the launcher reports those of both backends
                    console.show(event)
            console.status(*load)
    if not left() and end is None:
        raise ClusterError("the driver ended without a result")
    if not (out / "config.yaml").exists() and end is not None:
        _fetch(driver, out)
    return end


@contextmanager
def _interrupts(driver: Any, console: Console, leave: bool) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C (or SIGTERM) asks the driver to save and end, the second ends us at once."""
    asked: list[int] = []

    def ask(number: int, frame: Any) -> None:
        asked.append(number)
        if len(asked) > 1:
            raise KeyboardInterrupt
        if not leave:
            console.show(Note("finishing the round and saving; again to end at once"))
            driver.stop.remote()

    numbers = (signal.SIGINT, signal.SIGTERM)
    try:
        old = [signal.signal(number, ask) for number in numbers]
    except ValueError:  # not the main thread: whoever owns it decides
        yield lambda: False
        return
    try:
        yield lambda: leave and bool(asked)
    finally:
        for number, handler in zip(numbers, old, strict=True):
            signal.signal(number, handler)


def _fetch(driver: Any, out: Path) -> None:
    """The driver ran on another machine: bring its files here."""
    files: dict[str, bytes] = ray.get(driver.files.remote())
    if not files:
        return
    out.mkdir(parents=True, exist_ok=True)  # a logger of ours may have been there
    for name, content in files.items():
        (out / name).write_bytes(content)
