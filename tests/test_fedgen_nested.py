"""FedGen over nested models: its equations, worked by hand."""

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
from methods.fedgen_nested import Download, FedGen_Nested, Server, Upload
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
)
from raysim.data import Dataset
from zoo import generator as generators
from zoo.generator import Generator, ensemble_loss, teach

FLEET = Fleet(("mlp",), 2)
LN3 = log(3)


def plain_generator() -> Generator:
    """G(0) = (2, 0) and G(1) = (0, 4) in evaluation, whatever the noise."""
    generator = Generator(1, num_classes=2, hidden_dim=2, feature_dim=2)
    with torch.no_grad():
        generator.hidden.weight.copy_(torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]))
        generator.hidden.bias.zero_()
        generator.norm.running_var.fill_(1 - generator.norm.eps)  # then the norm changes nothing
        generator.out.weight.copy_(torch.tensor([[2.0, 0.0], [0.0, 4.0]]))
        generator.out.bias.zero_()
    return generator


def hp(**changes: Any) -> FedGen_Nested:
    return FedGen_Nested(**{"noise_dim": 1, "hidden_dim": 2, **changes})


# The client


def message(known: tuple[bool, ...]) -> Download:
    """A linear model that gives r the scores (0, r_2 ln 3 / 4): G(1) is of class 1 with probability
    3/4, everything without a second feature with 1/2."""
    model = {"head.weight": torch.tensor([[0.0, 0.0], [0.0, LN3 / 4]]), "head.bias": torch.zeros(2)}
    return Download(model, get_weights(plain_generator()), torch.tensor(known))


def learn(
    method: FedGen_Nested, known: tuple[bool, ...], label: int, round: int = 1, **train: Any
) -> tuple[float, ClientState, Upload]:
    """One step on the sample (1, 0)."""
    client = ClientState(tiny.model(head=[[9, 9], [9, 9]]))
    data = tiny.points([(1, 0)], [label], num_classes=2)
    ctx = tiny.client_context(data, **{"lr": 1.0, **train})
    object.__setattr__(ctx, "round", round)
    upload = tiny.update(method, client, message(known), ctx)
    return ctx.losses[0], client, upload


def test_loss_of_a_known_class_by_hand() -> None:
    """x = (1, 0) is of class 1; z = (0, 0), so CE = ln 2. Only class 1 is known: what is generated
    is (0, 4), with the scores (0, ln 3): its CE is ln 4/3, and as p = (1/4, 3/4),
    KL(p || (1/2, 1/2)) = 1/4 ln 1/2 + 3/4 ln 3/2.

    The gradients in z: CE (1/2, -1/2), at x; a (1/4, -1/4), at (0, 4); KL b (q - p) = b (1/4, -1/4)
    at x, and none at what is generated, for p is a constant.
    """
    a, b = 3.0, 2.0
    method = hp(generated_weight=a, distill_weight=b)
    loss, client, _ = learn(method, known=(False, True), label=1)
    distance = log(1 / 2) / 4 + 3 / 4 * log(3 / 2)
    assert loss == pytest.approx(log(2) + a * log(4 / 3) + b * distance)
    at_x, made = 1 / 2 + b / 4, a / 4 * 4
    moved = torch.tensor([[-at_x, -made], [at_x, LN3 / 4 + made]])
    assert_close(client.model.head.weight.detach(), moved)
    assert_close(client.model.head.bias.detach(), torch.tensor([-at_x - a / 4, at_x + a / 4]))


def test_a_sample_of_an_unknown_class_has_no_kl() -> None:
    loss, _, _ = learn(hp(distill_weight=1e6, generated_weight=1.0), (False, True), label=0)
    assert loss == pytest.approx(log(2) + log(4 / 3))


def test_before_any_class_is_known_the_loss_is_cross_entropy_alone() -> None:
    loss, _, _ = learn(hp(), known=(False, False), label=1)
    assert loss == pytest.approx(log(2))


