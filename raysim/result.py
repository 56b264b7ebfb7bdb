"""What a run gives back, to a notebook or a script."""

import json
import math
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from raysim.config import Config
from raysim.console import Console, make_console
from raysim.errors import RunError
from raysim.record import SUMMARY, TASKS, VARIANTS

if TYPE_CHECKING:
    from raysim.follow import Launch


@dataclass(frozen=True)
class Result:
    """A run's folder, as tables. Each is an Arrow table: `result.rounds.to_pandas()`."""

    out: Path

    @classmethod
    def load(cls, out: str | Path) -> "Result":
        """A run that was made before, finished or not."""
        folder = Path(out)
        if not (folder / "config.yaml").exists():
            raise RunError(f"{folder} does not hold a run (it has no config.yaml)")
        return cls(folder)

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The contents of summary.json."""
        path = self.out / SUMMARY
        if not path.exists():
            raise RunError(f"{self.out} holds a run that did not finish (it has no {SUMMARY})")
        summary: dict[str, Any] = json.loads(path.read_text())
        return summary

    @cached_property
    def rounds(self) -> pa.Table:
        """One row a round: accuracy, losses, traffic, seconds."""
        return pq.read_table(self.out / "rounds.parquet")

    @cached_property
    def clients(self) -> pa.Table:
        """One row for each client that trained or was evaluated in a round."""
        return pq.read_table(self.out / "clients.parquet")

    @cached_property
    def messages(self) -> pa.Table:
        """The ledger: one row for each field of each message."""
        return pq.read_table(self.out / "messages.parquet")

    @cached_property
    def variants(self) -> pa.Table:
        """One row for each client, round and inference model of a method that has several; empty
        for the others."""
        path = self.out / "variants.parquet"
        return pq.read_table(path) if path.exists() else VARIANTS.empty_table()

    @cached_property
    def tasks(self) -> pa.Table:
        """One row for each tested client, round and metric of a fleet with different tasks; empty
        for the others."""
        path = self.out / "tasks.parquet"
        return pq.read_table(path) if path.exists() else TASKS.empty_table()

    @cached_property
    def split(self) -> pa.Table:
        """Which samples each client holds, and how many of each class."""
        return pq.read_table(self.out / "split.parquet")

    @property
    def config(self) -> Config:
        return Config.load(self.out / "config.yaml")

    @property
    def digest(self) -> str:
        return str(self.summary["digest"])

    @property
    def accuracy(self) -> float:
        """Final accuracy, sample-weighted; NaN if no client had anything to be tested on."""
        value = self.summary["final"]["accuracy"]
        return math.nan if value is None else float(value)


def run(
    config: Config,
    console: Console | None = None,
    started: float | None = None,
    resume: bool = False,
) -> Result:
    """Simulate, and return what the run left. Raises a RaysimError when it could not. `resume` goes
    on in the folder `config.out` from its last checkpoint."""
    from raysim.simulation import preflight, resolved

    started = time.time() if started is None else started
    config = resolved(config)
    assert config.out is not None
    preflight(config, resume)
    console = console or make_console()
    try:
        if config.backend == "local":
            _run_here(config, console, started, resume)
        else:
            from raysim.follow import drive, report

            report(drive(ready(config, started, resume), console))
    finally:
        console.close()
    return Result(config.out)


def ready(config: Config, started: float, resume: bool) -> "Launch":
    """What the launcher's part of a run on a cluster needs to know, so that it need not load what
    can only be known with torch."""
    import zoo
    from raysim.fleet import gpu_shares
    from raysim.follow import Launch

    models = zoo.expand(config.fleet.models)
    return Launch(config, models, dict(gpu_shares(config.fleet.gpus, models)), started, resume)


def _run_here(config: Config, console: Console, started: float, resume: bool) -> None:
    from raysim.backends.local import LocalBackend
    from raysim.simulation import Simulation
    from raysim.watchdog import interruptible

    backend = LocalBackend(console.status)
    with interruptible(console) as stop:
        try:
            Simulation(config, backend, console.show, started, resume=resume, stop=stop).run()
        finally:
            backend.close()
