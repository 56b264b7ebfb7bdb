"""FedMRL's equations, worked by hand.

Throughout, x = (1, 2), y = 0, d1 = 1, d2 = 2 and

    G_ex = [[1, 1]]            G_ex(x) = 3           G_hd = [[ln 2], [0]]
    F_ex = [[1, 0], [0, -1]]   F_ex(x) = (1, -2)     F_hd = [[0, 0], [0, -ln 3]]
    P = [[1, 1, 1], [0, 1, 1]]

    R = P (3, 1, -2) = (3 + 1 - 2, 1 - 2) = (2, -1); the other order would give (2, 1)
    G_hd(R[:1]) = (2 ln 2, 0),  softmax = (4/5, 1/5),  CE = ln(5/4)
    F_hd(R)     = (0, ln 3),    softmax = (1/4, 3/4),  CE = ln 4
"""

from collections.abc import Sequence
from functools import wraps
from math import log
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from methods.fedmrl import Client, Download, FedMRL, Server, Upload
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
X = torch.tensor([[1.0, 2.0]]).view(1, 2, 1, 1)
POINT = tiny.points([(1, 2)], [0], num_classes=2)


def hand_client() -> Client:
    return Client(
        model=tiny.model(head=[[0, 0], [0, -LN3]], features=[[1, 0], [0, -1]]),
        shared=tiny.model(head=[[LN2], [0]], features=[[1, 1]]),
        projector=tiny.linear([[1, 1, 1], [0, 1, 1]]),
    )


def copies(module: nn.Module) -> Weights:
    return {name: tensor.clone() for name, tensor in get_weights(module).items()}


def same(a: Weights, b: Weights) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def train(hp: FedMRL, client: Client, lr: float = 0.1) -> tuple[Upload, float]:
    """What the client sends after one step, and the loss of that step."""
    ctx = tiny.client_context(POINT, lr=lr)
    upload = tiny.update(hp, client, Download(copies(client.shared)), ctx)
    return upload, ctx.losses[-1]


# The client


def test_fused_representation_has_the_shared_part_first() -> None:
    assert_close(FedMRL(d1=1).fuse(hand_client(), X).detach(), torch.tensor([[2.0, -1.0]]))


@pytest.mark.parametrize(("coarse", "fine"), [(1.0, 1.0), (1.0, 0.0), (0.0, 1.0), (2.0, 0.5)])
def test_loss_by_hand(coarse: float, fine: float) -> None:
    """m_lc CE(G_hd(R[:1]), y) + m_hf CE(F_hd(R), y) = m_lc ln(5/4) + m_hf ln 4."""
    _, loss = train(FedMRL(d1=1, coarse_weight=coarse, fine_weight=fine), hand_client())
    assert loss == pytest.approx(coarse * log(5 / 4) + fine * log(4), rel=1e-6)


@pytest.mark.parametrize(("coarse", "fine"), [(1.0, 1.0), (2.0, 0.5)])
def test_one_step_moves_the_shared_model_the_own_model_and_the_projector(
    coarse: float, fine: float
) -> None:
    """The gradient at the scores is softmax - e_0, times m_lc or m_hf:

    dz_lc = m_lc (-1/5, 1/5)       dG_hd = dz_lc R[:1]^T = m_lc (-2/5, 2/5)^T
    dz_hf = m_hf (-3/4, 3/4)       dF_hd = dz_hf R^T = m_hf [[-3/2, 3/4], [3/2, -3/4]]

    dR = G_hd^T dz_lc (first feature only) + F_hd^T dz_hf
       = (-m_lc ln 2 / 5, -m_hf 3 ln 3 / 4) =: (-a, -b)

    dP = dR (3, 1, -2)^T; behind it P^T dR = (-a, -a - b, -a - b), the first for the shared model:
    dG_ex = -a (1, 2),  dF_ex = -(a + b) [[1, 2], [1, 2]]
    """
    lr = 0.1
    client = hand_client()
    before = [copies(module) for module in (client.shared, client.model, client.projector)]
    train(FedMRL(d1=1, coarse_weight=coarse, fine_weight=fine), client, lr)
    shared, model, projector = (
        {name: (old[name] - new) / lr for name, new in get_weights(module).items()}
        for old, module in zip(before, (client.shared, client.model, client.projector), strict=True)
    )
    a, b = coarse * LN2 / 5, fine * 3 * LN3 / 4

    def check(found: Tensor, expected: Sequence[Any]) -> None:
        assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-5)

    check(shared["head.weight"], [[-2 / 5 * coarse], [2 / 5 * coarse]])
    check(shared["head.bias"], [-1 / 5 * coarse, 1 / 5 * coarse])
    check(shared["trunk.weight"], [[-a, -2 * a]])
    check(model["head.weight"], [[-1.5 * fine, 0.75 * fine], [1.5 * fine, -0.75 * fine]])
    check(model["head.bias"], [-0.75 * fine, 0.75 * fine])
    check(model["trunk.weight"], [[-(a + b), -2 * (a + b)]] * 2)
    check(projector["weight"], [[-3 * a, -a, 2 * a], [-3 * b, -b, 2 * b]])
    check(projector["bias"], [-a, -b])


