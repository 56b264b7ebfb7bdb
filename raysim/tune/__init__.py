"""`python -m raysim.tune tune_configs/NAME.yaml`: sweeps with Ray Tune.

    file -> Sweep -> points -> trials on the cluster -> book -> ranking, best.yaml, figure.svg

`read` makes a Sweep of a file and flags, `run` runs it in a folder.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raysim.tune.file import read
    from raysim.tune.run import run

__all__ = ["read", "run"]


def __getattr__(name: str) -> Any:
    """On first use: the trials' processes need neither."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f"raysim.tune.{'file' if name == 'read' else 'run'}")
    return getattr(module, name)
