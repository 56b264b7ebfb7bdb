"""torchvision's models, cut at our seams, for any number of input channels; weights are random.

torchvision is slow to import: the first of these to be built imports it. The classifier a model
comes with is dropped; the Dropout before GoogLeNet's and MobileNetV2's stays, as in HtFLlib.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from raysim.errors import ConfigError
from raysim.task import Task
from zoo.split import Backbone
from zoo.torchvision_shim import import_torchvision


def googlenet(task: Task) -> Backbone:
    # init_weights=True is torchvision's default and so HtFLlib's, but it warns unless told. The
    # slow scipy draw the warning speaks of is gone: torchvision draws with torch, in 0.05 s.
    net = import_torchvision().models.googlenet(aux_logits=False, init_weights=True)
    _read_channels(net.conv1.conv, task, lambda w: nn.init.trunc_normal_(w, std=0.01))
    stem = nn.Sequential(net.conv1, net.maxpool1, net.conv2, net.conv3, net.maxpool2)
    trunk = nn.Sequential(
        *(net.inception3a, net.inception3b, net.maxpool3),
        *(net.inception4a, net.inception4b, net.inception4c, net.inception4d, net.inception4e),
        *(net.maxpool4, net.inception5a, net.inception5b),
    )
    return Backbone(stem, trunk, nn.Sequential(net.avgpool, nn.Flatten(), net.dropout))


def mobilenet_v2(task: Task) -> Backbone:
    net = import_torchvision().models.mobilenet_v2()
    _read_channels(net.features[0][0], task, _kaiming)
    neck = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), net.classifier[0])
    return Backbone(net.features[0], net.features[1:], neck)


def bottleneck_resnet(task: Task, depth: int) -> Backbone:
    net = getattr(import_torchvision().models, f"resnet{depth}")()
    _read_channels(net.conv1, task, _kaiming)
    return Backbone(
        nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool),
        nn.Sequential(net.layer1, net.layer2, net.layer3, net.layer4),
        nn.Sequential(net.avgpool, nn.Flatten()),
    )


def vit_b(task: Task, patch: int) -> Backbone:
    size = task.image_size
    if size % patch:
        raise ConfigError(
            f"the images are {size}x{size}; vit_b_{patch} needs a multiple of {patch} pixels. "
            f"Try --data.image-size {-(-size // patch) * patch}"
        )
    net = getattr(import_torchvision().models, f"vit_b_{patch}")(image_size=size)
    fan_in = task.channels * patch**2
    _read_channels(net.conv_proj, task, lambda w: nn.init.trunc_normal_(w, std=fan_in**-0.5))
    stem = Tokens(net.conv_proj, net.class_token, net.encoder.pos_embedding)
    return Backbone(stem, nn.Sequential(net.encoder.layers, net.encoder.ln), ClassToken())


class Tokens(nn.Module):
    """An image as a sequence: the class token, then one token a patch, each with its position."""

    def __init__(
        self, patches: nn.Conv2d, class_token: nn.Parameter, positions: nn.Parameter
    ) -> None:
        super().__init__()
        self.patches = patches
        self.class_token = class_token
        self.positions = positions

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x).flatten(2).transpose(1, 2)  # (batch, patches, 768)
        return torch.cat([self.class_token.expand(len(x), -1, -1), patches], 1) + self.positions


class ClassToken(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return tokens[:, 0]


def _read_channels(conv: nn.Conv2d, task: Task, draw: Callable[[Tensor], Tensor]) -> None:
    """Make the first convolution read the task's channels, its weights drawn as the model's are."""
    if task.channels != conv.in_channels:
        conv.in_channels = task.channels
        shape = (conv.out_channels, task.channels, *conv.kernel_size)
        conv.weight = nn.Parameter(torch.empty(shape))
        draw(conv.weight)


def _kaiming(weight: Tensor) -> Tensor:
    return nn.init.kaiming_normal_(weight, mode="fan_out", nonlinearity="relu")
