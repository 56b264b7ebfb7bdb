"""ScaleFL: sub-models of one global model, scaled in depth and in width, with early exits.

Ilhan et al., CVPR 2023.
https://openaccess.thecvf.com/content/CVPR2023/html/Ilhan_ScaleFL_Resource-Adaptive_Federated_Learning_With_Heterogeneous_Clients_CVPR_2023_paper.html

    w: the global model with its exits; a client of level q has it up to exit h_q, and of every
    layer's channels the first share v_q; z_1 .. z_H: the logits at its H exits

    Client k of level q                                    Server
    1  w_k <- w[h_q, v_q]                                  4  every entry of w <- the mean of what
    2  E epochs on sum_j j L_j / (1 + .. + H), where          was sent for it; else as it was
       L_j = CE(z_j, y) + gamma T^2 KL(z_H/T || z_j/T)     5  broadcast w[h_q, v_q]
       (KL: j < H only, after a quarter of the rounds),
       and hidden layers' outputs are divided by v_q
    3  upload w_k

    Inference: z_H; the earlier exits are variants

Choices. KL is the mean of a sample and its teacher does not learn from it; the public code divides
by the number of classes too, and lets it (--hp.faithful). gamma is what that code has for BERT; for
images its default is 0. Exits are behind the blocks nearest to --hp.depths, ResNet-110's 30, 38 and
46 of 54: levels that end at one block of a small model share its exit. An exit is convolutions with
batch norm, a pool and a linear layer; behind a vector, the linear layer. Levels are dealt
cyclically, widths rounded up, batch-norm statistics averaged over the clients of a level.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

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
    Weights,
    get_weights,
    kl,
    set_weights,
)
from raysim.exits import ExitModel, exit_layout, part_at
from raysim.slicing import Part, cut, expected
from raysim.submodels import Server, as_seen, check_rates, scale, shrink, take_in
from zoo import SplitModel


class Download(NamedTuple):
    model: Weights  # w[h_q, v_q]


class Upload(NamedTuple):
    model: Weights


@dataclass
class Client(ClientState):
    model: ExitModel


@dataclass(frozen=True)
class ScaleFL(Method[Client, Server]):
    same_models = "cuts sub-models out of one global model"
    scheduled: ClassVar[str] = "the distillation"

    widths: tuple[float, ...] = (0.7, 0.7, 0.75, 1.0)
    """v, the share of channels at each level; levels are dealt to clients cyclically."""
    depths: tuple[float, ...] = (0.56, 0.7, 0.85, 1.0)
    """The share of the trunk's blocks at each level; 1 ends at the model's own head."""
    exit_layers: int = 3
    """Convolutions of an early exit."""
    distill: float = 0.05
    """gamma, weight of the deepest exit's answers in the losses of the others."""
    temperature: float = 3.0
    """T, which softens the answers that are distilled."""
    faithful: bool = False
    """Distill as the public code does: KL divided by the classes, and the teacher learns."""

    def check(self, fleet: Fleet, task: Task) -> None:
        check_rates(self.widths, "--hp.widths")
        check_rates(self.depths, "--hp.depths")
        if len(self.widths) != len(self.depths):
            counts = f"{len(self.widths)} and {len(self.depths)}"
            raise ConfigError(f"--hp.widths and --hp.depths must be as many, got {counts}")
        if self.exit_layers < 0 or self.temperature <= 0:
            raise ConfigError("--hp.exit-layers must be 0 or more, --hp.temperature above 0")
        exit_layout(fleet, task, self.depths, self.exit_layers)

    def architecture(self, client_id: int, fleet: Fleet) -> str:
        return f"{fleet.model_of(client_id)}@level{self.level(client_id) + 1}"

    def level(self, client_id: int) -> int:
        return client_id % len(self.widths)

    def part(self, level: int, ctx: ServerContext | ClientContext) -> Part:
        width = self.widths[level]
        return part_at(ctx.fleet, ctx.task, self.depths, self.exit_layers, level, width)

    def with_exits(self, model: SplitModel, task: Task) -> ExitModel:
        return ExitModel(model, task, self.depths, self.exit_layers)

    def init_server(self, ctx: ServerContext) -> Server:
        return Server(get_weights(self.with_exits(ctx.build_model(), ctx.task)), {})

    def init_client(self, model: SplitModel, ctx: ClientContext) -> Client:
        own, level = self.with_exits(model, ctx.task), self.level(ctx.client_id)
        own.end(level)
        shrink(own, self.part(level, ctx))
        scale(own, lambda layer: self.widths[level])
        return Client(own)

    def broadcast(self, server: Server, cohort: Sequence[int], ctx: ServerContext) -> PerClient:
        levels = dict.fromkeys(map(self.level, cohort))
        messages = {q: Download(cut(as_seen(server, str(q)), self.part(q, ctx))) for q in levels}
        return PerClient({client: messages[self.level(client)] for client in cohort})

    def receive(self, client: Client, message: Download, ctx: ClientContext) -> None:
        set_weights(client.model, message.model)

    def client_update(self, client: Client, message: Download, ctx: ClientContext) -> Upload:
        on = ctx.round > 0.25 * ctx.rounds
        teach = self.distill * self.temperature**2 if on else 0.0

        def loss(x: Tensor, y: Tensor) -> Tensor:
            z = client.model.answers(x)
            total = len(z) * F.cross_entropy(z[-1], y)
            for j, answer in enumerate(z[:-1], start=1):
                total = total + j * F.cross_entropy(answer, y)
                if teach:
                    soft, own = z[-1] / self.temperature, answer / self.temperature
                    total = total + j * teach * kl(soft, own, htfllib=self.faithful)
            return total / (len(z) * (len(z) + 1) / 2)

        ctx.fit(loss, client.model)
        return Upload(get_weights(client.model))

    def expected(self, client_id: int, ctx: ServerContext) -> Upload:
        return Upload(expected(self.part(self.level(client_id), ctx)))

    def server_update(
        self, server: Server, replies: Sequence[Reply[Upload]], ctx: ServerContext
    ) -> None:
        levels = [self.level(reply.client_id) for reply in replies]
        uploads = [(r.payload.model, self.part(self.level(r.client_id), ctx)) for r in replies]
        take_in(server, uploads, [str(level) for level in levels], [1.0] * len(levels))

    def variants(self, client: Client, x: Tensor) -> dict[str, Tensor]:
        *early, last = client.model.answers(x)
        return {"last": last} | {f"exit{j}": answer for j, answer in enumerate(early, start=1)}

    @property
    def headline(self) -> str:
        return "last"
