"""FedKD: communication-efficient federated learning via knowledge distillation.

Wu et al., Nature Communications 2022. https://arxiv.org/abs/2108.13323

    h_k: client k's mentor, its own; g: the mentee, shared by all; W_k: its map from r_g to r_h
    [.]_T: singular values cut to the share T of their squares; T grows from T_s to T_e

    Client k                                            Server
    1  g_k <- g                                         4  d <- mean of the [d_k]_T
    2  Z = CE(h_k, y) + CE(g_k, y)                      5  g <- g + [d]_T
       L_h = CE(h_k, y) + (KL(g_k || h_k) + MSE(r_h, W_k r_g)) / Z
       L_g = CE(g_k, y) + (KL(h_k || g_k) + MSE(r_h, W_k r_g)) / Z
       h_k, W_k <- SGD on L_h; g_k, W_k <- SGD on L_g   6  broadcast [d]_T, or the whole g to
    3  upload [d_k]_T, d_k = g_k - g                       those who do not have the g before

    Inference: h_k

Choices. U, sigma and V really travel; a matrix goes whole where they are not smaller (HtFLlib's
message grows, and a flat spectrum becomes zeros). The paper compresses updates; --hp.compress
parameters is HtFLlib's way, which at these energies sends nearly all of g whole. The first g goes
whole: cutting random weights would spoil them. Teachers and Z take no gradient, KL is the mean of a
sample (--hp.htfllib-compat). --train.clip is 10 for each module if not set, as in HtFLlib.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

import zoo
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
    Uncounted,
    get_weights,
    kl,
    weighted_mean,
)
from raysim.errors import unknown
from raysim.lowrank import LowRank, Parts, compress, compressed_like, load, restore
from zoo import SplitModel


class Download(NamedTuple):
    shared: Parts
    update: Uncounted[bool]  # whether to add it to the g before


class Upload(NamedTuple):
    shared: dict[str, Tensor | LowRank]


@dataclass
class Client(ClientState):
    shared: SplitModel  # g as last received
    projector: nn.Linear  # W_k, never leaves the client


@dataclass
class Server:
    shared: SplitModel
    news: Parts  # what the last round made of g, compressed
    holders: list[int]  # who has the g before it


@dataclass(frozen=True)
class FedKD(Method[Client, Server]):
    scheduled: ClassVar[str] = "the kept energy"

    shared_model: str = "cnn5"
    """Architecture of the mentee g."""
    mentee_lr: float | None = None
    """Learning rate of the mentee; by default that of the mentor, --train.lr."""
    energy_start: float = 0.95
    """T_s, the share of squared singular values that is sent at the start of the run."""
    energy_end: float = 0.98
    """T_e, the share in the last round; 1 sends everything whole."""
    compress: Literal["updates", "parameters"] = "updates"
    """What is compressed: the change of g as in the paper, or g itself as in HtFLlib."""
    htfllib_compat: bool = False
    """Distill as HtFLlib does: teachers and Z learn too, and KL is divided by the classes."""

    def check(self, fleet: Fleet, task: Task) -> None:
        for flag, value in (("start", self.energy_start), ("end", self.energy_end)):
            if not 0 < value <= 1:
                wanted = f"above 0 and at most 1, got {value}. Try --hp.energy-{flag} 0.95"
                raise ConfigError(f"--hp.energy-{flag} must be {wanted}")
        if self.shared_model not in zoo.names():
            raise unknown("model", self.shared_model, zoo.names(), "--hp.shared-model")

    def init_server(self, ctx: ServerContext) -> Server:
        return Server(ctx.build_model(self.shared_model), news={}, holders=[])

    def init_client(self, model: SplitModel, ctx: ClientContext) -> Client:
        shared = ctx.build_model(self.shared_model)
        return Client(model, shared, nn.Linear(shared.feature_dim, model.feature_dim, bias=False))

    def broadcast(self, server: Server, cohort: Sequence[int], ctx: ServerContext) -> PerClient:
        update = self.compress == "updates"
        whole = Download(get_weights(server.shared), update=False)
        news = Download(server.news, update) if server.news else whole
        return PerClient({k: news if k in server.holders or not update else whole for k in cohort})

    def receive(self, client: Client, message: Download, ctx: ClientContext) -> None:
        load(client.shared, message.shared, add=message.update)

    def client_update(self, client: Client, message: Download, ctx: ClientContext) -> Upload:
        model, projector, compat = client.model, client.projector, self.htfllib_compat
        mentee = copy.deepcopy(client.shared)  # the next update is for the g of now

        def loss(x: Tensor, y: Tensor) -> Tensor:
            r_h, r_g = model.features(x), mentee.features(x)
            h, g = model.head(r_h), mentee.head(r_g)
            ce_h, ce_g = F.cross_entropy(h, y), F.cross_entropy(g, y)
            z, fixed_h, fixed_g = (ce_h + ce_g).clamp(min=1e-6), r_h, r_g
            if not compat:
                z, fixed_h, fixed_g = z.detach(), r_h.detach(), r_g.detach()
            loss_h = ce_h + (kl(g, h, htfllib=compat) + F.mse_loss(r_h, projector(fixed_g))) / z
            loss_g = ce_g + (kl(h, g, htfllib=compat) + F.mse_loss(fixed_h, projector(r_g))) / z
            return loss_h + loss_g

        rates = [lr := ctx.train.lr, lr, lr if self.mentee_lr is None else self.mentee_lr]
        ctx.fit(loss, model, projector, mentee, lr=rates, clip=10.0)
        sent, before = get_weights(mentee), get_weights(client.shared)
        if self.compress == "updates":
            sent = {name: tensor - before[name] for name, tensor in sent.items()}
        return Upload(compress(sent, self.energy(ctx)))

    def expected(self, client_id: int, ctx: ServerContext) -> Upload:
        return Upload(compressed_like(ctx.weights_like(self.shared_model)))

    def server_update(
        self, server: Server, replies: Sequence[Reply[Upload]], ctx: ServerContext
    ) -> None:
        uploads = [restore(reply.payload.shared) for reply in replies]
        server.news = compress(weighted_mean(uploads, [1.0] * len(uploads)), self.energy(ctx))
        load(server.shared, server.news, add=self.compress == "updates")
        server.holders = [reply.client_id for reply in replies]

    def energy(self, ctx: ClientContext | ServerContext) -> float:
        """T in this round."""
        return self.energy_start + ctx.round / ctx.rounds * (self.energy_end - self.energy_start)
