"""Image data sets in Parquet files, as data hubs distribute them.

One column holds encoded pictures (a struct `{bytes, path}`, or plain binary), another integer
labels. Both are found by their type; among several of a type, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow
import pyarrow.compute
import pyarrow.parquet

from raysim.data import pictures
from raysim.data.source import Parts, Source
from raysim.errors import DataError

IMAGES = ("img", "image")
LABELS = ("fine_label", "label", "labels")
TESTS = ("test", "validation", "valid", "val")


class Files(NamedTuple):
    """The shards of a data set; `test` is empty when it has no official test part."""

    train: tuple[Path, ...]
    test: tuple[Path, ...]


def find(place: Path) -> Files | None:
    """The shards in a folder (or its `data` subfolder): `train.parquet`, or
    `train-00000-of-00002.parquet` and so on. A single file is a training part."""
    if place.is_file():
        return Files((place,), ())
    for folder in (place, place / "data"):
        train = _shards(folder, "train")
        if train:
            tests = (_shards(folder, part) for part in TESTS)
            return Files(train, next(filter(None, tests), ()))
    return None


def _shards(folder: Path, part: str) -> tuple[Path, ...]:
    whole = folder / f"{part}.parquet"
    return (whole,) if whole.is_file() else tuple(sorted(folder.glob(f"{part}-*.parquet")))


def source(files: Files, channels: int | None) -> Source:
    return Source(files.train + files.test, lambda size: _read(files, size, channels))


def _read(files: Files, size: int | None, channels: int | None) -> Parts:
    encoded: list[bytes] = []
    names: list[tuple[Path, int]] = []  # of every row: its file and place there
    labels = []
    num_train = 0
    for file in files.train + files.test:
        rows, row_labels = _read_file(file)
        encoded += rows
        names += [(file, row) for row in range(len(rows))]
        labels.append(row_labels)
        num_train += len(rows) if file in files.train else 0
    images = pictures.decode(
        encoded, lambda row: f"row {names[row][1]} of {names[row][0]}", size, channels
    )
    return Parts(images, np.concatenate(labels), num_train)


def _read_file(file: Path) -> tuple[list[bytes], npt.NDArray[np.int64]]:
    try:
        table = pyarrow.parquet.ParquetFile(file)
        schema = table.schema_arrow
        image, label = _image_column(schema, file), _label_column(schema, file)
        columns = table.read(columns=[image, label])
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(
            f"{file} is not a readable Parquet file ({error}); get a fresh copy"
        ) from error
    encoded = columns[image]
    if pyarrow.types.is_struct(encoded.type):
        encoded = pyarrow.compute.struct_field(encoded, "bytes")
    for name, values in ((image, encoded), (label, columns[label])):
        if values.null_count:
            row = values.is_null().to_pylist().index(True)
            raise DataError(f"row {row} of {file} has no {name}; remove it, or fill it in")
    if not len(encoded):
        raise DataError(f"{file} has no rows; get a fresh copy")
    labels = columns[label].to_numpy().astype(np.int64)
    if labels.min() < 0:
        row = int(labels.argmin())
        raise DataError(
            f"row {row} of {file} has {label} {labels[row]}; labels count from 0, and hubs write "
            "-1 where they hold them back: leave that file out"
        )
    return encoded.to_pylist(), labels


def _image_column(schema: Any, file: Path) -> str:
    def fits(kind: Any) -> bool:
        if pyarrow.types.is_struct(kind):
            index = kind.get_field_index("bytes")
            return index >= 0 and fits(kind.field(index).type)
        return bool(pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind))

    return _pick(schema, fits, IMAGES, "encoded pictures (a struct {bytes, path}, or binary)", file)


def _label_column(schema: Any, file: Path) -> str:
    return _pick(schema, pyarrow.types.is_integer, LABELS, "labels (one integer a row)", file)


def _pick(
    schema: Any, fits: Callable[[Any], bool], names: Sequence[str], what: str, file: Path
) -> str:
    found = [field.name for field in schema if fits(field.type)]
    named = [name for name in names if name in found]
    if named:
        return named[0]
    if len(found) == 1:
        return str(found[0])
    columns = ", ".join(f"{field.name}: {field.type}" for field in schema)
    problem, fix = ("several columns", "call it") if found else ("no column", "expected it as")
    raise DataError(f"{file} has {problem} of {what} in [{columns}]; {fix} {' or '.join(names)}")
