"""FedMRL's equations, worked by hand.

Throughout, x = (1, 2), y = 0, d1 = 1, d2 = 2 and

    G_ex = [[1, 1]]            G_ex(x) = 3           G_hd = [[ln 2], [0]]
    F_ex = [[1, 0], [0, -1]]   F_ex(x) = (1, -2)     F_hd = [[0, 0], [0, -ln 3]]
    P = [[1, 1, 1], [0, 1, 1]]

    R = P (3, 1, -2) = (3 + 1 - 2, 1 - 2) = (2, -1); the other order would give (2, 1)
    G_hd(R[:1]) = (2 ln 2, 0),  softmax = (4/5, 1/5),  CE = ln(5/4)
    F_hd(R)     = (0, ln 3),    softmax = (1/4, 3/4),  CE = ln 4
"""

import itertools
from collections.abc import Sequence
from functools import wraps
from math import log
from pathlib import Path
from typing import Any

import numpy as np
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
    ops,
)
from raysim.data import Dataset

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


def check(found: Tensor, expected: Sequence[Any]) -> None:
    assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-5)


def train(hp: FedMRL, client: Client, lr: float = 0.1) -> tuple[Upload, float]:
    """What the client sends after one step, and the loss of that step."""
    ctx = tiny.client_context(POINT, lr=lr)
    upload = tiny.update(hp, client, Download(copies(client.shared)), ctx)
    return upload, ctx.losses[-1]


# The client


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

    check(shared["head.weight"], [[-2 / 5 * coarse], [2 / 5 * coarse]])
    check(shared["head.bias"], [-1 / 5 * coarse, 1 / 5 * coarse])
    check(shared["trunk.weight"], [[-a, -2 * a]])
    check(model["head.weight"], [[-1.5 * fine, 0.75 * fine], [1.5 * fine, -0.75 * fine]])
    check(model["head.bias"], [-0.75 * fine, 0.75 * fine])
    check(model["trunk.weight"], [[-(a + b), -2 * (a + b)]] * 2)
    check(projector["weight"], [[-3 * a, -a, 2 * a], [-3 * b, -b, 2 * b]])
    check(projector["bias"], [-a, -b])


SCORES = {
    "mix-small": (2 * LN2, 0.0), "mix-large": (0.0, LN3),
    "single-small": (3 * LN2, 0.0), "single-large": (0.0, 2 * LN3),
}  # fmt: skip
"""G_hd(R[:1]), F_hd(R), G_hd(G_ex(x)) = G_hd(3) and F_hd(F_ex(x)) = F_hd(1, -2). Were the own
representation first in R, or the whole of it sliced from the other end, mix-* would differ."""


def check_scores(hp: FedMRL, expected: dict[str, tuple[float, float]]) -> None:
    found = hp.variants(hand_client(), X)
    assert list(found) == list(expected)
    for name, scores in expected.items():
        assert_close(found[name].detach(), torch.tensor([scores]), msg=name)


@pytest.mark.parametrize("mrl", ["full", "fine"])
def test_four_inference_models_by_hand(mrl: Any) -> None:
    check_scores(FedMRL(d1=1, mrl=mrl), SCORES)


@pytest.mark.parametrize("name", list(SCORES))
def test_prediction_is_that_of_the_chosen_inference_model(name: Any) -> None:
    hp = FedMRL(d1=1, inference=name)
    assert hp.headline == name
    assert_close(hp.predict(hand_client(), X).detach(), torch.tensor([SCORES[name]]))


def test_own_head_on_the_fused_representation_is_what_counts_by_default() -> None:
    assert FedMRL().inference == "mix-large"
    assert_close(FedMRL(d1=1).predict(hand_client(), X).detach(), torch.tensor([[0.0, LN3]]))


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


# Matryoshka slices


WIDE_HEAD = [[1, 2, 4], [0, 0, -1]]
"""F_hd for d2 = 3; its first 2 columns are [[1, 2], [0, 0]]."""


def wide_client(hp: FedMRL) -> Client:
    """d1 = 2, d2 = 3, x = (1, 2): G_ex(x) = (2, 1), F_ex(x) = (1, 2, 3), R = P (2, 1, 1, 2, 3) =
    (3, -1, 2), whose first two features are the coarse representation."""
    shared = tiny.model(head=[[1, 0], [0, 5]], features=[[0, 1], [1, 0]])
    if hp.mrl == "efficient":
        shared.head = nn.Identity()  # type: ignore[assignment]
    return Client(
        model=tiny.model(head=WIDE_HEAD, features=[[1, 0], [0, 1], [1, 1]]),
        shared=shared,
        projector=tiny.linear([[1, 1, 0, 0, 0], [0, 0, 1, -1, 0], [0, 0, 1, -1, 1]]),
    )


