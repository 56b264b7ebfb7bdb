"""LoRA: a layer's weights stay as they are, and a product of two thin matrices that is added to
them learns. Hu et al., https://arxiv.org/abs/2106.09685"""

import math
from typing import Any

from torch import Tensor, nn

from zoo.split import SplitModel

RANK = 16


class LowRankUpdate(nn.Module):
    """`layer(x) + up(down(x))`, of which only `up` and `down` learn. `up` begins as zeros, so at
    first this is the layer itself."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down: nn.Linear | nn.Conv2d
        self.up: nn.Linear | nn.Conv2d
        if isinstance(layer, nn.Linear):
            self.down = nn.Linear(layer.in_features, rank, bias=False)
            self.up = nn.Linear(rank, layer.out_features, bias=False)
        else:
            names = ("kernel_size", "stride", "padding", "dilation", "padding_mode")
            like: Any = {name: getattr(layer, name) for name in names}
            self.down = nn.Conv2d(layer.in_channels, rank, bias=False, **like)
            self.up = nn.Conv2d(rank, layer.out_channels, 1, bias=False)
        nn.init.kaiming_uniform_(self.down.weight, a=math.sqrt(5))
        nn.init.zeros_(self.up.weight)

    @property
    def weight(self) -> Tensor:
        """The layer's own, for models that ask it for its dtype."""
        return self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.layer(x) + self.up(self.down(x))
        return changed


def add_lora(model: SplitModel, rank: int = RANK) -> SplitModel:
    """Freeze a model but for its head, with an update of this rank beside each of its Linear and
    ungrouped Conv2d layers. Embeddings and norms stay as they are; so do torch's own
    MultiheadAttention, whose weights are not layers, and layers too small for the rank."""
    for part in (model.stem, model.trunk, model.neck):
        part.requires_grad_(False)
    for name in ("stem", "trunk", "neck"):
        setattr(model, name, _update(getattr(model, name), rank))
    return model


def _update(module: nn.Module, rank: int) -> nn.Module:
    if isinstance(module, nn.Linear):
        small = min(module.in_features, module.out_features) <= rank
        return module if small else LowRankUpdate(module, rank)
    if isinstance(module, nn.Conv2d):
        grouped = module.groups > 1
        return module if grouped or module.out_channels <= rank else LowRankUpdate(module, rank)
    if not isinstance(module, nn.MultiheadAttention):
        for name, child in module.named_children():
            setattr(module, name, _update(child, rank))
    return module
