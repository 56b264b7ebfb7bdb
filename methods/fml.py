"""FML: federated mutual learning.

Shen et al., 2020. https://arxiv.org/abs/2006.16765

    h_k: client k's own model; g: a model shared by all (the paper's "meme model")

    Client k                                                      Server
    1  g_k <- g                                                   4  g <- mean of the g_k
    2  L_h = alpha CE(h_k, y) + (1 - alpha) KL(g_k || h_k)        5  broadcast g
       L_g = beta CE(g_k, y) + (1 - beta) KL(h_k || g_k)
       h_k <- SGD on L_h, g_k <- SGD on L_g, side by side, E epochs
    3  upload g_k

    Inference: h_k

Where we differ from HtFLlib: a teacher does not learn from its student's loss, and KL is the mean
of a sample; there both losses reach both models, and KL is divided by the number of classes as well
(--hp.htfllib-compat). Its alpha = beta = 1 would be no distillation at all; 0.5 here, as it tunes
them. As there, uploads are averaged equally and the gradient of each model is clipped to norm 10
unless --train.clip says otherwise. Batch-norm statistics are averaged with the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor

import zoo
from raysim import (
    ClientContext,
    ClientState,
    ConfigError,
    Fleet,
    Method,
    Reply,
    ServerContext,
    Task,
    Weights,
    get_weights,
    kl,
    set_weights,
    weighted_mean,
)
from raysim.errors import unknown
from zoo import SplitModel


class Download(NamedTuple):
    shared: Weights


class Upload(NamedTuple):
    shared: Weights


@dataclass
class Client(ClientState):
    shared: SplitModel  # g_k, overwritten by every download


@dataclass
class Server:
    shared: SplitModel


@dataclass(frozen=True)
class FML(Method[Client, Server]):
    shared_model: str = "cnn5"
    """Architecture of the shared model g."""
    alpha: float = 0.5
    """Weight of the labels, against the shared model's answers, in the own model's loss."""
    beta: float = 0.5
    """Weight of the labels, against the own model's answers, in the shared model's loss."""
    weighting: Literal["uniform", "samples"] = "uniform"
    """How uploads are averaged: equally, or by n_k."""
    htfllib_compat: bool = False
    """Distill as HtFLlib does: teachers learn too, and KL is divided by the number of classes."""

    def check(self, fleet: Fleet, task: Task) -> None:
        for flag, value in (("alpha", self.alpha), ("beta", self.beta)):
            if not 0 <= value <= 1:
                raise ConfigError(
                    f"--hp.{flag} must be between 0 and 1, got {value}. Try --hp.{flag} 0.5"
                )
        if self.shared_model not in zoo.names():
            raise unknown("model", self.shared_model, zoo.names(), "--hp.shared-model")

    def init_server(self, ctx: ServerContext) -> Server:
        return Server(shared=ctx.build_model(self.shared_model))

    def init_client(self, model: SplitModel, ctx: ClientContext) -> Client:
        return Client(model, shared=ctx.build_model(self.shared_model))

    def broadcast(self, server: Server, cohort: Sequence[int], ctx: ServerContext) -> Download:
        return Download(get_weights(server.shared))

    def receive(self, client: Client, message: Download, ctx: ClientContext) -> None:
        set_weights(client.shared, message.shared)

    def client_update(self, client: Client, message: Download, ctx: ClientContext) -> Upload:
        def loss(x: Tensor, y: Tensor) -> Tensor:
            h, g = client.model(x), client.shared(x)
            from_g, from_h = (
                kl(teacher, student, htfllib=self.htfllib_compat)
                for teacher, student in ((g, h), (h, g))
            )
            loss_h = self.alpha * F.cross_entropy(h, y) + (1 - self.alpha) * from_g
            loss_g = self.beta * F.cross_entropy(g, y) + (1 - self.beta) * from_h
            return loss_h + loss_g  # each reaches its own model only, so one step does both

        ctx.fit(loss, client.model, client.shared, clip=10.0)
        return Upload(get_weights(client.shared))

    def expected(self, client_id: int, ctx: ServerContext) -> Upload:
        return Upload(ctx.weights_like(self.shared_model))

    def server_update(
        self, server: Server, replies: Sequence[Reply[Upload]], ctx: ServerContext
    ) -> None:
        shares = [reply.num_samples if self.weighting == "samples" else 1 for reply in replies]
        set_weights(
            server.shared, weighted_mean([reply.payload.shared for reply in replies], shares)
        )
