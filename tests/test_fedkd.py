"""FedKD's equations, worked by hand.

Throughout, x = (1, 2), y = 0 and

    h: features [[1, 0], [0, 1]], r_h = (1, 2), head [[0, 0], [ln 3, 0]]
       scores (0, ln 3), softmax (1/4, 3/4), CE = ln 4
    g: features [[0, 1], [1, 0]], r_g = (2, 1), head [[ln 2, 0], [0, 0]]
       scores (2 ln 2, 0), softmax (4/5, 1/5), CE = ln(5/4)
    W = [[1, 1], [0, 1]], W r_g = (3, 1), W r_g - r_h = (2, -1), MSE = (4 + 1) / 2 = 5/2

    Z = ln 4 + ln(5/4) = ln 5
    KL(g || h) = 4/5 ln(16/5) + 1/5 ln(4/15),  KL(h || g) = 1/4 ln(5/16) + 3/4 ln(15/4)
"""

from dataclasses import replace
from functools import wraps
from math import log, sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from methods.fedkd import Client, Download, FedKD, Server, Upload
from raysim import (
    ClientContext,
    Config,
    ConfigError,
    EvalConfig,
    Fleet,
    FleetConfig,
    Reply,
    Task,
    TrainConfig,
    Weights,
    get_weights,
    method,
    ops,
)
from raysim.data import Dataset
from raysim.lowrank import LowRank, compress, restore

LN2, LN3, Z = log(2), log(3), log(5)
KL_GH = 4 / 5 * log(16 / 5) + 1 / 5 * log(4 / 15)
KL_HG = 1 / 4 * log(5 / 16) + 3 / 4 * log(15 / 4)
MSE = 5 / 2
POINT = tiny.points([(1, 2)], [0], num_classes=2)


def hand_client() -> Client:
    return Client(
        model=tiny.model(head=[[0, 0], [LN3, 0]], features=[[1, 0], [0, 1]]),
        shared=tiny.model(head=[[LN2, 0], [0, 0]], features=[[0, 1], [1, 0]]),
        projector=tiny.linear([[1, 1], [0, 1]], bias=False),
    )


def copies(module: nn.Module) -> Weights:
    return {name: tensor.clone() for name, tensor in get_weights(module).items()}


def same(a: Weights, b: Weights) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def step(hp: FedKD, client: Client, **train: Any) -> tuple[Upload, float]:
    """What the client sends after one step, and the loss of that step."""
    ctx = tiny.client_context(POINT, **train)
    upload = tiny.update(hp, client, Download(copies(client.shared), update=False), ctx)
    return upload, ctx.losses[-1]


def gradients(hp: FedKD, lr: float = 0.1, mentee_lr: float = 0.1) -> tuple[Weights, ...]:
    """Of h, g and W, by what one step moved."""
    client = hand_client()
    before = copies(client.model), copies(client.shared), copies(client.projector)
    upload, _ = step(hp, client, lr=lr)
    mentee = {name: before[1][name] + change for name, change in restore(upload.shared).items()}
    after = get_weights(client.model), mentee, get_weights(client.projector)
    return tuple(
        {name: (old[name] - new[name]) / rate for name in old}
        for old, new, rate in zip(before, after, (lr, mentee_lr, lr), strict=True)
    )


def check(found: Tensor, expected: Any) -> None:
    assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-5)


# The client


def test_loss_by_hand() -> None:
    """L_h + L_g, the hint once in each."""
    _, loss = step(FedKD(), hand_client())
    assert loss == pytest.approx(Z + (KL_GH + KL_HG + 2 * MSE) / Z, rel=1e-5)


def test_one_step_moves_the_mentor_the_mentee_and_the_map() -> None:
    """The gradient at the first score (the second is its negative), from the labels and, over Z,
    from the other model:

    h: a = (1/4 - 1) + (1/4 - 4/5) / Z        g: b = (4/5 - 1) + (4/5 - 1/4) / Z

    The hint's at W r_g is (2, -1), at r_h (-2, 1), at r_g W^T (2, -1) = (2, 1). So
    at r_h: (-a ln 3, 0) + (-2, 1) / Z        at r_g: (b ln 2, 0) + (2, 1) / Z
    W: (2, -1) r_g^T / Z, from each of the two losses
    """
    h, g, w = gradients(FedKD())
    a, b = -0.75 - 0.55 / Z, -0.2 + 0.55 / Z
    check(h["head.bias"], [a, -a])
    check(h["head.weight"], [[a, 2 * a], [-a, -2 * a]])
    r = -a * LN3 - 2 / Z, 1 / Z
    check(h["trunk.weight"], [[r[0], 2 * r[0]], [r[1], 2 * r[1]]])
    check(g["head.bias"], [b, -b])
    check(g["head.weight"], [[2 * b, b], [-2 * b, -b]])
    r = b * LN2 + 2 / Z, 1 / Z
    check(g["trunk.weight"], [[r[0], 2 * r[0]], [r[1], 2 * r[1]]])
    check(w["weight"], [[8 / Z, 4 / Z], [-4 / Z, -2 / Z]])


