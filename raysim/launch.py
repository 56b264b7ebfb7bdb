"""`python -m raysim.launch --clients 100`: argv -> Config -> run -> progress -> summary."""

import signal
import sys
import time
from collections.abc import Sequence

import psutil

from raysim.errors import RaysimError


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 the run failed, 2 the command cannot be run, 130 interrupted."""
    started = psutil.Process().create_time() if argv is None else time.time()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    from raysim.config import Config
    from raysim.result import run

    try:
        config = Config.parse(list(sys.argv[1:] if argv is None else argv))
        run(config, started=started)
    except RaysimError as error:
        cause = getattr(error, "cause", "")
        if cause:
            print(cause.rstrip(), file=sys.stderr)
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\ninterrupted: what was done so far is in the run's folder", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
