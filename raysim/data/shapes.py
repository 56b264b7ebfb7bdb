"""The embedded data set: ten shapes in ten fillings, drawn at random places, sizes, angles and colors.

A stand-in that needs no file and behaves like a small photo set: no pixel tells a class by itself,
since any shape may be brighter or darker than what lies behind it, so a linear model fails where a
convolutional one learns. The images are the same in every run, whatever its seed.

Up to ten classes are shapes in random fillings; beyond, class c is shape c % 10 in filling c // 10.
Pixels are made of exactly rounded operations (no sine, no BLAS), so every machine draws the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from raysim.data import cache

SIZE = 32
BLOCK = 500  # samples drawn together; part of what the images are, like the seed
SEED = 20240229
NOISE = 0.05

Floats: TypeAlias = npt.NDArray[np.float32]
Field: TypeAlias = Callable[[Floats, Floats], Floats]


def _box(u: Floats, v: Floats, half_width: float, half_height: float) -> Floats:
    return np.maximum(np.abs(u) - half_width, np.abs(v) - half_height)


def _length(u: Floats, v: Floats) -> Floats:
    return np.sqrt(u * u + v * v)


def _star(u: Floats, v: Floats) -> Floats:
    """Two mirrors fold the plane onto one of ten half-arms, which is a half-plane."""
    u = np.abs(u)
    for x, y in ((0.809017, 0.587785), (-0.809017, 0.587785)):  # (cos, sin) of 36 degrees
        beyond = 2 * np.maximum(x * u - y * v, 0)
        u, v = u - x * beyond, v + y * beyond
    return 0.72 * (np.abs(u) - 0.0) + 0.69 * v - 0.0


SHAPES: tuple[Field, ...] = ()
