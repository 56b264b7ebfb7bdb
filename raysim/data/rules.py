"""The partition rules: a pool of labels becomes an ordered share for each client.

Draws come from a legacy `RandomState`, whose stream NumPy has frozen: a seed means the same
clients in every version.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from raysim.config import DataConfig

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Counts: TypeAlias = tuple[Ints, Ints]  # of one class: clients, and how many samples each gets
Weights: TypeAlias = tuple[Ints, Floats]  # of one class: clients, and their relative shares


@dataclass(frozen=True)
class Deal:
    """Samples in client order, and how many of them each client has."""

    samples: Ints
    sizes: Ints
    least: int = 1
    """The smallest share that the rule allows."""
    weights: list[Weights] | None = None
    """The rule's own weights, where it has some: the official test part is dealt by them too."""


def deal(
    labels: Ints, num_classes: int, num_clients: int, config: DataConfig, rng: np.random.RandomState
) -> Deal:
    if config.partition == "iid":
        return _iid(len(labels), num_clients, rng)
    by_class = group(labels, num_classes)
    # PFLlib's least share: a test batch of 10, but never over half of the mean share.
    least = int(min(10 / config.test_fraction, len(labels) / num_clients / 2))
    if config.partition == "dirichlet":
        return _dirichlet(by_class, num_clients, config.alpha, least, rng)
    if config.partition == "pathological":
        return _pathological(by_class, num_clients, config.classes_per_client, least, rng)
    return _classes(by_class, num_clients, config.classes_per_client, config.low_weight, rng)


def group(labels: Ints, num_classes: int) -> list[Ints]:
    """Positions of each class, ascending."""
    order = np.argsort(labels, kind="stable")
    return np.split(order, np.cumsum(np.bincount(labels, minlength=num_classes))[:-1])


