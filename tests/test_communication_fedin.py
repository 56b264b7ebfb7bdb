"""What a client sends in a round: FedIN's Table 2, through the real wire and the real ledger.

Millions of parameters, the mean over the five ResNets, on 32 x 32 images of one channel:

                   the paper's   ours
    FedAvg, MOON   12.28         12.2818: P_k. Also FedProx, InclusiveFL, InCoAvg and FedET, which
                                 are not in the table; FedNova sends a_k too, FedGen (of nested
                                 models) label counts, which are not counted, and its generator
                                 comes down, 302,080 more
    SCAFFOLD       24.56         24.5635: 2 P_k
    FedIN          12.35         12.3555: P_k + 16 (64 * 8 * 8 + 512)
    HeteroFL,      16.29         15.5149 of ResNet-152 at rates 1 to 1/16. The paper's is that of a
    FedRolex                     model for 1000 classes, not 10: 16.3015 here, and 16.2976 of the
                                 authors' ResNet, which has another stem and other batch norms
    ScaleFL is not in the table, and FedIN does not say what its levels are.

Real here: the models at full size, the methods' own code, worker, wire, server and the ledger as it
is on disk. Shortened: training learns nothing, the images are black, servers that train take one
step. None of it changes what is sent.
"""

from collections.abc import Callable, Iterator
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from raysim import Config, DataConfig, EvalConfig, FleetConfig, ops
from raysim.data import Dataset

P = [4_904_650, 10_805_962, 11_175_370, 17_076_682, 17_446_090]
BATCH = 16 * (64 * 8 * 8 + 512)
GENERATOR = (64 + 10) * 512 + 512 + 2 * 512 + 512 * 512 + 512
RATES = (1, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
HP: dict[str, dict[str, Any]] = {
    "fedet": {"server_steps": 1, "server_batch_size": 2},
    "fedgen_nested": {"noise_dim": 64, "server_steps": 1},
}


def black(classes: int) -> Dataset:
    images = np.broadcast_to(np.zeros(1, dtype=np.uint8), (200, 1, 32, 32))  # no memory
    return Dataset("black", images, np.arange(200) % classes, 200, classes, (0.5,), (0.5,))


@pytest.fixture(scope="module")
def simulate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., tiny.Run]]:
    """The ledger of a run of five clients, each with the same settings once."""

    @cache
    def run(method: str, models: str = "resnet", rounds: int = 1, classes: int = 10) -> tiny.Run:
        config = Config(
            method=method, clients=5, participation=1.0, rounds=rounds, checkpoint_every=0,
            out=Path(tmp_path_factory.mktemp(method)),
            data=DataConfig(partition="iid", public=4 if method == "fedet" else 0),
            fleet=FleetConfig((models,)), eval=EvalConfig(every=rounds, clients="1"),
            hp=HP.get(method, {}),
        )  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ops, "train", lambda *args, **options: 0.0)
            found = tiny.simulate(config, black(classes))
        return found._replace(states={})  # a quarter of a gigabyte

    yield run
    run.cache_clear()


Simulate = Callable[..., tiny.Run]


def sent(run: tiny.Run, round: int, way: str, **only: Any) -> list[int]:
    return [run.count("scalars", round, way, client=k, **only) for k in range(5)]


def test_the_five_models_are_the_papers() -> None:
    assert sum(P) / 5 == pytest.approx(12.2818e6, abs=50)
    assert 2 * sum(P) / 5 == pytest.approx(24.5635e6, abs=50)
    assert sum(P) / 5 + BATCH == pytest.approx(12.3555e6, abs=50)
    assert GENERATOR == 302_080


