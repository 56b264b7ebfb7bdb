"""Who the clients are: which model each of them has."""

import functools
from dataclasses import dataclass

import torch

import zoo
from raysim.config import FleetConfig
from raysim.errors import ConfigError, unknown
from raysim.seeding import seeded
from raysim.task import Task
from raysim.wire import Like
from zoo import SplitModel


@dataclass(frozen=True)
class Fleet:
    """The models dealt to clients cyclically: client i has `models[i % len(models)]`."""

    models: tuple[str, ...]
    feature_dim: int
    """The common width of representations."""
    mapping: str = "ap"
    gpu_shares: tuple[tuple[str, float], ...] = ()

    def model_of(self, client_id: int) -> str:
        return self.models[client_id % len(self.models)]

    def gpus_of(self, model: str, default: float) -> float:
        return dict(self.gpu_shares).get(model, default)

    def build(self, name: str, task: Task, feature_dim: int | None = None) -> SplitModel:
        return zoo.build(name, task, feature_dim or self.feature_dim, self.mapping)

    def like(self, name: str, task: Task, feature_dim: int | None = None) -> dict[str, Like]:
        """What a model's weights look like; no memory is spent on them."""
        return _like(name, task, feature_dim or self.feature_dim, self.mapping)

    def parameter_count(self, name: str, task: Task) -> int:
        return zoo.parameter_count(name, task, self.feature_dim)


@functools.lru_cache(maxsize=64)
def _like(name: str, task: Task, feature_dim: int, mapping: str) -> dict[str, Like]:
    with torch.device("meta"), seeded(0, "like"):
        weights = zoo.build(name, task, feature_dim, mapping).state_dict()
    return {key: Like(tuple(tensor.shape), tensor.dtype) for key, tensor in weights.items()}


def assemble(config: FleetConfig, task: Task) -> Fleet:
    """Resolve family names, the common width and the GPU shares, or say what is wrong with them."""
    models = zoo.expand(config.models)
    if not models:
        raise ConfigError("fleet.models names no model. Try --fleet.models cnn")
    width = config.feature_dim
    if width is not None and width < 1:
        raise ConfigError(f"fleet.feature_dim must be at least 1, got {width}")
    if width is None:
        native = {zoo.native_dim(name, task) for name in models}
        width = native.pop() if len(native) == 1 else 512
    return Fleet(models, width, config.mapping, gpu_shares(config.gpus, models))


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
