"""FedProto's equations, worked by hand."""

from math import inf, log
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor
from torch.testing import assert_close

from methods.fedproto import Client, Download, FedProto, Server, Upload
from raysim import Config, Fleet, FleetConfig, Reply, Task, TrainConfig
from raysim.worker import Worker
from zoo import SplitModel

SERVER = tiny.server_context(Fleet(("mlp",), 2), Task(3))
NOTHING = Download(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64))


def prototypes(**by_class: tuple[float, ...]) -> Download:
    """prototypes(c0=(1, 2)) says that class 0 is at (1, 2) and the others are unknown."""
    classes = torch.tensor([int(name[1:]) for name in by_class])
    return Download(torch.tensor(list(by_class.values()), dtype=torch.float32), classes)


def make_client(model: SplitModel, num_classes: int) -> Client:
    unknown = torch.zeros(num_classes, dtype=torch.bool)
    return Client(model, torch.zeros(num_classes, model.feature_dim), unknown)


def image(*pixels: float) -> Tensor:
    return torch.tensor(pixels, dtype=torch.float32).view(1, -1, 1, 1)


# The client's loss


TWO = tiny.points([(1, 2), (3, 0)], [0, 1], num_classes=2)


@pytest.mark.parametrize("pull", [1.0, 10.0])
def test_loss_by_hand_with_a_known_and_an_unknown_class(pull: float) -> None:
    """Features F = I and a head of zeros; x_0 = (1, 2) of class 0 with P_0 = (0, 0), x_1 = (3, 0)
    of class 1, which nobody has sent.

    CE = ln 2 for both. The distance is (1 + 4) for x_0 and 0 for x_1, its mean over the
    batch of 2 and the 2 features 5/4: loss = ln 2 + lambda 5/4.

    Behind a head of zeros CE has no gradient in r; that of the distance is 2 (r_0 - P_0) / 4, so
    dF = lambda (1/2, 1) (1, 2)^T, nothing from x_1, and
    dH = 1/2 (-1/2, 1/2) (1, 2)^T + 1/2 (1/2, -1/2) (3, 0)^T = [[1/2, -1/2], [-1/2, 1/2]].
    """
    client = make_client(tiny.model(head=[[0, 0], [0, 0]], features=[[1, 0], [0, 1]]), 2)
    ctx = tiny.client_context(TWO, lr=0.1)
    tiny.update(FedProto(pull=pull), client, prototypes(c0=(0, 0)), ctx)
    assert ctx.losses == [pytest.approx(log(2) + pull * 5 / 4)]
    moved = torch.eye(2) - 0.1 * pull * torch.tensor([[0.5, 1.0], [1.0, 2.0]])
    assert_close(client.model.trunk.weight.detach(), moved)
    head = -0.1 * torch.tensor([[0.5, -0.5], [-0.5, 0.5]])
    assert_close(client.model.head.weight.detach(), head)


def test_target_is_the_prototype_of_the_samples_own_class() -> None:
    """P_0 = (1, 1) is (0, 1) from x_0, P_1 = (3, 2) is (0, 2) from x_1: (1 + 4) / 4 again. With the
    classes exchanged it would be (4 + 0 + 4 + 1) / 4."""
    client = make_client(tiny.model(head=[[0, 0], [0, 0]], features=[[1, 0], [0, 1]]), 2)
    ctx = tiny.client_context(TWO, lr=0.1)
    tiny.update(FedProto(), client, prototypes(c1=(3, 2), c0=(1, 1)), ctx)
    assert ctx.losses == [pytest.approx(log(2) + 5 / 4)]


def test_without_prototypes_the_loss_is_cross_entropy_alone() -> None:
    client = make_client(tiny.model(head=[[0, 0], [0, 0]], features=[[1, 0], [0, 1]]), 2)
    ctx = tiny.client_context(TWO, lr=0.1)
    tiny.update(FedProto(pull=10), client, NOTHING, ctx)
    assert ctx.losses == [pytest.approx(log(2))]
    assert_close(client.model.trunk.weight.detach(), torch.eye(2))


# The client's prototypes


