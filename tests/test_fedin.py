"""FedIN's client and server, worked by hand."""

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import zoo
from methods.fedin import Client, Download, FedIN, Server, Upload
from methods.fedprox import Download as ProxDownload
from methods.fedprox import FedProx
from raysim import (
    ClientContext,
    ClientState,
    Config,
    ConfigError,
    Fleet,
    FleetConfig,
    PerClient,
    Reply,
    Task,
    TrainConfig,
    in_training,
    intermediate,
    method,
    ops,
    wire,
)
from raysim.data import Dataset
from raysim.errors import WireError
from raysim.intermediate import Features
from zoo import SplitModel
from zoo.split import Backbone

TASK = Task(num_classes=2)
NESTED = Fleet(("slim_resnet10", "slim_resnet14"), 128)
NONE = nn.ModuleDict()


# One number for each part: x = 1, s_in = w_e x = 2, s_out = w_in s_in = 2, and logits (0, 0)


def scalar_model() -> SplitModel:
    stem = nn.Sequential(nn.Flatten(), tiny.linear([[2.0]], bias=False))
    trunk = tiny.linear([[1.0]], bias=False)
    model = SplitModel("scalar", Backbone(stem, trunk, nn.Identity()), 1, 2)
    model.head = tiny.linear([[1.0], [-1.0]])
    model.head.bias.data = torch.tensor([-2.0, 2.0])
    return model


def scalar_context(**train: Any) -> ClientContext:
    return tiny.client_context(tiny.points([[1]], [0], num_classes=2), **{"lr": 0.1, **train})


def batch(s_in: float, s_out: float, rows: int = 1) -> Features:
    return Features(torch.full((rows, 1), float(s_in)), torch.full((rows, 1), float(s_out)))


def after(hp: FedIN, *features: Features, **train: Any) -> tuple[float, float, list[float]]:
    """w_e, w_in and the head's weights after a round."""
    model = scalar_model()
    client = Client(model, NONE)
    message = Download(wire.map_tensors(ops.get_weights(model), torch.clone), features)
    tiny.update(hp, client, message, scalar_context(**train))
    w_e, w_in = model.stem[1].weight, model.trunk.weight  # type: ignore[index]
    assert isinstance(w_e, Tensor)
    assert isinstance(w_in, Tensor)
    return w_e.item(), w_in.item(), model.head.weight.flatten().tolist()


AGREES, OPPOSES = batch(1, 4), batch(1, -2)
"""G_local is (0 - 1/2) * 1 + 1/2 * -1 = -1 for s_out: -1 * w_in x = -1 for w_e, -1 * s_in = -2 for
w_in, and (-1, 1) for the head. w_in makes 1 of the s_in of S, so G_IN is 2 (1 - 4) = -6, or
2 (1 + 2) = 6."""


@pytest.mark.parametrize(
    ("settings", "features", "w_in"),
    [
        ({}, AGREES, 1 + 0.1 * 7),  # -6 + 1/2 * -2
        ({}, OPPOSES, 1 - 0.1 * 5),
        ({"lam": 0.5}, AGREES, 1 + 0.1 * 6.5),
        ({"lam": 0.0}, AGREES, 1 + 0.1 * 6),
        ({"alleviation": "exact"}, AGREES, 1 + 0.1 * 6),
        ({"alleviation": "exact"}, OPPOSES, 1.0),  # 6 + 12/4 * -2 = 0
        ({"alleviation": "exact", "scope": "global"}, OPPOSES, 1.0),
        ({"alleviation": "none"}, AGREES, 1 + 0.1 * 8),
        ({"alleviation": "none"}, OPPOSES, 1 - 0.1 * 4),
        ({"in_schedule": "once_per_epoch"}, AGREES, 1 + 0.1 * 7),
        ({"in_schedule": "never"}, AGREES, 1 + 0.1 * 2),
    ],
)
def test_a_step_by_hand(settings: dict[str, Any], features: Features, w_in: float) -> None:
    """Only w_in depends on S. The anchor of the proximal term is where the step begins."""
    found = after(FedIN(**settings), features)
    assert found == (pytest.approx(2.1), pytest.approx(w_in), pytest.approx([1.1, -1.1]))


def test_two_batches_of_the_same_size_go_through_in_one_pass() -> None:
    """Two samples each, where the step above had one each: the means are the same."""
    data = tiny.points([[1], [1]], [0, 0], num_classes=2)
    model = scalar_model()
    message = Download(dict(ops.get_weights(scalar_model())), (batch(1, 4, rows=2),))
    tiny.update(FedIN(), Client(model, NONE), message, tiny.client_context(data, lr=0.1))
    assert model.trunk.weight.item() == pytest.approx(1.7)  # type: ignore[operator]


