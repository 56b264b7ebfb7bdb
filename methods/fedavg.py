"""FedAvg: average whole models; of nested models, layer by layer.

McMahan et al., AISTATS 2017. https://arxiv.org/abs/1602.05629 Layer-wise over nested models as in
FedIN's Eq. 19: Chan et al., https://arxiv.org/abs/2304.00759

    Client k                                Server
    1  w_k <- its layers of w               4  for every layer l: w_l <- mean of w_k,l over the
    2  E epochs of cross-entropy on D_k           participants that have it; else as it was
    3  upload w_k                           5  broadcast w
"""

import itertools
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
    set_weights,
    weighted_mean,
)


class Download(NamedTuple):
    model: Weights


class Upload(NamedTuple):
    model: Weights


@dataclass
class Server:
    weights: Weights  # the union of all clients' layers
    layers: dict[str, list[str]]  # architecture -> the names of its layers


@dataclass(frozen=True)
class FedAvg(Method[ClientState, Server]):
    weighting: Literal["samples", "uniform"] = "samples"
    """How participants are weighted: by n_k as in FedAvg, or equally as in FedIN's Eq. 19."""

    def check(self, fleet: Fleet, task: Task) -> None:
        shapes = {name: fleet.like(name, task).items() for name in dict.fromkeys(fleet.models)}
        for one, other in itertools.pairwise(sorted(shapes, key=lambda name: len(shapes[name]))):
            if not shapes[one] <= shapes[other]:
                raise ConfigError(
                    f"fedavg averages whole models, so they must be the same or nested; "
                    f"fleet.models names {one} and {other}, which are not. "
                    f"Try --fleet.models {one}, or --fleet.models resnet"
                )

    def init_server(self, ctx: ServerContext) -> Server:
        weights: Weights = {}
        layers: dict[str, list[str]] = {}
        for name in dict.fromkeys(ctx.fleet.models):
            model = get_weights(ctx.build_model(name))
            layers[name] = list(model)
            weights = model | weights  # a layer comes from the first model that has it
        return Server(weights, layers)

    def broadcast(
        self, server: Server, cohort: Sequence[int], ctx: ServerContext
    ) -> PerClient | Download:
        parts = {
            name: Download({layer: server.weights[layer] for layer in layers})
            for name, layers in server.layers.items()
        }
        if len(parts) == 1:
            return next(iter(parts.values()))
        return PerClient({client: parts[ctx.fleet.model_of(client)] for client in cohort})

    def receive(self, client: ClientState, message: Download, ctx: ClientContext) -> None:
        set_weights(client.model, message.model)

    def client_update(self, client: ClientState, message: Download, ctx: ClientContext) -> Upload:
        model = client.model
        ctx.fit(lambda x, y: F.cross_entropy(model(x), y), model)
        return Upload(get_weights(model))

    def expected(self, client_id: int, ctx: ServerContext) -> Upload:
        return Upload(ctx.weights_like(ctx.fleet.model_of(client_id)))

    def server_update(
        self, server: Server, replies: Sequence[Reply[Upload]], ctx: ServerContext
    ) -> None:
        shares = [reply.num_samples if self.weighting == "samples" else 1 for reply in replies]
        server.weights |= weighted_mean([reply.payload.model for reply in replies], shares)
