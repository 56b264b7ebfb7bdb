"""FedNova, worked by hand: how far an optimizer goes, and what the server makes of it."""

from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch.testing import assert_close

import zoo
from methods.fedavg import FedAvg
from methods.fednova import Download, FedNova, Upload
from raysim import (
    ClientState,
    Config,
    ConfigError,
    Fleet,
    FleetConfig,
    Reply,
    Task,
    TrainConfig,
    Weights,
    get_weights,
    method,
    wire,
)
from raysim.data import Dataset
from raysim.nested import Union

TASK = Task(num_classes=2)
SMALL, LARGE = "slim_resnet10", "slim_resnet14"
NESTED = Fleet((SMALL, LARGE), 128)
POINTS = tiny.points([(2, 0), (0, 1), (0, 3)], [0, 1, 1], num_classes=2)


def head(weight: tuple[float, float], bias: float) -> Weights:
    """A head of two classes whose second row is minus the first."""
    row, b = torch.tensor(weight, dtype=torch.float32), float(bias)
    return {"head.weight": torch.stack([row, -row]), "head.bias": torch.tensor([b, -b])}


def trained(hp: FedNova, rows: list[int], **train: Any) -> Upload:
    """What a client sends that starts at 0 and takes steps of size 1."""
    client = ClientState(tiny.model(head=[[9, 9], [9, 9]]))
    ctx = tiny.client_context(POINTS, rows, lr=1.0, shuffle=False, **train)
    upload: Upload = tiny.update(hp, client, Download(head((0, 0), 0)), ctx)
    return upload


# How far tau steps go: the paper's ||a||_1


@pytest.mark.parametrize(
    ("steps", "train", "mu", "distance"),
    [
        (0, {}, 0, 0),
        (1, {}, 0, 1),
        (7, {}, 0, 7),
        (7, {"weight_decay": 0.5, "lr": 0.3, "clip": 1.0}, 0, 7),
        # 1 + (1 + 1/2) = 5/2; (2 - 1/2 * 3/4 / (1/2)) / (1/2) by the paper's formula
        (2, {"momentum": 0.5}, 0, 5 / 2),
        # 1 + 3/2 + 7/4
        (3, {"momentum": 0.5}, 0, 17 / 4),
        # 1, then 4/5 * 1 + 1, then 4/5 * 9/5 + 1
        (3, {"lr": 0.1}, 2, 61 / 25),
        # v = 1, gone 1; v = 1/2 + 1 - 1/5 = 13/10, gone 23/10; v = 13/20 + 1 - 23/50 = 119/100
        (3, {"lr": 0.1, "momentum": 0.5}, 2, 3.49),
        # Adam's steps are counted, whatever else is set
        (7, {"optimizer": "adam", "momentum": 0.5}, 2, 7),
    ],
)
def test_distance_by_hand(steps: int, train: Any, mu: float, distance: float) -> None:
    found = FedNova(mu=mu).distance(steps, TrainConfig(**train))
    assert found == pytest.approx(distance, abs=1e-12)


@pytest.mark.parametrize("tau", [1, 5, 40])
@pytest.mark.parametrize("rho", [0.1, 0.9, 0.99])
def test_momentum_has_the_closed_form_of_the_paper(tau: int, rho: float) -> None:
    closed = (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
    assert FedNova().distance(tau, TrainConfig(momentum=rho)) == pytest.approx(closed)


@pytest.mark.parametrize("mu", [0.0, 0.7])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_under_a_constant_gradient_the_direction_is_one_step_of_it(
    mu: float, momentum: float
) -> None:
    """What normalization is for: d = lr * gradient, however many steps. The loss 3 z_0 - z_1 is
    linear in the weights; x = (2, 0), lr = 1/4, so d = 1/4 * (6, 0 | 3) and 1/4 * (-2, 0 | -1)."""
    model = tiny.model(head=[[0, 0], [0, 0]])
    ctx = tiny.client_context(POINTS, [0], lr=0.25, epochs=5, momentum=momentum)
    hp = FedNova(mu=mu)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "methods.fednova.F.cross_entropy", lambda z, y: (z * torch.tensor([3.0, -1.0])).sum()
        )
        upload = tiny.update(hp, ClientState(model), Download(head((0, 0), 0)), ctx)
    assert_close(upload.direction["head.weight"], torch.tensor([[1.5, 0.0], [-0.5, 0.0]]))
    assert_close(upload.direction["head.bias"], torch.tensor([0.75, -0.25]))


# A client: two steps on (2, 0) of class 0 from 0. G_1 = (-1, 0 | -1/2), first rows and bias; then
# z = (5/2, -5/2), s = 1 / (1 + e^5), G_2 = (-2s, 0 | -s)


S = 1 / (1 + exp(5))


