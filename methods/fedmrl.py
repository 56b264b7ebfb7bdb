"""FedMRL: federated model-heterogeneous Matryoshka representation learning.

Yi et al., NeurIPS 2024. https://arxiv.org/abs/2406.00488

    G(theta): small model shared by all; F_k(omega_k): client k's own; P_k(phi_k): its projector

    Client k                                              Server
    1  theta_k <- theta                                   4  theta <- sum_k n_k/n * theta_k
    2  R = P_k([G_ex(x), F_ex(x)])                        5  broadcast theta
       loss = m_lc * CE(G_hd(R[:d1]), y) + m_hf * CE(F_hd(R), y)
       (theta_k, omega_k, phi_k) <- SGD on the loss, E epochs
    3  upload theta_k

    Inference ("mix-large"): F_hd(R)

Where we differ from the public codes: uploads are copies (in the authors' code all of them are the
last client's model), every client keeps its projector (HtFLlib's port never saves it) and its
optimizer is born anew in every round.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    shared: SplitModel  # G(theta), overwritten by every download
    projector: nn.Linear  # P_k(phi_k), never leaves the client


@dataclass
class Server:
    shared: SplitModel


@dataclass(frozen=True)
class FedMRL(Method[Client, Server]):
    shared_model: str = "cnn5"
    """Architecture of the shared model G."""
    d1: int = 100
    """Width of the coarse representation, at most the clients' own width d2 (--fleet.feature-dim).
    """
    coarse_weight: float = 1.0
    """m_lc, weight of the shared head's loss."""
    fine_weight: float = 1.0
    """m_hf, weight of the private head's loss."""
    weighting: Literal["samples", "uniform"] = "samples"
    """How uploads are averaged: by n_k as the paper says, or equally as HtFLlib does."""

    def check(self, fleet: Fleet, task: Task) -> None:
        if not 1 <= self.d1 <= fleet.feature_dim:
            raise ConfigError(
                f"--hp.d1 must be between 1 and the clients' width d2 = {fleet.feature_dim}, "
                f"got {self.d1}. Try --hp.d1 {fleet.feature_dim} or a larger --fleet.feature-dim"
            )
        if self.shared_model not in zoo.names():
            raise unknown("model", self.shared_model, zoo.names(), "--hp.shared-model")

    def init_server(self, ctx: ServerContext) -> Server:
        return Server(shared=ctx.build_model(self.shared_model, feature_dim=self.d1))

    def init_client(self, model: SplitModel, ctx: ClientContext) -> Client:
        return Client(
            model=model,
            shared=ctx.build_model(self.shared_model, feature_dim=self.d1),
            projector=nn.Linear(self.d1 + model.feature_dim, model.feature_dim),
        )

    def broadcast(self, server: Server, cohort: Sequence[int], ctx: ServerContext) -> Download:
        return Download(get_weights(server.shared))

    def receive(self, client: Client, message: Download, ctx: ClientContext) -> None:
        set_weights(client.shared, message.shared)

    def client_update(self, client: Client, message: Download, ctx: ClientContext) -> Upload:
        def loss(x: Tensor, y: Tensor) -> Tensor:
            fused = self.fuse(client, x)
            coarse = F.cross_entropy(client.shared.head(fused[:, : self.d1]), y)
            fine = F.cross_entropy(client.model.head(fused), y)
            return self.coarse_weight * coarse + self.fine_weight * fine

        ctx.fit(loss, client.model, client.shared, client.projector)
        return Upload(get_weights(client.shared))

    def expected(self, client_id: int, ctx: ServerContext) -> Upload:
        return Upload(ctx.weights_like(self.shared_model, self.d1))

    def server_update(
        self, server: Server, replies: Sequence[Reply[Upload]], ctx: ServerContext
    ) -> None:
        shares = [reply.num_samples if self.weighting == "samples" else 1 for reply in replies]
        set_weights(
            server.shared, weighted_mean([reply.payload.shared for reply in replies], shares)
        )

    def predict(self, client: Client, x: Tensor) -> Tensor:
        scores: Tensor = client.model.head(self.fuse(client, x))
        return scores

    def fuse(self, client: Client, x: Tensor) -> Tensor:
        """Both representations, the shared one first, projected: (batch, d2)."""
        both = [client.shared.features(x), client.model.features(x)]
        fused: Tensor = client.projector(torch.cat(both, dim=1))
        return fused
