"""HeteroFL: sub-models of one global model, each as wide as its client can bear.

Diao et al., ICLR 2021. https://arxiv.org/abs/2010.01264

    w: the global model; r_k: client k's rate; w[r]: the first ceil(r n) of every n hidden channels

    Client k                                           Server
    1  w_k <- w[r_k]                                   4  every entry of w <- the mean of what was
    2  E epochs on CE(masked z, y), where z of            sent for it; else as it was. Rows of the
       classes that are not in D_k is 0, and              classifier: from who has the class
       hidden layers' outputs are divided by r_k       5  broadcast w[r_k]
    3  upload w_k

    Inference: w[r_k]; a client of rate 1 has the global model

Choices. The paper tests the global model only and so scales in training only; here sub-models are
tested, as they were trained: with their scaler (--hp.scaler training is the public code's). Its
batch norm keeps no statistics; for testing, the server makes them with everybody's data. Here
participants send those of their training, which are no scalars as the papers count, and each rate
has its own: the same channel sees other numbers in a narrow model. --hp.statistics queried is the
paper's without the data: participants measure them with the new global model, at the price of a
second download. Rates are dealt cyclically, not in blocks. The public code cannot slice
bottlenecks; ours slices whatever `raysim.channels` understands. As there, gradients are clipped to
norm 1 unless --train.clip says otherwise, and clients weigh the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from raysim import (
    ClientContext,
    Cohort,
    ConfigError,
    Fleet,
    Method,
    PerClient,
    Reply,
    ServerContext,
    Task,
    Uncounted,
    Weights,
    get_weights,
    set_weights,
)
from raysim import submodels as sub
from raysim.channels import layout
from raysim.nested import shares
from raysim.norms import measure
from raysim.slicing import Part
from raysim.submodels import Client, Download, Server, Upload
from zoo import SplitModel


class Measured(NamedTuple):
    statistics: Weights
    rate: Uncounted[float]


@dataclass(frozen=True)
class HeteroFL(Method[Client, Server]):
    rates: tuple[float, ...] = (1.0, 0.5, 0.25, 0.125, 0.0625)
    """r, the share of channels that clients have, dealt to them cyclically."""
    assignment: Literal["fixed", "dynamic"] = "fixed"
    """Whether a client keeps its rate, or draws one of --hp.rates for every round."""
    scaler: sub.Scaler = "always"
    """When a sub-model's activations are divided by its rate."""
    masked: bool = True
    """Leave classes that a client does not have out of its loss, and out of what the server takes
    from it."""
    statistics: Literal["sent", "queried", "local"] = "sent"
    """Batch-norm statistics for testing: gathered in training and averaged over clients of a rate,
    measured by them with the new global model (static batch norm), or each client's own."""
    weighting: Literal["uniform", "samples"] = "uniform"
    """How the values sent for an entry are averaged: equally, or by n_k."""

    same_models = "cuts sub-models out of one global model"

    def check(self, fleet: Fleet, task: Task) -> None:
        sub.check_rates(self.rates)
        if self.statistics == "local" and self.assignment == "dynamic":
            raise ConfigError(
                "--hp.statistics local needs a client's channels to stay the same, and "
                "--hp.assignment dynamic changes them. Try --hp.statistics sent"
            )
        layout(fleet, task)

    def architecture(self, client_id: int, fleet: Fleet) -> str:
        name = fleet.model_of(client_id)
        return name if self.assignment == "dynamic" else f"{name}@{self.dealt(client_id):g}"

    def dealt(self, client_id: int) -> float:
        return self.rates[client_id % len(self.rates)]

    def init_server(self, ctx: ServerContext) -> Server:
        return Server(get_weights(ctx.build_model()), {})

    def init_client(self, model: SplitModel, ctx: ClientContext) -> Client:
        return sub.born(model, self.dealt(ctx.client_id), self.scaler, ctx)

    def broadcast(self, server: Server, cohort: Sequence[int], ctx: ServerContext) -> PerClient:
        rates = {client: self.dealt(client) for client in cohort}
        if self.assignment == "dynamic":
            drawn = torch.randint(len(self.rates), (len(cohort),)).tolist()
            rates = {client: self.rates[i] for client, i in zip(cohort, drawn, strict=True)}
        statistics = self.statistics != "local"
        return sub.deal(server, rates, lambda rate: sub.part_of(rate, ctx, statistics))

    def receive(self, client: Client, message: Download, ctx: ClientContext) -> None:
        own = get_weights(client.model) if self.statistics == "local" else {}
        set_weights(client.model, own | message.model)
        client.rate = message.rate

    def client_update(self, client: Client, message: Download, ctx: ClientContext) -> Upload:
        model, classes = client.model, torch.unique(ctx.labels)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            z = model(x)
            return F.cross_entropy(sub.masked(z, classes) if self.masked else z, y)

        ctx.fit(loss, model, clip=1.0)
        sent = get_weights(model)
        if self.statistics != "sent":
            sent = sub.apart(sent, statistics=False)
        return Upload(sent, client.rate, classes)

    def uploaded(self, rate: float, ctx: ServerContext) -> Part:
        return sub.part_of(rate, ctx, statistics=self.statistics == "sent")

    def expected(self, client_id: int, ctx: ServerContext) -> Upload | None:
        if self.assignment == "dynamic":
            return None  # of one of the rates; `scatter_mean` takes no other shape
        return sub.expect(self.uploaded(self.dealt(client_id), ctx))

    def server_update(
        self, server: Server, replies: Sequence[Reply[Upload]], ctx: ServerContext
    ) -> None:
        weigh = shares(replies, self.weighting)
        sub.average(server, replies, lambda rate: self.uploaded(rate, ctx), weigh, self.masked)

    def round(self, server: Server, cohort: Cohort, ctx: ServerContext) -> None:
        super().round(server, cohort, ctx)
        if self.statistics == "queried":
            replies = cohort.call(self.query, self.broadcast(server, cohort.ids, ctx))
            uploads = [(r.payload.statistics, sub.part_of(r.payload.rate, ctx)) for r in replies]
            groups = [f"{reply.payload.rate:g}" for reply in replies]
            sub.take_in(server, uploads, groups, shares(replies, self.weighting))

    def query(self, client: Client, message: Download, ctx: ClientContext) -> Measured:
        self.receive(client, message, ctx)
        measure(client.model, ctx.samples())
        return Measured(sub.apart(get_weights(client.model), statistics=True), client.rate)
