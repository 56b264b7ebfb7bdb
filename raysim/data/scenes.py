"""Embedded data for clients with different tasks: one to three shapes, some in front of others.

Each scene is an image, the class of what stands in front, which is the largest (single), the
classes that can be seen (multilabel), a class for each pixel (segment) and a caption, from which
what stands in front can be told (text). So image and text clients can share a public set of pairs.

A caption names the scene's shapes with one of three words each, and says who is in front of whom in
either order: "a red ball before a blue star" and "a blue star behind a red ball" are the same
scene. Word counts alone therefore give some 60 % of the answers, and word order all of them.

As `shapes` does, it draws the same on every machine, whatever the run's seed; another `stream` is
another set of scenes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from raysim.data import cache
from raysim.data.shapes import SHAPES, Floats

SIZE = 32
BLOCK = 500  # scenes drawn together
SEED = 20260201
MOST = 3  # shapes in a scene
SEEN = 12  # pixels of a 32 x 32 image that a shape must show to count as seen

NAMES: tuple[tuple[str, str, str], ...] = (
    ("disc", "ball", "coin"),
    ("square", "box", "tile"),
    ("triangle", "wedge", "arrowhead"),
    ("cross", "plus", "junction"),
    ("ring", "hoop", "loop"),
    ("star", "spark", "pentagram"),
    ("crescent", "moon", "sickle"),
    ("pair", "couple", "twins"),
)
CLASSES = len(NAMES)
COLORS = {
    "red": (0.85, 0.2, 0.2),
    "green": (0.2, 0.7, 0.25),
    "blue": (0.2, 0.3, 0.85),
    "yellow": (0.9, 0.85, 0.2),
    "purple": (0.6, 0.25, 0.7),
    "white": (0.95, 0.95, 0.95),
}


def load(num_samples: int, size: int = SIZE, stream: int = 0) -> cache.Arrays:
    """`images` (n, 3, size, size), `front` (n,), `seen` (n, classes) of 0 and 1, `masks`
    (n, size, size) with 0 for the background and a class plus 1 elsewhere, `captions` (n,)."""
    name = f"scenes-v1-{num_samples}-{size}-{stream}"
    return cache.keep(name, lambda: draw(num_samples, size, stream))


def draw(num_samples: int, size: int = SIZE, stream: int = 0) -> cache.Arrays:
    blocks = [_draw_block(start, size, stream) for start in range(0, num_samples, BLOCK)]
    return {
        name: np.concatenate([block[name] for block in blocks])[:num_samples] for name in blocks[0]
    }


def _draw_block(start: int, size: int, stream: int) -> cache.Arrays:
    rng = np.random.Generator(np.random.PCG64([SEED, stream, start]))
    count = rng.integers(1, MOST + 1, BLOCK)
    kinds = rng.permuted(np.tile(np.arange(CLASSES), (BLOCK, 1)), axis=1)[:, :MOST]
    colors = rng.permuted(np.tile(np.arange(len(COLORS)), (BLOCK, 1)), axis=1)[:, :MOST]
    palette = np.array(list(COLORS.values()), dtype=np.float32)
    behind = rng.uniform(0.25, 0.6, (BLOCK, 3, 1, 1)).astype(np.float32)
    pixels = np.broadcast_to(behind, (BLOCK, 3, size, size)).copy()
    masks = np.zeros((BLOCK, size, size), dtype=np.uint8)
    for place in reversed(range(MOST)):  # place 0 is in front, so it is drawn last
        radii = (0.32, 0.44) if place else (0.48, 0.62)
        inside = _shape(rng, kinds[:, place], size, radii) * (place < count)[:, None, None]
        color = palette[colors[:, place]] + rng.uniform(-0.08, 0.08, (BLOCK, 3))
        color = color.astype(np.float32)[:, :, None, None]
        pixels += inside[:, None] * (color - pixels)
        masks = np.where(inside > 0.5, kinds[:, place, None, None] + 1, masks).astype(np.uint8)
    pixels += 0.06 * rng.standard_normal(pixels.shape, dtype=np.float32)
    enough = SEEN * size * size / 1024
    shown = [(masks == kind + 1).sum(axis=(1, 2)) >= enough for kind in range(CLASSES)]
    return {
        "images": np.clip(pixels * 255 + 0.5, 0, 255).astype(np.uint8),
        "front": kinds[:, 0].astype(np.int64),
        "seen": np.stack(shown, axis=1).astype(np.uint8),
        "masks": masks,
        "captions": _captions(rng, count, kinds, colors),
    }


def _shape(
    rng: np.random.Generator, kinds: npt.NDArray[np.int64], size: int, radii: tuple[float, float]
) -> Floats:
    """How much of each pixel lies inside a shape of the given kind, anywhere and at any angle."""
    radius, left, top = (
        rng.uniform(low, high, (BLOCK, 1, 1)).astype(np.float32)
        for low, high in (radii, (-0.45, 0.45), (-0.45, 0.45))
    )
    axis = ((2 * np.arange(size) + 1) / size - 1).astype(np.float32)
    x, y = axis - left, axis[:, None] - top
    angle = rng.uniform(0, 2 * np.pi, (BLOCK, 1, 1))
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    u, v = x * cos + y * sin, y * cos - x * sin
    distance = np.empty((BLOCK, size, size), dtype=np.float32)
    for kind in range(CLASSES):
        rows = np.flatnonzero(kinds == kind)
        distance[rows] = SHAPES[kind](u[rows] / radius[rows], v[rows] / radius[rows])
    inside: Floats = np.clip(0.5 - distance * radius * (size / 2), 0, 1)
    return inside  # an edge is one pixel wide


def _captions(rng: np.random.Generator, count: Any, kinds: Any, colors: Any) -> Any:
    names = list(COLORS)
    synonym = rng.integers(3, size=(BLOCK, MOST))
    backwards = rng.random(BLOCK) < 0.5
    captions = []
    for row in range(BLOCK):
        things = [
            f"a {names[colors[row, i]]} {NAMES[kinds[row, i]][synonym[row, i]]}"
            for i in range(count[row])
        ]
        if backwards[row]:
            captions.append(" behind ".join(reversed(things)))
        else:
            captions.append(" before ".join(things))
    return np.array(captions)
