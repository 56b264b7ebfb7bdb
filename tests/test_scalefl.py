"""ScaleFL's exits, losses and mean, worked by hand."""

from collections.abc import Iterator
from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from small_zoo import zoo_of
from torch import nn
from torch.testing import assert_close

import zoo
from methods.scalefl import Client, ScaleFL, Upload
from raysim import (
    ClientContext,
    Config,
    ConfigError,
    Fleet,
    FleetConfig,
    Reply,
    Result,
    Task,
    TrainConfig,
    get_weights,
    method,
    wire,
)
from raysim.data import Dataset
from raysim.exits import ExitModel, place
from zoo import SplitModel
from zoo.split import Backbone

TEN = Task(10)
LN3 = log(3)


def with_exits(name: str, hp: ScaleFL, task: Task = TEN) -> ExitModel:
    model = zoo.build(name, task, zoo.native_dim(name, task))
    return ExitModel(model, task, hp.depths, hp.exit_layers)


# Exits


@pytest.mark.parametrize(
    ("name", "blocks", "places"),
    [
        ("slim_resnet10", 4, [2, 3, 3, 4]),
        ("slim_resnet18", 8, [4, 6, 7, 8]),
        ("resnet50", 16, [9, 11, 14, 16]),
        ("cnn5", 2, [1, 1, 2, 2]),
        ("mlp", 1, [1, 1, 1, 1]),
        ("mobilenet_v2", 18, [10, 13, 15, 18]),
        ("googlenet", 9, [5, 6, 8, 9]),
    ],
)
def test_exits_are_behind_the_nearest_blocks(name: str, blocks: int, places: list[int]) -> None:
    """Shares 0.56, 0.7 and 0.85 of the blocks; levels that end at one block share its exit."""
    with torch.device("meta"):
        model = with_exits(name, ScaleFL())
    assert (len(model.blocks), model.places) == (blocks, places)
    assert len(model.exits) == len({p for p in places if p < blocks})


def test_default_depths_are_resnet110s() -> None:
    assert [place(depth, 54) for depth in ScaleFL().depths] == [30, 38, 46, 54]
    assert place(0.01, 54) == 1


def test_an_exit_is_three_convolutions_and_a_classifier() -> None:
    with torch.device("meta"):
        exits = with_exits("slim_resnet10", ScaleFL()).exits
        bottleneck = with_exits("resnet50", ScaleFL()).exits[0]
    found = [list(layer.weight.shape) for layer in exits[0].neck if isinstance(layer, nn.Conv2d)]
    assert found == [[32, 32, 3, 3]] * 3
    assert (exits[0].head.in_features, exits[1].head.in_features) == (32, 64)
    # behind a bottleneck at a quarter of the width
    assert list(bottleneck.neck[0].weight.shape) == [256, 1024, 3, 3]
    assert bottleneck.head.in_features == 256


def test_without_convolutions_an_exit_pools_and_classifies() -> None:
    with torch.device("meta"):
        exits = with_exits("slim_resnet10", ScaleFL(exit_layers=0)).exits
    assert [name for name, _ in exits[0].named_parameters()] == ["head.weight", "head.bias"]


def test_the_last_answer_is_the_models_own() -> None:
    """Exits change nothing of what the model itself computes."""
    torch.manual_seed(0)
    plain = zoo.build("slim_resnet10", TEN, 128).eval()
    model = ExitModel(plain, TEN, (0.25, 0.5, 1.0), 1).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert [answer.shape for answer in model.answers(x)] == [(2, 10)] * 3
        assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize(("level", "exits", "stages"), [(0, 1, 2), (1, 2, 3), (2, 2, 3), (3, 3, 4)])
def test_a_shallow_model_ends_at_its_exit(level: int, exits: int, stages: int) -> None:
    torch.manual_seed(0)
    model = with_exits("slim_resnet10", ScaleFL()).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        deep = model.answers(x)
        names = list(get_weights(model))
        model.end(level)
        found = model.answers(x)
    assert len(found) == exits
    assert all(torch.equal(one, other) for one, other in zip(found, deep, strict=False))
    left = list(get_weights(model))
    assert set(left) <= set(names), "what is left keeps its name"
    assert len({name.split(".")[1] for name in left if name.startswith("trunk.")}) == stages
    assert ("head.weight" in left) == (exits == 3)


