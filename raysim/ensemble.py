"""Uploaded models together: their mean by architecture, and what they say of public samples.

The weighted consensus is FedET's, the surer the louder: https://arxiv.org/abs/2204.12703
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from raysim.data.public import Public
from raysim.method import ServerContext
from raysim.ops import evaluating, set_weights, weighted_mean
from raysim.wire import Weights

BATCH = 256


def means(
    names: Sequence[str], models: Sequence[Weights], shares: Sequence[float]
) -> dict[str, Weights]:
    """The mean model of each architecture of which there are some."""
    groups: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        groups.setdefault(name, []).append(i)
    return {
        name: weighted_mean([models[i] for i in group], [shares[i] for i in group])
        for name, group in groups.items()
    }


def draw(public: Public, count: int) -> Tensor:
    """Numbers of public samples, each as often as any other, or once more."""
    epochs = -(-count // len(public))
    return torch.cat([torch.randperm(len(public)) for _ in range(epochs)])[:count]


def logits(
    names: Sequence[str], models: Sequence[Weights], public: Public, ctx: ServerContext
) -> Tensor:
    """What the models say of all public samples: (models, samples, num_classes)."""
    built = {name: ctx.build_model(name) for name in dict.fromkeys(names)}
    said = []
    for name, weights in zip(names, models, strict=True):
        model = built[name]
        set_weights(model, weights)
        with evaluating(model):
            parts = torch.split(torch.arange(len(public)), BATCH)
            said.append(torch.cat([model(public.images(part)) for part in parts]))
    return torch.stack(said)


class Consensus(NamedTuple):
    labels: Tensor
    """(samples,), the class that the weighted sum of all logits gives most."""
    others: Tensor
    """(samples, num_classes), the weighted mean of those models that give another class most; 0
    where there are none."""
    disputed: Tensor
    """(samples,), 1 where some model gives another class most, else 0."""

    def of(self, samples: Tensor) -> "Consensus":
        return Consensus(*(part[samples] for part in self))


def confidence(logits: Tensor) -> Tensor:
    """v_k = var_k / sum_j var_j for each model and sample, (models, samples); the variance is over
    classes. Models that tell no class apart weigh nothing, unless all are such: then the same."""
    variance = logits.var(dim=2, correction=0) + torch.finfo(logits.dtype).tiny
    return variance / variance.sum(dim=0)


def consensus(logits: Tensor) -> Consensus:
    """From logits, (models, samples, num_classes)."""
    v = confidence(logits)
    labels = torch.einsum("ks,ksc->sc", v, logits).argmax(dim=1)
    v = v * (logits.argmax(dim=2) != labels)
    total = v.sum(dim=0)
    others = torch.einsum("ks,ksc->sc", v / total.where(total > 0, 1), logits)
    return Consensus(labels, others, (total > 0).to(logits))


def consensus_loss(scores: Tensor, found: Consensus, diversity: float) -> Tensor:
    """CE(scores, labels) + diversity * KL(softmax others || softmax scores), the mean of a sample;
    one that is not disputed has no KL."""
    found_log, others_log = scores.log_softmax(dim=1), found.others.log_softmax(dim=1)
    distances = F.kl_div(found_log, others_log, reduction="none", log_target=True).sum(dim=1)
    return F.cross_entropy(scores, found.labels) + diversity * (distances * found.disputed).mean()
