"""LG-FedAvg: heads are averaged, everything below them stays at home."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import nn
from torch.testing import assert_close

from methods.lg_fedavg import Download, LG_FedAvg, Server, Upload
from raysim import ClientState, Config, Fleet, FleetConfig, Reply, Task, get_weights, wire
from raysim.errors import WireError

SERVER = tiny.server_context(Fleet(("mlp",), 2), Task(2))
ZEROS = [[0, 0], [0, 0]]


def head(weight: tiny.Matrix, bias: float = 0.0) -> nn.Linear:
    layer = tiny.linear(weight)
    nn.init.constant_(layer.bias, bias)
    return layer


def reply(client: int, samples: int, layer: nn.Linear) -> Reply[Upload]:
    return Reply(client, samples, Upload(get_weights(layer)))


def test_client_trains_the_received_head_and_its_base_and_uploads_the_head() -> None:
    """A head of zeros arrives in the place of the client's; F = I, so r = x and softmax = (1/2,
    1/2). For (1, 2) of class 0 dz = (-1/2, 1/2), for (3, 0) of class 1 dz = (1/2, -1/2), and half
    the sum of dz r^T is [[1/2, -1/2], [-1/2, 1/2]]. Behind a head of zeros the base stands still:
    dr = H^T dz = 0. In a second step, H = -0.1 dW, it moves."""
    data = tiny.points([(1, 2), (3, 0)], [0, 1], num_classes=2)
    client = ClientState(tiny.model(head=[[9, 9], [-9, 9]], features=[[1, 0], [0, 1]]))
    ctx = tiny.client_context(data, lr=0.1)
    upload = tiny.update(LG_FedAvg(), client, Download(get_weights(head(ZEROS))), ctx)
    assert list(upload.head) == ["weight", "bias"]
    assert_close(upload.head["weight"], torch.tensor([[-0.05, 0.05], [0.05, -0.05]]))
    assert_close(upload.head["bias"], torch.zeros(2))
    assert_close(client.model.trunk.weight.detach(), torch.eye(2))
    tiny.update(LG_FedAvg(), client, Download(upload.head), ctx)
    assert not torch.equal(client.model.trunk.weight.detach(), torch.eye(2))


def test_receiving_overwrites_the_head_and_nothing_else() -> None:
    client = ClientState(tiny.model(head=[[1, 2], [3, 4]], features=[[5, 6], [7, 8]]))
    ctx: Any = None
    LG_FedAvg().receive(client, Download(get_weights(head([[-1, -2], [-3, -4]], 9))), ctx)
    assert client.model.head.weight.tolist() == [[-1, -2], [-3, -4]]
    assert client.model.head.bias.tolist() == [9, 9]
    assert client.model.trunk.weight.tolist() == [[5, 6], [7, 8]]


@pytest.mark.parametrize(
    ("weighting", "weight", "bias"),
    [("samples", [[4.0, 3.0], [1.5, 4.0]], 3.0), ("uniform", [[3.0, 2.0], [1.0, 4.0]], 2.0)],
)
def test_mean_of_two_heads_by_hand(weighting: Any, weight: list[list[float]], bias: float) -> None:
    """n = (1, 3): (1 + 3 * 5) / 4 = 4 at the top left, (1 + 5) / 2 = 3 if both weigh the same."""
    server = Server(head(ZEROS))
    replies = [reply(0, 1, head([[1, 0], [0, 4]], 0)), reply(1, 3, head([[5, 4], [2, 4]], 4))]
    LG_FedAvg(weighting=weighting).server_update(server, replies, SERVER)
    assert_close(server.head.weight.detach(), torch.tensor(weight))
    assert_close(server.head.bias.detach(), torch.full((2,), bias))
    message = LG_FedAvg().broadcast(server, [0], SERVER)
    assert_close(message.head["weight"], torch.tensor(weight))


def test_with_one_participant_its_head_is_everybodys() -> None:
    server = Server(head(ZEROS, 1))
    LG_FedAvg().server_update(server, [reply(3, 17, head([[1, 2], [3, 4]], 5))], SERVER)
    assert server.head.weight.tolist() == [[1, 2], [3, 4]]
    assert server.head.bias.tolist() == [5, 5]


def test_only_heads_are_sent(tmp_path: Path) -> None:
    """4 classes on 2 features: 4 * 2 + 4 = 12 scalars each way and client, in every round."""
    data = tiny.points([(k, 9 - k) for k in range(6)], [0, 1, 1, 1, 0, 2], num_classes=4)
    config = Config(
        method="lg_fedavg", clients=3, participation=0.67, rounds=2, out=tmp_path,
        fleet=FleetConfig(("mlp",), 2),
    )  # fmt: skip
    run = tiny.simulate(config, data, tiny.deal([0, 1], [2, 3], [4, 5]))
    assert {row["field"] for row in run.messages} == {"head"}
    for number in (1, 2):
        for direction in ("up", "down"):
            assert run.count("scalars", number, direction) == 2 * 12


def test_a_head_of_another_width_never_reaches_the_server() -> None:
    expected = LG_FedAvg().expected(0, SERVER)
    wire.check_like(Upload(get_weights(head(ZEROS))), expected, "payload")
    with pytest.raises(WireError, match=r"payload.head.weight is .*\[2, 3\]; expected .*\[2, 2\]"):
        wire.check_like(Upload(get_weights(nn.Linear(3, 2))), expected, "payload")
