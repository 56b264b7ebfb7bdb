"""What a round costs: FedRE's table on CIFAR-100, through the real wire and the real ledger.

The paper counts scalars in thousands, for 10 clients that all take part, d = 512:

    FedProto  up 257.02   down 512.00     502 (client, class) pairs * d; 10 * 100 * d
    FedMRL    up 8863.08  down 8863.08    10 * P(FedAvgCNN with d1 = 128)
    FedRE     up 5.12     down 513.00     10 * d; 10 * (100 d + 100)

Real here: the labels of CIFAR-100 as far as they matter (600 of each class) and their Dirichlet
partition, the models at full size, the methods' own code, worker, wire, server and the ledger as it
is on disk. Shortened: training does nothing, and a client's data are one black image for each class
that it has. Neither changes what is sent: which classes a client has, and how large its model is.
"""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor

from raysim import ClientContext, Config, DataConfig, EvalConfig, FleetConfig, ops
from raysim.data import Dataset

CLASSES = [47, 48, 40, 52, 56, 38, 47, 50, 59, 65]  # of each client, in its training data: 502
D = 512
HP: dict[str, dict[str, Any]] = {"fedmrl": {"shared_model": "fedavg_cnn", "d1": 128}}


def cifar100() -> Dataset:
    images = np.broadcast_to(np.zeros(1, dtype=np.uint8), (60_000, 3, 32, 32))  # no memory
    labels = np.arange(60_000) % 100
    return Dataset("cifar100", images, labels, 50_000, 100, (0.5,) * 3, (0.5,) * 3)


def one_of_each(ctx: ClientContext) -> Iterator[tuple[Tensor, Tensor]]:
    present = np.unique(ctx.dataset.labels[ctx.indices])
    yield torch.zeros(len(present), 3, 32, 32), torch.from_numpy(present)


@pytest.fixture(scope="module")
def simulate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], tiny.Run]]:
    """Two rounds of a method, each method once."""

    @cache
    def run(method: str) -> tiny.Run:
        config = Config(
            method=method, clients=10, participation=1.0, rounds=2, seed=0,
            out=Path(tmp_path_factory.mktemp(method)),
            data=DataConfig(name="cifar100", partition="dirichlet", alpha=0.1),
            fleet=FleetConfig(("fedavg_cnn",), feature_dim=D),
            eval=EvalConfig(every=2, clients="1"),
            hp=HP.get(method),
        )  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops, "train", lambda *args: 0.0)
            patch.setattr(ClientContext, "samples", one_of_each)
            return tiny.simulate(config, cifar100())

    yield run
    run.cache_clear()


Simulate = Callable[[str], tiny.Run]


@pytest.mark.parametrize(
    ("method", "up", "down"),
    [
        ("fedproto", 257_024, 512_000),
        ("fedmrl", 8_863_080, 8_863_080),
        ("fedre", 5_120, 513_000),
        ("fedavg", 9_247_080, 9_247_080),
        ("local", 0, 0),
    ],
)
def test_scalars_of_a_round_are_those_of_the_papers_table(
    simulate: Simulate, method: str, up: int, down: int
) -> None:
    """FedAvg, not in the table, sends FedAvgCNN whole: 10 * 924,708."""
    run = simulate(method)
    assert run.count("scalars", 2, "up") == run.rounds[1]["scalars_up"] == up
    assert run.count("scalars", 2, "down") == run.rounds[1]["scalars_down"] == down
    assert run.count("scalars", 1, "up") == up
    if method != "fedproto":
        assert run.count("scalars", 1, "down") == down


def test_fedproto_has_nothing_to_broadcast_in_the_first_round(simulate: Simulate) -> None:
    run = simulate("fedproto")
    assert run.count("numbers", 1, "down") == 0
    assert run.rounds[0]["scalars_down"] == 0


def test_the_502_prototypes_are_those_of_the_classes_each_client_trains_on(
    simulate: Simulate,
) -> None:
    run = simulate("fedproto")
    sent = [run.count("scalars", 1, "up", client=k, field="prototypes") for k in range(10)]
    assert sent == [D * classes for classes in CLASSES]
    assert sum(CLASSES) == 502
    for field in ("classes", "counts"):  # in the ledger, but not in the papers
        rows = [row for row in run.messages if row["field"] == field and row["direction"] == "up"]
        assert [row["scalars"] for row in rows] == [0] * 20
        assert [row["numbers"] for row in rows] == CLASSES * 2


def test_fedre_sends_soft_labels_that_the_paper_does_not_count(simulate: Simulate) -> None:
    """Each client sends r_k, 512 scalars, and y_k, 100 numbers: 6,120 numbers in all."""
    run = simulate("fedre")
    rows = [row for row in run.messages if row["round"] == 1 and row["direction"] == "up"]
    found = [(row["client"], row["field"], row["scalars"], row["numbers"]) for row in rows]
    assert found == [
        entry
        for client in range(10)
        for entry in [(client, "representation", 512, 512), (client, "label", 0, 100)]
    ]
    assert all(row["bytes"] >= 4 * row["numbers"] for row in rows)
    assert run.count("numbers", 1, "up") == 6_120


def test_every_client_pays_the_same_for_a_shared_model(simulate: Simulate) -> None:
    """P(FedAvgCNN) = 873,408 without its head, which is 128 * 100 + 100 wide with d1 = 128."""
    run = simulate("fedmrl")
    rows = [row for row in run.messages if row["round"] == 1]
    assert {(row["field"], row["scalars"], row["numbers"]) for row in rows} == {
        ("shared", 873_408 + 12_900, 873_408 + 12_900)
    }
    assert len(rows) == 20