def test_prediction_is_the_own_head_on_the_fused_representation() -> None:
    """Mix-large: F_hd(R) = (0, ln 3). Mix-small would be (2 ln 2, 0), single-large
    F_hd(F_ex(x)) = (0, 2 ln 3), single-small G_hd(G_ex(x)) = (3 ln 2, 0)."""
    scores = FedMRL(d1=1).predict(hand_client(), X)
    assert_close(scores.detach(), torch.tensor([[0.0, LN3]]))


def test_receiving_overwrites_the_shared_model_and_nothing_else() -> None:
    client = hand_client()
    model, projector = copies(client.model), copies(client.projector)
    sent = {name: torch.full_like(t, 7) for name, t in get_weights(client.shared).items()}
    ctx: Any = None
    FedMRL(d1=1).receive(client, Download(sent), ctx)
    assert same(get_weights(client.shared), sent)
    assert same(get_weights(client.model), model)
    assert same(get_weights(client.projector), projector)


def test_upload_is_the_trained_shared_model_only() -> None:
    client = hand_client()
    untrained = copies(client.shared)
    upload, _ = train(FedMRL(d1=1), client)
    assert upload._fields == ("shared",)
    assert same(upload.shared, get_weights(client.shared))
    assert not same(upload.shared, untrained)


def test_projector_maps_both_widths_to_the_clients_own() -> None:
    ctx = tiny.client_context(POINT)
    client = FedMRL(shared_model="mlp", d1=3).init_client(ctx.build_model("mlp", 5), ctx)
    assert client.shared.feature_dim == 3
    assert (client.projector.in_features, client.projector.out_features) == (8, 5)


# The server


@pytest.mark.parametrize(("weighting", "mean"), [("samples", 5.0), ("uniform", 4.0)])
def test_average_by_hand(weighting: Any, mean: float) -> None:
    """All weights 2 from a client of 1 sample, 6 from one of 3: (1 * 2 + 3 * 6) / 4 = 5; equally
    (2 + 6) / 2 = 4."""
    server = Server(tiny.model(head=[[1], [1]], features=[[1, 1]]))

    def reply(client: int, samples: int, value: float) -> Reply[Upload]:
        weights = {name: torch.full_like(t, value) for name, t in copies(server.shared).items()}
        return Reply(client, samples, Upload(weights))

    replies = [reply(0, 1, 2.0), reply(1, 3, 6.0)]
    ctx = tiny.server_context(Fleet(("mlp",), 2), Task(2))
    FedMRL(d1=1, weighting=weighting).server_update(server, replies, ctx)
    values = torch.cat([t.flatten() for t in get_weights(server.shared).values()])
    assert_close(values, torch.full_like(values, mean))


# Two rounds


def config(out: Path, **changes: Any) -> Config:
    settings: dict[str, Any] = {
        "method": "fedmrl", "hp": FedMRL(shared_model="mlp", d1=3), "clients": 2, "rounds": 2,
        "participation": 1.0, "out": out, "fleet": FleetConfig(("mlp",), 4),
        "train": TrainConfig(lr=0.1, batch_size=2),
    }  # fmt: skip
    return Config(**(settings | changes))


