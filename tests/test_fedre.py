"""FedRE's equations, worked by hand."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from methods.fedre import Download, FedRE, Fixed, Server, Upload
from raysim import (
    ClientState,
    Config,
    ConfigError,
    EvalConfig,
    Fleet,
    FleetConfig,
    Reply,
    Task,
    TrainConfig,
    get_weights,
    wire,
)
from raysim.entanglement import draw, entangle, mixture
from raysim.method import check
from raysim.seeding import seeded
from raysim.worker import EVALUATE, Job, Worker

MECHANISMS = ("rsr", "var", "rar", "rsp", "vap", "rap")
SERVER = tiny.server_context(Fleet(("mlp",), 2), Task(2))


def replies(*pairs: tuple[Sequence[float], Sequence[float]]) -> list[Reply[Upload]]:
    return [Reply(k, 1, Upload(torch.tensor(r), torch.tensor(y))) for k, (r, y) in enumerate(pairs)]


# The entangled pair


def test_entangled_pair_by_hand() -> None:
    """Classes 0 and 2 of three, mu_0 = (1, 2), mu_2 = (3, 6), p = (1/4, 3/4):

    r = 1/4 (1, 2) + 3/4 (3, 6) = (2.5, 5)
    y = 1/4 e_0 + 3/4 e_2       = (0.25, 0, 0.75)
    """
    means = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    r, y = entangle(means, torch.tensor([0, 2]), torch.tensor([0.25, 0.75]), num_classes=3)
    assert_close(r, torch.tensor([2.5, 5.0]))
    assert_close(y, torch.tensor([0.25, 0.0, 0.75]))


def test_client_sends_its_class_means_weighted_by_uniform_draws(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Class 0 has (0, 4) and (2, 0), class 2 has (3, 6), class 1 has nothing; r(x) = x.

    mu_0 = (1, 2), mu_2 = (3, 6); u = (0.2, 0.6), so p = u / 0.8 = (1/4, 3/4), as above.
    """
    monkeypatch.setattr(torch, "rand", lambda *size, **_: torch.tensor([0.2, 0.6]))
    data = tiny.points([(0, 4), (3, 6), (2, 0)], [0, 2, 0], num_classes=3)
    client = ClientState(tiny.model(head=[[0, 0]] * 3))
    download = Download(get_weights(tiny.linear([[0, 0]] * 3)))
    upload = tiny.update(FedRE(), client, download, tiny.client_context(data))
    assert_close(upload.representation, torch.tensor([2.5, 5.0]))
    assert_close(upload.label, torch.tensor([0.25, 0.0, 0.75]))


def test_class_means_are_the_trained_models_in_eval_mode_over_all_of_the_clients_data() -> None:
    """The client has 5 of 7 samples, of which training in batches of 2 leaves one out; its model
    has batch norm and dropout. With p read off the label, r must be sum_c p_c mu_c."""
    torch.manual_seed(0)
    data = tiny.points(
        [(1, 5), (9, 9), (4, 2), (3, 8), (7, 7), (6, 1), (2, 2)],
        [0, 0, 2, 0, 1, 2, 2],
        num_classes=4,
    )
    ctx = tiny.client_context(data, [0, 2, 3, 5, 6], eval_batch_size=2, batch_size=2, lr=0.5)
    model = tiny.moody_model(pixels=2, width=3, num_classes=4)
    untrained = get_weights(model)["trunk.0.weight"].clone()
    download = Download(get_weights(nn.Linear(3, 4)))
    upload = tiny.update(FedRE(), ClientState(model), download, ctx)

    assert not torch.equal(model.trunk[0].weight, untrained)
    assert model.training, "gathering means must leave the model in the mode it was in"
    assert model.trunk[1].num_batches_tracked == 2, "gathering means is not training"
    means = tiny.means_by_loops(model, ctx)
    assert list(means) == [0, 2]
    assert_close(upload.representation, sum(upload.label[c] * mean for c, mean in means.items()))


def test_label_sums_to_one_over_the_classes_the_client_has() -> None:
    data = tiny.points([(k, 1) for k in range(6)], [4, 1, 4, 1, 3, 3], num_classes=6)
    client = ClientState(tiny.model(head=[[0, 0]] * 6))
    download = Download(get_weights(tiny.linear([[0, 0]] * 6)))
    label = tiny.update(FedRE(), client, download, tiny.client_context(data)).label
    assert label.shape == (6,)
    assert float(label.sum()) == pytest.approx(1)
    assert (label > 0).tolist() == [False, True, False, True, True, False]


