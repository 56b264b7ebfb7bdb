"""The driver actor: simulates inside the cluster and streams events to whoever watches.

What simulates is imported in the actor, not here: the launcher needs this class, but not torch.
"""

import secrets
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from raysim.config import Config
from raysim.errors import RaysimError
from raysim.events import Event, Failed

if TYPE_CHECKING:
    from raysim.monitoring import Monitor

Poll = tuple[str, list[Event], tuple[int, int], bool]


class DriverActor:
    """Simulates in a thread of its own from the moment it is created. If it dies and Ray starts it
    again, it goes on from its last checkpoint."""

    def __init__(self, config: dict[str, Any], name: str, started: float, resume: bool) -> None:
        with warnings.catch_warnings():  # Ray has no other way to ask, and warns about this one
            warnings.simplefilter("ignore")
            again = ray.get_runtime_context().was_current_actor_reconstructed
        self._config = Config.from_tree(config)
        self._name = name
        self._life = secrets.token_hex(2)
        self._started = started
        self._resume = resume or (again and self._has_begun())
        self._events: list[Event] = []
        self._load = (0, 0)
        self._told = 0.0
        self._monitor: Monitor | None = None
        self._news = threading.Condition()
        self._stop = threading.Event()
        self._done = False
        threading.Thread(target=self._run, daemon=True).start()

    def _has_begun(self) -> bool:
        assert self._config.out is not None
        return (self._config.out / "config.yaml").exists()

    def _run(self) -> None:
        """Simulate to the end. Whatever happens reaches the watchers as an event."""
        backend = None
        try:
            import torch

            from raysim.backends.ray import RayBackend
            from raysim.device import arrow_without_pandas
            from raysim.simulation import Simulation

            torch.set_num_threads(1)
            arrow_without_pandas()
            backend = RayBackend(f"{self._name}-{self._life}", self._watch)
            simulation = Simulation(
                self._config,
                backend,
                self._emit,
                self._started,
                resume=self._resume,
                stop=self._stop.is_set,
            )
            if self._config.dashboard:
                from raysim.monitoring import Monitor

                out, sums = str(simulation.config.out), lambda: simulation.counters
                self._monitor = Monitor(Path(out).name, self._config.method, backend, sums)
            simulation.run()
        except Exception as error:
            self._emit(failed(error))
        finally:
            if backend is not None:
                backend.close()
            with self._news:
                self._done = True
                self._news.notify_all()

    def poll(self, life: str, after: int) -> Poll:
        """Sleep until something happened after the first `after` events of this life; return it,
        how many clients run and wait, and whether the run is over."""
        with self._news:
            after = after if life == self._life else 0
            load = self._load
            self._news.wait_for(
                lambda: self._done or len(self._events) > after or self._load != load, timeout=30
            )
            return self._life, self._events[after:], self._load, self._done

    def stop(self) -> None:
        """Finish the round, save a checkpoint and end."""
        self._stop.set()

    def out(self) -> str:
        return str(self._config.out)

    def files(self) -> dict[str, bytes]:
        """What the run wrote, for a launcher that does not share this node's disk."""
        from raysim.record import FILES, SUMMARY

        out = Path(self.out())
        names = (*FILES, SUMMARY, "method.py")
        return {name: (out / name).read_bytes() for name in names if (out / name).exists()}

    def _emit(self, event: Event) -> None:
        if self._monitor is not None:
            self._monitor.hear(event)
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
    """An exception as an event: what the user typed wrong needs no traceback; a client's own, or
    the stacks of what hangs, come first."""
    if isinstance(error, RaysimError):
        cause = getattr(error, "cause", "")
        cause = "" if error.exit_code == 2 else cause
        return Failed(str(error), cause, error.exit_code, type(error).__name__)
    return Failed(f"{type(error).__name__}: {error}", traceback.format_exc(), 1)
