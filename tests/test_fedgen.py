"""FedGen's equations, worked by hand."""

from math import exp, log
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor
from torch.testing import assert_close

import methods.fedgen
from methods.fedgen import Download, FedGen, Server, Upload
from raysim import (
    ClientState,
    Config,
    ConfigError,
    Fleet,
    FleetConfig,
    Reply,
    Task,
    TrainConfig,
    get_weights,
)
from zoo.generator import Generator, diversity_loss, draw_labels

FLEET = Fleet(("mlp",), 2)
SERVER = tiny.server_context(FLEET, Task(2), num_clients=3)
LN3 = log(3)


def plain_generator(noise_dim: int = 1) -> Generator:
    """G(0) = (2, 0) and G(1) = (0, 4) in evaluation, whatever the noise."""
    generator = Generator(noise_dim, num_classes=2, hidden_dim=2, feature_dim=2)
    with torch.no_grad():
        generator.hidden.weight.copy_(torch.cat([torch.zeros(2, noise_dim), torch.eye(2)], dim=1))
        generator.hidden.bias.zero_()
        generator.norm.running_var.fill_(1 - generator.norm.eps)  # then the norm changes nothing
        generator.out.weight.copy_(torch.tensor([[2.0, 0.0], [0.0, 4.0]]))
        generator.out.bias.zero_()
    return generator


def hp(**changes: Any) -> FedGen:
    return FedGen(**{"noise_dim": 1, "hidden_dim": 2, **changes})


def message(counts: tuple[int, ...]) -> Download:
    """The head gives r the scores (0, r_2 ln 3 / 4): G(1) is of class 1 with probability 3/4."""
    head = {"weight": torch.tensor([[0.0, 0.0], [0.0, LN3 / 4]]), "bias": torch.zeros(2)}
    return Download(head, get_weights(plain_generator()), torch.tensor(counts))


# The generator


def test_representation_by_hand() -> None:
    made, noise = plain_generator().eval()(torch.tensor([1, 0, 1]))
    assert_close(made, torch.tensor([[0.0, 4.0], [2.0, 0.0], [0.0, 4.0]]))
    assert noise.shape == (3, 1)


def test_noise_is_uniform_between_0_and_1_and_is_what_the_representation_is_made_of() -> None:
    """With the identity behind the noise and nothing behind the labels, G(y) is the noise."""
    torch.manual_seed(0)
    generator = plain_generator(noise_dim=2).eval()
    with torch.no_grad():
        generator.hidden.weight.copy_(torch.cat([torch.eye(2), torch.zeros(2, 2)], dim=1))
        generator.out.weight.copy_(torch.eye(2))
    made, noise = generator(torch.zeros(2000, dtype=torch.int64))
    assert_close(made, noise)
    assert 0 <= noise.min() < 0.01
    assert 0.99 < noise.max() < 1
    assert noise.mean() == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ("noise", "classes", "parameters"),
    [(512, 100, 577_536), (32, 100, 331_776), (64, 10, 302_080)],
)
def test_parameters_are_those_of_the_specification(
    noise: int, classes: int, parameters: int
) -> None:
    """(z + C) h + h + 2 h + h d + d with h = d = 512."""
    generator = Generator(noise, classes, 512, 512)
    assert sum(parameter.numel() for parameter in generator.parameters()) == parameters


def test_diversity_loss_by_hand() -> None:
    """The two samples' noise is (1 + 9) / 2 = 5 apart, what was made of it (2 + 4) / 2 = 3. Of the
    four pairs two are a sample with itself: exp(-(15 + 15) / 4)."""
    noise = torch.tensor([[0.0, 0.0], [1.0, 3.0]])
    made = torch.tensor([[0.0, 0.0], [2.0, -4.0]])
    assert float(diversity_loss(made, noise)) == pytest.approx(exp(-7.5))
    assert float(diversity_loss(torch.zeros(2, 2), noise)) == 1


def test_labels_are_drawn_as_often_as_they_were_counted() -> None:
    torch.manual_seed(0)
    drawn = torch.bincount(draw_labels(torch.tensor([100, 0, 300]), 4000), minlength=3)
    assert drawn[1] == 0, "nobody has class 1"
    assert float(drawn[2]) / 4000 == pytest.approx(3 / 4, abs=0.03)


# The client


ONE = tiny.points([(1, 0)], [0], num_classes=2)


