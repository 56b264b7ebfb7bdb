"""Encoded pictures into one array, with Pillow on all cores: it decodes outside Python's lock."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from raysim.errors import DataError

Images: TypeAlias = npt.NDArray[np.uint8]
Encoded: TypeAlias = bytes | Path

GRAY = ("1", "L", "LA")
COLOR = ("RGB", "RGBA", "P", "CMYK", "YCbCr")
CHUNK = 250  # pictures a thread takes at a time


def decode(
    pictures: Sequence[Encoded],
    where: Callable[[int], str],
    size: int | None = None,
    channels: int | None = None,
) -> Images:
    """All pictures as (n, channels, size, size).

    `where` names a picture for an error. Without `size` they must be square and of one size;
    without `channels` they stay gray if all are.
    """
    if not pictures:
        return np.empty((0, channels or 1, size or 1, size or 1), dtype=np.uint8)
    if channels is None:
        gray = _each(lambda row: _open(pictures[row], where(row)).mode in GRAY, len(pictures))
        channels = 1 if all(gray) else 3
    expected = _square(_open(pictures[0], where(0)), where(0)) if size is None else size
    images = np.empty((len(pictures), channels, expected, expected), dtype=np.uint8)

    def place(row: int) -> None:
        picture = _open(pictures[row], where(row))
        if size is None and picture.size != (expected, expected):
            raise DataError(
                f"{where(row)} is {_shape(picture)}, but {where(0)} is {expected} x {expected}; "
                f"--data.image-size {expected} makes all of them that"
            )
        images[row] = _pixels(picture, channels, expected, where(row))

    _each(place, len(pictures))
    return images


def resize(images: Images, size: int | None) -> Images:
    """The same images with sides of `size` pixels; None leaves them alone."""
    if size is None or images.shape[2:] == (size, size):
        return images
    resized = np.empty((*images.shape[:2], size, size), dtype=np.uint8)

    def place(row: int) -> None:
        for channel, plane in enumerate(images[row]):
            picture = Image.fromarray(plane).resize((size, size), Image.Resampling.BILINEAR)
            resized[row, channel] = picture

    _each(place, len(images))
    return resized


def _each(call: Callable[[int], object], count: int) -> list[object]:
    def run(start: int) -> list[object]:
        return [call(row) for row in range(start, min(start + CHUNK, count))]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        chunks: Iterator[list[object]] = pool.map(run, range(0, count, CHUNK))
        return [result for chunk in chunks for result in chunk]


def _open(encoded: Encoded, where: str) -> Image.Image:
    """The picture, its pixels not yet decoded."""
    try:
        raw = encoded if isinstance(encoded, bytes) else encoded.read_bytes()
        return Image.open(io.BytesIO(raw))
    except (OSError, ValueError, SyntaxError) as error:
        raise _broken(where, error) from error


def _pixels(picture: Image.Image, channels: int, size: int, where: str) -> Images:
    if picture.mode not in GRAY + COLOR:
        raise DataError(
            f"{where} has pixels of mode {picture.mode}; raysim reads 8-bit gray and color pictures"
        )
    try:
        if "transparency" in picture.info:
            picture = picture.convert("RGBA")
        picture = picture.convert("L" if channels == 1 else "RGB")
        if picture.size != (size, size):
            picture = picture.resize((size, size), Image.Resampling.BILINEAR)
        pixels = np.asarray(picture)
    except Exception as error:  # decoders of broken pictures raise whatever they stumble over
        raise _broken(where, error) from error
    return pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)


def _square(picture: Image.Image, where: str) -> int:
    if picture.width != picture.height:
        raise DataError(
            f"{where} is {_shape(picture)}, and raysim learns from square images; "
            f"--data.image-size {min(picture.size)} makes all of them that"
        )
    return picture.width


def _shape(picture: Image.Image) -> str:
    return f"{picture.width} x {picture.height}"


def _broken(where: str, error: Exception) -> DataError:
    return DataError(f"{where} is not a readable picture ({error}); get a fresh copy of the file")
