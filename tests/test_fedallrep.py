"""FedAllRep's equations, worked by hand."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from methods.fedallrep import Download, FedAllRep, Server, Upload
from methods.fedre import FedRE
from methods.fedre import Server as FedREServer
from methods.fedre import Upload as Entangled
from raysim import ClientState, Config, ConfigError, Fleet, FleetConfig, Reply, Task, get_weights
from raysim.errors import WireError
from raysim.method import check
from raysim.wire import check_like

SERVER = tiny.server_context(Fleet(("mlp",), 2), Task(2))


def reply(client: int, r: Sequence[Sequence[float]], y: Sequence[int]) -> Reply[Upload]:
    return Reply(client, len(y), Upload(torch.tensor(r), torch.tensor(y)))


# The client


def test_client_sends_every_representation_with_its_class_in_order() -> None:
    """r(x) = F x with F = [[1, 1], [0, 2]], which a step so small leaves where it is."""
    data = tiny.points([(0, 4), (3, 6), (2, 0), (9, 9)], [0, 2, 1, 1], num_classes=3)
    client = ClientState(tiny.model(head=[[0, 0]] * 3, features=[[1, 1], [0, 2]]))
    download = Download(get_weights(tiny.linear([[0, 0]] * 3)))
    ctx = tiny.client_context(data, [0, 1, 2], eval_batch_size=2, lr=1e-9)
    upload = tiny.update(FedAllRep(), client, download, ctx)
    assert_close(upload.representations, torch.tensor([[4.0, 8.0], [9.0, 12.0], [2.0, 0.0]]))
    assert upload.labels.tolist() == [0, 2, 1]


def test_representations_are_the_trained_models_in_eval_mode_over_all_of_the_clients_data() -> None:
    """Five samples in batches of two: training leaves one out, the upload does not."""
    torch.manual_seed(0)
    data = tiny.points([(1, 5), (4, 2), (3, 8), (6, 1), (2, 2)], [0, 1, 2, 3, 4], num_classes=5)
    ctx = tiny.client_context(data, eval_batch_size=2, batch_size=2, lr=0.5)
    model = tiny.moody_model(pixels=2, width=3, num_classes=5)
    download = Download(get_weights(nn.Linear(3, 5)))
    upload = tiny.update(FedAllRep(), ClientState(model), download, ctx)
    assert model.training
    assert model.trunk[1].num_batches_tracked == 2
    assert not upload.representations.requires_grad
    means = tiny.means_by_loops(model, ctx)  # of one sample each
    assert_close(upload.representations, torch.stack(list(means.values())))


def test_local_training_starts_from_the_received_head() -> None:
    """One sample x = (1, 2), y = 0, r = x, one step of size 1 from H = [[ln 3, 0], [0, 0]]:
    softmax = (3/4, 1/4), so H <- [[ln 3 + 1/4, 1/2], [-1/4, -1/2]], b <- (1/4, -1/4)."""
    log3 = float(torch.tensor(3.0).log())
    data = tiny.points([(1, 2)], [0], num_classes=2)
    client = ClientState(tiny.model(head=[[9, 9], [-9, 9]]))
    download = Download(get_weights(tiny.linear([[log3, 0], [0, 0]])))
    tiny.update(FedAllRep(), client, download, tiny.client_context(data, lr=1.0))
    head = client.model.head
    assert_close(head.weight.detach(), torch.tensor([[log3 + 0.25, 0.5], [-0.25, -0.5]]))
    assert_close(head.bias.detach(), torch.tensor([0.25, -0.25]))


def test_client_of_one_class_smaller_than_a_batch_sends_all_it_has() -> None:
    data = tiny.points([(1, 5), (3, 1)], [1, 1], num_classes=2)
    client = ClientState(tiny.model(head=[[0, 0]] * 2))
    download = Download(get_weights(tiny.linear([[0, 0]] * 2)))
    ctx = tiny.client_context(data, batch_size=64)
    upload = tiny.update(FedAllRep(), client, download, ctx)
    assert upload.representations.tolist() == [[1, 5], [3, 1]]
    assert upload.labels.tolist() == [1, 1]


# The server


def test_server_step_by_hand_sums_over_the_samples_of_all_clients() -> None:
    """Head 0, so softmax = (1/2, 1/2) for all, and one step of size 0.1:

    client 0:  (1, 2) of class 0:  dz = (-1/2,  1/2),  dz r^T = [[-1/2, -1], [1/2,  1]]
               (4, 0) of class 1:  dz = ( 1/2, -1/2),  dz r^T = [[   2,  0], [ -2,  0]]
    client 1:  (2, 2) of class 0:  dz = (-1/2,  1/2),  dz r^T = [[  -1, -1], [  1,  1]]
    sum:                           db = (-1/2,  1/2),  dW     = [[ 1/2, -2], [-1/2, 2]]
    """
    replies = [reply(0, [[1.0, 2.0], [4.0, 0.0]], [0, 1]), reply(1, [[2.0, 2.0]], [0])]
    server = Server(tiny.linear([[0, 0], [0, 0]]))
    FedAllRep(server_lr=0.1).server_update(server, replies, SERVER)
    assert_close(server.head.weight.detach(), torch.tensor([[-0.05, 0.2], [0.05, -0.2]]))
    assert_close(server.head.bias.detach(), torch.tensor([0.05, -0.05]))

    server = Server(tiny.linear([[0, 0], [0, 0]]))
    FedAllRep(server_lr=0.3, server_reduction="mean").server_update(server, replies, SERVER)
    assert_close(server.head.weight.detach(), torch.tensor([[-0.05, 0.2], [0.05, -0.2]]))
    assert_close(server.head.bias.detach(), torch.tensor([0.05, -0.05]))


def test_a_class_that_nobody_has_is_only_pushed_down() -> None:
    """dz_2 = softmax_2 = 1/3, so w_2 <- -0.3 / 3 (1, 2) and b_2 <- -0.3 / 3."""
    server = Server(tiny.linear([[0, 0]] * 3))
    FedAllRep(server_lr=0.3).server_update(server, [reply(0, [[1.0, 2.0]], [0])], SERVER)
    assert_close(server.head.weight[2].detach(), torch.tensor([-0.1, -0.2]))
    assert_close(server.head.bias[2].detach(), torch.tensor(-0.1))


def test_clients_of_one_sample_make_it_fedre() -> None:
    """Then an entangled pair is that sample with its one-hot label."""
    torch.manual_seed(0)
    heads = [tiny.linear([[1, 2], [3, -1]]) for _ in range(2)]
    r, y = torch.randn(3, 2), [0, 1, 1]
    all_of_them = [Reply(k, 1, Upload(r[k : k + 1], torch.tensor([y[k]]))) for k in range(3)]
    entangled = [Reply(k, 1, Entangled(r[k], torch.eye(2)[y[k]])) for k in range(3)]
    FedAllRep().server_update(Server(heads[0]), all_of_them, SERVER)
    FedRE().server_update(FedREServer(heads[1]), entangled, SERVER)
    assert_close(heads[0].weight, heads[1].weight)
    assert_close(heads[0].bias, heads[1].bias)


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, [32, 8]),
        ({"server_batch_size": 15}, [15, 15, 10]),
        ({"server_epochs": 2}, [32, 8, 32, 8]),
    ],
)
def test_server_steps_mix_the_clients_and_every_epoch_sees_every_sample_once(
    settings: dict[str, int], sizes: list[int]
) -> None:
    torch.manual_seed(0)
    server = Server(tiny.linear([[0, 0], [0, 0]]))
    seen: list[Tensor] = []
    server.head.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    halves = [range(20), range(20, 40)]
    replies = [reply(k, [[float(i), 0.0] for i in half], [k] * 20) for k, half in enumerate(halves)]
    FedAllRep(**settings).server_update(server, replies, SERVER)
    assert [len(batch) for batch in seen] == sizes
    order = torch.cat(seen)[:, 0].tolist()
    assert all(
        sorted(order[start : start + 40]) == list(range(40)) for start in range(0, len(order), 40)
    )
    assert min(order[:15]) < 20 <= max(order[:15]), "one client's samples do not come in a block"


def test_head_goes_on_from_where_the_round_before_left_it() -> None:
    """Two rounds are two epochs, if every epoch is one step."""
    replies = [reply(0, [[1.0, 2.0], [4.0, 0.0]], [0, 1])]
    heads = [tiny.linear([[1, 2], [3, -1]]) for _ in range(2)]
    for _ in range(2):
        FedAllRep().server_update(Server(heads[0]), replies, SERVER)
    FedAllRep(server_epochs=2).server_update(Server(heads[1]), replies, SERVER)
    assert_close(heads[0].weight, heads[1].weight)


def test_broadcast_is_the_servers_head() -> None:
    message = FedAllRep().broadcast(Server(tiny.linear([[1, 2], [3, 4]])), [0], SERVER)
    assert message.head["weight"].tolist() == [[1, 2], [3, 4]]
    assert message.head["bias"].tolist() == [0, 0]


# The wire


def test_a_client_sends_d_scalars_for_each_of_its_samples(tmp_path: Path) -> None:
    """Width 5; clients of four samples and of one. Labels are in the ledger, but not counted."""
    data = tiny.points([(1, 5), (3, 1), (2, 2), (9, 4), (6, 6)], [0, 1, 2, 0, 1], num_classes=3)
    config = Config(
        method="fedallrep", clients=2, participation=1.0, rounds=2, out=tmp_path / "run",
        backend="local", fleet=FleetConfig(("mlp",), 5),
    )  # fmt: skip
    run = tiny.simulate(config, data, tiny.deal([0, 1, 2, 3], [4]))
    for number in (1, 2):
        for client, samples in enumerate((4, 1)):
            sent = {"client": client, "direction": "up"}
            assert run.count("scalars", number, **sent, field="representations") == 5 * samples
            assert run.count("scalars", number, **sent, field="labels") == 0
            assert run.count("numbers", number, **sent, field="labels") == samples
        assert run.rounds[number - 1]["scalars_up"] == 5 * 5
        assert run.rounds[number - 1]["scalars_down"] == 2 * (5 * 3 + 3)


@pytest.mark.parametrize(
    ("upload", "field"),
    [
        (Upload(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)), "representations"),
        (Upload(torch.zeros(2), torch.zeros(1, dtype=torch.int64)), "representations"),
        (Upload(torch.zeros(4, 2), torch.zeros(4)), "labels"),
    ],
)
def test_a_payload_of_another_shape_is_refused(upload: Upload, field: str) -> None:
    expected = FedAllRep().expected(0, SERVER)
    check_like(Upload(torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)), expected, "payload")
    with pytest.raises(WireError, match=f"payload.{field}"):
        check_like(upload, expected, "payload")


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"server_lr": -1.0}, "--hp.server-lr"),
        ({"server_epochs": 0}, "--hp.server-epochs"),
        ({"server_momentum": 0.9, "server_optimizer": "adam"}, "--hp.server-momentum"),
    ],
)
def test_what_the_server_cannot_train_with_is_refused(settings: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        check(FedAllRep(**settings), Fleet(("mlp",), 2), Task(2), "fedallrep")