def test_steps_after_local_training_by_hand() -> None:
    """The local step: w_in = 1 + 0.1 * 2. Then G_IN = 2 (1.2 - 4) = -5.6, and with the last G_local
    Z = -5.6 + 1/2 * -2: w_in = 1.2 + 0.66 = 1.86; then G_IN = 2 (1.86 - 4) = -4.28, and w_in is
    1.86 + 0.528. The other layers rest."""
    hp = FedIN(in_schedule="after_local", in_steps=2)
    rest = (pytest.approx(2.1), pytest.approx([1.1, -1.1]))
    found = after(hp, AGREES)
    assert (found[0], found[2]) == rest
    assert found[1] == pytest.approx(2.388)
    (w_e, w_in, head) = after(replace(hp, alleviation="exact", in_steps=1), AGREES)
    assert (w_e, w_in, head) == (rest[0], pytest.approx(1.2 + 0.56), rest[1])


def test_the_proximal_term_belongs_to_the_local_gradient() -> None:
    """Two steps, and w_in is pulled by lam/2 mu (w_in - 1): 0.5 * 2 * 0.7 more than without. The
    gradients of cross-entropy and S at w_in = 1.7, w_e = 2.1 are the same with and without."""
    with_prox = after(FedIN(mu=2.0), AGREES, epochs=2)
    without = after(FedIN(mu=0.0), AGREES, epochs=2)
    assert without[1] - with_prox[1] == pytest.approx(0.1 * 0.5 * 2 * 0.7)
    assert without[0] - with_prox[0] == pytest.approx(0.1 * 2 * 0.1)


def test_without_features_a_round_is_fedprox() -> None:
    """In the first round, or with the pool's only batch one's own."""
    assert after(FedIN()) == after(FedIN(in_schedule="never"), AGREES)
    assert after(FedIN(in_schedule="after_local")) == after(FedIN())


def test_several_batches_are_taken_in_turn() -> None:
    """S is 4, -2, 4 for w_in: G_IN at 1 is -6. So the second step differs from all of one batch."""
    twice = after(FedIN(mu=0.0, lam=0.0), AGREES, OPPOSES, epochs=2)
    # w_in = 1 + 0.6 = 1.6, then 1.6 - 0.1 * 2 (1.6 + 2)
    assert twice[1] == pytest.approx(1.6 - 0.72)


# When


def contexts() -> list[ClientContext]:
    data = tiny.points([[1]] * 9, [0] * 9, num_classes=2)
    return [
        tiny.client_context(data, range(n), batch_size=4, drop_last=drop)
        for n in range(1, 10)
        for drop in (True, False)
    ]


@pytest.mark.parametrize("ctx", contexts())
def test_the_length_of_an_epoch_is_known_before_it(ctx: ClientContext) -> None:
    assert in_training.steps_of_an_epoch(ctx) == len(list(ctx.batches()))


