"""SCAFFOLD, worked by hand: control variates under partial participation, of every optimizer."""

from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor
from torch.testing import assert_close

import zoo
from methods.scaffold import Client, Download, Scaffold, Server, Upload
from raysim import (
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
    wire,
)
from raysim.data import Dataset

TASK = Task(num_classes=2)
SMALL, LARGE = "slim_resnet10", "slim_resnet14"
NESTED = Fleet((SMALL, LARGE), 128)
POINTS = tiny.points([(2, 0), (0, 1), (0, 3)], [0, 1, 1], num_classes=2)
MODES: list[Any] = ["gradient", "update"]


def head(weight: tuple[float, float], bias: float) -> Weights:
    """A head of two classes whose second row is minus the first."""
    row, b = torch.tensor(weight, dtype=torch.float32), float(bias)
    return {"head.weight": torch.stack([row, -row]), "head.bias": torch.tensor([b, -b])}


def zeros() -> Weights:
    return head((0, 0), 0)


def newborn() -> Client:
    return Client(tiny.model(head=[[9, 9], [9, 9]]), control=None)


def trained(hp: Scaffold, client: Client, message: Download, rows: list[int], **train: Any) -> Any:
    return tiny.update(hp, client, message, tiny.client_context(POINTS, rows, lr=1.0, **train))


# Two rounds, the second with one of four clients


@pytest.mark.parametrize("correct", MODES)
def test_two_rounds_by_hand(correct: Any) -> None:
    """Four clients; models start at 0, and every round is one step of size 1 on all data. First
    rows of what is always antisymmetric, with the bias behind them:

    Round 1, clients 0 and 1; c = c_0 = c_1 = 0
      client 0, (2, 0) of class 0:          G_0 = (-1, 0 | -1/2),  y_0 = -G_0
      client 1, (0, 1), (0, 3) of class 1:  G_1 = ( 0, 1 |  1/2),  y_1 = -G_1
      x = (1/2, -1/2 | 0), c_0 = G_0, c_1 = G_1, c = (G_0 + G_1) / 4 = (-1/4, 1/4 | 0)

    Round 2, client 0 alone: z = (1, -1), s = 1 / (1 + e^2), G = (-2s, 0 | -s)
      c - c_0 = (3/4, 1/4 | 1/2)
      y_0 = x - (G + c - c_0) = (2s - 1/4, -3/4 | s - 1/2) = x afterwards
      c_0 = G, so dc = G - G_0 = (1 - 2s, 0 | 1/2 - s)
      c = c + dc / 4 = (-s/2, 1/4 | (1/2 - s) / 4)
    """
    hp, ctx = Scaffold(correct=correct), tiny.server_context(Fleet(("mlp",), 2), TASK, 4)
    server = Server(zeros(), {"mlp": list(zeros())}, zeros())
    clients = [newborn(), newborn()]
    message = hp.broadcast(server, [0, 1], ctx)
    assert isinstance(message, Download)
    replies = [
        Reply(k, len(rows), trained(hp, clients[k], message, rows))
        for k, rows in ((0, [0]), (1, [1, 2]))
    ]
    hp.server_update(server, replies, ctx)
    assert_close(server.weights, head((1 / 2, -1 / 2), 0))
    assert_close(server.control, head((-1 / 4, 1 / 4), 0))
    assert_close(clients[0].control, head((-1, 0), -1 / 2))
    assert_close(clients[1].control, head((0, 1), 1 / 2))

    message = hp.broadcast(server, [0], ctx)
    assert isinstance(message, Download)
    hp.server_update(server, [Reply(0, 1, trained(hp, clients[0], message, [0]))], ctx)
    s = 1 / (1 + exp(2))
    assert_close(server.weights, head((2 * s - 1 / 4, -3 / 4), s - 1 / 2))
    assert_close(clients[0].control, head((-2 * s, 0), -s))
    assert_close(clients[1].control, head((0, 1), 1 / 2))
    assert_close(server.control, head((-s / 2, 1 / 4), (1 / 2 - s) / 4))
    assert clients[0].control is not None
    assert clients[1].control is not None
    for name, c in server.control.items():
        assert_close(c, (clients[0].control[name] + clients[1].control[name]) / 4)


