"""The end of a sweep: which configuration came first, and how sure that is."""

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raysim.config import Config
from raysim.console import MISSING, human, percent
from raysim.errors import RaysimError
from raysim.record import config_yaml, write_parquet, write_text
from raysim.tune import metrics
from raysim.tune.book import BEST, END, FIGURE, RANKING, Book, Trial, table
from raysim.tune.sweep import Sweep


@dataclass(frozen=True)
class Row:
    """One configuration."""

    point: int
    shown: dict[str, Any]
    trials: list[Trial]
    values: list[float]
    """The metric of each seed that has it."""

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def std(self) -> float | None:
        """Of a sample of seeds; None where there is but one, or one that never got there."""
        finite = len(self.values) > 1 and all(map(math.isfinite, self.values))
        return statistics.stdev(self.values) if finite else None

    @property
    def rounds(self) -> int:
        """What all of its seeds reached."""
        return min((trial.done for trial in self.trials), default=0)

    @property
    def whole(self) -> bool:
        return all(trial.status == "finished" for trial in self.trials)

    def of(self, metric: str) -> "Row":
        """The same configuration, by another metric."""
        return row_of(self.trials, metric)


def row_of(trials: list[Trial], metric: str) -> Row:
    values = [value for trial in trials if (value := trial.value(metric)) is not None]
    return Row(trials[0].point, trials[0].shown, trials, values)


@dataclass(frozen=True)
class Answer:
    """What a sweep found."""

    sweep: Sweep
    folder: Path
    rows: list[Row]
    """The best first."""
    failed: list[Trial]
    counts: dict[str, int]

    @property
    def best(self) -> Row | None:
        return self.rows[0] if self.rows and self.rows[0].values else None


def ranked(trials: Sequence[Trial], metric: str) -> list[Row]:
    """The best first. A configuration that was stopped, or lost a seed, comes after all that ran to
    their end: it was compared on less."""
    by_point: dict[int, list[Trial]] = {}
    for trial in trials:
        by_point.setdefault(trial.point, []).append(trial)
    rows = [row_of(own, metric) for own in by_point.values()]
    sign = -1 if metrics.mode(metric) == "max" else 1

    def key(row: Row) -> tuple[Any, ...]:
        mean = sign * row.mean
        return not row.values, not row.whole, -row.rounds, math.isnan(mean), mean, row.point

    return sorted(rows, key=key)


def conclude(sweep: Sweep, book: Book, bases: Mapping[str, Config]) -> Answer:
    """Rank, and write ranking.parquet, best.yaml, figure.svg and sweep.json."""
    from raysim.tune.figure import draw

    metric, trials = sweep.config.metric, book.ordered()
    rows = ranked(trials, metric)
    failed = [trial for trial in trials if trial.status == "failed"]
    statuses = [trial.status for trial in trials]
    counts = {status: statuses.count(status) for status in sorted(set(statuses))}
    answer = Answer(sweep, book.folder, rows, failed, counts)
    write_parquet(_table(answer), book.folder / RANKING)
    if answer.best is None:
        first = f": {failed[0].name}: {failed[0].error}" if failed else ""
        raise RaysimError(
            f"no trial of {sweep.name} reported {metric}{first}. "
            f"Once that is mended, go on with --resume {book.folder}"
        )
    write_text(book.folder / BEST, _best(answer, bases))
    write_text(book.folder / FIGURE, draw(answer))
    write_text(book.folder / END, json.dumps(_summary(answer), indent=2) + "\n")
    return answer


def _table(answer: Answer) -> Any:
    metric = answer.sweep.config.metric
    rows = []
    for rank, row in enumerate(answer.rows, start=1):
        own = {"rank": rank, "point": row.point, **row.shown, "seeds": len(row.values)}
        for name in dict.fromkeys((metric, *_COLUMNS)):
            other = row.of(name)
            own |= {f"{name}.mean": other.mean if other.values else None, f"{name}.std": other.std}
        rows.append(own | {"rounds_done": row.rounds, "whole": row.whole})
    return table(rows, ["rank", "point"])


_COLUMNS = ("accuracy", "bytes", "elapsed")


def _best(answer: Answer, bases: Mapping[str, Config]) -> str:
    row = answer.best
    assert row is not None
    config = bases[row.trials[0].case].replace(row.trials[0].params)
    words = ", ".join(f"{key} {value}" for key, value in row.shown.items())
    lines = [
        f"the best of {len(answer.rows)} configurations of {answer.sweep.name}: {words}",
        f"{answer.sweep.config.metric} {spread(answer.sweep.config.metric, row)}, "
        f"{len(row.values)} seed{'s' if len(row.values) > 1 else ''}, {row.rounds} rounds",
        f"python -m raysim.launch --config {answer.folder / BEST}",
    ]
    if answer.sweep.config.scheduler == "pbt":
        lines.insert(2, "its settings changed on the way; these are the last (see rounds.parquet)")
    return "".join(f"# {line}\n" for line in lines) + config_yaml(config)


def _summary(answer: Answer) -> dict[str, Any]:
    best = answer.best
    assert best is not None
    config = answer.sweep.config
    return {
        "sweep": answer.sweep.name,
        "metric": config.metric,
        "mode": metrics.mode(config.metric),
        "target": config.target,
        "params": answer.sweep.params(),
        "configurations": len(answer.rows),
        "trials": answer.counts,
        "best": {
            "point": best.point,
            "params": best.shown,
            "mean": best.mean if math.isfinite(best.mean) else None,
            "std": best.std,
            "trials": [trial.name for trial in best.trials],
        },
        "failed": {trial.name: trial.error for trial in answer.failed},
    }


# As text


def cells(answer: Answer) -> tuple[list[str], list[list[str]]]:
    """The ranked table: titles and rows."""
    metric, params = answer.sweep.config.metric, answer.sweep.params()
    extra = [name for name in ("accuracy", "bytes") if name != metric]
    titles = ["rank", *params, metric, *extra, "rounds", "seeds"]
    body = []
    for rank, row in enumerate(answer.rows, start=1):
        notes = [trial.status for trial in row.trials if trial.status != "finished"]
        marks = {f"{notes.count(status)} {status}": None for status in notes}
        seeds = str(len(row.values)) + (f" ({', '.join(marks)})" if marks else "")
        own = [spread(name, row.of(name)) for name in (metric, *extra)]
        settings = [text(row.shown.get(key)) for key in params]
        body.append([str(rank), *settings, *own, str(row.rounds), seeds])
    return titles, body


def spread(metric: str, row: Row) -> str:
    """mean ± std, in the metric's own unit."""
    if not row.values:
        return MISSING
    std = f" ± {number(metric, row.std)}" if row.std else ""
    return f"{number(metric, row.mean)}{std}"


def number(metric: str, value: float) -> str:
    if math.isinf(value):
        return "not reached" if metric.endswith("_to_target") else "∞"
    if metric.startswith(("accuracy", "best_accuracy")) and metric != "accuracy_per_mb":
        return percent(value)
    if metric.startswith("bytes"):
        return human(value, "B")
    return f"{value:.4g}"


def text(value: Any) -> str:
    """A searched value, short enough for a column."""
    if value is None:
        return MISSING
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return " ".join(map(text, value))
    return Path(value).stem if isinstance(value, str) and value.endswith(".py") else str(value)
