"""A run's folder, finished or not, as plain values.

Whatever can be read is used; what cannot is named in `Run.notes`, which the page shows.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

from raysim.errors import RunError
from raysim.settings import leaves

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One run. Tables that are missing or torn are empty."""

    folder: Path
    settings: Row
    """Dotted keys, such as train.lr."""
    summary: Row | None
    """None if the run did not finish."""
    rounds: list[Row]
    clients: list[Row]
    """One row a client of the last evaluation."""
    selected: dict[str, int]
    """How many times a client trained, by how it ended: done, dropped, failed."""
    traffic: list[Row]
    """The ledger, summed for each step, direction and field."""
    variants: list[Row]
    """One row for each inference model of the last evaluation."""
    split: "Split | None"
    notes: list[str] = field(default_factory=list)

    @property
    def seed(self) -> int:
        return int(self.settings.get("seed", 0))


@dataclass(frozen=True)
class Split:
    """Samples of each class, by client."""

    digest: str
    train: list[list[int]]
    test: list[list[int]]


def find(folders: Sequence[Path]) -> list[Path]:
    """The folders of runs, each once: those given, and those inside a folder that is not one."""
    if not folders:
        raise RunError("name at least one run: python -m raysim.report runs/NAME --out report.html")
    found: dict[Path, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise RunError(f"{folder} is {'a file' if folder.exists() else 'not there'}; {_WANTED}")
        inside = [folder] if is_run(folder) else _runs_in(folder)
        if not inside:
            raise RunError(f"{folder} holds no run (no config.yaml in it or below); {_WANTED}")
        found |= {each.resolve(): each for each in inside}
    return list(found.values())


_WANTED = "name a folder that raysim.launch wrote to, or one that holds such folders"


def is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file()


def _runs_in(folder: Path) -> list[Path]:
    """Runs up to three levels down; a sweep keeps its trials in folders of their own."""
    found: list[Path] = []
    level = [folder]
    for _ in range(3):
        below = [each for parent in level for each in sorted(parent.iterdir()) if each.is_dir()]
        found += [each for each in below if is_run(each)]
        level = [each for each in below if not is_run(each)]
    return found


def read(folder: Path) -> Run:
    notes: list[str] = []
    settings = dict(leaves(_config(folder)))
    rounds = _table(folder, "rounds", notes)
    rows: list[Row] = rounds.to_pylist() if rounds is not None else []
    clients = _table(folder, "clients", notes)
    summary = _summary(folder, notes)
    if summary is None:
        there = f"{len(rows)} of {settings.get('rounds', '?')} rounds are there and shown"
        notes.append(f"{_why_not_finished(folder)}: {there}")
    return Run(
        folder, settings, summary, rows, _last_evaluation(clients), _selected(clients),
        _traffic(_table(folder, "messages", notes)),
        _variants(_table(folder, "variants", notes, optional=True)),
        _split(_table(folder, "split", notes)), notes,
    )  # fmt: skip


def _why_not_finished(folder: Path) -> str:
    """What a sweep says of its trial, if it is one."""
    trial = next((row for row in _trials(folder.parent.parent) if row["trial"] == folder.name), {})
    if trial.get("status") == "stopped":
        return "stopped by the sweep's scheduler"
    return f"failed ({trial['error']})" if trial.get("error") else "not finished"


def _trials(sweep: Path) -> list[Row]:
    """What a sweep knows of its trials; nothing of a folder that is not a sweep's."""
    table = _table(sweep, "trials", [], optional=True)
    rows: list[Row] = table.to_pylist() if table is not None else []
    return (
        rows if table is not None and {"trial", "status", "error"} <= {*table.schema.names} else []
    )


def lost_trials(folders: Sequence[Path]) -> list[str]:
    """Trials of sweeps that failed before they left anything to show."""
    sweeps = [folder.parent if folder.name == "trials" else folder for folder in folders]
    return [
        f"{sweep}: trial {row['trial']} failed ({row['error']}) and left no run"
        for sweep in sweeps
        for row in _trials(sweep)
        if row["error"] and not is_run(sweep / "trials" / row["trial"])
    ]


def _config(folder: Path) -> Row:
    path = folder / "config.yaml"
    try:
        tree = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RunError(f"{path} cannot be read: {error}") from error
    if not isinstance(tree, dict) or "method" not in tree:
        raise RunError(f"{path} holds no settings of a run (no 'method: ...')")
    return tree


def _table(folder: Path, name: str, notes: list[str], optional: bool = False) -> pa.Table | None:
    path = folder / f"{name}.parquet"
    if not path.exists():
        if not optional:
            notes.append(f"{path.name} is missing; what it would show is left out")
        return None
    try:
        # Which samples a client holds is of no use here, and most of the file.
        names = [each for each in pq.read_schema(path).names if each != "indices"]
        return pq.read_table(path, columns=names)
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0]
        notes.append(f"{path.name} cannot be read ({reason}); what it would show is left out")
        return None


def _summary(folder: Path, notes: list[str]) -> Row | None:
    path = folder / "summary.json"
    if not path.exists():
        return None
    try:
        summary = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} cannot be read ({error})")
        return None
    return summary if isinstance(summary, dict) else None


def _last(table: pa.Table) -> pa.Table:
    """The rows of the last round there is."""
    return table.filter(pc.field("round") == pc.max(table["round"]))


def _last_evaluation(table: pa.Table | None) -> list[Row]:
    if table is None:
        return []
    tested = table.filter((pc.field("phase") == "eval") & pc.field("accuracy").is_valid())
    rows: list[Row] = _last(tested).to_pylist() if tested.num_rows else []
    return sorted(rows, key=lambda row: row["client"])


def _selected(table: pa.Table | None) -> dict[str, int]:
    if table is None:
        return {}
    trained = table.filter(pc.field("phase") == "train")
    counts = trained.group_by("status").aggregate([("client", "count")]).to_pylist()
    return {row["status"]: row["client_count"] for row in counts}


def _traffic(table: pa.Table | None) -> list[Row]:
    if table is None:
        return []
    keys = ["step", "direction", "field"]
    sums = table.group_by(keys, use_threads=False).aggregate([("bytes", "sum"), ("scalars", "sum")])
    return [
        {key: row[key] for key in keys} | {"bytes": row["bytes_sum"], "scalars": row["scalars_sum"]}
        for row in sums.to_pylist()
    ]


def _variants(table: pa.Table | None) -> list[Row]:
    """By samples, and the clients' mean, of each inference model."""
    if table is None or not table.num_rows:
        return []
    found: dict[str, list[tuple[int, float]]] = {}
    for row in _last(table).to_pylist():
        found.setdefault(row["variant"], []).append((row["samples"], row["accuracy"]))
    return [
        {
            "variant": name,
            "accuracy": sum(n * share for n, share in own) / sum(n for n, _ in own),
            "accuracy_mean": sum(share for _, share in own) / len(own),
        }
        for name, own in found.items()
    ]


def _split(table: pa.Table | None) -> Split | None:
    if table is None:
        return None
    parts: dict[str, list[list[int]]] = {"train": [], "test": []}
    for row in sorted(table.to_pylist(), key=lambda row: row["client"]):
        parts[row["part"]].append(row["classes"])
    digest = (table.schema.metadata or {}).get(b"split_digest", b"").decode()
    return Split(digest, parts["train"], parts["test"])
