"""FedProx: FedAvg whose clients are held near the weights they received.

Li et al., MLSys 2020. https://arxiv.org/abs/1812.06127 Layer-wise over nested models as FedIN runs
it: Chan et al., https://arxiv.org/abs/2304.00759

    Client k                                Server
    1  w_k <- its layers of w               4  for every layer l: w_l <- mean of w_k,l over the
    2  E epochs of cross-entropy on D_k           participants that have it; else as it was
         + mu/2 ||w_k - w||^2               5  broadcast w
    3  upload w_k

Choices. The norm is over trainable weights: batch-norm statistics are averaged but not pulled.
FedIN's mu/2 is 0.05. Every client does E epochs; the paper also takes less from slow ones. The
paper draws clients by n_k and averages equally, raysim draws equally and averages by n_k.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch.nn.functional as F

from raysim import (
    ClientContext,
    ClientState,
    ConfigError,
    Fleet,
    Method,
    PerClient,
    Reply,
    ServerContext,
    Task,
    Weights,
    get_weights,
    nested,
    set_weights,
    weighted_mean,
)
from raysim.nested import Union
from raysim.terms import proximal


class Download(NamedTuple):
    model: Weights


class Upload(NamedTuple):
    model: Weights


@dataclass(frozen=True)
class FedProx(Method[ClientState, Union]):
    mu: float = 0.1
    """Weight of the squared distance to the received weights, which is halved; 0 is FedAvg."""
    weighting: Literal["samples", "uniform"] = "samples"
    """How participants are weighted: by n_k as in FedAvg, or equally as in FedIN's Eq. 19."""

    def check(self, fleet: Fleet, task: Task) -> None:
        nested.check(fleet, task, "fedprox")
        if not self.mu >= 0:
            raise ConfigError(f"--hp.mu must be 0 or more, got {self.mu}. Try --hp.mu 0.1")

    def init_server(self, ctx: ServerContext) -> Union:
        return nested.union(ctx)

    def broadcast(
        self, server: Union, cohort: Sequence[int], ctx: ServerContext
    ) -> PerClient | Download:
        return nested.deal(
            server, cohort, ctx, lambda layers: Download(nested.part(server.weights, layers))
        )

    def receive(self, client: ClientState, message: Download, ctx: ClientContext) -> None:
        set_weights(client.model, message.model)

    def client_update(self, client: ClientState, message: Download, ctx: ClientContext) -> Upload:
        model = client.model
        ctx.fit(
            lambda x, y: F.cross_entropy(model(x), y) + proximal(model, message.model, self.mu),
            model,
        )
        return Upload(get_weights(model))

    def expected(self, client_id: int, ctx: ServerContext) -> Upload:
        return Upload(ctx.weights_like(ctx.fleet.model_of(client_id)))

    def server_update(
        self, server: Union, replies: Sequence[Reply[Upload]], ctx: ServerContext
    ) -> None:
        shares = nested.shares(replies, self.weighting)
        server.weights |= weighted_mean([reply.payload.model for reply in replies], shares)