def learn(method: FedGen, counts: tuple[int, ...], **train: Any) -> tuple[float, ClientState]:
    client = ClientState(tiny.model(head=[[9, 9], [9, 9]], features=[[1, 0], [0, 1]]))
    ctx = tiny.client_context(ONE, **{"lr": 1.0, **train})
    tiny.update(method, client, message(counts), ctx)
    return ctx.losses[0], client


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_loss_by_hand(weight: float) -> None:
    """The head is the server's, so z = (0, 0) for x = (1, 0): CE = ln 2. Only class 1 was counted:
    what is generated is (0, 4), with the scores (0, ln 3), so its CE is ln 4/3.

    The gradients in z are (-1/2, 1/2) and a (1/4, -1/4). They meet (1, 0) and (0, 4) in the head;
    in the features there is only the real sample's, W^T (-1/2, 1/2) = (0, ln 3 / 8) with x.
    """
    loss, client = learn(hp(generated_weight=weight), counts=(0, 5))
    assert loss == pytest.approx(log(2) + weight * log(4 / 3))
    moved = torch.tensor([[1 / 2, -weight], [-1 / 2, LN3 / 4 + weight]])
    assert_close(client.model.head.weight.detach(), moved)
    assert_close(
        client.model.head.bias.detach(),
        torch.tensor([1 / 2 - weight / 4, -1 / 2 + weight / 4]),
    )
    assert_close(client.model.trunk.weight.detach(), torch.tensor([[1.0, 0.0], [-LN3 / 8, 1.0]]))


def test_before_anybody_was_counted_the_loss_is_cross_entropy_alone() -> None:
    loss, client = learn(hp(generated_weight=10), counts=(0, 0))
    assert loss == pytest.approx(log(2))
    assert_close(client.model.head.bias.detach(), torch.tensor([1 / 2, -1 / 2]))


def test_htfllibs_training_mode_normalizes_the_generated_batch() -> None:
    """All of the batch are of class 1, so the norm makes them all zeros, and G(1) is (0, 0)."""
    loss, _ = learn(hp(htfllib_compat=True), counts=(0, 5), batch_size=4)
    assert loss == pytest.approx(2 * log(2))


def test_a_generated_batch_of_one_has_no_batch_statistics() -> None:
    loss, _ = learn(hp(htfllib_compat=True), counts=(0, 5), batch_size=1)
    assert loss == pytest.approx(log(2) + log(4 / 3))


def test_generated_batches_have_the_batch_size_even_if_the_client_has_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = []

    def watched(counts: Tensor, size: int) -> Tensor:
        sizes.append(size)
        return draw_labels(counts, size)

    monkeypatch.setattr(methods.fedgen, "draw_labels", watched)
    learn(hp(), counts=(3, 5), batch_size=16, epochs=2)
    assert sizes == [16, 16]


def test_upload_is_the_trained_head_and_the_clients_counts() -> None:
    data = tiny.points([(1, 0), (0, 1), (1, 1)], [1, 1, 1], num_classes=2)
    client = ClientState(tiny.model(head=[[0, 0], [0, 0]]))
    upload = tiny.update(hp(), client, message((0, 0)), tiny.client_context(data, lr=1.0))
    assert upload.counts.tolist() == [0, 3]
    assert_close(upload.head, get_weights(client.model.head))
    assert not torch.equal(upload.head["bias"], torch.zeros(2))


# The server


def reply(client: int, samples: int, bias: float, counts: list[int]) -> Reply[Upload]:
    head = {"weight": torch.tensor([[bias, 0.0], [0.0, 0.0]]), "bias": torch.tensor([bias, 0.0])}
    return Reply(client, samples, Upload(head, torch.tensor(counts)))


def make_server() -> Server:
    return Server(
        tiny.linear([[0, 0], [0, 0]]), plain_generator(), torch.zeros(3, 2, dtype=torch.int64)
    )


def test_heads_are_averaged_by_samples() -> None:
    """(1 * 8 + 3 * 4) / 4 = 5."""
    server = make_server()
    replies = [reply(0, 1, 8.0, [1, 0]), reply(2, 3, 4.0, [1, 2])]
    hp().server_update(server, replies, SERVER)
    assert_close(server.head.bias, torch.tensor([5.0, 0.0]), check_dtype=False)
    assert_close(server.head.weight.detach(), torch.tensor([[5.0, 0.0], [0.0, 0.0]]))


def test_counts_are_those_of_all_clients_heard_of_so_far() -> None:
    """Clients 0 and 2, then 1 and again 2, whose counts are not added twice."""
    method, server = hp(server_steps=1), make_server()
    assert method.broadcast(server, [0], SERVER).counts.tolist() == [0, 0]
    method.server_update(server, [reply(0, 1, 1, [1, 0]), reply(2, 3, 1, [1, 2])], SERVER)
    assert method.broadcast(server, [0], SERVER).counts.tolist() == [2, 2]
    method.server_update(server, [reply(1, 4, 1, [4, 0]), reply(2, 3, 1, [1, 2])], SERVER)
    assert method.broadcast(server, [0], SERVER).counts.tolist() == [6, 2]


