"""TinyImageNet as its zip file unpacks.

The trap: `val` keeps all its pictures in one folder, and their classes in `val_annotations.txt`.
Read as class folders, which is what torchvision's ImageFolder does, all would be of one class.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from raysim.data import pictures
from raysim.data.source import Parts, Source
from raysim.errors import DataError

FOLDER = "tiny-imagenet-200"


def find(folder: Path) -> Source | None:
    if not (folder / "train").is_dir() or not (folder / "val").is_dir():
        return None
    annotations = folder / "val" / "val_annotations.txt"
    if not annotations.is_file():
        raise DataError(
            f"{annotations} is missing, which says the classes of the pictures in val/images; "
            f"unpack {FOLDER}.zip anew"
        )
    classes = sorted(path.name for path in (folder / "train").iterdir() if path.is_dir())
    folders = [folder / "train" / name / "images" for name in classes]
    files = (annotations, folder / "val" / "images", *folders)
    for file in files:
        if not file.exists():
            raise DataError(f"{file} is missing; unpack {FOLDER}.zip anew")
    return Source(files, lambda size: _read(folder, classes, size))


def _read(folder: Path, classes: list[str], size: int | None) -> Parts:
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted((folder / "train" / name / "images").glob("*.JPEG"))
        paths += found
        labels += [label] * len(found)
    num_train = len(paths)
    annotations = folder / "val" / "val_annotations.txt"
    for number, line in enumerate(annotations.read_text().splitlines(), start=1):
        picture, name, *_ = [*line.split("\t"), ""]
        path = folder / "val" / "images" / picture
        if name not in classes or not path.is_file():
            raise DataError(
                f"line {number} of {annotations} says that {picture!r} is a {name!r}, but there is "
                f"no such picture or class; unpack {FOLDER}.zip anew"
            )
        paths.append(path)
        labels.append(classes.index(name))
    if not num_train:
        raise DataError(f"{folder / 'train'} holds no *.JPEG; unpack {FOLDER}.zip anew")
    images = pictures.decode(paths, lambda row: str(paths[row]), size, channels=3)
    return Parts(images, np.array(labels, dtype=np.int64), num_train)