def test_the_mentee_may_have_a_learning_rate_of_its_own() -> None:
    for found, expected in zip(
        gradients(FedKD(mentee_lr=0.02), mentee_lr=0.02), gradients(FedKD()), strict=True
    ):
        assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_one_step_as_htfllib_takes_it() -> None:
    """Both losses reach both models, KL is halved for the two classes, and Z has a gradient: with
    S = (KL + KL) / 2 + 2 MSE the loss is Z + S / Z, so that of a CE is 1 - S / Z^2. Teachers learn
    -3/16 ln 12 (h) and 4/25 ln 12 (g) at their first score; the hint counts twice everywhere."""
    hp = FedKD(htfllib_compat=True)
    s = (KL_GH + KL_HG) / 2 + 2 * MSE
    assert step(hp, hand_client())[1] == pytest.approx(Z + s / Z, rel=1e-5)
    h, g, w = gradients(hp)
    a = -0.75 * (1 - s / Z**2) + (-0.55 - 3 / 16 * log(12)) / 2 / Z
    b = -0.2 * (1 - s / Z**2) + (0.55 + 4 / 25 * log(12)) / 2 / Z
    check(h["head.bias"], [a, -a])
    check(g["head.bias"], [b, -b])
    r = -a * LN3 - 4 / Z, 2 / Z
    check(h["trunk.weight"], [[r[0], 2 * r[0]], [r[1], 2 * r[1]]])
    r = b * LN2 + 4 / Z, 2 / Z
    check(g["trunk.weight"], [[r[0], 2 * r[0]], [r[1], 2 * r[1]]])
    check(w["weight"], [[8 / Z, 4 / Z], [-4 / Z, -2 / Z]])


@pytest.mark.parametrize(("clip", "norm"), [(None, 10.0), (0.1, 0.1)])
def test_the_gradient_of_each_module_is_clipped(clip: float | None, norm: float) -> None:
    """x = (100, 200) makes every gradient longer than 10; W's is (200, -100) (200, 100)^T / Z."""
    ctx = tiny.client_context(tiny.points([(100, 200)], [0], 2), lr=1e-3, clip=clip)
    client = hand_client()
    before = copies(client.model), copies(client.projector)
    upload = tiny.update(FedKD(), client, Download(copies(client.shared), False), ctx)
    for module, old in ((client.model, before[0]), (client.projector, before[1])):
        moved = sum(float((old[n] - t).square().sum()) for n, t in get_weights(module).items())
        assert sqrt(moved) == pytest.approx(1e-3 * norm, rel=2e-2)
    moved = sum(float(t.square().sum()) for t in restore(upload.shared).values())
    assert sqrt(moved) == pytest.approx(1e-3 * norm, rel=2e-2)


@pytest.mark.parametrize("compat", [False, True])
def test_models_that_know_the_answer_do_not_divide_by_zero(compat: bool) -> None:
    """A client of one class ends at Z = 0."""
    client = hand_client()
    for module in (client.model, client.shared):
        nn.init.constant_(module.head.bias[:1], 1000.0)
    _, loss = step(FedKD(htfllib_compat=compat), client)
    assert loss == pytest.approx(2 * MSE / 1e-6, rel=1e-3)
    assert all(bool(t.isfinite().all()) for t in get_weights(client.model).values())


@pytest.mark.parametrize("what", ["updates", "parameters"])
def test_what_is_sent_is_the_change_or_the_mentee_and_the_client_keeps_g(what: Any) -> None:
    client = hand_client()
    g = copies(client.shared)
    change = restore(step(FedKD(), hand_client())[0].shared)
    upload, _ = step(FedKD(compress=what), client)
    assert upload._fields == ("shared",)
    assert same(copies(client.shared), g), "the next update is for the g that was received"
    assert float(change["head.bias"].abs().min()) > 0
    expected = {n: change[n] if what == "updates" else g[n] + change[n] for n in g}
    assert_close(restore(upload.shared), expected)


def test_prediction_is_the_mentors() -> None:
    x = torch.tensor([[1.0, 2.0]]).view(1, 2, 1, 1)
    assert_close(FedKD().predict(hand_client(), x).detach(), torch.tensor([[0.0, LN3]]))


