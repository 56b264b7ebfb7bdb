"""What every kind of file gives: where a data set was found, and how to read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Parts(NamedTuple):
    """A data set as read: the training part first, then the test part."""

    images: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]
    num_train: int


@dataclass(frozen=True)
class Source:
    """A data set that is there but not yet read."""

    files: tuple[Path, ...]
    """When one of these changes, the set is read anew."""
    read: Callable[[int | None], Parts]
    """Reads it, with images resized to that many pixels a side; None leaves their size."""
