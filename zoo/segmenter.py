"""Models that give a class to each pixel: an encoder that also has one representation of the whole
image, as every model here, and a decoder for a head."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raysim.task import Task
from zoo.split import Backbone, SplitModel


class Pyramid(nn.Module):
    """An encoder whose maps get coarser; the last is what it gives."""

    channels: Sequence[int]
    """Of the maps, the finest first."""

    def maps(self, x: Tensor) -> list[Tensor]:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.maps(x)[-1]


class Levels(Pyramid):
    """A U-Net's way down: each level halves the side of a map and doubles its channels."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        self.channels = [width << level for level in range(levels + 1)]
        self.levels = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), *_conv(before, before * 2))
            for before in self.channels[:-1]
        )

    def maps(self, x: Tensor) -> list[Tensor]:
        found = [x]
        for level in self.levels:
            found.append(level(found[-1]))
        return found


class Decoder(nn.Module):
    """The way up: each step enlarges a map to the size of the next finer one and reads both."""

    def __init__(self, channels: Sequence[int], num_classes: int) -> None:
        super().__init__()
        finer, coarser = list(reversed(channels[:-1])), list(reversed(channels))
        self.steps = nn.ModuleList(
            _conv(fine + coarse, fine) for fine, coarse in zip(finer, coarser, strict=False)
        )
        self.last = nn.Conv2d(channels[0], num_classes, 1)

    def forward(self, maps: Sequence[Tensor]) -> Tensor:
        *finer, x = maps
        for step, fine in zip(self.steps, reversed(finer), strict=True):
            x = step(torch.cat([fine, F.interpolate(x, size=fine.shape[2:])], dim=1))
        scores: Tensor = self.last(x)
        return scores


class Segmenter(SplitModel):
    """Scores for each pixel, (batch, num_classes, size, size); `features` are those of the whole
    image."""

    def __init__(self, name: str, backbone: Backbone, feature_dim: int, num_classes: int) -> None:
        super().__init__(name, backbone, feature_dim, num_classes)
        assert isinstance(backbone.trunk, Pyramid)
        self.head = Decoder(backbone.trunk.channels, num_classes)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.trunk.maps(self.stem(x)))  # type: ignore[operator]
        size = x.shape[2:]
        return scores if scores.shape[2:] == size else F.interpolate(scores, size, mode="bilinear")


def unet(task: Task, width: int, levels: int) -> Backbone:
    """`width` is the representation's, which is the channels of the coarsest map."""
    narrow = width >> levels
    neck = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    return Backbone(_conv(task.channels, narrow), Levels(narrow, levels), neck)


def _conv(inputs: int, outputs: int) -> nn.Sequential:
    """Two 3x3 convolutions. Norms over groups of channels: they need no batch statistics."""
    return nn.Sequential(
        *(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU()),
        *(nn.Conv2d(outputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU()),
    )
