"""FedGH's equations, worked by hand."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from methods.fedgh import Download, FedGH, Server, Upload
from raysim import (
    ClientState,
    Config,
    ConfigError,
    Fleet,
    FleetConfig,
    Reply,
    Task,
    get_weights,
    method,
)

SERVER = tiny.server_context(Fleet(("mlp",), 2), Task(2))
Pair = tuple[int, tuple[float, float]]


def reply(client: int, *pairs: Pair, samples: int = 1) -> Reply[Upload]:
    classes, means = zip(*pairs, strict=True)
    return Reply(client, samples, Upload(torch.tensor(means), torch.tensor(classes)))


def download(classes: int, width: int = 2) -> Download:
    return Download(get_weights(tiny.linear([[0] * width] * classes)))


# The client


def test_receiving_overwrites_the_head_and_nothing_else() -> None:
    client = ClientState(tiny.model(head=[[1, 2], [3, 4]], features=[[5, 6], [7, 8]]))
    head = tiny.linear([[-1, -2], [-3, -4]])
    nn.init.constant_(head.bias, 9)
    ctx: Any = None
    FedGH().receive(client, Download(get_weights(head)), ctx)
    assert client.model.head.weight.tolist() == [[-1, -2], [-3, -4]]
    assert client.model.head.bias.tolist() == [9, 9]
    assert client.model.trunk.weight.tolist() == [[5, 6], [7, 8]]


def test_local_training_moves_the_base_and_the_received_head_by_cross_entropy() -> None:
    """One sample x = (1, 2), y = 0, one step of size 1. F = I, so r = x. The head that arrives in
    the place of the client's is H = [[ln 3, 0], [0, 0]], so z = (ln 3, 0), softmax = (3/4, 1/4).

    dz = softmax - e_0 = (-1/4, 1/4)
    H <- H - dz r^T = [[ln 3 + 1/4, 1/2], [-1/4, -1/2]],  b <- (1/4, -1/4)
    dr = H^T dz = (-ln 3 / 4, 0),  F <- I - dr x^T = [[1 + ln 3 / 4, ln 3 / 2], [0, 1]]

    The prototype is the trained F's: (1 + ln 3 / 4 + ln 3, 2).
    """
    log3 = float(torch.tensor(3.0).log())
    data = tiny.points([(1, 2)], [0], num_classes=2)
    client = ClientState(tiny.model(head=[[9, 9], [-9, 9]], features=[[1, 0], [0, 1]]))
    message = Download(get_weights(tiny.linear([[log3, 0], [0, 0]])))
    upload = tiny.update(FedGH(), client, message, tiny.client_context(data, lr=1.0))
    head, base = client.model.head, client.model.trunk.weight
    assert_close(head.weight.detach(), torch.tensor([[log3 + 0.25, 0.5], [-0.25, -0.5]]))
    assert_close(head.bias.detach(), torch.tensor([0.25, -0.25]))
    assert_close(base.detach(), torch.tensor([[1 + log3 / 4, log3 / 2], [0.0, 1.0]]))
    assert_close(upload.prototypes, torch.tensor([[1 + log3 / 4 + log3, 2.0]]))


def test_upload_holds_the_means_of_the_classes_the_client_has() -> None:
    """Class 0: ((0, 4) + (2, 0)) / 2 = (1, 2). Class 2: (3, 6). Classes 1 and 3: nothing."""
    data = tiny.points([(0, 4), (3, 6), (2, 0)], [0, 2, 0], num_classes=4)
    client = ClientState(tiny.model(head=[[0, 0]] * 4))
    upload = tiny.update(FedGH(), client, download(4), tiny.client_context(data))
    assert upload.classes.tolist() == [0, 2]
    assert_close(upload.prototypes, torch.tensor([[1.0, 2.0], [3.0, 6.0]]))


@pytest.mark.parametrize("means", ["samples", "batches"])
def test_client_of_one_class_and_less_than_a_batch_sends_one_prototype(means: Any) -> None:
    data = tiny.points([(1, 5), (3, 1)], [1, 1], num_classes=2)
    client = ClientState(tiny.model(head=[[0, 0]] * 2))
    ctx = tiny.client_context(data, batch_size=64)
    upload = tiny.update(FedGH(means=means), client, download(2), ctx)
    assert upload.classes.tolist() == [1]
    assert_close(upload.prototypes, torch.tensor([[2.0, 3.0]]))


@pytest.mark.parametrize(("means", "class_0"), [("samples", (8 / 3, 4.0)), ("batches", (3.5, 5.0))])
def test_mean_of_samples_and_mean_of_batch_means_by_hand(
    means: Any, class_0: tuple[float, float]
) -> None:
    """Batches {(0, 4), (2, 0)} of class 0 and {(6, 8) of class 0, (3, 6) of class 2}: the mean of
    class 0 is (0 + 2 + 6, 4 + 0 + 8) / 3; its batch means are (1, 2) and (6, 8), theirs (3.5, 5).
    """
    data = tiny.points([(0, 4), (2, 0), (6, 8), (3, 6)], [0, 0, 0, 2], num_classes=3)
    client = ClientState(tiny.model(head=[[0, 0]] * 3))
    ctx = tiny.client_context(data, batch_size=2, shuffle=False)
    upload = tiny.update(FedGH(means=means), client, download(3), ctx)
    assert upload.classes.tolist() == [0, 2]
    assert_close(upload.prototypes, torch.tensor([class_0, (3.0, 6.0)]))


def test_prototypes_are_the_trained_models_in_eval_mode_over_all_of_the_clients_data() -> None:
    """The client has 5 of 7 samples, of which training in batches of 2 leaves one out; its model
    has batch norm and dropout."""
    torch.manual_seed(0)
    data = tiny.points(
        [(1, 5), (9, 9), (4, 2), (3, 8), (7, 7), (6, 1), (2, 2)], [0, 0, 2, 0, 1, 2, 2], 4
    )
    ctx = tiny.client_context(data, [0, 2, 3, 5, 6], eval_batch_size=2, batch_size=2, lr=0.5)
    model = tiny.moody_model(pixels=2, width=3, num_classes=4)
    upload = tiny.update(FedGH(), ClientState(model), download(4, width=3), ctx)
    assert model.training, "gathering means must leave the model in the mode it was in"
    assert model.trunk[1].num_batches_tracked == 2, "gathering means is not training"
    means = tiny.means_by_loops(model, ctx)
    assert upload.classes.tolist() == list(means) == [0, 2]
    assert_close(upload.prototypes, torch.stack(list(means.values())))


def test_batch_means_are_made_in_eval_mode_too() -> None:
    torch.manual_seed(0)
    data = tiny.points([(1, 5), (9, 9), (4, 2), (3, 8)], [0, 0, 0, 0], 1)
    ctx = tiny.client_context(data, batch_size=2, lr=0.5)
    model = tiny.moody_model(pixels=2, width=3, num_classes=1)
    upload = tiny.update(FedGH(means="batches"), ClientState(model), download(1, width=3), ctx)
    assert model.training
    assert model.trunk[1].num_batches_tracked == 2
    assert_close(upload.prototypes[0], tiny.means_by_loops(model, ctx)[0])


# The server


def test_server_step_by_hand_is_the_mean_over_the_pooled_pairs() -> None:
    """Head 0, so softmax = (1/2, 1/2) for every pair, and one step of size 0.3 over three pairs of
    two clients:

    p = (1, 2), c = 0:  dz = (-1/2, 1/2),  dz p^T = [[-1/2, -1], [1/2, 1]]
    p = (2, 0), c = 1:  dz = (1/2, -1/2),  dz p^T = [[1, 0], [-1, 0]]
    p = (4, 4), c = 0:  dz = (-1/2, 1/2),  dz p^T = [[-2, -2], [2, 2]]
    mean:  dW = [[-1/2, -1], [1/2, 1]],  db = (-1/6, 1/6)

    Every pair counts the same: client 0, with two of them, is half of client 1's size.
    """
    server = Server(tiny.linear([[0, 0], [0, 0]]))
    sent = [reply(0, (0, (1.0, 2.0)), (1, (2.0, 0.0))), reply(1, (0, (4.0, 4.0)), samples=1000)]
    FedGH(server_lr=0.3).server_update(server, sent, SERVER)
    assert_close(server.head.weight.detach(), torch.tensor([[0.15, 0.3], [-0.15, -0.3]]))
    assert_close(server.head.bias.detach(), torch.tensor([0.05, -0.05]))
    message = FedGH().broadcast(server, [0], SERVER)
    assert_close(message.head["bias"], torch.tensor([0.05, -0.05]))


def test_row_of_a_class_that_nobody_has_is_only_pushed_away() -> None:
    """Three classes, a head of zeros, p = (3, 0) of class 0: dz = (-2/3, 1/3, 1/3)."""
    server = Server(tiny.linear([[0, 0]] * 3))
    FedGH(server_lr=1.0).server_update(server, [reply(0, (0, (3.0, 0.0)))], SERVER)
    assert_close(server.head.weight.detach(), torch.tensor([[2.0, 0], [-1, 0], [-1, 0]]))


def test_head_goes_on_from_where_the_round_before_left_it() -> None:
    """One class of two and p = (1, 0): from z = (w, 0) a step of size 1 adds 1 - s to w and to the
    bias of class 0 and takes it from class 1, s = softmax(z)_0. First s = 1/2: z_0 - z_1 = 2 (1/2 +
    1/2) = 2. Then s = 1 / (1 + e^-2) = 0.880797, and W_00 = 1/2 + 1 - s = 0.619203."""
    server = Server(tiny.linear([[0, 0], [0, 0]]))
    for _ in range(2):
        FedGH(server_lr=1.0).server_update(server, [reply(0, (0, (1.0, 0.0)))], SERVER)
    assert float(server.head.weight[0, 0].detach()) == pytest.approx(0.619203, abs=1e-6)


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, [10, 2]),
        ({"server_batch_size": 1}, [1] * 12),
        ({"server_batch_size": 5, "server_epochs": 2}, [5, 5, 2, 5, 5, 2]),
    ],
)
def test_server_steps_are_shuffled_batches_and_every_epoch_sees_every_pair_once(
    settings: dict[str, int], sizes: list[int]
) -> None:
    torch.manual_seed(0)
    server = Server(tiny.linear([[0, 0], [0, 0]]))
    seen: list[Tensor] = []
    server.head.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    sent = [reply(k, (0, (2.0 * k, 0.0)), (1, (2.0 * k + 1, 0.0))) for k in range(6)]
    FedGH(**settings).server_update(server, sent, SERVER)
    assert [len(batch) for batch in seen] == sizes
    order = torch.cat(seen)[:, 0].tolist()
    assert order[:12] != list(range(12)), "in an order of its own"
    epochs = [order[start : start + 12] for start in range(0, len(order), 12)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)


def test_step_size_zero_leaves_the_head_as_it_was_born() -> None:
    server = Server(tiny.linear([[1, 2], [3, 4]]))
    hp = FedGH(server_lr=0.0)
    method.check(hp, Fleet(("mlp",), 2), Task(2), "fedgh")
    hp.server_update(server, [reply(0, (0, (1.0, 1.0)))], SERVER)
    assert server.head.weight.tolist() == [[1, 2], [3, 4]]


# A run


def test_prototypes_go_up_a_head_comes_down_and_class_ids_are_not_counted(tmp_path: Path) -> None:
    """Clients of 2 and 1 classes, of 4, and width 2: 3 prototypes up; 2 heads of 4 * 2 + 4 down,
    in the first round too."""
    data = tiny.points([(0, 1), (1, 0), (2, 2), (5, 1)], [0, 1, 3, 3], num_classes=4)
    config = Config(
        method="fedgh", clients=2, participation=1.0, rounds=2, out=tmp_path,
        fleet=FleetConfig(("mlp",), 2),
    )  # fmt: skip
    run = tiny.simulate(config, data, tiny.deal([0, 1], [2, 3]))
    for number in (1, 2):
        assert run.count("scalars", number, "up") == 3 * 2
        assert run.count("numbers", number, "up", field="classes") == 3
        assert run.count("scalars", number, "down") == 2 * 12


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"server_lr": -0.1}, "--hp.server-lr must be at least 0, got -0.1"),
        ({"server_lr": float("nan")}, "--hp.server-lr must be at least 0"),
        ({"server_epochs": 0}, "--hp.server-epochs must be at least 1, got 0"),
        ({"server_batch_size": 0}, "--hp.server-batch-size must be at least 1, got 0"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        method.check(FedGH(**settings), Fleet(("mlp",), 2), Task(2), "fedgh")
