"""t-SNE, exact: points in the plane whose neighbors are those of the points given.

van der Maaten and Hinton, JMLR 2008. It starts from the first two principal components, as Kobak
and Berens (2019) recommend, so nothing is drawn at random and equal input gives equal output. The
schedule and the step size are scikit-learn's. Time and memory grow with the square of the number of
points: a few thousand are the limit, and a figure's too.
"""

import math

import torch
from torch import Tensor

_EXAGGERATION, _EARLY = 12.0, 250
_TINY = 1e-12


def tsne(points: Tensor, perplexity: float = 30.0, steps: int = 1000) -> Tensor:
    """(n, 2). `perplexity`, about how many neighbors count, is at most a third of the others."""
    n = len(points)
    if n < 4:
        raise ValueError(f"t-SNE needs 4 points or more, got {n}")
    x = points.flatten(1).double()
    p = affinities(x, min(perplexity, (n - 1) / 3))
    y = _start(x)
    rate = max(n / _EXAGGERATION / 4, 50.0)
    velocity, gains = torch.zeros_like(y), torch.ones_like(y)
    for step in range(steps):
        early = step < _EARLY
        slope = gradient(p * _EXAGGERATION if early else p, y)
        same = (slope > 0) == (velocity > 0)  # a step against the slope: the signs differ
        gains = torch.where(same, gains * 0.8, gains + 0.2).clamp(min=0.01)
        velocity = (0.5 if early else 0.8) * velocity - rate * gains * slope
        y = y + velocity
    return y - y.mean(dim=0)


def affinities(x: Tensor, perplexity: float) -> Tensor:
    """P: symmetric, sums to 1. Each point's Gaussian is as wide as gives it the perplexity."""
    n = len(x)
    distances = torch.cdist(x, x).square()
    others = ~torch.eye(n, dtype=torch.bool)
    distances = distances[others].view(n, n - 1)
    distances = distances - distances.min(dim=1, keepdim=True).values
    scale = distances.mean().clamp(min=_TINY)
    distances = distances / scale
    low, high = torch.full((n, 1), -60.0).double(), torch.full((n, 1), 60.0).double()
    for _ in range(64):  # halves the interval of log2(precision)
        middle = (low + high) / 2
        rows = torch.softmax(-distances * 2**middle, dim=1)
        entropy = -(rows * rows.clamp(min=1e-300).log()).sum(dim=1, keepdim=True)
        wide = entropy > math.log(perplexity)
        low, high = torch.where(wide, middle, low), torch.where(wide, high, middle)
    p = torch.zeros(n, n).double()
    p[others] = rows.flatten()
    return (p + p.t()) / (2 * n)


def gradient(p: Tensor, y: Tensor) -> Tensor:
    """Of KL(P || Q) by y, with Q the Student t affinities of y."""
    kernel = 1 / (1 + torch.cdist(y, y, compute_mode="donot_use_mm_for_euclid_dist").square())
    kernel.fill_diagonal_(0)
    force = (p - kernel / kernel.sum().clamp(min=_TINY)) * kernel
    return 4 * (force.sum(dim=1, keepdim=True) * y - force @ y)


def _start(x: Tensor) -> Tensor:
    """The first two principal components, small. Their signs, which mean nothing, are fixed."""
    u, s, _ = torch.linalg.svd(x - x.mean(dim=0), full_matrices=False)
    y = torch.zeros(len(x), 2).double()
    y[:, : min(2, len(s))] = (u * s)[:, :2]
    largest = y.gather(0, y.abs().argmax(dim=0, keepdim=True))
    y = y * torch.where(largest < 0, -1.0, 1.0)
    return y / y[:, 0].std().clamp(min=_TINY) * 1e-4