@pytest.mark.parametrize(
    ("mrl", "mix_small", "single_small"),
    [
        # G_hd(3, -1) = (3, -5), G_hd(2, 1) = (2, 5)
        ("full", (3.0, -5.0), (2.0, 5.0)),
        # F_hd[:2](3, -1) = (3 - 2, 0), F_hd[:2](2, 1) = (2 + 2, 0)
        ("efficient", (1.0, 0.0), (4.0, 0.0)),
    ],
)
def test_coarse_scores_are_of_the_first_d1_features(
    mrl: Any, mix_small: tuple[float, float], single_small: tuple[float, float]
) -> None:
    """F_hd(R) = (3 - 2 + 8, -2), F_hd(F_ex(x)) = (1 + 4 + 12, -3), whatever the coarse head."""
    hp = FedMRL(d1=2, mrl=mrl)
    found = hp.variants(wide_client(hp), X)
    expected = {
        "mix-small": mix_small, "mix-large": (9.0, -2.0),
        "single-small": single_small, "single-large": (17.0, -3.0),
    }  # fmt: skip
    assert {name: tuple(scores[0].tolist()) for name, scores in found.items()} == expected


def moved(hp: FedMRL, client: Client, lr: float = 0.1) -> tuple[float, list[Weights]]:
    """The loss of one step, and the gradients of shared model, own model and projector."""
    modules = (client.shared, client.model, client.projector)
    before = [copies(module) for module in modules]
    _, loss = train(hp, client, lr)
    return loss, [
        {name: (old[name] - new) / lr for name, new in get_weights(module).items()}
        for old, module in zip(before, modules, strict=True)
    ]


# MRL-E


def test_efficient_loss_and_step_by_hand() -> None:
    """F_hd serves both: with head [[0, 0], [0, -ln 3]] and R = (2, -1), its first column gives
    R[:1] the scores (0, 0), so CE = ln 2 and dz_lc = (-1/2, 1/2); F_hd(R) = (0, ln 3) gives ln 4
    and dz_hf = (-3/4, 3/4) as ever.

    dF_hd = dz_hf R^T + (dz_lc R[:1], 0) = [[-3/2 - 1, 3/4], [3/2 + 1, -3/4]], and its bias, which
    both use, dz_hf + dz_lc = (-5/4, 5/4). The first column is zero, so R[:1] pulls on nothing else:
    dR = (0, -3 ln 3 / 4).
    """
    hp, client = FedMRL(d1=1, mrl="efficient"), hand_client()
    client.shared.head = nn.Identity()  # type: ignore[assignment]
    loss, (shared, model, projector) = moved(hp, client)
    assert loss == pytest.approx(log(2) + log(4), rel=1e-6)
    assert list(shared) == ["trunk.weight"]
    check(model["head.weight"], [[-2.5, 0.75], [2.5, -0.75]])
    check(model["head.bias"], [-1.25, 1.25])
    check(shared["trunk.weight"], [[0.0, 0.0]])
    check(projector["bias"], [0, -0.75 * LN3])


def test_efficient_clients_send_and_get_no_head() -> None:
    hp = FedMRL(shared_model="mlp", d1=3, mrl="efficient")
    ctx = tiny.client_context(POINT)
    server_ctx = tiny.server_context(Fleet(("mlp",), 5), POINT.task)
    server, client = hp.init_server(server_ctx), hp.init_client(ctx.build_model("mlp", 5), ctx)
    down = hp.broadcast(server, [0], server_ctx)
    up = tiny.update(hp, client, down, ctx)
    whole = server_ctx.weights_like("mlp", 3)
    for weights in (down.shared, up.shared, hp.expected(0, server_ctx).shared):
        assert set(weights) == set(whole) - {"head.weight", "head.bias"}
    hp.server_update(server, [Reply(0, 1, up)], server_ctx)
    assert same(get_weights(server.shared), up.shared)


@pytest.mark.parametrize("mrl", ["full", "efficient", "fine", "apart"])
def test_what_is_declared_is_what_is_sent(mrl: Any) -> None:
    hp = FedMRL(shared_model="mlp", d1=3, mrl=mrl, inference="single-large")
    ctx = tiny.client_context(POINT)
    client = hp.init_client(ctx.build_model("mlp", 5), ctx)
    declared = hp.expected(0, tiny.server_context(Fleet(("mlp",), 5), POINT.task)).shared
    found = {name: tuple(t.shape) for name, t in get_weights(client.shared).items()}
    assert found == {name: like.shape for name, like in declared.items()}


# Without MRL


