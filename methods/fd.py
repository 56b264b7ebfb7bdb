"""FD: federated distillation, also called FedDistill.

Jeong et al., NeurIPS 2018 workshop. https://arxiv.org/abs/1811.11479

    Client k                                        Server
    1  E epochs on CE(z, y) + lambda * CE(z, q)     3  for every class c somebody sent:
         z = f_k(x), q = softmax(Z_y)                    Z_c <- mean of the z_k,c that were sent
       (without a global Z_y: q = softmax(z),       4  broadcast Z
        detached, which has no gradient)
    2  upload z_k,c = mean of z over class c

    Inference: the client's own model.

Choices. As in the paper and in HtFLlib, the z_k,c are gathered while the client trains, and their
mean over clients is unweighted and made anew every round. As in HtFLlib, that mean is one for all
clients; the paper leaves a client's own contribution out of what it gets (--hp.exclude-own). Since
November 2025 HtFLlib takes the logits Z_y themselves for probabilities, which leaves the loss
without a lower bound; --hp.raw does so too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raysim import (
    ClientContext,
    ClientState,
    Method,
    PerClient,
    Reply,
    ServerContext,
    Uncounted,
    class_means,
    evaluating,
    like,
)


class Download(NamedTuple):
    logits: Tensor  # Z, (known classes, num_classes)
    classes: Uncounted[Tensor]  # (known classes,)


class Upload(NamedTuple):
    logits: Tensor  # (classes of the client, num_classes)
    classes: Uncounted[Tensor]


@dataclass
class Server:
    """What the last round's participants sent, row by row."""

    logits: Tensor  # (rows, num_classes)
    classes: Tensor  # (rows,)
    senders: Tensor  # (rows,)


@dataclass(frozen=True)
class FD(Method[ClientState, Server]):
    only_reads = True

    distill: float = 1.0
    """lambda, weight of the distillation loss."""
    exclude_own: bool = False
    """Leave a client's own logits out of the mean it gets, as the paper does: each client then gets
    a message of its own."""
    gather: Literal["training", "after"] = "training"
    """Take a client's logits while it trains, as the paper does, or afterwards from the trained
    model over all of its data."""
    raw: bool = False
    """Use logits as if they were probabilities, as HtFLlib does since November 2025."""

    def init_server(self, ctx: ServerContext) -> Server:
        nobody = torch.zeros(0, dtype=torch.int64)
        return Server(torch.zeros(0, ctx.task.num_classes), nobody, nobody.clone())

    def broadcast(
        self, server: Server, cohort: Sequence[int], ctx: ServerContext
    ) -> PerClient | Download:
        if not self.exclude_own:
            return mean(server.logits, server.classes)
        others = {client: server.senders != client for client in cohort}
        return PerClient(
            {k: mean(server.logits[rows], server.classes[rows]) for k, rows in others.items()}
        )

    def client_update(self, client: ClientState, message: Download, ctx: ClientContext) -> Upload:
        model, size = client.model, ctx.task.num_classes
        known = torch.zeros(size, dtype=torch.bool, device=ctx.device)
        known[message.classes] = True
        target = torch.zeros(size, size, device=ctx.device)
        target[message.classes] = message.logits
        total, count = torch.zeros_like(target), torch.zeros_like(target[0])

        def loss(x: Tensor, y: Tensor) -> Tensor:
            z = model(x)
            total.index_add_(0, y, z.detach().float())
            count.index_add_(0, y, torch.ones_like(y, dtype=count.dtype))
            value = F.cross_entropy(z, y)
            if len(message.classes):
                q = torch.where(known[y].unsqueeze(1), target[y], z.detach())
                value = value + self.distill * F.cross_entropy(z, q if self.raw else q.softmax(1))
            return value

        ctx.fit(loss, model)
        if self.gather == "after":
            with evaluating(model), ctx.autocast():
                return Upload(*class_means(model, ctx.samples()))
        classes = count.nonzero().squeeze(1)
        return Upload(total[classes] / count[classes].unsqueeze(1), classes)

    def expected(self, client_id: int, ctx: ServerContext) -> Upload:
        return Upload(like(None, ctx.task.num_classes), like(None, dtype=torch.int64))

    def server_update(
        self, server: Server, replies: Sequence[Reply[Upload]], ctx: ServerContext
    ) -> None:
        server.logits = torch.cat([reply.payload.logits for reply in replies])
        server.classes = torch.cat([reply.payload.classes for reply in replies])
        server.senders = torch.cat(
            [torch.full_like(reply.payload.classes, reply.client_id) for reply in replies]
        )


def mean(logits: Tensor, classes: Tensor) -> Download:
    """The mean of each class that occurs; of nothing, nothing."""
    if not len(classes):
        return Download(logits, classes)
    return Download(*class_means(nn.Identity(), [(logits, classes)]))
