"""What the user sees: complete lines in order, a terminal left clean, numbers in human units."""

import io
import math
import subprocess
import sys
import threading
from typing import Any

import pytest
from rich.console import Console as RichConsole

from raysim.console import (
    LiveConsole,
    PlainConsole,
    duration,
    human,
    make_console,
    percent,
    sparkline,
    summary_table,
)
from raysim.events import Evaluated, Event, Failed, Finished, Note, RoundFinished, Started

DIGEST = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"
PLAN = [("data", "cifar10: 60000 images, 10 classes"), ("fleet", "100 clients: cnn1, cnn2")]
FAILURE = "client_update failed on client 7 (cnn1) in round 2: loss is nan"
TRACEBACK = "Traceback (most recent call last):\nValueError: loss is nan\n"


@pytest.fixture(autouse=True)
def _colors_are_not_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def started(rounds: int) -> Started:
    return Started("/tmp/out", "fedre", rounds, PLAN, 3.21)


def trained(number: int, loss: float | None = 0.842) -> RoundFinished:
    return RoundFinished(number, loss, 10, 20_200, 200_400, 1.32)


def evaluated(number: int, accuracy: float = 0.613) -> Evaluated:
    return Evaluated(number, accuracy, 0.1, 1.0, 100)


def scores(number: int, **values: Any) -> dict[str, Any]:
    usual = {"accuracy": 0.632, "accuracy_mean": 0.618, "accuracy_std": 0.124, "test_loss": 0.982}
    return {"round": number, **usual, **values}


def summary(**values: Any) -> dict[str, Any]:
    seconds = {"total": 63.2, "start": 3.2, "rounds": 60.0, "server": 3.0}
    shares = {"training": 60.0, "evaluation": 30.0, "idle": 30.0}
    return {
        "method": "fedre", "data": "cifar10", "clients": 100, "participation": 0.1, "rounds": 40,
        "seed": 0, "final": scores(40), "best": scores(38, accuracy=0.64),
        "scalars_up": 5_120, "scalars_down": 8_860_000, "bytes_up": 20_480,
        "bytes_down": 35_440_000, "seconds": seconds | shares, "actors": 2,
        "split_digest": "ab" * 32, "digest": DIGEST, "versions": {}, **values,
    }  # fmt: skip


def plain(*events: Event) -> list[str]:
    stream = io.StringIO()
    console = make_console(stream)
    for event in events:
        console.show(event)
    return stream.getvalue().splitlines()


def rounds_in(lines: list[str]) -> list[str]:
    return [line.split()[1] for line in lines if line.startswith("round ")]


def terminal(width: int = 80, color: bool = False) -> RichConsole:
    return RichConsole(
        force_terminal=True,
        file=io.StringIO(),
        width=width,
        color_system="standard" if color else None,
        legacy_windows=False,
        _environ={"TERM": "xterm"},
    )


def written(rich: RichConsole) -> str:
    assert isinstance(rich.file, io.StringIO)
    return rich.file.getvalue()


# Plain lines


def test_the_plan_is_one_line_an_entry() -> None:
    assert plain(started(40)) == [
        "method    fedre, 40 rounds",
        "data      cifar10: 60000 images, 10 classes",
        "fleet     100 clients: cnn1, cnn2",
        "out       /tmp/out",
        "started   in 3.21 s",
    ]


def test_a_round_is_one_line() -> None:
    lines = plain(started(40), trained(12), evaluated(12))
    assert lines[-1] == (
        "round  12/40  accuracy 61.3 %  loss 0.842  up  20.2 kB  down 200.4 kB  1.32 s"
    )


def test_a_round_is_printed_as_soon_as_its_accuracy_is_known_and_not_before() -> None:
    stream = io.StringIO()
    console = PlainConsole(stream)
    seen = []
    for event in (
        started(3), trained(1), trained(2), evaluated(1), trained(3), evaluated(2), evaluated(3),
    ):  # fmt: skip
        console.show(event)
        seen.append(rounds_in(stream.getvalue().splitlines()))
    one, two, three = ["1/3"], ["1/3", "2/3"], ["1/3", "2/3", "3/3"]
    assert seen == [[], [], [], one, one, two, three]


