"""FedNova: clients may take different numbers of local steps; each counts by its direction.

Wang et al., NeurIPS 2020. https://arxiv.org/abs/2007.07481 Layer-wise over nested models as FedIN
runs it: Chan et al., https://arxiv.org/abs/2304.00759

    Client k                                     Server, for every layer l that somebody sent
    1  y <- its layers of x                      4  p_k = n_k / sum of n over those who sent it
    2  E epochs on D_k: tau_k steps of size eta  5  x_l <- x_l - (sum of p_k a_k) (sum of p_k d_k,l)
    3  upload d_k = (x - y) / a_k and a_k        6  broadcast x

a_k, the paper's ||a_k||_1, is the distance, in units of eta, that tau_k steps go under the constant
gradient 1: the optimizer used is played with one number. Plain SGD gives a_k = tau_k; momentum rho
gives (tau_k - rho (1 - rho^tau_k) / (1 - rho)) / (1 - rho); the proximal term alone gives the sum
of (1 - eta mu)^s. Momentum with the proximal term is played as it is, where the public code mixes
two formulas that each hold alone. Weight decay is part of the gradient. Adam has no such vector:
a_k = tau_k, which counts its steps.

Choices. d_k and the step concern trainable weights; batch-norm statistics are averaged by p_k. The
clients' optimizers are born anew each round, as in the paper; its server momentum is left out. The
public code uses tau_k in place of a_k in step 5 when there is a proximal term; a_k always here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

from raysim import (
    ClientContext,
    ClientState,
    ConfigError,
    Fleet,
    Method,
    PerClient,
    Reply,
    ServerContext,
    Task,
    TrainConfig,
    Weights,
    get_weights,
    nested,
    set_weights,
    weighted_mean,
)
from raysim.nested import Union
from raysim.terms import proximal, trainable


class Download(NamedTuple):
    model: Weights


class Upload(NamedTuple):
    direction: Weights  # d_k, of trainable weights
    statistics: Weights  # batch norm's
    distance: float  # a_k


@dataclass(frozen=True)
class FedNova(Method[ClientState, Union]):
    mu: float = 0.0
    """Weight of FedProx's proximal term in the clients' objective; 0 leaves it out."""
    weighting: Literal["samples", "uniform"] = "samples"
    """How participants are weighted: by n_k as in the paper, or equally as in FedIN's Eq. 19."""

    def check(self, fleet: Fleet, task: Task) -> None:
        nested.check(fleet, task, "fednova")
        if not self.mu >= 0:
            raise ConfigError(f"--hp.mu must be 0 or more, got {self.mu}. Try --hp.mu 0")

    def init_server(self, ctx: ServerContext) -> Union:
        return nested.union(ctx)

    def broadcast(
        self, server: Union, cohort: Sequence[int], ctx: ServerContext
    ) -> PerClient | Download:
        return nested.deal(
            server, cohort, ctx, lambda layers: Download(nested.part(server.weights, layers))
        )

    def receive(self, client: ClientState, message: Download, ctx: ClientContext) -> None:
        set_weights(client.model, message.model)

    def client_update(self, client: ClientState, message: Download, ctx: ClientContext) -> Upload:
        model, x, steps = client.model, message.model, 0

        def loss(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            objective = F.cross_entropy(model(images), labels)
            return objective + proximal(model, x, self.mu) if self.mu else objective

        def count() -> None:
            nonlocal steps
            steps += 1

        ctx.fit(loss, model, adjust=count)
        y, a = get_weights(model), self.distance(steps, ctx.train)
        direction = {name: (x[name] - y[name]) / (a or 1) for name in trainable(model)}
        return Upload(direction, {k: t for k, t in y.items() if k not in direction}, a)

    def distance(self, steps: int, train: TrainConfig) -> float:
        """a_k: how far so many steps go under the constant gradient 1, in units of the learning
        rate."""
        if train.optimizer == "adam":
            return float(steps)
        if train.lr * self.mu >= 1:
            limit = f"below 1 / --train.lr = {1 / train.lr:g}"
            raise ConfigError(f"--hp.mu must be {limit}, got {self.mu}: it would overshoot")
        gone = velocity = 0.0
        for _ in range(steps):
            velocity = train.momentum * velocity + 1 - train.lr * self.mu * gone
            gone += velocity
        return gone

    def expected(self, client_id: int, ctx: ServerContext) -> Upload:
        name = ctx.fleet.model_of(client_id)
        direction = nested.trainable_like(name, ctx)
        weights = ctx.weights_like(name).items()
        return Upload(direction, {k: like for k, like in weights if k not in direction}, 0.0)

    def server_update(
        self, server: Union, replies: Sequence[Reply[Upload]], ctx: ServerContext
    ) -> None:
        shares, uploads = nested.shares(replies, self.weighting), [r.payload for r in replies]
        direction = weighted_mean([one.direction for one in uploads], shares)
        distances = [torch.tensor(one.distance, dtype=torch.float64) for one in uploads]
        distance = weighted_mean(
            [dict.fromkeys(u.direction, a) for u, a in zip(uploads, distances, strict=True)], shares
        )
        for name, d in direction.items():
            server.weights[name] = server.weights[name] - distance[name] * d
        server.weights |= weighted_mean([one.statistics for one in uploads], shares)
