"""Backbones of transformers, with the weights they come with: `hf:FOLDER` or `hf:HUB-NAME`.

An encoder of images (such as ViT), of image pyramids (SegFormer) or of sentences (BERT,
DistilBERT), which one its own config says. transformers is an extra: pip install
'raysim[transformers]'. It reads a hub only where there is a network; a folder always.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from raysim.errors import ConfigError
from raysim.task import Kind, Task
from zoo.attention import MeanWord
from zoo.segmenter import Pyramid
from zoo.split import Backbone

PREFIX = "hf:"


class Sentences(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: Tensor) -> Tensor:
        present = tokens != 0
        visible = present.clone()
        visible[:, 0] = True
        found: Tensor = self.net(tokens, attention_mask=visible.long()).last_hidden_state
        return found * present.unsqueeze(2)


class Images(nn.Module):
    """All tokens of an image; the class token is the first."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x, interpolate_pos_encoding=True).last_hidden_state
        return found


class ClassToken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0]


class Maps(Pyramid):
    def __init__(self, net: nn.Module, channels: list[int]) -> None:
        super().__init__()
        self.net = net
        self.channels = channels

    def maps(self, x: Tensor) -> list[Tensor]:
        return list(self.net(x, output_hidden_states=True).hidden_states)


def kinds(name: str) -> tuple[Kind, ...]:
    """The tasks such a model can learn."""
    config = _config(name)
    if hasattr(config, "hidden_sizes"):
        return ("segment", "single", "multilabel")
    return ("text",) if hasattr(config, "vocab_size") else ("single", "multilabel")


def native_dim(name: str) -> int:
    config = _config(name)
    sizes = getattr(config, "hidden_sizes", None)
    return int(sizes[-1] if sizes else config.hidden_size)


def backbone(name: str, task: Task) -> Backbone:
    """Its weights are read from disk, unless torch is asked for shapes alone."""
    config, auto = _config(name), _transformers().AutoModel
    if task.kind == "text" and task.words > config.vocab_size:
        raise ConfigError(
            f"{name} knows {config.vocab_size} token numbers, and the sentences have {task.words}. "
            f"Try --data.tokenizer {name.removeprefix(PREFIX)}"
        )
    if torch.get_default_device().type == "meta":
        net = auto.from_config(config)
    else:
        net = auto.from_pretrained(name.removeprefix(PREFIX))
    nothing = nn.Identity()
    if task.kind == "text":
        return Backbone(nothing, Sentences(net), MeanWord())
    if hasattr(config, "hidden_sizes"):
        pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        return Backbone(nothing, Maps(net, list(config.hidden_sizes)), pool)
    return Backbone(nothing, Images(net), ClassToken())


@lru_cache(maxsize=32)
def _config(name: str) -> Any:
    place = name.removeprefix(PREFIX)
    try:
        return _transformers().AutoConfig.from_pretrained(place)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"fleet.models: {name} cannot be loaded: {reason}") from error


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            "models called hf:NAME need transformers: pip install 'raysim[transformers]'"
        ) from None
    return transformers
