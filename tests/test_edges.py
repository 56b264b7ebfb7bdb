"""Clients and rounds at the edge of what is possible, for every method, through the real engine.

The models are tiny, of two architectures, one with batch norm; the data are points that have two
features. Three runs of each method show: clients that have too little data; rounds that have one
participant; and clients that are first chosen when the others have long begun.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor, nn

import methods
import zoo
from raysim import Config, ConfigError, FleetConfig, Result, Task, TrainConfig, fleet, wire
from raysim.backends.local import LocalBackend
from raysim.data import Dataset, Split
from raysim.events import Event, RoundFinished
from raysim.method import check
from zoo import SplitModel
from zoo.split import Backbone

CLASSES = 5
NOBODYS = 4  # the class that no client has
TASK = Task(CLASSES, channels=2, image_size=1)
WIDTH = 4
MODELS = ("cnn4", "cnn5")
SMALL = {
    "d1": 2, "noise_dim": 2, "hidden_dim": 4, "server_steps": 2, "server_epochs": 2,
    "server_batch_size": 4, "shared_model": "cnn5", "held_out": 0.4, "aggregation": "groups",
}  # fmt: skip
"""Hyper-parameters for tiny models, for the methods that have them."""


def build(name: str, task: Task, feature_dim: int, mapping: str) -> SplitModel:
    norm: nn.Module = nn.BatchNorm1d(5) if name == "cnn5" else nn.Tanh()
    hidden = 5 if name == "cnn5" else 3
    trunk = nn.Sequential(nn.Linear(task.channels, hidden), norm, nn.ReLU())
    neck = nn.Linear(hidden, feature_dim)
    return SplitModel(name, Backbone(nn.Flatten(), trunk, neck), feature_dim, task.num_classes)


class Seen(NamedTuple):
    rounds: list[dict[str, Any]]
    clients: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    states: list[dict[int, Any]]  # after each round, of the clients that have one

    def trained(self, client: int) -> list[dict[str, Any]]:
        return self.of(client, "train")

    def of(self, client: int, phase: str) -> list[dict[str, Any]]:
        return [r for r in self.clients if r["client"] == client and r["phase"] == phase]


def simulate(
    method: str, out: Path, data: Dataset, dealt: Split, rounds: int, share: float
) -> Seen:
    names = {field.name for field in fields(methods.get(method))}
    hp = {name: value for name, value in SMALL.items() if name in names}
    config = Config(
        method=method, clients=dealt.num_clients, participation=share, rounds=rounds, out=out,
        hp=hp, fleet=FleetConfig(models_for(method, hp), WIDTH),
        train=TrainConfig(batch_size=4, lr=0.05),
    )  # fmt: skip
    states: list[dict[int, Any]] = []

    def watch(event: Event, backend: LocalBackend) -> None:
        if isinstance(event, RoundFinished):
            types = config.hp.messages()
            states.append({k: wire.unpack(state, types) for k, state in backend.states()})

    if config.hp.needs_public:
        dealt = replace(dealt, public=np.arange(3))
    run = tiny.simulate(config, data, dealt, watch)
    return Seen(run.rounds, Result.load(out).clients.to_pylist(), run.messages, states)


def models_for(method: str, hp: dict[str, Any]) -> tuple[str, ...]:
    """Both architectures, or one for the methods that cannot mix these."""
    try:
        check(Config(method=method, hp=hp).hp, fleet.Fleet(MODELS, WIDTH), TASK, method)
    except ConfigError:
        return MODELS[1:]
    return MODELS


@pytest.fixture(scope="module", autouse=True)
def tiny_models() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zoo, "build", build)
        fleet._like.cache_clear()
        yield
    fleet._like.cache_clear()


def points(labels: Sequence[int]) -> Dataset:
    """Points around (c, 4 - c) for class c, scattered by their position."""
    samples = [(c + i % 2, 4 - c + i // 2 % 2) for i, c in enumerate(labels)]
    return tiny.points(samples, labels, CLASSES)


def everything_is_sane(seen: Seen, chosen: Sequence[int]) -> None:
    for number, row in enumerate(seen.rounds, start=1):
        assert row["round"] == number
        assert isfinite(row["train_loss"])
        assert 0 <= row["accuracy"] <= 1
    for client in chosen:
        for path, leaf in wire.leaves(seen.states[-1][client]):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                assert (leaf.abs() < 100).all(), path


def moved(before: Any, after: Any) -> bool:
    """Whether the client's own model has learned."""
    return any(not torch.equal(before["model"][k], after["model"][k]) for k in before["model"])


# Too little data: batches are of 4


UNEVEN = {
    "one class": [0, 0, 0, 0, 0, 0],
    "one sample": [1],
    "less than a batch": [1, 2, 2],
    "one class, less than a batch": [3, 3],
    "one over a batch": [2, 0, 1, 1, 3],
    "enough": [0, 1, 2, 3, 0, 1, 2, 3],
}
WHO = {name: client for client, name in enumerate(UNEVEN)}


