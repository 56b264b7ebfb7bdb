"""Many representations into one: FedRE's mechanisms.

The paper spells out RAP only, the random average of prototypes, and so does its code. The other
five are known by name and by their accuracy; we read them as

                         a random single    vanilla average    random average
    representations      rsr                var                rar
    class prototypes     rsp                vap                rap

Nothing is known of how Gaussian or Laplacian draws, which may be negative, become weights: by their
absolute values here, or by a softmax of the draws themselves.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Mechanism = Literal["rsr", "var", "rar", "rsp", "vap", "rap"]
Distribution = Literal["uniform", "gaussian", "laplacian"]
Normalization = Literal["sum", "softmax"]


def of_prototypes(mechanism: Mechanism) -> bool:
    """Whether it entangles class means; else each sample's representation."""
    return mechanism.endswith("p")


def draw(distribution: Distribution, n: int) -> Tensor:
    """u: n independent draws from U(0, 1), N(0, 1) or Laplace(0, 1), on the CPU so that they are
    the same on every device."""
    if distribution == "laplacian":
        u: Tensor = torch.distributions.Laplace(0.0, 1.0).sample((n,))
        return u
    return torch.rand(n) if distribution == "uniform" else torch.randn(n)


def mixture(mechanism: Mechanism, u: Tensor, normalize: Normalization = "sum") -> Tensor:
    """p: how much of each representation is taken, given a draw for each; sums to one."""
    equal = torch.full_like(u, 1 / len(u))
    if mechanism in ("var", "vap"):
        return equal
    if mechanism in ("rsr", "rsp"):  # the largest of independent draws is any of them equally often
        return F.one_hot(u.argmax(), len(u)).to(u)
    if normalize == "softmax":
        return u.softmax(dim=0)
    u = u.abs()
    return u / u.sum() if u.any() else equal


def entangle(r: Tensor, classes: Tensor, p: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """One representation and one soft label, made with the same weights. Costs O(n (d + C))."""
    return p @ r, p.new_zeros(num_classes).index_add_(0, classes, p)
