"""FedProto: federated prototype learning across heterogeneous clients.

Tan et al., AAAI 2022. https://arxiv.org/abs/2105.00243

    Client k                                        Server
    1  E epochs on CE(f_k(g_k(x)), y)               3  for every class c somebody sent:
         + lambda * ||g_k(x) - P_y||^2 / d               P_c <- mean of the p_k,c that were sent
       (classes without a global P_y: CE only)      4  broadcast P
    2  upload p_k,c = mean of g_k(x) over class c

    Inference: the class of the nearest P_c; a class without one is never the answer.

Choices. The prototypes are those of the trained model, over all of D_k: the public codes gather
them while training, from drifting weights. The mean over clients is unweighted and made anew every
round, as in those codes; --hp.weighting samples gives the paper's |D_k,c| weights. Their `lambda`
is tuned to 10 in HtFLlib and 1 in the original; 1 here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from raysim import (
    ClientContext,
    ClientState,
    Method,
    Reply,
    ServerContext,
    Uncounted,
    class_means,
    evaluating,
    like,
)
from zoo import SplitModel


class Download(NamedTuple):
    prototypes: Tensor  # (known classes, feature_dim)
    classes: Uncounted[Tensor]  # (known classes,)


class Upload(NamedTuple):
    prototypes: Tensor  # (classes of the client, feature_dim)
    classes: Uncounted[Tensor]
    counts: Uncounted[Tensor]  # samples of each; read only with weighting=samples


@dataclass
class Client(ClientState):
    prototypes: Tensor  # P as last received, (classes, feature_dim)
    known: Tensor  # which of them exist


@dataclass
class Server:
    prototypes: Tensor
    classes: Tensor


@dataclass(frozen=True)
class FedProto(Method[Client, Server]):
    pull: float = 1.0
    """lambda, weight of the distance to the global prototypes."""
    weighting: Literal["uniform", "samples"] = "uniform"
    """How the clients' prototypes of a class are averaged: equally, or by the samples behind them.
    """
    inference: Literal["prototype", "head"] = "prototype"
    """Answer with the nearest global prototype, or with the client's own classifier."""

    def init_server(self, ctx: ServerContext) -> Server:
        return Server(torch.zeros(0, ctx.fleet.feature_dim), torch.zeros(0, dtype=torch.int64))

    def init_client(self, model: SplitModel, ctx: ClientContext) -> Client:
        size = ctx.task.num_classes, model.feature_dim
        return Client(
            model,
            prototypes=torch.zeros(size, device=ctx.device),
            known=torch.zeros(ctx.task.num_classes, dtype=torch.bool, device=ctx.device),
        )

    def broadcast(self, server: Server, cohort: Sequence[int], ctx: ServerContext) -> Download:
        return Download(server.prototypes, server.classes)

    def receive(self, client: Client, message: Download, ctx: ClientContext) -> None:
        client.known = torch.zeros_like(client.known)
        client.known[message.classes] = True
        client.prototypes[message.classes] = message.prototypes

    def client_update(self, client: Client, message: Download, ctx: ClientContext) -> Upload:
        model = client.model

        def loss(x: Tensor, y: Tensor) -> Tensor:
            r = model.features(x)
            target = torch.where(client.known[y].unsqueeze(1), client.prototypes[y], r.detach())
            return F.cross_entropy(model.head(r), y) + self.pull * F.mse_loss(r, target)

        ctx.fit(loss, model)
        with evaluating(model), ctx.autocast():
            prototypes, classes = class_means(model.features, ctx.samples())
        return Upload(prototypes, classes, torch.bincount(ctx.labels)[classes])

    def expected(self, client_id: int, ctx: ServerContext) -> Upload:
        ids = like(None, dtype=torch.int64)
        return Upload(like(None, ctx.fleet.feature_dim), ids, ids)

    def server_update(
        self, server: Server, replies: Sequence[Reply[Upload]], ctx: ServerContext
    ) -> None:
        classes = torch.cat([reply.payload.classes for reply in replies])
        prototypes = torch.cat([reply.payload.prototypes for reply in replies])
        counts = torch.cat([reply.payload.counts for reply in replies]).to(prototypes.dtype)
        weights = counts if self.weighting == "samples" else torch.ones_like(counts)

        server.classes, place = torch.unique(classes, return_inverse=True)
        total = weights.new_zeros(len(server.classes)).index_add_(0, place, weights)
        mean = prototypes.new_zeros(len(server.classes), prototypes.shape[1])
        mean.index_add_(0, place, prototypes * weights.unsqueeze(1))
        server.prototypes = mean / total.unsqueeze(1)

    def predict(self, client: Client, x: Tensor) -> Tensor:
        r = client.model.features(x)
        if self.inference == "head":
            scores: Tensor = client.model.head(r)
            return scores
        distance = torch.cdist(r.float(), client.prototypes).square() / r.shape[1]
        return -distance.masked_fill(~client.known, torch.inf)
