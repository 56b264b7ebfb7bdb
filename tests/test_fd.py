"""FD's equations, worked by hand."""

from math import exp, log
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch.testing import assert_close

from methods.fd import FD, Download, Server, Upload
from raysim import ClientState, Config, Fleet, FleetConfig, PerClient, Reply, Task, TrainConfig

SERVER = tiny.server_context(Fleet(("mlp",), 2), Task(3))
NOTHING = Download(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64))
LN3 = log(3)


def logits(**by_class: tuple[float, ...]) -> Download:
    """logits(c0=(1, 2)) says that class 0 has the mean logits (1, 2) and the others none."""
    classes = torch.tensor([int(name[1:]) for name in by_class])
    return Download(torch.tensor(list(by_class.values()), dtype=torch.float32), classes)


# The client's loss: z = (ln 3, 0), so softmax(z) = (3/4, 1/4)


ONE = tiny.points([(1, 0)], [0], num_classes=2)


def learn(
    hp: FD, message: Download, data: Any = ONE, **train: Any
) -> tuple[float, torch.Tensor, Upload]:
    """The loss of one step at rate 1, by how much the head's bias moved (- dL/dz summed), and what
    is sent."""
    client = ClientState(tiny.model(head=[[LN3, 0], [0, 0]]))
    ctx = tiny.client_context(data, lr=1.0, **train)
    upload = tiny.update(hp, client, message, ctx)
    return ctx.losses[0], client.model.head.bias.detach(), upload


@pytest.mark.parametrize("distill", [1.0, 2.0])
def test_loss_by_hand(distill: float) -> None:
    """Z_0 = (0, ln 3), so q = (1/4, 3/4), and x is of class 0.

    CE(z, y) = ln 4/3 and CE(z, q) = 1/4 ln 4/3 + 3/4 ln 4; their gradients in z are
    (3/4, 1/4) - (1, 0) = (-1/4, 1/4) and (3/4, 1/4) - (1/4, 3/4) = (1/2, -1/2).
    """
    loss, moved, _ = learn(FD(distill=distill), logits(c0=(0, LN3)))
    assert loss == pytest.approx(log(4 / 3) + distill * (log(4 / 3) / 4 + 3 * log(4) / 4))
    assert_close(moved, torch.tensor([1 / 4 - distill / 2, -1 / 4 + distill / 2]))


def test_raw_takes_logits_for_probabilities() -> None:
    """-sum_c Z_c log p_c = ln 3 ln 4, with the gradient sum(Z) p - Z = ln 3 (3/4, -3/4)."""
    loss, moved, _ = learn(FD(raw=True), logits(c0=(0, LN3)))
    assert loss == pytest.approx(log(4 / 3) + LN3 * log(4))
    assert_close(moved, torch.tensor([1 / 4 - 3 * LN3 / 4, -1 / 4 + 3 * LN3 / 4]))


def test_target_is_that_of_the_samples_own_class() -> None:
    """Class 0 has (0, ln 3) as above, class 1, which no sample has, something else."""
    loss, moved, _ = learn(FD(), logits(c1=(50, -50), c0=(0, LN3)))
    assert loss == pytest.approx(log(4 / 3) + log(4 / 3) / 4 + 3 * log(4) / 4)
    assert_close(moved, torch.tensor([-1 / 4, 1 / 4]))


def test_without_global_logits_the_loss_is_cross_entropy_alone() -> None:
    loss, moved, _ = learn(FD(distill=10), NOTHING)
    assert loss == pytest.approx(log(4 / 3))
    assert_close(moved, torch.tensor([1 / 4, -1 / 4]))


def test_a_class_without_global_logits_is_its_own_target_and_moves_nothing() -> None:
    """Two samples with z = (ln 3, 0): of class 0, which has no Z, and of class 1 with Z = (0, 0).

    q = (3/4, 1/4) for the first, so CE(z, q) is the entropy and its gradient 0; q = (1/2, 1/2) for
    the second, with the gradient (1/4, -1/4). The gradients of CE(z, y) are (-1/4, 1/4) and
    (3/4, -3/4); each is a mean over 2 samples.
    """
    data = tiny.points([(1, 0), (1, 0)], [0, 1], num_classes=2)
    loss, moved, _ = learn(FD(), logits(c1=(0, 0)), data)
    plain = log(4 / 3) + log(4)
    entropy = 3 / 4 * log(4 / 3) + log(4) / 4
    assert loss == pytest.approx((plain + entropy + (log(4 / 3) + log(4)) / 2) / 2)
    assert_close(moved, -torch.tensor([-1 / 4 + 3 / 4 + 1 / 4, 1 / 4 - 3 / 4 - 1 / 4]) / 2)


