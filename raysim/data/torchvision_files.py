"""CIFAR and SVHN as torchvision leaves them on disk; torchvision reads and verifies them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from raysim.data import pictures
from raysim.data.source import Parts, Source
from raysim.errors import DataError

FILES = {
    "CIFAR10": ("cifar-10-batches-py/data_batch_1", "cifar-10-batches-py/test_batch"),
    "CIFAR100": ("cifar-100-python/train", "cifar-100-python/test"),
    "SVHN": ("train_32x32.mat", "test_32x32.mat"),
}


def find(root: Path, kind: str) -> Source | None:
    """`kind` is the set's class in torchvision.datasets."""
    files = tuple(root / name for name in FILES[kind])
    if not all(file.is_file() for file in files):
        return None
    return Source(files, lambda size: _read(root, kind, size))


def _read(root: Path, kind: str, size: int | None) -> Parts:
    from zoo.torchvision_shim import import_torchvision  # slow to import, so only when needed

    datasets = import_torchvision().datasets
    try:
        if kind == "SVHN":
            parts = [datasets.SVHN(root, split=split) for split in ("train", "test")]
        else:
            parts = [getattr(datasets, kind)(root, train=train) for train in (True, False)]
    except ImportError as error:
        raise DataError(f"torchvision cannot read {kind} ({error}); pip install scipy") from error
    except Exception as error:  # a torn pickle or .mat file raises whatever it stumbles over
        raise DataError(
            f"torchvision cannot read {kind} in {root} ({error}); get fresh copies of its files"
        ) from error
    images = np.concatenate([_images(part.data) for part in parts])
    labels = np.concatenate([_labels(part) for part in parts])
    return Parts(pictures.resize(images, size), labels, len(parts[0].data))


def _images(data: Any) -> pictures.Images:
    """SVHN's have their channels first, CIFAR's last."""
    return data if data.shape[1] == 3 else np.ascontiguousarray(data.transpose(0, 3, 1, 2))


def _labels(part: Any) -> Any:
    return np.asarray(part.labels if hasattr(part, "labels") else part.targets, dtype=np.int64)
