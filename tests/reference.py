"""A tiny run as the engine plays it, for scripts that compute the same from a paper's text.

Two clients, an MLP and a CNN, and fixed batches: `--train.shuffle false`. A test plays the run,
copies the weights it began with into modules of its own, goes through the specification in plain
torch, and compares every number at the end:

    run = reference.play(reference.config("fedre", tmp_path))
    models = [reference.module(k, run.born[k]["model"]) for k in reference.CLIENTS]
    for x, y in reference.batches(0): ...
    reference.assert_same(models[0], run.clients[0]["model"])

States are trees by field name: a module's weights by name, tensors and numbers as they are.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import zoo
from raysim import Config, EvalConfig, FleetConfig, TrainConfig, data, wire
from raysim.backends.local import LocalBackend
from raysim.data import Dataset
from raysim.simulation import Simulation
from raysim.worker import EVALUATE, Job
from zoo import SplitModel

CLIENTS = (0, 1)
MODELS = ("mlp", "cnn5")
WIDTH = 6
CLASSES = 4
BATCH = 4
LR = 0.1
LABELS = [0, 2, 0, 0, 2, 1, 0, 2, 1, 0, 1, 1, 0, 1, 1]
SHARES = [[0, 2, 4, 6, 1, 3, 7, 9, 5], [8, 12, 10, 11, 13, 14]]
"""Client 0 has nine samples, of classes 0, 2 and one of 1, which its two batches leave out; client
1 has six, of classes 0 and 1, so one batch. Nobody has class 3."""


def dataset() -> Dataset:
    images = np.random.default_rng(0).integers(0, 256, (len(LABELS), 1, 16, 16), dtype=np.uint8)
    return Dataset("noise", images, np.array(LABELS), len(LABELS), CLASSES, (0.5,), (0.5,))


def samples(client: int) -> tuple[Tensor, Tensor]:
    """All of a client's training data, in order: images between -1 and 1, and labels."""
    rows = torch.tensor(SHARES[client])
    x = torch.tensor(dataset().images, dtype=torch.float32)[rows]
    return (x / 255 - 0.5) / 0.5, torch.tensor(LABELS)[rows]


def batches(client: int) -> list[tuple[Tensor, Tensor]]:
    """The full batches of an epoch; what is left over is not trained on."""
    x, y = samples(client)
    return [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, len(y) - BATCH + 1, BATCH)]


def config(method: str, out: Path, rounds: int = 1, epochs: int = 2, **hp: Any) -> Config:
    return Config(
        method=method, clients=2, participation=1.0, rounds=rounds, out=out, backend="local",
        checkpoint_every=0, hp=hp,
        fleet=FleetConfig(MODELS, WIDTH),
        train=TrainConfig(epochs=epochs, batch_size=BATCH, lr=LR, shuffle=False, drop_last=True),
    )  # fmt: skip


class Played(NamedTuple):
    born: dict[int, Any]
    """The clients' states before the first round."""
    clients: dict[int, Any]
    """And after the last."""
    server_born: Any
    server: Any


def play(config: Config, public: Sequence[int] = ()) -> Played:
    """Run it on the local backend; `public` are rows of the data set."""
    backend, noise = LocalBackend(), dataset()
    dealt = replace(tiny.deal(*SHARES), public=np.array(public, dtype=np.int64))
    types = config.hp.messages()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "load", lambda config: noise)
        patch.setattr(data, "split", lambda *args: dealt)
        simulation = _Watched(config, backend, lambda event: None)
        try:
            simulation.run()
            clients = {k: wire.unpack(state, types) for k, state in backend.states()}
        finally:
            backend.close()
    worker = tiny.make_worker(replace(config, eval=EvalConfig(fresh=False)), noise, dealt)
    born = {}
    for k in CLIENTS:
        state, _ = worker.run(Job(EVALUATE, k, 1, keep=True), None, wire.pack(None))
        assert state is not None
        born[k] = wire.unpack(state, types)
    return Played(born, clients, simulation.server_born, _copy(simulation._server_tree(), types))


class _Watched(Simulation):
    def _begin(self) -> None:
        super()._begin()
        self.server_born = _copy(self._server_tree(), self.method.messages())


def _copy(tree: Any, types: dict[str, type]) -> Any:
    return wire.unpack(wire.pack(tree), types)


# A script's own modules


def module(client: int, weights: wire.Weights) -> SplitModel:
    """The client's architecture with these weights, in training mode."""
    return built(MODELS[client], weights)


def built(name: str, weights: wire.Weights, width: int = WIDTH) -> SplitModel:
    model = zoo.build(name, dataset().task, width)
    model.load_state_dict(weights)
    return model


def linear(weights: wire.Weights) -> nn.Linear:
    layer = nn.Linear(weights["weight"].shape[1], weights["weight"].shape[0])
    layer.load_state_dict(weights)
    return layer


def descend(loss: Tensor, *modules: nn.Module, lr: float = LR) -> None:
    """One step of plain SGD on the parameters of the modules that the loss depends on."""
    parameters = [parameter for module in modules for parameter in module.parameters()]
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    with torch.no_grad():
        for parameter, grad in zip(parameters, grads, strict=True):
            if grad is not None:
                parameter -= lr * grad


def assert_same(module: nn.Module, weights: wire.Weights) -> None:
    """Every parameter and buffer of the script's module, to 1e-6."""
    own = module.state_dict()
    assert own.keys() == weights.keys()
    for name, tensor in own.items():
        assert_close(
            weights[name], tensor, atol=1e-6, rtol=0, msg=lambda text, n=name: f"{n} {text}"
        )


def assert_moved(before: wire.Weights, after: wire.Weights) -> None:
    """A comparison of weights that nothing trained would compare nothing."""
    assert all(not torch.allclose(before[name], after[name], atol=1e-4, rtol=0) for name in before)
