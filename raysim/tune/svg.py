"""What figures are made of: scales, colors, and the elements of an SVG."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from raysim.tune import metrics
from raysim.tune.ranking import Row, number

INK, SOFT, LINE, MAIN = "#1f2430", "#667085", "#d9dde5", "#2563a8"
_SCALE = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
"""Viridis: even in lightness, and readable to the color-blind."""


class Axis:
    """Numbers to places."""

    def __init__(
        self, values: Sequence[float], start: float, end: float, logarithmic: bool = False
    ) -> None:
        self._log = logarithmic
        low, high = (self._at(pick(values)) for pick in (min, max))
        room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        self._low, self._high = low - room, high + room
        self._start, self._end = start, end

    def _at(self, value: float) -> float:
        return math.log10(value) if self._log else value

    def __call__(self, value: float) -> float:
        share = (self._at(value) - self._low) / (self._high - self._low)
        return self._start + share * (self._end - self._start)

    def ticks(self, known: Sequence[float] = ()) -> list[float]:
        """The values themselves when they are few, else round numbers."""
        few = sorted(set(known))
        if 1 < len(few) <= 8:
            return few
        if self._log:
            decades = range(math.ceil(self._low), math.floor(self._high) + 1)
            return [10.0**power for power in decades] or few
        rough = (self._high - self._low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough)
        first, last = math.ceil(self._low / step), math.floor(self._high / step)
        return [round(i * step, 12) for i in range(first, last + 1)]


class Names:
    """Names to places, in the order given."""

    def __init__(self, values: Sequence[Any], start: float, end: float) -> None:
        gap = (end - start) / max(1, len(values) - 1)
        self._places = [(value, start + i * gap) for i, value in enumerate(values)]

    def __call__(self, value: Any) -> float:
        return next(place for known, place in self._places if known == value)

    def ticks(self, known: Sequence[Any] = ()) -> list[Any]:
        return [value for value, _ in self._places]


class Color:
    """From the worst to the best value."""

    def __init__(self, rows: Sequence[Row], metric: str) -> None:
        values = [row.mean for row in rows]
        self._metric = metric
        self._worst, self._best = min(values), max(values)
        if metrics.mode(metric) == "min":
            self._worst, self._best = self._best, self._worst

    def _share(self, value: float) -> float:
        span = self._best - self._worst
        return (value - self._worst) / span if span else 1.0

    def __call__(self, value: float) -> str:
        return _shade(self._share(value))

    def ink(self, value: float) -> str:
        return "#ffffff" if self._share(value) < 0.6 else "#101418"

    def key(self, x: float, y: float, height: float) -> list[str]:
        height = max(60, height)
        steps = 24
        parts = [
            f'<rect x="{x}" y="{y + height * i / steps:.2f}" width="12" '
            f'height="{height / steps + 0.5:.2f}" fill="{_shade(1 - i / (steps - 1))}"/>'
            for i in range(steps)
        ]
        best, worst = number(self._metric, self._best), number(self._metric, self._worst)
        return [*parts, label(x + 20, y + 10, best, color=SOFT),
                label(x + 20, y + height, worst, color=SOFT)]  # fmt: skip


def _shade(share: float) -> str:
    place = min(max(share, 0.0), 1.0) * (len(_SCALE) - 1)
    i = min(int(place), len(_SCALE) - 2)
    mixed = (
        round(a + (place - i) * (b - a)) for a, b in zip(_SCALE[i], _SCALE[i + 1], strict=True)
    )
    return "#" + "".join(f"{each:02x}" for each in mixed)


def tick(x: float, y: float) -> str:
    return path(f"M{x:.1f} {y}v5", SOFT)


def path(d: str, color: str, width: float = 1, opacity: float = 1) -> str:
    faint = f' stroke-opacity="{opacity}"' if opacity < 1 else ""
    return f'<path d="{d}" fill="none" stroke="{color}" stroke-width="{width}"{faint}/>'


def dot(x: float, y: float, hint: str) -> str:
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{MAIN}" stroke="#fff" stroke-width="1.5">'
        f"<title>{escape(hint)}</title></circle>"
    )


def label(
    x: float,
    y: float,
    words: str,
    anchor: str = "start",
    color: str = INK,
    size: int = 13,
    weight: int = 400,
    halo: bool = False,
) -> str:
    around = ' stroke="#fff" stroke-width="3" paint-order="stroke"' if halo else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}" font-size="{size}" '
        f'font-weight="{weight}"{around}>{escape(words)}</text>'
    )


def svg(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif">'
    name = f"<title>{escape(title)}</title>"
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    return "\n".join(
        [head, name, ground, label(24, 30, title, weight=600, size=15), *parts, "</svg>\n"]
    )
