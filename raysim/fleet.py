"""Who the clients are: which model each of them has."""

import functools
import math
from dataclasses import dataclass

import torch

import zoo
from raysim.config import FleetConfig
from raysim.errors import ConfigError, unknown
from raysim.seeding import seeded
from raysim.task import Task
from raysim.wire import Like
from zoo import SplitModel
from zoo.lora import add_lora


@dataclass(frozen=True)
class Fleet:
    """The models dealt to clients cyclically: client i has `models[i % len(models)]`."""

    models: tuple[str, ...]
    feature_dim: int
    """The common width of representations."""
    mapping: str = "ap"
    gpu_shares: tuple[tuple[str, float], ...] = ()
    tasks: tuple[tuple[str, Task], ...] = ()
    """Name and task, dealt as models are; none if all clients have the same."""
    lora: int = 0

    def model_of(self, client_id: int) -> str:
        return self.models[client_id % len(self.models)]

    def task_of(self, client_id: int) -> str:
        """The name of the client's task; empty if all have the same."""
        return self.tasks[client_id % len(self.tasks)][0] if self.tasks else ""

    def structure_of(self, client_id: int) -> str:
        """Model and task: clients that agree in both have weights of the same shapes."""
        task = self.task_of(client_id)
        return f"{self.model_of(client_id)}/{task}" if task else self.model_of(client_id)

    def gpus_of(self, model: str, default: float) -> float:
        return dict(self.gpu_shares).get(model, default)

    def build(self, name: str, task: Task, feature_dim: int | None = None) -> SplitModel:
        model = zoo.build(name, task, feature_dim or self.feature_dim, self.mapping)
        return add_lora(model, self.lora) if self.lora else model

    def like(self, name: str, task: Task, feature_dim: int | None = None) -> dict[str, Like]:
        """What a model's weights look like; no memory is spent on them."""
        return _like(name, task, feature_dim or self.feature_dim, self.mapping, self.lora)

    def parameter_count(self, name: str, task: Task) -> int:
        return zoo.parameter_count(name, task, self.feature_dim)


@functools.lru_cache(maxsize=64)
def _like(name: str, task: Task, feature_dim: int, mapping: str, lora: int) -> dict[str, Like]:
    with torch.device("meta"), seeded(0, "like"):
        model = zoo.build(name, task, feature_dim, mapping)
        weights = (add_lora(model, lora) if lora else model).state_dict()
    return {key: Like(tuple(tensor.shape), tensor.dtype) for key, tensor in weights.items()}


def assemble(config: FleetConfig, task: Task, tasks: tuple[tuple[str, Task], ...] = ()) -> Fleet:
    """Resolve family names, the common width and the GPU shares, or say what is wrong with them."""
    models = zoo.expand(config.models)
    if not models:
        raise ConfigError("fleet.models names no model. Try --fleet.models cnn")
    if config.lora < 0:
        raise ConfigError(f"fleet.lora must be at least 0, got {config.lora}. Try --fleet.lora 16")
    given = tasks or (("", task),)
    for client in range(math.lcm(len(models), len(given))):
        name, asked = given[client % len(given)]
        zoo.check(
            models[client % len(models)], asked, f"client {client}, of {name}" if name else ""
        )
    width = config.feature_dim
    if width is not None and width < 1:
        raise ConfigError(f"fleet.feature_dim must be at least 1, got {width}")
    if width is None:
        native = {zoo.native_dim(name, task) for name in models}
        width = native.pop() if len(native) == 1 else 512
    shares = gpu_shares(config.gpus, models)
    return Fleet(models, width, config.mapping, shares, tasks, config.lora)


def gpu_shares(entries: tuple[str, ...], models: tuple[str, ...]) -> tuple[tuple[str, float], ...]:
    shares = []
    for entry in entries:
        name, equals, text = entry.partition("=")
        try:
            share = float(text)
        except ValueError:
            share = -1.0
        if not equals or not share >= 0 or (share > 1 and share % 1):
            raise ConfigError(f"fleet.gpus takes MODEL=SHARE such as resnet18=0.25, got {entry!r}")
        if name not in models:
            raise unknown("model", name, models, "fleet.gpus")
        shares.append((name, share))
    return tuple(shares)
