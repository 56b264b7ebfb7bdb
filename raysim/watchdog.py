"""Interrupts and silence, for runs in this process."""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from raysim.console import Console
from raysim.events import Note


@contextmanager
def interruptible(console: Console) -> Iterator[Callable[[], bool]]:
    """Yields a question: was the run asked to stop? The first Ctrl-C (or SIGTERM) asks, the second
    ends it at once."""
    asked: list[int] = []

    def ask(number: int, frame: Any) -> None:
        asked.append(number)
        if len(asked) > 1:
            raise KeyboardInterrupt
        console.show(Note("finishing the round and saving; again to end at once"))

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False  # whoever owns the main thread decides
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    old = [signal.signal(number, ask) for number in numbers]
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in zip(numbers, old, strict=True):
            signal.signal(number, handler)


class Watchdog:
    """Ends this process, with the stack of every thread, when one job takes longer than it may."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._job: tuple[float, str] | None = None
        self._over = threading.Event()
        if seconds:
            threading.Thread(target=self._watch, daemon=True).start()

    def begin(self, what: str) -> None:
        self._job = (time.monotonic(), what)

    def end(self) -> None:
        self._job = None

    def close(self) -> None:
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self._seconds / 4)):
            job = self._job
            if job is not None and time.monotonic() - job[0] > self._seconds:
                faulthandler.dump_traceback(all_threads=True)
                text = f"error: no progress for {self._seconds:g} s (--watchdog); pending: {job[1]}"
                print(text, file=sys.stderr, flush=True)
                os._exit(1)  # the main thread hangs, so nothing gentler would be heard
