"""A run's numbers in Ray's own metrics, for Prometheus and Grafana.

The driver actor alone reports: a few dozen numbers a round, none by client. Without a dashboard Ray
has nothing to export them with, and nothing of this is loaded. `python -m raysim.monitoring` writes
the configuration of Prometheus and the Grafana dashboard that show them.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from raysim.events import Evaluated, Event, RoundFinished, Started

GAUGES = {
    "round": "Rounds done",
    "rounds": "Rounds to do",
    "accuracy": "Accuracy of the last evaluation, by samples",
    "accuracy_std": "Standard deviation of the clients' accuracies",
    "test_loss": "Test loss of the last evaluation",
    "train_loss": "Training loss of the last round",
    "round_seconds": "Duration of the last round",
    "actors": "Client actors alive",
}
COUNTERS = {
    "clients_trained": "Times a client trained",
    "clients_dropped": "Times a client was dropped from a round",
    "client_retries": "Steps of clients that were tried again",
    "bytes_up": "Bytes from clients to the server",
    "bytes_down": "Bytes from the server to clients",
    "train_seconds": "Seconds in which actors trained",
    "eval_seconds": "Seconds in which actors evaluated",
    "server_seconds": "Seconds in which the server worked",
    "idle_seconds": "Seconds in which actors waited",
    "actors_lost": "Actors that died and were replaced",
    "replays": "Returns to a checkpoint because a node was lost",
}
TAGS = ("run", "method")
_COUNTED = {  # what the simulation calls what we count
    "clients_trained": "done", "clients_dropped": "dropped", "client_retries": "retries",
    "train_seconds": "training", "eval_seconds": "evaluation", "server_seconds": "server",
    "replays": "replays",
}  # fmt: skip


class Actors(Protocol):
    """What is asked of a backend."""

    actors_lost: int

    @property
    def num_actors(self) -> int: ...


class Monitor:
    """Turns events into metrics. `counters` gives the simulation's own sums so far; they go back
    when a run returns to a checkpoint, but what was done was done: metrics only grow."""

    def __init__(
        self, run: str, method: str, actors: Actors, counters: Callable[[], Mapping[str, float]]
    ) -> None:
        from ray.util.metrics import Counter, Gauge

        tags = {"run": run, "method": method}
        self._gauges = _metrics(Gauge, GAUGES, tags)
        self._counters = _metrics(Counter, COUNTERS, tags)
        self._values: dict[str, float] = {}
        self._known: dict[str, float] = {}
        self._actors = actors
        self._sums = counters
        self._clock = 0.0
        self._idle = 0.0  # not told yet; below zero if work was told before the time it took

    def hear(self, event: Event) -> None:
        match event:
            case Started():
                self._clock = time.monotonic()
                self._known = self._now()  # what an earlier process did is not counted again
                self._set(rounds=event.rounds, actors=self._actors.num_actors)
            case RoundFinished():
                self._add(bytes_up=event.bytes_up, bytes_down=event.bytes_down)
                self._set(
                    round=event.round, train_loss=event.loss, round_seconds=event.seconds,
                    actors=self._actors.num_actors,
                )  # fmt: skip
                self._count()
            case Evaluated():
                self._set(
                    accuracy=event.accuracy, accuracy_std=event.accuracy_std, test_loss=event.loss
                )
                self._count()

    def _now(self) -> dict[str, float]:
        sums = self._sums()
        known = {name: sums.get(theirs, 0.0) for name, theirs in _COUNTED.items()}
        return known | {"actors_lost": self._actors.actors_lost}

    def _count(self) -> None:
        before, self._known = self._known, self._now()
        more = {name: max(0.0, self._known[name] - before[name]) for name in before}
        then, self._clock = self._clock, time.monotonic()
        passed = (self._clock - then) * self._actors.num_actors
        self._idle += passed - more["train_seconds"] - more["eval_seconds"]
        more["idle_seconds"] = max(0.0, self._idle)
        self._idle -= more["idle_seconds"]
        self._add(**more)

    def _set(self, **values: float | None) -> None:
        """Ray forgets a gauge that is not set again, so all are."""
        self._values |= {k: v for k, v in values.items() if v is not None and math.isfinite(v)}
        for name, value in self._values.items():
            self._gauges[name].set(value)

    def _add(self, **values: float) -> None:
        for name, value in values.items():
            if value > 0:
                self._counters[name].inc(value)


def _metrics(kind: Any, names: Mapping[str, str], tags: dict[str, str]) -> dict[str, Any]:
    made = {name: kind(f"raysim_{name}", text, TAGS) for name, text in names.items()}
    for metric in made.values():
        metric.set_default_tags(tags)
    return made
