"""What the Ray backend keeps of its actors and of the work under way."""

from dataclasses import dataclass, field
from typing import Any

import ray

from raysim.plan import Pool
from raysim.worker import Job, Outcome

Ref = ray.ObjectRef[Any]


@dataclass(eq=False)
class Slot:
    """An actor and what it has to do."""

    queue: "Queue"
    label: str
    actor: Any
    ready: bool = False
    tasks: list["Task"] = field(default_factory=list)
    """In the order they were given; the first is the one that runs."""
    place: tuple[str, str, int] = ("", "", 0)
    """Device, node and process id."""

    @property
    def busy(self) -> float:
        """Expected seconds of work it has."""
        return sum(task.cost for task in self.tasks)


@dataclass(eq=False)
class Queue:
    """A pool's actors and the tasks that wait for them, as a heap: urgent before not, then the
    longest first."""

    pool: Pool
    slots: list[Slot] = field(default_factory=list)
    heap: list[tuple[bool, float, int, "Task"]] = field(default_factory=list)


@dataclass(eq=False)
class Item:
    """A job with its inputs, and later its results."""

    job: Job
    message: Ref
    state: Ref | None
    cost: float
    new_state: Ref | None = None
    outcome: Outcome | None = None


@dataclass(eq=False)
class Task:
    """Items that go to an actor in one call."""

    items: list[Item]
    queue: Queue
    urgent: bool
    ticket: "Ticket"
    cost: float
    tries: int = 0
    slot: Slot | None = None
    since: float = 0.0
    states: list[Ref] = field(default_factory=list)


@dataclass(eq=False)
class Ticket:
    items: list[Item]
    left: int = 0
    """Tasks not done yet."""
    landed: list[Item] = field(default_factory=list)
    """Items that are done, but not judged yet."""
    failed: bool = False
    void: bool = False
    """Nobody waits for it any more."""


class Pace:
    """How long jobs take: as their like did, else in proportion to their samples."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, str], float] = {}
        """Of one sample, by step and model."""

    def expected(self, step: str, model: str, samples: int) -> float:
        return samples * self._seconds.get((step, model), 1e-3)

    def learn(self, step: str, model: str, samples: int, seconds: float) -> None:
        pace = seconds / max(1, samples)
        known = self._seconds.get((step, model), pace)
        self._seconds[step, model] = 0.7 * known + 0.3 * pace
