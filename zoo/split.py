"""The one shape every model here has: stem -> trunk -> neck -> head."""

from typing import NamedTuple

from torch import Tensor, nn

from raysim.errors import ConfigError, unknown

MAPPINGS = ("ap", "mp", "fc")


class Backbone(NamedTuple):
    """What an architecture supplies: `neck` makes the trunk's output one vector a sample."""

    stem: nn.Module
    trunk: nn.Module
    neck: nn.Module


class SplitModel(nn.Module):
    """A classifier cut where the methods cut.

    `trunk(stem(x))` are FedIN's intermediate layers behind its extractor, `features` is the
    representation that prototypes and entangled representations are made of, and `head` is a
    `Linear(feature_dim, num_classes)` whatever the model, so heads of equal width can be exchanged.
    """

    def __init__(self, name: str, backbone: Backbone, feature_dim: int, num_classes: int) -> None:
        super().__init__()
        self.name = name
        self.feature_dim = feature_dim
        self.stem = backbone.stem
        self.trunk = backbone.trunk
        self.neck = backbone.neck
        self.head = nn.Linear(feature_dim, num_classes)

    def features(self, x: Tensor) -> Tensor:
        features: Tensor = self.neck(self.trunk(self.stem(x)))
        return features  # (batch, feature_dim)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits  # (batch, num_classes)


def map_features(neck: nn.Module, width: int, feature_dim: int, mapping: str) -> nn.Module:
    """`neck` with FedRE's representation mapping from `width` to `feature_dim` behind it.

    Pooling to the width a model already has changes nothing and is left out; `fc` is a learnable
    layer at any width.
    """
    layer: nn.Module
    if mapping == "fc":
        layer = nn.Linear(width, feature_dim)
    elif width == feature_dim:
        return neck
    elif mapping == "ap":
        layer = nn.AdaptiveAvgPool1d(feature_dim)
    else:
        layer = nn.AdaptiveMaxPool1d(feature_dim)
    return nn.Sequential(neck, layer)


def check_mapping(feature_dim: int | None, mapping: str) -> None:
    if mapping not in MAPPINGS:
        raise unknown("mapping", mapping, MAPPINGS, "fleet.mapping")
    if feature_dim is not None and feature_dim < 1:
        raise ConfigError(f"fleet.feature_dim is {feature_dim}; expected 1 or more")
