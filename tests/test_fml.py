"""FML's equations, worked by hand.

Throughout, x = (1, 2), y = 0, the representation is x itself and

    h = [[0, 0], [ln 3, 0]]    h(x) = (0, ln 3)      softmax (1/4, 3/4)    CE = ln 4
    g = [[0, ln 2], [0, 0]]    g(x) = (2 ln 2, 0)    softmax (4/5, 1/5)    CE = ln(5/4)

    KL(g || h) = 4/5 ln(16/5) + 1/5 ln(4/15)
    KL(h || g) = 1/4 ln(5/16) + 3/4 ln(15/4)
"""

from collections.abc import Sequence
from functools import wraps
from math import log, sqrt
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import nn
from torch.testing import assert_close

from methods.fml import FML, Client, Download, Server, Upload
from raysim import (
    ClientContext,
    Config,
    ConfigError,
    Fleet,
    FleetConfig,
    Reply,
    ServerContext,
    Task,
    TrainConfig,
    Weights,
    get_weights,
    method,
)

LN2, LN3 = log(2), log(3)
CE_H, CE_G = log(4), log(5 / 4)
KL_GH = 4 / 5 * log(16 / 5) + 1 / 5 * log(4 / 15)
KL_HG = 1 / 4 * log(5 / 16) + 3 / 4 * log(15 / 4)
POINT = tiny.points([(1, 2)], [0], num_classes=2)


def hand_client() -> Client:
    return Client(
        model=tiny.model(head=[[0, 0], [LN3, 0]]), shared=tiny.model(head=[[0, LN2], [0, 0]])
    )


def copies(module: nn.Module) -> Weights:
    return {name: tensor.clone() for name, tensor in get_weights(module).items()}


def same(a: Weights, b: Weights) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def step(hp: FML, client: Client, **train: Any) -> tuple[Upload, float]:
    """What the client sends after one step, and the loss of that step."""
    ctx = tiny.client_context(POINT, **train)
    upload = tiny.update(hp, client, Download(copies(client.shared)), ctx)
    return upload, ctx.losses[-1]


# The client


@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 0.5), (1.0, 1.0), (0.0, 0.0), (0.25, 0.75)])
def test_loss_by_hand(alpha: float, beta: float) -> None:
    _, loss = step(FML(alpha=alpha, beta=beta), hand_client())
    loss_h = alpha * CE_H + (1 - alpha) * KL_GH
    loss_g = beta * CE_G + (1 - beta) * KL_HG
    assert loss == pytest.approx(loss_h + loss_g, rel=1e-5)


@pytest.mark.parametrize(("alpha", "beta"), [(0.5, 0.5), (1.0, 1.0), (0.0, 0.0), (0.25, 0.75)])
def test_one_step_moves_each_model_by_its_own_loss_alone(alpha: float, beta: float) -> None:
    """The gradient at a student's scores is softmax - e_0 from the labels and softmax - (the
    teacher's softmax) from the teacher; the first of both scores is shown, the second is its
    negative:

    h: alpha (1/4 - 1) + (1 - alpha) (1/4 - 4/5)
    g: beta (4/5 - 1) + (1 - beta) (4/5 - 1/4)

    and of a head's weights that times x = (1, 2), of its bias that alone.
    """
    client = hand_client()
    before = copies(client.model), copies(client.shared)
    step(FML(alpha=alpha, beta=beta), client, lr=0.1)
    slope_h = alpha * -0.75 + (1 - alpha) * -0.55
    slope_g = beta * -0.2 + (1 - beta) * 0.55
    for module, old, slope in (
        (client.model, before[0], slope_h),
        (client.shared, before[1], slope_g),
    ):
        new = get_weights(module)
        weight = (old["head.weight"] - new["head.weight"]) / 0.1
        bias = (old["head.bias"] - new["head.bias"]) / 0.1
        expected = torch.tensor([[slope, 2 * slope], [-slope, -2 * slope]])
        assert_close(weight, expected, rtol=1e-4, atol=1e-5)
        assert_close(bias, torch.tensor([slope, -slope]), rtol=1e-4, atol=1e-5)


