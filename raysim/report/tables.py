"""The tables of a report, and each as text to copy: Markdown, LaTeX, CSV."""

import csv
import io
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from raysim.console import MISSING, decimal, duration, human
from raysim.report.groups import Group, Spread, differing, show
from raysim.report.read import Row, Run


@dataclass(frozen=True)
class Table:
    """`rows` hold text; the first column names the row, the others are aligned as numbers if
    `numbers`."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    numbers: bool = True
    best: frozenset[tuple[int, int]] = frozenset()
    """Cells to print bold, as (row, column)."""

    def markdown(self) -> str:
        def line(cells: Iterable[str]) -> str:
            return "| " + " | ".join(cells) + " |"

        side = "---:" if self.numbers else "---"
        rule = line(["---", *[side] * (len(self.columns) - 1)])
        return "\n".join([line(self.columns), rule, *map(line, self._text(_markdown, "**{}**"))])

    def latex(self) -> str:
        """For the booktabs package."""

        def line(cells: Iterable[str]) -> str:
            return "  " + " & ".join(cells) + r" \\"

        side = "r" if self.numbers else "l"
        return "\n".join(
            [
                rf"\begin{{tabular}}{{l{side * (len(self.columns) - 1)}}}", r"  \toprule",
                line(map(_latex, self.columns)), r"  \midrule",
                *map(line, self._text(_latex, r"\textbf{{{}}}")), r"  \bottomrule",
                r"\end{tabular}",
            ]
        )  # fmt: skip

    def csv(self) -> str:
        stream = io.StringIO()
        csv.writer(stream, lineterminator="\n").writerows([self.columns, *self.rows])
        return stream.getvalue()

    def _text(self, escape: Callable[[str], str], bold: str) -> list[list[str]]:
        return [
            [bold.format(escape(cell)) if (i, j) in self.best else escape(cell)
             for j, cell in enumerate(row)]
            for i, row in enumerate(self.rows)
        ]  # fmt: skip


def _markdown(text: str) -> str:
    return text.replace("|", "\\|")


_LATEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
    "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$",
    "–": "--",
}  # fmt: skip


def _latex(text: str) -> str:
    return re.sub(r"[\\&%$#_{}~^±–]", lambda found: _LATEX[found[0]], text)


def tables(groups: Sequence[Group]) -> list[Table]:
    made = [results(groups), variants(groups), faults(groups)]
    return [table for table in made if table.rows]


def results(groups: Sequence[Group]) -> Table:
    """A paper's main table."""
    shares = [
        [
            group.over_seeds(lambda run: _end(run, "final", "accuracy")),
            group.over_seeds(lambda run: _end(run, "best", "accuracy")),
            group.over_seeds(lambda run: _end(run, "final", "accuracy_mean")),
        ]
        for group in groups
    ]
    rows = [
        [
            group.label,
            str(len(group.runs)),
            *map(_share, own),
            _share(group.over_seeds(lambda run: _end(run, "final", "accuracy_std")), std=False),
            _each(group.over_seeds(lambda run: _end(run, "final", "test_loss")), decimal),
            _each(group.over_seeds(lambda run: len(run.rounds)), lambda n: f"{n:.0f}"),
            _each(group.over_seeds(lambda run: _sum(run, "bytes_up")), _bytes),
            _each(group.over_seeds(lambda run: _sum(run, "bytes_down")), _bytes),
            _each(group.over_seeds(_seconds), duration),
        ]
        for group, own in zip(groups, shares, strict=True)
    ]
    columns = (
        "method", "seeds", "accuracy %", "best %", "client mean %", "client std %", "test loss",
        "rounds", "up", "down", "time",
    )  # fmt: skip
    caption = (
        "Accuracy by samples in the last evaluation and in the best one; the clients' own "
        "accuracies (mean and spread) in the last; bytes and time of a whole run. ± is the sample "
        "standard deviation over seeds; without it there is one run. The highest is bold."
    )
    return Table("Results", columns, rows, caption, best=_highest(shares, first=2))


def _highest(shares: Sequence[Sequence[Spread | None]], first: int) -> frozenset[tuple[int, int]]:
    """The cells with the highest mean of each column, as the table shows it, where there is
    something to compare."""
    found = set()
    for column, own in enumerate(zip(*shares, strict=True)):
        known = [(round(100 * each.mean, 2), row) for row, each in enumerate(own) if each]
        top = max(known, default=(0.0, 0))[0]
        found |= {(row, first + column) for mean, row in known if mean == top and len(known) > 1}
    return frozenset(found)


