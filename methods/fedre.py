"""FedRE: federated representation entanglement.

Yao et al., CVPR 2026. https://arxiv.org/abs/2511.22265

    Client k                                Server
    1  head_k <- head                       5  for mini-batches of the uploaded pairs:
    2  E epochs of cross-entropy on D_k          head <- head - lr * grad sum_k CE(head(r_k), y_k)
    3  u_c ~ U(0, 1), p_c = u_c / sum(u)    6  broadcast head
       for its classes c
    4  upload r_k = sum_c p_c mu_c, y_k = sum_c p_c e_c
       (mu_c: mean representation of class c, e_c: its one-hot label)

This is the paper's default entanglement, RAP (random average of prototypes). Where we differ from
the authors' code: the head really is broadcast (theirs never is), and it starts from weights of its
own instead of being the very object that client 0 trains. As theirs, the server's loss is summed,
not averaged, over a batch: with 10 participants and batches of 32 that is one step of SGD a round.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raysim import (
    ClientContext,
    ClientState,
    Method,
    Reply,
    ServerContext,
    Uncounted,
    Weights,
    class_means,
    evaluating,
    fit,
    get_weights,
    like,
    set_weights,
)


class Download(NamedTuple):
    head: Weights


class Upload(NamedTuple):
    representation: Tensor  # r_k, (feature_dim,)
    label: Uncounted[Tensor]  # y_k, (num_classes,), sums to one


@dataclass
class Server:
    head: nn.Linear


@dataclass(frozen=True)
class FedRE(Method[ClientState, Server]):
    server_lr: float = 0.01
    """Step size of the global head."""
    server_epochs: int = 1
    """Passes over the uploaded pairs in a round."""
    server_batch_size: int = 32
    """Uploaded pairs in a server step."""

    def init_server(self, ctx: ServerContext) -> Server:
        return Server(head=ctx.build_head())

    def broadcast(self, server: Server, cohort: Sequence[int], ctx: ServerContext) -> Download:
        return Download(get_weights(server.head))

    def receive(self, client: ClientState, message: Download, ctx: ClientContext) -> None:
        set_weights(client.model.head, message.head)

    def client_update(self, client: ClientState, message: Download, ctx: ClientContext) -> Upload:
        model = client.model
        ctx.fit(lambda x, y: F.cross_entropy(model(x), y), model)

        with evaluating(model), ctx.autocast():
            means, classes = class_means(model.features, ctx.samples())
        u = torch.rand(len(classes)).to(means)  # drawn anew every round
        return Upload(*entangle(means, classes, u / u.sum(), ctx.task.num_classes))

    def expected(self, client_id: int, ctx: ServerContext) -> Upload:
        return Upload(like(ctx.fleet.feature_dim), like(ctx.task.num_classes))

    def server_update(
        self, server: Server, replies: Sequence[Reply[Upload]], ctx: ServerContext
    ) -> None:
        r = torch.stack([reply.payload.representation for reply in replies])
        y = torch.stack([reply.payload.label for reply in replies])
        fit(
            lambda r, y: F.cross_entropy(server.head(r), y, reduction="sum"),
            server.head,
            data=(r.to(ctx.device), y.to(ctx.device)),
            lr=self.server_lr,
            epochs=self.server_epochs,
            batch_size=self.server_batch_size,
        )


def entangle(means: Tensor, classes: Tensor, p: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """One representation and one soft label, made with the same weights."""
    return p @ means, p @ F.one_hot(classes, num_classes).to(p)