def test_plain_sgd_sends_its_mean_gradient() -> None:
    upload = trained(FedNova(), [0], epochs=2)
    assert upload.distance == 2
    assert_close(upload.direction, head((-(1 + 2 * S) / 2, 0), -(1 / 2 + S) / 2))
    assert upload.statistics == {}


def test_momentum_sends_the_weighted_mean_of_its_gradients() -> None:
    """x - y = G_1 + (G_1 / 2 + G_2), over 5/2"""
    upload = trained(FedNova(), [0], epochs=2, momentum=0.5)
    assert upload.distance == 2.5
    assert_close(upload.direction, head((-(3 / 2 + 2 * S) / 2.5, 0), -(3 / 4 + S) / 2.5))


def test_the_proximal_term_is_in_steps_and_distance() -> None:
    """mu = 1/2, so step 2 has G_2 + (y - x) / 2 with y - x = -G_1: x - y = G_1 / 2 + G_2, over
    1/2 * 1 + 1."""
    upload = trained(FedNova(mu=0.5), [0], epochs=2)
    assert upload.distance == 1.5
    assert_close(upload.direction, head((-(1 / 2 + 2 * S) / 1.5, 0), -(1 / 4 + S) / 1.5))


def test_steps_are_batches_that_were_trained_on() -> None:
    """Three samples by twos, with and without the last batch (of one, which is left out)."""
    assert trained(FedNova(), [0, 1, 2], batch_size=2, epochs=2).distance == 2
    assert trained(FedNova(), [0, 1, 2], batch_size=1, epochs=2).distance == 6
    assert trained(FedNova(), [0], batch_size=64).distance == 1


def test_statistics_go_beside_the_direction() -> None:
    model = tiny.moody_model(pixels=2, width=3, num_classes=2)
    start = {name: tensor.clone() for name, tensor in get_weights(model).items()}
    upload = tiny.update(
        FedNova(), ClientState(model), Download(start), tiny.client_context(POINTS, epochs=2)
    )
    assert set(upload.direction) == set(dict(model.named_parameters()))
    assert set(upload.statistics) == set(dict(model.named_buffers()))
    assert_close(upload.statistics, dict(model.named_buffers()))
    assert int(upload.statistics["trunk.1.num_batches_tracked"]) == 2


# The server


def test_a_round_of_clients_with_different_numbers_of_steps_by_hand() -> None:
    """From 0, batches of 1, steps of size 1. Client 0 has (2, 0) of class 0, client 1 has (0, 1)
    and (0, 3) of class 1; n = 1 and 2.

    client 0: 1 step,  d_0 = G_0 = (-1, 0 | -1/2)
    client 1: 2 steps, (0, 1): (0, 1/2 | 1/2); then y = (0, -1/2 | -1/2), and for (0, 3)
              z = (-2, 2), t = 1 / (1 + e^4): (0, 3t | t); d_1 = (0, 1/4 + 3t/2 | 1/4 + t/2)
    distance: 1/3 * 1 + 2/3 * 2 = 5/3
    x = -5/3 (1/3 d_0 + 2/3 d_1)
    """
    hp, ctx = FedNova(), tiny.server_context(Fleet(("mlp",), 2), TASK)
    server = Union(head((0, 0), 0), {"mlp": ["head.weight", "head.bias"]})
    uploads = [trained(hp, rows, batch_size=1) for rows in ([0], [1, 2])]
    assert [upload.distance for upload in uploads] == [1, 2]
    hp.server_update(server, [Reply(0, 1, uploads[0]), Reply(1, 2, uploads[1])], ctx)
    t = 1 / (1 + exp(4))
    x = (5 / 9, -10 / 9 * (1 / 4 + 3 * t / 2))
    b = -5 / 3 * (1 / 3 * -1 / 2 + 2 / 3 * (1 / 4 + t / 2))
    assert_close(server.weights, head(x, b))


@pytest.mark.parametrize("train", [{}, {"momentum": 0.9}, {"optimizer": "adam"}])
def test_clients_of_equal_steps_are_averaged_as_by_fedavg(train: Any) -> None:
    ctx = tiny.server_context(Fleet(("mlp",), 2), TASK)
    averaged: list[Weights] = []
    for hp in (FedNova(), FedAvg()):
        server = Union(head((0, 0), 0), {"mlp": ["head.weight", "head.bias"]})
        sent = [trained(hp, rows, epochs=3, **train) for rows in ([0], [1, 2])]  # type: ignore[arg-type]
        hp.server_update(server, [Reply(0, 1, sent[0]), Reply(1, 2, sent[1])], ctx)  # type: ignore[arg-type]
        averaged.append(server.weights)
    assert_close(averaged[0], averaged[1])


def constant(model: str, direction: float, statistic: float, counter: int, a: float) -> Upload:
    weights = get_weights(zoo.build(model, TASK, 128))
    names = dict(zoo.build(model, TASK, 128).named_parameters())
    statistics = {
        k: torch.full_like(t, statistic if t.is_floating_point() else counter)
        for k, t in weights.items()
        if k not in names
    }
    return Upload({k: torch.full_like(weights[k], direction) for k in names}, statistics, a)