# Control variates of the optimizer that is used: two steps on (2, 0) of class 0, from 0


def two_steps(correct: Any, **train: Any) -> tuple[Weights, Weights]:
    """A newborn client's model and control variate; c = 0. Gradients, first rows and bias: at 0,
    G_1 = (-1, 0 | -1/2); then (-2s, 0 | -s) with s = 1 / (1 + e^(z_0 - z_1))."""
    client = newborn()
    upload = trained(Scaffold(correct=correct), client, Download(zeros(), zeros()), [0], **train)
    assert client.control is not None
    assert_close(upload.control, client.control)
    return upload.model, client.control


@pytest.mark.parametrize("correct", MODES)
def test_plain_sgd_is_the_papers_option_two(correct: Any) -> None:
    """y = -G_1, z = (5/2, -5/2): c = (x - y) / (2 * 1) = (G_1 + G_2) / 2."""
    s = 1 / (1 + exp(5))
    model, control = two_steps(correct, epochs=2)
    assert_close(model, head((1 + 2 * s, 0), 1 / 2 + s))
    assert_close(control, head((-1 / 2 - s, 0), -1 / 4 - s / 2))


def test_momentum_moves_weights_further_but_control_variates_stay_gradients() -> None:
    """v = G_1, then G_1 / 2 + G_2: y = -(3/2 G_1 + G_2), while c = (G_1 + G_2) / 2."""
    s = 1 / (1 + exp(5))
    model, control = two_steps("gradient", epochs=2, momentum=0.5)
    assert_close(model, head((3 / 2 + 2 * s, 0), 3 / 4 + s))
    assert_close(control, head((-1 / 2 - s, 0), -1 / 4 - s / 2))


def test_the_public_code_makes_momentum_part_of_its_control_variates() -> None:
    """c = (x - y) / 2 = (3/2 G_1 + G_2) / 2"""
    s = 1 / (1 + exp(5))
    _, control = two_steps("update", epochs=2, momentum=0.5)
    assert_close(control, head((-3 / 4 - s, 0), -3 / 8 - s / 2))


def test_weight_decay_is_part_of_the_gradient() -> None:
    """At y = -G_1, decay 1/4 adds -G_1 / 4 to G_2: y = -(3/4 G_1 + G_2), c = -y / 2."""
    s = 1 / (1 + exp(5))
    for correct in MODES:
        model, control = two_steps(correct, epochs=2, weight_decay=0.25)
        assert_close(model, head((3 / 4 + 2 * s, 0), 3 / 8 + s))
        assert_close(control, head((-3 / 8 - s, 0), -3 / 16 - s / 2))


def test_adam_takes_its_own_steps_while_control_variates_stay_gradients() -> None:
    """Its first step is the sign: y = (1, 0 | 1), z = (3, -3), s = 1 / (1 + e^6)."""
    s = 1 / (1 + exp(6))
    model, control = two_steps("gradient", epochs=2, optimizer="adam")
    assert_close(control, head((-1 / 2 - s, 0), -1 / 4 - s / 2))
    assert model["head.weight"][0, 0] > 1.2, "the second step went on"
    _, control = two_steps("update", epochs=1, optimizer="adam")
    assert_close(control, head((-1, 0), -1))


def test_a_clipped_step_is_shorter_and_the_gradient_is_what_it_was() -> None:
    """|G_1|^2 = 2 + 1/2; clipped to a tenth of its norm, y = -G_1 / 10, but c = G_1."""
    model, control = two_steps("gradient", clip=0.1 * 2.5**0.5)
    assert_close(model, head((0.1, 0), 0.05), rtol=1e-4, atol=1e-6)
    assert_close(control, head((-1, 0), -1 / 2))


