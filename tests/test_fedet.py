"""FedET's consensus, its diversity and its round, worked by hand."""

from dataclasses import replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor
from torch.testing import assert_close

import zoo
from methods.fedet import FedET, Server, Upload
from raysim import (
    Config,
    ConfigError,
    DataConfig,
    EvalConfig,
    Fleet,
    FleetConfig,
    Reply,
    Result,
    Task,
    ensemble,
    get_weights,
)
from raysim.data import Dataset
from raysim.data.public import unlabelled
from raysim.ensemble import Consensus, confidence, consensus, consensus_loss

LN3 = log(3)


# The consensus


def said(*models: list[list[float]]) -> Tensor:
    """The logits of each model, sample by sample."""
    return torch.tensor(models, dtype=torch.float32)


def test_the_surer_a_model_the_more_it_weighs() -> None:
    """Variances over classes: of (3, 0, 0), mean 1, it is (4 + 1 + 1)/3 = 2; of (0, 6, 0), mean 2,
    it is (4 + 16 + 4)/3 = 8; of (1, 1, 1), 0. So v = 1/5, 4/5, 0."""
    logits = said([[3, 0, 0]], [[0, 6, 0]], [[1, 1, 1]])
    assert_close(confidence(logits), torch.tensor([[0.2], [0.8], [0.0]]))


def test_consensus_and_those_who_disagree_by_hand() -> None:
    """A says (3, 0, 0), B (0, 6, 0), C (0, 0, 3): variances 2, 8, 2, so v = 1/6, 4/6, 1/6.

    All together: (1/2, 4, 1/2), so class 1. A and C disagree, and weigh 1/2 each among themselves:
    s' = (3/2, 0, 3/2).
    """
    found = consensus(said([[3, 0, 0]], [[0, 6, 0]], [[0, 0, 3]]))
    assert found.labels.tolist() == [1]
    assert_close(found.others, torch.tensor([[1.5, 0.0, 1.5]]))
    assert found.disputed.tolist() == [1]


def test_confidence_beats_numbers() -> None:
    """Two unsure models say 0, a sure one says 1: 1 wins, though 0 has the most votes."""
    found = consensus(said([[1, 0]], [[1, 0]], [[0, 4]]))
    assert found.labels.tolist() == [1]
    assert_close(found.others, torch.tensor([[1.0, 0.0]]))


def test_where_nobody_disagrees_nothing_is_disputed() -> None:
    """Each sample by itself: all agree on the first, not on the second."""
    found = consensus(said([[3, 0], [3, 0]], [[1, 0], [0, 1]]))
    assert found.labels.tolist() == [0, 0]
    assert found.disputed.tolist() == [0, 1]
    assert_close(found.others, torch.tensor([[0.0, 0.0], [0.0, 1.0]]))
    assert found.others.isfinite().all()


def test_all_may_disagree_with_what_they_say_together() -> None:
    """(4, 3, 0) and (0, 3, 4) are equally sure, and together say (2, 3, 2)."""
    found = consensus(said([[4, 3, 0]], [[0, 3, 4]]))
    assert found.labels.tolist() == [1]
    assert_close(found.others, torch.tensor([[2.0, 3.0, 2.0]]))
    assert found.disputed.tolist() == [1]


def test_models_that_tell_nothing_apart_weigh_the_same() -> None:
    logits = said([[1, 1]], [[7, 7]])
    assert_close(confidence(logits), torch.tensor([[0.5], [0.5]]))
    assert all(part.isfinite().all() for part in consensus(logits))


def test_one_participant_is_the_consensus() -> None:
    found = consensus(said([[0, 2], [5, 1]]))
    assert found.labels.tolist() == [1, 0]
    assert found.disputed.tolist() == [0, 0]


def test_log_softmax_before_the_variance_changes_nothing() -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(4, 50, 5)
    found, other = consensus(logits), consensus(logits.log_softmax(dim=2))
    assert found.disputed.sum() > 10, "or there is nothing to compare"
    assert_close(confidence(logits), confidence(logits.log_softmax(dim=2)))
    assert torch.equal(found.labels, other.labels)
    disputed = found.disputed.bool()
    assert_close(found.others.softmax(1)[disputed], other.others.softmax(1)[disputed])