# A client's loss


@pytest.fixture
def hand_model() -> Iterator[None]:
    """x -> x -> x in two blocks of two channels, with exits behind both; all heads are zero."""

    def make(task: Task) -> SplitModel:
        identity = [[1.0, 0.0], [0.0, 1.0]]
        blocks = [tiny.linear(identity, bias=False) for _ in range(2)]
        backbone = Backbone(nn.Flatten(), nn.Sequential(*blocks), nn.Identity())
        model = SplitModel("two", backbone, 2, 2)
        model.head = tiny.linear([[0, 0], [0, 0]])
        return model

    with zoo_of(make):
        yield


HALF: Any = {"widths": (0.5, 1.0), "depths": (0.5, 1.0)}
FLEET = Fleet(("two",), 2)
POINT = tiny.points([(1, 2)], [0], num_classes=2)


def context(client: int, round: int = 1, rounds: int = 1) -> ClientContext:
    ctx = tiny.client_context(POINT, lr=1.0)
    return replace(ctx, client_id=client, fleet=FLEET, round=round, rounds=rounds)


def newborn(hp: ScaleFL, ctx: ClientContext) -> Client:
    """With zeros in the early exit too, and biases (ln 9, 0) there and (0, ln 9) at the end."""
    client = hp.init_client(ctx.build_model(), ctx)
    with torch.no_grad():
        for parameter in client.model.exits.parameters():
            parameter.zero_()
        client.model.exits[0].head.bias[0] = 2 * LN3
        if isinstance(client.model.head, nn.Linear):
            client.model.head.bias[1] = 2 * LN3
    return client


CE = (log(10 / 9) + 2 * log(10)) / 3
"""Exit 1 has softmax (9/10, 1/10), CE = ln(10/9); exit 2 the opposite, CE = ln 10: weights 1 and 2
of 3."""
KL = LN3 / 2
"""At T = 2 biases are ln 3: KL((1/4, 3/4) || (3/4, 1/4)) = 1/4 ln(1/3) + 3/4 ln 3 = ln 3 / 2."""


@pytest.mark.parametrize(
    ("hp", "round", "rounds", "loss"),
    [
        ({"distill": 0.0}, 1, 1, CE),
        ({"distill": 0.3}, 1, 1, CE + 0.3 * 4 * KL / 3),
        ({"distill": 0.3}, 1, 4, CE),  # not more than a quarter of the rounds
        ({"distill": 0.3}, 2, 4, CE + 0.3 * 4 * KL / 3),
        ({"distill": 0.3, "faithful": True}, 1, 1, CE + 0.3 * 4 * KL / 2 / 3),
    ],
)
@pytest.mark.usefixtures("hand_model")
def test_loss_of_two_exits_by_hand(hp: Any, round: int, rounds: int, loss: float) -> None:
    method = ScaleFL(**HALF, temperature=2.0, **hp)
    ctx = context(1, round, rounds)
    client = newborn(method, ctx)
    method.client_update(client, None, ctx)
    assert ctx.losses == [pytest.approx(loss, abs=1e-6)]


@pytest.mark.parametrize(
    ("hp", "early", "last"),
    [
        # dz of cross-entropy: (9/10 - 1, 1/10) / 3 and (1/10 - 1, 9/10) 2/3
        ({"distill": 0.0}, [-1 / 30, 1 / 30], [-3 / 5, 3 / 5]),
        # and of 0.3 T^2 KL / 3, T = 2: 0.4 (p_1 - p_2) / 2 = 0.4 (1/2, -1/2) / 2
        ({"distill": 0.3}, [-1 / 30 + 0.1, 1 / 30 - 0.1], [-3 / 5, 3 / 5]),
    ],
)
@pytest.mark.usefixtures("hand_model")
def test_step_of_two_exits_by_hand(hp: Any, early: list[float], last: list[float]) -> None:
    """The teacher learns from its labels alone."""
    method = ScaleFL(**HALF, temperature=2.0, **hp)
    ctx = context(1)
    client = newborn(method, ctx)
    sent = method.client_update(client, None, ctx).model
    assert_close(torch.tensor([2 * LN3, 0]) - sent["exits.0.head.bias"], torch.tensor(early))
    assert_close(torch.tensor([0, 2 * LN3]) - sent["head.bias"], torch.tensor(last))


