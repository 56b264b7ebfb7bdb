"""Parquet files of other tasks than single labels, as in a folder of --data.root:

`coco_multilabel/{train,test}.parquet`  `image`, `labels` (a list of classes), with `names.json`
`pets/{train,test}.parquet`             `image`, `mask` (1 animal, 2 background, 3 edge), `label`
`text/trec_{train,test}.parquet`        `text`, `label`
`text/sst2_{train,test}.parquet`        `text`, `label`
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image

from raysim.data import cache, pictures
from raysim.errors import DataError

PARTS = ("train", "test")
FILES = {
    "coco_multilabel": "coco_multilabel/{}.parquet",
    "pets": "pets/{}.parquet",
    "trec": "text/trec_{}.parquet",
    "sst2": "text/sst2_{}.parquet",
}


def find(name: str, root: Path | None) -> tuple[Path, Path]:
    """The training and the test file of a set; a DataError that says what is wanted."""
    wanted = " and ".join(FILES[name].format(part) for part in PARTS)
    if root is None:
        raise DataError(f"{name} needs --data.root FOLDER with {wanted}")
    train, test = (root / FILES[name].format(part) for part in PARTS)
    for file in (train, test):
        if not file.is_file():
            raise DataError(f"{file} does not exist; {name} needs --data.root FOLDER with {wanted}")
    return train, test


def read(name: str, root: Path | None, size: int) -> cache.Arrays:
    """The arrays of a set, training part first, from the cache if they were read before: `labels`,
    `num_train`, and `images` with `targets` or `captions`, whatever it has."""
    files = find(name, root)
    reader = {"coco_multilabel": _coco, "pets": _pets}.get(name, _text)
    settings = size if name in ("coco_multilabel", "pets") else None
    key = cache.key(files, name, settings)
    return cache.keep(f"{name}-v1-{key}", lambda: reader(files, size))


def _coco(files: tuple[Path, Path], size: int) -> cache.Arrays:
    """A picture counts, when pictures are dealt, as one of the rarest of its classes."""
    names = _names(files[0].with_name("names.json"))
    columns = _columns(files, {"image": "pictures", "labels": "lists of classes"})
    targets = np.zeros((len(columns["labels"]), len(names)), dtype=np.uint8)
    for row, classes in enumerate(columns["labels"]):
        if any(not 0 <= label < len(names) for label in classes):
            raise DataError(f"row {row} of {files[0].parent} has classes {classes}, beyond names")
        targets[row, classes] = 1
    rarity = np.where(targets > 0, targets.sum(axis=0, dtype=np.int64), len(targets) + 1)
    captions = [" and ".join(f"a {names[label]}" for label in one) for one in columns["labels"]]
    return {
        "images": _images(columns["image"], files, size),
        "labels": rarity.argmin(axis=1).astype(np.int64),
        "targets": targets,
        "captions": np.array(captions),
        "num_train": columns["num_train"],
    }


def _pets(files: tuple[Path, Path], size: int) -> cache.Arrays:
    columns = _columns(files, {"image": "pictures", "mask": "pictures", "label": "classes"})
    masks = np.empty((len(columns["mask"]), size, size), dtype=np.uint8)
    for row, encoded in enumerate(columns["mask"]):
        picture = Image.open(io.BytesIO(encoded["bytes"]))
        masks[row] = np.asarray(picture.resize((size, size), Image.Resampling.NEAREST))
    if masks.min() < 1 or masks.max() > 3:
        raise DataError(f"{files[0].parent} has masks with other values than 1, 2 and 3")
    return {
        "images": _images(columns["image"], files, size),
        "labels": np.array(columns["label"], dtype=np.int64),
        "targets": masks - 1,
        "num_train": columns["num_train"],
    }


def _text(files: tuple[Path, Path], size: int) -> cache.Arrays:
    columns = _columns(files, {"text": "sentences", "label": "classes"})
    return {
        "captions": np.array(columns["text"]),
        "labels": np.array(columns["label"], dtype=np.int64),
        "num_train": columns["num_train"],
    }


def _columns(files: tuple[Path, Path], wanted: dict[str, str]) -> dict[str, Any]:
    """Whole columns of both files, one after the other."""
    found: dict[str, Any] = {name: [] for name in wanted}
    sizes = []
    for file in files:
        try:
            table = pyarrow.parquet.read_table(file)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{file} is not a readable Parquet file ({error})") from error
        for name, what in wanted.items():
            if name not in table.column_names:
                raise DataError(f"{file} has no column {name} of {what}")
            if table[name].null_count:
                raise DataError(f"{file} has rows without {name}; remove them, or fill them in")
            found[name] += table[name].to_pylist()
        sizes.append(table.num_rows)
    return {**found, "num_train": np.array(sizes[0])}


def _images(encoded: list[dict[str, Any]], files: tuple[Path, Path], size: int) -> Any:
    place = files[0].parent
    return pictures.decode(
        [one["bytes"] for one in encoded], lambda r: f"row {r} of {place}", size, 3
    )


def _names(file: Path) -> list[str]:
    try:
        names: list[str] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{file} must list the names of the classes ({error})") from error
    return names
