"""Who else hears of a run: one event a line for scripts, TensorBoard, MLflow.

They get the same events as the display, in the same process; `watch` puts them behind it.
"""

import dataclasses
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from raysim.errors import RaysimError
from raysim.events import Evaluated, Event, Failed, Finished, RoundFinished, Started, finite


class Logger(Protocol):
    """`end` comes once, with what went wrong if something did."""

    def show(self, event: Event) -> None: ...
    def end(self, error: BaseException | None) -> None: ...


class Quiet:
    """Says where the results are, when there are some."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._out = ""

    def show(self, event: Event) -> None:
        if isinstance(event, Started):
            self._out = event.out
        elif isinstance(event, Finished):
            print(self._out, file=self._stream, flush=True)

    def status(self, running: int, waiting: int) -> None:
        pass

    def close(self) -> None:
        pass


class JsonLines:
    """One event a line: {"event": "round_finished", "round": 1, ...}. Numbers that are none are
    null."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def show(self, event: Event) -> None:
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()
        line = json.dumps({"event": name, **finite(dataclasses.asdict(event))}, allow_nan=False)
        print(line, file=self._stream, flush=True)

    def end(self, error: BaseException | None) -> None:
        if isinstance(error, RaysimError):
            cause = getattr(error, "cause", "")
            self.show(Failed(str(error), cause, error.exit_code, type(error).__name__))
        elif error is not None:
            self.show(Failed(str(error), "", 1, type(error).__name__))

    def status(self, running: int, waiting: int) -> None:
        pass

    def close(self) -> None:
        pass


def measures(event: Event) -> dict[str, float]:
    """What an event has to plot, by name."""
    values: dict[str, float | None] = {}
    if isinstance(event, RoundFinished):
        values = {
            "loss/train": event.loss, "traffic/bytes_up": event.bytes_up,
            "traffic/bytes_down": event.bytes_down, "time/round_seconds": event.seconds,
            "clients/cohort": event.cohort,
        }  # fmt: skip
    elif isinstance(event, Evaluated):
        values = {
            "accuracy/by_samples": event.accuracy, "accuracy/clients_std": event.accuracy_std,
            "loss/test": event.loss,
        }  # fmt: skip
    return _known(values)


def _known(values: Mapping[str, float | None]) -> dict[str, float]:
    return {k: v for k, v in values.items() if v is not None and finite(v) is not None}


class TensorBoard:
    """Writes OUT/tensorboard. Rounds that are done again, after --resume or a lost node, take the
    place of what was there."""

    def __init__(self) -> None:
        self._folder = Path()
        self._writer: Any = None
        self._last = 0
        self._settings = ""

    def show(self, event: Event) -> None:
        if isinstance(event, Started):
            self._folder = Path(event.out) / "tensorboard"
            self._settings = _config_text(event)
        elif isinstance(event, RoundFinished | Evaluated):
            if isinstance(event, RoundFinished):
                self._reach(event.round)
            for name, value in measures(event).items():
                self._writer.add_scalar(name, value, event.round)

    def _reach(self, number: int) -> None:
        """Be ready to write this round."""
        if self._writer is None or number <= self._last:
            from tensorboardX import SummaryWriter

            self.end(None)
            # Files are read in the order of their names, which else tell no less than a second.
            suffix = f".{time.time_ns()}"
            self._writer = SummaryWriter(
                str(self._folder), purge_step=number, flush_secs=10, filename_suffix=suffix
            )
            indented = "".join(f"    {line}" for line in self._settings.splitlines(keepends=True))
            self._writer.add_text(
                "settings", indented, number
            )  # as it is, in TensorBoard's Markdown
        self._last = number

    def end(self, error: BaseException | None) -> None:
        if self._writer is not None:
            self._writer.close()


class MLflow:
    """Keeps a run in the experiment `raysim` of an MLflow store; a resumed one goes on where it
    was."""

    def __init__(self, store: str) -> None:
        from mlflow import MlflowClient

        self._client: Any = MlflowClient(tracking_uri=store)
        self._run = ""

    def show(self, event: Event) -> None:
        if isinstance(event, Started):
            self._start(event)
        elif isinstance(event, RoundFinished | Evaluated):
            self._log(measures(event), event.round)
        elif isinstance(event, Finished):
            ends = {
                f"{end}/{key}": event.summary[end][key]
                for end in ("final", "best")
                for key in ("accuracy", "accuracy_mean", "test_loss")
            }
            self._log(_known(ends), event.summary["rounds"])
            self._client.set_tag(self._run, "raysim.digest", event.summary["digest"])

    def _start(self, event: Started) -> None:
        from mlflow.entities import Param

        found = self._client.get_experiment_by_name("raysim")
        experiment = found.experiment_id if found else self._client.create_experiment("raysim")
        out = event.out.replace("'", "")
        before = self._client.search_runs([experiment], f"tags.`raysim.out` = '{out}'")
        if before:
            self._run = before[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        tags = {"raysim.out": out, "raysim.method": event.method}
        run = self._client.create_run(experiment, run_name=Path(event.out).name, tags=tags)
        self._run = run.info.run_id
        params = [Param(key, str(value)[:500]) for key, value in _settings(event).items()]
        for start in range(0, len(params), 100):  # the most that a store takes at once
            self._client.log_batch(self._run, params=params[start : start + 100])

    def _log(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def end(self, error: BaseException | None) -> None:
        if self._run:
            stopped = isinstance(error, KeyboardInterrupt) or getattr(error, "exit_code", 0) == 130
            status = "KILLED" if stopped else "FAILED" if error else "FINISHED"
            self._client.set_terminated(self._run, status)


def _config_text(event: Started) -> str:
    """The run's config.yaml, if this machine has it."""
    path = Path(event.out) / "config.yaml"
    return path.read_text() if path.exists() else f"method: {event.method}\n"


def _settings(event: Started) -> dict[str, Any]:
    import yaml

    from raysim.settings import leaves

    return dict(leaves(yaml.safe_load(_config_text(event))))
