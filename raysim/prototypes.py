"""Class prototypes: one vector for each class, as FedProto and the methods after it use them.

A table of prototypes is (classes, width); beside it `known`, (classes,), says which of them exist.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from raysim.method import ClientContext
from raysim.ops import class_means, evaluating
from zoo import SplitModel


def prototypes_of(model: SplitModel, ctx: ClientContext) -> tuple[Tensor, Tensor]:
    """A client's own: the mean representation of each class it has, over all of its training data
    and in evaluation mode, and those classes in ascending order."""
    with evaluating(model), ctx.autocast():
        return class_means(model.features, ctx.samples())


def mean_by_class(
    prototypes: Tensor, classes: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mean of the rows of each class that occurs, and those classes in ascending order: what all
    clients sent, end to end, becomes one prototype a class. Rows weigh the same unless `weights`
    says otherwise."""
    weights = torch.ones_like(classes) if weights is None else weights
    weights = weights.to(prototypes.dtype)
    present, place = torch.unique(classes, return_inverse=True)
    total = weights.new_zeros(len(present)).index_add_(0, place, weights)
    mean = prototypes.new_zeros(len(present), prototypes.shape[1])
    mean.index_add_(0, place, prototypes * weights.unsqueeze(1))
    return mean / total.unsqueeze(1), present


def empty_table(model: SplitModel, ctx: ClientContext) -> tuple[Tensor, Tensor]:
    """Prototypes and `known` of a client that has heard of none."""
    classes = ctx.task.num_classes
    return (
        torch.zeros(classes, model.feature_dim, device=ctx.device),
        torch.zeros(classes, dtype=torch.bool, device=ctx.device),
    )


def pull(r: Tensor, y: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    """Mean squared distance, over batch and width, of representations to the prototypes of their
    classes; a sample whose class has none adds nothing."""
    target = torch.where(known[y].unsqueeze(1), prototypes[y], r.detach())
    return F.mse_loss(r, target)


def nearest(r: Tensor, prototypes: Tensor, known: Tensor) -> Tensor:
    """Scores, (batch, classes): minus the mean squared distance to each prototype, and -inf, which
    is never the answer, where there is none."""
    distance = torch.cdist(r.float(), prototypes).square() / r.shape[1]
    return -distance.masked_fill(~known, torch.inf)


def distances(a: Tensor, b: Tensor) -> Tensor:
    """||a_i - b_j||, from the differences and not from expanded squares, which may round to less
    than zero and have no root; where it is zero, so is its gradient."""
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
