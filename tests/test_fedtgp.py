"""FedTGP's equations, worked by hand."""

import copy
from math import inf, log
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from methods.fedtgp import Client, Download, FedTGP, Server, Upload, margin
from raysim import Config, ConfigError, Fleet, FleetConfig, Reply, Task, method
from raysim.worker import Worker
from zoo import SplitModel

NOTHING = Download(torch.zeros(0, 2))
TWO = tiny.points([(1, 2), (3, 0)], [0, 1], num_classes=2)
EYE = [[1, 0], [0, 1]]


def table(*prototypes: tuple[float, ...]) -> Download:
    return Download(torch.tensor(prototypes, dtype=torch.float32))


def make_client(model: SplitModel, num_classes: int) -> Client:
    unknown = torch.zeros(num_classes, dtype=torch.bool)
    return Client(model, torch.zeros(num_classes, model.feature_dim), unknown)


def image(*pixels: float) -> Tensor:
    return torch.tensor(pixels, dtype=torch.float32).view(1, -1, 1, 1)


# The client


@pytest.mark.parametrize("pull", [1.0, 10.0])
def test_loss_by_hand_of_a_client_that_is_first_chosen_late(pull: float) -> None:
    """Features F = I and a head of zeros: CE = ln 2. x_0 = (1, 2) is (1, 2) from T(0) = (0, 0),
    x_1 = (3, 0) is (0, -2) from T(1) = (3, 2): the mean over 2 samples and 2 features is 9/4.

    Behind a head of zeros CE has no gradient in r; that of the distance is 2 (r - T) / 4, so
    dF = lambda ((1/2, 1) (1, 2)^T + (0, -1) (3, 0)^T) = lambda [[1/2, 1], [1 - 3, 2]].
    """
    client = make_client(tiny.model(head=[[0, 0], [0, 0]], features=EYE), 2)
    ctx = tiny.client_context(TWO, lr=0.1)
    tiny.update(FedTGP(pull=pull), client, table((0, 0), (3, 2)), ctx)
    assert ctx.losses == [pytest.approx(log(2) + pull * 9 / 4)]
    moved = torch.eye(2) - 0.1 * pull * torch.tensor([[0.5, 1.0], [-2.0, 2.0]])
    assert_close(client.model.trunk.weight.detach(), moved)


def test_in_the_first_round_the_loss_is_cross_entropy_alone() -> None:
    client = make_client(tiny.model(head=[[0, 0], [0, 0]], features=EYE), 2)
    ctx = tiny.client_context(TWO, lr=0.1)
    tiny.update(FedTGP(pull=10), client, NOTHING, ctx)
    assert ctx.losses == [pytest.approx(log(2))]
    assert_close(client.model.trunk.weight.detach(), torch.eye(2))


@pytest.mark.parametrize("gather", ["after", "before"])
def test_prototypes_are_made_after_training_or_before_in_eval_mode_over_all_data(
    gather: Any,
) -> None:
    """The client has 5 of 7 samples, of which training in batches of 2 leaves one out; its model
    has batch norm and dropout."""
    torch.manual_seed(0)
    data = tiny.points(
        [(1, 5), (9, 9), (4, 2), (3, 8), (7, 7), (6, 1), (2, 2)], [0, 0, 2, 0, 1, 2, 2], 4
    )
    ctx = tiny.client_context(data, [0, 2, 3, 5, 6], eval_batch_size=2, batch_size=2, lr=0.5)
    model = tiny.moody_model(pixels=2, width=3, num_classes=4)
    untrained = copy.deepcopy(model)
    nothing = Download(torch.zeros(0, 3))
    upload = tiny.update(FedTGP(gather=gather), make_client(model, 4), nothing, ctx)

    assert model.training, "gathering means must leave the model in the mode it was in"
    assert model.trunk[1].num_batches_tracked == 2, "gathering means is not training"
    means = tiny.means_by_loops(model if gather == "after" else untrained, ctx)
    assert upload.classes.tolist() == list(means) == [0, 2]
    assert_close(upload.prototypes, torch.stack(list(means.values())))


def test_client_of_one_class_sends_one_prototype() -> None:
    data = tiny.points([(1, 5), (3, 1)], [1, 1], num_classes=2)
    client = make_client(tiny.model(head=[[0, 0]] * 2), 2)
    upload = tiny.update(FedTGP(), client, NOTHING, tiny.client_context(data, batch_size=64))
    assert upload.classes.tolist() == [1]
    assert_close(upload.prototypes, torch.tensor([[2.0, 3.0]]))


# The margin


@pytest.mark.parametrize(("largest", "delta"), [(100.0, 5.0), (2.0, 2.0)])
def test_margin_by_hand(largest: float, delta: float) -> None:
    """(0, 0) is 5 from (3, 4), its nearest; (3, 4) and (3, 5) are 1 apart. The largest of (5, 1, 1)
    is 5, unless tau is less."""
    means = torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 5.0]])
    assert margin(means, largest) == pytest.approx(delta)


def test_a_class_alone_keeps_the_largest_distance() -> None:
    assert margin(torch.tensor([[3.0, 4.0]]), 7.0) == 7.0