def test_overlapped_evaluations_go_to_their_own_round() -> None:
    lines = plain(
        started(2), trained(1, 2.0), trained(2, 1.0), evaluated(1, 0.1), evaluated(2, 0.2)
    )
    first, second = (line for line in lines if line.startswith("round "))
    assert "accuracy 10.0 %  loss 2.000" in first
    assert "accuracy 20.0 %  loss 1.000" in second


def test_rounds_between_evaluations_have_no_accuracy_and_keep_their_place() -> None:
    """With eval.every=3, and the last round always evaluated: accuracies of 3, 6 and 7."""
    events: list[Event] = [started(7)]
    for number in range(1, 8):
        events.append(trained(number))
        if number in (4, 7):
            events.append(evaluated(number - 1))
    lines = plain(*events, evaluated(7), Finished(summary()))
    assert rounds_in(lines) == [f"{number}/7" for number in range(1, 8)]
    with_accuracy = [line for line in lines if line.startswith("round ") and "accuracy" in line]
    assert rounds_in(with_accuracy) == ["3/7", "6/7", "7/7"]


def test_a_round_that_was_not_evaluated_waits_two_rounds_at_most() -> None:
    assert rounds_in(plain(started(9), trained(1), trained(2))) == []
    assert rounds_in(plain(started(9), trained(1), trained(2), trained(3))) == ["1/9"]


def test_columns_line_up_with_and_without_accuracy() -> None:
    lines = plain(started(5), trained(1), evaluated(1), trained(2), trained(3), trained(4))
    assert len({line.index("loss") for line in lines if line.startswith("round ")}) == 1


def test_numbers_that_are_missing_are_dashes() -> None:
    line = plain(started(1), trained(1, None), evaluated(1, math.nan))[-1]
    assert line.startswith("round   1/1  accuracy      –  loss     –  up")


def test_close_prints_the_rounds_that_still_waited_once() -> None:
    stream = io.StringIO()
    console = PlainConsole(stream)
    for event in (started(9), trained(1), trained(2)):
        console.show(event)
    console.close()
    console.close()
    assert rounds_in(stream.getvalue().splitlines()) == ["1/9", "2/9"]


def test_status_prints_nothing_in_a_pipe() -> None:
    stream = io.StringIO()
    PlainConsole(stream).status(running=8, waiting=92)
    assert stream.getvalue() == ""


def test_a_note_is_a_line_of_its_own_and_not_markup() -> None:
    assert plain(Note("client 7 has [one] sample")) == ["note: client 7 has [one] sample"]


def test_lines_are_flushed_one_by_one() -> None:
    raw = io.BytesIO()
    console = PlainConsole(io.TextIOWrapper(raw, encoding="utf-8"))
    console.show(Note("now"))
    assert raw.getvalue() == b"note: now\n"


# Failures


def test_a_failure_shows_the_waiting_rounds_then_the_traceback_then_the_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = plain(started(9), trained(1), Failed(FAILURE, TRACEBACK, 1))
    assert rounds_in(lines) == ["1/9"]
    assert capsys.readouterr().err == f"{TRACEBACK}error: {FAILURE}\n"


def test_what_the_user_typed_is_refused_without_a_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    message = "unknown model 'resnet9' in fleet.models; did you mean 'resnet18'? " * 3
    assert plain(Failed(message, TRACEBACK, 2)) == []
    assert capsys.readouterr().err == f"error: {message}\n"


# The summary


def test_the_summary_holds_the_result_and_how_to_go_on() -> None:
    """Shares by hand: 60 + 30 + 30 = 120 actor seconds, so 50, 25 and 25 %; server 3 of 60 s."""
    text = str(summary_table(summary(), "/tmp/out"))
    for line in (
        "final        40      63.2 %    61.8 % ± 12.4 %      0.982",
        "best         38      64.0 %    61.8 % ± 12.4 %      0.982",
        "up           5.12 k          5,120   20.5 kB         20,480",
        "down         8.86 M      8,860,000   35.4 MB     35,440,000",
        "time      start 3.2 s, rounds 0:01:00, total 0:01:03",
        "actors    2: training 50.0 %, evaluation 25.0 %, idle 25.0 %",
        "server    5.0 % of the rounds' time",
        f"digest    {DIGEST}",
        "folder    /tmp/out",
        "Python    from raysim import Result; Result.load('/tmp/out').rounds.to_pandas()",
        "run again python -m raysim.launch --config /tmp/out/config.yaml",
    ):
        assert line in text.splitlines()
    for name in ("rounds", "clients", "messages", "split"):
        assert f"{name}.parquet" in text


