"""Whole models, all the same or nested: every layer of a smaller one is a layer of the next.

The server has the union of their layers; each client gets, trains and sends its own.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from raysim.errors import ConfigError
from raysim.fleet import Fleet
from raysim.method import PerClient, Reply, ServerContext
from raysim.ops import get_weights, weighted_mean
from raysim.seeding import seeded
from raysim.task import Task
from raysim.terms import trainable
from raysim.wire import Like, Weights

M = TypeVar("M")
Weighting = Literal["samples", "uniform"]


@dataclass
class Union:
    """A server's state; subclass it to keep more."""

    weights: Weights  # the union of all clients' layers
    layers: dict[str, list[str]]  # architecture -> the names of its layers


def check(fleet: Fleet, task: Task, method: str, way_out: str = "") -> None:
    """Refuse models of which neither is a part of the other, and name the ways out."""
    shapes = {name: fleet.like(name, task).items() for name in dict.fromkeys(fleet.models)}
    for one, other in itertools.pairwise(sorted(shapes, key=lambda name: len(shapes[name]))):
        if not shapes[one] <= shapes[other]:
            raise ConfigError(
                f"{method} averages whole models, so they must be the same or nested; "
                f"fleet.models names {one} and {other}, which are not. "
                f"Try --fleet.models {one}, or --fleet.models resnet"
                + (f", or {way_out}" if way_out else "")
            )


def union(ctx: ServerContext, apart: bool = False, statistics: bool = True) -> Union:
    """Fresh layers of all models; a layer comes from the first model that has it. `apart` names
    them after their architectures, so that each has its own (FedIN's Eq. 21). Without `statistics`,
    those of batch norm are left out."""
    weights: Weights = {}
    layers: dict[str, list[str]] = {}
    for name in dict.fromkeys(ctx.fleet.models):
        model = part(get_weights(ctx.build_model(name)), list(sent_like(name, ctx, statistics)))
        own = {f"{name}/{layer}" if apart else layer: tensor for layer, tensor in model.items()}
        layers[name] = list(own)
        weights = own | weights
    return Union(weights, layers)


def part(weights: Weights, layers: Sequence[str]) -> Weights:
    """Those of the layers that there are, in the order of `layers`; without their architectures."""
    return {layer.rpartition("/")[2]: weights[layer] for layer in layers if layer in weights}


def deal(
    server: Union,
    cohort: Sequence[int],
    ctx: ServerContext,
    message: Callable[[Sequence[str]], M],
) -> PerClient | M:
    """`message(layers)`, made once for each architecture, to every client that has it."""
    parts = {name: message(layers) for name, layers in server.layers.items()}
    if len(parts) == 1:
        return next(iter(parts.values()))
    return PerClient({client: parts[ctx.fleet.model_of(client)] for client in cohort})


def shares(replies: Sequence[Reply[Any]], weighting: Weighting) -> list[float]:
    """What each participant weighs: n_k as in FedAvg, or the same as in FedIN's Eq. 19."""
    return [reply.num_samples if weighting == "samples" else 1 for reply in replies]


def average(
    server: Union, models: Mapping[int, Weights], shares: Sequence[float], ctx: ServerContext
) -> None:
    """Each layer becomes the mean over those of `models`, by client, that have it; one that nobody
    has stays as it was."""
    renamed = [
        dict(zip(server.layers[ctx.fleet.model_of(client)], model.values(), strict=True))
        for client, model in models.items()
    ]
    server.weights |= weighted_mean(renamed, shares)


def sent_like(name: str, ctx: ServerContext, statistics: bool) -> dict[str, Any]:
    """What a model's weights look like, with or without batch-norm statistics."""
    weights: dict[str, Any] = ctx.weights_like(name)
    return weights if statistics else trainable_like(name, ctx)


def trainable_like(name: str, ctx: ServerContext) -> dict[str, Any]:
    """What the trainable part of a model's weights looks like: no batch-norm statistics."""
    return _trainable_like(ctx.fleet, name, ctx.task)


@functools.lru_cache(maxsize=64)
def _trainable_like(fleet: Fleet, name: str, task: Task) -> dict[str, Like]:
    with torch.device("meta"), seeded(0, "like"):
        names = trainable(fleet.build(name, task))
    return {key: like for key, like in fleet.like(name, task).items() if key in names}