# The server


def diagonal(*values: float) -> Tensor:
    return torch.cat([torch.diag(torch.tensor(values)), torch.zeros(len(values), 4)], dim=1)


def ones() -> Server:
    server = Server(tiny.model(head=[[1.0] * 8] * 4), news={}, holders=[])
    nn.init.ones_(server.shared.head.bias)
    return server


def reply(client: int, matrix: Tensor, bias: float) -> Reply[Upload]:
    weights = {"head.weight": matrix, "head.bias": torch.full((4,), bias)}
    return Reply(client, 1 + client, Upload(compress(weights, 1.0)))


@pytest.mark.parametrize(("what", "start"), [("updates", 1.0), ("parameters", 0.0)])
def test_server_cuts_the_mean_and_keeps_what_it_sends(what: Any, start: float) -> None:
    """Equal shares whatever the sizes: the mean of diag(16, 0, 8, 0) and diag(0, 8, 0, 4) is
    diag(8, 4, 4, 2), of which 63 % is diag(8). Biases, 2 and 4, are never cut."""
    server = ones()
    hp = FedKD(compress=what, energy_start=0.63, energy_end=0.63)
    ctx = tiny.server_context(Fleet(("mlp",), 8), Task(4))
    replies = [reply(3, diagonal(16, 0, 8, 0), 2.0), reply(7, diagonal(0, 8, 0, 4), 4.0)]
    hp.server_update(server, replies, ctx)
    assert_close(get_weights(server.shared)["head.weight"], start + diagonal(8, 0, 0, 0))
    assert_close(get_weights(server.shared)["head.bias"], start + torch.full((4,), 3.0))
    cut = server.news["head.weight"]
    assert isinstance(cut, LowRank)
    assert cut.s.tolist() == pytest.approx([8])
    assert server.holders == [3, 7]


def test_the_first_g_goes_whole_to_everyone() -> None:
    ctx = tiny.server_context(Fleet(("mlp",), 8), Task(4))
    for what in ("updates", "parameters"):
        server = ones()
        sent = FedKD(compress=what).broadcast(server, [0, 1], ctx)  # type: ignore[arg-type]
        assert list(sent) == [0, 1]
        for message in sent.values():
            assert not message.update
            assert same(restore(message.shared), get_weights(server.shared))


def test_an_update_goes_to_those_who_have_the_g_before_and_the_whole_g_to_others() -> None:
    server, ctx = ones(), tiny.server_context(Fleet(("mlp",), 8), Task(4))
    hp = FedKD(energy_start=0.63, energy_end=0.63)
    hp.server_update(server, [reply(1, diagonal(8, 4, 4, 2), 0.0)], ctx)
    sent = hp.broadcast(server, [0, 1], ctx)
    assert (sent[0].update, sent[1].update) == (False, True)
    assert_close(restore(sent[0].shared)["head.weight"], 1 + diagonal(8, 0, 0, 0))
    assert_close(restore(sent[1].shared)["head.weight"], diagonal(8, 0, 0, 0))


def test_energy_rises_evenly_to_its_end() -> None:
    """0.9 + t/4 (1 - 0.9)."""
    hp, ctx = FedKD(energy_start=0.9, energy_end=1.0), tiny.client_context(POINT)
    found = [hp.energy(replace(ctx, round=t, rounds=4)) for t in (1, 2, 3, 4)]
    assert found == pytest.approx([0.925, 0.95, 0.975, 1.0])


# Whole runs


def config(out: Path, **changes: Any) -> Config:
    hp = FedKD(shared_model="mlp", energy_start=0.5, energy_end=0.9)
    settings: dict[str, Any] = {
        "method": "fedkd", "hp": hp, "clients": 4, "rounds": 6, "participation": 0.5, "out": out,
        "fleet": FleetConfig(("mlp",), 8), "train": TrainConfig(lr=0.01, batch_size=2),
    }  # fmt: skip
    return Config(**(settings | changes))


DATA = tiny.points([(1, 5), (3, 1), (2, 2), (9, 4), (5, 5), (0, 7)], [0, 1, 0, 1, 1, 0], 2)
SPLIT = tiny.deal([0, 1], [2], [3, 4], [5, 1])