def test_one_step_as_htfllib_takes_it() -> None:
    """KL is divided by the two classes as well, and teachers learn: q's gradient of KL(q || p) at
    its first score is q_0 q_1 (ln(q_0 / p_0) - ln(q_1 / p_1)), which is 3/16 (ln(5/16) - ln(15/4))
    = -3/16 ln 12 for h and 4/25 (ln(16/5) - ln(4/15)) = 4/25 ln 12 for g.

    h: 1/2 (-3/4) + 1/2 * 1/2 (-11/20 - 3/16 ln 12)
    g: 1/2 (-1/5) + 1/2 * 1/2 (11/20 + 4/25 ln 12)
    """
    client = hand_client()
    _, loss = step(FML(htfllib_compat=True), client, lr=0.1)
    assert loss == pytest.approx(CE_H / 2 + CE_G / 2 + KL_GH / 4 + KL_HG / 4, rel=1e-5)
    slope_h = -3 / 8 + (-11 / 20 - 3 / 16 * log(12)) / 4
    slope_g = -1 / 10 + (11 / 20 + 4 / 25 * log(12)) / 4
    bias_h, bias_g = (get_weights(m)["head.bias"] for m in (client.model, client.shared))
    assert_close(bias_h, -0.1 * torch.tensor([slope_h, -slope_h]), rtol=1e-4, atol=1e-6)
    assert_close(bias_g, -0.1 * torch.tensor([slope_g, -slope_g]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("clip", "norm"), [(None, 10.0), (2.0, 2.0)])
def test_each_models_gradient_is_clipped(clip: float | None, norm: float) -> None:
    """x = (100, 200): the slopes of the scores stay well above 10 / 224 for both models."""
    ctx = tiny.client_context(tiny.points([(100, 200)], [0], 2), lr=1e-3, clip=clip)
    client = Client(
        model=tiny.model(head=[[0, 0], [LN3 / 100, 0]]),
        shared=tiny.model(head=[[0, LN2 / 100], [0, 0]]),
    )
    before = copies(client.model), copies(client.shared)
    tiny.update(FML(), client, Download(copies(client.shared)), ctx)
    for module, old in ((client.model, before[0]), (client.shared, before[1])):
        moved = sum(float((old[n] - t).square().sum()) for n, t in get_weights(module).items())
        assert sqrt(moved) == pytest.approx(1e-3 * norm, rel=1e-2)


def test_prediction_is_the_own_models() -> None:
    x = torch.tensor([[1.0, 2.0]]).view(1, 2, 1, 1)
    assert_close(FML().predict(hand_client(), x).detach(), torch.tensor([[0.0, LN3]]))


def test_receiving_overwrites_the_shared_model_and_nothing_else() -> None:
    client = hand_client()
    own = copies(client.model)
    sent = {name: torch.full_like(t, 7) for name, t in get_weights(client.shared).items()}
    ctx: Any = None
    FML().receive(client, Download(sent), ctx)
    assert same(get_weights(client.shared), sent)
    assert same(get_weights(client.model), own)


def test_upload_is_the_trained_shared_model_only() -> None:
    client = hand_client()
    untrained = copies(client.shared)
    upload, _ = step(FML(), client)
    assert upload._fields == ("shared",)
    assert same(upload.shared, get_weights(client.shared))
    assert not same(upload.shared, untrained)


# The server


@pytest.mark.parametrize(("weighting", "mean"), [("uniform", 4.0), ("samples", 5.0)])
def test_average_by_hand(weighting: Any, mean: float) -> None:
    """All weights 2 from a client of 1 sample, 6 from one of 3: equally (2 + 6) / 2 = 4; by samples
    (1 * 2 + 3 * 6) / 4 = 5."""
    server = Server(tiny.model(head=[[1, 1], [1, 1]]))

    def reply(client: int, samples: int, value: float) -> Reply[Upload]:
        weights = {name: torch.full_like(t, value) for name, t in copies(server.shared).items()}
        return Reply(client, samples, Upload(weights))

    replies = [reply(0, 1, 2.0), reply(1, 3, 6.0)]
    ctx = tiny.server_context(Fleet(("mlp",), 2), Task(2))
    FML(weighting=weighting).server_update(server, replies, ctx)
    values = torch.cat([t.flatten() for t in get_weights(server.shared).values()])
    assert_close(values, torch.full_like(values, mean))


def test_one_participants_upload_becomes_the_shared_model() -> None:
    server = Server(tiny.model(head=[[1, 1], [1, 1]]))
    weights = {name: torch.full_like(t, 3) for name, t in copies(server.shared).items()}
    ctx = tiny.server_context(Fleet(("mlp",), 2), Task(2))
    FML().server_update(server, [Reply(5, 9, Upload(weights))], ctx)
    assert same(get_weights(server.shared), weights)


# Whole runs


def config(out: Path, **changes: Any) -> Config:
    settings: dict[str, Any] = {
        "method": "fml", "hp": FML(shared_model="mlp"), "clients": 2, "rounds": 2,
        "participation": 1.0, "out": out, "fleet": FleetConfig(("mlp",), 4),
        "train": TrainConfig(lr=0.01, batch_size=2),
    }  # fmt: skip
    return Config(**(settings | changes))


DATA = tiny.points([(1, 5), (3, 1), (2, 2), (9, 4), (5, 5), (0, 7)], [0, 1, 0, 1, 1, 0], 2)
SPLIT = tiny.deal([0, 1], [2, 3, 4, 5])


def test_without_distillation_own_models_are_those_of_local_training(tmp_path: Path) -> None:
    """HtFLlib's default, alpha = beta = 1."""
    alone = tiny.simulate(config(tmp_path / "local", method="local", hp=None), DATA, SPLIT)
    lonely = FML(shared_model="mlp", alpha=1.0, beta=1.0)
    mutual = tiny.simulate(config(tmp_path / "one", hp=lonely), DATA, SPLIT)
    taught = tiny.simulate(config(tmp_path / "half"), DATA, SPLIT)
    for client in (0, 1):
        model = alone.states[client]["model"]
        assert_close(mutual.states[client]["model"], model)
        assert not same(taught.states[client]["model"], model)


def test_a_client_first_chosen_late_starts_from_the_shared_model_of_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[int, Weights] = {}
    began: dict[tuple[int, int], Weights] = {}
    server_update, client_update = FML.server_update, FML.client_update

    @wraps(server_update)
    def watch_server(
        self: FML, server: Server, replies: Sequence[Reply[Upload]], ctx: ServerContext
    ) -> None:
        server_update(self, server, replies, ctx)
        made[ctx.round] = copies(server.shared)

    @wraps(client_update)
    def watch_client(self: FML, client: Client, message: Download, ctx: ClientContext) -> Upload:
        began[ctx.client_id, ctx.round] = copies(client.shared)
        return client_update(self, client, message, ctx)

    monkeypatch.setattr(FML, "server_update", watch_server)
    monkeypatch.setattr(FML, "client_update", watch_client)
    tiny.simulate(config(tmp_path, rounds=6, participation=0.5), DATA, SPLIT)
    first = {k: min(round for client, round in began if client == k) for k in (0, 1)}
    assert sorted(first.values())[0] == 1
    late, round = max(first.items(), key=lambda item: item[1])
    assert round > 1, "change the seed: nobody came late"
    assert same(began[late, round], made[round - 1])


# What is refused


@pytest.mark.parametrize("flag", ["alpha", "beta"])
@pytest.mark.parametrize("value", [-0.1, 1.5])
def test_a_weight_that_is_no_share_is_refused_by_its_flag(flag: str, value: float) -> None:
    hp = FML(shared_model="mlp", **{flag: value})  # type: ignore[arg-type]
    message = rf"--hp\.{flag} must be between 0 and 1, got {value}.*Try --hp\.{flag} 0\.5"
    with pytest.raises(ConfigError, match=message):
        method.check(hp, Fleet(("mlp",), 4), Task(2), "fml")


def test_unknown_shared_model_is_refused_by_its_flag() -> None:
    with pytest.raises(ConfigError, match=r"'cnn6' in --hp\.shared-model; did you mean 'cnn"):
        method.check(FML(shared_model="cnn6"), Fleet(("mlp",), 4), Task(2), "fml")
