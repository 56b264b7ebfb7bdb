"""What the user sees of a sweep: a live table, a line for each trial in a pipe, JSON or nothing;
then the answer."""

import json
import sys
import time
from typing import Any, Protocol, TextIO

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from raysim.console import MISSING, duration, sparkline
from raysim.tune import ranking
from raysim.tune.book import BEST, FIGURE, OVER, TRIALS, Book, Trial
from raysim.tune.ranking import Answer
from raysim.tune.sweep import Sweep


class View(Protocol):
    """`close` leaves the terminal as it was found, any number of times."""

    def begin(self, sweep: Sweep, book: Book, total: int) -> None: ...
    def note(self, text: str) -> None: ...
    def started(self, trial: Trial) -> None: ...
    def reported(self, trial: Trial) -> None: ...
    def ended(self, trial: Trial) -> None: ...
    def close(self) -> None: ...
    def answer(self, answer: Answer) -> None: ...


def make_view(quiet: bool = False, as_json: bool = False, stream: TextIO | None = None) -> View:
    """Live on a terminal that can redraw; plain lines elsewhere."""
    stream = sys.stdout if stream is None else stream
    if as_json:
        return JsonView(stream)
    rich = RichConsole(file=stream, highlight=False)
    live = stream.isatty() and not rich.is_jupyter and not rich.is_dumb_terminal
    if quiet:
        return QuietView(stream)
    return LiveView(rich, stream) if live and rich.encoding.startswith("utf") else PlainView(stream)


class QuietView:
    """Only the answer."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def begin(self, sweep: Sweep, book: Book, total: int) -> None: ...
    def note(self, text: str) -> None: ...
    def started(self, trial: Trial) -> None: ...
    def reported(self, trial: Trial) -> None: ...
    def ended(self, trial: Trial) -> None: ...
    def close(self) -> None: ...

    def answer(self, answer: Answer) -> None:
        print(answer_text(answer), file=self._stream, flush=True)


class PlainView(QuietView):
    """A line for each trial that ends."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._metric, self._total, self._ended = "", 0, 0

    def begin(self, sweep: Sweep, book: Book, total: int) -> None:
        self._metric, self._total = sweep.config.metric, total
        self._ended = sum(trial.status in OVER for trial in book.trials.values())
        over = f", {self._ended} of them done before" if self._ended else ""
        print(f"sweep {sweep.name}: {total} trials{over}, in {book.folder}", file=self._stream)
        self._stream.flush()

    def note(self, text: str) -> None:
        print(f"note: {text}", file=self._stream, flush=True)

    def ended(self, trial: Trial) -> None:
        self._ended += 1
        value = trial.value(self._metric)
        shown = MISSING if value is None else ranking.number(self._metric, value)
        why = f": {trial.error}" if trial.error else ""
        print(
            f"{self._ended:>{len(str(self._total))}}/{self._total}  {trial.name}  "
            f"{settings(trial)}  {trial.status} after {trial.done} rounds  "
            f"{self._metric} {shown}{why}",
            file=self._stream,
            flush=True,
        )