DATA = tiny.points([(1, 5), (3, 1), (2, 2), (9, 4), (5, 5), (0, 7)], [0, 1, 0, 1, 1, 0], 2)
SPLIT = tiny.deal([0, 1], [2, 3, 4, 5])


def test_projector_of_round_2_starts_from_that_of_round_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients 0 and 1 take turns in one worker, and evaluations run between the rounds. HtFLlib
    loses the trained projector here."""
    seen: dict[tuple[int, int], tuple[Weights, Weights]] = {}
    original = FedMRL.client_update

    @wraps(original)
    def watched(self: FedMRL, client: Client, message: Download, ctx: ClientContext) -> Upload:
        start = copies(client.projector)
        upload = original(self, client, message, ctx)
        seen[ctx.client_id, ctx.round] = start, copies(client.projector)
        return upload

    monkeypatch.setattr(FedMRL, "client_update", watched)
    run = tiny.simulate(config(tmp_path), DATA, SPLIT)
    assert sorted(seen) == [(0, 1), (0, 2), (1, 1), (1, 2)]
    for client in (0, 1):
        (born, left), (found, end) = seen[client, 1], seen[client, 2]
        assert not same(born, left), "training moves the projector"
        assert same(found, left)
        assert not same(found, end)
        assert same(run.states[client]["projector"], end)
    assert not same(seen[0, 2][0], seen[1, 2][0]), "each client has its own"


def test_uploads_are_not_the_last_clients_and_their_mean_is_broadcast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the authors' code all uploads alias the last client's model. Here 2 and 4 samples make
    theta = 1/3 theta_0 + 2/3 theta_1, and that is what the clients get in round 2."""
    uploads: list[list[Weights]] = []
    downloads: dict[tuple[int, int], Weights] = {}
    server_update, receive = FedMRL.server_update, FedMRL.receive

    @wraps(server_update)
    def watch_uploads(
        self: FedMRL, server: Server, replies: Sequence[Reply[Upload]], ctx: ServerContext
    ) -> None:
        assert [reply.num_samples for reply in replies] == [2, 4]
        uploads.append([reply.payload.shared for reply in replies])
        server_update(self, server, replies, ctx)

    @wraps(receive)
    def watch_downloads(
        self: FedMRL, client: Client, message: Download, ctx: ClientContext
    ) -> None:
        receive(self, client, message, ctx)
        downloads.setdefault((ctx.client_id, ctx.round), copies(client.shared))

    monkeypatch.setattr(FedMRL, "server_update", watch_uploads)
    monkeypatch.setattr(FedMRL, "receive", watch_downloads)
    tiny.simulate(config(tmp_path), DATA, SPLIT)

    first, second = uploads[0]
    assert not same(first, second)
    assert same(downloads[0, 1], downloads[1, 1]), "both start from the same"
    mean = {name: first[name] / 3 + second[name] * 2 / 3 for name in first}
    assert same(downloads[0, 2], downloads[1, 2])
    assert_close(downloads[0, 2], mean)


# What is refused


@pytest.mark.parametrize("d1", [0, 5])
def test_coarse_representation_wider_than_the_clients_is_refused_before_the_run(
    tmp_path: Path, d1: int
) -> None:
    hp = FedMRL(shared_model="mlp", d1=d1)
    message = rf"--hp\.d1 must be between 1 and the clients' width d2 = 4, got {d1}.*--hp\.d1 4"
    with pytest.raises(ConfigError, match=message):
        tiny.simulate(config(tmp_path / "run", hp=hp), DATA, SPLIT)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("d1", [1, 4])
def test_coarse_representation_may_be_as_wide_as_the_clients(d1: int) -> None:
    method.check(FedMRL(shared_model="mlp", d1=d1), Fleet(("mlp",), 4), Task(2), "fedmrl")


def test_unknown_shared_model_is_refused_by_its_flag() -> None:
    hp = FedMRL(shared_model="cnn6", d1=1)
    with pytest.raises(ConfigError, match=r"'cnn6' in --hp\.shared-model; did you mean 'cnn"):
        method.check(hp, Fleet(("mlp",), 4), Task(2), "fedmrl")