def test_client_of_one_class_sends_its_prototype_and_a_one_hot_label() -> None:
    """u / sum(u) = 1 whatever u: r = mu_1 = ((1, 5) + (3, 1)) / 2 = (2, 3), y = e_1."""
    data = tiny.points([(1, 5), (3, 1)], [1, 1], num_classes=2)
    client = ClientState(tiny.model(head=[[0, 0]] * 2))
    download = Download(get_weights(tiny.linear([[0, 0]] * 2)))
    upload = tiny.update(FedRE(), client, download, tiny.client_context(data))
    assert_close(upload.representation, torch.tensor([2.0, 3.0]))
    assert_close(upload.label, torch.tensor([0.0, 1.0]))


def worker(seed: int = 0, **hp: Any) -> Worker:
    """Clients 0 and 1 hold the same four samples, of three classes."""
    data = tiny.points([(1, 5), (3, 1), (2, 2), (9, 4)], [0, 1, 2, 0], num_classes=3)
    fleet = FleetConfig(("mlp",), 2)
    config = Config(method="fedre", seed=seed, clients=2, fleet=fleet, hp=hp)
    return tiny.make_worker(config, data, tiny.deal([0, 1, 2, 3], [0, 1, 2, 3]))


def label(worker: Worker, client: int, round: int) -> Tensor:
    download = Download(get_weights(tiny.linear([[1, 0], [0, 1], [1, 1]])))
    _, upload = tiny.play(worker, download, client, round)
    label: Tensor = upload.label
    return label


def test_weights_are_drawn_anew_in_every_round_and_for_every_client() -> None:
    one = worker()
    drawn = [label(one, client, round) for client in (0, 1) for round in (1, 2)]
    for i, a in enumerate(drawn):
        for b in drawn[:i]:
            assert (a - b).abs().max() > 1e-3


def test_weights_follow_from_the_seed() -> None:
    one = worker()
    first = label(one, 1, 2)
    label(one, 0, 2)
    assert torch.equal(label(one, 1, 2), first), "whatever the worker did before"
    assert torch.equal(label(worker(), 1, 2), first)
    assert not torch.equal(label(worker(seed=1), 1, 2), first)


# The mechanisms


