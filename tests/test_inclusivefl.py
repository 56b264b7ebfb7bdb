"""InclusiveFL's groups, tops and momentum distillation, worked by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch.testing import assert_close

import zoo
from methods.fedavg import FedAvg
from methods.inclusivefl import InclusiveFL, Server, Upload, model_of
from raysim import (
    ClientState,
    Config,
    ConfigError,
    Fleet,
    FleetConfig,
    Reply,
    Task,
    Weights,
    blocks,
    get_weights,
    set_weights,
)
from raysim.data import Dataset

TASK = Task(num_classes=2)
SMALL, LARGE, LARGEST = "slim_resnet10", "slim_resnet14", "slim_resnet18"
TWO = Fleet((SMALL, LARGE), 128)
FAMILY = Fleet(zoo.expand(("slim_resnet",)), 128)
CTX = tiny.server_context(TWO, TASK)
TOPS = ("trunk.2.0.", "trunk.3.0.")  # of the small model


def weights_of(name: str) -> Weights:
    return get_weights(zoo.build(name, TASK, 128))


def constant(name: str, value: float, **changes: float) -> Upload:
    """All weights are `value`, but for layers that start as the keys (with _ for a dot)."""
    model = {k: torch.full_like(t, value) for k, t in weights_of(name).items()}
    for start, other in changes.items():
        for layer in model:
            if layer.startswith(start.replace("_", ".")):
                model[layer] = torch.full_like(model[layer], other)
    return Upload(model)


def ones(method: InclusiveFL, ctx: Any = CTX) -> Server:
    """As the server is at the start, but with every weight 1."""
    server = method.init_server(ctx)
    server.weights = {k: torch.ones_like(t) for k, t in server.weights.items()}
    server.own = {
        name: {k: torch.ones_like(t) for k, t in own.items()} for name, own in server.own.items()
    }
    return server


def value(weights: Weights, layer: str) -> float:
    """The one number that the layer consists of."""
    (found,) = weights[layer].unique().tolist()
    return float(found)


# Tops


def test_tops_of_the_family_are_the_last_blocks_where_the_next_larger_has_more() -> None:
    method = InclusiveFL()
    server = method.init_server(tiny.server_context(FAMILY, TASK))
    found = {name: method.tops(server, name) for name in server.layers}
    assert found == {
        "slim_resnet10": {f"trunk.{s}.0.": [f"trunk.{s}.0.", f"trunk.{s}.1."] for s in (2, 3)},
        "slim_resnet14": {f"trunk.{s}.0.": [f"trunk.{s}.0.", f"trunk.{s}.1."] for s in (0, 1)},
        "slim_resnet18": {f"trunk.{s}.1.": [f"trunk.{s}.1.", f"trunk.{s}.2."] for s in (2, 3)},
        "slim_resnet22": {f"trunk.{s}.1.": [f"trunk.{s}.1.", f"trunk.{s}.2."] for s in (0, 1)},
        "slim_resnet26": {},
    }


def test_a_neighbor_that_has_two_blocks_more_gives_three() -> None:
    method = InclusiveFL()
    ctx = tiny.server_context(Fleet(("slim_resnet10", "slim_resnet26"), 128), TASK)
    tops = method.tops(method.init_server(ctx), "slim_resnet10")
    assert tops["trunk.1.0."] == ["trunk.1.0.", "trunk.1.1.", "trunk.1.2."]
    assert list(tops) == [f"trunk.{stage}.0." for stage in range(4)]


def test_groups_own_their_tops_and_heads() -> None:
    server = InclusiveFL().init_server(CTX)
    assert set(server.own[SMALL]) == {
        layer for layer in weights_of(SMALL) if layer.startswith((*TOPS, "head."))
    }
    assert set(server.own[LARGE]) == {"head.weight", "head.bias"}
    assert InclusiveFL(own_head=False).init_server(CTX).own[LARGE] == {}
    alone = InclusiveFL(own_top=False).init_server(CTX)
    assert set(alone.own[SMALL]) == {"head.weight", "head.bias"}


def test_what_means_the_same_in_all_blocks() -> None:
    """The first block of stage 2 changes the width: its first convolution is another layer. That of
    stage 0 changes nothing."""
    weights = weights_of("slim_resnet18")
    norm = ["weight", "bias"]
    second = ["conv2.weight", *(f"bn2.{x}" for x in norm)]
    assert blocks.alike(["trunk.2.0.", "trunk.2.1."], weights) == second
    first = ["conv1.weight", *(f"bn1.{x}" for x in norm)]
    assert blocks.alike(["trunk.0.0.", "trunk.0.1."], weights) == first + second


# A round


def test_a_round_by_hand() -> None:
    """All weights are 1. Clients: 0 and 2 small, 1 large.

    0 sends 2 (1 sample), 2 sends 5 (3 samples): their mean is 4.25, so g = 3.25.
    1 sends 7 (4 samples), but 11 in block 1 of stage 2: g = 6, and 10 in that block.

    stage 2: m = (6 + 10)/2 = 8, and the top moves by 0.2 * 8 + 0.8 * 3.25 = 4.2
    stage 3: m = (6 + 6)/2 = 6, and the top moves by 0.2 * 6 + 0.8 * 3.25 = 3.8
    what the small ones have alone otherwise moves by their 3.25
    what all share becomes (1 * 2 + 3 * 5 + 4 * 7)/8 = 5.625
    """
    replies = [
        Reply(0, 1, constant(SMALL, 2.0)),
        Reply(1, 4, constant(LARGE, 7.0, trunk_2_1=11.0)),
        Reply(2, 3, constant(SMALL, 5.0)),
    ]
    server = ones(InclusiveFL())
    InclusiveFL().server_update(server, replies, CTX)

    small = model_of(server, SMALL)
    assert list(small) == list(weights_of(SMALL))
    for part in ("conv2.weight", "bn2.weight", "bn2.bias"):
        assert value(small, f"trunk.2.0.{part}") == pytest.approx(5.2)
        assert value(small, f"trunk.3.0.{part}") == pytest.approx(4.8)
    for part in ("conv1.weight", "bn1.bias", "shortcut.0.weight", "bn2.running_mean"):
        assert value(small, f"trunk.2.0.{part}") == pytest.approx(4.25)
    assert value(small, "head.weight") == pytest.approx(4.25)
    assert value(small, "trunk.1.0.conv2.weight") == pytest.approx(5.625)
    assert value(small, "stem.0.weight") == pytest.approx(5.625)

    large = model_of(server, LARGE)
    assert value(large, "head.bias") == 7
    assert value(large, "trunk.2.0.conv2.weight") == 7, "a top of the small ones is not shared"
    assert value(large, "trunk.2.1.conv1.weight") == 11
    assert value(large, "stem.0.weight") == pytest.approx(5.625)


def test_the_update_counts_from_the_weights_of_the_group_itself() -> None:
    """The groups' tops are apart before the round: the small one's 3, the large one's 1. The small
    sends 4 and the large 2: both moved by 1, so m = g = 1 and the top is 4, whatever beta."""
    for beta in (0.0, 0.2, 1.0):
        method = InclusiveFL(beta=beta)
        server = ones(method)
        server.own[SMALL] = {k: torch.full_like(t, 3) for k, t in server.own[SMALL].items()}
        replies = [Reply(0, 1, constant(SMALL, 4.0)), Reply(1, 1, constant(LARGE, 2.0))]
        method.server_update(server, replies, CTX)
        assert value(server.own[SMALL], "trunk.2.0.conv2.weight") == pytest.approx(4)


def test_beta_0_and_1() -> None:
    replies = [Reply(0, 1, constant(SMALL, 2.0)), Reply(1, 1, constant(LARGE, 6.0, trunk_2_1=8.0))]
    for beta, expected in ((0.0, 2.0), (1.0, 1 + (5 + 7) / 2)):
        server = ones(InclusiveFL(beta=beta))
        InclusiveFL(beta=beta).server_update(server, replies, CTX)
        assert value(server.own[SMALL], "trunk.2.0.conv2.weight") == pytest.approx(expected)


def test_without_participants_of_the_larger_group_there_is_no_momentum() -> None:
    server = ones(InclusiveFL())
    InclusiveFL().server_update(server, [Reply(0, 1, constant(SMALL, 2.0))], CTX)
    assert value(server.own[SMALL], "trunk.2.0.conv2.weight") == 2
    large = model_of(server, LARGE)
    assert value(large, "stem.0.weight") == 2, "that is shared"
    assert value(large, "trunk.2.0.conv2.weight") == 1, "that is not"
    assert value(large, "head.weight") == 1


def test_a_group_without_participants_keeps_its_tops_and_head() -> None:
    server = ones(InclusiveFL())
    InclusiveFL().server_update(server, [Reply(1, 1, constant(LARGE, 9.0))], CTX)
    small = model_of(server, SMALL)
    assert {value(small, x) for x in small if x.startswith((*TOPS, "head."))} == {1}
    assert value(small, "stem.0.weight") == 9


def test_momentum_comes_from_the_next_larger_group_alone() -> None:
    """Three groups, of which the middle one is not there: the smallest hears nothing of the
    largest."""
    ctx = tiny.server_context(Fleet((SMALL, LARGE, LARGEST), 128), TASK)
    server = ones(InclusiveFL(), ctx)
    replies = [Reply(0, 1, constant(SMALL, 2.0)), Reply(2, 1, constant(LARGEST, 50.0))]
    InclusiveFL().server_update(server, replies, ctx)
    assert value(server.own[SMALL], "trunk.2.0.conv2.weight") == 2
    assert value(model_of(server, LARGE), "trunk.2.0.conv1.weight") == 50, "shared with the largest"
    assert value(model_of(server, LARGE), "trunk.0.0.conv1.weight") == 1, "its own"


def test_shared_heads_are_averaged() -> None:
    method = InclusiveFL(own_head=False, weighting="uniform")
    server = ones(method)
    replies = [Reply(0, 1, constant(SMALL, 2.0)), Reply(1, 9, constant(LARGE, 6.0))]
    method.server_update(server, replies, CTX)
    assert value(model_of(server, SMALL), "head.bias") == 4
    assert value(model_of(server, LARGE), "head.bias") == 4


def test_one_architecture_is_fedavg() -> None:
    ctx = tiny.server_context(Fleet((LARGE,), 128), TASK)
    replies: list[Any] = [Reply(k, k + 1, constant(LARGE, 2.0 + k)) for k in range(3)]
    server = InclusiveFL().init_server(ctx)
    InclusiveFL().server_update(server, replies, ctx)
    plain = FedAvg().init_server(ctx)
    FedAvg().server_update(plain, replies, ctx)
    assert_close(model_of(server, LARGE), plain.weights)


def test_uploads_are_not_changed() -> None:
    upload = constant(SMALL, 2.0)
    server = ones(InclusiveFL())
    InclusiveFL().server_update(
        server, [Reply(0, 1, upload), Reply(1, 1, constant(LARGE, 6.0))], CTX
    )
    assert all(t.eq(2).all() for t in upload.model.values())


# Messages


def test_each_client_receives_the_model_of_its_group() -> None:
    method = InclusiveFL()
    server = ones(method)
    server.own[SMALL]["head.bias"] += 1
    message = method.broadcast(server, [0, 1, 2], CTX)
    assert message[0] is message[2]
    assert value(message[0].model, "head.bias") == 2
    assert value(message[1].model, "head.bias") == 1
    for client, download in message.items():
        model = zoo.build(TWO.model_of(client), TASK, 128)
        none: Any = None
        method.receive(ClientState(model), download, none)
        set_weights(model, download.model)


def noise(num_samples: int) -> Dataset:
    images = np.random.RandomState(0).randint(0, 256, (num_samples, 3, 16, 16), np.uint8)
    labels = np.arange(num_samples) % 2
    return Dataset("noise", images, labels, num_samples, 2, mean=(0.5,) * 3, std=(0.5,) * 3)


def test_clients_pay_for_their_own_layers_only(tmp_path: Path) -> None:
    config = Config(
        method="inclusivefl", clients=2, participation=1.0, rounds=1, out=tmp_path,
        fleet=FleetConfig((SMALL, LARGE)),
    )  # fmt: skip
    data = noise(8)
    run = tiny.simulate(config, data, tiny.deal([0, 1, 2], [3, 4, 5, 6, 7]))
    for client_id, name in enumerate((SMALL, LARGE)):
        size = zoo.parameter_count(name, data.task)
        assert run.count("scalars", 1, "down", client=client_id) == size
        assert run.count("scalars", 1, "up", client=client_id) == size


@pytest.mark.parametrize("beta", [-0.1, 1.1])
def test_impossible_settings_are_refused(beta: float) -> None:
    with pytest.raises(ConfigError, match=r"Try --hp\.beta 0\.2"):
        InclusiveFL(beta=beta).check(TWO, TASK)
    InclusiveFL(beta=1.0).check(TWO, TASK)


def test_models_that_are_not_nested_are_refused() -> None:
    with pytest.raises(ConfigError, match="inclusivefl averages whole models"):
        InclusiveFL().check(Fleet(("cnn1", "cnn2"), 128), TASK)
