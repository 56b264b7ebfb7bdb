"""What methods add to a local objective or to its gradient."""

import torch
from torch import Tensor, nn

from raysim.wire import Weights


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name: no batch-norm statistics, nothing frozen."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def proximal(module: nn.Module, anchor: Weights, mu: float) -> Tensor:
    """FedProx's mu/2 ||w - anchor||^2 over all that is trainable; its gradient is mu (w - anchor).
    `anchor` may hold more names, such as batch-norm statistics, and is a constant."""
    squares = [
        (parameter - anchor[name].detach()).square().sum()
        for name, parameter in trainable(module).items()
    ]
    return mu / 2 * torch.stack(squares).sum()


@torch.no_grad()
def correct(module: nn.Module, correction: Weights) -> None:
    """Add a constant to the gradient of all that is trainable: SCAFFOLD's g <- g + (c - c_k). A
    parameter that the loss did not reach has the gradient 0."""
    for name, parameter in trainable(module).items():
        if parameter.grad is None:
            parameter.grad = correction[name].clone()
        else:
            parameter.grad.add_(correction[name])
