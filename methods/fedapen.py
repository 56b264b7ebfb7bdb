"""FedAPEN: personalized federated learning with adaptability to statistical heterogeneity.

Qin et al., KDD 2023. https://doi.org/10.1145/3580305.3599344

    h_k: client k's own model; g: a model shared by all; w_k: weight of h_k's logits, 0.5 at first

    Client k                                                            Server
    1  g_k <- g                                                         5  g <- mean of the g_k
    2  w_k <- SGD on CE(w h_k + (1 - w) g, y) over data held out        6  broadcast g
       of training, models fixed, w kept in [0, 1]
    3  L_h = CE(h_k, y) + KL(g_k || h_k) + CE(w_k h_k + (1 - w_k) g_k, y)
       L_g = CE(g_k, y) + KL(h_k || g_k) + CE(w_k h_k + (1 - w_k) g_k, y)
       h_k <- SGD on L_h, g_k <- SGD on L_g, side by side, E epochs
    4  upload g_k

    Inference: w_k h_k + (1 - w_k) g

Choices. The authors' clients all take part, get the new g when a round ends and learn w then. Here
a client learns w when it next gets a g, to train or (on a copy) to be evaluated, which is the same
if all take part; until it has trained there is nothing to weigh, and w stays 0.5. The held-out data
are drawn once, and a client too small to hold out a sample keeps w = 0.5. --hp.held-out 0 is FedEN.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import zoo
from raysim import (
    ClientContext,
    ClientState,
    ConfigError,
    Fleet,
    Method,
    Reply,
    ServerContext,
    Task,
    Weights,
    evaluating,
    get_weights,
    kl,
    set_weights,
    weighted_mean,
)
from raysim.errors import unknown
from zoo import SplitModel


class Download(NamedTuple):
    shared: Weights


class Upload(NamedTuple):
    shared: Weights


@dataclass
class Client(ClientState):
    shared: SplitModel  # g_k, overwritten by every download
    weight: Tensor  # w_k, never leaves the client
    held_out: Tensor  # positions in its training data
    trained: bool = False


@dataclass
class Server:
    shared: SplitModel


@dataclass(frozen=True)
class FedAPEN(Method[Client, Server]):
    shared_model: str = "cnn5"
    """Architecture of the shared model g."""
    held_out: float = 0.05
    """Share of a client's training data that only w is learned on; 0 is FedEN, w = 0.5."""
    weight_lr: float = 0.001
    """Step size of w."""
    weight_epochs: int = 10
    """Passes over the data held out whenever w is learned."""

    def check(self, fleet: Fleet, task: Task) -> None:
        if not 0 <= self.held_out < 1:
            raise ConfigError(f"--hp.held-out must be in [0, 1), got {self.held_out}. Try 0.05")
        if self.shared_model not in zoo.names():
            raise unknown("model", self.shared_model, zoo.names(), "--hp.shared-model")

    def init_server(self, ctx: ServerContext) -> Server:
        return Server(shared=ctx.build_model(self.shared_model))

    def init_client(self, model: SplitModel, ctx: ClientContext) -> Client:
        shared, n = ctx.build_model(self.shared_model), ctx.num_samples
        held_out = torch.randperm(n)[: int(self.held_out * n)]
        return Client(model, shared, torch.tensor(0.5, device=ctx.device), held_out)

    def broadcast(self, server: Server, cohort: Sequence[int], ctx: ServerContext) -> Download:
        return Download(get_weights(server.shared))

    def receive(self, client: Client, message: Download, ctx: ClientContext) -> None:
        set_weights(client.shared, message.shared)
        if client.trained and len(client.held_out):
            client.weight = self.learn_weight(client, ctx)

    def learn_weight(self, client: Client, ctx: ClientContext) -> Tensor:
        """w for the models as they are, starting from the last."""
        ctx = replace(ctx, indices=ctx.indices[client.held_out.cpu().numpy()])
        own, shared = client.model, client.shared
        with evaluating(own, shared), ctx.autocast():
            seen = [(own(x).float(), shared(x).float(), y) for x, y in ctx.samples()]
        h, g, y = (torch.cat(part) for part in zip(*seen, strict=True))
        w, target = client.weight, F.one_hot(y, h.shape[1])
        for _ in range(self.weight_epochs):
            for rows in torch.split(torch.arange(len(y)), ctx.train.batch_size):
                error = ensemble(w, h[rows], g[rows]).softmax(dim=1) - target[rows]
                slope = (error * (h - g)[rows]).sum(dim=1).mean()  # of CE
                w = (w - self.weight_lr * slope).clamp(0, 1)
        return w

    def client_update(self, client: Client, message: Download, ctx: ClientContext) -> Upload:
        def loss(x: Tensor, y: Tensor) -> Tensor:
            h, g, w = client.model(x), client.shared(x), client.weight
            both_h, both_g = ensemble(w, h, g.detach()), ensemble(w, h.detach(), g)
            loss_h = F.cross_entropy(h, y) + kl(g, h) + F.cross_entropy(both_h, y)
            loss_g = F.cross_entropy(g, y) + kl(h, g) + F.cross_entropy(both_g, y)
            return loss_h + loss_g  # each reaches its own model only, so one step does both

        rest = np.delete(ctx.indices, client.held_out.cpu().numpy())
        replace(ctx, indices=rest).fit(loss, client.model, client.shared)
        client.trained = True
        return Upload(get_weights(client.shared))

    def expected(self, client_id: int, ctx: ServerContext) -> Upload:
        return Upload(ctx.weights_like(self.shared_model))

    def server_update(
        self, server: Server, replies: Sequence[Reply[Upload]], ctx: ServerContext
    ) -> None:
        uploads = [reply.payload.shared for reply in replies]
        set_weights(server.shared, weighted_mean(uploads, [1.0] * len(uploads)))

    def predict(self, client: Client, x: Tensor) -> Tensor:
        return ensemble(client.weight, client.model(x), client.shared(x))


def ensemble(w: Tensor, h: Tensor, g: Tensor) -> Tensor:
    return w * h + (1 - w) * g
