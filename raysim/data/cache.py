"""Arrays that are slow to make, kept on disk.

A cache may vanish, tear or be unwritable at any time, and none of that is an error: what cannot be
read is made again, and what cannot be written is not kept.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

Arrays: TypeAlias = dict[str, Any]  # of NumPy arrays


def folder() -> Path:
    """`RAYSIM_CACHE`, or `raysim` in the user's cache folder."""
    if "RAYSIM_CACHE" in os.environ:
        return Path(os.environ["RAYSIM_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "raysim"


def key(files: Iterable[Path], *settings: object) -> str:
    """Changes when a file's path, size or time does, or a setting."""
    stamps = [(str(file.resolve()), *_stamp(file)) for file in files]
    return hashlib.sha256(repr((stamps, settings)).encode()).hexdigest()[:16]


def _stamp(file: Path) -> tuple[int, int]:
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns


def keep(name: str, make: Callable[[], Arrays]) -> Arrays:
    """The arrays kept under this name, or made now and kept."""
    path = folder() / f"{name}.npz"
    arrays = _read(path)
    if arrays is None:
        arrays = make()
        _write(path, arrays)
    return arrays


def _read(path: Path) -> Arrays | None:
    """The arrays, or None if they are not there whole: the file carries a checksum of each."""
    try:
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as kept:
            return {name: kept[name] for name in kept.files}
    except Exception:  # a torn zip file fails in a dozen ways, and the answer to all is the same
        return None


def _write(path: Path, arrays: Arrays) -> None:
    """Readers see the whole file or none, also while others write the same."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.stem}-") as temporary:
            whole = Path(temporary) / path.name
            with open(whole, "wb") as file:
                np.savez(file, **arrays)
            os.replace(whole, path)
    except OSError:
        return
