"""FedMRL: federated model-heterogeneous Matryoshka representation learning.

Yi et al., NeurIPS 2024. https://arxiv.org/abs/2406.00488

    G(theta): small model shared by all; F_k(omega_k): client k's own; P_k(phi_k): its projector

    Client k                                              Server
    1  theta_k <- theta                                   4  theta <- sum_k n_k/n * theta_k
    2  R = P_k([G_ex(x), F_ex(x)])                        5  broadcast theta
       loss = m_lc * CE(G_hd(R[:d1]), y) + m_hf * CE(F_hd(R), y)
       (theta_k, omega_k, phi_k) <- SGD on the loss, E epochs
    3  upload theta_k

    Inference: mix-large  F_hd(R)        single-large  F_hd(F_ex(x))
               mix-small  G_hd(R[:d1])   single-small  G_hd(G_ex(x))

Where we differ from the public codes: uploads are copies (in the authors' code all of them are the
last client's model), every client keeps its projector (HtFLlib's port never saves it) and its
optimizer is born anew in every round. Our choices: `mrl` has both readings of "without MRL", which
the paper does not define. MRL-E, its future work, puts F_hd's first d1 columns wherever G_hd stands
(as the authors' homogeneous script does), so G is sent without a head.
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
    """Architecture of the shared model G; homogeneous FedMRL has cnn1 here and in the fleet."""
    d1: int = 100
    """Width of the coarse representation, at most d2, the clients' own (--fleet.feature-dim)."""
    coarse_weight: float = 1.0
    """m_lc, weight of the shared head's loss."""
    fine_weight: float = 1.0
    """m_hf, weight of the private head's loss."""
    mrl: Literal["full", "efficient", "fine", "apart"] = "full"
    """`efficient` is MRL-E: no shared head, the private one serves R[:d1] too. Without MRL: `fine`
    leaves out the coarse loss; `apart` the projector, so each head sees its own extractor only."""
    inference: Literal["mix-small", "mix-large", "single-small", "single-large"] = "mix-large"
    """The inference model that the run's accuracy is of; all of them are in variants.parquet."""
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
        if self.mrl == "apart" and self.inference.startswith("mix"):
            single = self.inference.replace("mix", "single")
            raise ConfigError(f"--hp.mrl apart mixes nothing. Add --hp.inference {single}")

    def init_server(self, ctx: ServerContext) -> Server:
        return Server(self.build_shared(ctx))

    def init_client(self, model: SplitModel, ctx: ClientContext) -> Client:
        d2 = model.feature_dim
        return Client(model, self.build_shared(ctx), nn.Linear(self.d1 + d2, d2))

    def build_shared(self, ctx: ServerContext | ClientContext) -> SplitModel:
        shared = ctx.build_model(self.shared_model, feature_dim=self.d1)
        if self.mrl == "efficient":
            shared.head = nn.Identity()  # type: ignore[assignment]
        return shared

    def broadcast(self, server: Server, cohort: Sequence[int], ctx: ServerContext) -> Download:
        return Download(get_weights(server.shared))

    def receive(self, client: Client, message: Download, ctx: ClientContext) -> None:
        set_weights(client.shared, message.shared)

    def client_update(self, client: Client, message: Download, ctx: ClientContext) -> Upload:
        def loss(x: Tensor, y: Tensor) -> Tensor:
            small, large = client.shared.features(x), client.model.features(x)
            if self.mrl != "apart":
                small = large = client.projector(torch.cat([small, large], dim=1))
            fine = self.fine_weight * F.cross_entropy(client.model.head(large), y)
            if self.mrl == "fine":
                return fine
            return self.coarse_weight * F.cross_entropy(self.coarse(client, small), y) + fine

        ctx.fit(loss, client.model, client.shared, client.projector)
        return Upload(get_weights(client.shared))

    def expected(self, client_id: int, ctx: ServerContext) -> Upload:
        whole = ctx.weights_like(self.shared_model, self.d1)
        headless = {name: it for name, it in whole.items() if not name.startswith("head.")}
        return Upload(headless if self.mrl == "efficient" else whole)

    def server_update(
        self, server: Server, replies: Sequence[Reply[Upload]], ctx: ServerContext
    ) -> None:
        shares = [reply.num_samples if self.weighting == "samples" else 1 for reply in replies]
        mean = weighted_mean([reply.payload.shared for reply in replies], shares)
        set_weights(server.shared, mean)

    def variants(self, client: Client, x: Tensor) -> dict[str, Tensor]:
        small, large, head = client.shared.features(x), client.model.features(x), client.model.head
        single = {"single-small": self.coarse(client, small), "single-large": head(large)}
        if self.mrl == "apart":
            return single
        fused = client.projector(torch.cat([small, large], dim=1))
        return {"mix-small": self.coarse(client, fused), "mix-large": head(fused), **single}

    @property
    def headline(self) -> str:
        return self.inference

    def coarse(self, client: Client, r: Tensor) -> Tensor:
        """The scores of the first d1 features."""
        head = client.model.head if self.mrl == "efficient" else client.shared.head
        return F.linear(r[:, : self.d1], head.weight[:, : self.d1], head.bias)
