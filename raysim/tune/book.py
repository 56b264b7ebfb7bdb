"""A sweep's folder, and what is known of its trials. One process writes it, the sweep's own.

SWEEP/
  sweep.yaml        the sweep: python -m raysim.tune SWEEP/sweep.yaml repeats it
  trials/NAME/      a run each, as raysim.launch leaves it
  trials.parquet    one row a trial: its settings, status, last round and measures
  rounds.parquet    one row a trial and round
  ranking.parquet   one row a configuration: mean and standard deviation over its seeds
  best.yaml         the best configuration, for raysim.launch --config
  figure.svg        the metric over the searched settings
  sweep.json        the end: what was searched, what came first, what failed
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raysim.errors import RunError
from raysim.record import write_parquet
from raysim.tune.sweep import Point

SWEEP, END, BEST, FIGURE = "sweep.yaml", "sweep.json", "best.yaml", "figure.svg"
TRIALS, ROUNDS, RANKING = "trials.parquet", "rounds.parquet", "ranking.parquet"
OVER = ("finished", "stopped")
"""States that a resumed sweep leaves as they are."""
_OWN = ("trial", "point", "seed", "status", "rounds_done", "error", "params")


@dataclass
class Trial:
    """One configuration with one seed."""

    point: int
    case: str
    seed: int
    params: dict[str, Any]
    status: str = "waiting"
    """waiting, running, finished, stopped (by the scheduler) or failed."""
    error: str = ""
    rounds: dict[int, dict[str, Any]] = field(default_factory=dict)
    """What it reported, by round."""

    @property
    def name(self) -> str:
        return f"{self.point:04d}-seed{self.seed}"

    @property
    def shown(self) -> dict[str, Any]:
        return ({"method": self.case} if self.case else {}) | self.params

    @property
    def last(self) -> dict[str, Any]:
        """The newest report that has an accuracy, or the newest."""
        reports = [self.rounds[number] for number in sorted(self.rounds, reverse=True)]
        tested = [report for report in reports if "accuracy" in report]
        return next(iter(tested + reports), {})

    @property
    def done(self) -> int:
        return max(self.rounds, default=0)

    def value(self, metric: str) -> float | None:
        value = self.last.get(metric)
        return None if value is None else float(value)


class Book:
    """Every trial of a sweep, by name, on disk after each that ends."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trials: dict[str, Trial] = {}

    def add(self, points: Sequence[Point], seeds: Sequence[int]) -> None:
        """The trials of these points, unless they are known."""
        for point in points:
            for seed in seeds:
                self.enter(Trial(point.number, point.case, seed, dict(point.params)))

    def enter(self, trial: Trial) -> Trial:
        return self.trials.setdefault(trial.name, trial)

    def load(self) -> None:
        """What an earlier process knew. The tables are whole or not there at all."""
        for row in _read(self.folder / TRIALS):
            params = json.loads(row["params"])
            trial = Trial(row["point"], params.pop("method", ""), row["seed"], params)
            over = row["status"] in OVER
            trial.status = row["status"] if over else "waiting"
            self.trials[trial.name] = trial
        for row in _read(self.folder / ROUNDS):
            known = {k: v for k, v in row.items() if v is not None}
            trial = self.trials[known.pop("trial")]
            trial.rounds[known["round"]] = known

    def write(self) -> None:
        """Rounds first: a trial that is over has all of them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        rounds = [
            {"trial": trial.name, **trial.rounds[number]}
            for trial in self.ordered()
            for number in sorted(trial.rounds)
        ]
        write_parquet(table(rounds, ["trial", "round"]), self.folder / ROUNDS)
        rows = [
            {
                **dict(zip(_OWN, _own(trial), strict=True)),
                **trial.shown,
                **{k: v for k, v in trial.last.items() if k not in ("round", "trial", "settings")},
            }
            for trial in self.ordered()
        ]
        write_parquet(table(rows, _OWN), self.folder / TRIALS)

    def ordered(self) -> list[Trial]:
        return sorted(self.trials.values(), key=lambda trial: (trial.point, trial.seed))

    def path(self, name: str) -> Path:
        return self.folder / "trials" / name


def _own(trial: Trial) -> tuple[Any, ...]:
    params = json.dumps(trial.shown)
    return (
        trial.name, trial.point, trial.seed, trial.status, trial.done, trial.error or None, params,
    )  # fmt: skip


def _read(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist() if path.exists() else []
    return rows


def table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] = ()) -> pa.Table:
    """Rows with whatever keys they have; a column whose values have no type in common is text."""
    names = list(dict.fromkeys([*columns, *(name for row in rows for name in row)]))
    arrays = {}
    for name in names:
        values = [row.get(name) for row in rows]
        try:
            arrays[name] = pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            arrays[name] = pa.array([None if v is None else json.dumps(v) for v in values])
    return pa.table(arrays)


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """The folder for one process at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunError(f"another process works on the sweep in {folder}") from error
        yield
    finally:
        os.close(handle)