@pytest.mark.parametrize(
    ("mechanism", "u", "r", "y"),
    [
        ("rsr", [0.2, 0.9, 0.4], [3, 6], [0, 0, 1]),
        ("rsr", [0.2, 0.3, 0.4], [2, 0], [1, 0, 0]),
        ("var", [0.2, 0.9, 0.4], [5 / 3, 10 / 3], [2 / 3, 0, 1 / 3]),
        ("rar", [0.2, 1.2, 0.6], [2.4, 4], [0.4, 0, 0.6]),
        ("rsp", [0.2, 0.6], [3, 6], [0, 0, 1]),
        ("rsp", [0.7, 0.6], [1, 2], [1, 0, 0]),
        ("vap", [0.2, 0.6], [2, 4], [0.5, 0, 0.5]),
        ("rap", [0.2, 0.6], [2.5, 5], [0.25, 0, 0.75]),
    ],
)
def test_every_mechanism_by_hand(
    mechanism: Any, u: list[float], r: list[float], y: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples (0, 4), (3, 6) and (2, 0) of classes 0, 2 and 0, so mu_0 = (1, 2), mu_2 = (3, 6).

    rsr  the sample with the largest draw
    var  (0 + 3 + 2, 4 + 6 + 0) / 3 = (5/3, 10/3), two thirds of class 0
    rar  p = u / 2 = (0.1, 0.6, 0.3): 0.1 (0, 4) + 0.6 (3, 6) + 0.3 (2, 0) = (2.4, 4), y_0 = 0.4
    rsp  the prototype with the largest draw
    vap  ((1, 2) + (3, 6)) / 2 = (2, 4)
    rap  p = u / 0.8 = (1/4, 3/4): as above
    """
    asked = []
    monkeypatch.setattr(torch, "rand", lambda n: asked.append(n) or torch.tensor(u))
    data = tiny.points([(0, 4), (3, 6), (2, 0)], [0, 2, 0], num_classes=3)
    client = ClientState(tiny.model(head=[[0, 0]] * 3))
    download = Download(get_weights(tiny.linear([[0, 0]] * 3)))
    ctx = tiny.client_context(data, eval_batch_size=2)
    upload = tiny.update(FedRE(mechanism), client, download, ctx)
    assert asked == [len(u)], "one draw for each of what is entangled"
    assert_close(upload.representation, torch.tensor(r, dtype=torch.float32))
    assert_close(upload.label, torch.tensor(y, dtype=torch.float32))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_client_of_one_sample_sends_it(mechanism: Any) -> None:
    data = tiny.points([(7, 3), (1, 1)], [2, 0], num_classes=3)
    client = ClientState(tiny.model(head=[[0, 0]] * 3))
    download = Download(get_weights(tiny.linear([[0, 0]] * 3)))
    upload = tiny.update(FedRE(mechanism), client, download, tiny.client_context(data, [0]))
    assert_close(upload.representation, torch.tensor([7.0, 3.0]))
    assert_close(upload.label, torch.tensor([0.0, 0.0, 1.0]))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_representations_are_the_trained_models_in_eval_mode_over_all_data(mechanism: Any) -> None:
    """As for class means below. r is a mixture of what the model gives for each sample, and the
    label says how much of each class; with samples of different classes, that is all of p."""
    torch.manual_seed(0)
    data = tiny.points([(1, 5), (9, 9), (4, 2), (3, 8), (7, 7)], [0, 0, 2, 3, 1], num_classes=4)
    ctx = tiny.client_context(data, [0, 2, 3, 4], eval_batch_size=3, batch_size=3, lr=0.5)
    model = tiny.moody_model(pixels=2, width=3, num_classes=4)
    download = Download(get_weights(nn.Linear(3, 4)))
    upload = tiny.update(FedRE(mechanism), ClientState(model), download, ctx)
    assert model.training
    assert model.trunk[1].num_batches_tracked == 1
    means = tiny.means_by_loops(model, ctx)
    assert list(means) == [0, 1, 2, 3]
    assert_close(upload.representation, sum(upload.label[c] * mean for c, mean in means.items()))


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_entangling_costs_one_forward_pass_and_no_backward(
    mechanism: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five samples in batches of two train two steps; then each is seen once, without gradients."""
    data = tiny.points([(k, 1) for k in range(5)], [0, 1, 2, 0, 1], num_classes=3)
    client = ClientState(tiny.model(head=[[0, 0]] * 3, features=[[1, 0], [0, 1]]))
    seen: list[tuple[int, bool]] = []
    client.model.trunk.register_forward_hook(
        lambda _, inputs, out: seen.append((len(inputs[0]), out.requires_grad))
    )
    steps = []
    backward = Tensor.backward
    monkeypatch.setattr(Tensor, "backward", lambda loss: (steps.append(1), backward(loss)))
    download = Download(get_weights(tiny.linear([[0, 0]] * 3)))
    ctx = tiny.client_context(data, eval_batch_size=3, batch_size=2)
    upload = tiny.update(FedRE(mechanism), client, download, ctx)
    assert len(steps) == 2
    assert seen == [(2, True), (2, True), (3, False), (2, False)]
    assert not upload.representation.requires_grad
    assert not upload.label.requires_grad


class Sizes(TorchDispatchMode):
    """How many numbers every operation gives."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.total += result.numel() if isinstance(result, Tensor) else 0
        return result


@pytest.mark.parametrize("mechanism", ["rsr", "var", "rar"])
def test_entangling_never_makes_more_than_a_few_times_n_d_plus_c_numbers(mechanism: Any) -> None:
    n, d, c = 4000, 3, 5
    r, classes = torch.rand(n, d), torch.randint(c, (n,))
    with Sizes() as sizes:
        entangle(r, classes, mixture(mechanism, draw("uniform", n)), c)
    assert n <= sizes.total <= 2 * n * (d + c)


# The weights


def test_draws_become_weights_by_hand() -> None:
    """|u| / sum |u|: (1, -3) has 4, so (1/4, 3/4). softmax(0, ln 3) = (1, 3) / 4; the sign counts:
    softmax(0, -ln 3) = (1, 1/3) / (4/3) = (3/4, 1/4)."""
    log3 = float(np.log(3))
    assert_close(mixture("rap", torch.tensor([1.0, -3.0])), torch.tensor([0.25, 0.75]))
    drawn = torch.tensor([0.0, log3])
    assert_close(mixture("rar", drawn, "softmax"), torch.tensor([0.25, 0.75]))
    assert_close(mixture("rap", -drawn, "softmax"), torch.tensor([0.75, 0.25]))


@pytest.mark.parametrize("normalize", ["sum", "softmax"])
def test_draws_of_zero_weigh_the_same(normalize: Any) -> None:
    assert_close(mixture("rap", torch.zeros(4), normalize), torch.full((4,), 0.25))
    assert_close(mixture("rap", torch.zeros(1), normalize), torch.ones(1))


@pytest.mark.parametrize("normalize", ["sum", "softmax"])
@pytest.mark.parametrize("weights", ["uniform", "gaussian", "laplacian"])
def test_weights_of_every_distribution_are_shares(weights: Any, normalize: Any) -> None:
    torch.manual_seed(0)
    for n in (1, 2, 50):
        u = draw(weights, n)
        p = mixture("rap", u, normalize)
        assert (p >= 0).all()
        assert float(p.sum()) == pytest.approx(1, abs=1e-6)
        size = u.abs() if normalize == "sum" else u
        assert p.argsort().tolist() == size.argsort().tolist(), "more is more"


@pytest.mark.parametrize(
    ("weights", "mean", "size", "square"),
    [
        ("uniform", 1 / 2, 1 / 2, 1 / 3),
        ("gaussian", 0, (2 / np.pi) ** 0.5, 1),
        ("laplacian", 0, 1, 2),
    ],
)
def test_draws_have_the_moments_of_their_distribution(
    weights: Any, mean: float, size: float, square: float
) -> None:
    """E u, E |u| and E u^2, of 100,000 draws."""
    torch.manual_seed(0)
    u = draw(weights, 100_000)
    assert float(u.mean()) == pytest.approx(mean, abs=0.02)
    assert float(u.abs().mean()) == pytest.approx(size, abs=0.02)
    assert float(u.square().mean()) == pytest.approx(square, abs=0.05)


@pytest.mark.parametrize(("classes", "largest"), [(2, float(np.log(2))), (50, 0.039)])
def test_the_largest_weight_of_a_random_average_is_as_large_as_expected(
    classes: int, largest: float
) -> None:
    """For two uniform draws E max(u) / (u_1 + u_2) = E 1 / (1 + v) with v uniform = ln 2; for fifty
    the specification's 0.039."""
    torch.manual_seed(0)
    found = [mixture("rap", draw("uniform", classes)).max() for _ in range(2000)]
    assert float(torch.stack(found).mean()) == pytest.approx(largest, rel=0.02)


@pytest.mark.parametrize("weights", ["uniform", "gaussian", "laplacian"])
@pytest.mark.parametrize("mechanism", ["rsr", "rsp"])
def test_a_random_single_one_is_any_equally_often(mechanism: Any, weights: Any) -> None:
    torch.manual_seed(0)
    chosen = torch.stack([mixture(mechanism, draw(weights, 4)) for _ in range(2000)])
    assert sorted(set(chosen.flatten().tolist())) == [0, 1]
    assert_close(chosen.mean(dim=0), torch.full((4,), 0.25), atol=0.04, rtol=0)


@pytest.mark.parametrize("weights", ["gaussian", "laplacian"])
@pytest.mark.parametrize("normalize", ["sum", "softmax"])
def test_a_client_weighs_as_its_settings_say(weights: Any, normalize: Any) -> None:
    data = tiny.points([(1, 5), (3, 1), (2, 2)], [0, 1, 2], num_classes=3)
    client = ClientState(tiny.model(head=[[0, 0]] * 3))
    download = Download(get_weights(tiny.linear([[0, 0]] * 3)))
    method = FedRE(weights=weights, normalize=normalize)
    torch.manual_seed(3)
    label = tiny.update(method, client, download, tiny.client_context(data, shuffle=False)).label
    torch.manual_seed(3)
    laplace = torch.distributions.Laplace(0, 1)
    z = torch.randn(3) if weights == "gaussian" else laplace.sample((3,))
    expected = z.exp() / z.exp().sum() if normalize == "softmax" else z.abs() / z.abs().sum()
    assert_close(label, expected)


# Fixed weights


def test_fixed_draws_belong_to_classes_not_to_places() -> None:
    """Draws (0.2, 0.9, 0.6) of classes 0, 1, 2, and a client of 0 and 2: p = (0.2, 0.6) / 0.8."""
    data = tiny.points([(0, 4), (3, 6), (2, 0)], [0, 2, 0], num_classes=3)
    client = Fixed(tiny.model(head=[[0, 0]] * 3), torch.tensor([0.2, 0.9, 0.6]))
    download = Download(get_weights(tiny.linear([[0, 0]] * 3)))
    upload = tiny.update(FedRE(resample=False), client, download, tiny.client_context(data))
    assert_close(upload.representation, torch.tensor([2.5, 5.0]))
    assert_close(upload.label, torch.tensor([0.25, 0.0, 0.75]))


def test_fixed_draws_of_a_random_average_of_representations_belong_to_samples() -> None:
    """p = (0.2, 1.2, 0.6) / 2: the hand-worked rar above."""
    data = tiny.points([(0, 4), (3, 6), (2, 0)], [0, 2, 0], num_classes=3)
    client = Fixed(tiny.model(head=[[0, 0]] * 3), torch.tensor([0.2, 1.2, 0.6]))
    download = Download(get_weights(tiny.linear([[0, 0]] * 3)))
    method = FedRE("rar", resample=False)
    upload = tiny.update(method, client, download, tiny.client_context(data))
    assert_close(upload.representation, torch.tensor([2.4, 4.0]))
    assert_close(upload.label, torch.tensor([0.4, 0.0, 0.6]))


@pytest.mark.parametrize("mechanism", ["rar", "rap"])
def test_fixed_weights_are_drawn_once_for_each_client_and_kept(mechanism: str) -> None:
    one = worker(mechanism=mechanism, resample=False)
    download = Download(get_weights(tiny.linear([[1, 0], [0, 1], [1, 1]])))
    state, first = tiny.play(one, download, client=1, round=1)
    other_state, other = tiny.play(one, download, client=0, round=1)
    state, second = tiny.play(one, download, client=1, round=2, state=state)
    _, third = tiny.play(one, download, client=1, round=7, state=state)
    assert torch.equal(second.label, first.label)
    assert torch.equal(third.label, first.label)
    assert not torch.equal(third.representation, first.representation), "the model does move"
    assert (other.label - first.label).abs().max() > 1e-3
    draws = wire.unpack(other_state, one.messages)["draws"]
    assert draws.shape == ((3,) if mechanism == "rap" else (4,))


def test_a_client_first_chosen_late_has_the_fixed_weights_it_always_had() -> None:
    early, late = (label(worker(resample=False), 1, round) for round in (1, 9))
    assert torch.equal(early, late)
    assert not torch.equal(label(worker(seed=1, resample=False), 1, 1), early)


def test_resampled_clients_keep_nothing_but_their_model() -> None:
    download = Download(get_weights(tiny.linear([[1, 0], [0, 1], [1, 1]])))
    state, _ = tiny.play(worker(), download)
    assert list(wire.unpack(state)) == ["model"]


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("resample", [True, False])
def test_vanilla_averages_repeat_and_random_ones_do_not(mechanism: str, resample: bool) -> None:
    labels = [label(worker(mechanism=mechanism, resample=resample), 0, r) for r in range(1, 9)]
    alike = all(torch.equal(labels[0], other) for other in labels)
    assert alike == (mechanism.startswith("va") or not resample)


# The head


def test_receiving_overwrites_the_head_and_nothing_else() -> None:
    client = ClientState(tiny.model(head=[[1, 2], [3, 4]], features=[[5, 6], [7, 8]]))
    head = tiny.linear([[-1, -2], [-3, -4]])
    nn.init.constant_(head.bias, 9)
    ctx: Any = None
    FedRE().receive(client, Download(get_weights(head)), ctx)
    assert torch.equal(client.model.head.weight, head.weight)
    assert torch.equal(client.model.head.bias, head.bias)
    assert client.model.trunk.weight.tolist() == [[5, 6], [7, 8]]


def test_broadcast_is_the_servers_head() -> None:
    server = Server(tiny.linear([[1, 2], [3, 4]]))
    message = FedRE().broadcast(server, [0], SERVER)
    assert {name: tensor.tolist() for name, tensor in message.head.items()} == {
        "weight": [[1, 2], [3, 4]],
        "bias": [0, 0],
    }


def test_local_training_moves_the_base_and_the_received_head_by_cross_entropy() -> None:
    """One sample x = (1, 2), y = 0, one step of size 1. F = I, so r = x. The head that arrives in
    the place of the client's is H = [[ln 3, 0], [0, 0]], so z = (ln 3, 0), softmax = (3/4, 1/4).

    dz = softmax - e_0 = (-1/4, 1/4)
    H <- H - dz r^T = [[ln 3 + 1/4, 1/2], [-1/4, -1/2]],  b <- (1/4, -1/4)
    dr = H^T dz = (-ln 3 / 4, 0),  F <- I - dr x^T = [[1 + ln 3 / 4, ln 3 / 2], [0, 1]]
    """
    log3 = float(torch.tensor(3.0).log())
    data = tiny.points([(1, 2)], [0], num_classes=2)
    client = ClientState(tiny.model(head=[[9, 9], [-9, 9]], features=[[1, 0], [0, 1]]))
    download = Download(get_weights(tiny.linear([[log3, 0], [0, 0]])))
    tiny.update(FedRE(), client, download, tiny.client_context(data, lr=1.0))
    head, base = client.model.head, client.model.trunk.weight
    assert_close(head.weight.detach(), torch.tensor([[log3 + 0.25, 0.5], [-0.25, -0.5]]))
    assert_close(head.bias.detach(), torch.tensor([0.25, -0.25]))
    assert_close(base.detach(), torch.tensor([[1 + log3 / 4, log3 / 2], [0.0, 1.0]]))


# The server's step


def test_server_step_by_hand_sums_over_the_batch() -> None:
    """Head 0, so softmax = (1/2, 1/2) for both pairs, and one step of size 0.1:

    r_0 = (1, 2), y_0 = (1/4, 3/4):  dz = ( 1/4, -1/4),  dz r^T = [[1/4, 1/2], [-1/4, -1/2]]
    r_1 = (2, 0), y_1 = (1, 0):      dz = (-1/2,  1/2),  dz r^T = [[ -1,   0], [   1,    0]]
    sum:                          db = (-1/4, 1/4),  dW = [[-3/4, 1/2], [3/4, -1/2]]

    W <- [[0.075, -0.05], [-0.075, 0.05]],  b <- (0.025, -0.025); a mean would give half of it.
    """
    server = Server(tiny.linear([[0, 0], [0, 0]]))
    pairs = replies(([1.0, 2.0], [0.25, 0.75]), ([2.0, 0.0], [1.0, 0.0]))
    FedRE(server_lr=0.1).server_update(server, pairs, SERVER)
    assert_close(server.head.weight.detach(), torch.tensor([[0.075, -0.05], [-0.075, 0.05]]))
    assert_close(server.head.bias.detach(), torch.tensor([0.025, -0.025]))


def closed_form(head: nn.Linear, r: Tensor, y: Tensor, lr: float) -> tuple[Tensor, Tensor]:
    """W - lr sum_k (softmax(W r_k + b) - y_k) r_k^T, and the same for b."""
    weight, bias = head.weight.detach(), head.bias.detach()
    dz = torch.softmax(r @ weight.T + bias, dim=1) - y
    return weight - lr * dz.T @ r, bias - lr * dz.sum(dim=0)


def test_server_step_from_any_head_equals_the_closed_form() -> None:
    torch.manual_seed(0)
    head = nn.Linear(3, 4)
    r, y = torch.randn(5, 3), torch.rand(5, 4).softmax(dim=1)
    weight, bias = closed_form(head, r, y, lr=0.01)
    pairs = [Reply(k, 1, Upload(r[k], y[k])) for k in range(5)]
    FedRE().server_update(Server(head), pairs, SERVER)
    assert_close(head.weight.detach(), weight)
    assert_close(head.bias.detach(), bias)


def test_every_pair_counts_the_same_whatever_the_size_of_its_client() -> None:
    heads = [tiny.linear([[1, 0], [0, 1]]) for _ in range(2)]
    pairs = replies(([1.0, 2.0], [0.25, 0.75]), ([2.0, 0.0], [1.0, 0.0]))
    FedRE().server_update(Server(heads[0]), pairs, SERVER)
    heavy = [pairs[0]._replace(num_samples=1000), pairs[1]]
    FedRE().server_update(Server(heads[1]), heavy, SERVER)
    assert torch.equal(heads[0].weight, heads[1].weight)


def test_head_goes_on_from_where_the_round_before_left_it() -> None:
    torch.manual_seed(0)
    server = Server(nn.Linear(2, 2))
    r, y = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.25, 0.75]])
    for _ in range(2):
        weight, bias = closed_form(server.head, r, y, lr=0.01)
        FedRE().server_update(server, [Reply(0, 1, Upload(r[0], y[0]))], SERVER)
        assert_close(server.head.weight.detach(), weight)
        assert_close(server.head.bias.detach(), bias)


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, [5]),
        ({"server_batch_size": 2}, [2, 2, 1]),
        ({"server_batch_size": 2, "server_epochs": 2}, [2, 2, 1, 2, 2, 1]),
    ],
)
def test_server_steps_are_batches_and_every_epoch_sees_every_pair_once(
    settings: dict[str, int], sizes: list[int]
) -> None:
    server = Server(tiny.linear([[0, 0], [0, 0]]))
    seen: list[Tensor] = []
    server.head.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    pairs = replies(*(([float(k), 0.0], [0.5, 0.5]) for k in range(5)))
    FedRE(**settings).server_update(server, pairs, SERVER)
    assert [len(batch) for batch in seen] == sizes
    order = torch.cat(seen)[:, 0].tolist()
    epochs = [order[start : start + 5] for start in range(0, len(order), 5)]
    assert all(sorted(epoch) == [0, 1, 2, 3, 4] for epoch in epochs)


