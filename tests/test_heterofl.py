"""HeteroFL's round, worked by hand, and what its settings do."""

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from small_zoo import zoo_of
from torch.testing import assert_close

from methods.heterofl import HeteroFL
from raysim import (
    ClientContext,
    Config,
    ConfigError,
    EvalConfig,
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
from raysim.submodels import Client, Server, Upload

TWO = Task(2, channels=2, image_size=1)
FLEET = Fleet(("tiny",), 2)
ROWS = [[0], [1, 2]]
W = [[1, 2], [3, 4]]


@pytest.fixture
def hand_model() -> Iterator[None]:
    """x -> W x -> V W x + b with V and b zero, so all scores are 0 and softmax is 1/2."""
    with zoo_of(lambda task: tiny.model(head=[[0, 0], [0, 0]], features=W)):
        yield


def points() -> Dataset:
    """Client 0 has one sample, of class 0; client 1 two that are the same, of class 1."""
    return tiny.points([(1, 0), (1, 0), (1, 0)], [0, 1, 1], num_classes=2)


def context(client: int, **train: Any) -> ClientContext:
    ctx = tiny.client_context(points(), ROWS[client], **{"lr": 1.0, "clip": 100.0, **train})
    return replace(ctx, client_id=client, fleet=FLEET)


def play(hp: HeteroFL, **train: Any) -> tuple[Server, list[Upload], list[ClientContext]]:
    """One round of both clients."""
    ctx = tiny.server_context(FLEET, TWO)
    server = hp.init_server(ctx)
    message = hp.broadcast(server, [0, 1], ctx)
    contexts, replies = [context(k, **train) for k in (0, 1)], []
    for k, own in enumerate(contexts):
        client = hp.init_client(own.build_model(), own)
        upload = tiny.update(hp, client, message[k], own)
        wire.check_like(upload, hp.expected(k, ctx), "payload")
        replies.append(Reply(k, own.num_samples, upload))
    hp.server_update(server, replies, ctx)
    return server, [reply.payload for reply in replies], contexts


RATES: Any = (0.5, 1.0)


@pytest.mark.parametrize(
    ("hp", "weight", "bias"),
    [
        ({"masked": False}, [[0.25, -1.5], [-0.25, 1.5]], [0, 0]),
        ({"masked": False, "weighting": "samples"}, [[0, -1.5], [0, 1.5]], [-1 / 6, 1 / 6]),
        ({"masked": False, "scaler": "off"}, [[0, -1.5], [0, 1.5]], [0, 0]),
        ({}, [[1, 0], [0.5, 1.5]], [0.5, 0.5]),
    ],
)
@pytest.mark.usefixtures("hand_model")
def test_round_of_two_rates_by_hand(hp: Any, weight: list[list[float]], bias: list[float]) -> None:
    """x = (1, 0), W x = (1, 3); one step of size 1 on all data.

    Client 0, rate 1/2, has hidden channel 0 alone: h = 1 / (1/2) = 2, or 1 without the scaler.
      dz = (-1/2, 1/2):  V_0 = -dz h = (1, -1), or (1/2, -1/2);   b_0 = (1/2, -1/2)
    Client 1, rate 1:    h = (1, 3), dz = (1/2, -1/2)
      V_1 = [[-1/2, -3/2], [1/2, 3/2]],                           b_1 = (-1/2, 1/2)

    Server, equally:     column 0 (1 - 1/2) / 2 = 1/4 and -1/4; column 1 is client 1's; b = 0
            by samples:  column 0 (1 - 2 * 1/2) / 3 = 0;        b = (1/2 - 2 * 1/2) / 3 = -1/6
            no scaler:   column 0 (1/2 - 1/2) / 2 = 0
    Masked, a client's step is 0 for the class it has not, and the class's row is the other's:
      row 0 is client 0's: 1, and column 1 as it was;  row 1 is client 1's: (1/2, 3/2);  b = 1/2
    """
    server, _, _ = play(HeteroFL(rates=RATES, **hp))
    assert_close(server.weights["head.weight"], torch.tensor(weight, dtype=torch.float32))
    assert_close(server.weights["head.bias"], torch.tensor(bias, dtype=torch.float32))
    assert server.weights["trunk.weight"].tolist() == W  # V is 0, so nothing reaches it


@pytest.mark.usefixtures("hand_model")
def test_masked_loss_by_hand() -> None:
    """All scores are 0, so CE = ln 2, masked or not; after a step it is not the same: client 0 has
    scores (2 * 1 + 1/2, 0) masked, CE = ln(1 + e^-2.5), and (2.5, -2.5) else, ln(1 + e^-5)."""
    for masked, second in [(True, log(1 + np.exp(-2.5))), (False, log(1 + np.exp(-5)))]:
        _, _, contexts = play(HeteroFL(rates=RATES, masked=masked), epochs=2)
        assert contexts[0].losses == [pytest.approx((log(2) + second) / 2, abs=1e-6)]


@pytest.mark.usefixtures("hand_model")
def test_gradients_are_clipped_to_norm_one() -> None:
    """Client 0's masked gradient is -1/2 * 2 for V and -1/2 for b: norm sqrt(5/4)."""
    _, uploads, _ = play(HeteroFL(rates=RATES), clip=None)
    norm = (5 / 4) ** 0.5
    assert uploads[0].model["head.weight"].tolist() == [[pytest.approx(1 / norm)], [0]]
    assert uploads[0].model["head.bias"].tolist() == [pytest.approx(0.5 / norm), 0]


@pytest.mark.usefixtures("hand_model")
def test_clients_get_and_send_their_part() -> None:
    hp = HeteroFL(rates=RATES)
    ctx = tiny.server_context(FLEET, TWO)
    server = hp.init_server(ctx)
    message = hp.broadcast(server, [0, 1, 2, 3], ctx)
    assert message[0].model["trunk.weight"].tolist() == [[1, 2]]
    assert message[1].model["trunk.weight"].tolist() == W
    assert {name: tuple(w.shape) for name, w in message[0].model.items()} == {
        "trunk.weight": (1, 2), "head.weight": (2, 1), "head.bias": (2,)
    }  # fmt: skip
    assert message[0] is message[2], "one message for each rate"
    assert message[1] is message[3]
    for name, tensor in message[0].model.items():  # and no copy of the model for any of them
        assert tensor.data_ptr() == server.weights[name].data_ptr()


@pytest.mark.usefixtures("hand_model")
def test_a_wrong_part_is_not_expected() -> None:
    hp = HeteroFL(rates=RATES)
    ctx = tiny.server_context(FLEET, TWO)
    _, uploads, _ = play(hp)
    with pytest.raises(wire.WireError, match=r"trunk\.weight is .* \[2, 2\]; expected .* \[1, 2\]"):
        wire.check_like(uploads[1], hp.expected(0, ctx), "payload")


@pytest.mark.parametrize(
    ("scaler", "training", "testing"), [("always", 2, 2), ("training", 2, 1), ("off", 1, 1)]
)
@pytest.mark.usefixtures("hand_model")
def test_when_activations_are_scaled(scaler: Any, training: float, testing: float) -> None:
    """Channel 0 gives 1 for x = (1, 0), divided by the rate 1/2."""
    hp = HeteroFL(rates=RATES, scaler=scaler)
    client = hp.init_client(context(0).build_model(), context(0))
    x = torch.tensor([[1.0, 0.0]])[:, :, None, None]
    assert client.model.train().features(x).tolist() == [[training]]
    assert client.model.eval().features(x).tolist() == [[testing]]


@pytest.mark.usefixtures("hand_model")
def test_a_class_nobody_has_keeps_its_row() -> None:
    hp, ctx = HeteroFL(rates=RATES), tiny.server_context(FLEET, TWO)
    server = hp.init_server(ctx)
    server.weights["head.bias"] = torch.tensor([7.0, 8.0])
    sent = {name: torch.zeros_like(w) for name, w in server.weights.items()}
    hp.server_update(server, [Reply(1, 5, Upload(sent, 1.0, torch.tensor([0])))], ctx)
    assert server.weights["head.bias"].tolist() == [0, 8]
    assert server.weights["trunk.weight"].eq(0).all()


# Whole runs


RESNET = "slim_resnet10"
FIVE: Any = (1.0, 0.5, 0.25, 0.125, 0.0625)


def noise(samples: int) -> Dataset:
    images = np.random.RandomState(0).randint(0, 256, (samples, 3, 16, 16), np.uint8)
    labels = np.arange(samples) % 2
    return Dataset("noise", images, labels, samples, 2, mean=(0.5,) * 3, std=(0.5,) * 3)


def simulate(
    out: Path, rounds: int = 2, model: str = RESNET, clients: int = 5, **hp: Any
) -> tiny.Run:
    config = Config(
        method="heterofl", clients=clients, participation=1.0, rounds=rounds, out=out, hp=hp,
        fleet=FleetConfig((model,)), train=TrainConfig(batch_size=4, lr=0.05),
        eval=EvalConfig(data="global", per="architecture"),
    )  # fmt: skip
    shares = [range(4 * k, 4 * k + 4) for k in range(clients)]
    return tiny.simulate(config, noise(4 * clients), tiny.deal(*shares))


def resnet10(rate: float, channels: int, classes: int) -> int:
    """Parameters, from the architecture: a 7x7 stem and a basic block for each of four widths."""
    a, b, c, d = (ceil(rate * width) for width in (16, 32, 64, 128))
    count = channels * 49 * a + 2 * a + 2 * 9 * a * a + 4 * a
    for inputs, width in ((a, b), (b, c), (c, d)):
        count += 9 * inputs * width + 9 * width * width + inputs * width + 6 * width
    return count + d * classes + classes


def test_clients_pay_for_their_part_only(tmp_path: Path) -> None:
    run = simulate(tmp_path, rounds=1)
    for client, rate in enumerate(FIVE):
        for way in ("up", "down"):
            found = run.count("scalars", 1, way, client=client, field="model")
            assert found == resnet10(rate, channels=3, classes=2)
            assert run.count("scalars", 1, way, client=client) == found
    assert resnet10(1, 3, 10) == 310_746


def test_clients_of_one_model_and_many_rates_take_turns(tmp_path: Path) -> None:
    """Each keeps its own width, and is evaluated as a model of its own."""
    run = simulate(tmp_path, clients=7)
    widths = [len(run.states[client]["model"]["stem.0.weight"]) for client in range(7)]
    assert widths == [16, 8, 4, 2, 1, 16, 8]
    assert [run.states[client]["rate"] for client in range(7)] == [*FIVE, 1.0, 0.5]
    rows = [r for r in Result.load(tmp_path).clients.to_pylist() if r["phase"] == "eval"]
    assert [row["model"] for row in rows if row["round"] == 2] == [
        f"{RESNET}@{rate:g}" for rate in FIVE
    ]


def test_one_client_is_all_of_the_mean(tmp_path: Path) -> None:
    run = simulate(tmp_path, clients=1, rates=(0.5,))
    assert len(run.states[0]["model"]["stem.0.weight"]) == 8


def test_dynamic_rates_are_drawn_for_every_round(tmp_path: Path) -> None:
    run = simulate(tmp_path, rounds=4, model="mlp", clients=6, assignment="dynamic")
    sizes = [[run.count("scalars", t, "down", client=k) for k in range(6)] for t in range(1, 5)]
    possible = {
        3 * 256 * (a := ceil(rate * 256)) + a + a * (b := ceil(rate * 128)) + b + 2 * b + 2
        for rate in FIVE
    }
    assert {size for row in sizes for size in row} <= possible
    changing = [len(set(column)) > 1 for column in zip(*sizes, strict=True)]
    assert sum(changing) >= 5, "though four equal draws do happen"
    assert all(len(set(row)) > 1 for row in sizes), "and differ"
    for number, row in enumerate(sizes, start=1):
        assert row == [run.count("scalars", number, "up", client=k) for k in range(6)]
    for client in range(6):
        state = run.states[client]
        assert len(state["model"]["trunk.0.weight"]) == ceil(state["rate"] * 256)


def test_local_statistics_never_travel(tmp_path: Path) -> None:
    run = simulate(tmp_path, statistics="local")
    for client, rate in enumerate(FIVE):
        for way in ("up", "down"):
            numbers = run.count("numbers", 1, way, client=client, field="model")
            assert numbers == resnet10(rate, channels=3, classes=2)
    means = [run.states[client]["model"]["stem.1.running_mean"][0].item() for client in range(5)]
    assert len(set(means)) == 5, "each client has its own"


def test_queried_statistics_are_of_the_new_global_model(tmp_path: Path) -> None:
    """Measured with the weights after the round's mean, for a second download."""
    run = simulate(tmp_path, rounds=1, clients=1, statistics="queried")
    parameters = resnet10(1, channels=3, classes=2)
    assert run.count("scalars", 1, "down", step="client_update") == parameters
    assert run.count("scalars", 1, "down", step="query") == parameters
    assert run.count("numbers", 1, "up", step="client_update", field="model") == parameters
    assert run.count("scalars", 1, "up", step="query") == 0
    state = run.states[0]["model"]  # one client's mean is itself, so it has the global model
    x = torch.tensor(noise(4).images, dtype=torch.float32) / 255
    first = torch.nn.functional.conv2d((x - 0.5) / 0.5, state["stem.0.weight"], None, 2, 3)
    assert_close(state["stem.1.running_mean"], first.mean(dim=(0, 2, 3)), atol=1e-5, rtol=1e-4)
    assert_close(state["stem.1.running_var"], first.var(dim=(0, 2, 3)), atol=1e-5, rtol=1e-4)


def test_each_rate_has_batch_norm_statistics_of_its_own() -> None:
    """Clients 0 and 2 of rate 1 send 1 and 2, client 1 of rate 1/2 sends 5: statistics are 3/2 and
    5, and the gain is (1 + 2 + 5) / 3 = 8/3 where all have it and 3/2 elsewhere."""
    fleet = Fleet((RESNET,), 128)
    hp, ctx = HeteroFL(rates=(1.0, 0.5)), tiny.server_context(fleet, Task(2))
    server = hp.init_server(ctx)
    replies = []
    for client, value in ((0, 1.0), (1, 5.0), (2, 2.0)):
        part = hp.broadcast(server, [client], ctx)[client]
        sent = {k: torch.full_like(w, value) for k, w in part.model.items()}
        replies.append(Reply(client, 1, Upload(sent, part.rate, torch.tensor([0, 1]))))
    hp.server_update(server, replies, ctx)
    message = hp.broadcast(server, [0, 1], ctx)
    wide, narrow = message[0].model, message[1].model
    assert wide["stem.1.running_var"].tolist() == [1.5] * 16
    assert narrow["stem.1.running_var"].tolist() == [5.0] * 8
    assert [wide["stem.1.num_batches_tracked"], narrow["stem.1.num_batches_tracked"]] == [1, 5]
    assert_close(wide["stem.1.weight"], torch.tensor([8 / 3] * 8 + [1.5] * 8))
    assert_close(narrow["stem.1.weight"], torch.tensor([8 / 3] * 8))
    # A rate without participants keeps its own.
    hp.server_update(server, replies[:1], ctx)
    again = hp.broadcast(server, [0, 1], ctx)
    assert again[0].model["stem.1.running_var"].tolist() == [1.0] * 16
    assert again[1].model["stem.1.running_var"].tolist() == [5.0] * 8


# What is refused


def check(model: str = RESNET, feature_dim: int = 128, **hp: Any) -> None:
    method.check(HeteroFL(**hp), Fleet(tuple(model.split()), feature_dim), Task(10), "heterofl")


@pytest.mark.parametrize("rates", [(), (0.0,), (1.0, 1.5), (0.5, -1.0)])
def test_impossible_rates_are_refused(rates: Any) -> None:
    with pytest.raises(ConfigError, match=r"--hp\.rates must be above 0 .* Try --hp\.rates 1 0\.5"):
        check(rates=rates)


def test_local_statistics_of_changing_channels_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"Try --hp\.statistics sent"):
        check(statistics="local", assignment="dynamic")


