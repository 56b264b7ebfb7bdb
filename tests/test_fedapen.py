"""FedAPEN's equations, worked by hand.

Throughout, x = (1, 2), the representation is x itself and

    h = [[0, 0], [0, ln 3]]    h(x) = (0, 2 ln 3)    softmax (1/10, 9/10)
    g = [[0, ln 2], [0, 0]]    g(x) = (2 ln 2, 0)    softmax (4/5, 1/5)
    w = 1/2: w h + (1 - w) g = (ln 2, ln 3)          softmax (2/5, 3/5)

For y = 0 the cross-entropies are ln 10, ln(5/4) and ln(5/2), and
    KL(g || h) = 4/5 ln 8 + 1/5 ln(2/9),  KL(h || g) = 1/10 ln(1/8) + 9/10 ln(9/2)
"""

from functools import wraps
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from methods.fedapen import Client, Download, FedAPEN, Server, Upload
from raysim import (
    ClientContext,
    Config,
    ConfigError,
    Fleet,
    FleetConfig,
    Reply,
    Task,
    TrainConfig,
    Weights,
    get_weights,
    method,
)

LN2, LN3, LN6 = log(2), log(3), log(6)
KL_GH = 4 / 5 * log(8) + 1 / 5 * log(2 / 9)
KL_HG = 1 / 10 * log(1 / 8) + 9 / 10 * log(9 / 2)
NOBODY = torch.zeros(0, dtype=torch.int64)
X = torch.tensor([[1.0, 2.0]]).view(1, 2, 1, 1)


def hand_client(w: float = 0.5, held_out: Tensor = NOBODY, trained: bool = False) -> Client:
    return Client(
        model=tiny.model(head=[[0, 0], [0, LN3]]),
        shared=tiny.model(head=[[0, LN2], [0, 0]]),
        weight=torch.tensor(w),
        held_out=held_out,
        trained=trained,
    )


def points(*labels: int) -> Any:
    """As many x = (1, 2), with these labels."""
    return tiny.points([(1, 2)] * len(labels), labels, num_classes=2)


def copies(module: nn.Module) -> Weights:
    return {name: tensor.clone() for name, tensor in get_weights(module).items()}


def same(a: Weights, b: Weights) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


# The client's models


def test_loss_by_hand() -> None:
    ctx = tiny.client_context(points(0))
    client = hand_client()
    tiny.update(FedAPEN(), client, Download(copies(client.shared)), ctx)
    own = log(10) + KL_GH + log(5 / 2)
    shared = log(5 / 4) + KL_HG + log(5 / 2)
    assert ctx.losses == pytest.approx([own + shared], rel=1e-5)


@pytest.mark.parametrize(
    ("w", "slope_h", "slope_g"),
    [
        (0.5, -0.9 - 0.7 - 0.5 * 0.6, -0.2 + 0.7 - 0.5 * 0.6),
        (1.0, -0.9 - 0.7 - 0.9, -0.2 + 0.7),
        (0.0, -0.9 - 0.7, -0.2 + 0.7 - 0.2),
    ],
)
def test_one_step_moves_each_model_by_its_own_loss_alone(
    w: float, slope_h: float, slope_g: float
) -> None:
    """At the first score (the second is its negative): softmax - 1 from the labels, softmax - (the
    teacher's) from the teacher, and from the ensemble its softmax - 1 times the model's weight in
    it. The ensemble's first softmax is 2/5 for w = 1/2, h's 1/10 for w = 1, g's 4/5 for w = 0."""
    client = hand_client(w)
    before = copies(client.model), copies(client.shared)
    ctx = tiny.client_context(points(0), lr=0.1)
    upload = tiny.update(FedAPEN(), client, Download(copies(client.shared)), ctx)
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
    assert upload._fields == ("shared",)
    assert same(upload.shared, get_weights(client.shared))
    assert float(client.weight) == w, "constant while the models learn"


@pytest.mark.parametrize("held_out", [[], [1], [0, 3]])
def test_models_never_train_on_what_is_held_out(held_out: list[int]) -> None:
    data = tiny.points([(1, 0), (2, 0), (3, 0), (4, 0)], [0, 1, 0, 1], 2)
    client = hand_client(held_out=torch.tensor(held_out, dtype=torch.int64))
    seen: list[float] = []
    client.model.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs[0][:, 0, 0, 0]))
    ctx = tiny.client_context(data, batch_size=16)
    tiny.update(FedAPEN(), client, Download(copies(client.shared)), ctx)
    assert sorted(map(float, seen)) == [i + 1.0 for i in range(4) if i not in held_out]


# Its weight