@pytest.mark.parametrize("what", ["updates", "parameters"])
def test_everyone_who_trains_has_the_servers_g_however_long_it_was_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: Any
) -> None:
    made: dict[int, Weights] = {}
    began: dict[tuple[int, int], tuple[Weights, bool]] = {}
    server_update, client_update = FedKD.server_update, FedKD.client_update

    @wraps(server_update)
    def watch_server(self: FedKD, server: Server, replies: Any, ctx: Any) -> None:
        made.setdefault(0, copies(server.shared))
        server_update(self, server, replies, ctx)
        made[ctx.round] = copies(server.shared)
        assert (ctx.round, ctx.rounds) == (len(made) - 1, 6)

    @wraps(client_update)
    def watch_client(self: FedKD, client: Client, message: Download, ctx: ClientContext) -> Upload:
        began[ctx.client_id, ctx.round] = copies(client.shared), message.update
        assert ctx.rounds == 6
        return client_update(self, client, message, ctx)

    monkeypatch.setattr(FedKD, "server_update", watch_server)
    monkeypatch.setattr(FedKD, "client_update", watch_client)
    hp = FedKD(shared_model="mlp", energy_start=0.5, energy_end=0.9, compress=what)
    run = tiny.simulate(config(tmp_path, hp=hp), DATA, SPLIT)
    for (_, round), (found, _) in began.items():
        assert_close(found, made[round - 1])
    assert not same(made[5], made[6])

    whole = sum(t.numel() for t in made[0].values())
    for (client, round), (_, update) in began.items():
        expects_update = what == "updates" and (client, round - 1) in began
        assert update == expects_update
        down = run.count("scalars", round, "down", client=client)
        compressed = round > 1 and (what == "parameters" or update)
        assert down < whole if compressed else down == whole
    followed = [update for _, update in began.values()]
    if what == "updates":
        assert True in followed, "change the seed: nobody came twice in a row"
    assert len({round for client, round in began if client == 0}) < 6


def test_the_map_is_the_clients_own_and_lasts(tmp_path: Path) -> None:
    first = tiny.simulate(config(tmp_path / "1", participation=1.0, rounds=1), DATA, SPLIT)
    second = tiny.simulate(config(tmp_path / "2", participation=1.0, rounds=2), DATA, SPLIT)
    maps = [run.states[k]["projector"]["weight"] for run in (first, second) for k in (0, 2)]
    assert maps[0].shape == (8, 8)
    moved = [(maps[0] - maps[1]).norm(), (maps[0] - maps[2]).norm()]
    assert 0 < moved[1] < moved[0] / 3, "round 2 goes on from round 1, not from new weights"
    fields = {row["field"] for row in second.messages}
    assert fields == {"shared", "update"}


def test_the_wire_carries_fedres_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """423,428 scalars a client up, FedRE's entry for FedKD, are FedAvgCNN with 100 classes as it is
    born, compressed at T = 0.55; 924,708 down, for the first g goes whole."""
    monkeypatch.setattr(ops, "train", lambda *args: 0.0)
    images = np.zeros((4, 3, 32, 32), dtype=np.uint8)
    blank = Dataset("blank", images, np.array([0, 1, 0, 1]), 4, 100, (0.5,) * 3, (0.5,) * 3)
    hp = FedKD("fedavg_cnn", compress="parameters", energy_start=0.55, energy_end=0.55)
    fleet, skip = FleetConfig(("fedavg_cnn",), 512), EvalConfig(clients="1")
    settings = config(
        tmp_path, hp=hp, clients=2, participation=1.0, rounds=1, fleet=fleet, eval=skip, seed=0
    )
    run = tiny.simulate(settings, blank, tiny.deal([0, 1], [2, 3]))
    assert [run.count("scalars", 1, "up", client=k) for k in (0, 1)] == [423_428] * 2
    assert [run.count("scalars", 1, "down", client=k) for k in (0, 1)] == [924_708] * 2


# What is refused


@pytest.mark.parametrize("flag", ["energy_start", "energy_end"])
@pytest.mark.parametrize("value", [0.0, 1.1])
def test_an_energy_that_is_no_share_is_refused_by_its_flag(flag: str, value: float) -> None:
    hp = FedKD(shared_model="mlp", **{flag: value})  # type: ignore[arg-type]
    name = flag.replace("_", "-")
    message = rf"--hp\.{name} must be above 0 and at most 1, got {value}. Try --hp\.{name} 0\.95"
    with pytest.raises(ConfigError, match=message):
        method.check(hp, Fleet(("mlp",), 4), Task(2), "fedkd")


def test_unknown_shared_model_is_refused_by_its_flag() -> None:
    with pytest.raises(ConfigError, match=r"'cnn6' in --hp\.shared-model; did you mean 'cnn"):
        method.check(FedKD(shared_model="cnn6"), Fleet(("mlp",), 4), Task(2), "fedkd")