def test_loss_by_hand() -> None:
    """Two samples of which F says (0, 0). Labels 0: CE = ln 2. Only the second is disputed: s' =
    (0, ln 3), so KL((1/4, 3/4) || (1/2, 1/2)) = 1/4 ln 1/2 + 3/4 ln 3/2, over two samples."""
    found = Consensus(
        torch.tensor([0, 0]), torch.tensor([[9.0, 0.0], [0.0, LN3]]), torch.tensor([0.0, 1.0])
    )
    distance = log(1 / 2) / 4 + 3 / 4 * log(3 / 2)
    loss = consensus_loss(torch.zeros(2, 2), found, diversity=4.0)
    assert float(loss) == pytest.approx(log(2) + 4 * distance / 2)


def test_gradient_of_the_loss_by_hand() -> None:
    """In z: softmax - label, and lambda (softmax z - softmax s'): (-1/2, 1/2) and 2 (1/4, -1/4)."""
    z = torch.zeros(1, 2, requires_grad=True)
    found = Consensus(torch.tensor([0]), torch.tensor([[0.0, LN3]]), torch.tensor([1.0]))
    consensus_loss(z, found, diversity=2.0).backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    assert_close(z.grad, torch.tensor([[-1 / 2 + 2 / 4, 1 / 2 - 2 / 4]]))


def test_public_samples_are_drawn_evenly() -> None:
    public = unlabelled(noise(5), np.arange(5), tiny.CPU)
    assert torch.bincount(ensemble.draw(public, 12), minlength=5).sort().values.tolist() == [
        2, 2, 2, 3, 3,
    ]  # fmt: skip
    assert len(ensemble.draw(public, 3).unique()) == 3


# The server


TASK = Task(2, channels=2, image_size=1)
FLEET = Fleet(("mlp", "cnn5"), 2)


def points() -> Dataset:
    return tiny.points([(1, 0), (0, 1)], [0, 0], num_classes=2)


def context(**changes: Any) -> Any:
    public = unlabelled(points(), np.arange(2), tiny.CPU)
    return replace(tiny.server_context(FLEET, TASK), public=public, **changes)


def upload(weight: list[list[float]]) -> Upload:
    head = torch.tensor(weight, dtype=torch.float32)
    return Upload({"head.weight": head, "head.bias": torch.zeros(2)})


