"""What the process of `raysim.launch` becomes for a run on Ray: `python -m raysim.launcher FD`.

FD is an open file with the checked settings. Nothing here imports torch.
"""

import json
import os
import sys
from dataclasses import asdict
from typing import Any

from raysim.config import Config, Sealed
from raysim.launch import exit_code
from raysim.watch import Watch


def become(config: Config, started: float, watch: Watch, resume: bool) -> None:
    """Check what can be checked before anything starts, then turn into the launcher; returns only
    where that cannot be done."""
    from raysim.result import ready
    from raysim.simulation import preflight, resolved

    if not hasattr(os, "memfd_create"):
        return
    config = resolved(config)
    preflight(config, resume)
    launch = ready(config, started, resume)
    file = os.memfd_create("raysim-launch", 0)  # without close-on-exec
    with open(file, "w", closefd=False) as stream:
        told = launch._asdict() | {"config": config.to_tree(), "watch": asdict(watch)}
        json.dump(told, stream)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "raysim.launcher", str(file)])


def main() -> int:
    with open(int(sys.argv[1]), "rb") as file:
        file.seek(0)
        told = json.load(file)
    return exit_code(lambda: _run(told))


def _run(told: dict[str, Any]) -> None:
    from raysim.follow import Launch, drive, report

    tree = told["config"]
    config = Config.from_tree(tree | {"hp": Sealed(tree["hp"])})
    with Watch(**told.pop("watch")).console() as console:
        report(drive(Launch(**told | {"config": config}), console))


if __name__ == "__main__":
    sys.exit(main())
