"""`python -m raysim.report RUN... --out report.html`"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro

from raysim.launch import exit_code
from raysim.report import write


@dataclass(frozen=True)
class Options:
    """Show runs as one self-contained page: open it in any browser, mail it, keep it."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs, or of sweeps and other folders that hold runs; a run need not have finished.
    """
    out: Path = Path("report.html")
    """The page to write; an older one is replaced."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 it could not be written, 2 there is nothing to show."""
    options = tyro.cli(Options, args=argv, prog="python -m raysim.report")

    def act() -> None:
        write(options.runs, options.out)
        print(f"wrote {options.out.absolute()}")

    return exit_code(act)


if __name__ == "__main__":
    sys.exit(main())
