"""What a run writes down: Parquet files that can be read at any moment, up to the last round.

Each file is written aside and renamed, so a reader, or a crash, never meets half of one.
"""

import importlib.metadata
import json
import os
import platform
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

from raysim.config import Config
from raysim.data.partition import Split
from raysim.errors import RunError, WriteError
from raysim.events import finite

if TYPE_CHECKING:
    from raysim.fleet import Fleet  # which takes torch

Row = dict[str, Any]

FILES = (
    "config.yaml", "rounds.parquet", "clients.parquet", "messages.parquet", "split.parquet",
    "variants.parquet", "tasks.parquet",
)  # fmt: skip
SUMMARY = "summary.json"

_INT, _FLOAT, _TEXT = pa.int64(), pa.float64(), pa.string()
ROUNDS = pa.schema(
    {
        "round": _INT, "cohort": _INT, "dropped": _INT, "train_loss": _FLOAT,
        "accuracy": _FLOAT, "accuracy_mean": _FLOAT, "accuracy_std": _FLOAT, "test_loss": _FLOAT,
        "scalars_up": _INT, "scalars_down": _INT, "bytes_up": _INT, "bytes_down": _INT,
        "elapsed": _FLOAT, "seconds": _FLOAT,
        "train_seconds": _FLOAT, "eval_seconds": _FLOAT, "server_seconds": _FLOAT,
    }
)  # fmt: skip
_EVALUATED = ("accuracy", "accuracy_mean", "accuracy_std", "test_loss", "eval_seconds")
CLIENTS = pa.schema(
    {
        "round": _INT, "client": _INT, "model": _TEXT, "phase": _TEXT, "status": _TEXT,
        "samples": _INT, "loss": _FLOAT, "accuracy": _FLOAT, "seconds": _FLOAT,
    }
)  # fmt: skip
MESSAGES = pa.schema(
    {
        "round": _INT, "client": _INT, "step": _TEXT, "direction": _TEXT, "field": _TEXT,
        "scalars": _INT, "numbers": _INT, "bytes": _INT,
    }
)  # fmt: skip
VARIANTS = pa.schema(
    {
        "round": _INT, "client": _INT, "model": _TEXT, "variant": _TEXT,
        "samples": _INT, "accuracy": _FLOAT,
    }
)  # fmt: skip


TASKS = pa.schema(
    {
        "round": _INT, "client": _INT, "model": _TEXT, "task": _TEXT, "metric": _TEXT,
        "samples": _INT, "value": _FLOAT,
    }
)  # fmt: skip


class Table:
    """Rows that grow, kept as Arrow and rewritten as one Parquet file. One that is `optional` has
    no file until it has rows."""

    def __init__(self, path: Path, schema: pa.Schema, optional: bool = False) -> None:
        self.path = path
        self.schema = schema
        self.optional = optional
        self._done = schema.empty_table()
        self._cost = 0.0
        self._written = 0.0

    def append(self, rows: Sequence[Row]) -> None:
        fresh = pa.Table.from_pylist(list(rows), self.schema)
        self._done = pa.concat_tables([self._done, fresh]).combine_chunks()

    def write(self, last: bool = False) -> None:
        """Rewrite the file, unless that took more than 5 % of the time since it was last done: then
        at a later round, or at the end."""
        if self.optional and not self._done.num_rows and not self.path.exists():
            return
        now = time.perf_counter()
        if not last and self._cost > 0.05 * (now - self._written):
            return
        write_parquet(self._done, self.path)
        self._written = time.perf_counter()
        self._cost = self._written - now

    def column(self, name: str) -> list[Any]:
        values: list[Any] = self._done[name].to_pylist()
        return values

    def reset(self, table: pa.Table | None) -> None:
        self._done = self.schema.empty_table() if table is None else table.cast(self.schema)


