"""Data sets that live in files: where each is looked for, and how to get it. Nothing is fetched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from raysim.data import idx, parquet, tiny_imagenet, torchvision_files
from raysim.data.source import Source
from raysim.errors import DataError

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


@dataclass(frozen=True)
class Known:
    """What is known of a data set before it is found."""

    num_classes: int
    channels: int
    get: str
    """How to get it, other than as Parquet files."""
    torchvision: str = ""
    """Its class in torchvision.datasets, if that reads it."""
    image_size: int | None = None
    """Default of --data.image-size; None keeps the size of the files."""


def _download(call: str) -> str:
    return f'with what this leaves there: python -c "from torchvision.datasets import *; {call}"'


KNOWN = {
    "cifar10": Known(10, 3, _download("CIFAR10('FOLDER', download=True)"), "CIFAR10"),
    "cifar100": Known(100, 3, _download("CIFAR100('FOLDER', download=True)"), "CIFAR100"),
    "fashion_mnist": Known(
        10,
        1,
        _download("FashionMNIST('FOLDER', download=True)")
        + ", or, on Debian, just: apt-get install dataset-fashion-mnist",
        image_size=32,
    ),
    "svhn": Known(
        10, 3, _download("[SVHN('FOLDER', s, download=True) for s in ('train', 'test')]"), "SVHN"
    ),
    "tiny_imagenet": Known(200, 3, f"with {tiny_imagenet.FOLDER}/ as its zip file unpacks"),
}


def find(name: str, root: Path | None) -> Source:
    """Where a known set is; a DataError that says how to get it if it is nowhere."""
    if root is not None and not root.is_dir():
        raise DataError(f"--data.root {root} is not a folder; {_needs(name)}")
    source = _look(name, root) if root is not None else None
    if source is None and name == "fashion_mnist":
        source = idx.find(DEBIAN)
    if source is None:
        place = "--data.root is not set" if root is None else f"it is not in --data.root {root}"
        raise DataError(f"{name} was not found: {place}; {_needs(name)}")
    return source


def _needs(name: str) -> str:
    return (
        f"{name} needs --data.root FOLDER with {name}/train.parquet and {name}/test.parquet, or "
        f"{KNOWN[name].get}"
    )


def _look(name: str, root: Path) -> Source | None:
    """Parquet files first, then the set's own form."""
    files = parquet.find(root / name)
    if files is not None:
        if not files.test:
            raise DataError(f"{files.train[0]} is there, but no test.parquet beside it")
        return parquet.source(files, KNOWN[name].channels)
    if KNOWN[name].torchvision:
        return torchvision_files.find(root, KNOWN[name].torchvision)
    if name == "fashion_mnist":
        folders = (root / "FashionMNIST" / "raw", root / "fashion_mnist", root / "fashion-mnist")
        return next(filter(None, map(idx.find, folders)), None)
    folders = (root / tiny_imagenet.FOLDER, root / name / tiny_imagenet.FOLDER, root / name)
    return next(filter(None, map(tiny_imagenet.find, folders)), None)


def find_parquet(path: Path) -> Source:
    """The set of `--data.name parquet:PATH`. A single file has no official test part."""
    files = parquet.find(path)
    if files is None:
        found = "has no train.parquet" if path.is_dir() else "does not exist"
        raise DataError(
            f"{path} {found}; parquet:PATH takes a Parquet file, or a folder with train.parquet "
            "and test.parquet (or train-00000-of-00001.parquet and so on)"
        )
    return parquet.source(files, None)
