"""FedRE's equations, worked by hand."""

from collections.abc import Sequence
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from methods.fedre import Download, FedRE, Server, Upload, entangle
from raysim import ClientState, Config, Fleet, FleetConfig, Reply, Task, get_weights
from raysim.worker import Worker

SERVER = tiny.server_context(Fleet(("mlp",), 2), Task(2))


def replies(*pairs: tuple[Sequence[float], Sequence[float]]) -> list[Reply[Upload]]:
    return [Reply(k, 1, Upload(torch.tensor(r), torch.tensor(y))) for k, (r, y) in enumerate(pairs)]


# The entangled pair


def test_entangled_pair_by_hand() -> None:
    """Classes 0 and 2 of three, mu_0 = (1, 2), mu_2 = (3, 6), p = (1/4, 3/4):

    r = 1/4 (1, 2) + 3/4 (3, 6) = (2.5, 5)
    y = 1/4 e_0 + 3/4 e_2       = (0.25, 0, 0.75)
    """
    means = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    r, y = entangle(means, torch.tensor([0, 2]), torch.tensor([0.25, 0.75]), num_classes=3)
    assert_close(r, torch.tensor([2.5, 5.0]))
    assert_close(y, torch.tensor([0.25, 0.0, 0.75]))


def test_client_sends_its_class_means_weighted_by_uniform_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Class 0 has (0, 4) and (2, 0), class 2 has (3, 6), class 1 has nothing; r(x) = x.

    mu_0 = (1, 2), mu_2 = (3, 6); u = (0.2, 0.6), so p = u / 0.8 = (1/4, 3/4), as above.
    """
    monkeypatch.setattr(torch, "rand", lambda *size, **_: torch.tensor([0.2, 0.6]))
    data = tiny.points([(0, 4), (3, 6), (2, 0)], [0, 2, 0], num_classes=3)
    client = ClientState(tiny.model(head=[[0, 0]] * 3))
    download = Download(get_weights(tiny.linear([[0, 0]] * 3)))
    upload = tiny.update(FedRE(), client, download, tiny.client_context(data))
    assert_close(upload.representation, torch.tensor([2.5, 5.0]))
    assert_close(upload.label, torch.tensor([0.25, 0.0, 0.75]))


def test_class_means_are_the_trained_models_in_eval_mode_over_all_of_the_clients_data() -> None:
    """The client has 5 of 7 samples, of which training in batches of 2 leaves one out; its model
    has batch norm and dropout. With p read off the label, r must be sum_c p_c mu_c."""
    torch.manual_seed(0)
    data = tiny.points(
        [(1, 5), (9, 9), (4, 2), (3, 8), (7, 7), (6, 1), (2, 2)],
        [0, 0, 2, 0, 1, 2, 2],
        num_classes=4,
    )
    ctx = tiny.client_context(data, [0, 2, 3, 5, 6], eval_batch_size=2, batch_size=2, lr=0.5)
    model = tiny.moody_model(pixels=2, width=3, num_classes=4)
    untrained = get_weights(model)["trunk.0.weight"].clone()
    download = Download(get_weights(nn.Linear(3, 4)))
    upload = tiny.update(FedRE(), ClientState(model), download, ctx)

    assert not torch.equal(model.trunk[0].weight, untrained)
    assert model.training, "gathering means must leave the model in the mode it was in"
    assert model.trunk[1].num_batches_tracked == 2, "gathering means is not training"
    means = tiny.means_by_loops(model, ctx)
    assert list(means) == [0, 2]
    assert_close(upload.representation, sum(upload.label[c] * mean for c, mean in means.items()))


def test_label_sums_to_one_over_the_classes_the_client_has() -> None:
    data = tiny.points([(k, 1) for k in range(6)], [4, 1, 4, 1, 3, 3], num_classes=6)
    client = ClientState(tiny.model(head=[[0, 0]] * 6))
    download = Download(get_weights(tiny.linear([[0, 0]] * 6)))
    label = tiny.update(FedRE(), client, download, tiny.client_context(data)).label
    assert label.shape == (6,)
    assert float(label.sum()) == pytest.approx(1)
    assert (label > 0).tolist() == [False, True, False, True, True, False]


def test_client_of_one_class_sends_its_prototype_and_a_one_hot_label() -> None:
    """u / sum(u) = 1 whatever u: r = mu_1 = ((1, 5) + (3, 1)) / 2 = (2, 3), y = e_1."""
    data = tiny.points([(1, 5), (3, 1)], [1, 1], num_classes=2)
    client = ClientState(tiny.model(head=[[0, 0]] * 2))
    download = Download(get_weights(tiny.linear([[0, 0]] * 2)))
    upload = tiny.update(FedRE(), client, download, tiny.client_context(data))
    assert_close(upload.representation, torch.tensor([2.0, 3.0]))
    assert_close(upload.label, torch.tensor([0.0, 1.0]))


def worker(seed: int = 0) -> Worker:
    """Clients 0 and 1 hold the same four samples, of three classes."""
    data = tiny.points([(1, 5), (3, 1), (2, 2), (9, 4)], [0, 1, 2, 0], num_classes=3)
    config = Config(method="fedre", seed=seed, clients=2, fleet=FleetConfig(("mlp",), 2))
    return tiny.make_worker(config, data, tiny.deal([0, 1, 2, 3], [0, 1, 2, 3]))


def label(worker: Worker, client: int, round: int) -> Tensor:
    download = Download(get_weights(tiny.linear([[1, 0], [0, 1], [1, 1]])))
    _, upload = tiny.play(worker, download, client, round)
    label: Tensor = upload.label
    return label


def test_weights_are_drawn_anew_in_every_round_and_for_every_client() -> None:
    one = worker()
    drawn = [label(one, client, round) for client in (0, 1) for round in (1, 2)]
    for i, a in enumerate(drawn):
        for b in drawn[:i]:
            assert (a - b).abs().max() > 1e-3


def test_weights_follow_from_the_seed() -> None:
    one = worker()
    first = label(one, 1, 2)
    label(one, 0, 2)
    assert torch.equal(label(one, 1, 2), first), "whatever the worker did before"
    assert torch.equal(label(worker(), 1, 2), first)
    assert not torch.equal(label(worker(seed=1), 1, 2), first)


# The head


def test_receiving_overwrites_the_head_and_nothing_else() -> None:
    client = ClientState(tiny.model(head=[[1, 2], [3, 4]], features=[[5, 6], [7, 8]]))
    head = tiny.linear([[-1, -2], [-3, -4]])
    nn.init.constant_(head.bias, 9)
    ctx: Any = None
    FedRE().receive(client, Download(get_weights(head)), ctx)
    assert torch.equal(client.model.head.weight, head.weight)
    assert torch.equal(client.model.head.bias, head.bias)
    assert client.model.trunk.weight.tolist() == [[5, 6], [7, 8]]


def test_broadcast_is_the_servers_head() -> None:
    server = Server(tiny.linear([[1, 2], [3, 4]]))
    message = FedRE().broadcast(server, [0], SERVER)
    assert {name: tensor.tolist() for name, tensor in message.head.items()} == {
        "weight": [[1, 2], [3, 4]],
        "bias": [0, 0],
    }


def test_local_training_moves_the_base_and_the_received_head_by_cross_entropy() -> None:
    """One sample x = (1, 2), y = 0, one step of size 1. F = I, so r = x. The head that arrives in
    the place of the client's is H = [[ln 3, 0], [0, 0]], so z = (ln 3, 0), softmax = (3/4, 1/4).

    dz = softmax - e_0 = (-1/4, 1/4)
    H <- H - dz r^T = [[ln 3 + 1/4, 1/2], [-1/4, -1/2]],  b <- (1/4, -1/4)
    dr = H^T dz = (-ln 3 / 4, 0),  F <- I - dr x^T = [[1 + ln 3 / 4, ln 3 / 2], [0, 1]]
    """
    log3 = float(torch.tensor(3.0).log())
    data = tiny.points([(1, 2)], [0], num_classes=2)
    client = ClientState(tiny.model(head=[[9, 9], [-9, 9]], features=[[1, 0], [0, 1]]))
    download = Download(get_weights(tiny.linear([[log3, 0], [0, 0]])))
    tiny.update(FedRE(), client, download, tiny.client_context(data, lr=1.0))
    head, base = client.model.head, client.model.trunk.weight
    assert_close(head.weight.detach(), torch.tensor([[log3 + 0.25, 0.5], [-0.25, -0.5]]))
    assert_close(head.bias.detach(), torch.tensor([0.25, -0.25]))
    assert_close(base.detach(), torch.tensor([[1 + log3 / 4, log3 / 2], [0.0, 1.0]]))


# The server's step


def test_server_step_by_hand_sums_over_the_batch() -> None:
    """Head 0, so softmax = (1/2, 1/2) for both pairs, and one step of size 0.1:

    r_0 = (1, 2), y_0 = (1/4, 3/4):  dz = ( 1/4, -1/4),  dz r^T = [[1/4, 1/2], [-1/4, -1/2]]
    r_1 = (2, 0), y_1 = (1, 0):      dz = (-1/2,  1/2),  dz r^T = [[ -1,   0], [   1,    0]]
    sum:                          db = (-1/4, 1/4),  dW = [[-3/4, 1/2], [3/4, -1/2]]

    W <- [[0.075, -0.05], [-0.075, 0.05]],  b <- (0.025, -0.025); a mean would give half of it.
    """
    server = Server(tiny.linear([[0, 0], [0, 0]]))
    pairs = replies(([1.0, 2.0], [0.25, 0.75]), ([2.0, 0.0], [1.0, 0.0]))
    FedRE(server_lr=0.1).server_update(server, pairs, SERVER)
    assert_close(server.head.weight.detach(), torch.tensor([[0.075, -0.05], [-0.075, 0.05]]))
    assert_close(server.head.bias.detach(), torch.tensor([0.025, -0.025]))


def closed_form(head: nn.Linear, r: Tensor, y: Tensor, lr: float) -> tuple[Tensor, Tensor]:
    """W - lr sum_k (softmax(W r_k + b) - y_k) r_k^T, and the same for b."""
    weight, bias = head.weight.detach(), head.bias.detach()
    dz = torch.softmax(r @ weight.T + bias, dim=1) - y
    return weight - lr * dz.T @ r, bias - lr * dz.sum(dim=0)


def test_server_step_from_any_head_equals_the_closed_form() -> None:
    torch.manual_seed(0)
    head = nn.Linear(3, 4)
    r, y = torch.randn(5, 3), torch.rand(5, 4).softmax(dim=1)
    weight, bias = closed_form(head, r, y, lr=0.01)
    pairs = [Reply(k, 1, Upload(r[k], y[k])) for k in range(5)]
    FedRE().server_update(Server(head), pairs, SERVER)
    assert_close(head.weight.detach(), weight)
    assert_close(head.bias.detach(), bias)


def test_every_pair_counts_the_same_whatever_the_size_of_its_client() -> None:
    heads = [tiny.linear([[1, 0], [0, 1]]) for _ in range(2)]
    pairs = replies(([1.0, 2.0], [0.25, 0.75]), ([2.0, 0.0], [1.0, 0.0]))
    FedRE().server_update(Server(heads[0]), pairs, SERVER)
    heavy = [pairs[0]._replace(num_samples=1000), pairs[1]]
    FedRE().server_update(Server(heads[1]), heavy, SERVER)
    assert torch.equal(heads[0].weight, heads[1].weight)


def test_head_goes_on_from_where_the_round_before_left_it() -> None:
    torch.manual_seed(0)
    server = Server(nn.Linear(2, 2))
    r, y = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.25, 0.75]])
    for _ in range(2):
        weight, bias = closed_form(server.head, r, y, lr=0.01)
        FedRE().server_update(server, [Reply(0, 1, Upload(r[0], y[0]))], SERVER)
        assert_close(server.head.weight.detach(), weight)
        assert_close(server.head.bias.detach(), bias)


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, [5]),
        ({"server_batch_size": 2}, [2, 2, 1]),
        ({"server_batch_size": 2, "server_epochs": 2}, [2, 2, 1, 2, 2, 1]),
    ],
)
def test_server_steps_are_batches_and_every_epoch_sees_every_pair_once(
    settings: dict[str, int], sizes: list[int]
) -> None:
    server = Server(tiny.linear([[0, 0], [0, 0]]))
    seen: list[Tensor] = []
    server.head.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    pairs = replies(*(([float(k), 0.0], [0.5, 0.5]) for k in range(5)))
    FedRE(**settings).server_update(server, pairs, SERVER)
    assert [len(batch) for batch in seen] == sizes
    order = torch.cat(seen)[:, 0].tolist()
    epochs = [order[start : start + 5] for start in range(0, len(order), 5)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)


def test_batches_of_one_are_steps_in_a_row() -> None:
    """Two equal pairs, so their order does not matter: the second step starts at the first's."""
    server = Server(tiny.linear([[1, 0], [0, 1]]))
    r, y = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.25, 0.75]])
    expected = tiny.linear([[1, 0], [0, 1]])
    for _ in range(2):
        weight, bias = closed_form(expected, r, y, lr=0.5)
        with torch.no_grad():
            expected.weight.copy_(weight)
            expected.bias.copy_(bias)
    pairs = replies(([1.0, 2.0], [0.25, 0.75]), ([1.0, 2.0], [0.25, 0.75]))
    FedRE(server_lr=0.5, server_batch_size=1).server_update(server, pairs, SERVER)
    assert_close(server.head.weight, expected.weight)
    assert_close(server.head.bias, expected.bias)