class Recorder:
    """The files of one run."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.rounds: dict[int, Row] = {}
        self.clients = Table(out / "clients.parquet", CLIENTS)
        self.messages = Table(out / "messages.parquet", MESSAGES)
        self.variants = Table(out / "variants.parquet", VARIANTS, optional=True)
        self.tasks = Table(out / "tasks.parquet", TASKS, optional=True)

    def open(
        self, config: Config, fleet: "Fleet", split: Split, labels: Any, classes: int, again: bool
    ) -> None:
        """Write what is known before the first round; `again` in the folder of a run that is to be
        continued."""
        if again:
            (self.out / SUMMARY).unlink(missing_ok=True)
        else:
            refuse_used(self.out)
        self.out.mkdir(parents=True, exist_ok=True)
        write_text(self.out / "config.yaml", config_yaml(config))
        if config.source is not None:
            write_text(self.out / "method.py", config.source)
        write_parquet(split_table(fleet, split, labels, classes), self.out / "split.parquet")
        if not again:
            self.write(last=True)

    def restore(self, rounds: int, config: Config) -> None:
        """Go back to what was known after so many rounds. An evaluation that was there only because
        the run was to end earlier goes too."""

        def known(name: str) -> pa.Table | None:
            path = self.out / name
            table = pq.read_table(path) if rounds and path.exists() else None
            return table.filter(pc.field("round") <= rounds) if table is not None else None

        rows = known("rounds.parquet")
        self.rounds = {row["round"]: row for row in rows.to_pylist()} if rows is not None else {}
        extra = [n for n in self.rounds if n % config.eval.every and n != config.rounds]
        for number in extra:
            self.rounds[number].update(dict.fromkeys(_EVALUATED))
        self.messages.reset(known("messages.parquet"))
        clients = known("clients.parquet")
        if clients is not None and extra:
            only_then = (pc.field("phase") == "eval") & pc.field("round").isin(extra)
            clients = clients.filter(~only_then)
        self.clients.reset(clients)
        for table in (self.variants, self.tasks):
            kept = known(table.path.name)
            table.reset(None if kept is None else kept.filter(~pc.field("round").isin(extra)))
        self.write(last=True)

    def round(self, number: int, **values: Any) -> None:
        """Add to what is known of a round."""
        self.rounds.setdefault(number, {"round": number}).update(values)

    def history(self) -> list[Row]:
        """All that is known of every round, in order; None where nothing is."""
        return [
            {name: self.rounds[number].get(name) for name in ROUNDS.names}
            for number in sorted(self.rounds)
        ]

    def variant_history(self) -> list[Row]:
        """The accuracy of every variant in every round: by samples, and the clients' mean."""
        found: dict[tuple[int, str], list[tuple[int, float]]] = {}
        names = ("round", "variant", "samples", "accuracy")
        for number, variant, samples, accuracy in zip(
            *map(self.variants.column, names), strict=True
        ):
            found.setdefault((number, variant), []).append((samples, accuracy))
        return [
            {
                "round": number,
                "variant": variant,
                "accuracy": sum(round(n * share) for n, share in one) / sum(n for n, _ in one),
                "accuracy_mean": statistics.fmean(share for _, share in one),
            }
            for (number, variant), one in sorted(found.items(), key=lambda item: item[0][0])
        ]

    def write(self, last: bool = False) -> None:
        table = pa.Table.from_pylist(self.history(), ROUNDS)
        write_parquet(table, self.out / "rounds.parquet")
        self.clients.write(last)
        self.messages.write(last)
        self.variants.write(last)
        self.tasks.write(last)

    def close(self, summary: Mapping[str, Any]) -> None:
        """The summary comes last: a folder that has one holds a finished run."""
        self.write(last=True)
        write_text(self.out / SUMMARY, json.dumps(finite(summary), indent=2) + "\n")


def refuse_used(out: Path) -> None:
    """A run never writes over another, and has a folder to write to."""
    parent = next(folder for folder in (out, *out.parents) if folder.exists())
    if not parent.is_dir():
        raise RunError(f"--out {out}: {parent} is a file, not a folder")
    if not os.access(parent, os.W_OK):
        raise RunError(f"--out {out}: {parent} cannot be written to")
    used = [name for name in (*FILES, SUMMARY, "checkpoints") if (out / name).exists()]
    if used:
        raise RunError(
            f"--out {out} already holds a run ({used[0]}); name another folder or remove it"
        )


def config_yaml(config: Config) -> str:
    tree = config.to_tree(source=False)
    tree.pop("out")
    if config.source is not None:
        tree["method"] = str(Path(config.method).resolve())
    return yaml.safe_dump(tree, sort_keys=False)


def split_table(fleet: "Fleet", split: Split, labels: Any, classes: int) -> pa.Table:
    """One row for each client and part: how many samples of each class, and which ones."""
    counts = split.class_table(labels, classes)
    ids = range(split.num_clients)
    parts = [("train", 0, split.train), ("test", 1, split.test)]
    rows = [(c, name, counts[c, i], part(c)) for c in ids for name, i, part in parts]
    table = pa.table(
        {
            "client": pa.array([c for c, *_ in rows], _INT),
            "model": pa.array([fleet.model_of(c) for c, *_ in rows], _TEXT),
            "part": pa.array([name for _, name, *_ in rows], _TEXT),
            "samples": pa.array([len(indices) for *_, indices in rows], _INT),
            "classes": pa.array([count for *_, count, _ in rows], pa.list_(_INT)),
            "indices": pa.array([indices for *_, indices in rows], pa.list_(_INT)),
        }
    )
    return table.replace_schema_metadata({"split_digest": split.digest()})


def versions() -> dict[str, str]:
    packages = ("raysim", "ray", "torch", "numpy", "pyarrow")
    return {"python": platform.python_version()} | {p: _version(p) for p in packages}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def write_parquet(table: pa.Table, path: Path) -> None:
    with _aside(path) as aside:
        pq.write_table(table, aside)


def write_text(path: Path, text: str) -> None:
    with _aside(path) as aside:
        aside.write_text(text)


@contextmanager
def _aside(path: Path) -> Iterator[Path]:
    """A place to write to that then takes the name of `path`; gone if that fails."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield aside
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise WriteError(f"cannot write {path}: {reason}") from error