def test_kl_counts_each_sample_the_same_known_or_not() -> None:
    """Of two samples one is of the known class: half of its KL."""
    client = ClientState(tiny.model(head=[[9, 9], [9, 9]]))
    ctx = tiny.client_context(tiny.points([(1, 0), (1, 0)], [0, 1], num_classes=2))
    method = hp(generated_weight=0.0, distill_weight=1.0)
    tiny.update(method, client, message((False, True)), ctx)
    distance = log(1 / 2) / 4 + 3 / 4 * log(3 / 2)
    assert ctx.losses[0] == pytest.approx(log(2) + distance / 2)


@pytest.mark.parametrize(
    ("round", "weight"), [(1, 10.0), (2, 9.8), (11, 10 * 0.98**10), (1000, 1e-4)]
)
def test_weights_shrink_to_a_floor(round: int, weight: float) -> None:
    method = hp(generated_weight=10.0, distill_weight=0.0)
    loss, _, _ = learn(method, known=(False, True), label=0, round=round)
    assert loss - log(2) == pytest.approx(weight * log(4 / 3), rel=1e-4, abs=1e-7)


def test_generated_labels_are_uniform_over_known_classes_and_fill_a_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: list[Tensor] = []
    real = Generator.forward

    def watched(generator: Generator, y: Tensor) -> tuple[Tensor, Tensor]:
        assert not generator.training
        drawn.append(y)
        return real(generator, y)

    monkeypatch.setattr(Generator, "forward", watched)
    torch.manual_seed(0)
    learn(hp(distill_weight=0.0), known=(True, True), label=0, batch_size=2000)
    assert len(drawn[0]) == 2000, "though the client has one sample"
    assert float(drawn[0].float().mean()) == pytest.approx(0.5, abs=0.05)
    assert len(drawn) == 2, "for y~ and for the KL"


def test_upload_is_the_model_and_the_clients_counts() -> None:
    _, client, upload = learn(hp(), known=(False, True), label=1)
    assert upload.counts.tolist() == [0, 1]
    assert_close(upload.model, get_weights(client.model))


# The generator's lesson


def test_heads_judge_by_their_share_of_the_class() -> None:
    """Two heads and two samples of class 0 and 1, both made as (1, 0).

    Head A scores (ln 3, 0): CE = ln 4/3 for class 0, ln 4 for class 1. Head B scores (0, 0): ln 2.
    A has 3 of the 4 samples of class 0 and all of class 1:
    A: (3/4 ln 4/3 + ln 4)/2, B: (1/4 ln 2 + 0)/2.
    """
    made, y = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1])
    a = torch.tensor([[LN3, 0.0], [0.0, 0.0]]), torch.zeros(2)
    b = torch.zeros(2, 2), torch.zeros(2)
    found = ensemble_loss(made, y, [a, b], torch.tensor([[3, 2], [1, 0]]))
    expected = (3 / 4 * log(4 / 3) + log(4)) / 2 + log(2) / 8
    assert float(found) == pytest.approx(expected)


def test_a_class_that_nobody_has_weighs_nothing() -> None:
    head = torch.zeros(2, 2), torch.zeros(2)
    found = ensemble_loss(torch.zeros(1, 2), torch.tensor([1]), [head], torch.tensor([[3, 0]]))
    assert float(found) == 0


def test_first_step_of_the_generator_by_hand() -> None:
    """Only class 1 is present, so all of a batch are alike and the norm gives its bias, here (1, 0)
    behind the ReLU: G(1) = (2, 0). The head has the scores (r_1, 0), so r_1 should fall; Adam's
    first step is the step size: out.bias[0] and out.weight[0, 0] fall by it. Others have no
    gradient but weight decay, by which those that are above 0 fall too."""
    generator = plain_generator()
    with torch.no_grad():
        generator.norm.bias.copy_(torch.tensor([1.0, 0.0]))
    head = torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.zeros(2)
    present = torch.tensor([False, True])
    counts = torch.tensor([[0, 5]])
    teach(
        generator, [head], counts, present, diversity=0.0, lr=0.1, steps=1, batch_size=4
    )  # fmt: skip
    assert_close(generator.out.bias.detach(), torch.tensor([-0.1, 0.0]))
    assert_close(generator.out.weight.detach(), torch.tensor([[1.9, 0.0], [0.0, 3.9]]))
    assert generator.norm.num_batches_tracked == 1


