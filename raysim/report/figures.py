"""What the page's figures are drawn from: one JSON value, made of lists and numbers."""

import math
from collections.abc import Sequence
from typing import Any

from raysim.report.groups import Group, differing, show, spread
from raysim.report.read import Row, Run
from raysim.report.tables import scores

POINTS = 400
"""Points of a curve; more cannot be told apart on a screen."""
SHOWN = 10
"""Lines that are shown at first; the reader adds others."""
MEASURES = ("accuracy", "accuracy_mean", "test_loss", "train_loss")


def figures(groups: Sequence[Group]) -> dict[str, Any]:
    splits = _splits(groups)
    best = sorted(range(len(groups)), key=lambda i: -_final(groups[i]))[:SHOWN]
    return {
        "series": [
            {"label": group.label, "seeds": [run.seed for run in group.runs], "shown": i in best}
            for i, group in enumerate(groups)
        ],
        "curves": [_curve(group) for group in groups],
        "clients": [
            [
                {
                    "seed": run.seed,
                    "split": next((i for i, s in enumerate(splits) if _same(s, run)), None),
                    "ids": [row["client"] for row in run.clients],
                    "models": _coded([row["model"] for row in run.clients]),
                    "accuracy": [_short(row["accuracy"]) for row in run.clients],
                }
                for run in group.runs
                if run.clients
            ]
            for group in groups
        ],
        "splits": [{key: split[key] for key in ("label", "train", "test")} for split in splits],
        "traffic": [_traffic(group) for group in groups],
        "time": [_time(group) for group in groups],
        "factors": _factors(groups),
        "ends": {end: [_ends(group, end) for group in groups] for end in ("final", "best")},
    }


def _final(group: Group) -> float:
    found = group.over_seeds(lambda run: scores(run).get("final", {}).get("accuracy"))
    return found.mean if found else -math.inf


def _short(value: float | None) -> float | None:
    """Six digits are more than a screen can show, and a third of the text."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _coded(names: Sequence[str]) -> dict[str, Any]:
    known = list(dict.fromkeys(names))
    return {"names": known, "index": [known.index(name) for name in names]}


def _curve(group: Group) -> list[Row]:
    """For each round: mean and deviation over the seeds that have it, of every measure and axis."""
    known: dict[int, list[Row]] = {}
    for run in group.runs:
        sent = 0
        for row in run.rounds:
            sent += row["bytes_up"] + row["bytes_down"]
            known.setdefault(row["round"], []).append(row | {"bytes": sent})
    points = []
    for number, rows in sorted(known.items()):
        point: Row = {"round": number}
        for axis, key in (("bytes", "bytes"), ("seconds", "elapsed")):
            mean = spread(row[key] for row in rows if row[key] is not None)
            point[axis] = _short(mean.mean) if mean else None
        for key in MEASURES:
            values = (row[key] for row in rows)
            found = spread(v for v in values if v is not None and math.isfinite(v))
            if found:
                point[key] = [_short(found.mean), _short(found.std), found.count]
        points.append(point)
    tested = [point for point in points if "accuracy" in point]
    return _thin(points) if len(tested) == len(points) else _merge(_thin(points), _thin(tested))


def _thin(points: Sequence[Row]) -> list[Row]:
    if len(points) <= POINTS:
        return list(points)
    return [points[round(i * (len(points) - 1) / (POINTS - 1))] for i in range(POINTS)]


def _merge(*lists: Sequence[Row]) -> list[Row]:
    merged = {point["round"]: point for points in lists for point in points}
    return [merged[number] for number in sorted(merged)]


def _splits(groups: Sequence[Group]) -> list[Row]:
    """Each way in which the data were dealt, once."""
    found: dict[str, Row] = {}
    for group in groups:
        for run in group.runs:
            if run.split is not None and run.split.digest not in found:
                found[run.split.digest] = {
                    "digest": run.split.digest, "label": _dealt(run),
                    "train": run.split.train, "test": run.split.test,
                }  # fmt: skip
    return list(found.values())


def _dealt(run: Run) -> str:
    own = {"dirichlet": "alpha", "pathological": "classes_per_client",
           "classes": "classes_per_client"}  # fmt: skip
    settings = run.settings
    partition = str(settings.get("data.partition"))
    key = own.get(partition)
    value = f" {key}={show(settings.get(f'data.{key}'))}" if key else ""
    return f"{settings.get('data.name')}, {partition}{value}, seed {run.seed}"


def _same(split: Row, run: Run) -> bool:
    return run.split is not None and run.split.digest == split["digest"]


def _traffic(group: Group) -> list[Row]:
    """Bytes and scalars of each field in a whole run, averaged over seeds."""
    keys = dict.fromkeys(
        (row["direction"], row["field"]) for run in group.runs for row in run.traffic
    )
    runs = [run for run in group.runs if run.traffic]
    return [
        {"direction": direction, "field": field}
        | {
            unit: round(
                sum(
                    row[unit]
                    for run in runs
                    for row in run.traffic
                    if (row["direction"], row["field"]) == (direction, field)
                )
                / len(runs)
            )
            for unit in ("bytes", "scalars")
        }
        for direction, field in sorted(keys, reverse=True)  # up first
    ]


def _time(group: Group) -> Row:
    """Seconds of a run by phase, averaged over seeds. Actors train, evaluate or idle; the server
    works while they idle. Of a run that did not finish, start and idling are not known."""
    found: dict[str, list[float]] = {}
    for run in group.runs:
        for phase, value in _phases(run).items():
            found.setdefault(phase, []).append(value)
    return {phase: _short(sum(values) / len(values)) for phase, values in found.items()}


def _phases(run: Run) -> dict[str, float]:
    if run.summary:
        seconds = run.summary["seconds"]
        return {k: seconds[k] for k in ("training", "evaluation", "idle", "server", "start")}
    names = {"training": "train_seconds", "evaluation": "eval_seconds", "server": "server_seconds"}
    return {k: sum(row[name] or 0 for row in run.rounds) for k, name in names.items()}


def _factors(groups: Sequence[Group]) -> list[Row]:
    """Settings that differ between groups of the same method: what a sweep asks about."""
    methods = {group.settings["method"] for group in groups}
    keys = dict.fromkeys(
        key
        for method in methods
        for key in differing([g.settings for g in groups if g.settings["method"] == method])
    )
    factors = []
    for key in keys:
        values = [group.settings.get(key) for group in groups]
        known = [v for v in values if v is not None]
        numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in known)
        factors.append(
            {
                "key": key,
                "numeric": numeric and len(set(known)) > 1,
                "values": [v if numeric else show(v) for v in values],
            }
        )
    return factors


def _ends(group: Group, end: str) -> list[float | None] | None:
    found = group.over_seeds(lambda run: scores(run).get(end, {}).get("accuracy"))
    return [_short(found.mean), _short(found.std)] if found else None