@pytest.mark.parametrize(
    ("method", "up", "down"),
    [
        ("fedavg", P, P),
        ("scaffold", [2 * p for p in P], [2 * p for p in P]),
        pytest.param("moon", P, P, marks=pytest.mark.slow),
        pytest.param("fedprox", P, P, marks=pytest.mark.slow),
        pytest.param("fednova", [p + 1 for p in P], P, marks=pytest.mark.slow),
        pytest.param("inclusivefl", P, P, marks=pytest.mark.slow),
        pytest.param("incoavg", P, P, marks=pytest.mark.slow),
        pytest.param("fedet", P, P, marks=pytest.mark.slow),
        pytest.param("fedgen_nested", P, [p + GENERATOR for p in P], marks=pytest.mark.slow),
    ],
)
def test_scalars_of_a_client_are_those_of_the_table(
    method: str, up: list[int], down: list[int], simulate: Simulate
) -> None:
    run = simulate(method)
    assert sent(run, 1, "up") == up
    assert sent(run, 1, "down") == down
    assert run.rounds[0]["scalars_up"] == sum(up)
    assert run.rounds[0]["scalars_down"] == sum(down)


def test_fedin_sends_a_batch_of_features_with_its_model(simulate: Simulate) -> None:
    """Down too, once there is one."""
    run = simulate("fedin", rounds=2)
    for round in (1, 2):
        assert sent(run, round, "up") == [p + BATCH for p in P]
        assert run.rounds[round - 1]["scalars_up"] / 5 == pytest.approx(12.3555e6, abs=50)
    assert sent(run, 1, "down") == P
    assert sent(run, 2, "down") == [p + BATCH for p in P]
    assert sent(run, 2, "down", field="features") == [BATCH] * 5


def test_batch_norms_statistics_are_numbers_but_not_counted(simulate: Simulate) -> None:
    """Running means and variances, and a counter for each of 12 to 28 layers."""
    run = simulate("fedin", rounds=2)
    statistics = [5_760 + 12, 8_832 + 16, 9_600 + 20, 12_672 + 24, 13_440 + 28]
    numbers = [run.count("numbers", 1, "up", client=k, field="model") for k in range(5)]
    assert numbers == [p + s for p, s in zip(P, statistics, strict=True)]


def bottleneck_resnet(rate: float, classes: int) -> int:
    """Parameters of a ResNet-152 whose layers have the first ceil(rate n) of n channels."""

    def c(width: int) -> int:
        return ceil(rate * width)

    total, inputs = 49 * c(64) + 2 * c(64), 64
    for width, blocks in ((64, 3), (128, 8), (256, 36), (512, 3)):
        for block in range(blocks):
            total += c(inputs) * c(width) + 9 * c(width) ** 2 + c(width) * c(4 * width)
            total += 2 * (c(width) + c(width) + c(4 * width))
            if block == 0:
                total += c(inputs) * c(4 * width) + 2 * c(4 * width)
            inputs = 4 * width
    return total + c(2048) * classes + classes


@pytest.mark.parametrize(
    ("method", "classes", "mean"),
    [
        ("heterofl", 10, 15.5149e6),
        pytest.param("fedrolex", 10, 15.5149e6, marks=pytest.mark.slow),
        pytest.param("heterofl", 1000, 16.3015e6, marks=pytest.mark.slow),
    ],
)
def test_sub_models_cost_what_their_slices_hold(
    method: str, classes: int, mean: float, simulate: Simulate
) -> None:
    run = simulate(method, "resnet152", classes=classes)
    slices = [bottleneck_resnet(rate, classes) for rate in RATES]
    assert sent(run, 1, "up", field="model") == sent(run, 1, "down", field="model") == slices
    assert sum(slices) / 5 == pytest.approx(mean, abs=50)


def test_scalefl_sends_the_levels_of_one_model(simulate: Simulate) -> None:
    """Levels 1 to 4 and again 1, each larger than the one before and the last at least the whole
    model; as much down as up."""
    run = simulate("scalefl", "resnet18")
    up = sent(run, 1, "up")
    assert up == sent(run, 1, "down")
    assert up[0] < up[1] < up[2] < up[3]
    assert up[4] == up[0]
    assert up[3] > 11_175_370