def test_diversity_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        generators, "fit", lambda loss, *args, data, **rest: seen.append(loss(*data).detach())
    )
    generator, head = plain_generator().eval(), (torch.zeros(2, 2), torch.zeros(2))
    rest = torch.tensor([[5, 5]]), torch.tensor([False, True])
    for diversity in (0.0, 3.0):
        teach(generator, [head], *rest, diversity=diversity, lr=0.1, steps=1, batch_size=2)
    # all that is made is (0, 4), however different the noise: exp(0) = 1
    assert float(seen[1] - seen[0]) == pytest.approx(3 * exp(0))
    assert float(seen[0]) == pytest.approx(log(2))


# The server


def reply(client: int, samples: int, bias: float, counts: list[int]) -> Reply[Upload]:
    model = {"head.weight": torch.full((2, 2), bias), "head.bias": torch.tensor([bias, 0.0])}
    return Reply(client, samples, Upload(model, torch.tensor(counts)))


def make_server() -> Server:
    weights = {"head.weight": torch.zeros(2, 2), "head.bias": torch.zeros(2)}
    return Server(weights, {"mlp": list(weights)}, plain_generator(), torch.zeros(2).bool())


CTX = tiny.server_context(FLEET, Task(2), num_clients=3)


def test_models_are_averaged_and_what_was_learned_is_known() -> None:
    """(1 * 8 + 3 * 4)/4 = 5. Two samples of class 1 are enough, one of class 0 is not."""
    server = make_server()
    hp().server_update(server, [reply(0, 1, 8.0, [1, 0]), reply(2, 3, 4.0, [1, 2])], CTX)
    assert_close(server.weights["head.bias"], torch.tensor([5.0, 0.0]))
    assert server.known.tolist() == [False, True]
    assert server.generator.norm.num_batches_tracked == 50
    hp().server_update(server, [reply(1, 1, 8.0, [2, 0])], CTX)
    assert server.known.tolist() == [True, True], "what is known stays so"
    assert hp().broadcast(server, [0], CTX).known.tolist() == [True, True]


def test_uniform_weighting_and_least() -> None:
    server = make_server()
    replies = [reply(0, 1, 8.0, [1, 0]), reply(2, 3, 4.0, [1, 2])]
    hp(weighting="uniform", least=1).server_update(server, replies, CTX)
    assert_close(server.weights["head.bias"], torch.tensor([6.0, 0.0]))
    assert server.known.tolist() == [True, True]


def test_without_enough_of_any_class_the_generator_stays() -> None:
    server = make_server()
    hp().server_update(server, [reply(0, 1, 8.0, [1, 0]), reply(1, 1, 8.0, [0, 1])], CTX)
    assert not server.known.any()
    assert_close(get_weights(server.generator), get_weights(plain_generator()))
    assert server.weights["head.bias"][0] == 8, "models are averaged all the same"


def test_the_generator_learns_what_heads_call_a_class() -> None:
    torch.manual_seed(0)
    ctx = tiny.server_context(Fleet(("mlp",), 3), Task(3))
    method = FedGen_Nested(noise_dim=4, hidden_dim=16, generator_lr=0.02)
    server = method.init_server(ctx)
    like = {layer: torch.zeros_like(t) for layer, t in server.weights.items()}
    upload = like | {"head.weight": 5 * torch.eye(3)}
    method.server_update(server, [Reply(0, 9, Upload(upload, torch.tensor([3, 3, 3])))], ctx)
    y = torch.arange(3).repeat(20)
    made, _ = server.generator.eval()(y)
    assert made.argmax(dim=1).tolist() == y.tolist()