def test_batches_of_one_are_steps_in_a_row() -> None:
    """Two equal pairs, so their order does not matter: the second step starts at the first's."""
    server = Server(tiny.linear([[1, 0], [0, 1]]))
    r, y = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.25, 0.75]])
    expected = tiny.linear([[1, 0], [0, 1]])
    for _ in range(2):
        weight, bias = closed_form(expected, r, y, lr=0.5)
        with torch.no_grad():
            expected.weight.copy_(weight)
            expected.bias.copy_(bias)
    pairs = replies(([1.0, 2.0], [0.25, 0.75]), ([1.0, 2.0], [0.25, 0.75]))
    FedRE(server_lr=0.5, server_batch_size=1).server_update(server, pairs, SERVER)
    assert_close(server.head.weight, expected.weight)
    assert_close(server.head.bias, expected.bias)


def test_a_mean_over_the_batch_is_half_of_the_sum_by_hand() -> None:
    """The two pairs of the hand-worked step."""
    server = Server(tiny.linear([[0, 0], [0, 0]]))
    pairs = replies(([1.0, 2.0], [0.25, 0.75]), ([2.0, 0.0], [1.0, 0.0]))
    FedRE(server_lr=0.1, server_reduction="mean").server_update(server, pairs, SERVER)
    expected = torch.tensor([[0.0375, -0.025], [-0.0375, 0.025]])
    assert_close(server.head.weight.detach(), expected)
    assert_close(server.head.bias.detach(), torch.tensor([0.0125, -0.0125]))


