"""Small transformers that train from scratch: a ViT for images and a BERT for sentences, and a bag
of embeddings beside it.

Attention is made of plain Linear layers, so that LoRA reaches all of it. A sentence's padding is a
row of zeros wherever it goes, by which the layers know it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raysim.errors import ConfigError
from raysim.task import Task
from zoo.split import Backbone


class Block(nn.Module):
    """Attention and a two-layer perceptron, each after a LayerNorm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, visible: Tensor | None = None) -> Tensor:
        """x is (batch, tokens, width); `visible` is (batch, tokens)."""
        batch, tokens, width = x.shape
        parts = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mask = None if visible is None else visible[:, None, None, :]
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.out(found.transpose(1, 2).reshape(batch, tokens, width))
        both: Tensor = x + self.mlp(self.norm2(x))
        return both


class Patches(nn.Module):
    def __init__(self, task: Task, width: int, patch: int) -> None:
        super().__init__()
        self.cut = nn.Conv2d(task.channels, width, patch, stride=patch)
        self.places = nn.Parameter(0.02 * torch.randn((task.image_size // patch) ** 2, width))

    def forward(self, x: Tensor) -> Tensor:
        tokens: Tensor = self.cut(x).flatten(2).mT + self.places
        return tokens


class Mean(nn.Module):
    """The mean of all tokens, after a last LayerNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        mean: Tensor = self.norm(x).mean(dim=1)
        return mean


def vit(task: Task, width: int, patch: int, depth: int, heads: int) -> Backbone:
    size = task.image_size
    if size % patch:
        raise ConfigError(
            f"the images are {size}x{size}; this ViT needs a multiple of {patch} pixels. "
            f"Try --data.image-size {-(-size // patch) * patch}"
        )
    trunk = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
    return Backbone(Patches(task, width, patch), trunk, Mean(width))


class Words(nn.Module):
    """Embeddings, with those of the places unless `places` is 0; zeros for padding."""

    def __init__(self, words: int, width: int, places: int = 0) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width, padding_idx=0)
        nn.init.normal_(self.words.weight, std=0.1)
        with torch.no_grad():
            self.words.weight[0].zero_()
        self.places = nn.Parameter(0.02 * torch.randn(places, width)) if places else None

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.words(tokens)
        if self.places is None:
            return x
        return (x + self.places) * (tokens != 0).unsqueeze(2)


class Encoder(nn.Module):
    def __init__(self, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        present = not_padding(x)
        visible = present.clone()
        visible[:, 0] = True  # of an empty sentence too, or attention would have nothing to weigh
        for layer in self.layers:
            x = layer(x, visible)
        found: Tensor = self.norm(x) * present.unsqueeze(2)
        return found


class MeanWord(nn.Module):
    """The mean of a sentence's words; zeros if it has none."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(dim=1) / not_padding(x).sum(dim=1, keepdim=True).clamp(min=1)


def not_padding(x: Tensor) -> Tensor:
    return (x != 0).any(dim=2)


def bert(task: Task, width: int, depth: int, heads: int) -> Backbone:
    return Backbone(Words(task.words, width, task.length), Encoder(width, depth, heads), MeanWord())


def bag(task: Task, width: int) -> Backbone:
    neck = nn.Sequential(MeanWord(), nn.Linear(width, width), nn.ReLU())
    return Backbone(Words(task.words, width), nn.Identity(), neck)