def test_its_step_size_shrinks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def watched(*args: Any, lr: float, **rest: Any) -> None:
        seen.append(lr)

    monkeypatch.setattr("methods.fedgen_nested.teach", watched)
    for number in (1, 3):
        object.__setattr__(ctx := tiny.server_context(FLEET, Task(2), 3), "round", number)
        hp(generator_lr=0.5).server_update(make_server(), [reply(0, 1, 1.0, [2, 2])], ctx)
    assert seen == [0.5, pytest.approx(0.5 * 0.98**2)]


@pytest.mark.parametrize("wrong", [{"server_batch_size": 1}, {"server_steps": 0}])
def test_impossible_settings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"--hp\.server-batch-size 128 --hp\.server-steps 50"):
        hp(**wrong).check(FLEET, Task(2))
    hp(server_batch_size=2, server_steps=1).check(FLEET, Task(2))


def test_models_that_are_not_nested_are_refused() -> None:
    with pytest.raises(ConfigError, match="fedgen_nested averages whole models"):
        hp().check(Fleet(("cnn1", "cnn2"), 128), Task(2))


# Whole runs


def noise(num_samples: int) -> Dataset:
    images = np.random.RandomState(0).randint(0, 256, (num_samples, 3, 16, 16), np.uint8)
    labels = np.arange(num_samples) % 2
    return Dataset("noise", images, labels, num_samples, 2, mean=(0.5,) * 3, std=(0.5,) * 3)


def test_models_go_both_ways_and_the_generator_down(tmp_path: Path) -> None:
    """P(G) = (64 + 2) * 512 + 512 + 2 * 512 + 512 * 128 + 128 for this width."""
    small, large = "slim_resnet10", "slim_resnet14"
    config = Config(
        method="fedgen_nested", clients=2, participation=1.0, rounds=2, out=tmp_path,
        fleet=FleetConfig((small, large)), hp={"server_steps": 1, "server_batch_size": 2},
    )  # fmt: skip
    data = noise(8)
    run = tiny.simulate(config, data, tiny.deal([0, 1, 2, 3], [4, 5, 6, 7]))
    generator = 66 * 512 + 512 + 2 * 512 + 512 * 128 + 128
    for number in (1, 2):
        for client, name in enumerate((small, large)):
            size = zoo.parameter_count(name, data.task)
            assert run.count("scalars", number, "up", client=client) == size
            assert run.count("scalars", number, "down", client=client) == size + generator
            assert run.count("numbers", number, "up", client=client, field="counts") == 2


def test_the_generator_of_the_specification_has_302_080_parameters() -> None:
    ctx = tiny.server_context(Fleet(("resnet10",), 512), Task(10))
    generator = FedGen_Nested().build_generator(ctx)
    assert sum(p.numel() for p in generator.parameters()) == 302_080


def test_nested_layers_are_averaged_over_those_who_have_them() -> None:
    fleet = Fleet(("slim_resnet10", "slim_resnet14"), 128)
    ctx = tiny.server_context(fleet, Task(2))
    server = FedGen_Nested(server_steps=1).init_server(ctx)

    def upload(name: str, value: float) -> Upload:
        like: Weights = get_weights(zoo.build(name, Task(2), 128))
        model = {layer: torch.full_like(t, value) for layer, t in like.items()}
        return Upload(model, torch.tensor([2, 2]))

    replies = [Reply(k, 1, upload(fleet.models[k], 1.0 + 2 * k)) for k in (0, 1)]
    FedGen_Nested(server_steps=1).server_update(server, replies, ctx)
    assert server.weights["stem.0.weight"].unique().tolist() == [2]
    assert server.weights["trunk.2.1.conv1.weight"].unique().tolist() == [3]
