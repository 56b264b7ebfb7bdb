"""What methods add to a local objective or to its gradient."""

from typing import Any

import torch
from torch import Tensor, nn

from raysim.wire import Weights


def trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that training changes, by name: no batch-norm statistics, nothing frozen."""
    return {name: p for name, p in module.named_parameters() if p.requires_grad}


def proximal(module: nn.Module, anchor: Weights, mu: float) -> Tensor:
    """FedProx's mu/2 ||w - anchor||^2 over all that is trainable; its gradient is mu (w - anchor).
    `anchor` may hold more names, such as batch-norm statistics, and is a constant."""
    parameters = trainable(module)
    distance: Tensor = _Distance.apply(  # type: ignore[no-untyped-call]
        [anchor[name].detach() for name in parameters], *parameters.values()
    )
    return mu * distance


class _Distance(torch.autograd.Function):
    """1/2 ||w - anchor||^2 in one node of the graph; a node for each operation on each tensor makes
    a step of a small ResNet a third longer."""

    @staticmethod
    def forward(ctx: Any, anchor: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.differences = torch._foreach_sub(parameters, anchor)
        return torch.stack(torch._foreach_norm(ctx.differences)).square().sum() / 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return None, *torch._foreach_mul(ctx.differences, gradients[0])


@torch.no_grad()
def correct(module: nn.Module, correction: Weights) -> None:
    """Add a constant to the gradient of all that is trainable: SCAFFOLD's g <- g + (c - c_k). A
    parameter that the loss did not reach has the gradient 0."""
    for name, parameter in trainable(module).items():
        if parameter.grad is None:
            parameter.grad = correction[name].clone()
        else:
            parameter.grad.add_(correction[name])


@torch.no_grad()
def shift(module: nn.Module, direction: Weights, lr: float, weight_decay: float) -> None:
    """Move all that is trainable by -lr * direction, between the backward pass and the optimizer's
    step: the same as after it, for the optimizer decays the weights as they were."""
    for name, parameter in trainable(module).items():
        if parameter.grad is not None:
            parameter.grad.add_(direction[name], alpha=lr * weight_decay)
        parameter.sub_(direction[name], alpha=lr)


class MeanGradient:
    """The mean gradient of the steps of a training, weight decay included: what SCAFFOLD's control
    variate estimates. `add` after each backward pass."""

    def __init__(self, module: nn.Module, weight_decay: float) -> None:
        self.parameters = trainable(module)
        self.weight_decay = weight_decay
        self.steps = 0
        self._sums = {name: torch.zeros_like(p) for name, p in self.parameters.items()}

    @torch.no_grad()
    def add(self) -> None:
        self.steps += 1
        for name, parameter in self.parameters.items():
            if parameter.grad is not None:
                self._sums[name].add_(parameter.grad)
            if self.weight_decay:
                self._sums[name].add_(parameter, alpha=self.weight_decay)

    def mean(self) -> Weights:
        return {name: total / max(self.steps, 1) for name, total in self._sums.items()}
