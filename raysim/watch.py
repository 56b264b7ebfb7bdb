"""How the command that starts or follows a run shows it: a display, lines for scripts, loggers.

`--quiet`, `--json`, `--tensorboard` and `--mlflow URI` are no settings of a run: they work with
--resume and --attach, and no config.yaml has them. In Python:

    with Watch(tensorboard=True).console() as console:
        run(config, console)
"""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from raysim.console import Console, make_console
from raysim.errors import ConfigError
from raysim.events import Event, Note
from raysim.loggers import JsonLines, Logger, MLflow, Quiet, TensorBoard


@dataclass(frozen=True)
class Watch:
    """What the user typed of how a run is to be shown."""

    quiet: bool = False
    json: bool = False
    tensorboard: bool = False
    mlflow: str | None = None

    @classmethod
    def take(cls, words: Sequence[str]) -> tuple["Watch", list[str]]:
        """These flags, and the command line without them."""
        found: dict[str, Any] = {}
        rest: list[str] = []
        left = list(words)
        while left:
            word = left.pop(0)
            flag, equals, value = word.partition("=")
            if flag == "--mlflow":
                if not equals and (not left or left[0].startswith("--")):
                    raise ConfigError(
                        "--mlflow needs the address of a store: --mlflow sqlite:///mlflow.db, or "
                        "http://HOST:5000"
                    )
                found["mlflow"] = value if equals else left.pop(0)
            elif flag in ("--quiet", "--json", "--tensorboard"):
                if not equals and left and left[0] in ("True", "False"):
                    value = left.pop(0)
                if value not in ("", "True", "False"):
                    raise ConfigError(f"{flag} takes no value, got {value!r}")
                found[flag[2:]] = value != "False"
            else:
                rest.append(word)
        watch = cls(**found)
        watch._check()
        return watch, rest

    def _check(self) -> None:
        """Before anything starts: a library that is missing, flags that exclude each other."""
        if self.quiet and self.json:
            raise ConfigError("--quiet prints no events and --json nothing else; leave one out")
        if self.tensorboard and not importlib.util.find_spec("tensorboardX"):
            raise ConfigError("--tensorboard needs a library: pip install tensorboardX")
        if self.mlflow and not importlib.util.find_spec("mlflow"):
            raise ConfigError("--mlflow needs a library: pip install 'raysim[mlflow]'")

    def check_detached(self) -> None:
        flag = "--tensorboard" if self.tensorboard else "--mlflow" if self.mlflow else ""
        if flag:
            raise ConfigError(
                f"{flag} is written by the command that follows the run, and with --detach none "
                f"does; give it to --attach instead"
            )

    @contextmanager
    def console(self) -> Iterator[Console]:
        """A display for a block, with every logger behind it. What others print to stdout goes to
        stderr when stdout is for a script."""
        scripted = self.quiet or self.json
        first: Any = Quiet(sys.stdout) if self.quiet else JsonLines(sys.stdout)
        console = first if scripted else make_console()
        loggers: list[Logger] = [first] if self.json else []
        loggers += [TensorBoard()] if self.tensorboard else []
        loggers += [MLflow(self.mlflow)] if self.mlflow else []
        hearers = Hearers(console, [each for each in loggers if each is not console], loggers)
        aside = contextlib.redirect_stdout(sys.stderr) if scripted else contextlib.nullcontext()
        try:
            with aside:
                yield hearers
        except BaseException as error:
            hearers.end(error)
            raise
        else:
            hearers.end(None)
        finally:
            console.close()


class Hearers:
    """A console, and the loggers that hear the same. One that fails, because its server has gone
    say, is named and left out; the run goes on."""

    def __init__(
        self, console: Console, loggers: Sequence[Logger], to_end: Sequence[Logger]
    ) -> None:
        self._console = console
        self._loggers = list(loggers)
        self._to_end = list(to_end)

    def show(self, event: Event) -> None:
        self._console.show(event)
        for logger in list(self._loggers):
            try:
                logger.show(event)
            except Exception as error:
                self._loggers.remove(logger)
                self._to_end.remove(logger)
                name, reason = type(logger).__name__, f"{type(error).__name__}: {error}"
                self._console.show(Note(f"{name} hears no more of this run: {reason}"))

    def status(self, running: int, waiting: int) -> None:
        self._console.status(running, waiting)

    def close(self) -> None:
        self._console.close()

    def end(self, error: BaseException | None) -> None:
        for logger in self._to_end:
            try:
                logger.end(error)
            except Exception as failure:
                print(f"{type(logger).__name__} did not end well: {failure}", file=sys.stderr)
