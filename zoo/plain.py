"""Networks without normalization: FedMRL's CNN-1 to CNN-5, HtFLlib's FedAvgCNN, and an MLP.

CNN-1..5: https://github.com/LipingYi/FedMRL; FedAvgCNN: https://github.com/TsingZ0/HtFLlib
"""

from torch import nn

from raysim.errors import ConfigError
from raysim.task import Task
from zoo.split import Backbone

MLP_HIDDEN = 256


def cnn(task: Task, width: int, filters: int, hidden: int) -> Backbone:
    """`filters` is conv2's, `hidden` FC1's and `width` FC2's; FC2 and its ReLU are the neck."""
    trunk = nn.Sequential(*_conv(16, filters), nn.Flatten(), *_dense(_flat(task, filters), hidden))
    return Backbone(_conv(task.channels, 16), trunk, _dense(hidden, width))


def fedavg_cnn(task: Task, width: int) -> Backbone:
    trunk = nn.Sequential(*_conv(32, 64), nn.Flatten(), *_dense(_flat(task, 64), width))
    return Backbone(_conv(task.channels, 32), trunk, nn.Identity())


def mlp(task: Task, width: int) -> Backbone:
    pixels = task.channels * task.image_size**2
    return Backbone(nn.Flatten(), _dense(pixels, MLP_HIDDEN), _dense(MLP_HIDDEN, width))


def _conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 5), nn.ReLU(), nn.MaxPool2d(2))


def _dense(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU())


def _flat(task: Task, filters: int) -> int:
    """What two `_conv` leave of an image: each takes 4 pixels a side, then halves the rest."""
    side = ((task.image_size - 4) // 2 - 4) // 2
    if side < 1:
        size = task.image_size
        raise ConfigError(
            f"the images are {size}x{size}; two 5x5 convolutions with pooling need 16x16 or more. "
            "Try --data.image-size 32"
        )
    return filters * side**2
