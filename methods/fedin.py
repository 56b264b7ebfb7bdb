"""FedIN: clients of different depth learn from each other's intermediate features.

Chan et al. https://arxiv.org/abs/2304.00759 A model is an extractor w_e (our stem), intermediate
layers w_in (trunk) and a classifier w_c (neck and head).

    Client k                                              Server
    1  w_k <- its layers of w; S: features of others      6  w_l <- mean of the w_k,l of those who
    2  G_local = grad of CE + mu/2 ||w_k - w||^2               have layer l (Eq. 19)
    3  G_IN = grad of MSE(w_in(s_in), s_out) on S         7  pool: each client's newest
       Z = G_IN + lam/2 G_local                                (s_in, s_out)
    4  w_in steps by Z, w_e and w_c by G_local;           8  draw S from the pool, never a
       2 to 4 for every batch of E epochs                      client's own; send w and S
    5  upload w_k and (s_in, s_out) of b samples

Exact alleviation is Eq. 12: Z = G_IN, projected to <Z, G_local> = 0 where they conflict. FedIN +
Noise: --hp.rho 0.8. Without IN: --hp.in-schedule never; without prox: --hp.mu 0; without
optimization: --hp.alleviation none. Eq. 21: --hp.aggregation groups, for any mix of models. For
features of other shapes, a client learns linear layers of its own (the paper's future work).

Our choices, where the paper is silent: when IN training happens (raysim/in_training.py); S is
normalized by its own statistics, which batch norm does not keep; uploads are made that way too, so
equal weights have no IN loss; running statistics are averaged (Table 2 does not count them). There
is no IN loss before anyone has sent features. The s_in of mlp are the images.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from raysim import (
    ClientContext,
    ClientState,
    Cohort,
    Fleet,
    Method,
    PerClient,
    Reply,
    ServerContext,
    Task,
    Weights,
    in_training,
    nested,
    ops,
)
from raysim.gradients import Scope
from raysim.intermediate import Features, NoiseScope
from raysim.terms import proximal
from zoo import SplitModel


class Download(NamedTuple):
    model: Weights
    features: Sequence[Features] = ()  # S


class Upload(NamedTuple):
    model: Weights
    features: Features | None


@dataclass
class Client(ClientState):
    adapters: nn.ModuleDict  # for features of other shapes than its own


@dataclass
class Server(nested.Union):
    pool: dict[int, Features]


@dataclass(frozen=True)
class FedIN(Method[Client, Server]):
    mu: float = 0.1
    """Weight of the squared distance to the received weights, which is halved."""
    in_schedule: in_training.Schedule = "every_step"
    """When G_IN counts: in every step, in an epoch's first, in steps of w_in alone afterwards, or
    never, which is FedProx."""
    in_steps: int = 1
    """Steps of after_local, with the last G_local."""
    in_updates_bn: bool = False
    """Let batch norm's running statistics learn from S."""
    alleviation: in_training.Kind = "simplified"
    """Z = G_IN + lam/2 G_local; or G_IN, projected where it conflicts; or G_IN + G_local."""
    lam: float = 1.0
    """The simplified form's lambda."""
    scope: Scope = "tensor"
    """Whether the exact form projects tensor by tensor or all of w_in as one."""
    sample_number: int = 1
    """Batches of other clients in S, taken in turn."""
    feature_batch: int = 16
    """b, the samples that a client uploads features of."""
    project: bool = True
    """Learn from features of other shapes too, through linear layers."""
    rho: float = 0.0
    """Noise on features, in their standard deviations: in training and uploads, not in tests."""
    noise_scope: NoiseScope = "tensor"
    """What a standard deviation is of: all features of a batch, or one channel's."""
    bn_stats: Literal["aggregate", "local"] = "aggregate"
    """Average batch norm's running statistics like weights, or leave each client its own."""
    aggregation: Literal["layers", "groups"] = "layers"
    """Average each layer over all who have it, or whole models of one architecture."""
    weighting: Literal["paper", "uniform", "samples"] = "paper"
    """How participants are weighted; the paper does it equally for layers, by n_k in groups."""

    def check(self, fleet: Fleet, task: Task) -> None:
        in_training.check(self)
        if self.aggregation == "layers":
            nested.check(fleet, task, "fedin", "--hp.aggregation groups")

    def init_server(self, ctx: ServerContext) -> Server:
        start = nested.union(ctx, self.aggregation == "groups", self.bn_stats == "aggregate")
        return Server(start.weights, start.layers, {})

    def init_client(self, model: SplitModel, ctx: ClientContext) -> Client:
        return Client(model, in_training.adapters(self, ctx))

    def broadcast(
        self, server: Server, cohort: Sequence[int], ctx: ServerContext
    ) -> PerClient | Download:
        w = server.weights
        return nested.deal(server, cohort, ctx, lambda layers: Download(nested.part(w, layers)))

    def round(self, server: Server, cohort: Cohort, ctx: ServerContext) -> None:
        """Features go to those who train; evaluation, which takes `broadcast` too, needs none."""
        given = self.broadcast(server, cohort.ids, ctx)
        message = in_training.deal(given, server.pool, cohort.ids, self, ctx)
        if replies := cohort.call(self.client_update, message):
            self.server_update(server, replies, ctx)

    def receive(self, client: Client, message: Download, ctx: ClientContext) -> None:
        ops.set_weights(client.model, ops.get_weights(client.model) | message.model)

    def client_update(self, client: Client, message: Download, ctx: ClientContext) -> Upload:
        model = client.model
        training = in_training.InTraining(model, client.adapters, message.features, self, ctx)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            logits = model.head(model.neck(training.outputs(x)))
            local = F.cross_entropy(logits, y) + proximal(model, message.model, self.mu)
            return training.join(local)

        ctx.fit(loss, model, client.adapters, adjust=training.adjust)
        training.finish()
        return Upload(nested.part(ops.get_weights(model), list(message.model)), training.sample())

    def expected(self, client_id: int, ctx: ServerContext) -> Upload:
        model = nested.sent_like(ctx.fleet.model_of(client_id), ctx, self.bn_stats == "aggregate")
        return Upload(model, in_training.expected(client_id, self, ctx))

    def server_update(
        self, server: Server, replies: Sequence[Reply[Upload]], ctx: ServerContext
    ) -> None:
        paper: nested.Weighting = "samples" if self.aggregation == "groups" else "uniform"
        shares = nested.shares(replies, paper if self.weighting == "paper" else self.weighting)
        nested.average(server, {r.client_id: r.payload.model for r in replies}, shares, ctx)
        server.pool |= {r.client_id: r.payload.features for r in replies if r.payload.features}