# The client's logits


def test_upload_holds_the_means_of_the_classes_the_client_has() -> None:
    """One batch, so z is that of the untrained head: (x_1, x_2, 0). Class 0 has ((0, 4) + (2, 0)) /
    2, class 2 has (3, 6), class 1 nothing."""
    data = tiny.points([(0, 4), (3, 6), (2, 0)], [0, 2, 0], num_classes=3)
    client = ClientState(tiny.model(head=[[1, 0], [0, 1], [0, 0]]))
    nothing = Download(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    upload = tiny.update(FD(), client, nothing, tiny.client_context(data))
    assert upload.classes.tolist() == [0, 2]
    assert_close(upload.logits, torch.tensor([[1.0, 2.0, 0.0], [3.0, 6.0, 0.0]]))
    assert upload.logits.requires_grad is False


@pytest.mark.parametrize(
    ("gather", "expected"), [("training", 1 / 2), ("after", 1 + 2 / (1 + exp(2)))]
)
def test_logits_are_gathered_while_training_or_afterwards(gather: Any, expected: float) -> None:
    """Two samples x = (1, 0) of class 0, one after the other, and a head of zeros.

    The first has z = (0, 0) and the gradient (-1/2, 1/2), which at rate 1 moves weight and bias so
    that the second has z = (1, -1). Their mean is (1/2, -1/2). The second's gradient is
    (p - 1, 1 - p) with 1 - p = 1 / (1 + e^2); afterwards both have z_0 = 1 + 2 (1 - p) = -z_1.
    """
    data = tiny.points([(1, 0), (1, 0)], [0, 0], num_classes=2)
    client = ClientState(tiny.model(head=[[0, 0], [0, 0]]))
    ctx = tiny.client_context(data, lr=1.0, batch_size=1)
    upload = tiny.update(FD(gather=gather), client, NOTHING, ctx)
    assert upload.classes.tolist() == [0]
    assert_close(upload.logits, torch.tensor([[expected, -expected]]))


def test_all_local_epochs_count() -> None:
    """As above, but both steps are epochs over one sample."""
    _, _, upload = learn(FD(), NOTHING, tiny.points([(0, 0)], [0], 2), epochs=2)
    assert_close(upload.logits, torch.tensor([[1 / 4, -1 / 4]]))  # the mean of (0, 0), (1/2, -1/2)


def test_logits_afterwards_are_those_of_evaluation_mode_over_all_data() -> None:
    torch.manual_seed(0)
    data = tiny.points([(1, 5), (9, 9), (4, 2), (3, 8), (7, 7)], [0, 0, 2, 0, 2], 3)
    ctx = tiny.client_context(data, eval_batch_size=2, batch_size=2, lr=0.5)
    model = tiny.moody_model(pixels=2, width=3, num_classes=3)
    nothing = Download(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    upload = tiny.update(FD(gather="after"), ClientState(model), nothing, ctx)
    assert model.training
    means = tiny.means_by_loops(model, ctx)
    assert upload.classes.tolist() == list(means) == [0, 2]
    with torch.no_grad():  # the head is linear: the mean of its logits is that of the mean
        assert_close(upload.logits, model.head(torch.stack(list(means.values()))))


# The server


def reply(client: int, **by_class: tuple[float, ...]) -> Reply[Upload]:
    return Reply(client, 7 * client + 1, Upload(*logits(**by_class)))


REPLIES = [reply(0, c0=(1, 1, 0), c2=(2, 0, 4)), reply(1, c0=(3, 5, 2)), reply(4, c0=(5, 0, 1))]


def trained(hp: FD) -> Server:
    server = hp.init_server(SERVER)
    hp.server_update(server, REPLIES, SERVER)
    return server


def test_mean_of_a_class_by_hand() -> None:
    """Class 0: ((1, 1, 0) + (3, 5, 2) + (5, 0, 1)) / 3 = (3, 2, 1), whatever the sample counts."""
    hp = FD()
    message = hp.broadcast(trained(hp), [0, 1, 2], SERVER)
    assert isinstance(message, Download)
    assert message.classes.tolist() == [0, 2]
    assert_close(message.logits, torch.tensor([[3.0, 2.0, 1.0], [2.0, 0.0, 4.0]]))


def test_a_clients_own_logits_are_left_out_if_asked_for() -> None:
    """Client 0 gets class 0 from 1 and 4, (4, 5/2, 3/2), and nothing of class 2, which it alone has
    sent; client 1 gets class 0 from 0 and 4; client 2, new here, gets what everybody sent."""
    hp = FD(exclude_own=True)
    messages = hp.broadcast(trained(hp), [0, 1, 2], SERVER)
    assert isinstance(messages, PerClient)
    assert list(messages) == [0, 1, 2]
    assert messages[0].classes.tolist() == [0]
    assert_close(messages[0].logits, torch.tensor([[4.0, 2.5, 1.5]]))
    assert messages[1].classes.tolist() == [0, 2]
    assert_close(messages[1].logits, torch.tensor([[3.0, 0.5, 0.5], [2.0, 0.0, 4.0]]))
    assert_close(messages[2].logits, torch.tensor([[3.0, 2.0, 1.0], [2.0, 0.0, 4.0]]))


def test_classes_nobody_sent_disappear() -> None:
    hp = FD()
    server = trained(hp)
    hp.server_update(server, [reply(3, c1=(1, 2, 3))], SERVER)
    message = hp.broadcast(server, [0], SERVER)
    assert isinstance(message, Download)
    assert message.classes.tolist() == [1]
    assert_close(message.logits, torch.tensor([[1.0, 2.0, 3.0]]))


# Whole runs: client 0 has classes 0 and 1, client 1 has 1 and 3, of 4


DATA = tiny.points([(0, 1), (1, 0), (2, 2), (5, 1)], [0, 1, 1, 3], num_classes=4)


def run(out: Path, clients: int = 2, **hp: Any) -> tiny.Run:
    config = Config(
        method="fd", clients=clients, participation=1.0, rounds=2, out=out, hp=hp,
        fleet=FleetConfig(("mlp",), 2), train=TrainConfig(lr=0.001),
    )  # fmt: skip
    shares = [[0, 1], [2, 3]] if clients == 2 else [[0, 1, 2, 3]]
    return tiny.simulate(config, DATA, tiny.deal(*shares))


def test_first_round_has_no_logits_and_the_second_has_the_firsts(tmp_path: Path) -> None:
    """Each class has 4 logits: 2 classes a client up, 3 classes down, ids beside the count."""
    found = run(tmp_path)
    assert found.count("numbers", 1, "down") == 0
    for client in (0, 1):
        assert found.count("scalars", 1, "up", client=client) == 2 * 4
        assert found.count("scalars", 2, "down", client=client) == 3 * 4
        assert found.count("numbers", 2, "down", client=client, field="classes") == 3


def test_without_its_own_each_client_gets_the_others_classes(tmp_path: Path) -> None:
    found = run(tmp_path, exclude_own=True)
    assert found.count("numbers", 1, "down") == 0
    for client in (0, 1):
        assert found.count("scalars", 2, "down", client=client) == 2 * 4


def test_a_client_alone_hears_nothing_without_its_own(tmp_path: Path) -> None:
    assert run(tmp_path / "own", clients=1).count("scalars", 2, "down") == 3 * 4
    assert run(tmp_path / "none", clients=1, exclude_own=True).count("numbers", 2, "down") == 0


def test_inference_is_the_clients_own_model() -> None:
    client = ClientState(tiny.model(head=[[0, 1], [1, 0]]))
    x = torch.tensor([2.0, 5.0]).view(1, 2, 1, 1)
    assert_close(FD().predict(client, x).detach(), torch.tensor([[5.0, 2.0]]))
