"""Runs that differ only in their seed, together; and what to call them."""

import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysim.report.read import Run

OPERATION = {
    "seed", "out", "address", "dashboard", "detach", "checkpoint_every", "keep_checkpoints",
    "watchdog", "on_client_error", "data.root",
}  # fmt: skip
"""Settings that change neither results nor times: runs that differ in these are one group."""


@dataclass(frozen=True)
class Group:
    """One line of a figure: runs that are the same but for the seed."""

    label: str
    runs: list[Run]

    @property
    def settings(self) -> dict[str, Any]:
        return self.runs[0].settings

    def over_seeds(self, value: Callable[[Run], float | None]) -> "Spread | None":
        """Mean and deviation of what each run that has it says; None if none has."""
        return spread(found for run in self.runs if (found := value(run)) is not None)


@dataclass(frozen=True)
class Spread:
    mean: float
    std: float | None
    """Sample standard deviation; None of a single run."""
    count: int


def spread(values: Iterable[float]) -> Spread | None:
    known = list(values)
    if not known:
        return None
    std = statistics.stdev(known) if len(known) > 1 else None
    return Spread(statistics.fmean(known), std, len(known))


def grouped(runs: Sequence[Run]) -> list[Group]:
    """In the order in which they were named; seeds in order. A seed that comes twice starts a group
    of its own, so that no run counts twice."""
    groups: dict[Hashable, list[Run]] = {}
    for run in runs:
        same = tuple(sorted((k, _hashable(v)) for k, v in run.settings.items() if _counts(k)))
        copy = 0
        while any(run.seed == other.seed for other in groups.get((same, copy), [])):
            copy += 1
        groups.setdefault((same, copy), []).append(run)
    found = [sorted(group, key=lambda run: run.seed) for group in groups.values()]
    return [Group(label, group) for label, group in zip(_labels(found), found, strict=True)]


def _counts(key: str) -> bool:
    return key not in OPERATION


def _hashable(value: Any) -> Hashable:
    return tuple(value) if isinstance(value, list) else value


def _labels(groups: Sequence[list[Run]]) -> list[str]:
    """The method, and what else tells a group from others of that method."""
    labels = []
    for runs in groups:
        method = runs[0].settings["method"]
        alike = [other[0].settings for other in groups if other[0].settings["method"] == method]
        words = [
            f"{key.rpartition('.')[2]}={show(runs[0].settings.get(key))}"
            for key in differing(alike)
        ]
        labels.append(" ".join([method_name(method), *words]))
    again = {label for label in labels if labels.count(label) > 1}
    return [
        f"{label} ({runs[0].folder.name})" if label in again else label
        for label, runs in zip(labels, groups, strict=True)
    ]


def method_name(method: str) -> str:
    return Path(method).stem if method.endswith(".py") else method


def differing(settings: Sequence[dict[str, Any]]) -> list[str]:
    """The keys whose values are not the same everywhere, in the order of the settings."""
    keys = dict.fromkeys(key for each in settings for key in each if _counts(key))
    return [key for key in keys if len({_hashable(each.get(key, ...)) for each in settings}) > 1]


def show(value: Any) -> str:
    """A setting as one would type it."""
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return "none" if value is None else str(value)
