"""FedProx, worked by hand: what a client that is held back does, and who is averaged."""

from math import exp, log
from typing import Any

import pytest
import tiny
import torch
from torch.testing import assert_close

import zoo
from methods.fedavg import FedAvg
from methods.fedprox import Download, FedProx, Upload
from raysim import ClientState, ConfigError, Fleet, Reply, Task, Weights, get_weights, method
from raysim.nested import Union
from zoo import SplitModel

TASK = Task(num_classes=2)
START = {"head.weight": torch.zeros(2, 2), "head.bias": torch.zeros(2)}
ONE_SAMPLE = tiny.points([(2, 0)], [0], num_classes=2)


def trained(hp: FedProx | FedAvg, **train: Any) -> tuple[Upload, float]:
    """What a client sends that starts at 0, has one sample, and takes steps of size 1; its loss."""
    ctx = tiny.client_context(ONE_SAMPLE, lr=1.0, **train)
    client = ClientState(tiny.model(head=[[9, 9], [9, 9]]))
    upload = tiny.update(hp, client, Download(START), ctx)
    return upload, ctx.losses[0]


def test_two_steps_of_a_client_by_hand() -> None:
    """The sample (2, 0) of class 0, and mu = 1/2.

    step 1, at 0: p = (1/2, 1/2), dz = (-1/2, 1/2), and nothing pulls yet
      W = [[1, 0], [-1, 0]], b = (1/2, -1/2)
    step 2: z = (5/2, -5/2), s = p_1 = 1 / (1 + e^5), dz = (-s, s)
      W_00 = 1 + 2 s - 1/2 * 1,  b_0 = 1/2 + s - 1/2 * 1/2
    loss: log 2, then log(1 + e^-5) + 1/4 (1 + 1 + 1/4 + 1/4)
    """
    upload, loss = trained(FedProx(mu=0.5), epochs=2)
    s = 1 / (1 + exp(5))
    weight, bias = 0.5 + 2 * s, 0.25 + s
    assert_close(upload.model["head.weight"], torch.tensor([[weight, 0], [-weight, 0]]))
    assert_close(upload.model["head.bias"], torch.tensor([bias, -bias]))
    assert loss == pytest.approx((log(2) + log(1 + exp(-5)) + 2.5 / 4) / 2)


def test_the_anchor_is_what_was_received_not_what_is_trained() -> None:
    """The message's memory must not follow the model: a second client trains as the first did."""
    message = Download({name: tensor.clone() for name, tensor in START.items()})
    first, second = (
        tiny.update(
            FedProx(mu=0.5), ClientState(tiny.model(head=[[9, 9], [9, 9]])), message,
            tiny.client_context(ONE_SAMPLE, lr=1.0, epochs=3),
        )
        for _ in range(2)
    )  # fmt: skip
    assert_close(message.model, START)
    assert_close(first.model, second.model)


@pytest.mark.parametrize("settings", [{"momentum": 0.9}, {"optimizer": "adam"}, {"clip": 0.1}])
def test_without_mu_it_is_fedavg(settings: dict[str, Any]) -> None:
    found, loss = trained(FedProx(mu=0), epochs=4, **settings)
    expected, fedavg_loss = trained(FedAvg(), epochs=4, **settings)
    assert_close(found.model, expected.model, rtol=0, atol=0)
    assert loss == fedavg_loss


def test_one_step_knows_no_proximal_term() -> None:
    """At the start of a round the distance is 0: only later steps feel it."""
    assert_close(trained(FedProx(mu=100))[0].model, trained(FedAvg())[0].model)


def test_statistics_of_batch_norm_are_not_pulled() -> None:
    """They follow the batches however large mu is, while the weights stay where they were."""
    model = tiny.moody_model(pixels=2, width=3, num_classes=2)
    start: Weights = {name: tensor.clone() for name, tensor in get_weights(model).items()}
    data = tiny.points([(2, 0), (0, 2), (1, 3), (4, 4)], [0, 1, 0, 1], num_classes=2)
    ctx = tiny.client_context(data, lr=1e-3, epochs=200)
    upload = tiny.update(FedProx(mu=999.0), ClientState(model), Download(start), ctx)
    assert (upload.model["trunk.1.running_mean"] - start["trunk.1.running_mean"]).norm() > 0.5
    for name in ("trunk.0.weight", "trunk.1.weight", "head.weight"):
        assert (upload.model[name] - start[name]).norm() < 0.02


# The server


@pytest.mark.parametrize(
    ("weighting", "shared", "own"), [("samples", 3.25, 4.0), ("uniform", 2.5, 4.0)]
)
def test_layers_are_averaged_over_those_who_have_them(
    weighting: Any, shared: float, own: float
) -> None:
    """The small model sends 1 (1 sample), the large one 4 (3 samples): (1 + 12) / 4 or 5 / 2, and 4
    where there is only the large one."""
    small, large = "slim_resnet10", "slim_resnet14"
    ctx = tiny.server_context(Fleet((small, large), 128), TASK)
    server = FedProx().init_server(ctx)
    layers = server.layers

    def upload(model: str, value: float) -> Upload:
        return Upload({k: torch.full_like(server.weights[k], value) for k in layers[model]})

    replies = [Reply(0, 1, upload(small, 1)), Reply(1, 3, upload(large, 4))]
    FedProx(weighting=weighting).server_update(server, replies, ctx)
    for name, tensor in server.weights.items():
        if tensor.is_floating_point():
            mean = shared if name in layers[small] else own
            assert_close(tensor, torch.full_like(tensor, mean))


def test_each_client_gets_its_layers_and_is_expected_to_send_them() -> None:
    fleet = Fleet(("slim_resnet10", "slim_resnet14"), 128)
    ctx = tiny.server_context(fleet, TASK)
    message = FedProx().broadcast(FedProx().init_server(ctx), [0, 1], ctx)
    for k in (0, 1):
        model: SplitModel = zoo.build(fleet.model_of(k), TASK, 128)
        assert list(message[k].model) == list(get_weights(model))  # type: ignore[index]
        assert list(FedProx().expected(k, ctx).model) == list(get_weights(model))


def test_a_server_without_replies_in_a_layer_keeps_it() -> None:
    server = Union({"a": torch.zeros(1), "b": torch.ones(1)}, {"mlp": ["a", "b"]})
    ctx = tiny.server_context(Fleet(("mlp",), 2), TASK)
    FedProx().server_update(server, [Reply(0, 1, Upload({"a": torch.tensor([5.0])}))], ctx)
    assert {name: tensor.item() for name, tensor in server.weights.items()} == {"a": 5, "b": 1}


# What is refused


@pytest.mark.parametrize("mu", [-0.1, float("nan")])
def test_a_mu_that_pushes_away_is_refused(mu: float) -> None:
    with pytest.raises(ConfigError, match=r"--hp\.mu must be 0 or more, got .* Try --hp\.mu 0\.1"):
        method.check(FedProx(mu=mu), Fleet(("mlp",), 2), TASK, "fedprox")


def test_models_that_are_not_nested_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="fedprox averages whole models"):
        method.check(FedProx(), Fleet(("cnn1", "cnn2"), 512), TASK, "fedprox")