@pytest.mark.parametrize("alleviation", ["simplified", "exact"])
@pytest.mark.parametrize(
    ("schedule", "joint"),
    [
        ("every_step", [1, 1, 1, 1, 1, 1]),
        ("once_per_epoch", [1, 0, 0, 1, 0, 0]),
        ("after_local", [0, 0, 0, 0, 0, 0, 1, 1]),
        ("never", [0, 0, 0, 0, 0, 0]),
    ],
)
def test_the_steps_that_learn_from_others(
    schedule: Any, joint: list[int], alleviation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two epochs of three batches."""
    seen: list[int] = []
    trunk = scalar_model().trunk
    data = tiny.points([[1]] * 7, [0] * 7, num_classes=2)
    model = scalar_model()
    model.trunk = Counting(trunk, seen)
    hp = FedIN(in_schedule=schedule, in_steps=2, alleviation=alleviation)
    message = Download(ops.get_weights(model), (batch(1, 4, rows=5),))
    monkeypatch.setattr(in_training.InTraining, "sample", lambda self: None)
    ctx = tiny.client_context(data, batch_size=2, epochs=2)
    tiny.update(hp, Client(model, NONE), message, ctx)
    # A pass of 2 rows is local, one of 5 is of S, and one of 7 is both.
    local, steps = 0, []
    for rows in seen:
        if rows == 5 and alleviation == "exact" and schedule != "after_local":
            steps[-1] = 1
        else:
            local += rows != 5
            steps.append(int(rows != 2))
    assert steps == joint
    assert local == 6


class Counting(nn.Module):
    """Notes how many rows each pass has."""

    def __init__(self, inner: nn.Module, seen: list[int]) -> None:
        super().__init__()
        self.inner = inner
        self.seen = seen

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        out: Tensor = self.inner(x)
        return out


# Batch norm


def norm_model() -> SplitModel:
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Flatten(), nn.Linear(2, 3))
    trunk = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3))
    return SplitModel("norm", Backbone(stem, trunk, nn.Identity()), 3, 2)


def others(rows: int = 5) -> Features:
    torch.manual_seed(1)
    return Features(torch.randn(rows, 3) * 3 + 1, torch.randn(rows, 3))


@pytest.mark.parametrize("updates_bn", [False, True])
def test_one_pass_of_two_batches_is_two_passes(updates_bn: bool) -> None:
    """Outputs, gradients and the running statistics, which learn from the second only if asked."""
    once, twice = norm_model().trunk, norm_model().trunk
    mine, theirs = torch.randn(6, 3), others().inputs
    both = intermediate.together(once, mine, theirs, updates_bn)
    first = twice(mine)
    before = int(twice[1].num_batches_tracked)  # type: ignore[index]
    with intermediate.untracked(twice, unless=updates_bn):
        apart = first, twice(theirs)
    assert int(twice[1].num_batches_tracked) == before + updates_bn  # type: ignore[index]
    for found, expected in zip(both, apart, strict=True):
        assert_close(found, expected)
    for answer in (both, apart):
        (answer[0].square().sum() + answer[1].pow(3).sum()).backward()  # type: ignore[no-untyped-call]
    for p, q in zip(once.parameters(), twice.parameters(), strict=True):
        assert_close(p.grad, q.grad)
    assert_close(once.state_dict(), twice.state_dict())
    assert "forward" not in vars(once[1]), "batch norm is itself again"  # type: ignore[index]


@pytest.mark.parametrize("alleviation", ["simplified", "exact"])
@pytest.mark.parametrize("schedule", ["every_step", "after_local"])
def test_running_statistics_learn_from_others_only_if_asked(
    alleviation: Any, schedule: Any
) -> None:
    """Three batches of one's own, then one of others' in after_local."""
    data = tiny.points([(i, 9 - i) for i in range(6)], [0, 1] * 3, num_classes=2)
    counts, means = [], []
    for hp in (
        FedIN(alleviation=alleviation, in_schedule=schedule, in_updates_bn=True),
        FedIN(alleviation=alleviation, in_schedule=schedule),
        FedIN(in_schedule="never"),
    ):
        model = norm_model()
        start = Download(dict(norm_model().state_dict()), (others(),))
        ctx = tiny.client_context(data, batch_size=2, lr=0.0, shuffle=False)
        tiny.update(hp, Client(model, NONE), start, ctx)
        counts.append(int(model.trunk[1].num_batches_tracked))  # type: ignore[index]
        means.append(model.trunk[1].running_mean)  # type: ignore[index]
    assert counts == [6 if schedule == "every_step" else 4, 3, 3]
    assert_close(means[1], means[2])
    assert not torch.allclose(means[0], means[2])


@pytest.mark.parametrize("rows", [1, 5])
def test_one_sample_has_no_batch_statistics(rows: int) -> None:
    """Neither as the only feature, nor as the only sample of the client."""
    data = tiny.points([(3, 4)], [1], num_classes=2)
    model = norm_model()
    message = Download(dict(norm_model().state_dict()), (others(rows),))
    upload = tiny.update(FedIN(), Client(model, NONE), message, tiny.client_context(data))
    assert upload.features.inputs.shape == (1, 3)
    assert int(model.trunk[1].num_batches_tracked) == 0  # type: ignore[index]
    assert all(t.isfinite().all() for t in model.state_dict().values())
    assert not torch.equal(model.trunk[0].weight, norm_model().trunk[0].weight)  # type: ignore[index]


def test_equal_weights_have_no_in_loss() -> None:
    """What a client uploads is just what its own intermediate layers make of it in IN training, and
    uploading leaves their statistics alone."""
    data = tiny.points([(i, 9 - i) for i in range(8)], [0, 1] * 4, num_classes=2)
    model = norm_model()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    sent = intermediate.sample(model, tiny.client_context(data), 5, 0.0, "tensor")
    assert_close(model.state_dict(), before)
    assert len(sent.inputs) == len(sent.outputs) == 5
    assert not sent.outputs.requires_grad
    assert intermediate.imitation(model, NONE, sent, False).item() == pytest.approx(0, abs=1e-10)


def test_a_small_client_sends_what_it_has_and_a_large_one_different_samples() -> None:
    data = tiny.points([[i] for i in range(30)], [0] * 30, num_classes=2)
    model = scalar_model()
    few = intermediate.sample(model, tiny.client_context(data, [3, 7]), 16, 0.0, "tensor")
    assert sorted(few.inputs.flatten().tolist()) == [6, 14]
    assert_close(few.outputs, few.inputs)
    ctx = tiny.client_context(data)
    draws = [intermediate.sample(model, ctx, 16, 0.0, "tensor").inputs.flatten() for _ in range(2)]
    assert all(len(set(draw.tolist())) == 16 for draw in draws)
    assert set(draws[0].tolist()) != set(draws[1].tolist())


def statistics_of(bn_stats: Any) -> tuple[Server, FedIN]:
    hp = FedIN(bn_stats=bn_stats)
    return hp.init_server(tiny.server_context(NESTED, TASK)), hp


def test_local_statistics_are_neither_sent_nor_overwritten() -> None:
    server, hp = statistics_of("local")
    ctx = tiny.server_context(NESTED, TASK)
    assert not [name for name in server.weights if "running" in name or "tracked" in name]
    message = hp.broadcast(server, [0, 1], ctx)[0]  # type: ignore[index]
    model = zoo.build("slim_resnet10", TASK, 128)
    model.stem[1].running_mean += 7  # type: ignore[index]
    client = Client(model, NONE)
    none: Any = None
    hp.receive(client, message, none)
    assert model.stem[1].running_mean.unique().tolist() == [7.0]  # type: ignore[index]
    assert torch.equal(model.head.weight, server.weights["head.weight"])
    expected = hp.expected(0, ctx)
    assert list(expected.model) == list(message.model)


def test_aggregated_statistics_go_both_ways() -> None:
    server, hp = statistics_of("aggregate")
    assert "stem.1.running_mean" in server.weights
    expected = hp.expected(0, tiny.server_context(NESTED, TASK))
    assert "stem.1.running_mean" in expected.model


# Noise


def test_noise_has_rho_standard_deviations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of (0, 2, 0, 2) the deviation is 1; of its columns, if they are channels, 0 and 0."""
    monkeypatch.setattr(torch, "randn_like", torch.ones_like)
    made = torch.tensor([[0.0, 2.0], [0.0, 2.0]])
    assert intermediate.noised(made, 0.8).tolist() == [pytest.approx([0.8, 2.8])] * 2
    assert intermediate.noised(made, 0.8, "channel").tolist() == made.tolist()
    assert intermediate.noised(made, 0.0) is made


@pytest.mark.parametrize(("shape", "channel"), [((4, 3), 1), ((4, 5, 3), 2), ((4, 3, 2, 2), 1)])
def test_a_channel_is_that_of_vectors_tokens_and_maps(
    shape: tuple[int, ...], channel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "randn_like", torch.ones_like)
    made = torch.randn(shape)
    noise = (intermediate.noised(made, 2.0, "channel") - made).movedim(channel, 0).flatten(1)
    sigma = made.movedim(channel, 0).flatten(1).std(dim=1, correction=0)
    assert_close(noise, (2 * sigma).unsqueeze(1).expand_as(noise))


def test_the_scale_of_the_noise_and_its_gradient() -> None:
    torch.manual_seed(0)
    made = (3 * torch.randn(100_000) + 1).requires_grad_()
    noisy = intermediate.noised(made, 0.5)
    assert (noisy - made).std().item() == pytest.approx(1.5, rel=0.02)
    assert (noisy - made).mean().item() == pytest.approx(0, abs=0.02)
    noisy.sum().backward()  # type: ignore[no-untyped-call]
    assert made.grad is not None
    assert made.grad.unique().tolist() == [1.0], "the deviation is a constant"


def test_noise_is_in_training_and_uploads_but_not_in_tests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Samples 1 and 3: s_in = (2, 6), of deviation 2, with noise of 1/2: (3, 7). w_in makes (3, 7)
    of them, again of deviation 2: (4, 8). So in an upload; and in training the head sees (4, 8)."""
    monkeypatch.setattr(torch, "randn_like", torch.ones_like)
    data = tiny.points([[1], [3]], [0, 0], num_classes=2)
    ctx = tiny.client_context(data, lr=0.0)
    model, seen = scalar_model(), []
    model.neck.register_forward_hook(lambda *a: seen.append(sorted(a[2].flatten().tolist())))
    client, message = Client(model, NONE), Download(dict(scalar_model().state_dict()))
    upload = tiny.update(FedIN(rho=0.5), client, message, ctx)
    assert sorted(upload.features.inputs.flatten().tolist()) == [3, 7]
    assert sorted(upload.features.outputs.flatten().tolist()) == [4, 8]
    assert seen == [[4, 8]]
    FedIN(rho=0.5).predict(client, torch.tensor([[1.0], [3.0]])[:, :, None, None])
    assert seen[1:] == [[2, 6]]


def test_noise_is_new_for_every_batch_and_rho_is_heard_in_training() -> None:
    quiet, noisy = (after(FedIN(rho=rho), epochs=3) for rho in (0.0, 0.8))
    # One sample has no deviation, so no noise; two have.
    assert quiet == noisy
    data = tiny.points([[1], [3]], [0, 0], num_classes=2)
    found = []
    for rho in (0.0, 0.8):
        model = scalar_model()
        message = Download(dict(scalar_model().state_dict()))
        tiny.update(FedIN(rho=rho), Client(model, NONE), message, tiny.client_context(data))
        found.append(model.head.weight[0].item())
    assert found[0] != found[1]


# The pool


def test_nobody_gets_its_own_features() -> None:
    torch.manual_seed(0)
    ctx = tiny.server_context(NESTED, TASK, 5)
    pool = {k: batch(k, k) for k in range(5)}
    for client in range(7):  # 5 and 6 have sent none yet
        found = Counter(
            int(one.inputs.item())
            for _ in range(200)
            for one in intermediate.draw(pool, client, 1, ctx, project=True)
        )
        others = [k for k in range(5) if k != client]
        assert sorted(found) == others
        assert min(found.values()) > 200 / len(others) / 2, "all alike"


@pytest.mark.parametrize(("number", "expected"), [(1, 1), (3, 3), (4, 4), (50, 4)])
def test_batches_of_s_are_of_different_clients(number: int, expected: int) -> None:
    ctx = tiny.server_context(NESTED, TASK, 5)
    pool = {k: batch(k, k) for k in range(5)}
    drawn = [int(f.inputs.item()) for f in intermediate.draw(pool, 2, number, ctx, project=True)]
    assert len(drawn) == len(set(drawn)) == expected
    assert 2 not in drawn


@pytest.mark.parametrize("pool", [{}, {2: batch(0, 0)}])
def test_who_is_alone_gets_nothing(pool: dict[int, Features]) -> None:
    ctx = tiny.server_context(NESTED, TASK, 5)
    assert intermediate.draw(pool, 2, 3, ctx, project=True) == []


def test_the_pool_has_the_newest_batch_of_each_client() -> None:
    hp, ctx = FedIN(), tiny.server_context(NESTED, TASK, 4)
    server = hp.init_server(ctx)
    models = {k: zoo.build(NESTED.model_of(k), TASK, 128).state_dict() for k in range(3)}

    def reply(k: int, value: float) -> Reply[Upload]:
        return Reply(k, 1, Upload(models[k], batch(value, value)))

    hp.server_update(server, [reply(0, 10), reply(1, 11)], ctx)
    hp.server_update(server, [reply(1, 21), reply(2, 22)], ctx)
    assert {k: one.outputs.item() for k, one in server.pool.items()} == {0: 10, 1: 21, 2: 22}


def test_a_run_sends_features_to_those_who_train_from_the_second_round_on(tmp_path: Path) -> None:
    """Three clients of 16 x 16 images in two rounds: s_in is 16 x 4 x 4 and s_out 128 x 1 x 1 of 3
    or 4 samples each, since a client has no more."""
    images = np.random.RandomState(0).randint(0, 256, (11, 3, 16, 16), np.uint8)
    data = Dataset("noise", images, np.arange(11) % 2, 11, 2, mean=(0.5,) * 3, std=(0.5,) * 3)
    config = Config(
        method="fedin", clients=3, participation=1.0, rounds=2, out=tmp_path,
        fleet=FleetConfig(NESTED.models), hp={"sample_number": 5},
    )  # fmt: skip
    run = tiny.simulate(config, data, tiny.deal([0, 1, 2], [3, 4, 5, 6], [7, 8, 9, 10]))
    per_row = 16 * 4 * 4 + 128
    for k, own in enumerate([3, 4, 4]):
        assert run.count("scalars", 1, "up", client=k, field="features") == own * per_row
        assert run.count("scalars", 1, "down", client=k, field="features") == 0
        assert run.count("scalars", 2, "down", client=k, field="features") == (11 - own) * per_row
        size = zoo.parameter_count(NESTED.model_of(k), data.task)
        for way in ("up", "down"):
            assert run.count("scalars", 2, way, client=k, field="model") == size


def test_evaluation_gets_no_features() -> None:
    hp, ctx = FedIN(), tiny.server_context(NESTED, TASK, 4)
    server = hp.init_server(ctx)
    server.pool = {k: batch(k, k) for k in range(4)}
    messages = hp.broadcast(server, [0, 1, 2], ctx)
    assert isinstance(messages, PerClient)
    assert [messages[k].features for k in range(3)] == [()] * 3
    assert messages[0] is messages[2], "encoded once for each architecture"


# Aggregation


def constant(name: str, value: float) -> Upload:
    weights = zoo.build(name, TASK, 128).state_dict()
    filled = {k: torch.full_like(t, value) for k, t in weights.items() if t.is_floating_point()}
    return Upload({**weights, **filled}, None)


def averaged(hp: FedIN, *replies: Reply[Upload], fleet: Fleet = NESTED) -> dict[str, set[float]]:
    """What the layers are after a round that began with -1 everywhere: of all models, of the
    larger one only; by architecture if they are kept apart."""
    ctx = tiny.server_context(fleet, TASK, 8)
    server = hp.init_server(ctx)
    server.weights = {k: torch.full_like(t, -1) for k, t in server.weights.items()}
    hp.server_update(server, replies, ctx)
    small = set(zoo.build("slim_resnet10", TASK, 128).state_dict())
    found: dict[str, set[float]] = {}
    for name, tensor in server.weights.items():
        group, _, layer = name.rpartition("/")
        if tensor.is_floating_point():
            kind = group or ("both" if layer in small else "large")
            found.setdefault(kind, set()).update(tensor.flatten().tolist())
    return found


SENT = [
    Reply(0, 1, constant("slim_resnet10", 1.0)),
    Reply(1, 2, constant("slim_resnet14", 4.0)),
    Reply(3, 1, constant("slim_resnet14", 10.0)),
]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"both": 5.0, "large": 7.0}),  # Eq. 19: 15 / 3, 14 / 2
        ({"weighting": "samples"}, {"both": 4.75, "large": 6.0}),  # (1 + 8 + 10) / 4, 18 / 3
        ({"aggregation": "groups"}, {"slim_resnet10": 1.0, "slim_resnet14": 6.0}),  # Eq. 21
        (
            {"aggregation": "groups", "weighting": "uniform"},  # Eq. 20
            {"slim_resnet10": 1.0, "slim_resnet14": 7.0},
        ),
    ],
)
def test_layers_and_groups_are_averaged(
    settings: dict[str, Any], expected: dict[str, float]
) -> None:
    """1 from a small model (1 sample), 4 (2 samples) and 10 (1 sample) from large ones."""
    found = averaged(FedIN(**settings), *SENT)
    assert {k: [pytest.approx(v) for v in values] for k, values in found.items()} == {
        k: [value] for k, value in expected.items()
    }


def test_what_nobody_has_stays() -> None:
    assert averaged(FedIN(), SENT[0]) == {"both": {1.0}, "large": {-1.0}}
    groups = averaged(FedIN(aggregation="groups"), *SENT[1:2])
    assert groups == {"slim_resnet10": {-1.0}, "slim_resnet14": {4.0}}


@pytest.mark.parametrize("aggregation", ["layers", "groups"])
@pytest.mark.parametrize("bn_stats", ["aggregate", "local"])
def test_each_client_gets_its_own_model(aggregation: Any, bn_stats: Any) -> None:
    """And what it would upload is what is expected."""
    hp = FedIN(aggregation=aggregation, bn_stats=bn_stats)
    ctx = tiny.server_context(NESTED, TASK)
    server = hp.init_server(ctx)
    messages = hp.broadcast(server, [0, 1], ctx)
    assert isinstance(messages, PerClient)
    for k, message in messages.items():
        model = zoo.build(NESTED.model_of(k), TASK, 128)
        none: Any = None
        hp.receive(Client(model, NONE), message, none)
        group = f"{NESTED.model_of(k)}/" if aggregation == "groups" else ""
        for name in message.model:
            assert torch.equal(model.state_dict()[name], server.weights[group + name])
        assert set(model.state_dict()) >= set(message.model)
        shapes = intermediate.shapes(NESTED, model.name, TASK)
        features = Features(*(torch.zeros(3, *shape) for shape in shapes))
        wire.check_like(Upload(message.model, features), hp.expected(k, ctx), "payload")
        wrong = Features(torch.zeros(3, 8, 8), torch.zeros(3, 8, 8))
        with pytest.raises(WireError, match="expected"):
            wire.check_like(Upload(message.model, wrong), hp.expected(k, ctx), "payload")


# Features of other shapes


@pytest.mark.parametrize(
    ("source", "target"),
    list(itertools.permutations([(5,), (3, 4), (2, 6, 6), (4, 1, 1), (4, 3, 3)], 2)),
)
def test_any_shape_becomes_any_other(source: tuple[int, ...], target: tuple[int, ...]) -> None:
    resize = intermediate.Resize(source, target)
    out = resize(torch.randn(2, *source))
    assert out.shape == (2, *target)
    assert sum(p.numel() for p in resize.parameters()) > 0


def test_a_map_is_averaged_and_its_channels_mixed() -> None:
    """(1, 3; 5, 7) is 4 on average; the layer makes (4 a + b) of it."""
    resize = intermediate.Resize((1, 2, 2), (2,))
    assert resize.linear is not None
    with torch.no_grad():
        resize.linear.weight.copy_(torch.tensor([1.0, -2.0]).reshape(2, 1, 1, 1))
        assert resize.linear.bias is not None
        resize.linear.bias.copy_(torch.tensor([10.0, 20.0]))
    made = resize(torch.tensor([[[[1.0, 3.0], [5.0, 7.0]]]]))
    assert made.tolist() == [[14.0, 12.0]]


def test_tokens_have_their_channels_last() -> None:
    """Three tokens of two channels as a vector of one: the mean of the tokens, then the layer."""
    resize = intermediate.Resize((3, 2), (1,))
    assert resize.linear is not None
    assert resize.linear.bias is not None
    with torch.no_grad():
        resize.linear.weight.copy_(torch.tensor([1.0, 10.0]).reshape(1, 2, 1, 1))
        resize.linear.bias.zero_()
    made = resize(torch.tensor([[[0.0, 1.0], [3.0, 2.0], [6.0, 3.0]]]))
    assert made.tolist() == [[pytest.approx(3 + 10 * 2)]]


def test_equal_shapes_need_no_layer() -> None:
    """CNN-4 and CNN-5 differ in s_out only."""
    fleet, task = Fleet(("cnn4", "cnn5", "cnn4"), 500), Task(num_classes=10)
    ctx = replace(tiny.client_context(tiny.points([[1]], [0], 2)), fleet=fleet, task=task)
    found = intermediate.adapters(ctx)
    (adapter,) = found.values()
    assert isinstance(adapter, intermediate.Adapter)
    assert adapter.inputs.linear is None
    assert adapter.outputs.linear is not None
    assert adapter.outputs.linear.weight.shape == (500, 800, 1, 1)
    nested = replace(ctx, fleet=replace(fleet, models=("slim_resnet10", "slim_resnet26")))
    assert len(intermediate.adapters(nested)) == 0


@pytest.mark.parametrize(
    ("settings", "wanted"), [({}, 1), ({"project": False}, 0), ({"in_schedule": "never"}, 0)]
)
def test_who_needs_no_adapters_has_none(settings: dict[str, Any], wanted: int) -> None:
    fleet, task = Fleet(("cnn4", "cnn5"), 500), Task(num_classes=10)
    ctx = replace(tiny.client_context(tiny.points([[1]], [0], 2)), fleet=fleet, task=task)
    client = FedIN(**settings).init_client(fleet.build("cnn4", task), ctx)
    assert len(client.adapters) == wanted


def test_without_projection_only_features_of_ones_own_shape_are_drawn() -> None:
    fleet = Fleet(("cnn4", "cnn5"), 500)
    ctx = tiny.server_context(fleet, Task(num_classes=10), 6)
    pool = {k: batch(k, k) for k in range(6)}
    found = {int(f.inputs.item()) for f in intermediate.draw(pool, 1, 9, ctx, project=False)}
    assert found == {3, 5}


@pytest.mark.parametrize("alleviation", ["simplified", "exact"])
def test_a_foreign_feature_teaches_through_an_adapter(alleviation: Any) -> None:
    """s_in of two numbers for a client whose s_in has one: the layer before makes one of them, the
    layer behind three numbers of its s_out. By hand, everything 1 but S = ((1, 2), (0, 0, 0)):
    s = 1 + 2 = 3, w_in s = 3, and MSE = 9. Each of three outputs has d = 2 * 3 / 3 = 2; so their
    weights' gradient is 2 * 3 = 6, w_in's 3 * 2 * 3 = 18, and those of the first layer's weights
    3 * 2 * (1, 2) = (6, 12)."""
    model = scalar_model()
    own, other = intermediate.Shapes((1,), (1,)), intermediate.Shapes((2,), (3,))
    adapter = intermediate.Adapter(own, other)
    assert adapter.inputs.linear is not None
    assert adapter.outputs.linear is not None
    for layer in (adapter.inputs.linear, adapter.outputs.linear):
        nn.init.ones_(layer.weight)
        assert layer.bias is not None
        nn.init.zeros_(layer.bias)
    client = Client(model, nn.ModuleDict({other.key: adapter}))
    features = Features(torch.tensor([[1.0, 2.0]]), torch.zeros(1, 3))
    message = Download(dict(scalar_model().state_dict()), (features,))
    hp = FedIN(alleviation=alleviation, lam=1.0)
    tiny.update(hp, client, message, scalar_context())
    assert adapter.outputs.linear.weight.flatten().tolist() == pytest.approx([0.4] * 3)
    assert adapter.inputs.linear.weight.flatten().tolist() == pytest.approx([0.4, -0.2])
    # w_in: G_local = -2 conflicts, so 18 - 1, or 18 projected to 0
    z = 17 if alleviation == "simplified" else 0
    assert model.trunk.weight.item() == pytest.approx(1 - 0.1 * z)  # type: ignore[operator]


def test_mixed_families_learn_from_each_other(tmp_path: Path) -> None:
    """Maps, vectors and images; adapters learn and stay at home."""
    images = np.random.RandomState(0).randint(0, 256, (24, 1, 16, 16), np.uint8)
    data = Dataset("noise", images, np.arange(24) % 2, 24, 2, mean=(0.5,), std=(0.5,))
    config = Config(
        method="fedin", clients=3, participation=1.0, rounds=2, out=tmp_path,
        fleet=FleetConfig(("cnn5", "resnet4", "mlp"), 8),
        train=TrainConfig(batch_size=4, lr=0.01),
        hp={"aggregation": "groups", "sample_number": 2},
    )  # fmt: skip
    states: list[dict[int, Any]] = []

    def watch(event: Any, backend: Any) -> None:
        if type(event).__name__ == "RoundFinished":
            types = config.hp.messages()
            states.append({k: wire.unpack(state, types) for k, state in backend.states()})

    shares = [range(8), range(8, 16), range(16, 24)]
    run = tiny.simulate(config, data, tiny.deal(*shares), watch)
    for k, name in enumerate(config.fleet.models):
        size = zoo.parameter_count(name, data.task, 8)
        assert run.count("scalars", 2, "up", client=k, field="model") == size
        first, second = (state[k]["adapters"] for state in states)
        weights = [key for key in first if key.endswith("weight")]
        assert len(weights) >= 3, "two other shapes, both sides, but for those that are equal"
        assert all(not torch.equal(first[key], second[key]) for key in weights)


# Flags


def test_without_in_it_is_fedprox() -> None:
    data = tiny.points([(i, 9 - i) for i in range(6)], [0, 1] * 3, num_classes=2)
    start = dict(norm_model().state_dict())
    ctx = tiny.client_context(data, batch_size=2, epochs=3, shuffle=False)
    ours, theirs = norm_model(), norm_model()
    hp = FedIN(in_schedule="never", mu=0.3)
    upload = tiny.update(hp, Client(ours, NONE), Download(start, (others(),)), ctx)
    tiny.update(FedProx(mu=0.3), ClientState(theirs), ProxDownload(start), ctx)
    assert upload.features is None
    assert_close(ours.state_dict(), theirs.state_dict())
    joint = norm_model()
    tiny.update(FedIN(mu=0.3), Client(joint, NONE), Download(start, (others(),)), ctx)
    assert not torch.allclose(joint.trunk[0].weight, ours.trunk[0].weight)  # type: ignore[index,arg-type]


def test_without_in_nothing_is_expected_and_nothing_kept() -> None:
    hp, ctx = FedIN(in_schedule="never"), tiny.server_context(NESTED, TASK)
    assert hp.expected(0, ctx).features is None
    server = hp.init_server(ctx)
    hp.server_update(server, SENT[:1], ctx)
    assert server.pool == {}


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"mu": -0.1}, "--hp.mu"),
        ({"lam": -1.0}, "--hp.lam"),
        ({"lam": float("nan")}, "--hp.lam"),
        ({"rho": -0.8}, "--hp.rho"),
        ({"in_steps": 0}, "--hp.in-steps"),
        ({"sample_number": 0}, "--hp.sample-number"),
        ({"feature_batch": 0}, "--hp.feature-batch"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag} must be . or more, got .*Try {flag} 1"):
        method.check(FedIN(**settings), NESTED, TASK, "fedin")


def test_models_that_do_not_nest_need_groups() -> None:
    mixed = Fleet(("cnn4", "resnet4"), 64)
    with pytest.raises(ConfigError, match="nested.*or --hp.aggregation groups"):
        method.check(FedIN(), mixed, TASK, "fedin")
    method.check(FedIN(aggregation="groups"), mixed, TASK, "fedin")
    method.check(FedIN(), NESTED, TASK, "fedin")
