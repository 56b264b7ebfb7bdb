"""A data set in memory, and the names by which sets are loaded.

What reads files is imported where it is needed: actors are handed their data.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raysim.config import DataConfig
from raysim.data import cache, partition, shapes
from raysim.errors import ConfigError, DataError, unknown
from raysim.task import Kind, Task

PARQUET = "parquet:"


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images and labels, read-only; normalized only in batches, so that they stay bytes."""

    name: str
    images: npt.NDArray[Any]
    """(n, channels, size, size), C-contiguous."""
    labels: npt.NDArray[np.int64]
    num_train: int
    """The first so many samples are the official training part, the others the test part."""
    num_classes: int
    mean: tuple[float, ...]
    """Of each channel, for pixels in [0, 1]; with `std` it normalizes, and is a convention."""
    std: tuple[float, ...]
    kind: Kind = "single"
    """What is asked of a sample. A text set has token numbers, (n, length), for images."""
    targets: npt.NDArray[Any] | None = None
    """The answers where a label is none: (n, num_classes) of 0 and 1, or (n, size, size) classes of
    pixels. `labels` then only say how samples are dealt."""
    words: int = 0
    """How many different token numbers a text set may have."""

    @property
    def task(self) -> Task:
        if self.kind == "text":
            length = self.images.shape[1]
            return Task(self.num_classes, kind="text", words=self.words, length=length)
        return Task(self.num_classes, self.images.shape[1], self.images.shape[2], self.kind)

    # All clients have this one task; `multitask.Mixed` answers otherwise.

    @property
    def tasks(self) -> tuple[tuple[str, Task], ...]:
        return ()

    def of(self, client: int) -> Dataset:
        """The client's own data set, to which `own` fits its rows, and the public set it sees."""
        return self

    def own(self, client: int, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return rows

    def public_of(self, client: int) -> Dataset | None:
        return self


def names() -> list[str]:
    """Known data sets; beside them, parquet:PATH reads any."""
    from raysim.data import loaders

    return sorted([*loaders.KNOWN, "shapes"])


def check(config: DataConfig) -> None:
    """Raise what `load` and `split` would, as far as it can be known without reading a file."""
    from raysim.data import loaders

    if config.tasks:
        from raysim.data import multitask

        multitask.check(config)
        return
    partition.validate(config)
    if config.image_size is not None and config.image_size < 1:
        raise ConfigError(f"--data.image-size must be at least 1, got {config.image_size}")
    if config.name == "shapes":
        if not 2 <= config.classes <= 100:
            raise ConfigError(f"--data.classes must lie in 2 .. 100, got {config.classes}")
        if config.samples < 2:
            raise ConfigError(f"--data.samples must be at least 2, got {config.samples}")
    elif config.name.startswith(PARQUET):
        loaders.find_parquet(Path(config.name.removeprefix(PARQUET)))
    elif config.name in loaders.KNOWN:
        loaders.find(config.name, config.root)
    else:
        raise unknown("data set", config.name, [*names(), "parquet:PATH"], "--data.name")


def load(config: DataConfig) -> Dataset:
    """Read the data set, from the cache if it was read before."""
    from raysim.data import loaders

    check(config)
    if config.name == "shapes":
        arrays = shapes.load(config.samples, config.classes, config.image_size or shapes.SIZE)
        return _dataset(config, arrays, config.samples * 5 // 6, config.classes)
    known = loaders.KNOWN.get(config.name)
    if known:
        source = loaders.find(config.name, config.root)
        size = config.image_size or known.image_size
    else:
        source = loaders.find_parquet(Path(config.name.removeprefix(PARQUET)))
        size = config.image_size

    def read() -> cache.Arrays:
        parts = source.read(size)
        return {**parts._asdict(), "num_train": np.array(parts.num_train)}

    kind = config.name if known else "parquet"
    arrays = cache.keep(f"{kind}-v1-{cache.key(source.files, kind, size)}", read)
    largest = int(arrays["labels"].max())
    if known and largest >= known.num_classes:
        row = int(arrays["labels"].argmax())
        raise DataError(
            f"{config.name} has {known.num_classes} classes, but sample {row} of "
            f"{source.files[0].parent} has label {largest}; get a fresh copy"
        )
    num_classes = known.num_classes if known else largest + 1
    return _dataset(config, arrays, int(arrays["num_train"]), num_classes)


def _dataset(config: DataConfig, arrays: cache.Arrays, num_train: int, num_classes: int) -> Dataset:
    images, labels = np.ascontiguousarray(arrays["images"]), arrays["labels"]
    images.setflags(write=False)
    labels.setflags(write=False)
    half = (0.5,) * images.shape[1]  # FedRE's normalization, for every set
    return Dataset(config.name, images, labels, num_train, num_classes, mean=half, std=half)