def test_momentum_carries_over_the_steps_of_a_round_by_hand() -> None:
    """One pair r = (2, 0), y = e_0, two epochs of size 1 at momentum 1/2; z_0 = 2 w_0 + b_0 is all
    that matters, z_1 = -z_0.

    z = 0:  dz_0 = -1/2, so g = (dw_0, db_0) = (-1, -1/2); w_0 = 1, b_0 = 1/2
    z_0 = 5/2, z_0 - z_1 = 5:  dz_0 = sigmoid(5) - 1 = -s, g = (-2 s, -s)
    velocity g / 2 + g':  w_0 = 1 + 1/2 + 2 s, b_0 = 1/2 + 1/4 + s
    """
    server = Server(tiny.linear([[0, 0], [0, 0]]))
    method = FedRE(server_lr=1.0, server_momentum=0.5, server_epochs=2)
    method.server_update(server, replies(([2.0, 0.0], [1.0, 0.0])), SERVER)
    s = 1 - 1 / (1 + float(np.exp(-5)))
    expected = torch.tensor([[1.5 + 2 * s, 0.0], [-1.5 - 2 * s, 0.0]])
    assert_close(server.head.weight.detach(), expected)
    assert_close(server.head.bias.detach(), torch.tensor([0.75 + s, -0.75 - s]))


