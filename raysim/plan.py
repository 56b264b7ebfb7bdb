"""Which actors to start, and whether they fit the cluster. Pure arithmetic over the nodes'
resources."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raysim import schedule
from raysim.config import Config
from raysim.errors import ClusterError

GIB = 2**30
ACTOR_GIB = 0.4
"""Memory an actor with torch and a small model takes; `auto` starts no more of them than fit a
node."""


@dataclass(frozen=True)
class Request:
    """What one actor asks Ray for."""

    cpus: float
    gpus: float = 0.0
    memory: float = 0.0
    """GiB."""

    def __str__(self) -> str:
        parts = [f"{self.cpus:g} CPU", f"{self.gpus:g} GPU" if self.gpus else ""]
        parts.append(f"{self.memory:g} GiB" if self.memory else "")
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True)
class Pool:
    """Actors that are alike, and the clients they play."""

    name: str
    request: Request
    count: int
    models: frozenset[str]
    client: int | None = None
    """The one client this pool is pinned to."""


class Nodes:
    """What is left of the cluster while a plan is laid out. GPUs are kept apart: a fraction lives
    on one of them."""

    def __init__(self, resources: Sequence[Mapping[str, float]]) -> None:
        self.cpus = [node.get("CPU", 0.0) for node in resources]
        self.gpus = [[1.0] * int(node.get("GPU", 0)) for node in resources]
        self.memory = [node.get("memory", 0.0) / GIB for node in resources]

    def place(self, request: Request) -> bool:
        """Take the request from the first node that has it."""
        for i in range(len(self.cpus)):
            devices = _devices(self.gpus[i], request.gpus)
            if (
                devices is not None
                and self.cpus[i] >= request.cpus - 1e-9
                and self.memory[i] >= request.memory - 1e-9
            ):
                self.cpus[i] -= request.cpus
                self.memory[i] -= request.memory
                for device, share in devices:
                    self.gpus[i][device] -= share
                return True
        return False

    def largest(self) -> Request:
        """The most that one actor could get of each."""
        gpus = [
            float(sum(share > 1 - 1e-9 for share in node)) or max(node, default=0.0)
            for node in self.gpus
        ]
        return Request(
            max(self.cpus, default=0.0), max(gpus, default=0.0), max(self.memory, default=0.0)
        )


def _devices(free: Sequence[float], wanted: float) -> list[tuple[int, float]] | None:
    """Which GPUs of a node serve a request: whole ones, or a fraction of the fullest that still has
    it."""
    if wanted <= 0:
        return []
    if wanted >= 1:
        whole = [i for i, share in enumerate(free) if share > 1 - 1e-9][: int(wanted)]
        return [(i, 1.0) for i in whole] if len(whole) == int(wanted) else None
    fitting = [(share, i) for i, share in enumerate(free) if share >= wanted - 1e-9]
    return [(min(fitting)[1], wanted)] if fitting else None


class _Shortage(Exception):
    """Why a plan does not fit; `make_plan` adds what would."""


def make_plan(
    config: Config,
    models: Sequence[str],
    shares: Mapping[str, float],
    resources: Sequence[Mapping[str, float]],
) -> list[Pool]:
    """The pools for a run, or a ClusterError that names the nearest plans that fit. `models` are
    dealt cyclically,
    `shares` are the GPU shares of those that have their own."""
    try:
        return _lay_out(config, models, shares, resources)
    except _Shortage as shortage:
        tries = _nearest(config, models, shares, resources)
        raise ClusterError(f"{shortage}. Try {' or '.join(tries)}") from None


def _lay_out(
    config: Config,
    models: Sequence[str],
    shares: Mapping[str, float],
    resources: Sequence[Mapping[str, float]],
) -> list[Pool]:
    nodes = Nodes(resources)
    driver = Request(config.driver.cpus, config.driver.gpus)
    if not nodes.place(driver):
        raise ClusterError(
            f"the driver asks for {driver}, but no node has more than {_shown(nodes.largest())}. "
            "Try smaller --driver.cpus and --driver.gpus"
        )
    if config.actors == "clients":
        pools = [
            replace(_pool(config, {model}, shares, f"client-{client:03d}"), client=client)
            for client in range(config.clients)
            for model in [models[client % len(models)]]
        ]
        return _require_all(pools, nodes)
    by_share: dict[float, set[str]] = {}
    for model in models:
        by_share.setdefault(shares.get(model, config.gpus), set()).add(model)
    groups = [
        by_share[share] for share in sorted(by_share, reverse=True)
    ]  # the largest first packs best
    names = ["pool"] if len(groups) == 1 else ["pool-" + "-".join(sorted(g)) for g in groups]
    pools = [_pool(config, group, shares, name) for group, name in zip(groups, names, strict=True)]
    if config.actors == "auto":
        return _fill(config, pools, models, nodes, resources)
    return _require_all(_deal(config, pools, models), nodes)


def _pool(config: Config, models: set[str], shares: Mapping[str, float], name: str) -> Pool:
    gpus = shares.get(min(models), config.gpus)
    return Pool(name, Request(config.cpus, gpus, config.memory or 0.0), 1, frozenset(models))


def _deal(config: Config, pools: list[Pool], models: Sequence[str]) -> list[Pool]:
    """--actors N over the pools, by the share of clients each serves, at least one to each."""
    wanted = int(config.actors)
    if wanted < len(pools):
        raise _Shortage(f"--actors {wanted}, but --fleet.gpus makes {len(pools)} kinds of actors")
    counts = [1] * len(pools)
    weights = [_clients_served(pool, models) for pool in pools]
    for _ in range(wanted - len(pools)):
        neediest = max(range(len(pools)), key=lambda i: weights[i] / counts[i])
        counts[neediest] += 1
    return [replace(pool, count=count) for pool, count in zip(pools, counts, strict=True)]


def _fill(
    config: Config,
    pools: list[Pool],
    models: Sequence[str],
    nodes: Nodes,
    resources: Sequence[Mapping[str, float]],
) -> list[Pool]:
    """As many actors as the cluster fits and a round can use, the neediest pool first."""
    _require_all(pools, nodes)
    counts = [1] * len(pools)
    weights = [_clients_served(pool, models) for pool in pools]
    memory = sum(node.get("memory", 0.0) for node in resources) / GIB
    cohort = len(schedule.cohort(0, 1, config.clients, config.participation))
    usable = config.clients if config.eval.clients == "all" else cohort
    limit = max(len(pools), min(usable, int(memory / ACTOR_GIB), _capacity(pools, resources)))
    open_pools = set(range(len(pools)))
    while open_pools and sum(counts) < limit:
        neediest = max(open_pools, key=lambda i: (weights[i] / counts[i], -i))
        if nodes.place(pools[neediest].request):
            counts[neediest] += 1
        else:
            open_pools.remove(neediest)
    return [replace(pool, count=count) for pool, count in zip(pools, counts, strict=True)]


def _capacity(pools: Sequence[Pool], resources: Sequence[Mapping[str, float]]) -> int:
    """Actors that ask for nothing would fit without end; then one a core."""
    if all(pool.request.cpus or pool.request.gpus for pool in pools):
        return 10**6
    return max(1, int(sum(node.get("CPU", 0.0) for node in resources)))


def _clients_served(pool: Pool, models: Sequence[str]) -> int:
    return sum(model in pool.models for model in models)


def _require_all(pools: list[Pool], nodes: Nodes) -> list[Pool]:
    largest = nodes.largest()
    cpus, gpus = sum(nodes.cpus), sum(map(sum, nodes.gpus))
    wanted = sum(pool.count for pool in pools)
    placed = 0
    for pool in pools:
        for _ in range(pool.count):
            if nodes.place(pool.request):
                placed += 1
            elif placed == 0:
                found = f"no node has more than {_shown(largest)}"
                raise _Shortage(f"one actor asks for {pool.request}, but {found}")
            else:
                free = f"the cluster has {cpus:g} CPU and {gpus:g} GPU free, enough for {placed}"
                raise _Shortage(f"{wanted} actors of {pool.request} do not fit: {free}")
    return pools


def _nearest(
    config: Config,
    models: Sequence[str],
    shares: Mapping[str, float],
    resources: Sequence[Mapping[str, float]],
) -> list[str]:
    """Flags to type in addition, each of which was tried and fits: fewer actors, or the same with
    less each."""

    def fits(change: _Change) -> bool:
        capped = {model: min(share, change.get("fleet", share)) for model, share in shares.items()}
        flags = {flag: value for flag, value in change.items() if flag != "fleet"}
        try:
            _lay_out(replace(config, **flags), models, capped, resources)
        except _Shortage:
            return False
        return True

    kinds = len({shares.get(model, config.gpus) for model in models})
    fewer: list[_Change] = [{"actors": "auto"}] if config.actors == "clients" else []
    if config.actors.isdecimal():
        counts = range(max(int(config.actors) - 1, kinds), kinds - 1, -1)
        fewer = [{"actors": str(count)} for count in counts]
    less: dict[str, list[_Change]] = {
        "cpus": [{"cpus": share} for share in _smaller(config.cpus)],
        "gpus": [{"gpus": share} for share in _smaller(config.gpus)],
        "fleet": [{"fleet": share} for share in _smaller(max(shares.values(), default=0.0))],
        "memory": [
            {"memory": tenth / 10}
            for tenth in range(math.ceil((config.memory or 0) * 10) - 1, 0, -1)
        ],
    }
    alone = [found for changes in (fewer, *less.values()) if (found := _first(changes, fits))]
    if not alone:
        # No one thing is enough: as much of each as the others leave when they are smallest.
        change: _Change = {key: value for c in less.values() if c for key, value in c[-1].items()}
        for changes in less.values():
            change = change | (_first(changes, lambda c, rest=change: fits(rest | c)) or {})  # type: ignore[misc]
        alone = [change]
    return [_typed(change) for change in alone]


_Change = dict[str, Any]
"""Settings of Config by name; `fleet` is the most that a share of --fleet.gpus may be."""


def _smaller(share: float) -> list[float]:
    """Whole ones, then 1/k of one, so that fractions divide evenly, then nothing; as fine as Ray
    counts."""
    steps = [
        *range(int(share), 0, -1),
        *(math.floor(10_000 / k) / 10_000 for k in range(2, 10_001)),
    ]
    return [float(step) for step in steps if step < share] + [0.0] if share else []


def _first(changes: Sequence[_Change], fits: Callable[[_Change], bool]) -> _Change | None:
    """The first of ever smaller changes that fits, by bisection."""
    if not changes or not fits(changes[-1]):
        return None
    low, high = 0, len(changes) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(changes[middle]) else (middle + 1, high)
    return changes[low]


def _typed(change: _Change) -> str:
    names = {"fleet": "fleet.gpus shares of at most"}
    values = (
        (flag, value if isinstance(value, str) else f"{value:g}") for flag, value in change.items()
    )
    return " ".join(f"--{names.get(flag, flag)} {value}" for flag, value in values)


def _shown(request: Request) -> str:
    return f"{request.cpus:g} CPU, {request.gpus:g} GPU and {request.memory:.1f} GiB"
