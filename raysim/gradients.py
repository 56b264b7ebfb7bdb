"""FedIN's gradient alleviation: a gradient for what two losses share, from the gradient of each."""

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

Scope = Literal["tensor", "global"]

_TINY = 1e-12  # a squared norm below which a gradient has no direction


def conflict(local: Sequence[Tensor], other: Sequence[Tensor], scope: Scope) -> list[float]:
    """How much of each local gradient, added to the other one, makes them agree (their inner
    product 0 or more): max(0, -<local, other> / <local, local>), for each tensor on its own or with
    the inner products of all of them together."""
    squares = torch.stack([_dot(g, g) for g in local])
    products = torch.stack([_dot(g, h) for g, h in zip(local, other, strict=True)])
    if scope == "global":
        squares, products = (dots.sum().expand(len(local)) for dots in (squares, products))
    shares = torch.where(squares < _TINY, 0.0, -products / squares).clamp(min=0)
    return shares.tolist()  # one wait for the device, not one a tensor


def _dot(one: Tensor, other: Tensor) -> Tensor:
    return torch.dot(one.flatten(), other.flatten())


class Alleviation:
    """FedIN's Z = G_other + c G_local for the parameters that two losses share; c is lam / 2, or
    without `lam` the smallest with <Z, G_local> >= 0. Parameters of the local loss alone keep
    G_local.

    In a training loop the loss is `join(local, other)`, and `adjust()` follows the backward pass.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], lam: float | None, scope: Scope = "tensor"
    ) -> None:
        self.parameters = list(parameters)
        self.lam = lam
        self.scope = scope
        self._other: Tensor | None = None
        self._scale = 1.0

    def join(self, local: Tensor, other: Tensor) -> Tensor:
        """What to descend; its value is local + other. The lam form needs no other backward pass
        than the loop's: of local + 2/lam other, after which `adjust` multiplies by lam/2. An other
        loss that is not finite is left out."""
        if not other.isfinite():
            return local
        if self.lam:
            self._scale = self.lam / 2
            return local + other / self._scale + (other - other / self._scale).detach()
        self._other = other
        return local + other.detach()

    def adjust(self) -> None:
        """From G_local to Z, if the losses were joined in this step."""
        if self._scale != 1:
            torch._foreach_mul_([g for g in self.gradients() if g is not None], self._scale)
        elif self._other is not None:
            others = torch.autograd.grad(self._other, self.parameters, allow_unused=True)
            self.mix(self.gradients(), others)
        self._other, self._scale = None, 1.0

    def gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self.parameters]

    @torch.no_grad()
    def mix(self, local: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> None:
        """Make `.grad` Z of these gradients, of which None is 0; they stay as they are."""
        found = [
            (p, torch.zeros_like(p) if g is None else g, torch.zeros_like(p) if h is None else h)
            for p, g, h in zip(self.parameters, local, other, strict=True)
            if g is not None or h is not None
        ]
        if self.lam is not None:
            shares = [self.lam / 2] * len(found)
        else:
            shares = conflict([g for _, g, _ in found], [h for _, _, h in found], self.scope)
        for (parameter, g, h), share in zip(found, shares, strict=True):
            parameter.grad = torch.add(h, g, alpha=share) if share else h
