"""What rounds of FedGH, FedTGP and LG-FedAvg cost: more rows of FedRE's table on CIFAR-100.

In thousands of scalars, for 10 clients that all take part, d = 512:

    LG-FedAvg  up 513.00   down 513.00    10 * (100 d + 100), both ways
    FedGH      up 257.02   down 512.00    502 (client, class) pairs * d; the paper's 10 * 100 d
                                          leaves the head's bias out, ours are 513.00 as sent
    FedTGP     not in the table           up as FedGH, down 10 * 100 d

What is real here and what is shortened, `test_communication` says.
"""

from pathlib import Path
from typing import Any

import pytest
import tiny
from test_communication import CLASSES, D, cifar100, one_of_each

from raysim import ClientContext, Config, DataConfig, EvalConfig, FleetConfig, ops


def simulate(method: str, out: Path, **hp: Any) -> tiny.Run:
    config = Config(
        method=method, clients=10, participation=1.0, rounds=2, seed=0, out=out,
        data=DataConfig(name="cifar100", partition="dirichlet", alpha=0.1),
        fleet=FleetConfig(("fedavg_cnn",), feature_dim=D),
        eval=EvalConfig(every=2, clients="1"),
        hp=hp,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "train", lambda *args: 0.0)
        patch.setattr(ClientContext, "samples", one_of_each)
        return tiny.simulate(config, cifar100())


def test_lg_fedavg_sends_heads_both_ways(tmp_path: Path) -> None:
    run = simulate("lg_fedavg", tmp_path)
    for number in (1, 2):
        assert run.count("scalars", number, "up") == 513_000
        assert run.count("scalars", number, "down") == 513_000


@pytest.mark.parametrize(
    ("method", "hp", "first", "second"),
    [
        ("fedgh", {}, 513_000, 513_000),
        # The public code broadcasts T(c) from the second round on; one server epoch is enough here.
        ("fedtgp", {"server_epochs": 1}, 0, 512_000),
    ],
)
def test_prototypes_go_up_without_their_labels_in_the_count(
    method: str, hp: dict[str, Any], first: int, second: int, tmp_path: Path
) -> None:
    run = simulate(method, tmp_path, **hp)
    for number, down in ((1, first), (2, second)):
        assert run.count("scalars", number, "up") == 257_024
        assert run.count("scalars", number, "down") == down
        assert run.count("scalars", number, "up", field="classes") == 0
        assert run.count("numbers", number, "up", field="classes") == sum(CLASSES) == 502
    sent = [run.count("scalars", 1, "up", client=k, field="prototypes") for k in range(10)]
    assert sent == [D * classes for classes in CLASSES]