@pytest.mark.parametrize(
    ("weighting", "shared", "statistics"), [("samples", -9.75, 17.5), ("uniform", -7.0, 15.0)]
)
def test_every_layer_is_normalized_over_those_who_have_it(
    weighting: Any, shared: float, statistics: float
) -> None:
    """Everything is -1. The small model sends d = 1, a = 2 (1 sample), the large one d = 3, a = 4
    (3 samples).

    shared, by samples: -1 - (2 + 12) / 4 * (1 + 9) / 4 = -9.75; equally: -1 - 3 * 2 = -7
    the large one's own: -1 - 4 * 3 = -13
    statistics 10 and 20: (10 + 60) / 4 or 15, and 20; counters from the first who has them
    """
    ctx = tiny.server_context(NESTED, TASK)
    server = FedNova().init_server(ctx)
    server.weights = {name: torch.full_like(t, -1) for name, t in server.weights.items()}
    replies = [Reply(0, 1, constant(SMALL, 1, 10, 7, 2)), Reply(1, 3, constant(LARGE, 3, 20, 8, 4))]
    FedNova(weighting=weighting).server_update(server, replies, ctx)
    for name, tensor in server.weights.items():
        small = name in server.layers[SMALL]
        if name.endswith("num_batches_tracked"):
            expected = 7.0 if small else 8.0
        elif "running" in name:
            expected = statistics if small else 20
        else:
            expected = shared if small else -13
        assert tensor.unique().tolist() == [expected], name


def test_layers_nobody_has_keep_their_values() -> None:
    ctx = tiny.server_context(NESTED, TASK)
    server = FedNova().init_server(ctx)
    before = {name: tensor.clone() for name, tensor in server.weights.items()}
    FedNova().server_update(server, [Reply(0, 5, constant(SMALL, 1, 10, 7, 2))], ctx)
    for name, tensor in server.weights.items():
        assert torch.equal(tensor, before[name]) == (name not in server.layers[SMALL]), name


def test_a_client_that_took_no_step_says_so_and_pulls_at_its_share() -> None:
    """d = 0 and a = 0 of one sample beside d = 3 and a = 4 of one: x - 2 * 3/2."""
    server = Union({"w": torch.zeros(1)}, {"mlp": ["w"]})
    ctx = tiny.server_context(Fleet(("mlp",), 2), TASK)
    still, moved = Upload({"w": torch.zeros(1)}, {}, 0.0), Upload({"w": torch.tensor([3.0])}, {}, 4)
    FedNova().server_update(server, [Reply(0, 1, still), Reply(1, 1, moved)], ctx)
    assert server.weights["w"].item() == -3


def test_one_number_goes_up_beside_the_parameters(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (8, 3, 16, 16), dtype=np.uint8)
    data = Dataset("noise", images, np.arange(8) % 2, 8, 2, mean=(0.5,) * 3, std=(0.5,) * 3)
    config = Config(
        method="fednova", clients=2, participation=1.0, rounds=1, out=tmp_path,
        fleet=FleetConfig((SMALL, LARGE)),
    )  # fmt: skip
    run = tiny.simulate(config, data, tiny.deal([0, 1, 2], [3, 4, 5, 6, 7]))
    for client, name in enumerate((SMALL, LARGE)):
        size = zoo.parameter_count(name, data.task)
        assert run.count("scalars", 1, "down", client=client) == size
        assert run.count("scalars", 1, "up", client=client) == size + 1
        assert run.count("scalars", 1, "up", client=client, field="statistics") == 0


def test_a_payload_without_its_distance_is_not_expected() -> None:
    hp, ctx = FedNova(), tiny.server_context(NESTED, TASK)
    good = constant(SMALL, 1, 10, 7, 2.0)
    wire.check_like(good, hp.expected(0, ctx), "payload")
    with pytest.raises(wire.WireError, match="distance"):
        wire.check_like(good._replace(distance=None), hp.expected(0, ctx), "payload")


# What is refused


@pytest.mark.parametrize("mu", [-0.1, float("nan")])
def test_a_mu_that_pushes_away_is_refused(mu: float) -> None:
    with pytest.raises(ConfigError, match=r"--hp\.mu must be 0 or more, got .* Try --hp\.mu 0"):
        method.check(FedNova(mu=mu), Fleet(("mlp",), 2), TASK, "fednova")


def test_a_mu_that_overshoots_at_this_learning_rate_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--hp\.mu must be below 1 / --train\.lr = 4, got 5"):
        FedNova(mu=5).distance(1, TrainConfig(lr=0.25))


def test_models_that_are_not_nested_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="fednova averages whole models"):
        method.check(FedNova(), Fleet(("cnn1", "cnn2"), 512), TASK, "fednova")
