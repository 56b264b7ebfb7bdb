"""What can be known of a method, a fleet and its tasks before a run starts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raysim.errors import ConfigError
from raysim.fleet import Fleet
from raysim.task import Task

if TYPE_CHECKING:
    from raysim.method import Method


def check(method: Method[Any, Any], fleet: Fleet, task: Task, name: str) -> None:
    """Refuse what cannot run: models or tasks that the method cannot mix, and what it refuses
    itself."""
    distinct = list(dict.fromkeys(fleet.models))
    if method.same_models and len(distinct) > 1:
        raise ConfigError(
            f"{name} {method.same_models}, so every client needs the same model; "
            f"fleet.models names {len(distinct)}. Try --fleet.models {distinct[0]}"
        )
    spaces = {each for _, each in fleet.tasks} or {task}
    kinds = sorted({space.kind for space in spaces})
    if not method.any_task and (len(spaces) > 1 or kinds[0] in ("multilabel", "segment")):
        import methods

        able = [each for each in methods.names() if methods.get(each).any_task]
        raise ConfigError(
            f"{name} needs one label space, a class for each sample, for all clients; data.tasks "
            f"has {len(spaces)} (of kind {', '.join(kinds)}). Try --method {' or '.join(able)}"
        )
    method.check(fleet, task)