def _iid(num_samples: int, num_clients: int, rng: np.random.RandomState) -> Deal:
    sizes = np.full(num_clients, num_samples // num_clients)
    sizes[: num_samples % num_clients] += 1
    return Deal(rng.permutation(num_samples), sizes)


def _dirichlet(
    by_class: list[Ints], num_clients: int, alpha: float, least: int, rng: np.random.RandomState
) -> Deal:
    """PRA. Draw until the smallest client has `least` samples, or leave it to the repair.

    PFLlib draws for ever. With many clients the chance of success is nil, so the number of
    attempts falls as their cost grows.
    """
    total = sum(map(len, by_class))
    clients = np.arange(num_clients)
    for _ in range(min(100, 1 + 10**7 // (num_clients * len(by_class) + total))):
        sizes = np.zeros(num_clients, dtype=np.int64)
        shuffled = [members.copy() for members in by_class]
        counts = []
        for members in shuffled:
            rng.shuffle(members)
            counts.append(_skewed(len(members), sizes < total / num_clients, alpha, rng))
            sizes += counts[-1]
        if sizes.min() >= least:
            break
    samples, sizes = _gather(shuffled, [(clients, count) for count in counts], num_clients)
    return Deal(samples, sizes, max(1, least))


def _skewed(
    num_members: int, hungry: npt.NDArray[np.bool_], alpha: float, rng: np.random.RandomState
) -> Ints:
    """How many of one class each client gets; one that has its mean share already gets none."""
    shares = rng.dirichlet(np.repeat(alpha, len(hungry))) * hungry
    if not 0 < shares.sum() < np.inf:  # underflow at a tiny alpha, or all for a full client
        shares = np.where(hungry.any(), hungry, True).astype(np.float64)
    cuts = (np.cumsum(shares / shares.sum()) * num_members).astype(np.int64)
    cuts[-1] = num_members
    return np.diff(cuts, prepend=0)


def _pathological(
    by_class: list[Ints],
    num_clients: int,
    classes_per_client: int,
    least: int,
    rng: np.random.RandomState,
) -> Deal:
    """PAT. A class goes to the first clients that may still take one.

    Quotas can run out before the classes do (7 clients of 2 classes take 7 of 10). PFLlib drops
    such classes; here they go round the clients, who then hold more than their quota.
    """
    takers = -(-num_clients * classes_per_client // len(by_class))
    quota = np.full(num_clients, classes_per_client)
    turn = 0
    dealt = []
    for members in by_class:
        clients = np.flatnonzero(quota > 0)[:takers]
        if not len(clients):
            clients = np.arange(turn, turn + takers) % num_clients
            turn += takers
        dealt.append((clients, _uneven(len(members), len(clients), least / len(by_class), rng)))
        quota[clients] -= 1
    return Deal(*_gather(by_class, dealt, num_clients))


def _uneven(num_members: int, takers: int, least: float, rng: np.random.RandomState) -> Ints:
    """All takers but the last draw a size below the mean; the last takes the rest.

    Unlike PFLlib, which draws from 0 or fails when a class is small, nobody draws 0 who need not.
    """
    mean = num_members / takers
    low = min(int(max(mean / 10, least, 1)), int(mean))
    sizes = rng.randint(low, max(int(mean), low + 1), takers - 1)
    return np.append(sizes, num_members - sizes.sum())


def _classes(
    by_class: list[Ints],
    num_clients: int,
    classes_per_client: int,
    low_weight: float,
    rng: np.random.RandomState,
) -> Deal:
    """FedMRL's. Clients in turn pick a random class among those with the most free slots.

    That is to walk along random orders of all classes, one after another, so it is drawn so. A
    client can meet a class twice, in two orders, unless `classes_per_client` divides the number
    of classes. Classes that nobody meets (few clients) go round the clients whole.
    """
    num_picks = num_clients * classes_per_client
    orders = [rng.permutation(len(by_class)) for _ in range(-(-num_picks // len(by_class)))]
    slots = group(np.concatenate(orders)[:num_picks], len(by_class))
    weights = []
    turn = 0
    for slot in slots:
        clients = slot // classes_per_client
        if not len(clients):
            clients = np.array([turn % num_clients])
            turn += 1
        weights.append((clients, rng.uniform(low_weight, 1 - low_weight, len(clients))))
    shuffled = [rng.permutation(members) for members in by_class]
    return Deal(*deal_like(shuffled, weights, num_clients), weights=weights)


def held(samples: Ints, sizes: Ints, labels: Ints, num_classes: int) -> list[Weights]:
    """Who holds each class, weighted by how much; a class that nobody holds is everybody's."""
    owners = np.repeat(np.arange(len(sizes)), sizes)
    weights = []
    for members in group(labels[samples], num_classes):
        clients, counts = np.unique(owners[members], return_counts=True)
        if not len(clients):
            clients, counts = np.arange(len(sizes)), np.ones_like(sizes)
        weights.append((clients, counts.astype(np.float64)))
    return weights


def deal_like(
    by_class: Sequence[Ints], weights: Iterable[Weights], num_clients: int
) -> tuple[Ints, Ints]:
    """Deal each class to its clients in proportion to their weights, by the largest remainder."""
    dealt = []
    for members, (clients, shares) in zip(by_class, weights, strict=True):
        quotas = len(members) * shares / shares.sum()
        counts = quotas.astype(np.int64)
        left = len(members) - counts.sum()
        counts[np.argsort(counts - quotas, kind="stable")[:left]] += 1
        dealt.append((clients, counts))
    return _gather(by_class, dealt, num_clients)


def _gather(
    by_class: Sequence[Ints], dealt: Sequence[Counts], num_clients: int
) -> tuple[Ints, Ints]:
    """Samples in client order (by class within a client), and the clients' sizes."""
    owners = np.concatenate([np.repeat(clients, counts) for clients, counts in dealt])
    order = np.argsort(owners, kind="stable")
    return np.concatenate(by_class)[order], np.bincount(owners, minlength=num_clients)
