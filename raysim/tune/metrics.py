"""What a trial reports after every round, and which way is better."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from raysim.errors import ConfigError, unknown

DERIVED = {
    "best_accuracy": "the best accuracy so far",
    "bytes": "bytes sent so far, up and down",
    "accuracy_per_mb": "accuracy for each megabyte sent so far, up and down",
    "rounds_to_target": "rounds until --sweep.target was reached",
    "bytes_to_target": "bytes sent until --sweep.target was reached",
}
_LARGER = ("accuracy", "accuracy_mean", "best_accuracy", "accuracy_per_mb")


def names() -> list[str]:
    """Everything that can be ranked by."""
    from raysim.record import ROUNDS

    return [name for name in ROUNDS.names if name not in ("round", "cohort")] + list(DERIVED)


def mode(metric: str) -> str:
    return "max" if metric in _LARGER else "min"


def check(metric: str, target: float | None) -> None:
    if metric not in names():
        raise unknown("metric", metric, names(), "--sweep.metric")
    if metric.endswith("_to_target") and target is None:
        raise ConfigError(f"--sweep.metric {metric} needs an accuracy: add --sweep.target 0.5")
    if target is not None and not 0 < target <= 1:
        raise ConfigError(f"--sweep.target must be an accuracy in (0, 1], got {target}")


def measures(rows: Sequence[Mapping[str, Any]], target: float | None) -> dict[str, Any]:
    """All that is known after the last of a trial's rounds `rows`. What a round does not have, such
    as the accuracy of one that was not evaluated, is left out."""
    last = {name: value for name, value in rows[-1].items() if _known(value)}
    sent = [row["bytes_up"] + row["bytes_down"] for row in rows]
    tested = [(row["round"], row["accuracy"]) for row in rows if _known(row["accuracy"])]
    derived: dict[str, Any] = {"bytes": sum(sent)}
    if tested:
        derived["best_accuracy"] = max(accuracy for _, accuracy in tested)
    if "accuracy" in last:
        megabytes = sum(sent) / 1e6
        derived["accuracy_per_mb"] = last["accuracy"] / megabytes if megabytes else math.inf
    if target is not None:
        # Not reached is worse than any number of rounds.
        reached = next((number for number, accuracy in tested if accuracy >= target), math.inf)
        spent = [size for row, size in zip(rows, sent, strict=True) if row["round"] <= reached]
        derived["rounds_to_target"] = float(reached)
        derived["bytes_to_target"] = float(sum(spent)) if reached < math.inf else math.inf
    return last | derived


def _known(value: Any) -> bool:
    return value is not None and value == value  # NaN: no client had anything to be tested on
