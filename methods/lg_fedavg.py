"""LG-FedAvg: local representations, one global classifier.

Liang et al., "Think Locally, Act Globally", 2020. https://arxiv.org/abs/2001.01523

    Client k                                Server
    1  head_k <- head                       4  head <- sum_k n_k/n * head_k
    2  E epochs of cross-entropy on D_k     5  broadcast head
    3  upload head_k

    Inference: the client's own extractor with the broadcast head.

The paper may share any number of upper layers; models that differ have only the head in common, as
in HtFLlib. Where we differ from the authors' code: it starts every client from one model that
FedAvg has trained, while clients of different architectures start from their own random weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch.nn.functional as F
from torch import nn

from raysim import (
    ClientContext,
    ClientState,
    Method,
    Reply,
    ServerContext,
    Weights,
    get_weights,
    like,
    set_weights,
    weighted_mean,
)


class Download(NamedTuple):
    head: Weights


class Upload(NamedTuple):
    head: Weights


@dataclass
class Server:
    head: nn.Linear


@dataclass(frozen=True)
class LG_FedAvg(Method[ClientState, Server]):
    weighting: Literal["samples", "uniform"] = "samples"
    """How heads are averaged: by n_k as in FedAvg and HtFLlib, or equally as in the authors' code.
    """

    def init_server(self, ctx: ServerContext) -> Server:
        return Server(head=ctx.build_head())

    def broadcast(self, server: Server, cohort: Sequence[int], ctx: ServerContext) -> Download:
        return Download(get_weights(server.head))

    def receive(self, client: ClientState, message: Download, ctx: ClientContext) -> None:
        set_weights(client.model.head, message.head)

    def client_update(self, client: ClientState, message: Download, ctx: ClientContext) -> Upload:
        model = client.model
        ctx.fit(lambda x, y: F.cross_entropy(model(x), y), model)
        return Upload(get_weights(model.head))

    def expected(self, client_id: int, ctx: ServerContext) -> Upload:
        classes = ctx.task.num_classes
        return Upload({"weight": like(classes, ctx.fleet.feature_dim), "bias": like(classes)})

    def server_update(
        self, server: Server, replies: Sequence[Reply[Upload]], ctx: ServerContext
    ) -> None:
        shares = [reply.num_samples if self.weighting == "samples" else 1 for reply in replies]
        set_weights(server.head, weighted_mean([reply.payload.head for reply in replies], shares))
