"""The public set: samples that no client has, and that the server has without their labels."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch.testing import assert_close

from methods.local import Local
from raysim import Config, ConfigError, FleetConfig, ServerContext
from raysim.config import DataConfig
from raysim.data import Split, split
from raysim.data.public import unlabelled
from raysim.errors import DataError
from raysim.events import Event, Started

LABELS = np.arange(120) % 3
TRAIN = 90
CONFIG = DataConfig(name="a set", alpha=1.0)


def deal(public: int = 20, seed: int = 0, clients: int = 4, **changes: Any) -> Split:
    config = replace(CONFIG, public=public, **changes)
    return split(LABELS, TRAIN, 3, clients, config, seed)


@pytest.mark.parametrize("partition", ["iid", "dirichlet", "pathological", "classes"])
@pytest.mark.parametrize("test", ["split", "official"])
def test_a_sample_is_public_or_a_clients_and_never_both(partition: str, test: str) -> None:
    dealt = deal(partition=partition, test=test)
    assert len(dealt.public) == 20
    everyone = np.concatenate([dealt.public, dealt.indices])
    assert np.array_equal(np.sort(everyone), np.arange(120))
    assert np.array_equal(dealt.public, np.sort(dealt.public))


def test_official_test_data_are_never_public() -> None:
    dealt = deal(public=80, test="official")
    assert dealt.public.max() < TRAIN
    tests = np.concatenate([dealt.test(client) for client in range(4)])
    assert np.array_equal(np.sort(tests), np.arange(TRAIN, 120))
    assert deal(public=80, test="split").public.max() >= TRAIN, "or the line above shows nothing"


def test_the_public_set_is_the_same_for_every_seed_of_a_run_but_not_of_its_own() -> None:
    assert np.array_equal(deal(seed=1).public, deal(seed=2).public)
    assert not np.array_equal(deal(seed=1).indices, deal(seed=2).indices)
    assert not np.array_equal(deal(public_seed=1).public, deal(public_seed=2).public)


def test_a_larger_public_set_contains_the_smaller() -> None:
    assert set(deal(public=10).public) < set(deal(public=30).public)


def test_without_a_public_set_nothing_changes() -> None:
    """The digest is that of a split from before there were public sets."""
    before = "3f1a032836979e83"
    assert deal(public=0).digest()[:16] == before
    assert len(deal(public=0).public) == 0
    assert deal(public=20).digest() != deal(public=20, public_seed=1).digest()


def test_a_split_with_a_public_set_cannot_be_changed() -> None:
    dealt = deal()
    for part in (dealt.indices, dealt.public):
        with pytest.raises(ValueError, match="read-only"):
            part.sort()


def test_a_public_set_that_leaves_too_little_is_refused() -> None:
    deal(public=116)
    with pytest.raises(DataError, match=r"--data.public 117 leaves 3 samples of a set for --cli"):
        deal(public=117)
    with pytest.raises(DataError, match=r"leaves 0 samples"):
        deal(public=1000)
    with pytest.raises(ConfigError, match=r"--data.public must be at least 0, got -1"):
        deal(public=-1)


# At the server


POINTS = tiny.points([(1, 2), (3, 4), (5, 6), (7, 8)], [0, 1, 1, 0], num_classes=2)


def test_images_come_by_their_number_normalized_and_without_labels() -> None:
    public = unlabelled(POINTS, np.array([1, 3]), tiny.CPU)
    assert len(public) == 2
    found = public.images(torch.tensor([1, 0, 1]))
    expected = torch.tensor([[7.0, 8.0], [3.0, 4.0], [7.0, 8.0]])[:, :, None, None]
    assert_close(found, expected)
    assert public.dataset.labels.tolist() == [-1, -1]


@dataclass
class Seen:
    public: list[int]


@dataclass(frozen=True)
class Curious(Local):
    """Notes how many public images the server has in each round."""

    def init_server(self, ctx: ServerContext) -> Any:
        assert ctx.public is not None
        return Seen([len(ctx.public)])

    def server_update(self, server: Any, replies: Sequence[Any], ctx: ServerContext) -> None:
        assert ctx.public is not None
        server.public.append(int(ctx.public.images(torch.arange(len(ctx.public))).sum()))


def run(out: Path, method: Any, dealt: Split) -> list[tuple[str, str]]:
    config = Config(
        method="local", clients=1, participation=1.0, rounds=2, out=out, hp=method,
        fleet=FleetConfig(("mlp",), 2),
    )  # fmt: skip
    plan: list[tuple[str, str]] = []

    def watch(event: Event, backend: Any) -> None:
        if isinstance(event, Started):
            plan.extend(event.plan)

    tiny.simulate(config, POINTS, dealt, watch)
    return plan


def test_the_server_has_it_in_every_round_and_the_plan_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers: list[Seen] = []
    started = Curious.init_server

    def watched(method: Curious, ctx: ServerContext) -> Any:
        servers.append(started(method, ctx))
        return servers[-1]

    monkeypatch.setattr(Curious, "init_server", watched)
    plan = run(tmp_path, Curious(), replace(tiny.deal([0, 1]), public=np.array([2, 3])))
    assert servers[0].public == [2, 26, 26]
    assert ("public", "2 unlabelled samples") in plan


def test_a_plan_without_one_does_not_speak_of_it(tmp_path: Path) -> None:
    assert "public" not in dict(run(tmp_path, Local(), tiny.deal([0, 1])))


def test_a_method_that_needs_one_is_refused_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Local, "needs_public", "looks at strangers")
    with pytest.raises(ConfigError, match=r"local looks at strangers. Try --data.public 1000"):
        run(tmp_path / "out", Local(), tiny.deal([0, 1]))
    assert not (tmp_path / "out").exists()
    run(tmp_path / "out", Local(), replace(tiny.deal([0, 1]), public=np.array([2])))
