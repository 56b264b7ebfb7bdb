"""What a method is made of.

A method is one frozen dataclass: its fields are the hyper-parameters, its methods are the paper's
steps. Hyper-parameters are frozen (`self`), state is a dataclass mutated in place, messages are
NamedTuples that are returned and copied at the wire. The engine calls every step, in this order in
a round:

    server                      client
    1  broadcast            ->  2  receive
                                3  client_update
    4  server_update       <-
    evaluation, on a copy:      receive, predict or variants
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from raysim import ops
from raysim.config import TrainConfig
from raysim.data.batches import augment, make_batch
from raysim.data.dataset import Dataset
from raysim.data.public import Public
from raysim.fleet import Fleet
from raysim.objectives import task_loss
from raysim.start_check import check as check
from raysim.task import Task
from zoo import SplitModel

C = TypeVar("C", bound="ClientState")
S = TypeVar("S")
P = TypeVar("P")


@dataclass
class ClientState:
    """What a client keeps between rounds; subclass it to keep more: modules, tensors, numbers,
    containers of them.

    Every module must be there after `init_client`; weights that come later are kept as `Weights |
    None`."""

    model: SplitModel


class Reply(NamedTuple, Generic[P]):
    """What one client of the cohort sent back."""

    client_id: int
    num_samples: int
    payload: P


class PerClient(dict[int, Any]):
    """A different message for each client, by id; any other value goes to all of them."""


class Cohort(Protocol):
    """The clients of this round, as the server sees them."""

    @property
    def ids(self) -> Sequence[int]: ...

    def call(self, step: Callable[..., Any], message: Any) -> list[Reply[Any]]:
        """Run a step of the method on every client and return their replies in the order of their
        ids."""


@dataclass(frozen=True)
class ServerContext:
    """What the server may know. Read-only."""

    round: int
    num_clients: int
    task: Task
    fleet: Fleet
    device: torch.device
    rounds: int = 1
    """Rounds of the whole run, for schedules."""
    public: Public | None = None
    """The public set, without labels: --data.public."""

    def build_model(self, name: str | None = None, feature_dim: int | None = None) -> SplitModel:
        """A fresh model; by default the fleet's first."""
        return self.fleet.build(name or self.fleet.models[0], self.task, feature_dim).to(
            self.device
        )

    def weights_like(self, name: str, feature_dim: int | None = None) -> Any:
        """What the weights of a model look like."""
        return self.fleet.like(name, self.task, feature_dim)

    def build_head(self) -> nn.Linear:
        """A fresh classifier on the fleet's common representation."""
        return nn.Linear(self.fleet.feature_dim, self.task.num_classes, device=self.device)


