"""SCAFFOLD: clients that drift are steered back by control variates.

Karimireddy et al., ICML 2020. https://arxiv.org/abs/1910.06378 Layer-wise over nested models as
FedIN runs it: Chan et al., https://arxiv.org/abs/2304.00759

    Client k (c_k is 0 at first)                   Server (c is 0 at first)
    1  y <- its layers of x                        4  x_l <- x_l + eta_g * mean of y_l - x_l over
    2  E epochs on D_k, each step with                  the participants that have layer l
         g(y) - c_k + c in place of g(y)           5  c_l <- c_l + sum of their dc_l / N_l, where
    3  c_k+ <- mean of the g(y) of these steps          N_l of all clients have layer l
         upload y and dc = c_k+ - c_k; keep c_k+   6  broadcast x and c

For plain SGD at rate eta, the mean gradient of K steps is the paper's option II, c_k - c +
(x - y) / (K eta), without its rounding. That form is a gradient for plain SGD only. Ours holds
under momentum, Adam and clipping too: they get the corrected gradient, and c_k stays a mean of
gradients of the client's objective, weight decay included. `--hp.correct update` is what the public
code of NIID-Bench does, and FedIN with Adam presumably did: whatever the optimizer, y moves another
-eta (c - c_k) after each of its steps, and c_k is option II as written. Both are one for plain SGD.

Choices. Control variates are of trainable weights; batch-norm statistics are averaged like weights
(NIID-Bench corrects them too, and starts from random control variates). c is always the mean of
all clients' c_k; --hp.weighting concerns x alone.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
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
    get_weights,
    nested,
    set_weights,
    terms,
    weighted_mean,
)
from raysim.nested import Union
from zoo import SplitModel


class Download(NamedTuple):
    model: Weights
    control: Weights  # c, of trainable weights


class Upload(NamedTuple):
    model: Weights
    control: Weights  # how much c_k changed


@dataclass
class Client(ClientState):
    control: Weights | None  # c_k; None, which is 0, until the client first takes part


@dataclass
class Server(Union):
    control: Weights


@dataclass(frozen=True)
class Scaffold(Method[Client, Server]):
    server_lr: float = 1.0
    """eta_g, the server's step; 1 averages the clients' weights."""
    correct: Literal["gradient", "update"] = "gradient"
    """What c - c_k is added to: the gradient, before the optimizer sees it, or the optimizer's
    update, as NIID-Bench has it. The same for plain SGD."""
    weighting: Literal["uniform", "samples"] = "uniform"
    """How participants' weights are averaged: equally as in the paper, or by n_k."""

    def check(self, fleet: Fleet, task: Task) -> None:
        nested.check(fleet, task, "scaffold")
        if not self.server_lr > 0:
            raise ConfigError(
                f"--hp.server-lr must be above 0, got {self.server_lr}. Try --hp.server-lr 1"
            )

    def init_server(self, ctx: ServerContext) -> Server:
        start = nested.union(ctx)
        names = {k for name in start.layers for k in nested.trainable_like(name, ctx)}
        control = {k: torch.zeros_like(t) for k, t in start.weights.items() if k in names}
        return Server(start.weights, start.layers, control)

    def init_client(self, model: SplitModel, ctx: ClientContext) -> Client:
        return Client(model, control=None)

    def broadcast(
        self, server: Server, cohort: Sequence[int], ctx: ServerContext
    ) -> PerClient | Download:
        x, c = server.weights, server.control
        return nested.deal(
            server, cohort, ctx, lambda layers: Download(*(nested.part(w, layers) for w in (x, c)))
        )

    def receive(self, client: Client, message: Download, ctx: ClientContext) -> None:
        set_weights(client.model, message.model)

    def client_update(self, client: Client, message: Download, ctx: ClientContext) -> Upload:
        model, c, lr, decay = client.model, message.control, ctx.train.lr, ctx.train.weight_decay
        c_k = client.control or {name: torch.zeros_like(tensor) for name, tensor in c.items()}
        drift = {name: c[name] - c_k[name] for name in c}
        gradients = terms.MeanGradient(model, decay)

        def adjust() -> None:
            gradients.add()
            if self.correct == "gradient":
                terms.correct(model, drift)
            else:
                terms.shift(model, drift, lr, decay)

        ctx.fit(lambda x, y: F.cross_entropy(model(x), y), model, adjust=adjust)
        x, y, steps = message.model, get_weights(model), gradients.steps
        if steps and self.correct == "gradient":
            client.control = gradients.mean()
        elif steps:
            client.control = {k: (x[k] - y[k]) / (steps * lr) - drift[k] for k in drift}
        else:
            client.control = c_k
        return Upload(y, {name: client.control[name] - c_k[name] for name in c_k})

    def expected(self, client_id: int, ctx: ServerContext) -> Upload:
        name = ctx.fleet.model_of(client_id)
        return Upload(ctx.weights_like(name), nested.trainable_like(name, ctx))

    def server_update(
        self, server: Server, replies: Sequence[Reply[Upload]], ctx: ServerContext
    ) -> None:
        shares = nested.shares(replies, self.weighting)
        for name, mean in weighted_mean([r.payload.model for r in replies], shares).items():
            step = self.server_lr if name in server.control else 1  # statistics are averaged
            server.weights[name] = mean if step == 1 else server.weights[name].lerp(mean, step)
        clients = Counter(ctx.fleet.model_of(k) for k in range(ctx.num_clients))
        for name, c in server.control.items():
            owners = sum(
                clients[model] for model, layers in server.layers.items() if name in layers
            )
            for reply in replies:
                if name in reply.payload.control:
                    c.add_(reply.payload.control[name], alpha=1 / owners)