def variants(groups: Sequence[Group]) -> Table:
    """Methods that leave several models to choose from."""
    rows = [
        [group.label, name, _share(group.over_seeds(_of_variant(name, "accuracy"))),
         _share(group.over_seeds(_of_variant(name, "accuracy_mean")))]
        for group in groups
        for name in dict.fromkeys(row["variant"] for run in group.runs for row in run.variants)
    ]  # fmt: skip
    columns = ("method", "inference model", "accuracy %", "client mean %")
    return Table("Inference models", columns, rows, "In the last evaluation.")


def _of_variant(name: str, key: str) -> Callable[[Run], float | None]:
    return lambda run: next((row[key] for row in run.variants if row["variant"] == name), None)


def faults(groups: Sequence[Group]) -> Table:
    """What happened to clients and actors, summed over the seeds."""

    def total(group: Group, key: str) -> str:
        known = [run.summary["faults"][key] for run in group.runs if run.summary]
        return str(sum(known)) if len(known) == len(group.runs) else MISSING

    rows = [
        [group.label, *(str(sum(run.selected.get(key, 0) for run in group.runs)) for key in ENDS)]
        + [total(group, key) for key in ("retries", "actors_lost", "replays")]
        for group in groups
    ]
    columns = ("method", "trained", "dropped", "failed", "retries", "actors lost", "replays")
    caption = (
        "Times a client trained, was dropped or failed; steps tried again, actors that died and "
        f"were replaced, and returns to a checkpoint because a node was lost ({MISSING}: known "
        "when a run has finished). Sums over seeds."
    )
    return Table("Faults survived", columns, rows, caption)


ENDS = ("done", "dropped", "failed")


def settings(groups: Sequence[Group]) -> tuple[Table, Table]:
    """What tells the groups apart, and what they share."""
    all_settings = [group.settings for group in groups]
    keys = [key for key in differing(all_settings) if key != "method"]
    apart = Table(
        "Settings that differ", ("method", *keys),
        [[group.label, *(show(group.settings[key]) if key in group.settings else MISSING
                         for key in keys)] for group in groups] if keys else [],
        numbers=False,
    )  # fmt: skip
    shared = [key for key in all_settings[0] if key not in {*keys, "seed", "out"}]
    if len({each["method"] for each in all_settings}) > 1:
        shared.remove("method")
    rows = [[key, show(all_settings[0][key])] for key in shared]
    return apart, Table("Settings of all", ("setting", "value"), rows, numbers=False)


def inventory(groups: Sequence[Group]) -> Table:
    """Every run, so that each can be found and repeated."""
    rows = [
        [
            str(run.folder),
            group.label,
            str(run.seed),
            f"{len(run.rounds)} of {run.settings.get('rounds', '?')}",
            (run.summary or {}).get("digest", MISSING)[:16],
            str((run.summary or {}).get("versions", {}).get("raysim", MISSING)),
        ]
        for group in groups
        for run in group.runs
    ]
    columns = ("folder", "method", "seed", "rounds", "digest", "raysim")
    caption = "Run one again with: python -m raysim.launch --config FOLDER/config.yaml"
    return Table("Runs", columns, rows, caption, numbers=False)


def scores(run: Run) -> dict[str, Row]:
    """Last and best evaluation, also of a run that did not finish."""
    tested = [row for row in run.rounds if _known(row["accuracy"]) is not None]
    if not tested:
        return {}
    best = max(tested, key=lambda row: (row["accuracy"], -row["round"]))
    return {"final": tested[-1], "best": best}


def _end(run: Run, which: str, key: str) -> float | None:
    return _known(scores(run).get(which, {}).get(key))


def _known(value: Any) -> float | None:
    """NaN is what a run writes where there was nothing to test on."""
    return None if value is None or value != value else float(value)


def _sum(run: Run, key: str) -> float | None:
    return sum(row[key] for row in run.rounds) if run.rounds else None


def _seconds(run: Run) -> float | None:
    if run.summary:
        return float(run.summary["seconds"]["total"])
    return run.rounds[-1]["elapsed"] if run.rounds else None


def _share(spread: Spread | None, std: bool = True) -> str:
    """71.23 ± 0.45"""
    if spread is None:
        return MISSING
    behind = f" ± {100 * spread.std:.2f}" if std and spread.std is not None else ""
    return f"{100 * spread.mean:.2f}{behind}"


def _each(spread: Spread | None, form: Callable[[float], str]) -> str:
    return MISSING if spread is None else form(spread.mean)


def _bytes(value: float) -> str:
    return human(round(value), "B")