def test_fine_has_only_the_own_heads_loss_and_still_trains_the_shared_extractor() -> None:
    """CE(F_hd(R), y) = ln 4. dR = (0, -b), b = 3 ln 3 / 4; G_ex feeds R_1 only, so here (P_21 = 0)
    it stays, and with P_21 = 1 it moves by -b (1, 2). G_hd idles, even with weight decay."""
    hp = FedMRL(d1=1, mrl="fine", coarse_weight=5.0)
    client = hand_client()
    loss, (shared, model, _) = moved(hp, client)
    assert loss == pytest.approx(log(4), rel=1e-6)
    check(model["head.weight"], [[-1.5, 0.75], [1.5, -0.75]])
    check(shared["trunk.weight"], [[0.0, 0.0]])

    client = hand_client()
    client.projector = tiny.linear([[1, 1, 1], [1, 1, 1]])  # R = (2, 2), F_hd(R) = (0, -2 ln 3)
    ctx = tiny.client_context(POINT, lr=0.1, weight_decay=0.5)
    before = copies(client.shared)
    upload = tiny.update(hp, client, Download(before), ctx)
    assert_close(upload.shared["head.weight"], before["head.weight"], rtol=0, atol=0)
    # softmax = (9/10, 1/10), dz = (-1/10, 1/10), dR_2 = -ln 3 / 10; weight decay adds w / 2
    gradient = (before["trunk.weight"] - upload.shared["trunk.weight"]) / 0.1
    pull = -LN3 / 10
    check(gradient, [[pull + 0.5, 2 * pull + 0.5]])


def test_apart_gives_each_head_its_own_extractors_output() -> None:
    """G_hd(3) = (3 ln 2, 0), softmax = (8/9, 1/9), CE = ln(9/8); F_hd(1, -2) = (0, 2 ln 3),
    softmax = (1/10, 9/10), CE = ln 10.

    dG_hd = (-1/9, 1/9)^T 3,             dG_ex = G_hd^T dz (1, 2) = -ln 2 / 9 (1, 2)
    dF_hd = (-9/10, 9/10)^T (1, -2),     dF_ex = F_hd^T dz (1, 2) = [[0, 0], -9 ln 3 / 10 (1, 2)]
    """
    hp = FedMRL(d1=1, mrl="apart", inference="single-large", coarse_weight=2.0)
    loss, (shared, model, projector) = moved(hp, hand_client())
    assert loss == pytest.approx(2 * log(9 / 8) + log(10), rel=1e-6)

    check(shared["head.weight"], [[-2 / 3], [2 / 3]])  # twice, by m_lc
    check(shared["trunk.weight"], [[-2 * LN2 / 9, -4 * LN2 / 9]])
    check(model["head.weight"], [[-0.9, 1.8], [0.9, -1.8]])
    check(model["trunk.weight"], [[0.0, 0.0], [-0.9 * LN3, -1.8 * LN3]])
    assert not any(tensor.any() for tensor in projector.values())
    check_scores(hp, {name: SCORES[name] for name in ("single-small", "single-large")})


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


# Sizes


