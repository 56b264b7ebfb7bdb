"""The IDX files of MNIST and its kin, plain or gzipped."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from raysim.data import pictures
from raysim.data.source import Parts, Source
from raysim.errors import DataError

NAMES = tuple(
    f"{part}-{content}-ubyte"
    for part in ("train", "t10k")
    for content in ("images-idx3", "labels-idx1")
)


def find(folder: Path) -> Source | None:
    files = []
    for name in NAMES:
        forms = [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
        if not forms:
            return None
        files.append(forms[0])
    return Source(tuple(files), lambda size: read(files, size))


def read(files: list[Path], size: int | None) -> Parts:
    arrays = [read_array(file) for file in files]
    for file, images, labels in zip(files[::2], arrays[::2], arrays[1::2], strict=True):
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
            raise DataError(
                f"{file} has shape {images.shape}, and its labels {labels.shape}; "
                "expected (n, height, width) and (n,): get fresh copies of both"
            )
    pooled = pictures.resize(np.concatenate(arrays[::2])[:, None], size)
    return Parts(pooled, np.concatenate(arrays[1::2]).astype(np.int64), len(arrays[0]))


def read_array(file: Path) -> npt.NDArray[np.uint8]:
    """Magic number 0, 0, 8 (bytes), rank; the big-endian dimensions; the bytes."""
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read {file} ({error}); get a fresh copy") from error
    rank = raw[3] if raw[:3] == b"\0\0\x08" and len(raw) > 3 else 0
    shape = tuple(np.frombuffer(raw[4 : 4 + 4 * rank], dtype=">u4").tolist())
    if not rank or len(raw) != 4 + 4 * rank + math.prod(shape):
        raise DataError(
            f"{file} is not a whole IDX file of bytes (it starts with {raw[:4].hex(' ')}, says "
            f"{shape} and has {len(raw)} bytes); get a fresh copy"
        )
    return np.frombuffer(raw, dtype=np.uint8, offset=4 + 4 * rank).reshape(shape)