def test_momentum_ends_with_the_round() -> None:
    heads = [tiny.linear([[1, 0], [0, 1]]) for _ in range(2)]
    pairs = replies(([1.0, 2.0], [0.25, 0.75]))
    for head, momentum in zip(heads, (0.0, 0.9), strict=True):
        for _ in range(2):
            FedRE(server_momentum=momentum).server_update(Server(head), pairs, SERVER)
    assert torch.equal(heads[0].weight, heads[1].weight)


def test_adam_takes_a_first_step_of_its_step_size_whatever_the_gradient() -> None:
    """The gradient of the hand-worked step is [[-3/4, 1/2], [3/4, -1/2]] and (-1/4, 1/4)."""
    server = Server(tiny.linear([[0, 0], [0, 0]]))
    pairs = replies(([1.0, 2.0], [0.25, 0.75]), ([2.0, 0.0], [1.0, 0.0]))
    FedRE(server_optimizer="adam", server_lr=0.1).server_update(server, pairs, SERVER)
    assert_close(server.head.weight.detach(), torch.tensor([[0.1, -0.1], [-0.1, 0.1]]))
    assert_close(server.head.bias.detach(), torch.tensor([0.1, -0.1]))


def test_a_class_that_nobody_has_is_only_pushed_down() -> None:
    """Three classes, nobody has the third: dz_2 = softmax_2 = 1/3 for both pairs, so
    w_2 <- -0.3 (1/3 (1, 2) + 1/3 (2, 0)) = (-0.3, -0.2), b_2 <- -0.3 * 2/3."""
    server = Server(tiny.linear([[0, 0]] * 3))
    pairs = replies(([1.0, 2.0], [0.25, 0.75, 0.0]), ([2.0, 0.0], [1.0, 0.0, 0.0]))
    FedRE(server_lr=0.3).server_update(server, pairs, SERVER)
    assert_close(server.head.weight[2].detach(), torch.tensor([-0.3, -0.2]))
    assert_close(server.head.bias[2].detach(), torch.tensor(-0.2))


