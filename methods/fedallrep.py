"""FedAllRep: FedRE's upper reference, in which clients upload all of their representations.

Yao et al., CVPR 2026. https://arxiv.org/abs/2511.22265

    Client k                                Server
    1  head_k <- head                       4  for mini-batches of all uploaded pairs:
    2  E epochs of cross-entropy on D_k          head <- head - lr * grad sum_i CE(head(r_i), y_i)
    3  upload r_i = g_k(x_i) and y_i        5  broadcast head
       for every sample i of D_k

    Inference: the model after step 1; with --eval.fresh False, as step 2 left it.

Not a method to use: it sends d * n_k scalars a client and shows the server every sample. It bounds
what a head can learn from entangled representations. The paper does not say how its server is
trained; the settings here are FedRE's own, so that only what is uploaded differs. One pass is then
many steps where FedRE's is one: the server shuffles the samples of all clients into its batches.
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
    Fleet,
    Method,
    Reply,
    ServerContext,
    Task,
    Uncounted,
    Weights,
    evaluating,
    get_weights,
    like,
    server_head,
    set_weights,
)


class Download(NamedTuple):
    head: Weights


class Upload(NamedTuple):
    representations: Tensor  # (samples of the client, feature_dim)
    labels: Uncounted[Tensor]  # the class of each


@dataclass
class Server:
    head: nn.Linear


@dataclass(frozen=True)
class FedAllRep(Method[ClientState, Server]):
    server_optimizer: Literal["sgd", "adam"] = "sgd"
    """Optimizer of the global head, born anew in every round."""
    server_lr: float = 0.01
    """Step size of the global head."""
    server_momentum: float = 0.0
    """Momentum of sgd."""
    server_epochs: int = 1
    """Passes over the uploaded representations in a round."""
    server_batch_size: int = 32
    """Uploaded representations in a server step."""
    server_reduction: Literal["sum", "mean"] = "sum"
    """Whether a step descends the sum or the mean of its samples' losses."""

    def check(self, fleet: Fleet, task: Task) -> None:
        server_head.check(self)

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
            r = torch.cat([model.features(x).float() for x, _ in ctx.samples()])
        return Upload(r, ctx.labels)

    def expected(self, client_id: int, ctx: ServerContext) -> Upload:
        return Upload(like(None, ctx.fleet.feature_dim), like(None, dtype=torch.int64))

    def server_update(
        self, server: Server, replies: Sequence[Reply[Upload]], ctx: ServerContext
    ) -> None:
        r = torch.cat([reply.payload.representations for reply in replies])
        y = torch.cat([reply.payload.labels for reply in replies])
        server_head.train(server.head, r.to(ctx.device), y.to(ctx.device), self)
