"""MOON, worked by hand: the contrastive loss, and the model of the time before."""

from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor
from torch.testing import assert_close

import zoo
from methods.fedavg import FedAvg
from methods.moon import Client, Download, Moon, Upload, contrast
from raysim import (
    ClientState,
    Config,
    ConfigError,
    Fleet,
    FleetConfig,
    Reply,
    Task,
    Weights,
    get_weights,
    method,
    wire,
)
from raysim.data import Dataset
from raysim.worker import EVALUATE, Job

TASK = Task(num_classes=2)
SMALL, LARGE = "slim_resnet10", "slim_resnet14"
IDENTITY, SWAP = [[1, 0], [0, 1]], [[0, 1], [1, 0]]
ZERO = [[0, 0], [0, 0]]


def rows(*values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


# The contrastive loss


@pytest.mark.parametrize(
    ("positive", "negative", "temperature", "loss"),
    [
        ((0, 5), (0, 2), 0.5, log(2)),  # both alike, and no length matters
        ((7, 0), (0, 1), 1.0, log(1 + exp(-1))),  # cosines 1 and 0
        ((7, 0), (0, 1), 0.5, log(1 + exp(-2))),
        ((-1, 0), (4, 0), 0.5, log(1 + exp(4))),  # cosines -1 and 1
        ((1, 1), (1, 1), 0.1, log(2)),
    ],
)
def test_contrast_by_hand(positive: Any, negative: Any, temperature: float, loss: float) -> None:
    """-log(e^(p/T) / (e^(p/T) + e^(n/T))) = log(1 + e^((n - p) / T)), for z = (3, 0)"""
    found = contrast(rows((3, 0)), rows(positive), rows(negative), temperature)
    assert found.item() == pytest.approx(loss)


def test_contrast_is_the_mean_of_a_sample() -> None:
    z, positive, negative = rows((3, 0), (3, 0)), rows((7, 0), (0, 5)), rows((0, 1), (0, 2))
    assert contrast(z, positive, negative, 1.0).item() == pytest.approx(
        (log(1 + exp(-1)) + log(2)) / 2
    )


def test_contrast_stays_finite_at_a_low_temperature() -> None:
    found = contrast(rows((3, 0)), rows((-1, 0)), rows((1, 0)), 1e-4)
    assert found.item() == pytest.approx(2e4)


def test_a_representation_of_zeros_gives_no_nan() -> None:
    """As ReLUs can leave it: its cosines are 0."""
    z = rows((0, 0)).requires_grad_()
    found = contrast(z, rows((1, 0)), rows((0, 1)), 0.5)
    assert found.item() == pytest.approx(log(2))
    (gradient,) = torch.autograd.grad(found, z)
    assert gradient.isfinite().all()


# A client


def message(features: Any = IDENTITY) -> Download:
    return Download(get_weights(tiny.model(ZERO, features)))


def trained(hp: Any, client: ClientState, data: Dataset, **train: Any) -> tuple[Upload, float]:
    ctx = tiny.client_context(data, lr=1.0, **train)
    upload = tiny.update(hp, client, message(), ctx)
    return upload, ctx.losses[0]


@pytest.mark.parametrize("mu", [1.0, 5.0])
def test_one_step_of_a_client_that_was_here_before_by_hand(mu: float) -> None:
    """Global: r = x, head 0. The client's own last model swapped the features: z_p = (0, 3).

    x = (3, 0) of class 0: z = z_g = (3, 0), cosines 1 and 0, T = 1/2, so L = log(1 + e^-2)
    dL/d(n - p) = 2s, s = 1 / (1 + e^2); dn/dz = (0, 1) / 3, dp/dz = 0, so dL/dz = (0, 2s / 3)
      features <- I - mu (0, 2s / 3) (3, 0)^T = [[1, 0], [-2 mu s, 1]]; the head is 0 and adds none
      head <- 1/2 (3, 0) = [[3/2, 0], [-3/2, 0]], bias (1/2, -1/2)
    """
    client = Client(tiny.model([[9, 9], [9, 9]], SWAP), trained=True, previous=None)
    data = tiny.points([(3, 0)], [0], num_classes=2)
    upload, loss = trained(Moon(mu=mu), client, data)
    s = 1 / (1 + exp(2))
    assert_close(upload.model["trunk.weight"], rows((1, 0), (-2 * mu * s, 1)))
    assert_close(upload.model["head.weight"], rows((1.5, 0), (-1.5, 0)))
    assert_close(upload.model["head.bias"], torch.tensor([0.5, -0.5]))
    assert loss == pytest.approx(log(2) + mu * log(1 + exp(-2)))


@pytest.mark.parametrize(
    ("hp", "been_here"), [(Moon(mu=5.0), False), (Moon(mu=0.0), True), (Moon(mu=0.0), False)]
)
def test_the_first_time_and_without_mu_it_is_fedavg(hp: Moon, been_here: bool) -> None:
    data = tiny.points([(3, 0), (1, 2), (0, 4)], [0, 1, 1], num_classes=2)
    model = tiny.model([[9, 9], [9, 9]], SWAP)
    found, loss = trained(hp, Client(model, been_here, None), data, epochs=3)
    model = tiny.model([[9, 9], [9, 9]], SWAP)
    expected, fedavg_loss = trained(FedAvg(), ClientState(model), data, epochs=3)
    assert_close(found.model, expected.model, rtol=0, atol=0)
    assert loss == fedavg_loss


def test_a_last_model_equal_to_the_global_one_teaches_nothing() -> None:
    """L is log 2 wherever z goes: that is why the first time can do without it."""
    data = tiny.points([(3, 0), (1, 2), (0, 4)], [0, 1, 1], num_classes=2)
    client = Client(tiny.model(ZERO, IDENTITY), trained=True, previous=None)
    found, loss = trained(Moon(mu=3.0), client, data, epochs=3)
    newborn = Client(tiny.model(ZERO, IDENTITY), trained=False, previous=None)
    expected, plain = trained(Moon(mu=3.0), newborn, data, epochs=3)
    assert_close(found.model, expected.model)
    assert loss == pytest.approx(plain + 3 * log(2))


def test_the_frozen_models_stay_frozen_and_leave_no_trace() -> None:
    """Of several steps with dropout and batch norm: z_g and z_p are those of evaluation mode, and
    the client's own statistics have seen its own two batches only."""
    torch.manual_seed(0)
    own, last = (tiny.moody_model(2, 3, 2) for _ in range(2))
    data = tiny.points([(3, 0), (1, 2), (0, 4), (2, 2)], [0, 1, 1, 0], num_classes=2)
    start: Weights = {name: tensor.clone() for name, tensor in get_weights(own).items()}
    client = Client(last, trained=True, previous=None)
    seen: list[tuple[Tensor, Tensor]] = []

    def spy(z: Tensor, z_g: Tensor, z_p: Tensor, temperature: float) -> Tensor:
        seen.append((z_g, z_p))
        return contrast(z, z_g, z_p, temperature)

    ctx = tiny.client_context(data, lr=0.5, epochs=2, shuffle=False)
    x, _ = next(iter(ctx.batches()))
    with torch.no_grad():
        expected = own.eval().features(x), last.eval().features(x)
    last.train()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("methods.moon.contrast", spy)
        upload = tiny.update(Moon(), client, Download(start), ctx)
    assert len(seen) == 2
    for found in seen:
        assert_close(found, expected)
        assert not any(z.requires_grad for z in found)
    assert int(upload.model["trunk.1.num_batches_tracked"]) == 2
    assert all(parameter.requires_grad for parameter in client.model.parameters())


def test_a_batch_of_one_and_bf16_work() -> None:
    client = Client(tiny.moody_model(2, 3, 2), trained=True, previous=None)
    weights = get_weights(tiny.moody_model(2, 3, 2))
    data = tiny.points([(3, 0)], [0], num_classes=2)
    upload = tiny.update(
        Moon(), client, Download(weights), tiny.client_context(data, precision="bf16")
    )
    assert all(t.isfinite().all() for t in upload.model.values())


# What a client keeps


def noise(num_samples: int) -> Dataset:
    images = np.random.default_rng(0).integers(0, 256, (num_samples, 3, 16, 16), dtype=np.uint8)
    labels = np.arange(num_samples) % 2
    return Dataset("noise", images, labels, num_samples, 2, mean=(0.5,) * 3, std=(0.5,) * 3)


def test_the_last_model_comes_back_with_the_state_and_survives_an_evaluation(
    tmp_path: Path,
) -> None:
    """Through the real worker, where another client uses the same modules in between: what is
    contrasted in the second round is what the client itself left in the first."""
    data, dealt = noise(8), tiny.deal([0, 1, 2, 3], [4, 5, 6, 7])
    config = Config(method="moon", clients=2, out=tmp_path, fleet=FleetConfig(("mlp",)))
    worker = tiny.make_worker(config, data, dealt)
    globals_ = [get_weights(zoo.build("mlp", data.task)) for _ in range(3)]
    state, left = tiny.play(worker, Download(globals_[0]), client=0)
    kept = wire.unpack(state, worker.messages)
    assert kept["trained"] is True
    assert kept["previous"] is None, "between rounds the model itself is the last one"
    assert_close(kept["model"], left.model, rtol=0, atol=0)
    tiny.play(worker, Download(globals_[1]), client=1)
    worker.run(Job(EVALUATE, 0, 1, False), state, wire.pack(Download(globals_[1])))
    seen: list[Weights] = []

    def spy(model: Any, weights: Weights) -> Any:
        seen.append({name: tensor.clone() for name, tensor in weights.items()})
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("methods.moon.frozen", spy)
        again, _ = tiny.play(worker, Download(globals_[2]), client=0, round=2, state=state)
    assert_close(seen, [globals_[2], left.model], rtol=0, atol=0)
    assert again.nbytes == state.nbytes, "a client's state does not grow"


def test_a_client_that_was_only_evaluated_has_no_last_model(tmp_path: Path) -> None:
    """Its model is the one it was born with, which nothing was learned by."""
    config = Config(method="moon", clients=2, out=tmp_path, fleet=FleetConfig(("mlp",)))
    worker = tiny.make_worker(config, noise(4), tiny.deal([0, 1], [2, 3]))
    received = wire.pack(Download(get_weights(zoo.build("mlp", noise(4).task))))
    born, _ = worker.run(Job(EVALUATE, 0, 1, True), None, received)
    assert born is not None
    assert wire.unpack(born, worker.messages)["trained"] is False


# Nested models


def test_nested_clients_contrast_their_own_layers_and_pay_for_them_only(tmp_path: Path) -> None:
    data = noise(8)
    config = Config(
        method="moon", clients=2, participation=1.0, rounds=2, out=tmp_path,
        fleet=FleetConfig((SMALL, LARGE)),
    )  # fmt: skip
    run = tiny.simulate(config, data, tiny.deal([0, 1, 2], [3, 4, 5, 6, 7]))
    for client, name in enumerate((SMALL, LARGE)):
        size = zoo.parameter_count(name, data.task)
        for number in (1, 2):
            for direction in ("up", "down"):
                assert run.count("scalars", number, direction, client=client) == size
        assert list(run.states[client]["model"]) == list(get_weights(zoo.build(name, data.task)))


@pytest.mark.parametrize(
    ("weighting", "shared", "own"), [("samples", 3.25, 4.0), ("uniform", 2.5, 4.0)]
)
def test_layers_are_averaged_over_those_who_have_them(
    weighting: Any, shared: float, own: float
) -> None:
    """The small model sends 1 (1 sample), the large one 4 (3 samples): (1 + 12) / 4 or 5 / 2."""
    ctx = tiny.server_context(Fleet((SMALL, LARGE), 128), TASK)
    hp = Moon(weighting=weighting)
    server = hp.init_server(ctx)
    layers = server.layers

    def upload(model: str, value: float) -> Upload:
        return Upload({k: torch.full_like(server.weights[k], value) for k in layers[model]})

    hp.server_update(server, [Reply(0, 1, upload(SMALL, 1)), Reply(1, 3, upload(LARGE, 4))], ctx)
    for name, tensor in server.weights.items():
        if tensor.is_floating_point():
            mean = shared if name in layers[SMALL] else own
            assert_close(tensor, torch.full_like(tensor, mean))


# What is refused


@pytest.mark.parametrize(
    ("hp", "message"),
    [
        ({"mu": -1.0}, r"--hp\.mu must be 0 or more, got -1.0. Try --hp\.mu 1"),
        ({"temperature": 0.0}, r"--hp\.temperature must be above 0.* Try --hp\.temperature 0\.5"),
        ({"temperature": float("nan")}, r"--hp\.temperature must be above 0"),
    ],
)
def test_impossible_settings_are_refused(hp: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        method.check(Moon(**hp), Fleet(("mlp",), 2), TASK, "moon")


def test_models_that_are_not_nested_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="moon averages whole models"):
        method.check(Moon(), Fleet(("cnn1", "cnn2"), 512), TASK, "moon")
