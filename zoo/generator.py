"""FedGen's generator of representations. https://arxiv.org/abs/2105.10056"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raysim.ops import fit

Heads = Sequence[tuple[Tensor, Tensor]]
"""Weight and bias of each."""


class Generator(nn.Module):
    """A representation, the input of a head, for each label: from the label and noise ~ U(0, 1)."""

    def __init__(self, noise_dim: int, num_classes: int, hidden_dim: int, feature_dim: int) -> None:
        super().__init__()
        self.noise_dim = noise_dim
        self.num_classes = num_classes
        self.hidden = nn.Linear(noise_dim + num_classes, hidden_dim)
        self.norm = nn.BatchNorm1d(hidden_dim)
        self.out = nn.Linear(hidden_dim, feature_dim)

    def forward(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """What was made, (batch, feature_dim), and the noise it was made of."""
        noise = torch.rand(len(y), self.noise_dim).to(y.device)
        seed = torch.cat([noise, F.one_hot(y, self.num_classes).to(noise)], dim=1)
        return self.out(self.norm(self.hidden(seed)).relu()), noise


def diversity_loss(made: Tensor, noise: Tensor) -> Tensor:
    """exp(-mean of a_ij b_ij) over all pairs of a batch, with a the mean squared distance of their
    noise and b the mean absolute one of what was made of it: the farther apart, the smaller."""
    a = (noise.unsqueeze(0) - noise.unsqueeze(1)).square().mean(dim=2)
    b = (made.unsqueeze(0) - made.unsqueeze(1)).abs().mean(dim=2)
    return torch.exp(-(a * b).mean())


def ensemble_loss(made: Tensor, y: Tensor, heads: Heads, counts: Tensor) -> Tensor:
    """sum_k mean(p_k,y CE(f_k(made), y)): each head f_k judges by its share p_k,y of what `counts`,
    (heads, num_classes), has of class y."""
    errors = [F.cross_entropy(F.linear(made, *head), y, reduction="none") for head in heads]
    shares = counts / counts.sum(dim=0).clamp(min=1)
    return (shares[:, y] * torch.stack(errors)).mean(dim=1).sum()


def teach(
    generator: Generator,
    heads: Heads,
    counts: Tensor,
    present: Tensor,
    *,
    diversity: float,
    lr: float,
    steps: int,
    batch_size: int,
) -> None:
    """Steps of Adam for a generator on `ensemble_loss` and `diversity_loss`, with labels that are
    uniform over the classes `present`. The weight decay is FedGen's."""
    device = generator.out.weight.device
    heads = [(weight.to(device), bias.to(device)) for weight, bias in heads]
    counts = counts.to(device)

    def loss(y: Tensor) -> Tensor:
        made, noise = generator(y)
        return ensemble_loss(made, y, heads, counts) + diversity * diversity_loss(made, noise)

    y = draw_labels(present.to(device), steps * batch_size)
    adam = torch.optim.Adam
    fit(loss, generator, data=(y,), lr=lr, batch_size=batch_size, optimizer=adam, weight_decay=0.01)


def draw_labels(counts: Tensor, size: int) -> Tensor:
    """Labels as often as they were counted; one that was not is never drawn."""
    return torch.multinomial(counts.float().cpu(), size, replacement=True).to(counts.device)
