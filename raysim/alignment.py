"""What a client hears of others about public samples, and how it holds its own against that."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from raysim import muscle
from raysim.data.public import Public
from raysim.errors import ConfigError

Loss = Literal["muscle", "pairwise", "gramian"]


class Settings(Protocol):
    """The fields of a method that contrasts representations."""

    @property
    def loss(self) -> Loss: ...
    @property
    def peers(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def tau(self) -> float: ...
    @property
    def tau_peers(self) -> float: ...
    @property
    def alpha_on_positive(self) -> bool: ...
    @property
    def tuples(self) -> muscle.Tuples: ...


@dataclass
class Shelf:
    """The server's: what clients have sent, as long as it may serve."""

    z: dict[int, Tensor] = field(default_factory=dict)
    since: dict[int, int] = field(default_factory=dict)
    """The round in which it came."""


def new_shelf(public: Public | None) -> Shelf:
    """An empty one, if there are samples to tell apart."""
    if public is not None and len(public) < 2:
        raise ConfigError("one public sample has no other to be told from. Try --data.public 1000")
    return Shelf()


def choose(public: Public | None, count: int) -> Tensor:
    """Numbers of so many public samples, in ascending order; 0 chooses all."""
    assert public is not None
    return torch.randperm(len(public))[: count or None].sort().values


def put(shelf: Shelf, client: int, z: Tensor, round: int) -> None:
    shelf.z[client], shelf.since[client] = z, round


def draw(shelf: Shelf, client: int, count: int) -> list[Tensor]:
    """Up to `count` of the others', drawn without replacement."""
    others = sorted(shelf.z.keys() - {client})
    return [shelf.z[others[i]] for i in torch.randperm(len(others))[:count].tolist()]


def forget(shelf: Shelf, before: int) -> None:
    """Drop what came before a round."""
    for client in [client for client, round in shelf.since.items() if round < before]:
        del shelf.z[client], shelf.since[client]


def batches(
    public: Public | None, rows: Tensor, order: Tensor, size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Public samples of `rows`, and their places there, in `order`; no batch of one, which has
    nothing to be told apart from."""
    assert public is not None
    for places in torch.split(order, size):
        if len(places) > 1:
            yield public.images(rows[places]), places


def contrast(z: Tensor, peers: Tensor, settings: Settings) -> Tensor:
    """The loss of anchors z, (B, d), against peers, (M, B, d)."""
    if settings.loss == "pairwise":
        return muscle.pairwise(z, peers, settings.tau)
    if settings.loss == "gramian":
        return muscle.gramian(z, peers, settings.tau, settings.tuples)
    return muscle.muscle(z, peers, settings.tau, settings.tau_peers, settings.alpha_on_positive)


def check(settings: Settings) -> None:
    """Refuse what these losses cannot be computed with."""
    tau, tau_peers, size, count = settings.tau, settings.tau_peers, settings.batch, settings.peers
    if tau <= 0:
        raise ConfigError(f"--hp.tau must be above 0, got {tau}. Try --hp.tau 0.2")
    if settings.loss == "muscle" and not 0 < tau_peers <= tau:
        raise ConfigError(
            f"--hp.tau-peers is {tau_peers} and --hp.tau {tau}; the weights alpha need "
            f"0 < tau-peers <= tau. Try --hp.tau-peers {0.75 * tau:g}"
        )
    volumes = size ** (count + 1)
    if settings.loss == "gramian" and settings.tuples == "all" and volumes > muscle.MOST:
        raise ConfigError(
            f"--hp.tuples all needs {size}^{count + 1} volumes a step, more than {muscle.MOST}. "
            "Try --hp.tuples aligned, or smaller --hp.batch or --hp.peers"
        )