# Settings


@pytest.mark.parametrize(
    ("settings", "flag", "advice"),
    [
        ({"server_lr": 0.0}, "--hp.server-lr", "more than 0"),
        ({"server_epochs": 0}, "--hp.server-epochs", "at least 1"),
        ({"server_batch_size": 0}, "--hp.server-batch-size", "at least 1"),
        ({"server_momentum": 1.0}, "--hp.server-momentum", "in [0, 1)"),
        (
            {"server_momentum": 0.9, "server_optimizer": "adam"},
            "--hp.server-momentum 0.9",
            "try --hp.server-optimizer sgd",
        ),
    ],
)
def test_what_the_server_cannot_train_with_is_refused(
    settings: dict[str, Any], flag: str, advice: str
) -> None:
    with pytest.raises(ConfigError) as error:
        check(FedRE(**settings), Fleet(("mlp",), 2), Task(2), "fedre")
    assert flag in str(error.value)
    assert advice in str(error.value)


@pytest.mark.parametrize(
    "flag", ["mechanism", "weights", "normalize", "server_optimizer", "server_reduction"]
)
def test_a_choice_that_is_none_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=f"--hp.{flag.replace('_', '-')}"):
        Config(method="fedre", hp={flag: "rapp"})


def test_every_setting_is_a_flag() -> None:
    words = (
        "--method fedre --hp.mechanism var --hp.weights laplacian --hp.normalize softmax "
        "--hp.resample False --hp.server-optimizer adam --hp.server-reduction mean"
    )
    assert Config.parse(words.split()).hp == FedRE(
        "var", "laplacian", "softmax", False, server_optimizer="adam", server_reduction="mean"
    )


