"""What is recorded of clients with different tasks: each client's metrics, each task's means."""

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from raysim.fleet import Fleet
from raysim.worker import Outcome

if TYPE_CHECKING:
    from raysim.record import Table


def task_rows(
    number: int, ids: Sequence[int], outcomes: Sequence[Outcome], fleet: Fleet
) -> list[dict[str, Any]]:
    """One row for each tested client and metric, the task's own score first."""
    return [
        {
            "round": number, "client": client, "model": fleet.model_of(client),
            "task": fleet.task_of(client), "metric": metric, "samples": result.samples,
            "value": value,
        }
        for client, outcome in zip(ids, outcomes, strict=True)
        if (result := outcome.evaluation) is not None and result.samples
        for metric, value in result.metrics or (("accuracy", result.correct / result.samples),)
    ]  # fmt: skip


def task_means(table: "Table") -> dict[str, dict[str, float]]:
    """What each task came to in the last evaluation: by metric, the mean of its clients."""
    names = ("round", "task", "metric", "value")
    rows = list(zip(*map(table.column, names), strict=True))
    last = max((number for number, *_ in rows), default=0)
    found: dict[str, dict[str, list[float]]] = {}
    for number, task, metric, value in rows:
        if number == last:
            found.setdefault(task, {}).setdefault(metric, []).append(value)
    return {
        task: {metric: statistics.fmean(values) for metric, values in metrics.items()}
        for task, metrics in found.items()
    }
