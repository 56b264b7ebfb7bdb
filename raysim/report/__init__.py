"""`python -m raysim.report RUN... --out report.html`: runs as one page that needs nothing else.

`write` is the same from Python. A folder of runs, such as a sweep's, stands for all runs in it.
Nothing here needs torch.
"""

from collections.abc import Sequence
from pathlib import Path

__all__ = ["write"]


def write(runs: Sequence[str | Path], out: str | Path) -> None:
    """Write the report of the runs in these folders, finished or not, to the file `out`."""
    from raysim.report.groups import grouped
    from raysim.report.page import render, save
    from raysim.report.read import find, lost_trials, read

    folders = [Path(run) for run in runs]
    groups = grouped([read(folder) for folder in find(folders)])
    save(render(groups, lost_trials(folders)), Path(out))
