"""FedRolex's windows and its round, worked by hand."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from small_zoo import zoo_of
from torch.testing import assert_close

from methods.fedrolex import FedRolex
from raysim import (
    ClientContext,
    Config,
    ConfigError,
    Fleet,
    FleetConfig,
    Reply,
    ServerContext,
    Task,
    TrainConfig,
    method,
    wire,
)
from raysim.data import Dataset
from raysim.submodels import Server, Upload

FLEET = Fleet(("tiny",), 3)
TASK = Task(2, channels=2, image_size=1)
W = [[1, 2], [3, 4], [5, 6]]


@pytest.fixture
def hand_model() -> Iterator[None]:
    """x -> W x, three channels -> V W x + b with V and b zero."""
    with zoo_of(lambda task: tiny.model(head=[[0, 0, 0], [0, 0, 0]], features=W)):
        yield


def at(round: int, fleet: Fleet = FLEET, task: Task = TASK) -> ServerContext:
    return replace(tiny.server_context(fleet, task), round=round)


def channels(hp: FedRolex, rate: float, round: int, width: int) -> list[int]:
    """Which of `width` channels are in the window of a round: here, those of a layer of slim_resnet
    that has as many."""
    part = hp.part(rate, at(round, Fleet(("slim_resnet10",), 128), Task(2)))
    name = {16: "stem.1.bias", 32: "trunk.1.0.bn1.bias"}[width]
    return [start + i for start, length in part[name][0] for i in range(length)]


# Windows


@pytest.mark.parametrize(
    ("hp", "round", "window"),
    [
        # m = 4 of n = 16, by one channel a round
        ({}, 1, [0, 1, 2, 3]),
        ({}, 2, [1, 2, 3, 4]),
        ({}, 14, [13, 14, 15, 0]),
        ({}, 16, [15, 0, 1, 2]),
        ({}, 17, [0, 1, 2, 3]),
        # the public code's roll
        ({"backwards": True}, 1, [0, 1, 2, 3]),
        ({"backwards": True}, 2, [15, 0, 1, 2]),
        # by int(4 (1 - 1/2)) + 1 = 3, by 4 + 1 = 5, by 0 + 1
        ({"overlap": 0.5}, 2, [3, 4, 5, 6]),
        ({"overlap": 0.5}, 6, [15, 0, 1, 2]),
        ({"overlap": 0.0}, 2, [5, 6, 7, 8]),
        ({"overlap": 1.0}, 2, [1, 2, 3, 4]),
    ],
)
def test_window_of_a_round_by_hand(hp: Any, round: int, window: list[int]) -> None:
    assert channels(FedRolex(**hp), 0.25, round, 16) == window


def test_windows_of_wider_layers_come_round_later() -> None:
    assert channels(FedRolex(), 0.125, 18, 16) == [1, 2]
    assert channels(FedRolex(), 0.125, 18, 32) == [17, 18, 19, 20]


def test_a_client_of_rate_one_has_all_channels_in_order() -> None:
    assert channels(FedRolex(), 1.0, 9, 16) == list(range(16))


def test_all_channels_get_their_turn() -> None:
    """16 rounds of 4 channels: each 4 times."""
    seen = [c for t in range(1, 17) for c in channels(FedRolex(), 0.25, t, 16)]
    assert sorted(seen) == sorted([*range(16)] * 4)


# A round


def data() -> Dataset:
    return tiny.points([(1, 0), (1, 0)], [0, 1], num_classes=2)


def context(client: int) -> ClientContext:
    ctx = tiny.client_context(data(), lr=1.0, clip=100.0)
    return replace(ctx, client_id=client, fleet=FLEET)


def play(hp: FedRolex, server: Server, round: int, clients: list[int]) -> list[Upload]:
    ctx = at(round)
    message = hp.broadcast(server, clients, ctx)
    replies = []
    for k in clients:
        client = hp.init_client(context(k).build_model(), context(k))
        upload = tiny.update(hp, client, message[k], context(k))
        wire.check_like(upload, hp.expected(k, ctx), "payload")
        replies.append(Reply(k, 2, upload))
    hp.server_update(server, replies, ctx)
    return [reply.payload for reply in replies]


@pytest.mark.usefixtures("hand_model")
def test_parts_of_a_window_that_goes_on_at_the_beginning() -> None:
    """Round 3 at rate 2/3: channels 2 and 0."""
    hp = FedRolex(rates=(2 / 3,))
    server = hp.init_server(at(3))
    server.weights["head.weight"] = torch.tensor([[10.0, 11, 12], [20, 21, 22]])
    part = hp.broadcast(server, [0], at(3))[0].model
    assert part["trunk.weight"].tolist() == [[5, 6], [1, 2]]
    assert part["head.weight"].tolist() == [[12, 10], [22, 20]]
    assert part["head.bias"].tolist() == [0, 0]


@pytest.mark.usefixtures("hand_model")
def test_round_by_hand() -> None:
    """One step of size 1 on (1, 0) of both classes, in round 2. V = 0, so softmax is 1/2, dz =
    (-1/2, 1/2) and (1/2, -1/2), and the mean gradient of V is 0 as long as b is: let b = (ln 3, 0),
    so softmax is (3/4, 1/4), and the mean dz = (3/4 - 1/2, 1/4 - 1/2) = (1/4, -1/4).

    Client 0, rate 1/3, has channel 1: h = 3 / (1/3) = 9, V_0 = -dz h = (-9/4, 9/4)
    Client 1, rate 2/3, has 1 and 2: h = (3, 5) / (2/3) = (9/2, 15/2),
                                     V_1 = [[-9/8, -15/8], [9/8, 15/8]]

    Server: channel 0 stays 0, channel 1 (-9/4 - 9/8) / 2 = -27/16, channel 2 is client 1's.
    """
    hp = FedRolex(rates=(1 / 3, 2 / 3))
    server = hp.init_server(at(2))
    server.weights["head.bias"] = torch.tensor([3.0, 1.0]).log()
    uploads = play(hp, server, 2, [0, 1])
    assert uploads[0].model["trunk.weight"].tolist() == [[3, 4]]
    row = torch.tensor([0, -27 / 16, -15 / 8])
    assert_close(server.weights["head.weight"], torch.stack([row, -row]))
    assert_close(
        server.weights["head.bias"], torch.tensor([3.0, 1.0]).log() - torch.tensor([0.25, -0.25])
    )


@pytest.mark.usefixtures("hand_model")
def test_without_a_client_of_rate_one_all_is_trained_in_as_many_rounds_as_channels() -> None:
    hp = FedRolex(rates=(1 / 3,), scaler="off")
    server = hp.init_server(at(1))
    server.weights["head.bias"] = torch.tensor([3.0, 1.0]).log()
    for t in (1, 2, 3):
        play(hp, server, t, [0])
        trained = server.weights["head.weight"][0] != 0
        assert trained.tolist() == [t >= 1, t >= 2, t >= 3]


def test_the_server_is_sent_the_same_window_that_it_dealt(tmp_path: Path) -> None:
    """Through the engine, with batch norm, over rounds in which windows wrap."""
    images = np.random.RandomState(0).randint(0, 256, (12, 3, 16, 16), np.uint8)
    noise = Dataset("noise", images, np.arange(12) % 2, 12, 2, mean=(0.5,) * 3, std=(0.5,) * 3)
    config = Config(
        method="fedrolex", clients=3, participation=1.0, rounds=2, out=tmp_path,
        hp={"rates": (0.5, 0.25, 0.0625), "overlap": 0.0}, fleet=FleetConfig(("slim_resnet10",)),
        train=TrainConfig(batch_size=4, lr=0.05),
    )  # fmt: skip
    run = tiny.simulate(config, noise, tiny.deal(range(4), range(4, 8), range(8, 12)))
    widths = [len(run.states[k]["model"]["stem.0.weight"]) for k in range(3)]
    assert widths == [8, 4, 1]
    sizes = [run.count("scalars", 2, "up", client=k) for k in range(3)]
    assert sizes == [run.count("scalars", 2, "down", client=k) for k in range(3)]
    assert sizes[0] > 3 * sizes[1] > 9 * sizes[2]


def test_answers_by_the_batch_or_by_what_was_measured() -> None:
    ctx = replace(
        tiny.client_context(tiny.points([(1, 0)], [0], 2)), fleet=Fleet(("slim_resnet10",), 128),
        task=Task(2),
    )  # fmt: skip
    client = FedRolex().init_client(ctx.build_model(), ctx)
    client.model.eval()
    x = torch.randn(6, 3, 16, 16) + 3
    sent, batch = FedRolex(), FedRolex(statistics="batch")
    with torch.no_grad():
        alone = sent.predict(client, x[:1])
        assert_close(sent.predict(client, x)[:1], alone, atol=1e-4, rtol=1e-4)
        assert (batch.predict(client, x)[:1] - alone).abs().max() > 1e-2
        assert_close(batch.predict(client, x[:1]), alone)


# What is refused


def check(model: str = "slim_resnet10", feature_dim: int = 128, **hp: Any) -> None:
    method.check(FedRolex(**hp), Fleet(tuple(model.split()), feature_dim), Task(10), "fedrolex")


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--hp\.rates must be above 0"):
        check(rates=(2.0,))
    with pytest.raises(ConfigError, match=r"--hp\.overlap must be between 0 and 1, got 1\.5"):
        check(overlap=1.5)
    with pytest.raises(ConfigError, match=r"vit_b_32 cannot be sliced"):
        check(model="vit_b_32", feature_dim=768)
    with pytest.raises(ConfigError, match="one global model"):
        check(model="cnn1 cnn2")
    check(model="googlenet", feature_dim=1024)