@pytest.mark.usefixtures("hand_model")
def test_the_public_codes_teacher_learns_too() -> None:
    moved = []
    for faithful in (False, True):
        hp = ScaleFL(**HALF, distill=0.3, temperature=2.0, faithful=faithful)
        ctx = context(1)
        client = newborn(hp, ctx)
        moved.append(hp.client_update(client, None, ctx).model["head.bias"])
    assert not torch.allclose(*moved, atol=1e-3)


@pytest.mark.usefixtures("hand_model")
def test_a_narrow_client_has_one_exit_and_its_scaler() -> None:
    """Level 1: one block, one channel, which gives x_1 / (1/2) = 2, in training and in testing; the
    only exit has all of the weight."""
    hp = ScaleFL(**HALF)
    ctx = context(0)
    client = newborn(hp, ctx)
    assert {name: list(w.shape) for name, w in get_weights(client.model).items()} == {
        "trunk.0.weight": [1, 2], "exits.0.head.weight": [2, 1], "exits.0.head.bias": [2],
    }  # fmt: skip
    with torch.no_grad():
        client.model.exits[0].head.weight.fill_(1.0)
    x = torch.tensor([[1.0, 2.0]])[:, :, None, None]
    for mode in (True, False):
        assert_close(client.model.train(mode)(x), torch.tensor([[2 + 2 * LN3, 2.0]]))
    hp.client_update(client, None, ctx)
    assert ctx.losses == [pytest.approx(log(10 / 9), abs=1e-6)]


# The server


@pytest.mark.usefixtures("hand_model")
def test_mean_is_over_those_who_have_an_entry() -> None:
    """The narrow client sends 1, two wide ones 4 and 10: (1 + 4 + 10) / 3 = 5 where all have it,
    and (4 + 10) / 2 = 7 elsewhere: the other channel, the second block, the last exit."""
    hp, ctx = ScaleFL(**HALF), tiny.server_context(FLEET, POINT.task)
    server = hp.init_server(ctx)
    message = hp.broadcast(server, [0, 1, 3], ctx)
    assert message[1] is message[3]
    replies = []
    for client, value in ((0, 1.0), (1, 4.0), (3, 10.0)):
        sent = {name: torch.full_like(w, value) for name, w in message[client].model.items()}
        wire.check_like(Upload(sent), hp.expected(client, ctx), "payload")
        replies.append(Reply(client, 1 + client, Upload(sent)))
    hp.server_update(server, replies, ctx)
    found = {name: w.tolist() for name, w in server.weights.items()}
    assert found == {
        "trunk.0.weight": [[5, 5], [7, 7]], "trunk.1.weight": [[7, 7], [7, 7]],
        "head.weight": [[7, 7], [7, 7]], "head.bias": [7, 7],
        "exits.0.head.weight": [[5, 7], [5, 7]], "exits.0.head.bias": [5, 5],
    }  # fmt: skip


@pytest.mark.usefixtures("hand_model")
def test_without_a_deep_client_deep_layers_stay() -> None:
    hp, ctx = ScaleFL(**HALF), tiny.server_context(FLEET, POINT.task)
    server = hp.init_server(ctx)
    before = {name: w.clone() for name, w in server.weights.items()}
    sent = {name: w + 1 for name, w in hp.broadcast(server, [0], ctx)[0].model.items()}
    hp.server_update(server, [Reply(0, 1, Upload(sent))], ctx)
    changed = {name for name in before if not torch.equal(before[name], server.weights[name])}
    assert changed == {"trunk.0.weight", "exits.0.head.weight", "exits.0.head.bias"}


