"""InclusiveFL: nested models whose top layers are their own and follow the next larger model.

Liu et al., KDD 2022. https://arxiv.org/abs/2202.08036 Over nested ResNets as FedIN runs it: Chan et
al., https://arxiv.org/abs/2304.00759

    The clients of one architecture are a group i; i+1 is that of the next larger one.

    Client k of group i                     Server
    1  w_k <- the model w_i of its group    4  for every group i: g_i <- mean of w_k - w_i
    2  E epochs of cross-entropy on D_k     5  in the top block of each stage where i+1 has more:
    3  upload w_k                                 m <- mean of g_i+1 over its blocks from there on
                                                  g_i <- beta m + (1 - beta) g_i
                                            6  top blocks and heads: w_i <- w_i + g_i; every other
                                                  layer: the mean of w_k over all participants that
                                                  have it, but not as a top
                                            7  broadcast w_i to group i

Step 5 is the paper's momentum distillation. A group without participants keeps its tops and head.

Choices. The paper's are transformers of which a smaller one has fewer layers, all alike, and one on
top. A ResNet has stages: a group's tops are, in each stage in which the next larger model has more
blocks, its last there (ResNet-10 under ResNet-14 has two, in the last two stages). The first block
of a stage may change width and stride: a convolution that is not of one shape in all blocks takes
no m, nor its batch norm, nor shortcuts, nor running statistics. m is of this round; if nobody of
group i+1 takes part there is none, and g_i stays. The authors' code overwrites m layer by layer
instead of summing it, and applies it only while it is still 0: there is no flag for that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
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
    blocks,
    ensemble,
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


@dataclass
class Server(Union):
    own: dict[str, Weights]  # architecture -> its tops and head


@dataclass(frozen=True)
class InclusiveFL(Method[ClientState, Server]):
    beta: float = 0.2
    """How much of a top block's update is the next larger model's; 0 distills nothing."""
    own_top: bool = True
    """Whether groups have top blocks of their own; without, nothing is distilled."""
    own_head: bool = True
    """Whether groups have heads of their own."""
    weighting: Literal["samples", "uniform"] = "samples"
    """How participants are weighted: by n_k as in FedAvg, or equally as in FedIN's Eq. 19."""

    def check(self, fleet: Fleet, task: Task) -> None:
        nested.check(fleet, task, "inclusivefl")
        if not 0 <= self.beta <= 1:
            raise ConfigError(f"--hp.beta must be in [0, 1], got {self.beta}. Try --hp.beta 0.2")

    def init_server(self, ctx: ServerContext) -> Server:
        union = nested.union(ctx)
        own = {}
        for name, layers in union.layers.items():
            starts = ["head."] if self.own_head else []
            starts += self.tops(union, name)
            own[name] = {x: union.weights[x] for x in layers if x.startswith(tuple(starts))}
        return Server(union.weights, union.layers, own)

    def broadcast(self, server: Server, cohort: Sequence[int], ctx: ServerContext) -> PerClient:
        parts = {name: Download(model_of(server, name)) for name in server.layers}
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
        shares, models = nested.shares(replies, self.weighting), [r.payload.model for r in replies]
        names = [ctx.fleet.model_of(reply.client_id) for reply in replies]
        means, updates = ensemble.means(names, models, shares), {}
        for name, mean in means.items():
            old = model_of(server, name)
            updates[name] = {layer: w - old[layer].to(w.device) for layer, w in mean.items()}
        shared = [
            {layer: w for layer, w in model.items() if layer not in server.own[name]}
            for name, model in zip(names, models, strict=True)
        ]
        server.weights |= weighted_mean(shared, shares)
        for name, g in updates.items():
            server.own[name] = {layer: means[name][layer] for layer in server.own[name]}
            g_larger = updates.get(next_larger(server).get(name, ""))
            if g_larger is None:
                continue
            for top, above in self.tops(server, name).items():
                for part in blocks.alike(above, g_larger):
                    m = torch.stack([g_larger[block + part] for block in above]).mean(dim=0)
                    server.own[name][top + part] += self.beta * (m - g[top + part])

    def tops(self, server: Union, name: str) -> dict[str, list[str]]:
        """The top blocks of an architecture, each with the next larger one's from there on."""
        larger = next_larger(server).get(name)
        if larger is None or not self.own_top:
            return {}
        less, more = (blocks.counts(server.layers[group]) for group in (name, larger))
        return {
            f"{stage}.{count - 1}.": [f"{stage}.{b}." for b in range(count - 1, more[stage])]
            for stage, count in less.items()
            if count < more[stage]
        }


def model_of(server: Server, name: str) -> Weights:
    return nested.part(server.weights | server.own[name], server.layers[name])


def next_larger(server: Union) -> dict[str, str]:
    return dict(pairwise(sorted(server.layers, key=lambda name: len(server.layers[name]))))