# The server


def generator(e: list[float], w1: float, b1: float, w2: float, b2: float) -> nn.Sequential:
    """T(c) = w2 ReLU(w1 e_c + b1) + b2 for prototypes of width 1."""
    layers = nn.Sequential(nn.Embedding(len(e), 1), nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1))
    with torch.no_grad():
        for parameter, values in zip(
            layers.parameters(), [[[x] for x in e], [[w1]], [b1], [[w2]], [b2]], strict=True
        ):
            parameter.copy_(torch.tensor(values))
    return layers


def server(*classes: float) -> Server:
    """e = `classes`, T(c) = 2 ReLU(e_c) + 1."""
    return Server(generator([*classes], 1.0, 0.0, 2.0, 1.0), torch.zeros(0, 1))


def reply(client: int, *pairs: tuple[int, float]) -> Reply[Upload]:
    classes, values = zip(*pairs, strict=True)
    return Reply(client, 1, Upload(torch.tensor(values).unsqueeze(1), torch.tensor(classes)))


def context(num_classes: int) -> Any:
    return tiny.server_context(Fleet(("mlp",), 1), Task(num_classes))


def values(server: Server) -> list[float]:
    return [value for parameter in server.generator.parameters() for value in parameter.flatten()]


def test_server_step_by_hand() -> None:
    """e = (0, 1): h = ReLU(e) = (0, 1), T = (1, 3). One pair, p = 2 of class 0: dist = (1, 1), and
    with delta = tau = ln 3 the logits are (-1 - ln 3, -1), softmax = (1/4, 3/4), dz = (-3/4, 3/4).

    z_c = -|2 - T(c)| rises with T(0) = 1 and falls with T(1) = 3, so dT = (-3/4, -3/4): T(0) is
    drawn to p, T(1), whose class nobody holds, is pushed away.
    b2: -3/2.  w2: dT . h = -3/4.  dh = w2 dT = (-3/2, -3/2), of which ReLU at 0 lets the second
    pass.  w1: -3/2 e_1 = -3/2.  b1: -3/2.  e: (0, -3/2 w1) = (0, -3/2).

    A step of 0.1: e = (0, 1.15), w1 = 1.15, b1 = 0.15, w2 = 2.075, b2 = 1.15, and
    T(0) = 2.075 * 0.15 + 1.15 = 1.46125, T(1) = 2.075 (1.15^2 + 0.15) + 1.15 = 4.2054375.
    """
    one, hp = server(0.0, 1.0), FedTGP(margin=log(3), server_lr=0.1, server_epochs=1)
    hp.server_update(one, [reply(0, (0, 2.0))], context(2))
    assert_close(torch.stack(values(one)), torch.tensor([0, 1.15, 1.15, 0.15, 2.075, 1.15]))
    assert_close(
        hp.broadcast(one, [0], context(2)).prototypes, torch.tensor([[1.46125], [4.2054375]])
    )


def test_margin_is_between_the_means_over_clients() -> None:
    """Class 0 is 0 from one client and 2 from another, class 1 is 4: the means 1 and 4 are 3 apart,
    less than tau. The first loss, with T = (1, 3):

    p = 0, c = 0: logits -(1 + 3), -3;  p = 2, c = 0: -(1 + 3), -1;  p = 4, c = 1: -3, -(1 + 3);
    CE = ln(1 + e), ln(1 + e^3), ln(1 + e), their mean (2 * 1.3132617 + 3.0485874) / 3.
    """
    seen: list[float] = []

    def watch(logits: Tensor, y: Tensor) -> Tensor:
        loss = -torch.log_softmax(logits, dim=1)[range(len(y)), y].mean()
        seen.append(float(loss.detach()))
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.nn.functional.cross_entropy", watch)
        replies = [reply(0, (0, 0.0)), reply(1, (0, 2.0), (1, 4.0))]
        FedTGP(server_epochs=1).server_update(server(0.0, 1.0), replies, context(2))
    assert seen == [pytest.approx((2 * 1.3132617 + 3.0485874) / 3, abs=1e-6)]


def test_all_classes_are_broadcast_and_those_nobody_holds_too() -> None:
    one, hp = server(0.0, 1.0, 2.0, 3.0), FedTGP(server_epochs=1)
    assert hp.broadcast(one, [0], context(4)).prototypes.shape == (0, 1), "before the first round"
    hp.server_update(one, [reply(0, (2, 2.0))], context(4))
    message = hp.broadcast(one, [0], context(4))
    assert message.prototypes.shape == (4, 1)
    assert_close(message.prototypes, one.generator(torch.arange(4)).detach())
    assert not message.prototypes.requires_grad


def test_upload_that_is_a_global_prototype_already_gives_no_nan() -> None:
    """p = 1 = T(0) exactly, where a root has no slope; T(1) = 3 is still pushed away."""
    one = server(0.0, 1.0)
    FedTGP(server_lr=0.1, server_epochs=2).server_update(one, [reply(0, (0, 1.0))], context(2))
    assert all(value.isfinite() for value in values(one))
    assert float(one.prototypes[1]) > 3


