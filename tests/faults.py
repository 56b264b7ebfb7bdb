"""Faults on purpose: find the processes of a run, kill them at the worst moment, compare what is
left with a run that nothing happened to."""

import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from raysim import Config, Result, run
from raysim.backends.local import LocalBackend
from raysim.console import PlainConsole
from raysim.errors import Stopped
from raysim.events import Event, Note, RoundFinished
from raysim.simulation import Simulation

TABLES = ("rounds", "clients", "messages")


# Runs


class Listener(PlainConsole):
    """Shows nothing, keeps every event, and tells `hear` of each."""

    def __init__(self, hear: Callable[[Event], None] = lambda event: None) -> None:
        super().__init__(io.StringIO())
        self.events: list[Event] = []
        self._hear = hear

    def show(self, event: Event) -> None:
        self.events.append(event)
        self._hear(event)

    @property
    def notes(self) -> str:
        return "\n".join(event.text for event in self.events if isinstance(event, Note))


def resume(out: Path, hear: Callable[[Event], None] = lambda event: None, **changes: Any) -> Result:
    """Go on in a run's folder, with dotted settings changed as a user may."""
    config = Config.load(out / "config.yaml").replace({"out": str(out), **changes})
    return run(config, Listener(hear), resume=True)


def stop_after(config: Config, rounds: int, again: bool = False) -> None:
    """Run in this process and stop as Ctrl-C does, once so many rounds are done."""
    done: list[int] = []
    backend = LocalBackend()

    def note(event: Event) -> None:
        if isinstance(event, RoundFinished):
            done.append(event.round)

    try:
        Simulation(
            config, backend, note, resume=again, stop=lambda: bool(done) and done[-1] >= rounds
        ).run()
    except Stopped:
        return
    finally:
        backend.close()
    raise AssertionError("the run ended before it could be stopped")


class Dead(BaseException):
    """Stands for SIGKILL: nothing of the run's own runs after it."""


def die_after(
    config: Config, rounds: int, hear: Callable[[Event], None] = lambda event: None
) -> None:
    """Run in this process and die, unsaved, once so many rounds have trained."""
    backend = LocalBackend()

    def emit(event: Event) -> None:
        hear(event)
        if isinstance(event, RoundFinished) and event.round >= rounds:
            raise Dead

    simulation = Simulation(config, backend, emit)
    try:
        simulation.run()
    except Dead:
        return
    finally:
        if simulation.store._thread is not None:
            simulation.store._thread.join()  # a real death would take it along
        backend.close()
    raise AssertionError("the run ended before it could die")


def tables(out: Path) -> dict[str, list[dict[str, Any]]]:
    """What a run wrote down, without times and in an order of its own (evaluations of a round are
    written when they are done)."""
    found = {}
    for name in TABLES:
        rows = pq.read_table(out / f"{name}.parquet").to_pylist()
        timeless = [
            {k: v for k, v in row.items() if k != "elapsed" and not k.endswith("seconds")}
            for row in rows
        ]
        found[name] = sorted(timeless, key=lambda row: json.dumps(row, sort_keys=True))
    return found


def assert_same_run(found: Result, expected: Result) -> None:
    """Bit for bit the same result, and nothing counted twice or forgotten on the way."""
    assert tables(found.out) == tables(expected.out)
    for key in ("final", "best", "rounds", "selected", "bytes_up", "bytes_down"):
        assert found.summary[key] == expected.summary[key], key
    assert found.digest == expected.digest


def short_form(values: Iterable[Any], *fast: Any) -> list[Any]:
    """Parameters of which only `fast` ones run without `-m slow`."""
    return [v if v in fast else pytest.param(v, marks=pytest.mark.slow) for v in values]


# Processes


def environment() -> dict[str, str]:
    """Without what another cluster of this session may have left in ours, and without tokens."""
    rest = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**rest, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


@contextmanager
def launched(*argv: str, cwd: Path) -> Iterator["subprocess.Popen[str]"]:
    """The launcher in a session of its own; whatever is left of it at the end is ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", "raysim.launch", *argv],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        end_all(process.pid)
        process.communicate()


def launch(*argv: str, cwd: Path, timeout: float = 120) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    with launched(*argv, cwd=cwd) as process:
        printed, said = process.communicate(timeout=timeout)
        return process.returncode, printed, said


def wait_for_round(process: "subprocess.Popen[str]", number: int) -> str:
    """Read what the launcher prints until a round is told; returns all that was read."""
    assert process.stdout is not None
    read = ""
    for line in process.stdout:
        read += line
        if line.startswith("round ") and int(line.split()[1].partition("/")[0]) >= number:
            return read
    assert process.stderr is not None
    raise AssertionError(f"the run ended before round {number}:\n{read}{process.stderr.read()}")


def family(pid: int) -> list[psutil.Process]:
    """A process and all that descend from it."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def end_all(pid: int) -> None:
    """SIGKILL a process and all its descendants, at once: what kill -9 of everything leaves."""
    processes = family(pid)
    for process in processes:
        kill(process)
    psutil.wait_procs(processes, timeout=20)


def kill(process: psutil.Process) -> bool:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return False
    return True


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) if process.status() != psutil.STATUS_ZOMBIE else ""
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


def client_actors(pid: int) -> list[psutil.Process]:
    """The processes below `pid` that play clients. Ray names a process after its actor."""
    return [each for each in family(pid) if _title(each).startswith("ray::ClientActor")
            or _title(each).startswith(("ray::pool-", "ray::client-"))]  # fmt: skip


def is_driver(process: psutil.Process) -> bool:
    return _title(process).startswith(("ray::driver", "ray::DriverActor"))


def driver_actor(pid: int) -> psutil.Process:
    drivers = [each for each in family(pid) if is_driver(each)]
    assert len(drivers) == 1, drivers
    return drivers[0]


class Killer:
    """A thread that kills a random client actor below a process, again and again."""

    def __init__(
        self, pid: int, pause: Callable[[random.Random], float], seed: int = 0, spare: int = 0
    ) -> None:
        """`spare` actors that are up are left alone: if actors die faster than new ones start, a
        run gets nowhere."""
        self.kills = 0
        self._spare = spare
        self._pid = pid
        self._pause = pause
        self._rng = random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._over.wait(self._pause(self._rng)):
            self.kill_one()

    def kill_one(self) -> None:
        actors = client_actors(self._pid)
        if len(actors) > self._spare:
            self.kills += kill(self._rng.choice(actors))

    def __enter__(self) -> "Killer":
        self._thread.start()
        return self

    def __exit__(self, *args: object) -> None:
        self._over.set()
        self._thread.join()


def eventually(what: Callable[[], Any], seconds: float = 20) -> Any:
    """The first answer that holds; the last one when the time is over."""
    deadline = time.monotonic() + seconds
    while not (answer := what()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return answer


def interrupt(process: "subprocess.Popen[str]", number: signal.Signals) -> tuple[int, str]:
    """Send a signal to the launcher alone; exit code and stderr."""
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    return process.returncode, said