@pytest.mark.usefixtures("hand_model")
def test_a_level_is_sent_as_a_view_of_the_global_model() -> None:
    hp, ctx = ScaleFL(**HALF), tiny.server_context(FLEET, POINT.task)
    server = hp.init_server(ctx)
    for name, tensor in hp.broadcast(server, [0], ctx)[0].model.items():
        assert tensor.data_ptr() == server.weights[name].data_ptr()


# A whole run


def test_levels_pay_for_what_they_have_and_answer_at_every_exit(tmp_path: Path) -> None:
    """slim_resnet10's first level ends behind two of its four blocks, at widths ceil(0.7 16) = 12
    and ceil(0.7 32) = 23:

        stem     3 * 49 * 12 + 2 * 12                                           =  1,788
        block 1  2 * 9 * 12 * 12 + 4 * 12                                       =  2,640
        block 2  9 * 12 * 23 + 9 * 23 * 23 + 4 * 23 + 12 * 23 + 2 * 23          =  7,659
        exit     3 * 9 * 23 * 23 + 3 * 2 * 23 + 23 * 2 + 2                      = 14,469
    """
    images = np.random.RandomState(0).randint(0, 256, (20, 3, 32, 32), np.uint8)
    noise = Dataset("noise", images, np.arange(20) % 2, 20, 2, mean=(0.5,) * 3, std=(0.5,) * 3)
    config = Config(
        method="scalefl", clients=5, participation=1.0, rounds=2, out=tmp_path,
        fleet=FleetConfig(("slim_resnet10",)), train=TrainConfig(batch_size=4, lr=0.05),
    )  # fmt: skip
    run = tiny.simulate(config, noise, tiny.deal(*(range(4 * k, 4 * k + 4) for k in range(5))))
    first = 1_788 + 2_640 + 7_659 + 14_469
    for client in (0, 4):
        for way in ("up", "down"):
            assert run.count("scalars", 2, way, client=client) == first
    sizes = [run.count("scalars", 1, "up", client=k) for k in range(4)]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 4
    result = Result.load(tmp_path)
    rows = [row for row in result.variants.to_pylist() if row["round"] == 2]
    names = {
        row["client"]: {r["variant"] for r in rows if r["client"] == row["client"]} for row in rows
    }
    assert names[0] == {"last"}
    assert names[1] == names[2] == {"last", "exit1"}
    assert names[3] == {"last", "exit1", "exit2"}
    evaluated = {row["model"] for row in result.clients.to_pylist() if row["phase"] == "eval"}
    assert evaluated == {f"slim_resnet10@level{q}" for q in (1, 2, 3, 4)}


# What is refused


@pytest.mark.parametrize(
    ("hp", "words"),
    [
        ({"widths": (0.5, 1.0)}, r"--hp\.widths and --hp\.depths must be as many, got 2 and 4"),
        ({"widths": (0.0, 0.5, 1.0, 1.0)}, r"--hp\.widths must be above 0 .* got 0 0\.5 1 1"),
        ({"depths": (0.2, 0.5, 1.0, 2.0)}, r"--hp\.depths must be above 0"),
        ({"exit_layers": -1}, r"--hp\.exit-layers must be 0 or more"),
        ({"temperature": 0.0}, r"--hp\.temperature above 0"),
    ],
)
def test_impossible_settings_are_refused(hp: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        method.check(ScaleFL(**hp), Fleet(("slim_resnet10",), 128), TEN, "scalefl")


def test_models_that_cannot_be_sliced_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"vit_b_16 cannot be sliced: its layer stem is a Tokens"):
        method.check(ScaleFL(), Fleet(("vit_b_16",), 768), TEN, "scalefl")
    with pytest.raises(ConfigError, match="one global model"):
        method.check(ScaleFL(), Fleet(("cnn1", "cnn2"), 500), TEN, "scalefl")
    for name in ("resnet50", "mobilenet_v2", "cnn1"):
        fleet = Fleet((name,), zoo.native_dim(name, TEN))
        method.check(ScaleFL(), fleet, TEN, "scalefl")