def test_the_numbers_of_the_summary_fit_sixty_columns() -> None:
    lines = str(summary_table(summary(), "/tmp/out")).splitlines()
    prose = ("digest", "Python", "run again")
    assert max(len(line) for line in lines if not line.startswith(prose)) <= 60


def test_the_summary_ends_a_pipe_without_boxes_or_trailing_spaces() -> None:
    lines = plain(started(40), Finished(summary()))
    assert lines[-1].startswith("run again")
    assert all(line == line.rstrip() for line in lines)
    assert not set("".join(lines)) & set("│─┃━╭╮╰╯")


@pytest.mark.parametrize("missing", [math.nan, None])
def test_the_summary_shows_what_is_missing_as_a_dash(missing: float | None) -> None:
    keys = ("accuracy", "accuracy_mean", "accuracy_std", "test_loss")
    final = scores(40, **dict.fromkeys(keys, missing))
    text = str(summary_table(summary(final=final), "/tmp/out"))
    assert "final        40           –              – ± –          –" in text.splitlines()
    assert "nan" not in text
    assert "None" not in text


def test_shares_of_no_time_at_all_are_dashes() -> None:
    seconds = dict.fromkeys(summary()["seconds"], 0.0)
    text = str(summary_table(summary(seconds=seconds), "/tmp/out"))
    assert "training –, evaluation –, idle –" in text


def test_commands_in_the_summary_can_be_pasted_when_the_folder_has_a_space() -> None:
    text = str(summary_table(summary(), "/tmp/my runs"))
    assert "--config '/tmp/my runs/config.yaml'" in text
    assert "Result.load('/tmp/my runs')" in text


def test_a_pipe_that_is_not_unicode_gets_ascii() -> None:
    raw = io.BytesIO()
    console = make_console(io.TextIOWrapper(raw, encoding="ascii"))
    final = scores(40, test_loss=math.nan)
    for event in (started(40), Note("Größe"), Finished(summary(final=final))):
        console.show(event)
    text = raw.getvalue().decode("ascii")
    assert "note: Gr??e" in text
    assert "61.8 % +/- 12.4 %          -" in text


def test_both_consoles_end_with_the_same_summary() -> None:
    rich = terminal()
    LiveConsole(rich).show(Finished(summary()))
    assert written(rich).rstrip("\n") == str(summary_table(summary(), ""))


# The live display


def test_a_terminal_is_live_and_a_pipe_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(make_console(Terminal()), LiveConsole)
    assert isinstance(make_console(io.StringIO()), PlainConsole)


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_console(Terminal()), PlainConsole)


def test_a_pipe_stays_plain_when_colors_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    lines = plain(started(40), Note("x"), Finished(summary()))
    assert "\x1b" not in "".join(lines)


def test_the_live_console_leaves_the_terminal_clean() -> None:
    stdout, stderr, threads = sys.stdout, sys.stderr, threading.enumerate()
    rich = terminal(color=True)
    console = LiveConsole(rich)
    console.show(started(40))
    assert sys.stdout is not stdout
    console.status(running=8, waiting=92)
    for number in (1, 2):
        console.show(trained(number))
    console.show(evaluated(1))
    console.close()
    console.close()
    for thread in set(threading.enumerate()) - set(threads):
        thread.join(timeout=5)
    assert (sys.stdout, sys.stderr, threading.enumerate()) == (stdout, stderr, threads)
    assert written(rich).rindex("\x1b[?25h") > written(rich).rindex("\x1b[?25l")


def test_a_live_failure_is_shown_after_the_display_is_gone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rich = terminal()
    console = LiveConsole(rich)
    console.show(started(40))
    console.show(Failed(FAILURE, TRACEBACK, 1))
    assert written(rich).rstrip().endswith("\x1b[?25h")
    assert capsys.readouterr().err == f"{TRACEBACK}error: {FAILURE}\n"