@pytest.fixture
def linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds are one linear layer on the two features."""
    monkeypatch.setattr(zoo, "build", lambda *args: tiny.model(head=[[0, 0], [0, 0]]))
    monkeypatch.setattr(Fleet, "parameter_count", lambda *args: 6)


def test_a_round_by_hand(linear: None) -> None:
    """Public: (1, 0) and (0, 1). Two of kind mlp, 0 and 2, and client 1 of kind cnn5.

    Client 0 (1 sample):  [[4, 0], [0, 4]]  says (4, 0) and (0, 4): sure of 0, then of 1
    Client 1 (2 samples): [[0, 2], [2, 0]]  says (0, 2) and (2, 0)
    Client 2 (1 sample):  [[0, 0], [0, 0]]  says nothing

    Variances 4, 1, 0: v = 4/5, 1/5, 0: labels 0 and 1. Client 1 disagrees; so does client 2 on the
    second, for which 0 is as good as 1, but it weighs nothing. s' = (0, 2), (2, 0).

    The head of F starts at the mean (1 * A + 2 * B + 0)/4 = [[1, 1], [1, 1]]: both samples have the
    scores (1, 1), q = 1/2. One step of size 1 on the two samples, with lambda = 0:
    dz = (-1/2, 1/2) and (1/2, -1/2), over 2: W moves by [[1/4, -1/4], [-1/4, 1/4]].
    With p' = softmax(0, 2), lambda = 3 adds 3 (q - p') / 2 for the first, mirrored for the second.
    """
    replies = [
        Reply(0, 1, upload([[4, 0], [0, 4]])),
        Reply(1, 2, upload([[0, 2], [2, 0]])),
        Reply(2, 1, upload([[0, 0], [0, 0]])),
    ]
    for weight in (0.0, 3.0):
        method = FedET(server_lr=1.0, server_steps=1, server_batch_size=2, diversity=weight)
        server = method.init_server(context())
        method.server_update(server, replies, context())
        p = torch.tensor([0.0, 2.0]).softmax(0)[0].item()
        step = 1 / 4 - weight * (1 / 2 - p) / 2
        head = torch.tensor([[1 + step, 1 - step], [1 - step, 1 + step]])
        assert_close(server.model.head.weight.detach(), head)
        for kind in ("mlp", "cnn5"):
            assert_close(server.kinds[kind]["head.weight"], head)
        assert server.kinds["mlp"]["head.weight"].data_ptr() != server.model.head.weight.data_ptr()


def test_models_of_a_kind_are_averaged_but_for_the_head() -> None:
    """By samples (1 * 2 + 3 * 6)/4 = 5, equally 4; a kind that nobody is of keeps its weights."""
    data = noise(4)
    fleet = Fleet(("slim_resnet10", "slim_resnet14"), 128)
    ctx = replace(
        tiny.server_context(fleet, data.task), public=unlabelled(data, np.arange(4), tiny.CPU)
    )

    def constant(value: float) -> Upload:
        like = get_weights(zoo.build("slim_resnet10", data.task, 128))
        return Upload({layer: torch.full_like(t, value) for layer, t in like.items()})

    replies = [Reply(0, 1, constant(2.0)), Reply(2, 3, constant(6.0))]
    for weighting, expected in (("samples", 5.0), ("uniform", 4.0)):
        method = FedET(weighting=weighting, server_steps=1, server_batch_size=2)  # type: ignore[arg-type]
        server = method.init_server(ctx)
        before = {k: t.clone() for k, t in server.kinds["slim_resnet14"].items()}
        method.server_update(server, replies, ctx)
        small, large = server.kinds["slim_resnet10"], server.kinds["slim_resnet14"]
        assert small["trunk.1.0.conv1.weight"].unique().tolist() == [expected]
        assert torch.equal(large["trunk.1.0.conv1.weight"], before["trunk.1.0.conv1.weight"])
        assert torch.equal(large["head.weight"], small["head.weight"])
        assert torch.equal(large["head.weight"], server.model.head.weight)
        assert list(large) == list(before)


def test_what_models_say_is_said_in_evaluation_mode_and_by_each_itself() -> None:
    data = noise(300)  # more than one batch
    ctx = tiny.server_context(Fleet(("slim_resnet10", "mlp"), 128), data.task)
    public = unlabelled(data, np.arange(300), tiny.CPU)
    models = [zoo.build(name, data.task, 128) for name in ("slim_resnet10", "mlp", "mlp")]
    names = ["slim_resnet10", "mlp", "mlp"]
    found = ensemble.logits(names, [get_weights(model) for model in models], public, ctx)
    for said, model in zip(found, models, strict=True):
        with torch.no_grad():
            assert_close(said, model.eval()(public.images(torch.arange(300))), atol=1e-5, rtol=1e-5)


def test_the_server_learns_what_sure_models_know() -> None:
    torch.manual_seed(0)
    data = tiny.points([(5, i % 3) for i in range(20)] + [(i % 3, 5) for i in range(20)],
                       [0] * 40, num_classes=2)  # fmt: skip
    fleet = Fleet(("mlp",), 4)
    public = unlabelled(data, np.arange(40), tiny.CPU)
    ctx = replace(tiny.server_context(fleet, TASK), public=public)
    teacher = ctx.build_model("mlp")
    optimizer = torch.optim.Adam(teacher.parameters(), lr=0.05)
    y = torch.tensor([0] * 20 + [1] * 20)
    for _ in range(50):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(teacher(public.images(torch.arange(40))), y).backward()
        optimizer.step()
    method = FedET(server_lr=0.05, server_steps=60, server_batch_size=16)
    server = method.init_server(ctx)
    method.server_update(server, [Reply(0, 1, Upload(get_weights(teacher)))], ctx)
    with torch.no_grad():
        answers = server.model(public.images(torch.arange(40))).argmax(dim=1)
    assert answers.tolist() == y.tolist()


def test_all_kinds_start_with_the_head_of_the_server() -> None:
    ctx = tiny.server_context(Fleet(("mlp", "cnn5"), 8), Task(2))
    server = FedET().init_server(ctx)
    for kind in server.kinds.values():
        assert torch.equal(kind["head.weight"], server.model.head.weight)


def test_the_servers_model_is_the_fleets_largest_or_the_one_asked_for() -> None:
    ctx = tiny.server_context(Fleet(("slim_resnet10", "mlp", "slim_resnet14"), 128), Task(2))
    assert FedET().init_server(ctx).model.name == "mlp"
    asked = FedET(server_model="slim_resnet18").init_server(ctx)
    assert asked.model.name == "slim_resnet18"


# Whole runs


def noise(num_samples: int) -> Dataset:
    images = np.random.RandomState(0).randint(0, 256, (num_samples, 3, 16, 16), np.uint8)
    labels = np.arange(num_samples) % 2
    return Dataset("noise", images, labels, num_samples, 2, mean=(0.5,) * 3, std=(0.5,) * 3)


def config(out: Path, **hp: Any) -> Config:
    return Config(
        method="fedet", clients=2, participation=1.0, rounds=2, out=out,
        fleet=FleetConfig(("mlp", "slim_resnet10"), 128), data=DataConfig(public=4),
        hp={"server_steps": 2, "server_batch_size": 2, **hp},
    )  # fmt: skip


def test_clients_pay_for_their_own_models_only_and_the_server_is_tested_too(tmp_path: Path) -> None:
    data = noise(40)
    run = tiny.simulate(config(tmp_path), data)
    for client, name in enumerate(("mlp", "slim_resnet10")):
        size = zoo.parameter_count(name, data.task, 128)
        for number in (1, 2):
            assert run.count("scalars", number, "down", client=client) == size
            assert run.count("scalars", number, "up", client=client) == size
    assert all(state["large"] == [] for state in run.states.values())
    rows = Result.load(tmp_path).variants.to_pylist()
    assert {row["variant"] for row in rows} == {"server"}
    assert len(rows) == 2 * 2


def test_the_server_that_is_tested_is_the_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answers are those of the model that the server has after the round."""
    servers: list[Server] = []
    built = FedET.init_server

    def watched(method: FedET, ctx: Any) -> Server:
        servers.append(built(method, ctx))
        return servers[-1]

    monkeypatch.setattr(FedET, "init_server", watched)
    data = noise(40)
    shared = replace(config(tmp_path), eval=EvalConfig(data="global"))
    tiny.simulate(shared, data, replace(tiny.deal(range(10), range(10, 20)), public=np.arange(20)))
    x = (torch.tensor(data.images[:20]).float() / 255 - 0.5) / 0.5
    with torch.no_grad():
        right = servers[0].model.eval()(x).argmax(dim=1) == torch.tensor(data.labels[:20])
    last = [row for row in Result.load(tmp_path).variants.to_pylist() if row["round"] == 2]
    assert [row["accuracy"] for row in last] == [pytest.approx(right.float().mean().item())] * 2


