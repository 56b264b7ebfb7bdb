"""FedRolex: sub-models of one global model, cut by windows that roll over its channels.

Alam et al., NeurIPS 2022. https://arxiv.org/abs/2212.01548

    w: the global model; r_k: client k's rate; t: the round, from 0; w[r, t]: of every n hidden
    channels those at (t + i) mod n, i = 0 .. ceil(r n) - 1

    Client k                                        Server
    1  w_k <- w[r_k, t]                             4  every entry of w <- the mean of what was sent
    2  E epochs on CE(masked z, y), where z of         for it; else as it was. Rows of the
       classes that are not in D_k is 0, and           classifier: from who has the class
       hidden layers' outputs are divided by r_k    5  t <- t + 1; broadcast w[r_k, t]
    3  upload w_k

    Inference: w[r_k, t] of the last round; a client of rate 1 has the global model

So in n rounds every entry is trained, also where no client has rate 1. Choices, beside those that
are HeteroFL's as well: the public code moves its windows backwards (--hp.backwards), keeps no
batch-norm statistics but tests with those of the test batch (--hp.statistics batch), and weighs
what it averages for norms and the classifier by how often it was trained; the paper's mean is
plain. A window of all channels leaves them in order, which only names them differently. Batch-norm
statistics are of each rate's own. Gradients are clipped to norm 1 unless --train.clip says
otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from raysim import (
    ClientContext,
    ConfigError,
    Fleet,
    Method,
    PerClient,
    Reply,
    ServerContext,
    Task,
    get_weights,
    set_weights,
)
from raysim import submodels as sub
from raysim.channels import layout
from raysim.nested import shares
from raysim.norms import by_batch
from raysim.slicing import Part
from raysim.submodels import Client, Download, Server, Upload
from zoo import SplitModel


@dataclass(frozen=True)
class FedRolex(Method[Client, Server]):
    rates: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125, 0.0625)
    """r, the share of channels that clients have, dealt to them cyclically."""
    overlap: float | None = None
    """Which share of a window of m channels is in the next one too: windows move by
    int(m (1 - overlap)) + 1 channels. Not set, they move by one, as in the paper."""
    backwards: bool = False
    """Move the windows towards the first channel, as the public code does."""
    scaler: sub.Scaler = "always"
    """When a sub-model's activations are divided by its rate."""
    masked: bool = True
    """Leave classes that a client does not have out of its loss, and out of what the server takes
    from it."""
    statistics: Literal["sent", "batch"] = "sent"
    """Batch-norm statistics for testing: gathered in training and averaged over clients of a rate,
    or those of the test batch, as in the public code (a batch of one uses the former)."""
    weighting: Literal["uniform", "samples"] = "uniform"
    """How the values sent for an entry are averaged: equally, or by n_k."""

    same_models = "cuts sub-models out of one global model"

    def check(self, fleet: Fleet, task: Task) -> None:
        sub.check_rates(self.rates)
        if self.overlap is not None and not 0 <= self.overlap <= 1:
            raise ConfigError(
                f"--hp.overlap must be between 0 and 1, got {self.overlap:g}. Try --hp.overlap 0.5"
            )
        layout(fleet, task)

    def architecture(self, client_id: int, fleet: Fleet) -> str:
        return f"{fleet.model_of(client_id)}@{self.rate(client_id):g}"

    def rate(self, client_id: int) -> float:
        return self.rates[client_id % len(self.rates)]

    def part(self, rate: float, ctx: ServerContext) -> Part:
        """w[r, t]."""

        def start(width: int, size: int) -> int:
            step = 1 if self.overlap is None else int(size * (1 - self.overlap)) + 1
            t = (ctx.round - 1) * step
            return (-t if self.backwards else t) % width

        return sub.part_of(rate, ctx, start=start)

    def init_server(self, ctx: ServerContext) -> Server:
        return Server(get_weights(ctx.build_model()), {})

    def init_client(self, model: SplitModel, ctx: ClientContext) -> Client:
        return sub.born(model, self.rate(ctx.client_id), self.scaler, ctx)

    def broadcast(self, server: Server, cohort: Sequence[int], ctx: ServerContext) -> PerClient:
        rates = {client: self.rate(client) for client in cohort}
        return sub.deal(server, rates, lambda rate: self.part(rate, ctx))

    def receive(self, client: Client, message: Download, ctx: ClientContext) -> None:
        set_weights(client.model, message.model)

    def client_update(self, client: Client, message: Download, ctx: ClientContext) -> Upload:
        model, classes = client.model, torch.unique(ctx.labels)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            z = model(x)
            return F.cross_entropy(sub.masked(z, classes) if self.masked else z, y)

        ctx.fit(loss, model, clip=1.0)
        return Upload(get_weights(model), client.rate, classes)

    def expected(self, client_id: int, ctx: ServerContext) -> Upload:
        return sub.expect(self.part(self.rate(client_id), ctx))

    def server_update(
        self, server: Server, replies: Sequence[Reply[Upload]], ctx: ServerContext
    ) -> None:
        weigh = shares(replies, self.weighting)
        sub.average(server, replies, lambda rate: self.part(rate, ctx), weigh, self.masked)

    def predict(self, client: Client, x: Tensor) -> Tensor:
        return by_batch(client.model, x) if self.statistics == "batch" else client.model(x)
