"""Where client steps run. The simulation cannot tell one backend from another.

A backend keeps the clients' states, one encoded tree a client, and replaces one only when a step of
the method has returned. A client without a state has never been chosen; it comes to life in the
worker.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from raysim.config import Config
from raysim.data.dataset import Dataset
from raysim.data.partition import Split
from raysim.fleet import Fleet
from raysim.wire import Packed
from raysim.worker import Job, Outcome

if TYPE_CHECKING:
    from raysim.data.multitask import Mixed

NEWBORN_BYTES = 2**30
"""How much initial state may be kept for clients that were evaluated but never trained. It only
saves drawing it again."""


@dataclass(frozen=True)
class Setup:
    """All that a worker needs to know."""

    config: Config
    fleet: Fleet
    dataset: "Dataset | Mixed"
    split: Split


Judge = Callable[[int, Outcome], Outcome]
"""Looks at what a client sent; may turn it into a failure."""


class Backend(Protocol):
    actors_lost: int
    """Actors that died and were replaced."""

    @property
    def num_actors(self) -> int:
        """Jobs that can run at the same time."""

    def reserve(self, config: Config) -> None:
        """Claim what the run needs and let it start up while the data are loaded; refuse what
        cannot fit."""

    def start(self, setup: Setup) -> torch.device:
        """Hand the workers what they need; returns the device for the server's own work."""

    def plan(self) -> list[tuple[str, str]]:
        """What runs where, as lines of a table."""

    def share(self, message: Packed) -> Any:
        """Put a message where every worker can read it; the result is what `submit` takes."""

    def submit(self, jobs: Sequence[tuple[Job, Any]], *, urgent: bool) -> Any:
        """Queue jobs, each with its shared message, on the states their clients have now. Urgent
        ones go first."""

    def wait(
        self, ticket: Any, *, stop_early: bool, judge: Judge = lambda client, outcome: outcome
    ) -> list[Outcome | None]:
        """The outcomes of a ticket's jobs, in the order they were submitted; a client's state is
        replaced here if its job did not fail and `judge` finds no fault with what it sent. With
        `stop_early` the first failure ends the waiting: jobs that were not done yet have no
        outcome."""

    def states(self) -> Iterator[tuple[int, Packed]]:
        """The state of every client that ever trained, by ascending id."""

    def snapshot(self, clients: Collection[int]) -> list[tuple[int, Callable[[], Packed]]]:
        """How to fetch the states that these clients have now, whatever happens next."""

    def restore(self, states: Iterator[tuple[int, Packed]]) -> None:
        """Forget all states and jobs, and take these."""

    def close(self) -> None: ...


Watch = Callable[[int, int], None]
"""Told (jobs running, jobs waiting) whenever that changes."""
