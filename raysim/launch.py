"""`python -m raysim.launch --clients 100`: argv -> Config -> run -> progress -> summary.

A run on Ray happens in other processes. Once its settings are checked, which takes torch, this one
becomes `raysim.launcher`, which follows the run without: 150 MiB less.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from raysim.errors import RaysimError

if TYPE_CHECKING:
    from raysim.watch import Watch


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 the run failed, 2 the command cannot be run, 130 stopped or
    interrupted. With `argv` everything happens in this very process."""
    started = time.time() - (_age() if argv is None else 0.0)
    words = list(sys.argv[1:] if argv is None else argv)
    return exit_code(lambda: _act(words, started, hand_over=argv is None))


def _age() -> float:
    """Seconds since this process began: what Python took to start belongs to the run."""
    try:
        words = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    ticks = int(words[19])  # since the machine started
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def exit_code(action: Callable[[], None]) -> int:
    """What a command answers to the shell; errors are told on stderr."""
    try:
        action()
    except RaysimError as error:
        cause = getattr(error, "cause", "")
        if cause:
            print(cause.rstrip(), file=sys.stderr)
        print(f"error: {error}" if error.exit_code != 130 else str(error), file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # Whoever read our output has gone, as `head` does; what is left of it has no reader.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; go on from the last checkpoint with --resume OUT", file=sys.stderr)
        return 130
    return 0


def _act(words: list[str], started: float, hand_over: bool) -> None:
    from raysim.settings import last_value
    from raysim.watch import Watch

    watch, words = Watch.take(words)
    for flag in ("--attach", "--stop"):
        if (name := last_value(words, flag)) is not None:
            _join(flag, name, last_value(words, "--address"), watch)
            return
    from raysim.config import Config
    from raysim.result import run
    from raysim.resume import resumed

    folder = last_value(words, "--resume")
    config = Config.parse(words) if folder is None else resumed(Path(folder), words)
    if config.detach:
        watch.check_detached()
    if hand_over and config.backend == "ray":
        from raysim import launcher

        launcher.become(config, started, watch, resume=folder is not None)
    with watch.console() as console:
        run(config, console, started=started, resume=folder is not None)


def _join(flag: str, name: str, address: str | None, watch: "Watch") -> None:
    from raysim import follow

    action = follow.attach if flag == "--attach" else follow.stop
    with watch.console() as console:
        follow.report(action(name, address, console))


if __name__ == "__main__":
    sys.exit(main())
