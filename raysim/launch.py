"""`python -m raysim.launch --clients 100`: argv -> Config -> run -> progress -> summary."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from raysim.errors import RaysimError


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 the run failed, 2 the command cannot be run, 130 stopped or
    interrupted."""
    started = psutil.Process().create_time() if argv is None else time.time()
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        _act(words, started)
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


def _act(words: list[str], started: float) -> None:
    from raysim.config import Config
    from raysim.console import make_console
    from raysim.result import report, run
    from raysim.resume import resumed
    from raysim.settings import last_value

    for flag in ("--attach", "--stop"):
        if (name := last_value(words, flag)) is not None:
            from raysim import follow

            action = follow.attach if flag == "--attach" else follow.stop
            console = make_console()
            try:
                report(action(name, last_value(words, "--address"), console))
            finally:
                console.close()
            return
    folder = last_value(words, "--resume")
    if folder is not None:
        run(resumed(Path(folder), words), started=started, resume=True)
    else:
        run(Config.parse(words), started=started)


if __name__ == "__main__":
    sys.exit(main())
