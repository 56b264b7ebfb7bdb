"""FedAvg: average whole models; of nested models, layer by layer.

McMahan et al., AISTATS 2017. https://arxiv.org/abs/1602.05629 Layer-wise over nested models as in
FedIN's Eq. 19: Chan et al., https://arxiv.org/abs/2304.00759

    Client k                                Server
    1  w_k <- its layers of w               4  for every layer l: w_l <- mean of w_k,l over the
    2  E epochs of cross-entropy on D_k           participants that have it; else as it was
    3  upload w_k                           5  broadcast w
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch.nn.functional as F

from raysim import (
    ClientContext,
    ClientState,
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


class Download(NamedTuple):
    model: Weights


class Upload(NamedTuple):
    model: Weights


@dataclass(frozen=True)
class FedAvg(Method[ClientState, Union]):
    weighting: Literal["samples", "uniform"] = "samples"
    """How participants are weighted: by n_k as in FedAvg, or equally as in FedIN's Eq. 19."""

    def check(self, fleet: Fleet, task: Task) -> None:
        nested.check(fleet, task, type(self).__name__.lower())

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
        ctx.fit(lambda x, y: F.cross_entropy(model(x), y), model)
        return Upload(get_weights(model))

    def expected(self, client_id: int, ctx: ServerContext) -> Upload:
        return Upload(ctx.weights_like(ctx.fleet.model_of(client_id)))

    def server_update(
        self, server: Union, replies: Sequence[Reply[Upload]], ctx: ServerContext
    ) -> None:
        shares = nested.shares(replies, self.weighting)
        server.weights |= weighted_mean([reply.payload.model for reply in replies], shares)
