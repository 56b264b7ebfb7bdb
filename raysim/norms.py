"""The statistics of batch norm, apart from what it learns."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

Norm = nn.modules.batchnorm._BatchNorm
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def is_statistic(name: str) -> bool:
    """Whether a weight of this name is measured, not learned."""
    return name.rpartition(".")[2] in _STATISTICS


def norms(model: nn.Module) -> list[Norm]:
    return [module for module in model.modules() if isinstance(module, Norm)]


@torch.no_grad()
def measure(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Replace the statistics by the plain average over these batches, in one pass: HeteroFL's
    static batch norm. Batches of one sample have none; where there are no others, all stays. The
    model is left in evaluation mode."""
    model.eval()
    found = norms(model)
    usual = [norm.momentum for norm in found]
    fresh = True
    for x, _ in batches:
        if len(x) < 2:
            continue
        for norm in found if fresh else ():
            norm.train()
            norm.reset_running_stats()
            norm.momentum = None  # the average of all batches so far
        fresh = False
        model(x)
    for norm, momentum in zip(found, usual, strict=True):
        norm.eval()
        norm.momentum = momentum


def by_batch(model: nn.Module, x: Tensor) -> Tensor:
    """A model's answers in evaluation with the statistics of this very batch, as in FedRolex's
    public code. One sample has none: it gets the running ones."""
    found = norms(model) if len(x) > 1 else []
    try:
        for norm in found:
            norm.train()
            norm.track_running_stats = False  # what was measured stays
        answers: Tensor = model(x)
    finally:
        for norm in found:
            norm.eval()
            norm.track_running_stats = True
    return answers