def learned(labels: list[int], lr: float, epochs: int, batch_size: int = 16) -> float:
    """w, having got g, when everything is held out; from 1/2."""
    client = hand_client(held_out=torch.arange(len(labels)), trained=True)
    hp = FedAPEN(weight_lr=lr, weight_epochs=epochs)
    ctx = tiny.client_context(points(*labels), batch_size=batch_size)
    hp.receive(client, Download(copies(client.shared)), ctx)
    return float(client.weight)


def first_share(w: float) -> float:
    """The ensemble's softmax for class 0: scores 2 (1 - w) ln 2 and 2 w ln 3."""
    return 1 / (1 + exp(2 * w * LN3 - 2 * (1 - w) * LN2))


@pytest.mark.parametrize(("label", "slope"), [(0, 6 / 5 * LN6), (1, -4 / 5 * LN6)])
def test_one_step_of_the_weight_by_hand(label: int, slope: float) -> None:
    """dCE/dw = (softmax - e_y) (h - g), h - g = (-2 ln 2, 2 ln 3): for y = 0 it is
    3/5 (2 ln 2 + 2 ln 3) = 6/5 ln 6, for y = 1 -2/5 * 2 ln 6."""
    assert learned([label], lr=0.1, epochs=1) == pytest.approx(0.5 - 0.1 * slope, rel=1e-5)


def test_the_weight_learns_in_batches_and_epochs() -> None:
    """Labels 0, 1 | 1, two epochs of two steps. With p the softmax of class 0, the slope of a
    sample is (1 - p) 2 ln 6 for y = 0 and -p 2 ln 6 for y = 1."""
    w = 0.5
    for _ in range(2):
        p = first_share(w)
        w -= 0.1 * ((1 - p) - p) / 2 * 2 * LN6
        w -= 0.1 * -first_share(w) * 2 * LN6
    assert learned([0, 1, 1], lr=0.1, epochs=2, batch_size=2) == pytest.approx(w, rel=1e-5)


@pytest.mark.parametrize(("label", "end"), [(0, 0.0), (1, 1.0)])
def test_the_weight_stays_between_0_and_1(label: int, end: float) -> None:
    assert learned([label], lr=10, epochs=3) == end


def test_the_weight_is_learned_from_the_g_that_came_on_what_is_held_out() -> None:
    """Of labels 0, 0, 1 only the last is held out. The g that comes is h itself, which leaves
    nothing to weigh; with the client's old g, w would have moved."""
    client = hand_client(held_out=torch.tensor([2]), trained=True)
    ctx = tiny.client_context(points(0, 0, 1))
    FedAPEN(weight_lr=0.1).receive(client, Download(copies(client.model)), ctx)
    assert same(copies(client.shared), copies(client.model))
    assert float(client.weight) == 0.5
    client = hand_client(held_out=torch.tensor([2]), trained=True)
    FedAPEN(weight_lr=0.1).receive(client, Download(copies(client.shared)), ctx)
    assert float(client.weight) > 0.5


def test_the_weight_of_who_never_trained_or_holds_nothing_out_stays() -> None:
    ctx = tiny.client_context(points(0, 1))
    for held_out, trained in ((torch.tensor([1]), False), (NOBODY, True)):
        client = hand_client(0.25, held_out, trained)
        FedAPEN(weight_lr=0.1).receive(client, Download(copies(client.shared)), ctx)
        assert float(client.weight) == 0.25


def test_learning_the_weight_is_evaluation_and_leaves_the_models_alone() -> None:
    torch.manual_seed(0)
    client = Client(
        tiny.moody_model(2, 4, 2), tiny.moody_model(2, 4, 2), torch.tensor(0.5),
        held_out=torch.arange(3), trained=True,
    )  # fmt: skip
    own, shared = copies(client.model), copies(client.shared)
    ctx = tiny.client_context(points(0, 1, 1))
    found = [float(FedAPEN(weight_lr=0.1).learn_weight(client, ctx)) for _ in range(2)]
    assert found[0] == found[1] != 0.5, "no dropout"
    assert same(copies(client.model), own)
    assert same(copies(client.shared), shared)
    assert client.model.training
    assert client.shared.training


@pytest.mark.parametrize(("n", "count"), [(1, 0), (19, 0), (20, 1), (100, 5)])
def test_a_twentieth_is_held_out_rounded_down(n: int, count: int) -> None:
    ctx = tiny.client_context(points(*[i % 2 for i in range(n)]))
    client = FedAPEN(shared_model="mlp").init_client(ctx.build_model("mlp", 4), ctx)
    held_out = client.held_out.tolist()
    assert len(set(held_out)) == len(held_out) == count
    assert all(0 <= position < n for position in held_out)
    assert float(client.weight) == 0.5
    fixed = FedAPEN(shared_model="mlp", held_out=0).init_client(ctx.build_model("mlp", 4), ctx)
    assert len(fixed.held_out) == 0, "FedEN"


