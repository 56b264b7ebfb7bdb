"""FedMuscle's round, worked by hand; the losses themselves are in test_muscle.py."""

from collections.abc import Sequence
from dataclasses import replace
from math import e, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor
from torch.testing import assert_close

import methods.fedmuscle
from methods.fedmuscle import Client, FedMuscle, Peers, Request, Upload
from raysim import ClientContext, Config, ConfigError, Fleet, FleetConfig, Reply, Task, alignment
from raysim.alignment import Shelf
from raysim.config import DataConfig, TrainConfig
from raysim.data import Dataset
from raysim.data.public import unlabelled
from raysim.method import PerClient, check
from raysim.result import run

AXES = tiny.points([(1, 0), (0, 1)], [0, 1], num_classes=2)
EYE = [[1.0, 0.0], [0.0, 1.0]]
TWO = torch.arange(2)


def client(projection: tiny.Matrix = EYE) -> Client:
    """r(x) = x as long as nothing was learned, and a head of zeros."""
    return Client(tiny.model(head=[[0, 0], [0, 0]], features=EYE), tiny.linear(projection))


def context(data: Any = AXES, public: Sequence[int] = (0, 1), **settings: Any) -> ClientContext:
    held = unlabelled(data, np.array(public), tiny.CPU)
    return replace(tiny.client_context(data, **settings), public=held)


# Step 4


def share(first: float, other: float, last: float) -> float:
    """How likely it is that a peer's index is the wrong one, when the tuples (1, 1), (1, 2), (2, 1)
    and (2, 2) weigh first, other, other and last for anchor 1."""
    return (other + last) / (first + 2 * other + last)


@pytest.mark.parametrize(
    ("hp", "expected"),
    [
        ({}, share(e, e, 1 / e)),
        ({"alpha_on_positive": False}, share(e**2, e, 1 / e)),
        ({"loss": "pairwise"}, 1 / (1 + e)),
        ({"tau_peers": 1.0}, 1 / (1 + e)),
        ({"align_lr": 0.5}, share(e, e, 1 / e) / 2),
    ],
)
def test_a_step_of_the_alignment_by_hand(hp: dict[str, Any], expected: float) -> None:
    """x_1 = (1, 0), x_2 = (0, 1), f and p the identity, so z_i = x_i; both peers have the same z.

    With tau = 1 and gamma = 1 / tau_peers - 1 = 1, anchor 1 gives to the tuples
        (1, 1)  alpha = 1/e, e^2: e    (1, 2), (2, 1)  alpha = 1, e    (2, 2)  alpha = 1/e, 1: 1/e
    so an index is 2 with q = (e + 1/e) / (3e + 1/e). By z_1 the loss has the derivative
    sum_m (E z^m - z^m_1) = 2 (-q, q), of which the norm takes away what is along z_1: (0, 2q); the
    mean over two anchors halves that, and z_2 is the mirror image. So W_p and W_f lose q off the
    diagonal (step size 1), the bias q.
    """
    method, one = (
        FedMuscle(peers=2, batch=2, width=2, **{"tau": 1.0, "tau_peers": 0.5, **hp}),
        client(),
    )
    head = one.model.head.weight.clone()
    peers = [torch.eye(2), torch.eye(2)]
    method.align(one, Peers(TWO, TWO, peers), context(lr=1.0, momentum=0.0, epochs=3))
    wanted = torch.tensor([[1, -expected], [-expected, 1]])
    assert_close(one.projection.weight.detach(), wanted)
    assert_close(one.projection.bias.detach(), torch.tensor([-expected, -expected]))
    assert isinstance(one.model.trunk, torch.nn.Linear)
    assert_close(one.model.trunk.weight.detach(), wanted)
    assert torch.equal(one.model.head.weight, head), "the head is the task's"
    assert torch.equal(peers[0], torch.eye(2))


@pytest.mark.parametrize(("tuples", "expected"), [("aligned", 1 + 1 / e), ("all", 2 + 2 / e)])
def test_the_gramian_loss_by_hand(tuples: Any, expected: float) -> None:
    """Anchors e1, e2, a peer that agrees and one that always says e3. (e1, e1, e3) has no volume,
    (e1, e2, e3) that of a cube: what is right for the first peer gives 1, the wrong 1/e; with all
    tuples each of these comes twice."""
    method = FedMuscle(loss="gramian", tuples=tuples, tau=1.0)
    z = torch.eye(3)[:2]
    loss = alignment.contrast(z, torch.stack([z, torch.eye(3)[[2, 2]]]), method)
    assert loss.item() == pytest.approx(log(expected), abs=2e-3)  # of the ridge


