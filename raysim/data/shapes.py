"""The embedded data set: ten shapes in ten fillings, anywhere, at any angle, in any color.

It needs no file and behaves like a small photo set. A shape may be brighter or darker than what
lies behind it, so no pixel tells its class: a linear model gets about a third right, from
backgrounds that lean to a hue of the class, and a convolutional one over 90 %.

Up to ten classes are shapes in random fillings; beyond, class c is shape c % 10 in filling c // 10.
The images do not depend on the run's seed, and the first ones not on how many there are. Pixels
come from exactly rounded operations (no sine, no matrix product), so all machines draw the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from raysim.data import cache

SIZE = 32
BLOCK = 500  # samples drawn together
SEED = 20240229

Floats: TypeAlias = npt.NDArray[Any]  # float32, which type checkers lose track of
Field: TypeAlias = Callable[[Floats, Floats], Floats]


def load(num_samples: int, num_classes: int, size: int = SIZE) -> cache.Arrays:
    name = f"shapes-v1-{num_classes}-{num_samples}" + ("" if size == SIZE else f"-{size}")
    return cache.keep(name, lambda: draw(num_samples, num_classes, size))


def draw(num_samples: int, num_classes: int, size: int = SIZE) -> cache.Arrays:
    images = np.empty((num_samples, 3, size, size), dtype=np.uint8)
    labels = np.empty(num_samples, dtype=np.int64)
    for start in range(0, num_samples, BLOCK):
        rows = slice(start, min(start + BLOCK, num_samples))
        block = _draw_block(start, num_classes, size)
        images[rows], labels[rows] = (part[: rows.stop - start] for part in block)
    return {"images": images, "labels": labels}


def _draw_block(
    start: int, num_classes: int, size: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    rng = np.random.Generator(np.random.PCG64([SEED, start]))
    labels = (start + rng.permutation(BLOCK)) % num_classes
    shapes, fillings = labels % len(SHAPES), labels // len(SHAPES)
    if num_classes <= len(SHAPES):
        fillings = rng.integers(len(FILLINGS), size=BLOCK) * (rng.random(BLOCK) < 0.6)
    radius = _uniform(rng, 0.43, 0.73)
    u, v = _place(rng, size)
    shape = np.empty((BLOCK, size, size), dtype=np.float32)  # 1 inside, 0 outside
    filling = np.empty_like(shape)  # 0: the shape's first color, 1: its second
    for kind, distance in enumerate(SHAPES):
        rows = np.flatnonzero(shapes == kind)
        shape[rows] = distance(u[rows] / radius[rows], v[rows] / radius[rows])
    for kind, pattern in enumerate(FILLINGS):
        rows = np.flatnonzero(fillings == kind)
        filling[rows] = pattern(16 * u[rows], 16 * v[rows])
    shape = np.clip(0.5 - shape * radius * (size / 2), 0, 1)  # an edge is one pixel wide
    behind, first, second = _colors(rng, shapes)
    pixels = rng.standard_normal((BLOCK, 3, size, size), dtype=np.float32)
    pixels *= 0.065
    pixels += behind
    pixels += _shade(rng, size)[:, None]
    pixels += shape[:, None] * (first - behind)
    pixels += (shape * filling)[:, None] * (second - first)
    return np.clip(pixels * 255 + 0.5, 0, 255).astype(np.uint8), labels


def _uniform(rng: np.random.Generator, low: float, high: float) -> Floats:
    """One number a sample, to be broadcast over its pixels."""
    return rng.uniform(low, high, (BLOCK, 1, 1)).astype(np.float32)


def _axis(size: int) -> Floats:
    """Middles of the pixels between -1 and 1."""
    return ((2 * np.arange(size) + 1) / size - 1).astype(np.float32)


def _place(rng: np.random.Generator, size: int) -> tuple[Floats, Floats]:
    """Every pixel in the frame of the sample's shape, moved and turned at random."""
    x = _axis(size) - _uniform(rng, -0.37, 0.37)
    y = _axis(size)[:, None] - _uniform(rng, -0.37, 0.37)
    angle = rng.uniform(0, 2 * np.pi, (BLOCK, 1, 1))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    return x * cos + y * sin, y * cos - x * sin


