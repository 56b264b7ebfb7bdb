"""FedAvg's average, worked by hand: of one architecture, and of nested ones."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor
from torch.testing import assert_close

import zoo
from methods.fedavg import Download, FedAvg, Upload
from raysim import (
    ClientState,
    Config,
    ConfigError,
    Fleet,
    FleetConfig,
    PerClient,
    Reply,
    Task,
    Weights,
    get_weights,
    method,
)
from raysim.data import Dataset
from raysim.nested import Union
from zoo import SplitModel

TASK = Task(num_classes=2)
SMALL, LARGE = "slim_resnet10", "slim_resnet14"
NESTED = Fleet((SMALL, LARGE), 128)


def weights_of(name: str) -> Weights:
    return get_weights(zoo.build(name, TASK, 128))


# Two clients of one architecture


@pytest.mark.parametrize(
    ("weighting", "weight", "bias"),
    [
        ("samples", [[1 / 3, -2 / 3], [-1 / 3, 2 / 3]], [-1 / 6, 1 / 6]),
        ("uniform", [[1 / 2, -1 / 2], [-1 / 2, 1 / 2]], [0.0, 0.0]),
    ],
)
def test_round_of_two_clients_by_hand(
    weighting: Any, weight: list[list[float]], bias: list[float]
) -> None:
    """A linear model that starts at 0, so softmax = (1/2, 1/2); one step of size 1 on all data.

    Client 0, one sample:    (2, 0) of class 0;            dz = (-1/2, 1/2)
      W_0 = -dz x^T         = [[1, 0], [-1, 0]],           b_0 = (1/2, -1/2)
    Client 1, two samples:   (0, 1), (0, 3) of class 1;    dz = (1/2, -1/2), mean x = (0, 2)
      W_1 = -dz (0, 2)^T    = [[0, -1], [0, 1]],           b_1 = (-1/2, 1/2)

    by samples:  W = 1/3 W_0 + 2/3 W_1 = [[1/3, -2/3], [-1/3, 2/3]],  b = (1/6 - 2/6, ...)
    uniform:     W = 1/2 W_0 + 1/2 W_1 = [[1/2, -1/2], [-1/2, 1/2]],  b = (0, 0)
    """
    hp = FedAvg(weighting=weighting)
    data = tiny.points([(2, 0), (0, 1), (0, 3)], [0, 1, 1], num_classes=2)
    start = {"head.weight": torch.zeros(2, 2), "head.bias": torch.zeros(2)}
    fleet = Fleet(("mlp",), 2)
    server = Union(start, {"mlp": list(start)})
    ctx = tiny.server_context(fleet, data.task)
    message = hp.broadcast(server, [0, 1], ctx)
    replies = []
    for client_id, rows in enumerate([[0], [1, 2]]):
        client = ClientState(tiny.model(head=[[9, 9], [9, 9]]))  # its own start is overwritten
        context = tiny.client_context(data, rows, lr=1.0)
        upload = tiny.update(hp, client, message, context)
        replies.append(Reply(client_id, context.num_samples, upload))
    hp.server_update(server, replies, ctx)
    assert_close(server.weights["head.weight"], torch.tensor(weight))
    assert_close(server.weights["head.bias"], torch.tensor(bias))


def test_average_of_one_client_is_that_client() -> None:
    upload = {"w": torch.tensor([0.1, 0.2, 0.3])}
    server = Union({"w": torch.zeros(3)}, {"mlp": ["w"]})
    ctx = tiny.server_context(Fleet(("mlp",), 2), TASK)
    FedAvg().server_update(server, [Reply(4, 17, Upload(upload))], ctx)
    assert torch.equal(server.weights["w"], upload["w"])


def test_mean_is_over_tensors_of_all_shapes() -> None:
    """Scalars, vectors and kernels: (1 * 1 + 3 * 5) / 4 = 4 everywhere."""
    shapes: list[tuple[int, ...]] = [(), (3,), (2, 3, 5, 5)]

    def upload(value: float) -> Upload:
        return Upload({str(shape): torch.full(shape, value) for shape in shapes})

    server = Union(dict(upload(0.0).model), {"mlp": [str(shape) for shape in shapes]})
    ctx = tiny.server_context(Fleet(("mlp",), 2), TASK)
    FedAvg().server_update(server, [Reply(0, 1, upload(1.0)), Reply(1, 3, upload(5.0))], ctx)
    found: dict[str, Tensor] = server.weights
    assert {key: tensor.unique().tolist() for key, tensor in found.items()} == {
        str(shape): [4.0] for shape in shapes
    }


# Nested architectures


def constant(name: str, value: float, counter: int) -> Upload:
    """An upload whose every weight is `value`, and whose batch-norm counters are `counter`."""
    return Upload(
        {
            layer: torch.full_like(t, value if t.is_floating_point() else counter)
            for layer, t in weights_of(name).items()
        }
    )


def nested_server() -> Union:
    """As the server is at the start, but with every weight -1."""
    server = FedAvg().init_server(tiny.server_context(NESTED, TASK))
    server.weights = {layer: torch.full_like(t, -1) for layer, t in server.weights.items()}
    return server


def values(server: Union) -> tuple[set[float], set[float], set[int], set[int]]:
    """The different values in the layers both models have, and in those of the larger one only:
    weights, weights, counters, counters."""
    small = weights_of(SMALL)

    def distinct(shared: bool, floats: bool) -> set[Any]:
        chosen = [
            tensor.flatten()
            for layer, tensor in server.weights.items()
            if (layer in small) == shared and tensor.is_floating_point() == floats
        ]
        return set(torch.cat(chosen).tolist())

    return (
        distinct(True, True),
        distinct(False, True),
        distinct(True, False),
        distinct(False, False),
    )


@pytest.mark.parametrize(
    ("weighting", "shared", "own"), [("samples", 4.75, 6.0), ("uniform", 5.0, 7.0)]
)
def test_layers_are_averaged_over_those_who_have_them(
    weighting: Any, shared: float, own: float
) -> None:
    """The small model sends 1 (1 sample), two large ones 4 (2 samples) and 10 (1 sample).

    by samples:  shared (1 * 1 + 2 * 4 + 1 * 10) / 4 = 4.75, the large ones' own (8 + 10) / 3 = 6
    uniform:     shared (1 + 4 + 10) / 3 = 5,                the large ones' own (4 + 10) / 2 = 7

    Counters are no numbers to average: 70 from the first that has a layer, 80 in the others' own.
    """
    server = nested_server()
    replies = [
        Reply(0, 1, constant(SMALL, 1.0, 70)),
        Reply(1, 2, constant(LARGE, 4.0, 80)),
        Reply(3, 1, constant(LARGE, 10.0, 90)),
    ]
    ctx = tiny.server_context(NESTED, TASK)
    FedAvg(weighting=weighting).server_update(server, replies, ctx)
    found = values(server)
    assert [sorted(each) for each in found] == [
        [pytest.approx(shared)],
        [pytest.approx(own)],
        [70],
        [80],
    ]
    counters = [t for t in server.weights.values() if not t.is_floating_point()]
    assert {t.dtype for t in counters} == {torch.int64}


def test_layers_of_one_client_only_are_that_clients() -> None:
    server = nested_server()
    replies = [Reply(0, 3, constant(SMALL, 2.0, 7)), Reply(1, 1, constant(LARGE, 6.0, 8))]
    FedAvg().server_update(server, replies, tiny.server_context(NESTED, TASK))
    assert values(server) == ({3.0}, {6.0}, {7}, {8})


def test_layers_nobody_has_keep_their_values() -> None:
    server = nested_server()
    replies = [Reply(0, 3, constant(SMALL, 2.0, 7))]
    FedAvg().server_update(server, replies, tiny.server_context(NESTED, TASK))
    assert values(server) == ({2.0}, {-1.0}, {7}, {-1})


def test_server_starts_with_the_layers_of_all_models() -> None:
    server = FedAvg().init_server(tiny.server_context(NESTED, TASK))
    assert set(server.weights) == set(weights_of(LARGE))
    assert set(weights_of(SMALL)) < set(server.weights)


def test_each_client_receives_exactly_its_own_layers() -> None:
    """With their values at the server, such that the client's own model takes them."""
    hp, ctx = FedAvg(), tiny.server_context(NESTED, TASK, num_clients=4)
    server = hp.init_server(ctx)
    message = hp.broadcast(server, [1, 2, 3], ctx)
    assert isinstance(message, PerClient)
    assert sorted(message) == [1, 2, 3]
    for client_id, download in message.items():
        model: SplitModel = zoo.build(NESTED.model_of(client_id), TASK, 128)
        assert list(download.model) == list(get_weights(model))
        none: Any = None
        hp.receive(ClientState(model), download, none)
        for layer, tensor in get_weights(model).items():
            assert torch.equal(tensor, server.weights[layer])