@pytest.mark.parametrize(("w", "scores"), [(0.5, (LN2, LN3)), (0.25, (1.5 * LN2, 0.5 * LN3))])
def test_prediction_is_the_ensembles(w: float, scores: tuple[float, float]) -> None:
    assert_close(FedAPEN().predict(hand_client(w), X).detach(), torch.tensor([scores]))


# The server


def test_uploads_are_averaged_equally() -> None:
    """All weights 2 from a client of 1 sample, 6 from one of 3: 4."""
    server = Server(tiny.model(head=[[1, 1], [1, 1]]))
    replies = [
        Reply(k, n, Upload({i: torch.full_like(t, v) for i, t in copies(server.shared).items()}))
        for k, n, v in ((0, 1, 2.0), (1, 3, 6.0))
    ]
    FedAPEN().server_update(server, replies, tiny.server_context(Fleet(("mlp",), 2), Task(2)))
    values = torch.cat([t.flatten() for t in get_weights(server.shared).values()])
    assert_close(values, torch.full_like(values, 4.0))


# Whole runs


def config(out: Path, **changes: Any) -> Config:
    settings: dict[str, Any] = {
        "method": "fedapen", "hp": FedAPEN(shared_model="mlp", held_out=0.5, weight_lr=0.05),
        "clients": 2, "rounds": 3, "participation": 1.0, "out": out,
        "fleet": FleetConfig(("mlp",), 4), "train": TrainConfig(lr=0.01, batch_size=2),
    }  # fmt: skip
    return Config(**(settings | changes))


DATA = tiny.points([(1, 5), (3, 1), (2, 2), (9, 4), (5, 5), (0, 7)], [0, 1, 0, 1, 1, 0], 2)
SPLIT = tiny.deal([0, 1], [2, 3, 4, 5])


def weights_after_receiving(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[float]]:
    """Each client's w whenever it got a g, to train and to be evaluated in turn."""
    seen: dict[int, list[float]] = {0: [], 1: []}
    original = FedAPEN.receive

    @wraps(original)
    def watched(self: FedAPEN, client: Client, message: Download, ctx: ClientContext) -> None:
        original(self, client, message, ctx)
        seen[ctx.client_id].append(float(client.weight))

    monkeypatch.setattr(FedAPEN, "receive", watched)
    return seen


def test_evaluation_and_the_next_training_learn_the_same_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it had been learned at the end of the round, once."""
    seen = weights_after_receiving(monkeypatch)
    run = tiny.simulate(config(tmp_path), DATA, SPLIT)
    for client, (train_1, eval_1, train_2, eval_2, train_3, eval_3) in seen.items():
        assert train_1 == 0.5
        assert eval_1 == train_2 != train_1
        assert eval_2 == train_3 != train_2
        assert float(run.states[client]["weight"]) == train_3 != eval_3
    assert seen[0] != seen[1]
    assert {row["field"] for row in run.messages} == {"shared"}, "w never leaves the client"


def test_feden_never_learns_a_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = weights_after_receiving(monkeypatch)
    hp = FedAPEN(shared_model="mlp", held_out=0, weight_lr=0.05)
    tiny.simulate(config(tmp_path, hp=hp), DATA, SPLIT)
    assert seen == {0: [0.5] * 6, 1: [0.5] * 6}


def test_a_client_first_chosen_late_starts_with_equal_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: dict[tuple[int, int], float] = {}
    original = FedAPEN.client_update

    @wraps(original)
    def watched(self: FedAPEN, client: Client, message: Download, ctx: ClientContext) -> Upload:
        began[ctx.client_id, ctx.round] = float(client.weight)
        return original(self, client, message, ctx)

    monkeypatch.setattr(FedAPEN, "client_update", watched)
    tiny.simulate(config(tmp_path, rounds=6, participation=0.5), DATA, SPLIT)
    rounds = {k: sorted(round for client, round in began if client == k) for k in (0, 1)}
    assert max(turns[0] for turns in rounds.values()) > 1, "change the seed: nobody came late"
    for client, turns in rounds.items():
        assert began[client, turns[0]] == 0.5
        assert all(began[client, round] != 0.5 for round in turns[1:])


# What is refused


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_holding_everything_out_is_refused_by_its_flag(share: float) -> None:
    hp = FedAPEN(shared_model="mlp", held_out=share)
    with pytest.raises(ConfigError, match=rf"--hp\.held-out must be in \[0, 1\), got {share}"):
        method.check(hp, Fleet(("mlp",), 4), Task(2), "fedapen")


def test_unknown_shared_model_is_refused_by_its_flag() -> None:
    with pytest.raises(ConfigError, match=r"'cnn6' in --hp\.shared-model; did you mean 'cnn"):
        method.check(FedAPEN(shared_model="cnn6"), Fleet(("mlp",), 4), Task(2), "fedapen")