@dataclass(frozen=True)
class ClientContext:
    """What a client may know: itself, its data and how to train. Read-only."""

    client_id: int
    round: int
    task: Task
    fleet: Fleet
    train: TrainConfig
    device: torch.device
    dataset: Dataset
    indices: np.ndarray[Any, np.dtype[np.int64]]
    augmentation: str
    eval_batch_size: int
    losses: list[float]
    rounds: int = 1
    """Rounds of the whole run, for schedules."""
    public: Public | None = None
    """The public set as this client sees it: --data.public."""

    @property
    def model_name(self) -> str:
        return self.fleet.model_of(self.client_id)

    @property
    def num_samples(self) -> int:
        """Size of the client's training data."""
        return len(self.indices)

    @property
    def labels(self) -> Tensor:
        """Labels of the client's training data."""
        return torch.as_tensor(self.dataset.labels[self.indices], device=self.device)

    def build_model(self, name: str | None = None, feature_dim: int | None = None) -> SplitModel:
        """A fresh model; by default one like the client's own."""
        return self.fleet.build(name or self.model_name, self.task, feature_dim).to(self.device)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch of training batches, in a new random order."""
        n, size = self.num_samples, self.train.batch_size
        order = self.indices[torch.randperm(n).numpy()] if self.train.shuffle else self.indices
        for start in range(0, n, size):
            rows = order[start : start + size]
            # A last batch of one has no batch statistics: it is left out if there were others.
            if start and len(rows) < (size if self.train.drop_last else 2):
                return
            x, y = self._batch(rows)
            yield augment(x, self.augmentation), y

    def samples(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Every training sample once, in order and not augmented."""
        for start in range(0, self.num_samples, self.eval_batch_size):
            yield self._batch(self.indices[start : start + self.eval_batch_size])

    def _batch(self, rows: np.ndarray[Any, np.dtype[np.int64]]) -> tuple[Tensor, Tensor]:
        return make_batch(self.dataset, rows, self.device, self.train.memory_format)

    def fit(
        self,
        loss: ops.Loss,
        *modules: nn.Module,
        lr: float | Sequence[float] | None = None,
        clip: float | None = None,
        adjust: Callable[[], None] | None = None,
    ) -> float:
        """Train modules for the configured epochs on `loss(x, y)`, the paper's equation as a
        closure. `lr` replaces --train.lr, for all modules or for each; `clip` holds if --train.clip
        is not set. `adjust` is called after each backward pass, before clipping and the step, and
        may change `.grad`. Returns the mean loss of a sample, which also becomes the client's
        training loss in the records."""
        device = self.device.type
        mean = ops.train(loss, modules, self.batches, self.train, device, lr, clip, adjust)
        self.losses.append(mean)
        return mean

    def loss(self, scores: Tensor, y: Tensor) -> Tensor:
        """The loss of the client's own task."""
        return task_loss(self.task, scores, y)

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of --train.precision, for forward passes outside `fit`."""
        return ops.autocast(self.train.precision, self.device.type)


@dataclass(frozen=True)
class Method(Generic[C, S]):
    """Subclass with your hyper-parameters as fields, each followed by a docstring: that is its
    `--hp.` help."""

    same_models: ClassVar[str] = ""
    """Why every client needs the same architecture; empty when models may differ."""
    any_task: ClassVar[bool] = False
    """Whether clients may have different tasks: the method then uses `ctx.loss`."""
    needs_public: ClassVar[str] = ""
    """Why --data.public is needed; empty when it is not."""
    scheduled: ClassVar[str] = ""
    """What follows a schedule over all --rounds, so that a run cannot be extended; else empty."""
    only_reads: ClassVar[bool] = False
    """Whether `receive`, `predict` and `variants` never write to a module. Evaluation then reads
    large weights where they are stored, without a copy; a write there would end the process."""

    def check(self, fleet: Fleet, task: Task) -> None:
        """Refuse what this method cannot run, before anything starts: ConfigError with the flag."""

    def architecture(self, client_id: int, fleet: Fleet) -> str:
        """What to call the client's model; clients of one name have states of one structure."""
        return fleet.structure_of(client_id)

    def init_server(self, ctx: ServerContext) -> S:
        raise NotImplementedError(f"{type(self).__name__} needs init_server")

    def init_client(self, model: SplitModel, ctx: ClientContext) -> C:
        return ClientState(model)  # type: ignore[return-value]

    def broadcast(self, server: S, cohort: Sequence[int], ctx: ServerContext) -> Any:
        """The message to the cohort; a PerClient gives each its own, None sends nothing."""
        return None

    def receive(self, client: C, message: Any, ctx: ClientContext) -> None:
        """Take the message in. Also called before evaluation, on a copy."""

    def client_update(self, client: C, message: Any, ctx: ClientContext) -> Any:
        raise NotImplementedError(f"{type(self).__name__} needs client_update")

    def server_update(self, server: S, replies: Sequence[Reply[Any]], ctx: ServerContext) -> None:
        """Learn from the replies, which come in the order of client ids."""

    def expected(self, client_id: int, ctx: ServerContext) -> Any:
        """What a client's payload must look like: the payload's own type with a `like(shape)` in
        place of each tensor. What differs never reaches `server_update`. None accepts all."""
        return None

    def predict(self, client: C, x: Tensor) -> Tensor:
        """Scores, (batch, classes); the largest is the answer, -inf means "never"."""
        named = self.variants(client, x) if self.headline else {"": client.model(x)}
        return named[self.headline]

    def variants(self, client: C, x: Tensor) -> dict[str, Tensor]:
        """Scores of further ways to answer, by name, for a method that has several inference
        models. Each is tested and recorded beside the headline; none costs nothing."""
        return {}

    @property
    def headline(self) -> str:
        """The variant whose answers are the run's accuracy: its scores are then used as they are,
        and `predict` is not asked, which saves a forward pass. Empty: `predict` is none of them."""
        return ""

    def round(self, server: S, cohort: Cohort, ctx: ServerContext) -> None:
        """One round; override it to talk to the clients more than once."""
        message = self.broadcast(server, cohort.ids, ctx)
        replies = cohort.call(self.client_update, message)
        if replies:  # all of them may have been dropped
            self.server_update(server, replies, ctx)

    @classmethod
    def messages(cls) -> dict[str, type]:
        """The NamedTuples of the method's file (and its bases'), by name: what may be rebuilt from
        the wire."""
        found: dict[str, type] = {}
        for base in reversed(cls.__mro__):
            for name, value in vars(sys.modules[base.__module__]).items():
                if (
                    isinstance(value, type)
                    and issubclass(value, tuple)
                    and hasattr(value, "_fields")
                ):
                    found[name] = value
        return found
