"""FedGen as FedIN compares with it: whole models, averaged layer by layer, and a generator.

Zhu et al., ICML 2021. https://arxiv.org/abs/2105.10056 Over nested models as FedIN runs it: Chan et
al., https://arxiv.org/abs/2304.00759 For models that differ otherwise, see methods/fedgen.py.

    G(y): a representation of class y, made from y and noise ~ U(0, 1); f_k: the head of w_k

    Client k                                        Server
    1  w_k <- its layers of w                       4  S steps of Adam for G, y of known classes:
    2  E epochs on D_k with G frozen:                    sum_k mean(p_k,y CE(f_k(G(y)), y))
         CE(w_k(x), y) + a_t CE(f_k(G(y~)), y~)           + eta * diversity loss of G(y)
         + b_t KL(f_k(G(y)) || w_k(x))              5  for every layer: w <- mean of w_k over the
    3  upload w_k and its label counts                   participants that have it
                                                    6  broadcast w, G and which classes are known
    y~: known classes, drawn equally, as many as samples in a batch; none in round 1
    p_k,y: k's share of the samples of class y; a_t = max(1e-4, a r^(t-1)), b_t alike

Choices. A class is known once a participant had --hp.least of it, 2 in the authors' code; theirs
knows the classes of all clients from the start. A sample of a class that is not known has no KL.
Their Adam remembers the rounds before, ours is born anew; as theirs, its step size shrinks by r a
round. The label counts, C numbers, are not counted as scalars.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

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
    Weights,
    get_weights,
    kl,
    like,
    nested,
    set_weights,
    weighted_mean,
)
from raysim.nested import Union
from zoo.generator import Generator, draw_labels, teach


class Download(NamedTuple):
    model: Weights
    generator: Weights
    known: Uncounted[Tensor]  # (num_classes,), whether G knows the class


class Upload(NamedTuple):
    model: Weights
    counts: Uncounted[Tensor]  # (num_classes,), samples of each class


@dataclass
class Server(Union):
    generator: Generator
    known: Tensor


@dataclass(frozen=True)
class FedGen_Nested(Method[ClientState, Server]):
    generated_weight: float = 10.0
    """a, weight in round 1 of the clients' loss on generated representations."""
    distill_weight: float = 10.0
    """b, weight in round 1 of the KL towards the answer to a generated representation."""
    decay: float = 0.98
    """r, by which both weights and the generator's step size shrink in a round."""
    diversity: float = 1.0
    """eta, weight of the generator's diversity loss."""
    generator_lr: float = 0.0003
    """Step size of the generator's Adam in round 1."""
    server_steps: int = 50
    """S, steps of the generator in a round."""
    server_batch_size: int = 128
    """Labels in a generator's step, at least 2."""
    noise_dim: int = 64
    """Width of the noise."""
    hidden_dim: int = 512
    """Width of the generator's hidden layer."""
    least: int = 2
    """Samples of a class that some participant must have for the generator to learn it."""
    weighting: Literal["samples", "uniform"] = "samples"
    """How participants are weighted: by n_k as in FedAvg, or equally as in FedIN's Eq. 19."""

    def check(self, fleet: Fleet, task: Task) -> None:
        nested.check(fleet, task, "fedgen_nested")
        if self.server_batch_size < 2 or self.server_steps < 1:
            least = "--hp.server-batch-size must be at least 2 and --hp.server-steps at least 1"
            raise ConfigError(f"{least}. Try --hp.server-batch-size 128 --hp.server-steps 50")

    def init_server(self, ctx: ServerContext) -> Server:
        union = nested.union(ctx)
        known = torch.zeros(ctx.task.num_classes, dtype=torch.bool)
        return Server(union.weights, union.layers, self.build_generator(ctx), known)

    def build_generator(self, ctx: ServerContext | ClientContext) -> Generator:
        sizes = self.noise_dim, ctx.task.num_classes, self.hidden_dim, ctx.fleet.feature_dim
        return Generator(*sizes).to(ctx.device)

    def broadcast(
        self, server: Server, cohort: Sequence[int], ctx: ServerContext
    ) -> PerClient | Download:
        w, rest = server.weights, (get_weights(server.generator), server.known)
        return nested.deal(server, cohort, ctx, lambda x: Download(nested.part(w, x), *rest))

    def receive(self, client: ClientState, message: Download, ctx: ClientContext) -> None:
        set_weights(client.model, message.model)

    def client_update(self, client: ClientState, message: Download, ctx: ClientContext) -> Upload:
        model, known = client.model, message.known
        generator = self.build_generator(ctx).requires_grad_(False).eval()
        set_weights(generator, message.generator)
        first = self.generated_weight, self.distill_weight
        a, b = (w and max(1e-4, w * self.decay ** (ctx.round - 1)) for w in first)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            scores = model(x)
            value = F.cross_entropy(scores, y)
            if known.any():
                drawn = draw_labels(known, ctx.train.batch_size)
                value = value + a * F.cross_entropy(model.head(generator(drawn)[0]), drawn)
            if (heard := known[y]).any():
                said = model.head(generator(y[heard])[0])
                value = value + b * heard.float().mean() * kl(said, scores[heard])
            return value

        ctx.fit(loss, model)
        return Upload(get_weights(model), ctx.labels.bincount(minlength=ctx.task.num_classes))

    def expected(self, client_id: int, ctx: ServerContext) -> Upload:
        model = ctx.weights_like(ctx.fleet.model_of(client_id))
        return Upload(model, like(ctx.task.num_classes, dtype=torch.int64))

    def server_update(
        self, server: Server, replies: Sequence[Reply[Upload]], ctx: ServerContext
    ) -> None:
        models = [reply.payload.model for reply in replies]
        counts = torch.stack([reply.payload.counts for reply in replies])
        server.weights |= weighted_mean(models, nested.shares(replies, self.weighting))
        if (present := (counts >= self.least).any(dim=0)).any():
            heads = [(m["head.weight"], m["head.bias"]) for m in models]
            teach(
                server.generator, heads, counts, present, diversity=self.diversity,
                lr=self.generator_lr * self.decay ** (ctx.round - 1),
                steps=self.server_steps, batch_size=self.server_batch_size,
            )  # fmt: skip
            server.known |= present.to(server.known.device)