@pytest.mark.parametrize(
    ("shared", "d1", "classes", "mrl", "scalars"),
    [
        ("cnn5", 100, 10, "full", 465_658), ("cnn5", 100, 100, "full", 474_748),
        ("cnn5", 200, 10, "full", 516_758), ("cnn5", 200, 100, "full", 534_848),
        ("cnn5", 300, 10, "full", 567_858), ("cnn5", 300, 100, "full", 594_948),
        ("cnn5", 400, 10, "full", 618_958), ("cnn5", 400, 100, "full", 655_048),
        ("cnn5", 500, 10, "full", 670_058), ("cnn5", 500, 100, "full", 715_148),
        # The idle head of `fine` is sent too; MRL-E has none: 100 * 10 + 10 less.
        ("cnn5", 100, 10, "fine", 465_658), ("cnn5", 100, 10, "apart", 465_658),
        ("cnn5", 100, 10, "efficient", 464_648),
        # Homogeneous, d1 = 100: 14,048 + 801 * 2000 + 2001 * 100 + 101 * 10; d1 = 500: CNN-1 itself
        ("cnn1", 100, 10, "full", 1_817_158), ("cnn1", 500, 10, "full", 2_621_558),
    ],
)  # fmt: skip
def test_scalars_of_a_message_by_d1(
    shared: str, d1: int, classes: int, mrl: Any, scalars: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A round of two clients through the wire and the ledger, on black images and untrained."""
    monkeypatch.setattr(ops, "train", lambda *args, **more: 0.0)
    images = np.zeros((2, 3, 32, 32), dtype=np.uint8)
    black = Dataset("black", images, np.arange(2), 2, classes, (0.5,) * 3, (0.5,) * 3)
    hp = FedMRL(shared_model=shared, d1=d1, mrl=mrl, inference="single-large")
    fleet = FleetConfig(("cnn1",) if shared == "cnn1" else ("cnn4", "cnn5"))
    run = tiny.simulate(config(tmp_path, hp=hp, rounds=1, fleet=fleet), black, tiny.deal([0], [1]))
    for direction in ("up", "down"):
        for client in (0, 1):
            assert run.count("scalars", 1, direction, client=client) == scalars
    d2 = 500
    for state in run.states.values():
        found = sum(tensor.numel() for tensor in state["projector"].values())
        assert found == d2 * (d1 + d2) + d2


@pytest.mark.parametrize(("d1", "scalars"), [(100, 300_500), (500, 500_500)])
def test_projector_has_the_papers_size(d1: int, scalars: int) -> None:
    ctx = tiny.client_context(POINT)
    client = FedMRL(shared_model="mlp", d1=d1).init_client(ctx.build_model("mlp", 500), ctx)
    assert sum(tensor.numel() for tensor in client.projector.parameters()) == scalars


@pytest.mark.parametrize(
    ("model", "ten", "hundred"),
    [
        ("cnn1", 2_621_558, 2_666_648), ("cnn2", 1_815_142, 1_860_232),
        ("cnn3", 1_320_558, 1_365_648), ("cnn4", 1_060_358, 1_105_448),
        ("cnn5", 670_058, 715_148),
    ],
)  # fmt: skip
def test_clients_own_models_have_the_papers_sizes(model: str, ten: int, hundred: int) -> None:
    for classes, expected in ((10, ten), (100, hundred)):
        fleet = Fleet((model,), 500)
        assert fleet.parameter_count(model, Task(classes)) == expected


# Edges


@pytest.mark.parametrize("mrl", ["full", "efficient", "fine", "apart"])
@pytest.mark.parametrize(
    ("rows", "labels"), [([0], [0]), ([0, 1, 2], [1, 1, 1])], ids=["one sample", "one class"]
)
def test_poor_clients_train_in_every_mode(mrl: Any, rows: list[int], labels: list[int]) -> None:
    """Fewer samples than a batch, one class of three; class 2 is nobody's."""
    data = tiny.points([(1, 2), (3, 4), (5, 0)][: len(rows)], labels, num_classes=3)
    hp = FedMRL(shared_model="mlp", d1=2, mrl=mrl, inference="single-small")
    ctx = tiny.client_context(data, batch_size=8)
    client = hp.init_client(ctx.build_model("mlp", 4), ctx)
    upload = tiny.update(hp, client, Download(copies(client.shared)), ctx)
    assert all(tensor.isfinite().all() for tensor in upload.shared.values())
    assert all(scores.shape == (len(rows), 3) for scores in hp.variants(client, _x(data)).values())


def _x(data: Dataset) -> Tensor:
    return torch.tensor(data.images, dtype=torch.float32)


def test_one_participant_makes_the_mean_and_a_late_one_pairs_it_with_its_first_projector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client a round: the server takes on what it sent, and whoever is chosen for the first
    time, however late, loads that and starts from the projector it was born with."""
    seen: list[tuple[int, Weights, Weights, Upload]] = []
    original = FedMRL.client_update

    @wraps(original)
    def watched(self: FedMRL, client: Client, message: Download, ctx: ClientContext) -> Upload:
        start, projector = copies(client.shared), copies(client.projector)
        upload = original(self, client, message, ctx)
        seen.append((ctx.client_id, start, projector, Upload(copies(client.shared))))
        return upload

    monkeypatch.setattr(FedMRL, "client_update", watched)
    tiny.simulate(config(tmp_path, rounds=6, participation=0.5), DATA, SPLIT)
    ids = [client for client, *_ in seen]
    assert sorted(set(ids)) == [0, 1]
    for (_, _, _, sent), (_, start, _, _) in itertools.pairwise(seen):
        assert same(start, sent.shared)
    late = next(i for i, client in enumerate(ids) if client != ids[0])
    assert late > 1
    worker = tiny.make_worker(config(tmp_path / "new"), DATA, SPLIT)
    tiny.play(worker, Download(seen[0][1]), client=ids[late])
    assert same(seen[late][2], seen[-1][2]), "the projector it would have had in round 1"


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


@pytest.mark.parametrize("size", ["small", "large"])
def test_mixing_what_is_apart_is_refused_with_what_to_type(size: str) -> None:
    hp = FedMRL(shared_model="mlp", d1=1, mrl="apart", inference=f"mix-{size}")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"--hp\.mrl apart.*--hp\.inference single-{size}"):
        method.check(hp, Fleet(("mlp",), 4), Task(2), "fedmrl")
