"""FedET: small models teach a large one at the server, which gives them back its head.

Cho et al., IJCAI 2022, as Fed-ET. https://arxiv.org/abs/2204.12703

    f_k: client k's model; F: the server's; s_k: logits of f_k; X: public samples, without labels

    Client k                                Server
    1  f_k <- the model of its kind         4  the model of each kind: the mean of its participants'
    2  E epochs of cross-entropy on D_k     5  head of F <- the mean of all participants' heads
    3  upload f_k                           6  for x of S batches of X:
                                                 v_k = var(s_k(x)) / sum_j var(s_j(x))
                                                 y = argmax sum_k v_k s_k(x)
                                                 s' = the same mean of those whose argmax is not y
                                                 F <- SGD on CE(F(x), y)
                                                      + lambda KL(softmax s' || softmax F(x))
                                            7  head of every kind <- the head of F
                                            8  broadcast to each client the model of its kind

    Inference: the client's model after step 1; beside it F, the variant "server".

Choices. Variances are over classes. Where nobody disagrees there is no KL; a public code divides by
zero there, and takes log-softmax before the variance, which changes nothing. The layer that the
paper's models share is the head here, so any models can take part. FedIN does not say what X it
used, nor whether it tested small models or F; F goes out with evaluations, never with rounds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch.nn.functional as F
from torch import Tensor

import zoo
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
    Weights,
    ensemble,
    fit,
    get_weights,
    nested,
    set_weights,
    weighted_mean,
)
from raysim.ensemble import consensus, consensus_loss
from raysim.errors import unknown
from zoo import SplitModel


class Download(NamedTuple):
    model: Weights
    large: Weights | None  # F, in evaluations
    kind: str  # what F is


class Upload(NamedTuple):
    model: Weights


@dataclass
class Client(ClientState):
    large: list[Any]  # F, while an evaluation lasts


@dataclass
class Server:
    kinds: dict[str, Weights]
    model: SplitModel  # F


@dataclass(frozen=True)
class FedET(Method[Client, Server]):
    needs_public: ClassVar[str] = "distills into a model at the server, on samples of nobody's"

    server_model: str = ""
    """Architecture of F; empty: the largest of --fleet.models."""
    diversity: float = 0.05
    """lambda, weight of the KL towards those who disagree."""
    server_lr: float = 0.005
    """Step size of F's SGD."""
    server_steps: int = 128
    """S, steps of F in a round."""
    server_batch_size: int = 64
    """Public samples in a step, at least 2."""
    test_server: bool = True
    """Whether F is tested too, at the price of a second model in evaluations."""
    weighting: Literal["samples", "uniform"] = "samples"
    """How participants are weighted in means: by n_k, or equally."""

    def check(self, fleet: Fleet, task: Task) -> None:
        if self.server_batch_size < 2 or self.server_steps < 1:
            least = "--hp.server-batch-size must be at least 2 and --hp.server-steps at least 1"
            raise ConfigError(f"{least}. Try --hp.server-batch-size 64 --hp.server-steps 128")
        if self.server_model and self.server_model not in zoo.names():
            raise unknown("model", self.server_model, zoo.names(), "--hp.server-model")

    def init_server(self, ctx: ServerContext) -> Server:
        sizes = {x: ctx.fleet.parameter_count(x, ctx.task) for x in ctx.fleet.models}
        large = ctx.build_model(self.server_model or max(sizes, key=lambda name: sizes[name]))
        return Server(given_head({x: get_weights(ctx.build_model(x)) for x in sizes}, large), large)

    def init_client(self, model: SplitModel, ctx: ClientContext) -> Client:
        return Client(model, large=[])

    def round(self, server: Server, cohort: Cohort, ctx: ServerContext) -> None:
        Method.round(replace(self, test_server=False), server, cohort, ctx)  # without F

    def broadcast(self, server: Server, cohort: Sequence[int], ctx: ServerContext) -> PerClient:
        large = get_weights(server.model) if self.test_server else None
        name = server.model.name
        parts = {kind: Download(model, large, name) for kind, model in server.kinds.items()}
        return PerClient({client: parts[ctx.fleet.model_of(client)] for client in cohort})

    def receive(self, client: Client, message: Download, ctx: ClientContext) -> None:
        set_weights(client.model, message.model)
        if message.large is not None:
            client.large = [ctx.build_model(message.kind).eval()]
            set_weights(client.large[0], message.large)

    def client_update(self, client: Client, message: Download, ctx: ClientContext) -> Upload:
        model = client.model
        ctx.fit(lambda x, y: F.cross_entropy(model(x), y), model)
        return Upload(get_weights(model))

    def expected(self, client_id: int, ctx: ServerContext) -> Upload:
        return Upload(ctx.weights_like(ctx.fleet.model_of(client_id)))

    def server_update(
        self, server: Server, replies: Sequence[Reply[Upload]], ctx: ServerContext
    ) -> None:
        shares, models = nested.shares(replies, self.weighting), [r.payload.model for r in replies]
        names, public = [ctx.fleet.model_of(reply.client_id) for reply in replies], ctx.public
        assert public is not None
        heads = [{x: model[f"head.{x}"] for x in ("weight", "bias")} for model in models]
        set_weights(server.model.head, weighted_mean(heads, shares))
        found = consensus(ensemble.logits(names, models, public, ctx))
        x = ensemble.draw(public, self.server_steps * self.server_batch_size)
        fit(
            lambda x: consensus_loss(server.model(public.images(x)), found.of(x), self.diversity),
            server.model, data=(x,), lr=self.server_lr, batch_size=self.server_batch_size,
        )  # fmt: skip
        server.kinds |= ensemble.means(names, models, shares)
        server.kinds = given_head(server.kinds, server.model)

    def variants(self, client: Client, x: Tensor) -> dict[str, Tensor]:
        return {"server": client.large[0](x)} if client.large else {}


def given_head(kinds: dict[str, Weights], large: SplitModel) -> dict[str, Weights]:
    head = {f"head.{x}": w.clone() for x, w in get_weights(large.head).items()}
    return {name: kind | head for name, kind in kinds.items()}