@pytest.fixture(scope="module")
def uneven(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Three rounds in which all take part, once for each method."""
    labels = [label for share in UNEVEN.values() for label in share]
    ends = [0]
    for share in UNEVEN.values():
        ends.append(ends[-1] + len(share))
    shares = [range(start, end) for start, end in pairwise(ends)]

    @cache
    def run(method: str) -> Seen:
        out = tmp_path_factory.mktemp(method)
        return simulate(method, out, points(labels), tiny.deal(*shares), rounds=3, share=1.0)

    return run


@pytest.mark.parametrize("who", UNEVEN)
@pytest.mark.parametrize("method", methods.names())
def test_a_client_with_too_little_data_learns_and_is_evaluated(
    method: str, who: str, uneven: Any
) -> None:
    seen, client = uneven(method), WHO[who]
    rows = seen.trained(client)
    assert [row["status"] for row in rows] == ["done"] * 3
    assert all(isfinite(row["loss"]) for row in rows)
    assert [row["samples"] for row in rows] == [len(UNEVEN[who])] * 3
    first, second, third = (states[client] for states in seen.states)
    assert moved(first, second)
    assert moved(second, third)
    assert all(0 <= row["accuracy"] <= 1 for row in seen.of(client, "eval"))


@pytest.mark.parametrize("method", methods.names())
def test_a_class_nobody_has_spoils_nothing(method: str, uneven: Any) -> None:
    assert NOBODYS not in {label for share in UNEVEN.values() for label in share}
    everything_is_sane(uneven(method), range(len(UNEVEN)))


@pytest.mark.parametrize("method", methods.names())
def test_the_first_round_is_a_round_like_others(method: str, uneven: Any) -> None:
    """Nobody has sent anything yet, and still all train, send what they send later, and are
    evaluated."""
    seen = uneven(method)
    assert len(seen.states[0]) == len(UNEVEN)
    first, second = (
        {
            (m["client"], m["field"])
            for m in seen.messages
            if m["round"] == n and m["direction"] == "up"
        }
        for n in (1, 2)
    )
    assert first == second
    assert len([row for row in seen.clients if row["phase"] == "eval" and row["round"] == 1]) == 6


# One participant


@pytest.mark.parametrize("method", methods.names())
def test_rounds_of_one_participant_work(method: str, tmp_path: Path) -> None:
    """Three clients of which one is chosen in each of four rounds: client 0 has one class, client 1
    one sample."""
    data = points([0, 0, 0, 0, 1, 0, 1, 2, 3])
    dealt = tiny.deal([0, 1, 2, 3], [4], [5, 6, 7, 8])
    seen = simulate(method, tmp_path, data, dealt, rounds=4, share=0.34)
    assert [row["cohort"] for row in seen.rounds] == [1] * 4
    chosen = {row["client"] for row in seen.clients if row["phase"] == "train"}
    assert set(seen.states[-1]) == chosen
    assert len(chosen) > 1, "or there is no change of participants"
    everything_is_sane(seen, sorted(chosen))


# Many clients, few participants


CROWD, FEW, LAST = 20, 0.1, 5


@pytest.mark.parametrize("method", methods.names())
def test_a_client_that_is_first_chosen_late_joins_in(method: str, tmp_path: Path) -> None:
    """20 clients of one class each, 2 a round: what others know of a class may come from clients
    that are not there, and who comes late has missed all of it. All are evaluated in all rounds,
    also those that were never chosen."""
    labels = [client % NOBODYS for client in range(CROWD) for _ in range(3)]
    dealt = tiny.deal(*(range(3 * client, 3 * client + 3) for client in range(CROWD)))
    seen = simulate(method, tmp_path, points(labels), dealt, rounds=LAST, share=FEW)
    first = {}
    for row in sorted(seen.clients, key=lambda row: row["round"]):
        if row["phase"] == "train":
            first.setdefault(row["client"], row["round"])
    late = [client for client, number in first.items() if number == LAST]
    assert late, "or this shows nothing"
    for client in late:
        assert all(client not in states for states in seen.states[:-1])
        (row,) = seen.trained(client)
        assert (row["status"], row["samples"]) == ("done", 3)
        assert isfinite(row["loss"])
        assert len(seen.of(client, "eval")) == LAST
    everything_is_sane(seen, sorted(first))

    spoken: dict[int, set[tuple[str, str]]] = {}
    for row in seen.messages:
        if row["round"] == LAST:
            spoken.setdefault(row["client"], set()).add((row["direction"], row["field"]))
    assert len({frozenset(kinds) for kinds in spoken.values()}) <= 1, (
        "late or not, all say the same"
    )
