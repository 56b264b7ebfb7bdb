"""MOON: model-contrastive federated learning.

Li et al., CVPR 2021. https://arxiv.org/abs/2103.16257 Layer-wise over nested models as FedIN runs
it: Chan et al., https://arxiv.org/abs/2304.00759

    Client k                                         Server
    1  w_p <- its model w_k as it last left it       5  for every layer l: w_l <- mean of w_k,l over
    2  w_k <- its layers of w, also kept as w_g           the participants that have it; else as it
    3  E epochs on D_k of cross-entropy + mu * L:         was
         z, z_g, z_p = the representations of x      6  broadcast w
           by w_k, w_g, w_p (both frozen)
         L = -log( e(z, z_g) / (e(z, z_g) + e(z, z_p)) ),  e(a, b) = exp(cos(a, b) / T)
    4  upload w_k

Choices. z is the representation before the head: FedIN's Table 2 counts no projection head, and a
fleet may have one width for it (--fleet.feature-dim). The frozen models run in evaluation mode. A
client's first time has no w_p, so no L: with w_g in its place, the paper's way, L is log 2 whatever
z is, and teaches nothing. One former model is kept, as in the paper. Between rounds it is the
client's model itself, which is no further memory; while a client trains there are three.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

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
    Weights,
    get_weights,
    nested,
    set_weights,
    weighted_mean,
)
from raysim.nested import Union
from zoo import SplitModel


class Download(NamedTuple):
    model: Weights


class Upload(NamedTuple):
    model: Weights


@dataclass
class Client(ClientState):
    trained: bool  # whether `model` is what a training of its own left
    previous: Weights | None  # w_p, from the download to the end of training


@dataclass(frozen=True)
class Moon(Method[Client, Union]):
    mu: float = 1.0
    """Weight of the contrastive loss; 0 is FedAvg."""
    temperature: float = 0.5
    """T, which divides the similarities."""
    weighting: Literal["samples", "uniform"] = "samples"
    """How participants are weighted: by n_k as in FedAvg, or equally as in FedIN's Eq. 19."""

    def check(self, fleet: Fleet, task: Task) -> None:
        nested.check(fleet, task, "moon")
        if not self.mu >= 0:
            raise ConfigError(f"--hp.mu must be 0 or more, got {self.mu}. Try --hp.mu 1")
        if not self.temperature > 0:
            raise ConfigError(
                f"--hp.temperature must be above 0, got {self.temperature}. "
                f"Try --hp.temperature 0.5"
            )

    def init_server(self, ctx: ServerContext) -> Union:
        return nested.union(ctx)

    def init_client(self, model: SplitModel, ctx: ClientContext) -> Client:
        return Client(model, trained=False, previous=None)

    def broadcast(
        self, server: Union, cohort: Sequence[int], ctx: ServerContext
    ) -> PerClient | Download:
        return nested.deal(
            server, cohort, ctx, lambda layers: Download(nested.part(server.weights, layers))
        )

    def receive(self, client: Client, message: Download, ctx: ClientContext) -> None:
        if client.trained and self.mu:
            client.previous = {k: t.clone() for k, t in get_weights(client.model).items()}
        set_weights(client.model, message.model)

    def client_update(self, client: Client, message: Download, ctx: ClientContext) -> Upload:
        model = client.model
        if client.previous is None:
            ctx.fit(lambda x, y: F.cross_entropy(model(x), y), model)
        else:
            w_g, w_p = frozen(model, message.model), frozen(model, client.previous)

            def loss(x: Tensor, y: Tensor) -> Tensor:
                with torch.no_grad():
                    z_g, z_p = w_g.features(x), w_p.features(x)
                z = model.features(x)
                away = contrast(z, z_g, z_p, self.temperature)
                return F.cross_entropy(model.head(z), y) + self.mu * away

            ctx.fit(loss, model)
        client.trained, client.previous = True, None
        return Upload(get_weights(model))

    def expected(self, client_id: int, ctx: ServerContext) -> Upload:
        return Upload(ctx.weights_like(ctx.fleet.model_of(client_id)))

    def server_update(
        self, server: Union, replies: Sequence[Reply[Upload]], ctx: ServerContext
    ) -> None:
        shares = nested.shares(replies, self.weighting)
        server.weights |= weighted_mean([reply.payload.model for reply in replies], shares)


def contrast(z: Tensor, positive: Tensor, negative: Tensor, temperature: float) -> Tensor:
    """L: the cross-entropy of choosing z's positive over its negative by cosine, the mean of a
    sample."""
    near, far = (F.cosine_similarity(z.float(), r.float(), dim=1) for r in (positive, negative))
    return F.softplus((far - near) / temperature).mean()


def frozen(model: SplitModel, weights: Weights) -> SplitModel:
    """A copy with these weights, in evaluation mode."""
    other = copy.deepcopy(model).requires_grad_(False).eval()
    set_weights(other, weights)
    return other
