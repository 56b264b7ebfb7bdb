"""What every method promises, whatever it does inside."""

from pathlib import Path
from typing import Any

import pytest
import torch
from faults import short_form

import methods
from raysim import Config, Result, run
from raysim.console import PlainConsole

TINY: dict[str, Any] = {
    "clients": 7,
    "participation": 0.45,
    "rounds": 3,
    "data": {"samples": 280, "alpha": 0.5},
    "fleet": {"models": ["cnn4", "cnn5"]},
    "train": {"batch_size": 16, "lr": 0.05},
}
NESTED = ["slim_resnet10", "slim_resnet14"]
FLEETS = dict.fromkeys(
    (
        "fedavg", "fedgen_nested", "fedin", "fednova", "fedprox", "inclusivefl", "incoavg", "moon",
        "scaffold",
    ),
    NESTED,
)  # fmt: skip
"""Methods that cannot run a mixed fleet of plain models."""
FLEETS |= {"heterofl": ["slim_resnet10"], "fedrolex": ["cnn5"], "scalefl": ["slim_resnet10"]}
KINDS = ("fedavg", "fedin", "fedkd", "fedmrl", "fedproto", "fedre", "heterofl")
"""Each exchanges something of another kind; CI runs these on Ray, `-m slow` the others."""


class Quiet(PlainConsole):
    def __init__(self) -> None:
        import io

        super().__init__(io.StringIO())


def simulate(method: str, out: Path, **changes: Any) -> Result:
    tree = {**TINY, "method": method, "out": str(out), "backend": "local"}
    if method in FLEETS:
        tree["fleet"] = {"models": FLEETS[method]}
    for key, value in changes.items():
        tree[key] = {**tree.get(key, {}), **value} if isinstance(value, dict) else value
    if methods.get(method).needs_public:  # beside what the clients have
        tree["data"] = {**tree["data"], "public": 10, "samples": tree["data"]["samples"] + 10}
        few = {"server_steps": 2, "server_batch_size": 4} if method == "fedet" else {"width": 8}
        tree["hp"] = {**few, **tree.get("hp", {})}
    return run(Config.from_tree(tree), Quiet())


class Once(dict[str, Result]):
    """Runs of methods, in-process: each is made when it is first asked for."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.settings = settings

    def __missing__(self, method: str) -> Result:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        self[method] = simulate(method, self.folder / method, **self.settings)
        torch.set_num_threads(threads)
        return self[method]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Once:
    return Once(tmp_path_factory.mktemp("reference"))


@pytest.mark.parametrize("method", methods.names())
def test_metrics_are_finite_and_complete(method: str, reference: dict[str, Result]) -> None:
    rows = reference[method].rounds.to_pylist()
    assert [row["round"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert 0 <= row["accuracy"] <= 1
        assert torch.isfinite(torch.tensor(row["train_loss"]))


@pytest.mark.parametrize("method", methods.names())
def test_same_seed_same_digest_and_another_seed_another(
    method: str, reference: dict[str, Result], tmp_path: Path
) -> None:
    assert simulate(method, tmp_path / "again").digest == reference[method].digest
    assert simulate(method, tmp_path / "other", seed=1).digest != reference[method].digest


@pytest.mark.ray
@pytest.mark.parametrize("actors", ["1", "3"])
@pytest.mark.parametrize("method", short_form(methods.names(), *KINDS))
def test_actors_give_the_digest_of_one_process(
    method: str, actors: str, reference: dict[str, Result], tmp_path: Path, cluster: None
) -> None:
    result = simulate(method, tmp_path / "ray", backend="ray", actors=actors)
    assert result.summary["actors"] == int(actors)
    assert result.digest == reference[method].digest


@pytest.mark.ray
@pytest.mark.parametrize("method", short_form(methods.names(), *KINDS))
def test_an_actor_for_each_client_gives_the_digest_of_one_process(
    method: str, reference: dict[str, Result], tmp_path: Path, cluster: None
) -> None:
    result = simulate(method, tmp_path / "ray", backend="ray", actors="clients", cpus=0.5)
    assert result.summary["actors"] == 7
    assert result.digest == reference[method].digest


@pytest.mark.ray
def test_fractional_gpus_and_pools_by_architecture_give_the_digest_of_one_process(
    reference: dict[str, Result], tmp_path: Path, cluster: None
) -> None:
    fleet = {"gpus": ["cnn4=0.25", "cnn5=0.5"]}
    result = simulate("fedre", tmp_path / "ray", backend="ray", fleet=fleet)
    assert result.digest == reference["fedre"].digest


@pytest.mark.parametrize("method", methods.names())
def test_evaluation_never_changes_training(
    method: str, reference: dict[str, Result], tmp_path: Path
) -> None:
    rare = simulate(method, tmp_path / "rare", eval={"every": 3, "clients": "cohort"})
    losses = [row["train_loss"] for row in rare.rounds.to_pylist()]
    assert losses == [row["train_loss"] for row in reference[method].rounds.to_pylist()]


@pytest.mark.parametrize("method", short_form(methods.names(), *KINDS))
def test_one_client_alone_works(method: str, tmp_path: Path) -> None:
    result = simulate(method, tmp_path / "one", clients=1, participation=1.0, rounds=2)
    assert 0 <= result.accuracy <= 1


@pytest.mark.parametrize("method", short_form(methods.names(), *KINDS))
def test_clients_with_one_class_and_less_than_a_batch_work(method: str, tmp_path: Path) -> None:
    lonely = {"partition": "pathological", "classes_per_client": 1, "samples": 40, "classes": 2}
    result = simulate(method, tmp_path / "lonely", rounds=2, data=lonely, train={"batch_size": 64})
    assert 0 <= result.accuracy <= 1


@pytest.mark.parametrize("method", short_form(methods.names(), *KINDS))
def test_clients_with_one_sample_work(method: str, tmp_path: Path) -> None:
    single = {"partition": "iid", "samples": 7, "classes": 2}
    result = simulate(method, tmp_path / "single", rounds=2, data=single, participation=1.0)
    assert result.summary["final"]["accuracy"] is None  # one sample each, so nothing to test on


@pytest.mark.parametrize("method", methods.names())
def test_the_ledger_counts_every_message(method: str, reference: dict[str, Result]) -> None:
    result = reference[method]
    rows = result.messages.to_pylist()
    for direction in ("up", "down"):
        for unit in ("scalars", "bytes"):
            total = sum(row[unit] for row in rows if row["direction"] == direction)
            assert total == result.summary[f"{unit}_{direction}"]
    assert all(row["bytes"] >= 4 * row["scalars"] for row in rows)
