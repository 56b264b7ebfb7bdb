"""The models a fleet can be made of, by name.

A model's representation has a width of its own, its native dim. Asked for another `feature_dim`,
cnn1..cnn5 and mlp set the width of their last hidden layer, as FedMRL does with its shared small
model. Every other model keeps its layers and maps the representation, as FedRE does: `ap` averages
and `mp` takes the maximum of neighboring features (AdaptiveAvgPool1d, AdaptiveMaxPool1d), `fc` is a
learnable Linear.

Most models read images and give one class or several. Those for other tasks have lists of their
own: `names("segment")`, `names("text")`. `hf:PLACE` is any that transformers loads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from raysim.errors import ConfigError, unknown
from raysim.task import Kind, Task
from zoo import attention, plain, pretrained, segmenter, torchvision_models
from zoo.resnet import resnet
from zoo.split import Backbone, SplitModel, check_mapping, map_features

__all__ = [
    "SplitModel",
    "build",
    "check",
    "expand",
    "families",
    "names",
    "native_dim",
    "parameter_count",
]


@dataclass(frozen=True)
class _Model:
    backbone: Callable[[Task, int], Backbone]
    """From the task and the width of the representation."""
    native_dim: int
    adjustable: bool = False
    """Whether `backbone` takes any width, so that feature_dim needs no mapping."""
    kinds: tuple[Kind, ...] = ("single", "multilabel")
    """The tasks it can learn."""


def _fixed(backbone: Callable[[Task], Backbone], native_dim: int) -> _Model:
    return _Model(lambda task, _: backbone(task), native_dim)


_BLOCKS = {
    10: (1, 1, 1, 1),
    14: (1, 1, 2, 2),
    18: (2, 2, 2, 2),
    22: (2, 2, 3, 3),
    26: (3, 3, 3, 3),
}
# conv2's filters and FC1's width
_CNN = {1: (32, 2000), 2: (16, 2000), 3: (32, 1000), 4: (32, 800), 5: (32, 500)}

_MODELS: dict[str, _Model] = {
    **{
        f"cnn{number}": _Model(partial(plain.cnn, filters=f, hidden=h), 500, adjustable=True)
        for number, (f, h) in _CNN.items()
    },
    "fedavg_cnn": _Model(plain.fedavg_cnn, 512),
    "mlp": _Model(plain.mlp, 128, adjustable=True),
    "resnet4": _Model(partial(resnet, blocks=(1,)), 64),
    "resnet6": _Model(partial(resnet, blocks=(1, 1)), 128),
    "resnet8": _Model(partial(resnet, blocks=(1, 1, 1)), 256),
    **{f"resnet{depth}": _Model(partial(resnet, blocks=b), 512) for depth, b in _BLOCKS.items()},
    "resnet34": _Model(partial(resnet, blocks=(3, 4, 6, 3)), 512),
    **{
        f"resnet{depth}": _fixed(partial(torchvision_models.bottleneck_resnet, depth=depth), 2048)
        for depth in (50, 101, 152)
    },
    **{
        f"slim_resnet{depth}": _Model(partial(resnet, blocks=b), 128)
        for depth, b in _BLOCKS.items()
    },
    "googlenet": _fixed(torchvision_models.googlenet, 1024),
    "mobilenet_v2": _fixed(torchvision_models.mobilenet_v2, 1280),
    "vit_b_16": _fixed(partial(torchvision_models.vit_b, patch=16), 768),
    "vit_b_32": _fixed(partial(torchvision_models.vit_b, patch=32), 768),
    "vit_small": _Model(partial(attention.vit, patch=4, depth=4, heads=4), 128),
    "unet": _Model(partial(segmenter.unet, levels=3), 128, kinds=("segment",)),
    "unet_slim": _Model(partial(segmenter.unet, levels=2), 64, kinds=("segment",)),
    "bert_small": _Model(partial(attention.bert, depth=2, heads=4), 128, kinds=("text",)),
    "word_bag": _Model(attention.bag, 128, kinds=("text",)),
}

_IMAGENET_RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
_HTFE8 = ("fedavg_cnn", "googlenet", "mobilenet_v2", *_IMAGENET_RESNETS)

_FAMILIES: dict[str, tuple[str, ...]] = {
    "cnn": tuple(f"cnn{number}" for number in _CNN),
    "htfe2": ("fedavg_cnn", "resnet18"),
    "htfe3": ("resnet10", "resnet18", "resnet34"),
    "htfe4": ("fedavg_cnn", "googlenet", "mobilenet_v2", "resnet18"),
    "htfe8": _HTFE8,
    "htfe9": ("resnet4", "resnet6", "resnet8", "resnet10", *_IMAGENET_RESNETS),
    "htm10": (*_HTFE8, "vit_b_16", "vit_b_32"),
    "resnet": tuple(f"resnet{depth}" for depth in _BLOCKS),
    "slim_resnet": tuple(f"slim_resnet{depth}" for depth in _BLOCKS),
}


def build(name: str, task: Task, feature_dim: int | None = None, mapping: str = "ap") -> SplitModel:
    """A model with random weights from torch's global generator.

    Without `feature_dim` nothing is mapped. With it, `fc` adds its layer even at the native dim,
    and `ap` and `mp` only where the widths differ; `mapping` says nothing to cnn1..cnn5 and mlp.
    """
    model = _find(name)
    check_mapping(feature_dim, mapping)
    check(name, task)
    make = segmenter.Segmenter if task.kind == "segment" else SplitModel
    if feature_dim is None or model.adjustable:
        width = feature_dim or model.native_dim
        return make(name, model.backbone(task, width), width, task.num_classes)
    backbone = model.backbone(task, model.native_dim)
    neck = map_features(backbone.neck, model.native_dim, feature_dim, mapping)
    return make(name, backbone._replace(neck=neck), feature_dim, task.num_classes)


def check(name: str, task: Task, who: str = "") -> None:
    """Refuse a model for a task it cannot learn; `who` is the client that would have it."""
    if task.kind not in _find(name).kinds:
        whose = f" of {who}" if who else ""
        raise ConfigError(
            f"fleet.models: {name}{whose} cannot learn a task of kind {task.kind}; these can: "
            f"{', '.join(names(task.kind))}. Client i has model i and task i, each counted round"
        )


def names(kind: Kind = "single") -> list[str]:
    """The models that can learn a kind of task."""
    return sorted(name for name, model in _MODELS.items() if kind in model.kinds)


def families() -> dict[str, tuple[str, ...]]:
    """Lists of models known by one name; client i of a fleet gets entry i modulo the length."""
    return dict(_FAMILIES)


def expand(names: Sequence[str]) -> tuple[str, ...]:
    """The models that a list of models and families stands for, in order, repeats included."""
    models: list[str] = []
    for name in names:
        if not name.startswith(pretrained.PREFIX) and name not in _MODELS and name not in _FAMILIES:
            raise unknown("model", name, [*_MODELS, *_FAMILIES], "fleet.models")
        models.extend(_FAMILIES.get(name, (name,)))
    return tuple(models)


def native_dim(name: str, task: Task) -> int:
    """Width of the representation before any mapping; no model here lets it depend on the task."""
    return _find(name).native_dim


def parameter_count(
    name: str, task: Task, feature_dim: int | None = None, mapping: str = "ap"
) -> int:
    """Trainable scalars, without the memory for them and without touching torch's generator."""
    with torch.device("meta"):
        model = build(name, task, feature_dim, mapping)
    return sum(parameter.numel() for parameter in model.parameters())


def _find(name: str) -> _Model:
    if name.startswith(pretrained.PREFIX):
        backbone, kinds = partial(pretrained.backbone, name), pretrained.kinds(name)
        return _Model(lambda task, _: backbone(task), pretrained.native_dim(name), kinds=kinds)
    if name not in _MODELS:
        raise unknown("model", name, _MODELS, "fleet.models")
    return _MODELS[name]
