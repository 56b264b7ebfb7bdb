"""FedMuscle: clients with different models and tasks align their representations of public samples.

https://arxiv.org/abs/2602.01626

    x_i: public samples, without labels, as client n's modality has them; f_n: its representation;
    p_n: its projection to d numbers; z_i = p_n(f_n(x_i)), of norm 1

    Client n                                    Server
    1  E epochs of its own task's loss on D_n   3  for each client: draw M of the others that have
    2  upload z_i of the round's x_i               uploaded, send it their z
    4  for each batch of B of these x_i: a step of f_n and p_n on the
       loss of its z_i, made anew, against the M peers', which are constants

    Inference: the client's own model.

The loss is Muscle's, which sets the peers' z_i against all B^M tuples of a batch, and it is exact
(raysim/muscle.py). Clients compute it, so M x B x d numbers go down for a batch; the paper's server
sends B^M x d combined ones.

Choices: we had a summary of the paper, without code. p_n is one linear layer on the task head's
input, which only steps 2 and 4 use; step 4 leaves the head as it is, and descends as step 1 does.
Peers are drawn for each client in each round; batches are the same for all, a last one of one
sample is left out. The paper's costs are those of all public samples in each round, its page speaks
of one batch: --hp.batches 1. The weights alpha are on the positive tuple too, as the derivation
needs. Step 4 ends a round, and moves what the head learned on; --hp.order align_first ends with 1.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raysim import (
    ClientContext,
    ClientState,
    Cohort,
    ConfigError,
    Fleet,
    Method,
    PerClient,
    Reply,
    ServerContext,
    Task,
    Uncounted,
    alignment,
    evaluating,
    like,
    ops,
)
from raysim.alignment import Shelf
from raysim.muscle import Tuples
from zoo import SplitModel


class Request(NamedTuple):
    rows: Uncounted[Tensor]  # numbers of the round's public samples


class Peers(NamedTuple):
    rows: Uncounted[Tensor]
    order: Uncounted[Tensor]  # in which batches take the rows
    z: list[Tensor]  # M of (rows, d)


class Upload(NamedTuple):
    z: Tensor  # (rows, d)


@dataclass
class Client(ClientState):
    projection: nn.Linear  # p_n


@dataclass(frozen=True)
class FedMuscle(Method[Client, Shelf]):
    any_task: ClassVar[bool] = True
    needs_public: ClassVar[str] = "aligns the clients' representations of public samples"
    only_reads: ClassVar[bool] = True

    loss: alignment.Loss = "muscle"
    """muscle; pairwise, the sum of M InfoNCE losses, which is muscle without its weights alpha;
    gramian, a contrast of the volumes that a client and its peers span."""
    peers: int = 3
    """M, clients whose representations a client gets in a round."""
    batch: int = 32
    """B, public samples in a step of the alignment."""
    width: int = 256
    """d, numbers in a representation."""
    tau: float = 0.2
    """Temperature between a client and its peers."""
    tau_peers: float = 0.15
    """Temperature of the peers among themselves; alpha's gamma is 1/tau_peers - 1/tau."""
    alpha_on_positive: bool = True
    """Whether the positive tuple has its weight alpha; False gives it the weight 1."""
    tuples: Tuples = "aligned"
    """Of the gramian loss: aligned, the B tuples (j, .., j) as in GRAM; all, the B^M of muscle."""
    batches: int = 0
    """Public batches in a round; 0 takes all public samples."""
    align_lr: float | None = None
    """Step size of the alignment; None is --train.lr."""
    order: Literal["tune_first", "align_first"] = "tune_first"
    """Whether a client begins with its own task, as in the paper, or with the alignment."""
    staleness: int = 0
    """Rounds for which a client that is not chosen again can still be a peer."""

    def check(self, fleet: Fleet, task: Task) -> None:
        limits = {"peers": 1, "batch": 2, "width": 1, "batches": 0, "staleness": 0}
        for name, least in limits.items():
            if (got := getattr(self, name)) < least:
                raise ConfigError(f"--hp.{name} must be at least {least}, got {got}")
        if self.staleness and self.batches:
            raise ConfigError("--hp.staleness needs z of all public samples. Try --hp.batches 0")
        alignment.check(self)

    def init_server(self, ctx: ServerContext) -> Shelf:
        return alignment.new_shelf(ctx.public)

    def init_client(self, model: SplitModel, ctx: ClientContext) -> Client:
        return Client(model, nn.Linear(model.feature_dim, self.width))

    def round(self, server: Shelf, cohort: Cohort, ctx: ServerContext) -> None:
        rows = alignment.choose(ctx.public, self.batches * self.batch)
        order = torch.randperm(len(rows))
        replies: list[Reply[Upload]] = cohort.call(self.client_update, Request(rows))
        for n, _, upload in replies:
            alignment.put(server, n, upload.z, ctx.round)
        z = {n: alignment.draw(server, n, self.peers) for n, _, _ in replies}
        cohort.call(self.align, PerClient({n: Peers(rows, order, z[n]) for n in z}))
        alignment.forget(server, before=ctx.round + 1 - self.staleness)

    def client_update(self, client: Client, message: Request, ctx: ClientContext) -> Upload:
        if self.order == "tune_first":
            tune(client, ctx)
        assert ctx.public is not None
        with evaluating(client.model, client.projection), ctx.autocast():
            parts = torch.split(message.rows, ctx.eval_batch_size)
            return Upload(torch.cat([represent(client, ctx.public.images(x)) for x in parts]))

    def expected(self, client_id: int, ctx: ServerContext) -> Upload:
        assert ctx.public is not None
        count = len(ctx.public)
        return Upload(like(min(count, self.batches * self.batch or count), self.width))

    def align(self, client: Client, message: Peers, ctx: ClientContext) -> None:
        def loss(x: Tensor, places: Tensor) -> Tensor:
            peers = torch.stack([z[places] for z in message.z])
            return alignment.contrast(represent(client, x), peers, self)

        if message.z:
            given = ctx.public, message.rows, message.order, self.batch
            modules = client.model, client.projection  # the head has no part in the loss
            once, lr = replace(ctx.train, epochs=1), self.align_lr
            ops.train(loss, modules, lambda: alignment.batches(*given), once, ctx.device.type, lr)
        if self.order == "align_first":
            tune(client, ctx)


def represent(client: Client, x: Tensor) -> Tensor:
    return F.normalize(client.projection(client.model.features(x)).float(), dim=1)


def tune(client: Client, ctx: ClientContext) -> None:
    ctx.fit(lambda x, y: ctx.loss(client.model(x), y), client.model)
