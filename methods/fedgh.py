"""FedGH: heterogeneous federated learning with a generalized global header.

Yi et al., ACM Multimedia 2023. https://arxiv.org/abs/2303.13137

    Client k                                   Server
    1  head_k <- head                          4  for mini-batches of all the pairs (p_k,c, c):
    2  E epochs of cross-entropy on D_k             head <- head - lr * grad CE(head(p_k,c), c)
    3  upload p_k,c = mean of g_k(x) over      5  broadcast head
       class c, and c, for its classes

    Inference: the client's own extractor with the broadcast head.

Where we differ from the authors' code: the head really is trained. Theirs steps the client's
optimizer in step 4, so the header stays as it was born; --hp.server-lr 0 shows what that does. They
take one pair a step (--hp.server-batch-size 1) and means of batch means (--hp.means). The defaults
are HtFLlib's, with its tuned single epoch (its argument's default is 100), but for the head's first
weights, which are its own and not client 0's.
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
    ConfigError,
    Fleet,
    Method,
    Reply,
    ServerContext,
    Task,
    Uncounted,
    Weights,
    class_means,
    evaluating,
    fit,
    get_weights,
    like,
    set_weights,
)
from raysim.prototypes import mean_by_class, prototypes_of


class Download(NamedTuple):
    head: Weights


class Upload(NamedTuple):
    prototypes: Tensor  # p_k,c, (classes of the client, feature_dim)
    classes: Uncounted[Tensor]


@dataclass
class Server:
    head: nn.Linear


@dataclass(frozen=True)
class FedGH(Method[ClientState, Server]):
    server_lr: float = 0.01
    """Step size of the global head; 0 leaves it as it was born, as the authors' code does."""
    server_epochs: int = 1
    """Passes over the uploaded pairs in a round."""
    server_batch_size: int = 10
    """Uploaded pairs in a server step."""
    means: Literal["samples", "batches"] = "samples"
    """A class's mean over its samples, or the mean of its means in each training batch, as the
    authors' code has it: samples of batches where the class is rare count more."""

    def check(self, fleet: Fleet, task: Task) -> None:
        if not self.server_lr >= 0:
            raise ConfigError(f"--hp.server-lr must be at least 0, got {self.server_lr}")
        for name in ("server_epochs", "server_batch_size"):
            if (value := getattr(self, name)) < 1:
                flag = name.replace("_", "-")
                raise ConfigError(f"--hp.{flag} must be at least 1, got {value}")

    def init_server(self, ctx: ServerContext) -> Server:
        return Server(head=ctx.build_head())

    def broadcast(self, server: Server, cohort: Sequence[int], ctx: ServerContext) -> Download:
        return Download(get_weights(server.head))

    def receive(self, client: ClientState, message: Download, ctx: ClientContext) -> None:
        set_weights(client.model.head, message.head)

    def client_update(self, client: ClientState, message: Download, ctx: ClientContext) -> Upload:
        model = client.model
        ctx.fit(lambda x, y: F.cross_entropy(model(x), y), model)
        if self.means == "samples":
            return Upload(*prototypes_of(model, ctx))
        with evaluating(model), ctx.autocast():
            of_batches = [class_means(model.features, [batch]) for batch in ctx.batches()]
        means, classes = zip(*of_batches, strict=True)
        return Upload(*mean_by_class(torch.cat(means), torch.cat(classes)))

    def expected(self, client_id: int, ctx: ServerContext) -> Upload:
        return Upload(like(None, ctx.fleet.feature_dim), like(None, dtype=torch.int64))

    def server_update(
        self, server: Server, replies: Sequence[Reply[Upload]], ctx: ServerContext
    ) -> None:
        p = torch.cat([reply.payload.prototypes for reply in replies])
        y = torch.cat([reply.payload.classes for reply in replies])
        fit(
            lambda p, y: F.cross_entropy(server.head(p), y),
            server.head,
            data=(p.to(ctx.device), y.to(ctx.device)),
            lr=self.server_lr,
            epochs=self.server_epochs,
            batch_size=self.server_batch_size,
        )
