"""The figure of a sweep, as SVG: a curve or a list for one setting, a heat map for two, parallel
coordinates for more. Drawn by hand, so that nothing need be installed for it."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from raysim.tune.ranking import Answer, Row, number, text
from raysim.tune.svg import INK, LINE, MAIN, SOFT, Axis, Color, Names, dot, label, path, svg, tick

_CELLS = 16
"""Values of a setting that a heat map has room for."""


def draw(answer: Answer) -> str:
    """What is searched decides what is drawn. What has no finite value is left out."""
    metric = answer.sweep.config.metric
    rows = [row for row in answer.rows if row.values and math.isfinite(row.mean)]
    keys = [key for key in answer.sweep.params() if len(_distinct(rows, key)) > 1]
    title = f"{answer.sweep.name}: {metric}"
    if not rows:
        return svg(480, 80, title, [label(24, 60, f"no configuration has a finite {metric}")])
    if len(keys) == 1 and all(_numeric(row.shown.get(keys[0])) for row in rows):
        return _curve(rows, keys[0], metric, title)
    if len(keys) <= 1:
        return _list(rows, keys, metric, title)
    few = all(len(_distinct(rows, key)) <= _CELLS for key in keys)
    if len(keys) == 2 and few:
        return _heat(rows, keys, metric, title)
    return _parallel(rows, keys, metric, title)


# One setting


def _curve(rows: Sequence[Row], key: str, metric: str, title: str) -> str:
    rows = sorted(rows, key=lambda row: float(row.shown[key]))
    xs = [float(row.shown[key]) for row in rows]
    x = Axis(xs, 84, 600, _logarithmic(xs))
    ends = [row.mean + sign * (row.std or 0) for row in rows for sign in (-1, 1)]
    y = Axis(ends, 330, 56)
    parts = _grid(y, metric, 64, 620)
    for value in x.ticks(xs):
        parts += [tick(x(value), 340), label(x(value), 362, text(value), "middle", SOFT)]
    parts.append(label(342, 392, key, "middle"))
    line = " ".join(f"{x(v):.1f},{y(row.mean):.1f}" for v, row in zip(xs, rows, strict=True))
    parts.append(f'<polyline points="{line}" fill="none" stroke="{MAIN}" stroke-width="2"/>')
    for value, row in zip(xs, rows, strict=True):
        if row.std:
            low, high = y(row.mean - row.std), y(row.mean + row.std)
            parts.append(path(f"M{x(value):.1f} {low:.1f}V{high:.1f}", MAIN, 1.5))
        parts.append(dot(x(value), y(row.mean), _hint(row, metric)))
    return svg(660, 412, title, parts)


def _list(rows: Sequence[Row], keys: Sequence[str], metric: str, title: str) -> str:
    """The best on top, a line each: for names, which have no order of their own."""
    names = [", ".join(text(row.shown.get(key)) for key in keys) or "all" for row in rows]
    left = 40 + 7.2 * max(map(len, names))
    ends = [row.mean + sign * (row.std or 0) for row in rows for sign in (-1, 1)]
    x = Axis(ends, left, left + 420)
    bottom = 62 + 24 * len(rows)
    parts = []
    for value in x.ticks():
        parts.append(path(f"M{x(value):.1f} 50V{bottom}", LINE))
        parts.append(label(x(value), bottom + 20, number(metric, value), "middle", SOFT))
    for i, (row, name) in enumerate(zip(rows, names, strict=True)):
        y = 70 + 24 * i
        parts.append(label(left - 14, y + 4, name, "end"))
        if row.std:
            parts.append(
                path(f"M{x(row.mean - row.std):.1f} {y}H{x(row.mean + row.std):.1f}", MAIN, 2)
            )
        parts.append(dot(x(row.mean), y, _hint(row, metric)))
        parts.append(label(left + 436, y + 4, _spread(row, metric), color=SOFT))
    return svg(left + 560, bottom + 36, title, parts)


# Two


def _heat(rows: Sequence[Row], keys: Sequence[str], metric: str, title: str) -> str:
    across, down = sorted(keys, key=lambda key: -len(_distinct(rows, key)))
    columns, lines = _distinct(rows, across), _distinct(rows, down)
    left, top, width, height = 40 + 7.2 * max(len(text(v)) for v in lines), 84, 96, 46
    color = Color(rows, metric)
    parts = [label(left - 12, 72, down, "end", SOFT), label(left, 52, f"{across} →", color=SOFT)]
    for i, value in enumerate(columns):
        parts.append(label(left + (i + 0.5) * width, 72, text(value), "middle"))
    for j, value in enumerate(lines):
        parts.append(label(left - 12, top + (j + 0.6) * height, text(value), "end"))
    for i, one in enumerate(columns):
        for j, other in enumerate(lines):
            own = [r for r in rows if r.shown.get(across) == one and r.shown.get(down) == other]
            x, y = left + i * width, top + j * height
            fill = color(own[0].mean) if own else "#f2f4f7"
            parts.append(
                f'<rect x="{x + 1}" y="{y + 1}" width="{width - 2}" height="{height - 2}" '
                f'rx="3" fill="{fill}"><title>{escape(_hint(own[0], metric) if own else "")}'
                "</title></rect>"
            )
            if own:
                ink = color.ink(own[0].mean)
                middle = x + width / 2
                small = own[0].std is not None
                parts.append(
                    label(
                        middle,
                        y + (20 if small else 28),
                        number(metric, own[0].mean),
                        "middle",
                        ink,
                    )
                )
                if small:
                    std = f"± {number(metric, own[0].std or 0)}"
                    parts.append(label(middle, y + 36, std, "middle", ink, 11))
    right = left + len(columns) * width
    parts += color.key(right + 24, top, len(lines) * height)
    return svg(right + 130, top + len(lines) * height + 24, title, parts)


# More


def _parallel(rows: Sequence[Row], keys: Sequence[str], metric: str, title: str) -> str:
    color = Color(rows, metric)
    names = [*keys, metric]
    step = max(110, min(170, 7.4 * max(map(len, names)) + 24))
    places = [90 + i * step for i in range(len(names))]
    axes = [_scale(rows, key) for key in keys] + [Axis([row.mean for row in rows], 330, 84)]
    parts = []
    for row in reversed(rows):  # the best last, on top
        values = [*(row.shown.get(key) for key in keys), row.mean]
        points = [
            (x, axis(value))
            for x, axis, value in zip(places, axes, values, strict=True)
            if value is not None
        ]
        best = row is rows[0]
        line = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        style = path(line, color(row.mean), 3.5 if best else 1.6, 1 if best else 0.7)
        parts.append(style.replace("/>", f"><title>{escape(_hint(row, metric))}</title></path>"))
    for x, axis, name in zip(places, axes, names, strict=True):
        parts.append(path(f"M{x:.1f} 84V330", INK, 1))
        parts.append(label(x, 66, name, "middle", weight=600))
        for value in axis.ticks():
            shown = number(metric, value) if name == metric else text(value)
            parts.append(label(x - 6, axis(value) - 5, shown, "end", SOFT, 11, halo=True))
    parts += color.key(places[-1] + 40, 84, 246)
    return svg(places[-1] + 150, 360, title, parts)


def _scale(rows: Sequence[Row], key: str) -> Any:
    values = [row.shown[key] for row in rows if row.shown.get(key) is not None]
    if all(map(_numeric, values)) and len(_distinct(rows, key)) > 8:
        return Axis(values, 330, 84, _logarithmic(values))
    return Names(_distinct(rows, key), 318, 96)


# Pieces


def _distinct(rows: Sequence[Row], key: str) -> list[Any]:
    """In the order of the numbers, or of appearance in the sweep."""
    found: list[Any] = []
    for row in sorted(rows, key=lambda row: row.point):
        if key in row.shown and row.shown[key] not in found:
            found.append(row.shown[key])
    return sorted(found) if all(map(_numeric, found)) else found


def _numeric(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _logarithmic(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) / min(values) >= 50


def _spread(row: Row, metric: str) -> str:
    std = "" if row.std is None else f" ± {number(metric, row.std)}"
    return number(metric, row.mean) + std


def _hint(row: Row, metric: str) -> str:
    settings = ", ".join(f"{key} {text(value)}" for key, value in row.shown.items())
    return f"{settings}: {metric} {_spread(row, metric)}"


def _grid(y: Axis, metric: str, left: float, right: float) -> list[str]:
    parts = []
    for value in y.ticks():
        parts.append(path(f"M{left} {y(value):.1f}H{right}", LINE))
        parts.append(label(left - 8, y(value) + 4, number(metric, value), "end", SOFT))
    return parts