def test_first_step_of_the_generator_by_hand() -> None:
    """Only class 1 was counted, so all of a batch are alike and the norm gives its bias, here
    (1, 0) behind the ReLU: G(1) = (2, 0). The mean head has the scores (r_1, 0), its gradient in r
    is (p_0, 0) with p_0 > 0, and Adam's first step is lr times a sign: the first of out.bias and
    out.weight[0, 0] go down, the rest has no gradient and stays."""
    server = make_server()
    with torch.no_grad():
        server.generator.norm.bias.copy_(torch.tensor([1.0, 0.0]))
    replies = [reply(0, 1, 0.0, [0, 1]), reply(1, 1, 2.0, [0, 2])]
    hp(server_steps=1, server_batch_size=4, generator_lr=0.1).server_update(server, replies, SERVER)
    out = server.generator.out
    assert_close(out.bias.detach(), torch.tensor([-0.1, 0.0]))
    assert_close(out.weight.detach(), torch.tensor([[1.9, 0.0], [0.0, 4.0]]))
    assert server.generator.norm.num_batches_tracked == 1


def test_steps_and_lr_are_those_asked_for() -> None:
    server = make_server()
    hp(server_steps=7).server_update(server, [reply(0, 1, 1.0, [3, 3])], SERVER)
    assert server.generator.norm.num_batches_tracked == 7
    still = make_server()
    hp(generator_lr=0.0).server_update(still, [reply(0, 1, 1.0, [3, 3])], SERVER)
    assert_close(still.generator.out.weight, plain_generator().out.weight)


def test_generator_learns_what_the_heads_call_each_class_and_clients_get_it() -> None:
    torch.manual_seed(0)
    ctx = tiny.server_context(Fleet(("mlp",), 3), Task(3))
    method = FedGen(noise_dim=4, hidden_dim=8)
    server = method.init_server(ctx)
    first = get_weights(server.generator)["out.weight"].clone()
    head = {"weight": 5 * torch.eye(3), "bias": torch.zeros(3)}
    method.server_update(server, [Reply(0, 9, Upload(head, torch.tensor([3, 3, 3])))], ctx)

    sent = method.broadcast(server, [1], ctx)
    assert not torch.equal(sent.generator["out.weight"], first)
    received = Generator(4, 3, 8, 3).eval()
    received.load_state_dict(sent.generator)
    y = torch.arange(3).repeat(20)
    made, _ = received(y)
    assert made.argmax(dim=1).tolist() == y.tolist()


def test_htfllib_never_trains_the_generator() -> None:
    server = make_server()
    before = {name: tensor.clone() for name, tensor in get_weights(server.generator).items()}
    replies = [reply(0, 1, 8.0, [1, 0]), reply(2, 3, 4.0, [1, 2])]
    hp(htfllib_compat=True).server_update(server, replies, SERVER)
    assert_close(get_weights(server.generator), before)
    assert server.head.bias[0] == 5, "heads are averaged all the same"


def test_diversity_loss_spreads_what_is_generated() -> None:
    """Without it the generator has no reason to heed its noise; with it, it has."""

    def spread(weight: float) -> float:
        torch.manual_seed(0)
        method = FedGen(noise_dim=4, hidden_dim=8, diversity=weight, server_steps=50)
        server = method.init_server(SERVER)
        method.server_update(server, [reply(0, 1, 1.0, [1, 1])], SERVER)
        made, _ = server.generator(torch.zeros(50, dtype=torch.int64))
        return float(made.detach().std(dim=0).mean())

    assert spread(100.0) > 1.5 * spread(0.0)


@pytest.mark.parametrize("wrong", [{"server_batch_size": 1}, {"server_steps": 0}])
def test_impossible_settings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"--hp\.server-batch-size 32 --hp\.server-steps 100"):
        hp(**wrong).check(FLEET, Task(2))
    hp(server_batch_size=2, server_steps=1).check(FLEET, Task(2))


# Whole runs


def test_a_round_sends_heads_up_and_head_and_generator_down(tmp_path: Path) -> None:
    """Width 2, 3 classes, noise 1, hidden 2: s = 2*3 + 3 = 9 and P(G) = (1+3)*2 + 2 + 2*2 + 2*2 + 2
    = 20, which the norm's 2*2 + 1 statistics are not counted to."""
    data = tiny.points([(0, 1), (1, 0), (2, 2), (5, 1)], [0, 1, 1, 1], num_classes=3)
    config = Config(
        method="fedgen", clients=2, participation=1.0, rounds=2, out=tmp_path,
        fleet=FleetConfig(("mlp",), 2), train=TrainConfig(lr=0.001),
        hp={"noise_dim": 1, "hidden_dim": 2},
    )  # fmt: skip
    run = tiny.simulate(config, data, tiny.deal([0, 1], [2, 3]))
    for number in (1, 2):
        assert run.count("scalars", number, "up", client=0) == 9
        assert run.count("scalars", number, "down", client=0) == 9 + 20
        assert run.count("numbers", number, "down", field="generator") == 2 * (20 + 5)
        assert run.count("numbers", number, "up", field="counts") == 2 * 3