def test_without_testing_it_nothing_of_the_server_goes_out(tmp_path: Path) -> None:
    tiny.simulate(config(tmp_path, test_server=False), noise(40))
    assert not (tmp_path / "variants.parquet").exists()


def test_evaluation_of_what_training_left_tests_small_models_alone(tmp_path: Path) -> None:
    tiny.simulate(replace(config(tmp_path), eval=EvalConfig(fresh=False)), noise(40))
    assert not (tmp_path / "variants.parquet").exists()


def test_without_a_public_set_it_is_refused(tmp_path: Path) -> None:
    lonely = replace(config(tmp_path / "out"), data=DataConfig())
    with pytest.raises(ConfigError, match=r"fedet distills .* Try --data.public 1000"):
        tiny.simulate(lonely, noise(40))


@pytest.mark.parametrize("wrong", [{"server_batch_size": 1}, {"server_steps": 0}])
def test_impossible_settings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"--hp\.server-batch-size 64 --hp\.server-steps 128"):
        FedET(**wrong).check(FLEET, TASK)  # type: ignore[arg-type]
    FedET(server_batch_size=2, server_steps=1).check(FLEET, TASK)


def test_an_unknown_model_is_refused_by_the_right_flag() -> None:
    with pytest.raises(ConfigError, match=r"--hp\.server-model"):
        FedET(server_model="resnet26x").check(FLEET, TASK)
