"""FedTGP: trainable global prototypes with an adaptive margin.

Zhang et al., AAAI 2024. https://arxiv.org/abs/2401.03230

    T(c) = W2 ReLU(W1 e_c + b1) + b2, e_c an embedding; the server trains it and sends its values
    Client k                                  Server
    1  E epochs on CE(f_k(g_k(x)), y)         3  a_c <- mean of the p_k,c that were sent
         + lambda * ||g_k(x) - T(y)||^2 / d      delta <- min(max_c min_c' ||a_c - a_c'||, tau)
       (first round: CE only)                 4  for mini-batches of all the pairs (p_k,c, c):
    2  upload p_k,c = mean of g_k(x)               T <- SGD on CE(-(dist + delta onehot(c)), c),
       over class c                                dist_c' = ||p_k,c - T(c')|| for all classes c'
                                              5  broadcast T(c) for all classes c

    Inference: the class of the nearest T(c).

Where we differ from the public code: it makes its prototypes before this round's training, of the
model on disk (--hp.gather before), takes roots of what may round to less than zero, and trains T
with the clients' step size and batch. As there, delta = tau when a round has only one class.
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
    fit,
    like,
)
from raysim.prototypes import distances, empty_table, mean_by_class, nearest, prototypes_of, pull
from zoo import SplitModel


class Download(NamedTuple):
    prototypes: Tensor  # T(c) of all classes, (classes, feature_dim); in the first round of none


class Upload(NamedTuple):
    prototypes: Tensor  # (classes of the client, feature_dim)
    classes: Uncounted[Tensor]


@dataclass
class Client(ClientState):
    prototypes: Tensor  # T(c) as last received, (classes, feature_dim)
    known: Tensor  # all of them are, or in the first round none


@dataclass
class Server:
    generator: nn.Sequential  # T
    prototypes: Tensor  # its values, once it has learnt something


@dataclass(frozen=True)
class FedTGP(Method[Client, Server]):
    only_reads = True

    pull: float = 1.0
    """lambda, weight of the distance to the global prototypes; HtFLlib tunes it to 10."""
    margin: float = 100.0
    """tau, the largest margin between classes."""
    server_lr: float = 0.01
    """Step size of the global prototypes."""
    server_epochs: int = 100
    """Passes over the uploaded prototypes in a round."""
    server_batch_size: int = 10
    """Uploaded prototypes in a server step."""
    gather: Literal["after", "before"] = "after"
    """Make a client's prototypes after its training, or before it as the public code does."""

    def check(self, fleet: Fleet, task: Task) -> None:
        least = {"pull": 0, "margin": 0, "server_lr": 0, "server_epochs": 1, "server_batch_size": 1}
        for name, low in least.items():
            if not (value := getattr(self, name)) >= low:
                flag = name.replace("_", "-")
                raise ConfigError(f"--hp.{flag} must be at least {low}, got {value}")

    def init_server(self, ctx: ServerContext) -> Server:
        d = ctx.fleet.feature_dim
        generator = nn.Sequential(
            nn.Embedding(ctx.task.num_classes, d), nn.Linear(d, d), nn.ReLU(), nn.Linear(d, d)
        )
        return Server(generator.to(ctx.device), torch.zeros(0, d, device=ctx.device))

    def init_client(self, model: SplitModel, ctx: ClientContext) -> Client:
        return Client(model, *empty_table(model, ctx))

    def broadcast(self, server: Server, cohort: Sequence[int], ctx: ServerContext) -> Download:
        return Download(server.prototypes)

    def receive(self, client: Client, message: Download, ctx: ClientContext) -> None:
        client.prototypes[: len(message.prototypes)] = message.prototypes
        client.known[:] = len(message.prototypes) > 0

    def client_update(self, client: Client, message: Download, ctx: ClientContext) -> Upload:
        model = client.model

        def loss(x: Tensor, y: Tensor) -> Tensor:
            r = model.features(x)
            distance = pull(r, y, client.prototypes, client.known)
            return F.cross_entropy(model.head(r), y) + self.pull * distance

        before = prototypes_of(model, ctx) if self.gather == "before" else None
        ctx.fit(loss, model)
        return Upload(*(before or prototypes_of(model, ctx)))

    def expected(self, client_id: int, ctx: ServerContext) -> Upload:
        return Upload(like(None, ctx.fleet.feature_dim), like(None, dtype=torch.int64))

    def server_update(
        self, server: Server, replies: Sequence[Reply[Upload]], ctx: ServerContext
    ) -> None:
        p = torch.cat([reply.payload.prototypes for reply in replies]).to(ctx.device)
        y = torch.cat([reply.payload.classes for reply in replies]).to(ctx.device)
        every_class = torch.arange(ctx.task.num_classes, device=ctx.device)
        delta = margin(mean_by_class(p, y)[0], self.margin)

        def loss(p: Tensor, y: Tensor) -> Tensor:
            distance = distances(p, server.generator(every_class))
            return F.cross_entropy(-(distance + delta * F.one_hot(y, len(every_class))), y)

        fit(
            loss,
            server.generator,
            data=(p, y),
            lr=self.server_lr,
            epochs=self.server_epochs,
            batch_size=self.server_batch_size,
        )
        server.prototypes = server.generator(every_class).detach()

    def predict(self, client: Client, x: Tensor) -> Tensor:
        return nearest(client.model.features(x), client.prototypes, client.known)


def margin(means: Tensor, largest: float) -> float:
    """The largest distance of a class to the one next to it, up to `largest`."""
    gaps = distances(means, means).fill_diagonal_(torch.inf).amin(dim=1)
    return min(float(gaps.max()), largest)
