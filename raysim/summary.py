"""What a run comes to: its summary and its digest."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from raysim.config import Config
from raysim.record import versions
from raysim.wire import Packed

Row = dict[str, Any]


def summarize(
    config: Config,
    rows: list[Row],
    counters: dict[str, float],
    actors: int,
    *,
    total: float,
    wall: float,
    variants: Sequence[Row] = (),
    tasks: Mapping[str, dict[str, float]] | None = None,
) -> dict[str, Any]:
    """`total` counts from the command, `wall` from the first round; both in seconds."""
    evaluated = [row for row in rows if row["accuracy"] is not None]
    best = _best(evaluated)
    busy = counters["training"] + counters["evaluation"]
    units = ("scalars_up", "scalars_down", "bytes_up", "bytes_down")
    return {
        "method": config.method,
        "data": config.data.name,
        "clients": config.clients,
        "participation": config.participation,
        "rounds": len(rows),
        "seed": config.seed,
        "final": _scores(evaluated[-1]),
        "best": _scores(best),
        **({"variants": _variants(variants)} if variants else {}),
        **({"tasks": dict(tasks)} if tasks else {}),
        **{unit: sum(row[unit] for row in rows) for unit in units},
        "selected": {
            "done": int(counters["done"]),
            "dropped": int(counters["dropped"]),
            "failed": 0,  # a failure ends the run before there is a summary
        },
        "faults": {name: int(counters[name]) for name in ("actors_lost", "retries", "replays")},
        "seconds": {
            "total": total,
            "start": max(0.0, total - wall),
            "rounds": wall,
            **{name: counters[name] for name in ("training", "evaluation", "server")},
            "idle": max(0.0, wall * actors - busy),
        },
        "actors": actors,
        "versions": versions(),
    }


def _scores(row: Row) -> Row:
    keys = ("round", "accuracy", "accuracy_mean", "accuracy_std", "test_loss")
    return {key: row[key] for key in keys}


def _best(rows: Sequence[Row]) -> Row:
    return max(rows, key=lambda row: (row["accuracy"], -row["round"]))


def _variants(rows: Sequence[Row]) -> dict[str, Any]:
    """Final and best accuracy of each inference model."""
    summary = {}
    for name in dict.fromkeys(row["variant"] for row in rows):
        own = [row for row in rows if row["variant"] == name]
        ends = {"final": own[-1], "best": _best(own)}
        summary[name] = {
            end: {key: row[key] for key in ("round", "accuracy", "accuracy_mean")}
            for end, row in ends.items()
        }
    return summary


def digest(
    server: Packed,
    states: Iterable[tuple[int, Packed]],
    rows: list[Row],
    variants: Sequence[Row] = (),
) -> str:
    """SHA-256 over the final server state, the state of every client that trained, and the metric
    history, with the variants' if the method has any. Time is no part of it."""
    sha = hashlib.sha256(server.digest().encode())
    for client, state in states:
        sha.update(f"{client}:{state.digest()}".encode())
    timeless = [k for k in rows[0] if k != "elapsed" and not k.endswith("seconds")]
    sha.update(json.dumps([[row[key] for key in timeless] for row in rows]).encode())
    if variants:
        sha.update(json.dumps([list(row.values()) for row in variants]).encode())
    return sha.hexdigest()
