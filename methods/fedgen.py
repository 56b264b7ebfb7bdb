"""FedGen: data-free knowledge distillation with a generator of representations.

Zhu et al., ICML 2021. https://arxiv.org/abs/2105.10056 As in FedRE's comparison, which runs
HtFLlib's version for models that differ: clients share heads f_k and keep their extractors g_k.

    G(y): a representation of class y, made from y and noise ~ U(0, 1)

    Client k                                   Server
    1  f_k <- f                                4  f <- sum_k n_k/n * f_k
    2  E epochs on CE(f_k(g_k(x)), y)          5  S steps of Adam for G on CE(f(G(y)), y)
         + a * CE(f_k(G(y~)), y~)                   + eta * diversity loss of G(y)
       with G frozen; round 1: CE only         6  broadcast f, G and the sum of all counts
    3  upload f_k and its label counts

    y and y~ are drawn as often as they occur in the counts of all clients heard of so far.

Choices. Heads are linear, so f(G(y)) is HtFLlib's ensemble sum_k n_k/n * f_k(G(y)). HtFLlib never
saves the G it has trained, so its clients always have the first one, and in training mode; and it
reveals all label counts at once, so they use it from round 1. Its Adam is born anew in every round.
The original shares whole models, weights heads by label and distills G(y) into f_k(g_k(x)); of
these only its diversity loss is here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raysim import (
    ClientContext,
    ClientState,
    ConfigError,
    Fleet,
    Method,
    Reply,
    ServerContext,
    Task,
    Uncounted,
    Weights,
    fit,
    get_weights,
    like,
    set_weights,
    weighted_mean,
)
from zoo.generator import Generator, diversity_loss, draw_labels


class Download(NamedTuple):
    head: Weights
    generator: Weights
    counts: Uncounted[Tensor]  # (num_classes,), zeros before the first upload


class Upload(NamedTuple):
    head: Weights
    counts: Uncounted[Tensor]  # (num_classes,), samples of each class


@dataclass
class Server:
    head: nn.Linear
    generator: Generator
    counts: Tensor  # (num_clients, num_classes), zeros for who never sent any


@dataclass(frozen=True)
class FedGen(Method[ClientState, Server]):
    generated_weight: float = 1.0
    """a, weight of the clients' loss on generated representations."""
    diversity: float = 0.0
    """eta, weight of the generator's diversity loss: 1 in the original, 0 in HtFLlib."""
    generator_lr: float = 0.005
    """Step size of the generator's Adam."""
    server_steps: int = 100
    """S, steps of the generator in a round."""
    server_batch_size: int = 32
    """Labels in a generator's step, at least 2."""
    noise_dim: int = 512
    """Width of the noise."""
    hidden_dim: int = 512
    """Width of the generator's hidden layer."""
    htfllib_compat: bool = False
    """As HtFLlib does, leave the generator untrained and give it batch statistics at clients."""

    def check(self, fleet: Fleet, task: Task) -> None:
        if self.server_batch_size < 2 or self.server_steps < 1:
            least = "--hp.server-batch-size must be at least 2 and --hp.server-steps at least 1"
            raise ConfigError(f"{least}. Try --hp.server-batch-size 32 --hp.server-steps 100")

    def init_server(self, ctx: ServerContext) -> Server:
        counts = torch.zeros(ctx.num_clients, ctx.task.num_classes, dtype=torch.int64)
        return Server(ctx.build_head().requires_grad_(False), self.build_generator(ctx), counts)

    def build_generator(self, ctx: ServerContext | ClientContext) -> Generator:
        sizes = self.noise_dim, ctx.task.num_classes, self.hidden_dim, ctx.fleet.feature_dim
        return Generator(*sizes).to(ctx.device)

    def broadcast(self, server: Server, cohort: Sequence[int], ctx: ServerContext) -> Download:
        modules = get_weights(server.head), get_weights(server.generator)
        return Download(*modules, server.counts.sum(dim=0))

    def receive(self, client: ClientState, message: Download, ctx: ClientContext) -> None:
        set_weights(client.model.head, message.head)

    def client_update(self, client: ClientState, message: Download, ctx: ClientContext) -> Upload:
        model, size = client.model, ctx.train.batch_size
        generator = self.build_generator(ctx)
        set_weights(generator, message.generator)
        generator.train(self.htfllib_compat and size > 1)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            value = F.cross_entropy(model(x), y)
            if message.counts.any():
                drawn = draw_labels(message.counts, size)
                with torch.no_grad():
                    made, _ = generator(drawn)
                value = value + self.generated_weight * F.cross_entropy(model.head(made), drawn)
            return value

        ctx.fit(loss, model)
        counts = torch.bincount(ctx.labels, minlength=ctx.task.num_classes)
        return Upload(get_weights(model.head), counts)

    def expected(self, client_id: int, ctx: ServerContext) -> Upload:
        c = ctx.task.num_classes
        head = {"weight": like(c, ctx.fleet.feature_dim), "bias": like(c)}
        return Upload(head, like(c, dtype=torch.int64))

    def server_update(
        self, server: Server, replies: Sequence[Reply[Upload]], ctx: ServerContext
    ) -> None:
        heads = [reply.payload.head for reply in replies]
        set_weights(server.head, weighted_mean(heads, [reply.num_samples for reply in replies]))
        for reply in replies:
            server.counts[reply.client_id] = reply.payload.counts
        if self.htfllib_compat:
            return

        def loss(y: Tensor) -> Tensor:
            made, noise = server.generator(y)
            value = F.cross_entropy(server.head(made), y)
            return value + (self.diversity and self.diversity * diversity_loss(made, noise))

        adam, lr, size = torch.optim.Adam, self.generator_lr, self.server_batch_size
        y = draw_labels(server.counts.sum(dim=0).to(ctx.device), self.server_steps * size)
        fit(loss, server.generator, data=(y,), lr=lr, batch_size=size, optimizer=adam)