class LiveView(QuietView):
    """What runs now, redrawn by rich's thread; what failed scrolls by above."""

    def __init__(self, rich: RichConsole, stream: TextIO) -> None:
        super().__init__(stream)
        self._rich = rich
        self._live: Live | None = None

    def begin(self, sweep: Sweep, book: Book, total: int) -> None:
        self._sweep, self._book, self._total = sweep, book, total
        self._since = time.monotonic()
        self._before = sum(trial.status in OVER for trial in book.trials.values())
        self._rich.print(f"sweep [bold]{sweep.name}[/]: {total} trials, in {book.folder}")
        self._live = Live(console=self._rich, get_renderable=self.draw, redirect_stderr=False)
        self._live.start()

    def note(self, text: str) -> None:
        self._rich.print(Text(f"note: {text}", "yellow"), soft_wrap=True)

    def ended(self, trial: Trial) -> None:
        if trial.status == "failed":
            self._rich.print(Text(f"{trial.name} failed: {trial.error}", "red"), soft_wrap=True)

    def close(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()

    def draw(self) -> RenderableType:
        """Called by rich's thread, while trials may be entered."""
        trials = list(self._book.trials.values())
        counts = {s: sum(t.status == s for t in trials) for s in ("finished", "stopped", "failed")}
        done, clock = sum(counts.values()), time.monotonic() - self._since
        left = ""
        if done > self._before:
            pace = clock / (done - self._before)
            left = f", about {duration(round((self._total - done) * pace))} left"
        bar = ProgressBar(self._total, done, complete_style="cyan", finished_style="cyan")
        top = Table.grid("", Column(ratio=1), "", padding=(0, 2), expand=True)
        top.add_row(
            Text(f"trials {done}/{self._total}", "bold"), bar, f"{duration(round(clock))}{left}"
        )
        words = ", ".join(f"{n} {status}" for status, n in counts.items() if n) or "none done yet"
        return Group(top, Text(f"{words}{self._best(trials)}", "dim"), self._running(trials))

    def _best(self, trials: list[Trial]) -> str:
        rows = ranking.ranked([t for t in trials if t.rounds], self._sweep.config.metric)
        if not rows or not rows[0].values:
            return ""
        value = ranking.spread(self._sweep.config.metric, rows[0])
        return f"; best so far {value} with {settings(rows[0].trials[0])}"

    def _running(self, trials: list[Trial]) -> RenderableType:
        metric = self._sweep.config.metric
        grid = Table.grid(padding=(0, 2))
        for trial in [t for t in trials if t.status == "running"][: max(1, self._rich.height - 6)]:
            curve = [r["accuracy"] for r in list(trial.rounds.values()) if "accuracy" in r]
            value = trial.value(metric)
            grid.add_row(
                Text(trial.name, "dim"),
                Text(settings(trial), overflow="ellipsis", no_wrap=True),
                f"round {trial.done}",
                MISSING if value is None else ranking.number(metric, value),
                Text(sparkline(curve, 24), "cyan"),
            )
        return grid

    def answer(self, answer: Answer) -> None:
        titles, rows = ranking.cells(answer)
        table = Table(box=None, padding=(0, 1), header_style="dim")
        for title in titles:
            table.add_column(title, no_wrap=True)
        for i, row in enumerate(rows):
            table.add_row(*row, style="bold" if i == 0 else "")
        self._rich.print("", table, "")
        for what, line in _ending(answer):
            self._rich.print(Text.assemble((f"{what:<10}", "dim"), line), soft_wrap=True)


class JsonView:
    """One event a line, for scripts."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def _say(self, event: str, **values: Any) -> None:
        text = json.dumps({"event": event, **values}, default=str)
        # Scripts read strict JSON, which has no infinity.
        text = text.replace("-Infinity", "null").replace("Infinity", "null").replace("NaN", "null")
        print(text, file=self._stream, flush=True)

    def begin(self, sweep: Sweep, book: Book, total: int) -> None:
        self._say("sweep", name=sweep.name, folder=str(book.folder), trials=total)

    def note(self, text: str) -> None:
        self._say("note", text=text)

    def started(self, trial: Trial) -> None:
        self._say("started", trial=trial.name, settings=trial.shown)

    def reported(self, trial: Trial) -> None:
        self._say("round", trial=trial.name, **trial.rounds[trial.done])

    def ended(self, trial: Trial) -> None:
        self._say("ended", trial=trial.name, status=trial.status, error=trial.error or None)

    def close(self) -> None: ...

    def answer(self, answer: Answer) -> None:
        metric = answer.sweep.config.metric
        for rank, row in enumerate(answer.rows, start=1):
            value = {"metric": metric, "mean": row.mean, "std": row.std}
            self._say("ranked", rank=rank, settings=row.shown, **value)
        self._say("finished", folder=str(answer.folder), trials=answer.counts)


def settings(trial: Trial) -> str:
    return ", ".join(f"{key} {ranking.text(value)}" for key, value in trial.shown.items())


def answer_text(answer: Answer) -> str:
    """The ranked table and where to look further."""
    titles, rows = ranking.cells(answer)
    widths = [max(len(row[i]) for row in [titles, *rows]) for i in range(len(titles))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [titles, *rows]
    ]
    return "\n".join(["", *lines, "", *(f"{what:<10}{line}" for what, line in _ending(answer))])


def _ending(answer: Answer) -> list[tuple[str, str]]:
    counts = ", ".join(f"{n} {status}" for status, n in answer.counts.items())
    lines = [("trials", counts)]
    lines += [("failed", f"{trial.name}: {trial.error}") for trial in answer.failed]
    if answer.failed:
        lines.append(("again", f"python -m raysim.tune --resume {answer.folder}"))
    best = f"python -m raysim.launch --config {answer.folder / BEST}"
    return [*lines, ("best", best), ("figure", str(answer.folder / FIGURE)),
            ("tables", f"{answer.folder / TRIALS} (and rounds, ranking)")]  # fmt: skip
