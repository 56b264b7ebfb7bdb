"""Clients so small that a round can be worked by hand.

An image is one pixel with a channel for each feature, normalized to the very bytes it is made of:
the point (1, 2) reaches a model as [1., 2.].
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raysim import (
    ClientContext,
    Config,
    Fleet,
    Method,
    ServerContext,
    Task,
    TrainConfig,
    data,
    wire,
)
from raysim.backends.local import LocalBackend
from raysim.data import Dataset, Split
from raysim.events import Event
from raysim.fleet import assemble
from raysim.method import ClientState
from raysim.result import Result
from raysim.simulation import Simulation
from raysim.wire import Packed
from raysim.worker import EVALUATE, Evaluation, Job, Worker
from zoo import SplitModel
from zoo.split import Backbone

CPU = torch.device("cpu")

Matrix = Sequence[Sequence[float]]


# Data


def points(samples: Sequence[Sequence[int]], labels: Sequence[int], num_classes: int) -> Dataset:
    images = np.array(samples, dtype=np.uint8)[:, :, None, None]
    channels = images.shape[1]
    return Dataset(
        "points", images, np.array(labels), len(labels), num_classes,
        mean=(0.0,) * channels, std=(1 / 255,) * channels,
    )  # fmt: skip


def deal(*shares: Sequence[int]) -> Split:
    """Client k trains on share k, and is tested on it too."""
    runs = [share for share in shares for _ in ("train", "test")]
    return Split(np.concatenate(runs), np.cumsum([0, *map(len, runs)]))


# Models


def linear(weight: Matrix, bias: bool = True) -> nn.Linear:
    """r -> weight r, with a bias of zeros."""
    module = nn.Linear(len(weight[0]), len(weight), bias)
    with torch.no_grad():
        module.weight.copy_(torch.tensor(weight))
        if bias:
            module.bias.zero_()
    return module


def model(head: Matrix, features: Matrix | None = None) -> SplitModel:
    """x -> features x -> head features x; without `features`, the representation is x itself."""
    trunk = nn.Identity() if features is None else linear(features, bias=False)
    built = SplitModel(
        "tiny", Backbone(nn.Flatten(), trunk, nn.Identity()), len(head[0]), len(head)
    )
    built.head = linear(head)
    return built


def moody_model(pixels: int, width: int, num_classes: int) -> SplitModel:
    """One that gives other representations in training than in evaluation."""
    trunk = nn.Sequential(nn.Linear(pixels, width), nn.BatchNorm1d(width), nn.Dropout(0.5))
    return SplitModel("moody", Backbone(nn.Flatten(), trunk, nn.Identity()), width, num_classes)


def means_by_loops(model: SplitModel, ctx: ClientContext) -> dict[int, Tensor]:
    """The mean representation of each class of D_k, one sample after the other, in eval mode."""
    model.eval()
    found: dict[int, list[Tensor]] = {}
    for row in ctx.indices:
        x = torch.tensor(ctx.dataset.images[row : row + 1], dtype=torch.float32)
        with torch.no_grad():
            found.setdefault(int(ctx.dataset.labels[row]), []).append(model.features(x)[0])
    return {c: torch.stack(found[c]).mean(dim=0) for c in sorted(found)}


# One step of a method, outside and inside a worker


def client_context(
    dataset: Dataset, rows: Sequence[int] | None = None, eval_batch_size: int = 256, **train: Any
) -> ClientContext:
    """Client 0 in round 1, with all of the data unless `rows` says which."""
    return ClientContext(
        client_id=0,
        round=1,
        task=dataset.task,
        fleet=Fleet(("mlp",), dataset.task.channels),
        train=TrainConfig(**train),
        device=CPU,
        dataset=dataset,
        indices=np.arange(len(dataset.labels)) if rows is None else np.array(rows),
        augmentation="none",
        eval_batch_size=eval_batch_size,
        losses=[],
    )


def server_context(fleet: Fleet, task: Task, num_clients: int = 2) -> ServerContext:
    return ServerContext(1, num_clients, task, fleet, CPU)


def update(method: Method[Any, Any], client: ClientState, message: Any, ctx: ClientContext) -> Any:
    """What a worker calls in a round."""
    method.receive(client, message, ctx)
    return method.client_update(client, message, ctx)


def make_worker(config: Config, dataset: Dataset, dealt: Split) -> Worker:
    return Worker(config, assemble(config.fleet, dataset.task), dataset, dealt, CPU)


def play(
    worker: Worker, message: Any, client: int = 0, round: int = 1, state: Packed | None = None
) -> tuple[Packed, Any]:
    """A client's new state, and what it sends."""
    job = Job("client_update", client, round, True)
    new, outcome = worker.run(job, state, wire.pack(message))
    assert outcome.failure is None, outcome.failure.traceback
    assert new is not None
    assert outcome.payload is not None
    return new, wire.unpack(outcome.payload, worker.messages)


def evaluate(worker: Worker, message: Any, client: int = 0) -> Evaluation:
    _, outcome = worker.run(Job(EVALUATE, client, 1, False), None, wire.pack(message))
    assert outcome.failure is None, outcome.failure.traceback
    assert outcome.evaluation is not None
    return outcome.evaluation


# A whole run


class Run(NamedTuple):
    rounds: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    states: dict[int, Any]

    def count(self, unit: str, round: int, direction: str, **only: Any) -> int:
        """The sum of a unit of the ledger over the rows that match."""
        wanted = {"round": round, "direction": direction} | only
        return sum(row[unit] for row in self.messages if wanted.items() <= row.items())


def simulate(
    config: Config,
    dataset: Dataset,
    dealt: Split | None = None,
    watch: Callable[[Event, LocalBackend], None] = lambda event, backend: None,
) -> Run:
    """A run in this process as users have it, but for the data set and, if given, the split."""
    assert config.out is not None
    backend = LocalBackend()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(data, "load", lambda config: dataset)
            if dealt is not None:
                patch.setattr(data, "split", lambda *args: dealt)
            Simulation(config, backend, lambda event: watch(event, backend)).run()
        types = config.hp.messages()
        states = {client: wire.unpack(state, types) for client, state in backend.states()}
    finally:
        backend.close()
    result = Result.load(config.out)
    return Run(result.rounds.to_pylist(), result.messages.to_pylist(), states)
