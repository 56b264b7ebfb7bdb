"""Stochastic gradient descent, bit for bit torch's, without what comes with torch's.

The first `torch.optim` optimizer of a process imports the compiler (torch._dynamo): 1.4 s and
140 MiB in every actor, for nothing here.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


class SGD:
    """What `torch.optim.SGD(parameters, lr, momentum, weight_decay=weight_decay)` does."""

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        self.parameters = list(parameters)
        self.lr = lr
        self.momentum = momentum
        self.weight_decay = weight_decay
        self._velocity: list[Tensor | None] = [None] * len(self.parameters)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad = torch.zeros_like(parameter.grad)

    @torch.no_grad()
    def step(self) -> None:
        for i, parameter in enumerate(self.parameters):
            gradient = parameter.grad
            if gradient is None:
                continue
            if self.weight_decay:
                gradient = gradient.add(parameter, alpha=self.weight_decay)
            if self.momentum:
                velocity = self._velocity[i]
                if velocity is None:
                    velocity = self._velocity[i] = gradient.clone()
                else:
                    velocity.mul_(self.momentum).add_(gradient)
                gradient = velocity
            parameter.add_(gradient, alpha=-self.lr)