def _colors(rng: np.random.Generator, shapes: npt.NDArray[np.int64]) -> list[Any]:
    """Behind the shape, and its two own, each (BLOCK, 3, 1, 1). Brightness keeps them apart."""
    light = np.tile([0.2, 0.8, 0.5], (BLOCK, 1))
    dark_on_light = rng.random(BLOCK) < 0.35
    light[dark_on_light] = [0.8, 0.2, 0.5]
    light += rng.uniform(-0.12, 0.12, light.shape)
    tint = rng.uniform(-0.25, 0.25, (BLOCK, 3, 3))
    tint -= tint.mean(axis=2, keepdims=True)
    hue = 3 * shapes[:, None] * (2 * np.pi / len(SHAPES))
    tint[:, 0] += 0.08 * np.cos(hue) * [2, -1, -1] + 0.14 * np.sin(hue) * [0, 1, -1]
    colors = (light[:, :, None] + tint).astype(np.float32)
    return [colors[:, i, :, None, None] for i in range(3)]


def _shade(rng: np.random.Generator, size: int) -> Floats:
    axis = _axis(size)
    shade: Floats = _uniform(rng, -0.2, 0.2) * axis + _uniform(rng, -0.2, 0.2) * axis[:, None]
    return shade


def _length(u: Floats, v: Floats) -> Floats:
    length: Floats = np.sqrt(u * u + v * v)
    return length


def _box(u: Floats, v: Floats, half_width: float, half_height: float) -> Floats:
    distance: Floats = np.maximum(np.abs(u) - half_width, np.abs(v) - half_height)
    return distance


def _triangle(u: Floats, v: Floats) -> Floats:
    return np.maximum(0.866 * np.abs(u) - 0.5 * (v - 0.15), v - 0.15) - 0.52


def _cross(u: Floats, v: Floats) -> Floats:
    return np.minimum(_box(u, v, 0.95, 0.28), _box(u, v, 0.28, 0.95))


def _star(u: Floats, v: Floats) -> Floats:
    """Mirrors fold the plane onto one of ten half-arms, which ends at a straight edge."""
    u = np.abs(u)
    for x in (0.809, -0.809):  # cosine of 36 degrees; 0.588 is the sine
        beyond = 2 * np.maximum(x * u - 0.588 * v, 0)
        u, v = u - x * beyond, v + 0.588 * beyond
    return 0.35 * (v - 1) + 0.937 * np.abs(u)


def _crescent(u: Floats, v: Floats) -> Floats:
    return np.maximum(_length(u, v) - 0.9, 0.7 - _length(u - 0.45, v))


def _tee(u: Floats, v: Floats) -> Floats:
    return np.minimum(_box(u, v - 0.6, 0.85, 0.25), _box(u, v + 0.15, 0.25, 0.8))


# Distance to the edge, negative inside, of a shape that fills the square from -1 to 1.
SHAPES: tuple[Field, ...] = (
    lambda u, v: _length(u, v) - 0.85,  # disc
    lambda u, v: _box(u, v, 0.75, 0.75),  # square
    _triangle,
    _cross,
    lambda u, v: np.abs(_length(u, v) - 0.7) - 0.2,  # ring
    _star,
    _crescent,
    lambda u, v: _length(np.abs(u) - 0.52, v) - 0.4,  # two discs
    _tee,
    lambda u, v: _box(u, np.abs(v) - 0.52, 0.85, 0.22),  # two bars
)


def _wave(x: Floats) -> Floats:
    """A triangle wave between 0 and 1 of period 1, highest at whole numbers."""
    return 2 * np.abs(x - np.floor(x) - 0.5)


def _sharp(x: Floats, slope: float = 3.0) -> Floats:
    return np.clip((x - 0.5) * slope + 0.5, 0, 1)


# Which of its two colors a shape has, in pixels of a 32 x 32 image around its middle.
FILLINGS: tuple[Field, ...] = (
    lambda x, y: np.zeros_like(x),  # plain
    lambda x, y: _sharp(_wave(x / 7)),  # stripes
    lambda x, y: _sharp(8 * (_wave(x / 8) - 0.5) * (_wave(y / 8) - 0.5) + 0.5),  # checks
    lambda x, y: _sharp(1.1 - 1.4 * _length(_wave(x / 6), _wave(y / 6))),  # dots
    lambda x, y: _sharp(_wave(_length(x, y) / 6)),  # rings
    lambda x, y: np.clip(0.7 * x + 0.5, 0, 1),  # two halves
    lambda x, y: _sharp(_wave(x / 3.5), 2),  # fine stripes
    lambda x, y: _sharp(1.1 - 1.6 * np.minimum(_wave(x / 6 + 0.5), _wave(y / 6 + 0.5))),  # a grid
    lambda x, y: np.clip(5 - _length(x, y), 0, 1),  # a core
    lambda x, y: np.clip(0.5 + y / 20, 0, 1),  # a gradient
)