@pytest.mark.parametrize("train", [{}, {"weight_decay": 0.3}])
def test_both_ways_to_correct_are_one_for_plain_sgd(train: dict[str, float]) -> None:
    """Several steps, with c and c_k that are not 0."""
    torch.manual_seed(0)
    c, c_k, x = ({k: torch.randn_like(t) for k, t in zeros().items()} for _ in range(3))
    found = []
    for correct in MODES:
        client = Client(tiny.model(head=[[9, 9], [9, 9]]), control=dict(c_k))
        ctx = tiny.client_context(POINTS, lr=0.1, epochs=3, batch_size=2, shuffle=False, **train)
        upload = tiny.update(Scaffold(correct=correct), client, Download(x, c), ctx)
        found.append((upload.model, upload.control, client.control))
    assert_close(found[0], found[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("correct", MODES)
def test_the_correction_is_in_every_step(correct: Any) -> None:
    """c - c_k = (8, 0 | 0) at lr 1/8 makes x = 0 leave by -1 in each of 2 steps; the data, (0, 1)
    of class 1, have no gradient in the first column."""
    client = Client(tiny.model(head=[[9, 9], [9, 9]]), control=zeros())
    ctx = tiny.client_context(POINTS, [1], lr=1 / 8, epochs=2)
    message = Download(zeros(), head((8, 0), 0))
    upload = tiny.update(Scaffold(correct=correct), client, message, ctx)
    assert_close(upload.model["head.weight"][:, 0], torch.tensor([-2.0, 2.0]))
    assert client.control is not None
    assert_close(client.control["head.weight"][:, 0], torch.zeros(2))


# The server, over nested models


def constant(model: str, value: float, control: float, counter: int) -> Upload:
    weights = {
        k: torch.full_like(t, value if t.is_floating_point() else counter)
        for k, t in get_weights(zoo.build(model, TASK, 128)).items()
    }
    names = dict(zoo.build(model, TASK, 128).named_parameters())
    return Upload(weights, {k: torch.full_like(t, control) for k, t in names.items()})


def distinct(weights: Weights, shared: bool, statistics: bool | None = None) -> set[float]:
    """The different values in the layers that both models have, or that the larger one has."""
    small = get_weights(zoo.build(SMALL, TASK, 128))
    chosen: list[Tensor] = [
        tensor.flatten()
        for name, tensor in weights.items()
        if (name in small) == shared
        and tensor.is_floating_point()
        and statistics in (None, "running" in name)
    ]
    return set(torch.cat(chosen).tolist())


@pytest.mark.parametrize(
    ("hp", "shared", "own", "statistics"),
    [
        (Scaffold(), 2.5, 4, 2.5),
        (Scaffold(weighting="samples"), 3.25, 4, 3.25),
        (Scaffold(server_lr=2), 6, 9, 2.5),
    ],
)
def test_layers_are_averaged_over_those_who_have_them_and_control_over_all_who_could(
    hp: Scaffold, shared: float, own: float, statistics: float
) -> None:
    """Five clients, 0, 2 and 4 small, 1 and 3 large; everything is -1, and c is 1. Client 0 sends 1
    (1 sample) and dc = 5; client 1 sends 4 (3 samples) and dc = 10.

    x: shared (1 + 4) / 2, or (1 + 12) / 4 by samples, or -1 + 2 * 3.5 at eta_g = 2; own 4, or
       -1 + 2 * 5. Statistics take no step of their own: 2.5 and 4 at eta_g = 2 too.
    c: shared 1 + (5 + 10) / 5 = 4, own 1 + 10 / 2 = 6
    """
    ctx = tiny.server_context(NESTED, TASK, num_clients=5)
    server = hp.init_server(ctx)
    assert {float(t.abs().sum()) for t in server.control.values()} == {0}
    assert set(server.control) == set(dict(zoo.build(LARGE, TASK, 128).named_parameters()))
    server.weights = {name: torch.full_like(t, -1) for name, t in server.weights.items()}
    server.control = {name: torch.full_like(t, 1) for name, t in server.control.items()}
    replies = [Reply(0, 1, constant(SMALL, 1, 5, 70)), Reply(1, 3, constant(LARGE, 4, 10, 80))]
    hp.server_update(server, replies, ctx)
    assert distinct(server.weights, True, False) == {shared}
    assert distinct(server.weights, False, False) == {own}
    assert distinct(server.weights, True, True) == {statistics}
    assert distinct(server.weights, False, True) == {4}
    assert distinct(server.control, True) == {4}
    assert distinct(server.control, False) == {6}
    counters = [int(t) for k, t in server.weights.items() if k.endswith("num_batches_tracked")]
    assert set(counters) == {70, 80}


def test_what_only_absent_clients_have_stays() -> None:
    ctx = tiny.server_context(NESTED, TASK, num_clients=4)
    server = Scaffold().init_server(ctx)
    before = {name: tensor.clone() for name, tensor in server.weights.items()}
    Scaffold().server_update(server, [Reply(0, 1, constant(SMALL, 1, 8, 7))], ctx)
    assert distinct(server.control, True) == {2}
    assert distinct(server.control, False) == {0}
    own = before.keys() - get_weights(zoo.build(SMALL, TASK, 128)).keys()
    assert all(torch.equal(server.weights[name], before[name]) for name in own)


# What is sent


def test_a_round_sends_twice_the_parameters_both_ways(tmp_path: Path) -> None:
    """A real run of two nested models with batch norm: the statistics are beside the count."""
    images = np.random.default_rng(0).integers(0, 256, (8, 3, 16, 16), dtype=np.uint8)
    data = Dataset("noise", images, np.arange(8) % 2, 8, 2, mean=(0.5,) * 3, std=(0.5,) * 3)
    config = Config(
        method="scaffold", clients=2, participation=1.0, rounds=2, out=tmp_path,
        fleet=FleetConfig((SMALL, LARGE)),
    )  # fmt: skip
    run = tiny.simulate(config, data, tiny.deal([0, 1, 2], [3, 4, 5, 6, 7]))
    for client, name in enumerate((SMALL, LARGE)):
        size = zoo.parameter_count(name, data.task)
        for number in (1, 2):
            for direction in ("down", "up"):
                assert run.count("scalars", number, direction, client=client) == 2 * size
        control = run.states[client]["control"]
        assert set(control) == set(dict(zoo.build(name, data.task).named_parameters()))
        assert any(tensor.abs().max() > 0 for tensor in control.values())


def test_fedin_counts_24_56_million_in_its_table_2() -> None:
    """The mean over its five ResNets, 1 channel, as the ledger measures a message: 24.5635 M."""
    fleet = Fleet(zoo.expand(("resnet",)), 512)
    ctx = tiny.server_context(fleet, Task(num_classes=10, channels=1, image_size=32), 5)
    hp = Scaffold()
    message = hp.broadcast(hp.init_server(ctx), range(5), ctx)
    assert isinstance(message, PerClient)
    sent = [sum(s.scalars for s in wire.measure(message[k], "message")) for k in range(5)]
    assert round(sum(sent) / 5) == 24_563_502


# What is refused


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_server_that_does_not_step_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match=r"--hp\.server-lr must be above 0.*--hp\.server-lr 1"):
        method.check(Scaffold(server_lr=rate), Fleet(("mlp",), 2), TASK, "scaffold")


def test_models_that_are_not_nested_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="scaffold averages whole models"):
        method.check(Scaffold(), Fleet(("cnn1", "cnn2"), 512), TASK, "scaffold")
