"""What the user sees of a run: a live display, or one line a round in a pipe; then a summary."""

import atexit
import math
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from statistics import fmean
from typing import Any, Protocol, TextIO

from rich.console import Console as RichConsole
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from raysim.events import Evaluated, Event, Failed, Finished, Note, RoundFinished, Started

MISSING = "–"


class Console(Protocol):
    """`status` tells how many clients run and how many wait for an actor: called often, so cheap.
    `close` leaves the terminal as it was found, at any time and any number of times."""

    def show(self, event: Event) -> None: ...
    def status(self, running: int, waiting: int) -> None: ...
    def close(self) -> None: ...


def make_console(stream: TextIO | None = None) -> Console:
    """Live on a terminal that can redraw; plain lines in a pipe, a notebook or with TERM=dumb."""
    stream = sys.stdout if stream is None else stream
    rich = RichConsole(file=stream, highlight=False)
    live = stream.isatty() and not rich.is_jupyter and not rich.is_dumb_terminal
    return LiveConsole(rich) if live and rich.encoding.startswith("utf") else PlainConsole(stream)


class PlainConsole:
    """One line a round, in order. A round's accuracy comes after the next round has trained; if it
    is still missing when the next but one has trained, the round was not evaluated."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._started = Started("", "", 0, [], 0.0)
        self._trained: dict[int, RoundFinished] = {}
        self._accuracy: dict[int, float] = {}

    def show(self, event: Event) -> None:
        match event:
            case Started():
                self._started = event
                self._print(*(f"{what:<8}  {line}" for what, line in _header(event)))
            case RoundFinished():
                self._trained[event.round] = event
                self._print_rounds(before=event.round - 1)
            case Evaluated():
                self._accuracy[event.round] = event.accuracy
                self._print_rounds(before=event.round)
            case Note():
                self._print(f"note: {event.text}")
            case Finished() if event.summary:
                self.close()
                self._print("", summary_table(event.summary, self._started.out).plain)
            case Failed():
                self.close()
                _show_failure(event)

    def status(self, running: int, waiting: int) -> None:
        pass

    def close(self) -> None:
        self._print_rounds(before=sys.maxsize)

    def _print_rounds(self, before: int) -> None:
        """Print the rounds that are complete: the evaluated ones, and all those before `before`."""
        rounds = self._started.rounds
        for number in sorted(self._trained):
            if number >= before and number not in self._accuracy:
                break
            row, accuracy = self._trained.pop(number), self._accuracy.pop(number, None)
            self._print(
                f"round {number:>{max(3, len(str(rounds)))}}/{rounds}"
                f"  {'' if accuracy is None else f'accuracy {percent(accuracy):>6}':15}"
                f"  loss {decimal(row.loss):>5}  up {human(row.bytes_up, 'B'):>8}"
                f"  down {human(row.bytes_down, 'B'):>8}  {duration(row.seconds)}"
            )

    def _print(self, *lines: str) -> None:
        text, encoding = "\n".join(lines), getattr(self._stream, "encoding", None) or "utf-8"
        if not encoding.lower().startswith("utf"):
            text = text.replace(MISSING, "-").replace("±", "+/-")
        print(text.encode(encoding, "replace").decode(encoding), file=self._stream, flush=True)


class LiveConsole:
    """A few lines that rich's thread redraws; whatever else is printed scrolls by above them."""

    def __init__(self, rich: RichConsole) -> None:
        self._rich = rich
        self._live: Live | None = None
        self._started = Started("", "", 0, [], 0.0)
        self._times: list[float] = []  # when the first round began, then when each one ended
        self._rounds: list[RoundFinished] = []
        self._curve: list[Evaluated] = []
        self._clients = (0, 0)

    def show(self, event: Event) -> None:
        match event:
            case Started():
                self._start(event)
            case RoundFinished():
                self._rounds.append(event)
                self._times.append(time.monotonic())
            case Evaluated() if not math.isnan(event.accuracy):
                self._curve.append(event)
            case Note():
                self._rich.print(Text(f"note: {event.text}", "yellow"), soft_wrap=True)
            case Finished() if event.summary:
                self.close()
                self._rich.print(summary_table(event.summary, self._started.out), soft_wrap=True)
            case Failed():
                self.close()
                _show_failure(event)

    def status(self, running: int, waiting: int) -> None:
        self._clients = running, waiting

    def close(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None  # first, so that the last frame omits what is over
            live.stop()
            atexit.unregister(self.close)
            self._rich.print()

    def _start(self, event: Started) -> None:
        self._started, self._times = event, [time.monotonic()]
        header = Table.grid(padding=(0, 2))
        for what, line in _header(event):
            header.add_row(Text(f"{what:<8}", "dim", no_wrap=True), Text(line, overflow="fold"))
        self._rich.print(header, "")
        tty = sys.stderr.isatty()  # else it goes where the user sent it, not above the display
        self._live = Live(console=self._rich, get_renderable=self._draw, redirect_stderr=tty)
        atexit.register(self.close)  # a program that ends without close() gets its cursor back
        self._live.start()

    def _draw(self) -> RenderableType:
        """Called by rich's thread, while `show` may append to the lists."""
        times, total, now = list(self._times), self._started.rounds, time.monotonic()
        done, recent, clock = len(times) - 1, times[-11:], duration(round(now - times[0]))
        pace = (recent[-1] - recent[0]) / max(1, len(recent) - 1)
        if done and self._live is not None:
            left = max(0, round((total - done) * pace - (now - times[-1])))
            clock += f", {duration(left)} left"
        bar = ProgressBar(total, done, complete_style="cyan", finished_style="cyan")
        top = Table.grid("", Column(ratio=1), Column(min_width=21), padding=(0, 2), expand=True)
        top.add_row(Text(f"round {done}/{total}", "bold"), bar, clock)
        numbers = self._numbers(f"{duration(pace)} a round" if done else MISSING)
        curve = sparkline([event.accuracy for event in self._curve], self._rich.width)
        return Group(top, numbers, Text(curve, "cyan"))

    def _numbers(self, pace: str) -> RenderableType:
        rounds, curve, (running, waiting) = list(self._rounds), list(self._curve), self._clients
        accuracy = Text(percent(curve[-1].accuracy if curve else None), "bold")
        top = max(curve, key=lambda event: event.accuracy, default=None)
        best = f"{percent(top.accuracy)} in round {top.round}" if top else MISSING
        if len(curve) > 1:
            change = 100 * (curve[-1].accuracy - curve[-2].accuracy)
            accuracy.append(f"  {change:+.1f}", "not bold red" if change < 0 else "not bold green")
        grid = Table.grid("", Column(min_width=18), padding=(0, 2))
        grid.add_row("[dim]accuracy", accuracy, "[dim]best", best)
        grid.add_row("[dim]loss", decimal(rounds[-1].loss if rounds else None), "[dim]pace", pace)
        up, down = sum(row.bytes_up for row in rounds), sum(row.bytes_down for row in rounds)
        grid.add_row("[dim]up", human(up, "B"), "[dim]down", human(down, "B"))
        if self._live is not None:
            grid.add_row("[dim]running", f"{running} clients", "[dim]waiting", f"{waiting} clients")
        return grid


def summary_table(summary: Mapping[str, Any], out: str) -> Text:
    """The result and where to look further. Print it unwrapped: the commands are to be copied."""
    rows = [("run", "{method} on {data}, {clients} clients, seed {seed}".format_map(summary))]
    rows += [("", ""), ("accuracy", "round  by samples  client mean ± std  test loss")]
    for name in ("final", "best"):
        row = summary[name]
        spread = f"{percent(row['accuracy_mean'])} ± {percent(row['accuracy_std'])}"
        accuracy, loss = percent(row["accuracy"]), decimal(row["test_loss"])
        rows.append((name, f"{row['round']:>5}  {accuracy:>10}  {spread:>17}  {loss:>9}"))
    rows += _variants(summary.get("variants", {}))
    rows += [("", ""), ("traffic", f"{'scalars':>24}  {'bytes':>23}")]
    for way in ("up", "down"):
        n, size = summary[f"scalars_{way}"], summary[f"bytes_{way}"]
        rows.append((way, f"{human(n):>9}  {n:>13,}  {human(size, 'B'):>8}  {size:>13,}"))
    # Actors train, evaluate or idle; the server works on the driver, while they idle.
    seconds, work = summary["seconds"], ("training", "evaluation", "idle")
    whole, wall = sum(seconds[key] for key in work) or math.nan, seconds["rounds"] or math.nan
    shares = ", ".join(f"{key} {percent(seconds[key] / whole)}" for key in work)
    spans = ", ".join(f"{key} {duration(seconds[key])}" for key in ("start", "rounds", "total"))
    rows += [("", ""), ("time", spans), ("actors", f"{summary['actors']}: {shares}")]
    rows += [("server", f"{percent(seconds['server'] / wall)} of the rounds' time"), ("", "")]
    load = f"from raysim import Result; Result.load({out!r}).rounds.to_pandas()"
    again = f"python -m raysim.launch --config {shlex.quote(f'{out}/config.yaml')}"
    rows += [("digest", summary["digest"]), ("folder", out), ("", "rounds.parquet clients.parquet")]
    more = " variants.parquet" if "variants" in summary else ""
    rows += [("", f"messages.parquet split.parquet{more}"), ("Python", load), ("run again", again)]
    return Text("\n").join(Text.assemble((f"{k:<10}" if v else "", "dim"), v) for k, v in rows)


def _variants(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Each inference model of a method that has several: by samples, and the clients' mean."""
    if not found:
        return []
    width = max(len("variants"), *map(len, found))
    columns = "".join(f"{title:>9}" for title in ("final", "mean", "best", "mean"))
    rows = [("", ""), (f"{'variants':<{width}}", f"{columns}  round")]
    for name, row in found.items():
        pairs = ((row[when]["accuracy"], row[when]["accuracy_mean"]) for when in ("final", "best"))
        columns = "".join(f"{percent(share):>9}" for pair in pairs for share in pair)
        rows.append((f"{name:<{width}}", f"{columns}  {row['best']['round']:>5}"))
    return rows


def _header(event: Started) -> list[tuple[str, str]]:
    method = ("method", f"{event.method}, {event.rounds} rounds")
    return [method, *event.plan, ("out", event.out), ("started", f"in {duration(event.seconds)}")]


def _show_failure(event: Failed) -> None:
    """On stderr. What the user typed (exit code 2) needs no traceback."""
    if event.traceback and event.exit_code != 2:
        print(event.traceback.rstrip(), file=sys.stderr)
    rich = RichConsole(stderr=True, force_jupyter=False, highlight=False)
    rich.print(Text.assemble(("error: ", "bold red"), (event.message, "bold")), soft_wrap=True)


def sparkline(values: Sequence[float], width: int) -> str:
    """Bars from the lowest to the highest; more values than `width` are averaged in groups."""
    size, n = len(values), min(len(values), width)
    means = [fmean(values[size * i // n : size * (i + 1) // n]) for i in range(n)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (x - low) / ((high - low) or 1))] for x in means)


def percent(share: float | None) -> str:
    return MISSING if share is None or math.isnan(share) else f"{100 * share:.1f} %"


def decimal(value: float | None) -> str:
    return MISSING if value is None or math.isnan(value) else f"{value:.3f}"


def human(value: float, unit: str = "") -> str:
    """Powers of 1000: bytes with one decimal (512 B, 20.2 kB), counts with two (5.12 k, 8.86 M)."""
    places, prefixes, text = 1 if unit else 2, iter("kMGTPE"), f"{value} {unit}"
    while round(value, places) >= 1000:
        value /= 1000
        text = f"{value:.{places}f} {next(prefixes)}{unit}"
    return text.rstrip()


def duration(seconds: float) -> str:
    """0.131 s, 1.32 s, 52.8 s, 0:03:05"""
    return f"{seconds:.3g} s" if seconds < 59.95 else str(timedelta(seconds=round(seconds)))
