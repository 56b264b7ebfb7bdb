"""FedProto: federated prototype learning across heterogeneous clients.

Tan et al., AAAI 2022. https://arxiv.org/abs/2105.00243

    Client k                                        Server
    1  E epochs on CE(f_k(g_k(x)), y)               3  for every class c somebody sent:
         + lambda * ||g_k(x) - P_y||^2 / d               P_c <- mean of the p_k,c that were sent
       (classes without a global P_y: CE only)      4  broadcast P
    2  upload p_k,c = mean of g_k(x) over class c

    Inference: the class of the nearest P_c; a class without one is never the answer.

Choices. The prototypes are those of the trained model, over all of D_k: the public codes gather
them while training, from drifting weights (--hp.gather). The mean over clients is unweighted and
made anew every round, as in those codes; --hp.weighting samples gives the paper's |D_k,c| weights.
Their `lambda` is tuned to 10 in HtFLlib and 1 in the original; 1 here.
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
    like,
)
from raysim.prototypes import empty_table, mean_by_class, nearest, prototypes_of, pull
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
    only_reads = True

    pull: float = 1.0
    """lambda, weight of the distance to the global prototypes."""
    weighting: Literal["uniform", "samples"] = "uniform"
    """How the clients' prototypes of a class are averaged: equally, or by the samples behind them.
    """
    inference: Literal["prototype", "head"] = "prototype"
    """Answer with the nearest global prototype, or with the client's own classifier."""
    gather: Literal["after", "during", "last_epoch"] = "after"
    """Which representations make a client's prototypes: those of the trained model over all of its
    data, those that went by while it trained (HtFLlib), or in its last epoch (the authors' code).
    """

    def init_server(self, ctx: ServerContext) -> Server:
        return Server(torch.zeros(0, ctx.fleet.feature_dim), torch.zeros(0, dtype=torch.int64))

    def init_client(self, model: SplitModel, ctx: ClientContext) -> Client:
        return Client(model, *empty_table(model, ctx))

    def broadcast(self, server: Server, cohort: Sequence[int], ctx: ServerContext) -> Download:
        return Download(server.prototypes, server.classes)

    def receive(self, client: Client, message: Download, ctx: ClientContext) -> None:
        client.known = torch.zeros_like(client.known)
        client.known[message.classes] = True
        client.prototypes[message.classes] = message.prototypes

    def client_update(self, client: Client, message: Download, ctx: ClientContext) -> Upload:
        model = client.model

        passed: list[tuple[Tensor, Tensor]] = []

        def loss(x: Tensor, y: Tensor) -> Tensor:
            r = model.features(x)
            if self.gather != "after":
                passed.append((r.detach(), y))
            distance = pull(r, y, client.prototypes, client.known)
            return F.cross_entropy(model.head(r), y) + self.pull * distance

        ctx.fit(loss, model)
        if self.gather == "after":
            prototypes, classes = prototypes_of(model, ctx)
        else:
            epochs = ctx.train.epochs if self.gather == "last_epoch" else 1
            prototypes, classes = class_means(lambda r: r, passed[-(len(passed) // epochs) :])
        return Upload(prototypes, classes, torch.bincount(ctx.labels)[classes])

    def expected(self, client_id: int, ctx: ServerContext) -> Upload:
        ids = like(None, dtype=torch.int64)
        return Upload(like(None, ctx.fleet.feature_dim), ids, ids)

    def server_update(
        self, server: Server, replies: Sequence[Reply[Upload]], ctx: ServerContext
    ) -> None:
        sent = [reply.payload for reply in replies]
        server.prototypes, server.classes = mean_by_class(
            torch.cat([upload.prototypes for upload in sent]),
            torch.cat([upload.classes for upload in sent]),
            torch.cat([upload.counts for upload in sent]) if self.weighting == "samples" else None,
        )

    def predict(self, client: Client, x: Tensor) -> Tensor:
        r = client.model.features(x)
        if self.inference == "head":
            scores: Tensor = client.model.head(r)
            return scores
        return nearest(r, client.prototypes, client.known)