def test_a_program_that_forgets_to_close_still_gets_its_cursor_back() -> None:
    script = (
        "import sys; from rich.console import Console; from raysim.console import LiveConsole\n"
        "from raysim.events import Started\n"
        "rich = Console(force_terminal=True, file=sys.stdout, _environ={'TERM': 'xterm'})\n"
        "LiveConsole(rich).show(Started('out', 'fedre', 3, [], 0.0)); raise RuntimeError"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.stderr.rstrip().endswith("RuntimeError")
    assert done.stdout.rindex("\x1b[?25h") > done.stdout.rindex("\x1b[?25l")


def test_the_display_shows_progress_and_its_last_frame_omits_what_is_over() -> None:
    """Sixty columns, and numbers as wide as they get."""
    rich = terminal(60)
    console = LiveConsole(rich)
    console.show(started(1000))
    console.status(running=1000, waiting=99_000)
    for number in range(1, 300):
        console.show(trained(number, 12.345))
        console.show(evaluated(number, 0.9 if number == 123 else 0.6 if number == 298 else 0.5))
    console.show(evaluated(300, math.nan))
    other = terminal(60)
    other.print(console._draw())
    frame = written(other)
    for piece in (
        "round 299/1000  ", "50.0 %  -10.0", "best     90.0 % in round 123", "12.345", " a round",
        "up        6.0 MB", "down     59.9 MB", "1000 clients", "99000 clients", " left", "█",
    ):  # fmt: skip
        assert piece in frame
    assert "…" not in frame
    assert len(frame.splitlines()) == 6
    console.close()
    last = written(rich)[written(rich).rindex("round 299/1000") :]
    assert "clients" not in last
    assert " left" not in last


def test_before_the_first_round_the_display_has_dashes() -> None:
    rich = terminal()
    console = LiveConsole(rich)
    console.show(started(40))
    console.close()
    assert "accuracy  –" in written(rich)
    assert "pace  –" in written(rich)


def test_what_is_printed_meanwhile_appears_above_the_display() -> None:
    rich = terminal()
    console = LiveConsole(rich)
    console.show(started(40))
    console.show(Note("a [note]"))
    print("a print of the method")
    console.close()
    text = written(rich)
    assert text.index("note: a [note]") < text.index("a print of the method")
    assert text.rindex("round 0/40") > text.index("a print of the method")


# Formats, by hand


@pytest.mark.parametrize(
    ("volume", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (20_200, "20.2 kB"),
        (200_400, "200.4 kB"),
        (999_949, "999.9 kB"),
        (999_951, "1.0 MB"),
        (8_860_000, "8.9 MB"),
        (5 * 10**12, "5.0 TB"),
    ],
)
def test_bytes_have_one_decimal_in_powers_of_1000(volume: int, text: str) -> None:
    assert human(volume, "B") == text


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (512, "512"), (5_120, "5.12 k"), (8_860_000, "8.86 M"), (999_999, "1.00 M")],
)
def test_counts_have_two_decimals(number: int, text: str) -> None:
    assert human(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.1312, "0.131 s"),
        (1.324, "1.32 s"),
        (7, "7 s"),
        (52.84, "52.8 s"),
        (59.96, "0:01:00"),
        (185.2, "0:03:05"),
        (7_620, "2:07:00"),
    ],
)
def test_durations_switch_to_a_clock_after_a_minute(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_percentages_have_one_decimal_or_are_missing() -> None:
    assert [percent(share) for share in (0.6129, 1.0, math.nan, None)] == [
        "61.3 %", "100.0 %", "–", "–",
    ]  # fmt: skip


def test_a_sparkline_runs_from_the_lowest_to_the_highest_value() -> None:
    assert sparkline([0.0, 0.5, 1.0], 80) == "▁▅█"
    assert sparkline([0.3, 0.3], 80) == "▁▁"
    assert sparkline([], 80) == ""


def test_a_sparkline_that_does_not_fit_averages_in_groups() -> None:
    """Seven values in three columns: the means of 0 1, 2 3 and 4 5 6, that is 0.5, 2.5 and 5."""
    assert sparkline([float(i) for i in range(7)], 3) == "▁▄█"
