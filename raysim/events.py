"""What a run tells whoever watches it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Started:
    """The run is set up; the first round begins."""

    out: str
    method: str
    rounds: int
    plan: list[tuple[str, str]]
    """What runs where, as lines of a table: (what, details)."""
    seconds: float
    """From the command to this moment."""


@dataclass(frozen=True)
class RoundFinished:
    """Clients trained and the server learned. Accuracy follows in Evaluated."""

    round: int
    loss: float | None
    cohort: int
    bytes_up: int
    bytes_down: int
    seconds: float


@dataclass(frozen=True)
class Evaluated:
    round: int
    accuracy: float
    accuracy_std: float
    loss: float
    clients: int


@dataclass(frozen=True)
class Note:
    """Something the user should know."""

    text: str


@dataclass(frozen=True)
class Finished:
    summary: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Failed:
    """The run ended early."""

    message: str
    traceback: str
    exit_code: int
    kind: str = "RaysimError"
    """Which class of `raysim.errors` it was."""


Event = Started | RoundFinished | Evaluated | Note | Finished | Failed


def finite(value: Any) -> Any:
    """JSON has no NaN: numbers that are not finite become null."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
