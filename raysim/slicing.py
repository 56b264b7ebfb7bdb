"""Sub-models as parts of a global model, and the mean of what their owners send back.

A part says for every weight which runs of entries it has along each axis. Sending it is a view of
the global weight wherever the part is one block, and else a copy of the part: never of the whole.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raysim.channels import Axis, Layout
from raysim.wire import Weights, like


class Run(NamedTuple):
    """Entries that are neighbors on an axis of the global weight."""

    start: int
    length: int


Runs = tuple[Run, ...]
Part = dict[str, tuple[Runs, ...]]
"""For each weight, by name, its runs along each axis, in the order they have in the sub-model."""
Start = Callable[[int, int], int]
"""Where the window of `size` of `width` channels begins."""


def leading(width: int, size: int) -> int:
    """HeteroFL's windows: the first channels."""
    return 0


def kept(width: int, rate: float) -> int:
    """How many of `width` channels a sub-model has: ceil(rate * width), and 3 of 30 at 0.1."""
    return max(1, math.ceil(rate * width - 1e-9))


def window(axis: Axis, rate: float, start: Start = leading) -> Runs:
    """What a sub-model has of an axis. A window that passes the end goes on at the beginning; one
    of all channels leaves them in order."""
    chosen, offset = [], 0
    for width, repeat in axis:
        size = kept(width, rate)
        first = start(width, size) if size < width else 0
        channels = ((first + i) % width for i in range(size))
        chosen += [Run(offset + channel * repeat, repeat) for channel in channels]
        offset += width * repeat
    return _joined(chosen)


def rows(indices: Iterable[int]) -> Runs:
    """Single entries of an axis."""
    return _joined(Run(index, 1) for index in indices)


def part(layout: Layout, rate: float, start: Start = leading) -> Part:
    """The sub-model at `rate`: a window of every axis, the same wherever widths are the same, so
    that what one layer gives is what the next one takes."""
    windows = {
        axis: window(axis, rate, start)
        for axis in {axis for axes in layout.values() for axis in axes}
    }
    return {name: tuple(windows[axis] for axis in axes) for name, axes in layout.items()}


def shape(runs: Sequence[Runs]) -> tuple[int, ...]:
    return tuple(sum(run.length for run in axis) for axis in runs)


def cut(weights: Weights, part: Part) -> Weights:
    """A sub-model's weights: views, but for windows that consist of several blocks."""
    return {name: _cut(weights[name], runs) for name, runs in part.items()}


def expected(part: Part) -> dict[str, Any]:
    """What a sub-model's weights look like; counters are batch norm's."""
    return {name: like(*shape(runs), dtype=_kind(name)) for name, runs in part.items()}


def _kind(name: str) -> torch.dtype:
    return torch.int64 if name.endswith("num_batches_tracked") else torch.float32


def scatter_mean(
    weights: Weights, uploads: Sequence[tuple[Weights, Part]], shares: Sequence[float]
) -> Weights:
    """The weights with every entry the mean of what was sent for it; an entry that nobody sent
    stays as it was. Sums are of double precision, one weight at a time, so the mean of equal values
    is that value. Integers, such as batch-norm counters, are taken from the first who sent them."""
    result = {}
    for name, old in weights.items():
        owners = [
            (sent[name], where[name], share)
            for (sent, where), share in zip(uploads, shares, strict=True)
            if name in sent
        ]
        for tensor, runs, _ in owners:
            if tensor.shape != shape(runs):
                raise ValueError(f"{name} is {list(tensor.shape)}; its part is {list(shape(runs))}")
        result[name] = _scatter_mean(old, owners)
    return result


def _scatter_mean(old: Tensor, owners: Sequence[tuple[Tensor, Sequence[Runs], float]]) -> Tensor:
    if not owners:
        return old
    if not old.is_floating_point():
        return owners[0][0].clone()
    total = torch.zeros_like(old, dtype=torch.float64)
    count = torch.zeros_like(total)
    for tensor, runs, share in owners:
        for there, here in _blocks(runs):
            total[there].add_(tensor[here], alpha=share)
            count[there].add_(share)
    return torch.where(count > 0, total / count, old.double()).to(old.dtype)


def _cut(tensor: Tensor, runs: Sequence[Runs]) -> Tensor:
    blocks = list(_blocks(runs))
    if len(blocks) == 1:
        return tensor[blocks[0][0]]
    result = tensor.new_empty(shape(runs))
    for there, here in blocks:
        result[here] = tensor[there]
    return result


def _blocks(runs: Sequence[Runs]) -> Iterator[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Where each block of a part is in the global weight, and where in the sub-model's."""
    axes = []
    for axis in runs:
        ends = itertools.accumulate(run.length for run in axis)
        axes.append(
            [
                (slice(start, start + length), slice(end - length, end))
                for (start, length), end in zip(axis, ends, strict=True)
            ]
        )
    for block in itertools.product(*axes):
        yield tuple(there for there, _ in block), tuple(here for _, here in block)


def _joined(runs: Iterable[Run]) -> Runs:
    """The same entries in as few runs as possible."""
    result: list[Run] = []
    for start, length in runs:
        if result and sum(result[-1]) == start:
            result[-1] = Run(result[-1].start, result[-1].length + length)
        else:
            result.append(Run(start, length))
    return tuple(result)