# Settings of the engine that the paper varies


@pytest.mark.parametrize(("fresh", "correct"), [(True, 0), (False, 4)])
def test_evaluation_is_after_the_broadcast_or_after_local_training(
    fresh: bool, correct: int
) -> None:
    """Four samples of class 0, which local training learns; the newest head says 1 to all."""
    data = tiny.points([(1, 2), (2, 1), (3, 1), (1, 1)], [0, 0, 0, 0], num_classes=2)
    config = Config(
        method="fedre", clients=1, fleet=FleetConfig(("mlp",), 2), eval=EvalConfig(fresh=fresh)
    )
    one = tiny.make_worker(config, data, tiny.deal([0, 1, 2, 3]))
    head = tiny.linear([[0, 0], [0, 0]])
    state, _ = tiny.play(one, Download(get_weights(head)))
    nn.init.constant_(head.bias[1:], 9)
    message = wire.pack(Download(get_weights(head)))
    _, outcome = one.run(Job(EVALUATE, 0, 1, False), state, message)
    assert outcome.evaluation is not None
    assert outcome.evaluation.correct == correct


@pytest.mark.parametrize("mapping", ["ap", "mp", "fc"])
def test_what_is_entangled_lies_behind_the_representation_mapping(mapping: Any) -> None:
    """resnet4 is 64 wide; asked for 32 it gives means of neighbors, their maxima, or a layer of
    its own, which is trained and stays at home."""
    images = np.random.default_rng(0).integers(0, 256, (6, 1, 16, 16), dtype=np.uint8)
    data = tiny.Dataset("noise", images, np.array([0, 1, 1, 0, 1, 1]), 6, 3, (0.5,), (0.5,))
    config = Config(
        method="fedre", clients=1, train=TrainConfig(batch_size=3),
        fleet=FleetConfig(("resnet4",), 32, mapping),
    )  # fmt: skip
    one = tiny.make_worker(config, data, tiny.deal(range(6)))
    with seeded(config.seed, "init_client", client=0):
        born = get_weights(one.fleet.build("resnet4", data.task))
    download = Download(get_weights(nn.Linear(32, 3)))
    state, upload = tiny.play(one, download)

    model = one.fleet.build("resnet4", data.task)
    model.load_state_dict(wire.unpack(state)["model"])
    model.eval()
    neck, layer = model.neck
    with torch.no_grad():
        native = neck(model.trunk(model.stem((torch.tensor(images) / 255 - 0.5) / 0.5)))
        assert native.shape == (6, 64)
        pairs = native.view(6, 32, 2)
        if mapping == "fc":
            mapped = native @ layer.weight.T + layer.bias
            moved = (layer.weight - born["neck.1.weight"]).abs().max()
            assert 0 < moved < 0.1, "trained from where it began"
        else:
            mapped = pairs.mean(dim=2) if mapping == "ap" else pairs.amax(dim=2)
    means = torch.stack([mapped[[0, 3]].mean(dim=0), mapped[[1, 2, 4, 5]].mean(dim=0)])
    assert upload.representation.shape == (32,)
    assert_close(upload.representation, upload.label[:2] @ means, atol=1e-5, rtol=1e-4)
