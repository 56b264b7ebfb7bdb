"""The figures of `raysim.analyze`, as a paper could print them: PNG, PDF and SVG."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from torch import Tensor

Named = Callable[[int], str]
_STYLE = {
    "font.size": 8, "axes.titlesize": 8, "axes.labelsize": 8, "xtick.labelsize": 7,
    "ytick.labelsize": 7, "legend.fontsize": 7, "pdf.fonttype": 42, "svg.fonttype": "none",
    "svg.hashsalt": "raysim", "axes.linewidth": 0.6,
}  # fmt: skip
_MARKS = "osD^vPX*<>"
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#8c6d31")


def heat_maps(
    folder: Path, matrices: dict[str, tuple[list[int], Tensor]], named: Named, unbiased: bool
) -> None:
    """One panel a stage, clients in the order of their architectures, one scale for all."""
    longest = max(len(ids) for ids, _ in matrices.values())
    columns = min(len(matrices), 4)
    rows = -(-len(matrices) // columns)
    side = max(1.7, 0.2 * longest)
    room = 0.06 * max(len(_label(named, k)) for ids, _ in matrices.values() for k in ids)
    size = columns * side + room + 0.9, rows * (side + room + 0.3)
    with _figure(folder / "cka", *size) as figure:
        axes = figure.subplots(rows, columns, squeeze=False)
        for axis in axes.flat[len(matrices) :]:
            axis.set_axis_off()
        last: tuple[list[int], Any] = ([], None)
        for at, (axis, (name, (ids, matrix))) in enumerate(
            zip(axes.flat, matrices.items(), strict=False)
        ):
            image = axis.imshow(matrix.numpy(), vmin=0, vmax=1, cmap="viridis")
            axis.set_title(name)
            new_row = at % columns == 0 or ids != last[0]
            lowest = at + columns >= len(matrices)
            labels = [_label(named, k) for k in ids]
            axis.set_xticks(range(len(ids)), labels if lowest else [], rotation=90)
            axis.set_yticks(range(len(ids)), labels if new_row else [])
            axis.tick_params(length=0)
            for i in range(1, len(ids)):
                if named(ids[i]) != named(ids[i - 1]):
                    axis.axhline(i - 0.5, color="white", linewidth=0.8)
                    axis.axvline(i - 0.5, color="white", linewidth=0.8)
            if len(ids) <= 6:
                for (i, j), value in _cells(matrix):
                    ink = "black" if value > 0.6 else "white"
                    axis.text(j, i, f"{value:.2f}", ha="center", va="center", color=ink, size=6)
            last = ids, image
        what = "linear CKA, unbiased" if unbiased else "linear CKA"
        figure.colorbar(last[1], ax=axes, label=what, fraction=0.04, pad=0.02)


def scatter(folder: Path, ids: list[int], parts: Tensor, named: Named, label: int) -> None:
    """One color an architecture, one mark for each of its clients."""
    names = list(dict.fromkeys(named(k) for k in ids))
    with _figure(folder / "tsne", 4.6, 3.1) as figure:
        axis = figure.subplots()
        for client, places in zip(ids, parts, strict=True):
            name = named(client)
            number = [k for k in ids if named(k) == name].index(client)
            axis.scatter(
                places[:, 0].numpy(), places[:, 1].numpy(), s=11, linewidth=0.3,
                marker=_MARKS[number % len(_MARKS)],
                color=_COLORS[names.index(name) % len(_COLORS)], edgecolor="white", alpha=0.85,
                label=_label(named, client),
            )  # fmt: skip
        axis.set_xticks([])
        axis.set_yticks([])
        axis.set_aspect("equal", adjustable="datalim")
        axis.set_title(f"t-SNE of class {label}")
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, handletextpad=0.2)


@contextmanager
def _figure(path: Path, width: float, height: float) -> Iterator[Figure]:
    """A figure that is written at the end of the block, the same bytes for the same content."""
    with matplotlib.rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        undated: dict[str, dict[str, Any]] = {
            "png": {}, "pdf": {"CreationDate": None}, "svg": {"Date": None},
        }  # fmt: skip
        for kind, metadata in undated.items():
            target = path.with_suffix(f".{kind}")
            figure.savefig(target, dpi=300, bbox_inches="tight", metadata=metadata)


def _label(named: Named, client: int) -> str:
    return f"{named(client)} #{client}"


def _cells(matrix: Tensor) -> Iterator[tuple[tuple[int, int], float]]:
    for i, row in enumerate(matrix.tolist()):
        for j, value in enumerate(row):
            yield (i, j), value