def test_upload_holds_the_means_and_counts_of_the_classes_the_client_has() -> None:
    """Class 0: ((0, 4) + (2, 0)) / 2 = (1, 2). Class 2: (3, 6). Classes 1 and 3: nothing."""
    data = tiny.points([(0, 4), (3, 6), (2, 0)], [0, 2, 0], num_classes=4)
    client = make_client(tiny.model(head=[[0, 0]] * 4), 4)
    upload = tiny.update(FedProto(), client, NOTHING, tiny.client_context(data))
    assert upload.classes.tolist() == [0, 2]
    assert_close(upload.prototypes, torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    assert upload.counts.tolist() == [2, 1]


def test_prototypes_are_the_trained_models_in_eval_mode_over_all_of_the_clients_data() -> None:
    """The client has 5 of 7 samples, of which training in batches of 2 leaves one out; its model
    has batch norm and dropout."""
    torch.manual_seed(0)
    data = tiny.points(
        [(1, 5), (9, 9), (4, 2), (3, 8), (7, 7), (6, 1), (2, 2)], [0, 0, 2, 0, 1, 2, 2], 4
    )
    ctx = tiny.client_context(data, [0, 2, 3, 5, 6], eval_batch_size=2, batch_size=2, lr=0.5)
    model = tiny.moody_model(pixels=2, width=3, num_classes=4)
    nothing = Download(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    upload = tiny.update(FedProto(), make_client(model, 4), nothing, ctx)

    assert model.training, "gathering means must leave the model in the mode it was in"
    assert model.trunk[1].num_batches_tracked == 2, "gathering means is not training"
    means = tiny.means_by_loops(model, ctx)
    assert upload.classes.tolist() == list(means) == [0, 2]
    assert upload.counts.tolist() == [2, 3]
    assert_close(upload.prototypes, torch.stack(list(means.values())))


@pytest.mark.parametrize(
    ("gather", "mean"), [("after", 1 / 8), ("during", 7 / 12), ("last_epoch", 1 / 4)]
)
def test_prototypes_gathered_while_training_by_hand(gather: Any, mean: float) -> None:
    """One sample x = 1 of the only class, so that CE = 0; r = f x with f = 1, P = 0. A step of 1/4
    on r^2 halves f: three epochs see r = 1, 1/2 and 1/4, whose mean is 7/12, and leave 1/8."""
    data = tiny.points([(1,)], [0], num_classes=1)
    client = make_client(tiny.model(head=[[0]], features=[[1]]), 1)
    ctx = tiny.client_context(data, lr=0.25, epochs=3)
    upload = tiny.update(FedProto(gather=gather), client, prototypes(c0=(0,)), ctx)
    assert_close(upload.prototypes, torch.tensor([[mean]]))
    assert not upload.prototypes.requires_grad


@pytest.mark.parametrize(
    ("gather", "classes"), [("after", [0, 1]), ("during", [0]), ("last_epoch", [0])]
)
def test_class_that_training_leaves_out_has_a_prototype_only_of_the_trained_model(
    gather: Any, classes: list[int]
) -> None:
    """Batches of 2 leave the third sample, the only one of class 1, out."""
    data = tiny.points([(1, 5), (3, 1), (2, 2)], [0, 0, 1], num_classes=2)
    client = make_client(tiny.model(head=[[0, 0]] * 2), 2)
    ctx = tiny.client_context(data, batch_size=2, shuffle=False, epochs=2)
    upload = tiny.update(FedProto(gather=gather), client, NOTHING, ctx)
    assert upload.classes.tolist() == classes
    assert upload.counts.tolist() == [2, 1][: len(classes)]
    assert_close(upload.prototypes[0], torch.tensor([2.0, 3.0]))


# The server


def reply(client: int, counts: list[int], **by_class: tuple[float, ...]) -> Reply[Upload]:
    means, classes = prototypes(**by_class)
    return Reply(client, sum(counts), Upload(means, classes, torch.tensor(counts)))


REPLIES = [reply(0, [1, 5], c0=(1, 1), c2=(2, 0)), reply(1, [3], c0=(3, 5))]


@pytest.mark.parametrize(
    ("weighting", "class_0"), [("uniform", (2.0, 3.0)), ("samples", (2.5, 4.0))]
)
def test_mean_of_a_class_by_hand(weighting: Any, class_0: tuple[float, float]) -> None:
    """Class 0 is (1, 1) from 1 sample and (3, 5) from 3: the plain mean is (2, 3), by samples it is
    ((1, 1) + 3 (3, 5)) / 4 = (2.5, 4). Class 2 has one sender, so both give its (2, 0)."""
    server = Server(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64))
    FedProto(weighting=weighting).server_update(server, REPLIES, SERVER)
    assert server.classes.tolist() == [0, 2]
    assert_close(server.prototypes, torch.tensor([class_0, (2.0, 0.0)]))


def test_classes_nobody_sent_disappear() -> None:
    """The server knew classes 1 and 2; in this round it hears of 0 and 2. Nothing of the old
    prototypes is left, neither at the server nor at a client that had them."""
    known = prototypes(c1=(9, 9), c2=(8, 8))
    client = make_client(tiny.model(head=[[0, 0]] * 3), 3)
    server = Server(known.prototypes, known.classes)
    hp, ctx = FedProto(), tiny.client_context(TWO)
    hp.receive(client, known, ctx)
    assert client.known.tolist() == [False, True, True]

    hp.server_update(server, REPLIES, SERVER)
    hp.receive(client, hp.broadcast(server, [0], SERVER), ctx)
    assert client.known.tolist() == [True, False, True]
    assert hp.predict(client, image(9, 9))[0, 1] == -inf
    assert_close(client.prototypes[[0, 2]], torch.tensor([[2.0, 3.0], [2.0, 0.0]]))


# Inference


def test_prediction_is_the_nearest_prototype() -> None:
    """P_0 = (0, 0), P_1 = (4, 2). From (1, 0) the squared distances over d = 2 are 1/2 and
    (9 + 4) / 2; from (3, 2) they are 13/2 and 1/2. The head, which always says 1, is not asked."""
    client = make_client(tiny.model(head=[[0, 0], [1, 1]]), 2)
    hp = FedProto()
    hp.receive(client, prototypes(c0=(0, 0), c1=(4, 2)), tiny.client_context(TWO))
    assert_close(hp.predict(client, image(1, 0)), torch.tensor([[-0.5, -6.5]]))
    assert_close(hp.predict(client, image(3, 2)), torch.tensor([[-6.5, -0.5]]))


def test_prediction_by_the_head_if_asked_for() -> None:
    client = make_client(tiny.model(head=[[0, 0], [1, 1]]), 2)
    hp = FedProto(inference="head")
    hp.receive(client, prototypes(c0=(0, 0), c1=(4, 2)), tiny.client_context(TWO))
    assert_close(hp.predict(client, image(1, 0)).detach(), torch.tensor([[0.0, 1.0]]))


def test_unknown_class_is_never_the_answer() -> None:
    """Class 0 was never sent; its place in memory, (0, 0), is exactly where the sample is."""
    client = make_client(tiny.model(head=[[0, 0], [0, 0]]), 2)
    hp = FedProto()
    hp.receive(client, prototypes(c1=(9, 9)), tiny.client_context(TWO))
    scores = hp.predict(client, image(0, 0))
    assert scores[0, 0] == -inf
    assert scores.argmax() == 1


def worker() -> Worker:
    """Client 0 has two samples of class 0 and one of class 1."""
    data = tiny.points([(0, 1), (1, 0), (2, 2)], [0, 0, 1], num_classes=2)
    config = Config(method="fedproto", clients=1, fleet=FleetConfig(("mlp",), 2))
    return tiny.make_worker(config, data, tiny.deal([0, 1, 2]))


def test_before_the_first_aggregation_accuracy_is_zero() -> None:
    """Every score is -inf, and the largest of them, class 0 by position, is no answer."""
    evaluation = tiny.evaluate(worker(), NOTHING)
    assert (evaluation.correct, evaluation.samples) == (0, 3)


def test_with_one_known_class_only_its_samples_are_right() -> None:
    assert tiny.evaluate(worker(), prototypes(c1=(0, 0))).correct == 1
    assert tiny.evaluate(worker(), prototypes(c0=(0, 0))).correct == 2


def test_first_round_has_no_prototypes_and_the_second_has_the_firsts(tmp_path: Path) -> None:
    """Client 0 has classes 0 and 1, client 1 has 1 and 3, of 4: three prototypes of width 2."""
    data = tiny.points([(0, 1), (1, 0), (2, 2), (5, 1)], [0, 1, 1, 3], num_classes=4)
    config = Config(
        method="fedproto", clients=2, participation=1.0, rounds=2, out=tmp_path,
        fleet=FleetConfig(("mlp",), 2), train=TrainConfig(lr=0.001),
    )  # fmt: skip
    run = tiny.simulate(config, data, tiny.deal([0, 1], [2, 3]))
    assert run.count("numbers", 1, "down") == 0
    assert run.count("scalars", 2, "down", client=0, field="prototypes") == 3 * 2
    assert run.states[0]["known"].tolist() == [True, True, False, True]
    assert torch.equal(run.states[0]["prototypes"], run.states[1]["prototypes"])