def test_clients_of_one_architecture_get_one_message() -> None:
    ctx = tiny.server_context(Fleet(("mlp", "mlp"), 2), Task(2, channels=2, image_size=1))
    server = FedAvg().init_server(ctx)
    assert isinstance(FedAvg().broadcast(server, [0, 1], ctx), Download)


def noise(num_samples: int) -> Dataset:
    images = np.random.RandomState(0).randint(0, 256, (num_samples, 3, 16, 16), np.uint8)
    labels = np.arange(num_samples) % 2
    return Dataset("noise", images, labels, num_samples, 2, mean=(0.5,) * 3, std=(0.5,) * 3)


def test_nested_clients_pay_for_their_own_layers_only(tmp_path: Path) -> None:
    """A real round of two nested models: down and up, each is charged its own parameters."""
    data = noise(8)
    config = Config(
        method="fedavg", clients=2, participation=1.0, rounds=1, out=tmp_path,
        fleet=FleetConfig((SMALL, LARGE)),
    )  # fmt: skip
    run = tiny.simulate(config, data, tiny.deal([0, 1, 2], [3, 4, 5, 6, 7]))
    for client_id, name in enumerate((SMALL, LARGE)):
        size = zoo.parameter_count(name, data.task)
        assert run.count("scalars", 1, "down", client=client_id) == size
        assert run.count("scalars", 1, "up", client=client_id) == size
        model = run.states[client_id]["model"]
        assert list(model) == list(weights_of(name))
        counters = [t for layer, t in model.items() if layer.endswith("num_batches_tracked")]
        assert {int(t) for t in counters} == {1}, "one batch was seen"


