"""FedRE: federated representation entanglement.

Yao et al., CVPR 2026. https://arxiv.org/abs/2511.22265

    Client k                                Server
    1  head_k <- head                       5  for mini-batches of the uploaded pairs:
    2  E epochs of cross-entropy on D_k          head <- head - lr * grad sum_k CE(head(r_k), y_k)
    3  u_c ~ U(0, 1), p_c = u_c / sum(u)    6  broadcast head
       for its classes c
    4  upload r_k = sum_c p_c mu_c, y_k = sum_c p_c e_c
       (mu_c: mean representation of class c, e_c: its one-hot label)

    Inference: the model after step 1; with --eval.fresh False, as step 2 left it.

Representations are those behind the mapping to the common width, --fleet.mapping ap, mp or fc (cnn
and mlp just have that width). Step 3 is the paper's default mechanism, RAP; how we read the other
five stands in raysim/entanglement.py.

Where we differ from the authors' code: the head really is broadcast (theirs never is, nor is it
evaluated), and it starts from weights of its own instead of being the very object that client 0
trains; it is linear for every model (their ViT's has two layers, which a broadcast would break);
means are over all of D_k, so that a client smaller than a batch has some. As theirs, the server's
loss is summed, not averaged, over a batch, every pair counts the same and the optimizer is born
anew in every round: with 10 participants and batches of 32 that is one step of SGD a round.
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
    class_means,
    entanglement,
    evaluating,
    get_weights,
    like,
    server_head,
    set_weights,
)
from zoo import SplitModel


class Download(NamedTuple):
    head: Weights


class Upload(NamedTuple):
    representation: Tensor  # r_k, (feature_dim,)
    label: Uncounted[Tensor]  # y_k, (num_classes,), sums to one


@dataclass
class Fixed(ClientState):
    draws: Tensor  # u of every class; of each of the client's samples for rsr and rar


@dataclass
class Server:
    head: nn.Linear


@dataclass(frozen=True)
class FedRE(Method[ClientState, Server]):
    mechanism: entanglement.Mechanism = "rap"
    """A random single one (rs*), the vanilla average (va*) or a random average (ra*) of the
    client's representations (*r) or class prototypes (*p)."""
    weights: entanglement.Distribution = "uniform"
    """What a random average's u are drawn from: U(0, 1), N(0, 1) or Laplace(0, 1)."""
    normalize: entanglement.Normalization = "sum"
    """From draws to weights: |u| / sum |u|, or softmax(u)."""
    resample: bool = True
    """Draw anew in every round; False draws once for each client."""
    server_optimizer: Literal["sgd", "adam"] = "sgd"
    """Optimizer of the global head, born anew in every round."""
    server_lr: float = 0.01
    """Step size of the global head."""
    server_momentum: float = 0.0
    """Momentum of sgd; shows only when a round has several server steps."""
    server_epochs: int = 1
    """Passes over the uploaded pairs in a round."""
    server_batch_size: int = 32
    """Uploaded pairs in a server step."""
    server_reduction: Literal["sum", "mean"] = "sum"
    """Whether a step descends the sum or the mean of its pairs' losses."""

    def check(self, fleet: Fleet, task: Task) -> None:
        server_head.check(self)

    def init_server(self, ctx: ServerContext) -> Server:
        return Server(head=ctx.build_head())

    def init_client(self, model: SplitModel, ctx: ClientContext) -> ClientState:
        if self.resample:
            return ClientState(model)
        n = ctx.task.num_classes if entanglement.of_prototypes(self.mechanism) else ctx.num_samples
        return Fixed(model, entanglement.draw(self.weights, n).to(ctx.device))

    def broadcast(self, server: Server, cohort: Sequence[int], ctx: ServerContext) -> Download:
        return Download(get_weights(server.head))

    def receive(self, client: ClientState, message: Download, ctx: ClientContext) -> None:
        set_weights(client.model.head, message.head)

    def client_update(self, client: ClientState, message: Download, ctx: ClientContext) -> Upload:
        model = client.model
        ctx.fit(lambda x, y: F.cross_entropy(model(x), y), model)

        of_prototypes = entanglement.of_prototypes(self.mechanism)
        with evaluating(model), ctx.autocast():
            if of_prototypes:
                r, classes = class_means(model.features, ctx.samples())
            else:
                r = torch.cat([model.features(x).float() for x, _ in ctx.samples()])
                classes = ctx.labels
        if isinstance(client, Fixed):
            u = client.draws[classes] if of_prototypes else client.draws
        else:
            u = entanglement.draw(self.weights, len(classes))
        p = entanglement.mixture(self.mechanism, u.to(r), self.normalize)
        return Upload(*entanglement.entangle(r, classes, p, ctx.task.num_classes))

    def expected(self, client_id: int, ctx: ServerContext) -> Upload:
        return Upload(like(ctx.fleet.feature_dim), like(ctx.task.num_classes))

    def server_update(
        self, server: Server, replies: Sequence[Reply[Upload]], ctx: ServerContext
    ) -> None:
        r = torch.stack([reply.payload.representation for reply in replies])
        y = torch.stack([reply.payload.label for reply in replies])
        server_head.train(server.head, r.to(ctx.device), y.to(ctx.device), self)
