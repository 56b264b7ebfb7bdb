"""What Ray Tune says of trials, passed on."""

from collections.abc import Mapping
from typing import Any, Protocol

from ray import tune


class Listener(Protocol):
    def started(self, name: str) -> None: ...
    def reported(self, name: str, report: Mapping[str, Any]) -> None: ...
    def ended(self, name: str, crash: str = "") -> None: ...


class Watcher(tune.Callback):
    """Passes on all but what trials that are over say again."""

    def __init__(self, listener: Listener, again: set[str]) -> None:
        self._listener = listener
        self._again = again

    def __getstate__(self) -> dict[str, Any]:
        """Tune pickles its callbacks for a restart of its own, which we never ask for."""
        return {"_listener": None, "_again": self._again}

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        if str(trial) not in self._again:
            self._listener.started(str(trial))

    def on_trial_result(
        self, iteration: int, trials: Any, trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if str(trial) not in self._again:
            self._listener.reported(str(trial), result)

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        if str(trial) not in self._again:
            self._listener.ended(str(trial))

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        if str(trial) not in self._again:
            self._listener.ended(str(trial), str(trial.get_error() or "its process died"))
