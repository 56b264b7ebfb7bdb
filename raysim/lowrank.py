"""Weights for the wire, each matrix as the leading part of its singular value decomposition
wherever that is smaller.

A tensor of more than two dimensions is a stack of matrices, its last two: for a convolution one for
each pair of channels, all cut at one rank.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raysim.ops import get_weights, set_weights
from raysim.wire import Like, Weights


class LowRank(NamedTuple):
    """A matrix as it travels: whole, or as u diag(s) v^T. What is not used is empty."""

    whole: Tensor  # (..., m, n), or (0, ...)
    u: Tensor  # (..., m, rank)
    s: Tensor  # (..., rank)
    v: Tensor  # (..., n, rank)


Parts = Mapping[str, Tensor | LowRank]


def compress(weights: Weights, energy: float) -> dict[str, Tensor | LowRank]:
    """Every matrix cut to the share `energy` of its squared singular values; vectors are kept."""
    return {
        name: _cut(tensor, energy) if _is_matrix(tensor.shape, tensor.dtype) else tensor
        for name, tensor in weights.items()
    }


def restore(parts: Parts) -> Weights:
    """What `compress` was given, as far as it was kept."""
    return {
        name: _multiply(part) if isinstance(part, LowRank) else part for name, part in parts.items()
    }


def load(module: nn.Module, parts: Parts, add: bool) -> None:
    """Bring a module to what was sent: all of its weights, or what to add to them."""
    weights = restore(parts)
    if add:
        own = get_weights(module)
        weights = {name: own[name] + change.to(own[name]) for name, change in weights.items()}
    set_weights(module, weights)


def compressed_like(weights: Mapping[str, Like]) -> Any:
    """What `compress` makes of weights like these, for `Method.expected`; typed as `like` is."""
    return {
        name: _cut_like(like) if _is_matrix(like.shape, like.dtype) else like
        for name, like in weights.items()
    }


def rank(s: Tensor, energy: float) -> int:
    """The smallest number of leading singular values, (..., all), that hold more than the share
    `energy` of the sum of their squares; one more than there are if none does."""
    held = s.double().square().reshape(-1, s.shape[-1]).sum(dim=0).cumsum(dim=0)
    return int((held <= energy * held[-1]).sum()) + 1


def _is_matrix(shape: tuple[int | None, ...], dtype: torch.dtype) -> bool:
    return len(shape) >= 2 and dtype.is_floating_point


def _cut(tensor: Tensor, energy: float) -> LowRank:
    m, n = tensor.shape[-2:]
    u, s, vt = torch.linalg.svd(tensor, full_matrices=False)
    kept = rank(s, energy)
    # Not smaller: go whole. This is always so when the energy takes all singular values, where
    # HtFLlib keeps none of them and sends zeros.
    if smaller := kept * (m + n + 1) < m * n:
        tensor = tensor[:0]
    kept *= smaller
    return LowRank(tensor, u[..., :kept], s[..., :kept], vt.mT[..., :kept])


def _multiply(part: LowRank) -> Tensor:
    return part.whole if part.whole.numel() else (part.u * part.s.unsqueeze(-2)) @ part.v.mT


def _cut_like(like: Like) -> LowRank:
    *stack, m, n = like.shape
    shapes = (None, *like.shape[1:]), (*stack, m, None), (*stack, None), (*stack, n, None)
    return LowRank(*(Like(shape, like.dtype) for shape in shapes))  # type: ignore[arg-type]
