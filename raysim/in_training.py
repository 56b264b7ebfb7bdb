"""FedIN's IN training: a client's intermediate layers learn to make others' s_out of their s_in.

The paper has no public code and does not say when IN training happens. It needs the gradients of
both losses at one point, so by default it is in every step of local training, on the same features
all round, or on several batches of them in turn.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

from torch import Tensor, nn

from raysim import intermediate, ops
from raysim.errors import ConfigError
from raysim.gradients import Alleviation, Scope
from raysim.intermediate import Features, NoiseScope
from raysim.method import ClientContext, PerClient, ServerContext
from zoo import SplitModel

Schedule = Literal["every_step", "once_per_epoch", "after_local", "never"]
Kind = Literal["simplified", "exact", "none"]


class Settings(Protocol):
    """The hyper-parameters of a method with IN training."""

    @property
    def mu(self) -> float: ...
    @property
    def in_schedule(self) -> Schedule: ...
    @property
    def in_steps(self) -> int: ...
    @property
    def in_updates_bn(self) -> bool: ...
    @property
    def alleviation(self) -> Kind: ...
    @property
    def lam(self) -> float: ...
    @property
    def scope(self) -> Scope: ...
    @property
    def sample_number(self) -> int: ...
    @property
    def feature_batch(self) -> int: ...
    @property
    def project(self) -> bool: ...
    @property
    def rho(self) -> float: ...
    @property
    def noise_scope(self) -> NoiseScope: ...


def check(settings: Settings) -> None:
    """Refuse what cannot be trained with."""
    found: dict[str, tuple[bool, int, float]] = {
        "mu": (settings.mu >= 0, 0, settings.mu),
        "lam": (settings.lam >= 0, 0, settings.lam),
        "rho": (settings.rho >= 0, 0, settings.rho),
        "in-steps": (settings.in_steps >= 1, 1, settings.in_steps),
        "sample-number": (settings.sample_number >= 1, 1, settings.sample_number),
        "feature-batch": (settings.feature_batch >= 1, 1, settings.feature_batch),
    }
    for flag, (holds, least, value) in found.items():
        if not holds:
            raise ConfigError(
                f"--hp.{flag} must be {least} or more, got {value}. Try --hp.{flag} 1"
            )


def adapters(settings: Settings, ctx: ClientContext) -> nn.ModuleDict:
    """What a client needs for features of other shapes than its own."""
    wanted = settings.project and settings.in_schedule != "never"
    return intermediate.adapters(ctx) if wanted else nn.ModuleDict()


def expected(client: int, settings: Settings, ctx: ServerContext) -> Features | None:
    """What the features that a client uploads look like."""
    return None if settings.in_schedule == "never" else intermediate.expected(client, ctx)


def deal(
    message: Any,
    pool: Mapping[int, Features],
    clients: Sequence[int],
    settings: Settings,
    ctx: ServerContext,
) -> PerClient:
    """The message to clients, each with `features` drawn for it from the pool."""
    own = message if isinstance(message, PerClient) else dict.fromkeys(clients, message)
    number, project = settings.sample_number, settings.project
    drawn = {k: intermediate.draw(pool, k, number, ctx, project) for k in clients}
    return PerClient({k: own[k]._replace(features=drawn[k]) for k in clients})


def steps_of_an_epoch(ctx: ClientContext) -> int:
    """How many batches `ctx.batches()` gives."""
    n, size = ctx.num_samples, ctx.train.batch_size
    return max(1, n // size + (n % size > 1 and not ctx.train.drop_last))


class InTraining:
    """Of one client in one round. Its local loss, made of `outputs`, goes through `join`, after
    each backward pass comes `adjust`, and at the end `finish`."""

    def __init__(
        self,
        model: SplitModel,
        adapters: nn.ModuleDict,
        others: Sequence[Features],
        settings: Settings,
        ctx: ClientContext,
    ) -> None:
        self.model, self.adapters, self.others = model, adapters, others
        self.settings, self.ctx = settings, ctx
        self.layers = nn.ModuleList([model.trunk, adapters])
        lam = {"simplified": settings.lam, "exact": None, "none": 2.0}[settings.alleviation]
        self._z = Alleviation(self.layers.parameters(), lam, settings.scope)
        self._next, self._step = itertools.cycle(others), itertools.count()
        every = {"every_step": 1, "once_per_epoch": steps_of_an_epoch(ctx)}
        self._every = every.get(settings.in_schedule, 0) if others else 0
        self._loss: Tensor | None = None  # of this step

    def outputs(self, x: Tensor) -> Tensor:
        """s_out of a batch, with noise; in steps that have an IN loss, it is made on the way."""
        s_in = self._noised(self.model.stem(x))
        due = self._every and next(self._step) % self._every == 0
        others = next(self._next) if due else None
        self._loss = None
        if others and self._z.lam and min(len(x), len(others.inputs)) > 1:
            inputs, distance = intermediate.lesson(self.adapters, others)
            updates_bn = self.settings.in_updates_bn
            s_out, answer = intermediate.together(self.model.trunk, s_in, inputs, updates_bn)
            self._loss = distance(answer)
        else:
            s_out = self.model.trunk(s_in)
            if others:
                self._loss = self.imitation(*others)
        return self._noised(s_out)

    def join(self, local: Tensor) -> Tensor:
        """The local loss, with the IN loss in the steps that have one."""
        return local if self._loss is None else self._z.join(local, self._loss)

    def adjust(self) -> None:
        """Put Z in place of the intermediate layers' G_local."""
        self._z.adjust()

    def finish(self) -> None:
        """The steps of `after_local`, of the intermediate layers alone; G_local is the last one."""
        if not self.others or self.settings.in_schedule != "after_local":
            return
        last = self._z.gradients()
        batches = itertools.islice(self._next, self.settings.in_steps)
        ops.train(
            self.imitation, [self.layers], lambda: batches, replace(self.ctx.train, epochs=1),
            self.ctx.device.type, adjust=lambda: self._z.mix(last, self._z.gradients()),
        )  # fmt: skip

    def sample(self) -> Features | None:
        """What the client uploads; nothing if nobody needs it."""
        if self.settings.in_schedule == "never":
            return None
        return intermediate.sample(
            self.model, self.ctx, self.settings.feature_batch,
            self.settings.rho, self.settings.noise_scope,
        )  # fmt: skip

    def imitation(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """The IN loss on a batch of features."""
        others, updates_bn = Features(inputs, outputs), self.settings.in_updates_bn
        return intermediate.imitation(self.model, self.adapters, others, updates_bn)

    def _noised(self, made: Tensor) -> Tensor:
        return intermediate.noised(made, self.settings.rho, self.settings.noise_scope)