@pytest.mark.parametrize(("batch", "sizes"), [(2, [2]), (3, [3]), (32, [3])])
def test_every_batch_is_held_against_the_same_samples_of_the_peers(
    batch: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples 4, 1 and 3 of five, taken in the order 3, 4, 1; a last batch of one is left out."""
    points = [(1, 0), (1, 1), (1, 2), (1, 3), (1, 4)]
    data = tiny.points(points, [0] * 5, num_classes=2)
    seen: list[tuple[Tensor, Tensor]] = []

    def look(z: Tensor, peers: Tensor, settings: Any) -> Tensor:
        seen.append((z.detach().clone(), peers))
        return 0 * z.sum()

    monkeypatch.setattr(alignment, "contrast", look)
    rows, order = torch.tensor([4, 1, 3]), torch.tensor([2, 0, 1])
    theirs = torch.tensor([[4.0, 40.0], [1.0, 10.0], [3.0, 30.0]])
    ctx = context(data, public=range(5))
    FedMuscle(batch=batch).align(client(), Peers(rows, order, [theirs, -theirs]), ctx)
    assert [len(z) for z, _ in seen] == sizes
    z, peers = seen[0]
    assert_close(
        z[:2], torch.tensor([[1.0, 3.0], [1.0, 4.0]]) / torch.tensor([[10**0.5], [17**0.5]])
    )
    assert peers[0, :, 0].tolist() == [3, 4, 1][: sizes[0]]
    assert torch.equal(peers[1], -peers[0])


# Steps 1 and 2


def test_representations_have_norm_one_and_come_in_the_order_asked_for() -> None:
    """p = diag(3, 4): (1, 1) -> (3, 4) / 5 and (2, 0) -> (1, 0)."""
    data = tiny.points([(2, 0), (5, 5), (1, 1)], [0, 1, 0], num_classes=2)
    ctx = context(data, public=range(3), lr=0.0)
    upload = FedMuscle().client_update(client([[3, 0], [0, 4]]), Request(torch.tensor([2, 0])), ctx)
    assert_close(upload.z, torch.tensor([[0.6, 0.8], [1.0, 0.0]]))


def test_representations_are_the_trained_models_in_eval_mode() -> None:
    torch.manual_seed(0)
    data = tiny.points([(i, 7 - i) for i in range(7)], [0, 1, 0, 1, 1, 0, 1], num_classes=2)
    model = tiny.moody_model(pixels=2, width=3, num_classes=2)
    one, before = Client(model, tiny.linear([[1, 2, 3], [4, 5, 6]])), model.head.weight.clone()
    ctx = context(data, public=range(7), batch_size=2, lr=0.1, eval_batch_size=3)
    upload = FedMuscle().client_update(one, Request(torch.arange(7)), ctx)
    assert not torch.equal(before, model.head.weight)
    model.eval()
    z = [
        one.projection(model.features(torch.tensor([[[[float(i)]], [[7.0 - i]]]])))
        for i in range(7)
    ]
    assert_close(upload.z, torch.cat([each / each.norm() for each in z]).detach())


def test_a_client_may_align_before_it_learns_its_task() -> None:
    first, last = FedMuscle(width=2), FedMuscle(width=2, order="align_first")
    for method, losses in ((first, [1, 1]), (last, [0, 1])):
        one, ctx = client(), context(lr=0.1)
        method.client_update(one, Request(TWO), ctx)
        seen = [len(ctx.losses)]
        method.align(one, Peers(TWO, TWO, []), ctx)
        assert [*seen, len(ctx.losses)] == losses
        assert one.model.head.weight.abs().sum() > 0


# Step 3


class Known:
    """A cohort whose client n always sends n, but for those that fail."""

    def __init__(self, ids: Sequence[int], rows: int, failing: Sequence[int] = ()) -> None:
        self.ids, self.rows, self.failing = ids, rows, failing
        self.requests: list[Request] = []
        self.sent: list[PerClient] = []

    def call(self, step: Any, message: Any) -> list[Reply[Any]]:
        if step.__name__ == "align":
            self.sent.append(message)
            return []
        self.requests.append(message)
        left = [n for n in self.ids if n not in self.failing]
        return [Reply(n, 1, Upload(torch.full((self.rows, 1), float(n)))) for n in left]


def heard(cohort: Known, client: int) -> list[int]:
    return sorted(int(z[0]) for z in cohort.sent[-1][client].z)


def server_context(samples: int = 6, round: int = 1) -> Any:
    data = tiny.points([(i, 0) for i in range(samples)], [0] * samples, num_classes=2)
    ctx = tiny.server_context(Fleet(("mlp",), 2), Task(2), num_clients=9)
    return replace(ctx, public=unlabelled(data, np.arange(samples), tiny.CPU), round=round)


def test_a_client_hears_of_others_who_are_drawn_anew_for_each() -> None:
    torch.manual_seed(0)
    cohort, method = Known(range(5), rows=6), FedMuscle(peers=2)
    met: set[tuple[int, int]] = set()
    for number in range(1, 31):
        method.round(Shelf(), cohort, server_context(round=number))
        for n in range(5):
            assert len(set(heard(cohort, n))) == 2
            met |= {(n, m) for m in heard(cohort, n)}
    assert met == {(n, m) for n in range(5) for m in range(5) if n != m}
    orders = [{id(message.order) for message in sent.values()} for sent in cohort.sent]
    assert all(len(each) == 1 for each in orders), "the same batches for all"
    assert len({tuple(sent[0].order.tolist()) for sent in cohort.sent}) > 20
    assert all(torch.equal(request.rows, torch.arange(6)) for request in cohort.requests)


def test_some_batches_of_the_public_samples_are_drawn_in_each_round() -> None:
    torch.manual_seed(0)
    cohort, method = Known(range(2), rows=4), FedMuscle(batches=2, batch=2, width=1)
    ctx = server_context()
    for _ in range(20):
        method.round(Shelf(), cohort, ctx)
    rows = [request.rows.tolist() for request in cohort.requests]
    assert all(each == sorted(set(each)) and len(each) == 4 for each in rows)
    assert {row for each in rows for row in each} == set(range(6))
    assert all(sorted(sent[1].order.tolist()) == [0, 1, 2, 3] for sent in cohort.sent)
    assert method.expected(0, ctx).z.shape == (4, 1)
    assert FedMuscle(batches=9, batch=2).expected(0, ctx).z.shape == (6, 256)


def test_who_fails_is_nobodys_peer_and_too_few_peers_are_all_there_are() -> None:
    cohort, shelf = Known([1, 4, 7], rows=6, failing=[4]), Shelf()
    FedMuscle(peers=3).round(shelf, cohort, server_context())
    assert sorted(cohort.sent[0]) == [1, 7]
    assert (heard(cohort, 1), heard(cohort, 7)) == ([7], [1])
    alone = Known([1], rows=6)
    FedMuscle(peers=3).round(shelf, alone, server_context(round=2))
    assert heard(alone, 1) == []
    assert shelf == Shelf()


def test_a_client_outside_the_round_may_be_a_peer_for_some_rounds() -> None:
    """With a staleness of 2, client 3 of round 1 is heard in rounds 2 and 3 but not in 4; what it
    sends anew in round 5 counts from there."""
    method, shelf = FedMuscle(peers=9, staleness=2), Shelf()
    chosen = [[3], [0], [1], [2], [3], [0, 3], [1]]
    found = []
    for number, ids in enumerate(chosen, start=1):
        cohort = Known(ids, rows=6)
        method.round(shelf, cohort, server_context(round=number))
        found.append(heard(cohort, ids[0]))
    assert found == [[], [3], [0, 3], [0, 1], [1, 2], [2, 3], [0, 3]]


# Whole runs


PUBLIC, WIDTH = 5, 3


def config(out: Path, method: str = "fedmuscle", **changes: Any) -> Config:
    hp = {"width": WIDTH, "batch": 2, **changes.pop("hp", {})} if method == "fedmuscle" else {}
    given: dict[str, Any] = {
        "clients": 4, "participation": 1.0, "rounds": 2, "backend": "local", "out": out, "hp": hp,
        "fleet": FleetConfig(("mlp",), 4), "train": TrainConfig(batch_size=4, lr=0.05),
        "checkpoint_every": 0,
    }  # fmt: skip
    return Config(method=method, **(given | changes))


def simulate(config: Config) -> tiny.Run:
    labels = [i % 3 for i in range(5 * config.clients + PUBLIC)]
    images = np.random.default_rng(0).integers(0, 256, (len(labels), 1, 8, 8), dtype=np.uint8)
    data = Dataset("noise", images, np.array(labels), len(labels), 3, (0.5,), (0.5,))
    dealt = tiny.deal(*(range(5 * k, 5 * k + 5) for k in range(config.clients)))
    public = np.arange(5 * config.clients, len(labels))
    return tiny.simulate(config, data, replace(dealt, public=public))


@pytest.mark.parametrize(
    ("hp", "rows", "peers"),
    [({"peers": 2}, PUBLIC, 2), ({"peers": 9}, PUBLIC, 3), ({"peers": 1, "batches": 2}, 4, 1)],
)
def test_the_ledger_has_what_goes_up_and_m_times_that_down(
    hp: dict[str, Any], rows: int, peers: int, tmp_path: Path
) -> None:
    seen = simulate(config(tmp_path / "run", hp=hp))
    for number in (1, 2):
        for n in range(4):
            assert seen.count("scalars", number, "up", client=n) == rows * WIDTH
            assert seen.count("scalars", number, "down", client=n) == peers * rows * WIDTH
    sizes = seen.count("bytes", 1, "down", field="z"), seen.count("bytes", 1, "up", field="z")
    assert sizes[0] / sizes[1] == pytest.approx(peers, rel=0.3)


def test_a_client_without_peers_learns_as_if_alone(tmp_path: Path) -> None:
    """The engine gives both the same weights and the same batches."""
    ours = simulate(config(tmp_path / "ours", clients=1))
    local = simulate(config(tmp_path / "local", "local", clients=1))
    model = ours.states[0]["model"]
    assert all(torch.equal(model[name], local.states[0]["model"][name]) for name in model)
    two = simulate(config(tmp_path / "two", clients=2))
    apart = simulate(config(tmp_path / "apart", "local", clients=2))
    assert not torch.equal(*(r.states[0]["model"]["head.weight"] for r in (two, apart)))


def test_a_round_in_which_clients_fail_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune = methods.fedmuscle.tune

    def fails(client: Client, ctx: ClientContext) -> None:
        if ctx.round == 2 or ctx.client_id == 1:
            raise RuntimeError("out of battery")
        tune(client, ctx)

    monkeypatch.setattr(methods.fedmuscle, "tune", fails)
    seen = simulate(config(tmp_path / "run", rounds=3, on_client_error="drop"))
    assert [row["dropped"] for row in seen.rounds] == [1, 4, 1]
    downs = [seen.count("scalars", number, "down") for number in (1, 2, 3)]
    assert downs == [3 * 2 * PUBLIC * WIDTH, 0, 3 * 2 * PUBLIC * WIDTH]


class Silent:
    """A console that says nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def test_clients_of_four_tasks_align_and_a_resumed_run_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYSIM_CACHE", str(tmp_path / "cache"))
    tasks = ("scenes_single", "scenes_multilabel", "scenes_segment", "scenes_text")
    fleet = FleetConfig(("mlp", "cnn5", "unet_slim", "word_bag"), feature_dim=16)
    scenes = DataConfig(
        "scenes", tasks=tasks, samples=40, public=6, partition="iid", text_length=12
    )
    given = {"data": scenes, "fleet": fleet, "participation": 0.5, "hp": {"staleness": 1}}
    whole = run(config(tmp_path / "whole", **given), console=Silent())  # type: ignore[arg-type]
    assert set(whole.summary["tasks"]) == set(tasks)
    downs = whole.rounds["scalars_down"].to_pylist()
    assert downs[1] > downs[0] == 2 * 6 * WIDTH, "the second round also hears of the first"
    first = config(tmp_path / "half", **(given | {"rounds": 1, "checkpoint_every": 1}))
    run(first, console=Silent())  # type: ignore[arg-type]
    again = run(first.replace({"rounds": 2}), console=Silent(), resume=True)  # type: ignore[arg-type]
    assert again.digest == whole.digest


# Refusals


@pytest.mark.parametrize(
    ("hp", "message"),
    [
        ({"peers": 0}, "--hp.peers must be at least 1, got 0"),
        ({"batch": 1}, "--hp.batch must be at least 2, got 1"),
        ({"width": 0}, "--hp.width must be at least 1, got 0"),
        ({"batches": -1}, "--hp.batches must be at least 0, got -1"),
        ({"staleness": -1}, "--hp.staleness must be at least 0, got -1"),
        ({"tau": 0.0}, "--hp.tau must be above 0, got 0.0"),
        ({"tau": 0.1}, "--hp.tau-peers is 0.15 and --hp.tau 0.1.* Try --hp.tau-peers 0.075"),
        ({"tau_peers": 0.0}, "--hp.tau-peers is 0.0"),
        ({"loss": "gramian", "tuples": "all", "peers": 5}, r"needs 32\^6.* --hp.tuples aligned"),
        ({"staleness": 1, "batches": 1}, "--hp.staleness .* Try --hp.batches 0"),
    ],
)
def test_what_cannot_be_is_refused(hp: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(FedMuscle(**hp), Fleet(("mlp",), 2), Task(2), "fedmuscle")


@pytest.mark.parametrize("hp", [{"loss": "pairwise", "tau": 0.1}, {"tuples": "all", "peers": 5}])
def test_what_a_loss_does_not_use_cannot_be_wrong(hp: dict[str, Any]) -> None:
    check(FedMuscle(**hp), Fleet(("mlp",), 2), Task(2), "fedmuscle")


def test_one_public_sample_is_too_few() -> None:
    with pytest.raises(ConfigError, match="one public sample .* Try --data.public 1000"):
        FedMuscle().init_server(server_context(samples=1))