# What is refused


def check(*models: str, feature_dim: int = 128) -> None:
    method.check(FedAvg(), Fleet(zoo.expand(models), feature_dim), TASK, "fedavg")


def test_mixed_fleet_is_refused_before_the_run_with_a_way_out(tmp_path: Path) -> None:
    config = Config(
        method="fedavg", clients=2, participation=1.0, out=tmp_path / "run",
        fleet=FleetConfig(("cnn",)),
    )  # fmt: skip
    message = r"names cnn1 and cnn2, which are not. Try --fleet\.models cnn1"
    with pytest.raises(ConfigError, match=message):
        tiny.simulate(config, noise(2), tiny.deal([0], [1]))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("models", [("cnn3",), ("cnn3", "cnn3"), ("resnet",), ("slim_resnet",)])
def test_equal_and_nested_models_are_accepted(models: tuple[str, ...]) -> None:
    check(*models)


def test_models_of_the_same_layers_but_other_widths_are_refused() -> None:
    with pytest.raises(ConfigError, match="resnet10 and slim_resnet10"):
        check("resnet10", "slim_resnet10")


def test_models_that_have_nothing_but_a_head_in_common_are_refused() -> None:
    """No layer of theirs has one name and two shapes, yet neither is a part of the other: averaging
    their heads alone would be another method under FedAvg's name."""
    with pytest.raises(ConfigError, match="must be the same or nested"):
        check("mlp", "resnet10")