def test_several_models_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"one global model, .* Try --fleet\.models slim"):
        check(model="slim_resnet10 slim_resnet14")


def test_a_model_that_cannot_be_sliced_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"vit_b_16 cannot be sliced: its layer stem"):
        check(model="vit_b_16", feature_dim=768)
    check(model="resnet152", feature_dim=2048)


def test_a_client_knows_its_rate_after_it_was_away() -> None:
    """Its state says at which rate it was cut, whoever used the worker meanwhile."""
    config = Config(
        method="heterofl", clients=2, hp={"rates": (1.0, 0.25), "assignment": "dynamic"},
        fleet=FleetConfig(("mlp",)),
    )  # fmt: skip
    worker = tiny.make_worker(config, noise(8), tiny.deal(range(4), range(4, 8)))
    ctx = tiny.server_context(worker.fleet, Task(2, 3, 16))
    hp = config.hp
    server = hp.init_server(ctx)
    torch.manual_seed(0)
    messages = hp.broadcast(server, list(range(9)), ctx).values()
    drawn = {message.rate: message for message in messages}
    narrow, _ = tiny.play(worker, drawn[0.25], client=0)
    wide, _ = tiny.play(worker, drawn[1.0], client=1)
    again, upload = tiny.play(worker, drawn[0.25], client=0, round=2, state=narrow)
    assert wire.unpack(again)["rate"] == upload.rate == 0.25
    assert len(upload.model["trunk.0.weight"]) == 64
    assert len(wire.unpack(wide)["model"]["trunk.0.weight"]) == 256


def test_client_state_is_a_narrow_model() -> None:
    """What a client keeps is its part, not the model that it was cut from."""
    ctx = replace(tiny.client_context(noise(4)), client_id=4, fleet=Fleet((RESNET,), 128))
    client = HeteroFL().init_client(ctx.build_model(), ctx)
    assert isinstance(client, Client)
    size = sum(w.untyped_storage().nbytes() for w in get_weights(client.model).values())
    assert size < 4 * 4000