def test_prototypes_go_on_from_where_the_round_before_left_them() -> None:
    """Two rounds of one step are one round of two: nothing is born anew but SGD, which remembers
    nothing."""
    twice, once = server(0.0, 1.0), server(0.0, 1.0)
    for _ in range(2):
        FedTGP(server_epochs=1).server_update(twice, [reply(0, (0, 2.0))], context(2))
    FedTGP(server_epochs=2).server_update(once, [reply(0, (0, 2.0))], context(2))
    assert values(twice) == values(once)
    assert values(twice) != values(server(0.0, 1.0))


@pytest.mark.parametrize(
    ("settings", "steps"),
    [({}, 200), ({"server_epochs": 3}, 6), ({"server_epochs": 1, "server_batch_size": 1}, 12)],
)
def test_server_makes_a_step_for_each_batch_of_each_epoch(
    settings: dict[str, int], steps: int
) -> None:
    """12 uploads: by default 100 epochs of batches of 10 and 2. The last forward pass of the
    generator is for the broadcast."""
    one, passes = server(0.0, 1.0), []
    one.generator.register_forward_hook(lambda *args: passes.append(1))
    replies = [reply(k, (0, float(k)), (1, k + 0.5)) for k in range(6)]
    FedTGP(server_lr=1e-4, **settings).server_update(one, replies, context(2))
    assert len(passes) == steps + 1


def test_generator_has_an_embedding_and_two_layers_of_the_common_width() -> None:
    """C d + 2 (d d + d) parameters: 3 * 4 + 2 * 20 = 52."""
    built = FedTGP().init_server(tiny.server_context(Fleet(("mlp",), 4), Task(3)))
    assert sum(parameter.numel() for parameter in built.generator.parameters()) == 52
    assert built.generator(torch.arange(3)).shape == (3, 4)


# Inference


def test_prediction_is_the_nearest_prototype() -> None:
    """From (1, 0) the squared distances to (0, 0) and (4, 2), over d = 2, are 1/2 and 13/2. The
    head, which always says 1, is not asked."""
    client, hp = make_client(tiny.model(head=[[0, 0], [1, 1]]), 2), FedTGP()
    hp.receive(client, table((0, 0), (4, 2)), tiny.client_context(TWO))
    assert_close(hp.predict(client, image(1, 0)), torch.tensor([[-0.5, -6.5]]))


def test_without_prototypes_there_is_no_answer() -> None:
    client, hp = make_client(tiny.model(head=[[0, 0], [1, 1]]), 2), FedTGP()
    hp.receive(client, NOTHING, tiny.client_context(TWO))
    assert hp.predict(client, image(0, 0)).tolist() == [[-inf, -inf]]


def worker() -> Worker:
    """Client 0 has two samples of class 0 and one of class 1."""
    data = tiny.points([(0, 1), (1, 0), (2, 2)], [0, 0, 1], num_classes=2)
    config = Config(method="fedtgp", clients=1, fleet=FleetConfig(("mlp",), 2))
    return tiny.make_worker(config, data, tiny.deal([0, 1, 2]))


def test_before_the_first_aggregation_accuracy_is_zero() -> None:
    assert tiny.evaluate(worker(), NOTHING).correct == 0
    assert tiny.evaluate(worker(), table((0, 0), (1e6, 1e6))).correct == 2


# A run


def test_first_round_has_no_prototypes_and_the_second_has_those_of_all_classes(
    tmp_path: Path,
) -> None:
    """Client 0 has classes 0 and 1, client 1 has 1 and 3, of 4: four prototypes of width 2 go up,
    and in the second round 4 to each client come down."""
    data = tiny.points([(0, 1), (1, 0), (2, 2), (5, 1)], [0, 1, 1, 3], num_classes=4)
    config = Config(
        method="fedtgp", clients=2, participation=1.0, rounds=2, out=tmp_path,
        fleet=FleetConfig(("mlp",), 2), hp={"server_epochs": 2},
    )  # fmt: skip
    run = tiny.simulate(config, data, tiny.deal([0, 1], [2, 3]))
    assert run.count("numbers", 1, "down") == 0
    assert run.count("scalars", 2, "down") == run.count("numbers", 2, "down") == 2 * 4 * 2
    for number in (1, 2):
        assert run.count("scalars", number, "up") == 4 * 2
        assert run.count("numbers", number, "up", field="classes") == 4
    assert run.states[0]["known"].all()
    assert torch.equal(run.states[0]["prototypes"], run.states[1]["prototypes"])


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"pull": -1.0}, "--hp.pull must be at least 0, got -1.0"),
        ({"margin": float("nan")}, "--hp.margin must be at least 0, got nan"),
        ({"server_lr": -0.1}, "--hp.server-lr must be at least 0, got -0.1"),
        ({"server_epochs": 0}, "--hp.server-epochs must be at least 1, got 0"),
        ({"server_batch_size": 0}, "--hp.server-batch-size must be at least 1, got 0"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        method.check(FedTGP(**settings), Fleet(("mlp",), 2), Task(2), "fedtgp")
