"""Residual networks of basic blocks, with the stem of ImageNet's.

FedIN's ResNet-10, 14, 18, 22 and 26 nest: every state-dict key of a smaller model is a key, of the
same shape, of the next larger one. Layers and initial weights are as in torchvision.
"""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from raysim.task import Task
from zoo.split import Backbone


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x), inplace=True)


def resnet(task: Task, width: int, blocks: Sequence[int]) -> Backbone:
    """One stage for each number of `blocks`; a stage has twice the width of the one before it."""
    widths = [width >> stages_after for stages_after in reversed(range(len(blocks)))]
    stem = nn.Sequential(
        nn.Conv2d(task.channels, widths[0], 7, stride=2, padding=3, bias=False),
        nn.BatchNorm2d(widths[0]),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    )
    stages = [_stage(widths[0], widths[0], 1, blocks[0])]
    for index in range(1, len(blocks)):
        stages.append(_stage(widths[index - 1], widths[index], 2, blocks[index]))
    trunk = nn.Sequential(*stages)
    for module in (*stem.modules(), *trunk.modules()):
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return Backbone(stem, trunk, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()))


def _stage(inputs: int, outputs: int, stride: int, blocks: int) -> nn.Sequential:
    rest = (Block(outputs, outputs) for _ in range(blocks - 1))
    return nn.Sequential(Block(inputs, outputs, stride), *rest)
