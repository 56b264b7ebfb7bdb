"""From rows of a data set to the tensors that a model eats. This sits in the innermost loop."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from raysim.data.dataset import Dataset
from raysim.data.rules import Ints

PADDING = 4
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def make_batch(
    dataset: Dataset, rows: Ints, device: torch.device, memory_format: str = "contiguous"
) -> tuple[Tensor, Tensor]:
    """Normalized images (batch, channels, size, size), and labels.

    `take` copies, so that torch never sees the data set itself, which is read-only. Bytes travel to
    the device, and the layout changes last: each is the fastest order measured.
    """
    if dataset.kind != "single":
        return _answered(dataset, rows, device, memory_format)
    x = _images(dataset, rows, device)
    y = torch.from_numpy(dataset.labels.take(rows)).to(device)
    return x.contiguous(memory_format=FORMATS[memory_format]), y


def _images(dataset: Dataset, rows: Ints, device: torch.device) -> Tensor:
    scale, shift = _affine(dataset.mean, dataset.std, device)
    x = torch.from_numpy(dataset.images.take(rows, axis=0)).to(device)
    return x.to(torch.float32).mul_(scale).add_(shift)


def _answered(
    dataset: Dataset, rows: Ints, device: torch.device, memory_format: str
) -> tuple[Tensor, Tensor]:
    """The same for sentences, and for answers that are not one class: several classes as numbers 0
    and 1, and the classes of pixels."""
    answers = dataset.labels if dataset.targets is None else dataset.targets
    y = torch.from_numpy(answers.take(rows, axis=0)).to(device)
    y = y.float() if dataset.kind == "multilabel" else y.long()
    if dataset.kind == "text":
        return torch.from_numpy(dataset.images.take(rows, axis=0)).to(device).long(), y
    x = _images(dataset, rows, device)
    return x.contiguous(memory_format=FORMATS[memory_format]), y


@lru_cache(maxsize=8)
def _affine(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Scale and shift with (byte / 255 - mean) / std = byte * scale + shift, for each channel."""
    means = torch.tensor(mean, dtype=torch.float64).view(-1, 1, 1)
    stds = torch.tensor(std, dtype=torch.float64).view(-1, 1, 1)
    scale, shift = 1 / (255 * stds), -means / stds
    return scale.to(device, torch.float32), shift.to(device, torch.float32)


def augment(x: Tensor, kind: str) -> Tensor:
    """A random view of each image: `none`, `flip`, or `crop_flip` with 4 pixels of zeros around.

    Draws come from torch's global CPU generator, so they are the same on every device.
    """
    if kind == "none":
        return x
    flipped = (torch.rand(len(x)) < 0.5).to(x.device)
    if kind == "flip":
        return torch.where(flipped.view(-1, 1, 1, 1), x.flip(3), x)
    down, right = torch.randint(2 * PADDING + 1, (2, len(x), 1)).to(x.device)
    height, width = x.shape[2:]
    columns = torch.arange(width, device=x.device)
    columns = right + torch.where(flipped.view(-1, 1), width - 1 - columns, columns)
    rows = down + torch.arange(height, device=x.device)
    padded = F.pad(x, (PADDING,) * 4).flatten(2)  # (batch, channels, pixels)
    pixels = rows.unsqueeze(2) * (width + 2 * PADDING) + columns.unsqueeze(1)
    pixels = pixels.flatten(1).unsqueeze(1).expand(-1, x.shape[1], -1)
    channels_last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    return padded.gather(2, pixels).view(x.shape).contiguous(memory_format=memory_format)
