"""Whole rounds of FedProx, SCAFFOLD, FedNova and MOON, computed a second time from the papers.

Two clients of two nested models, with batch norm and small enough that rounding stays small (real
ResNets on batches of four make 1e-7 into 1e-3 in two steps). The scripts below know nothing of
raysim but the architectures, the data, who takes part and the weights that a run began with; they
compute in double precision. In the runs of one participant a round, one client is first chosen
late, and layers of the larger model may have no owner.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from reference import LR, WIDTH, Played
from torch import Tensor, nn
from torch.testing import assert_close

import zoo
from raysim import FleetConfig, Task, fleet, nested, schedule
from zoo import SplitModel
from zoo.split import Backbone

NESTED = ("slim_resnet10", "slim_resnet14")
EPOCHS = 2
ALL, HALF = 1.0, 0.5
N = [9, 6]
ROUNDS = {ALL: 2, HALF: 4}
Tensors = dict[str, Tensor]


def build(name: str, task: Task, feature_dim: int, mapping: str = "ap") -> SplitModel:
    """One block, or two."""
    blocks = [
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, eps=0.1), nn.Tanh())
        for _ in range(1 + NESTED.index(name))
    ]
    backbone = Backbone(
        nn.Sequential(nn.Flatten(), nn.Linear(task.image_size**2, 8)),
        nn.Sequential(*blocks),
        nn.Linear(8, feature_dim),
    )
    return SplitModel(name, backbone, feature_dim, task.num_classes)


@pytest.fixture(scope="module", autouse=True)
def small_models() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zoo, "build", build)
        fleet._like.cache_clear()
        nested._trainable_like.cache_clear()
        yield
    fleet._like.cache_clear()
    nested._trainable_like.cache_clear()


def play(
    method: str, out: Path, participation: float, train: dict[str, Any] | None = None, **hp: Any
) -> tuple[Played, list[list[int]]]:
    """A run, and who took part in each of its rounds."""
    rounds = ROUNDS[participation]
    config = reference.config(method, out, rounds=rounds, epochs=EPOCHS, **hp)
    run = reference.play(
        replace(
            config,
            participation=participation,
            fleet=FleetConfig(NESTED, WIDTH),
            train=replace(config.train, **(train or {})),
        )
    )
    cohorts = [sorted(schedule.cohort(0, t + 1, 2, participation)) for t in range(rounds)]
    if participation == HALF:
        assert {k for (k,) in cohorts} == {0, 1}, "both, one after the other"
        assert any(a == b for i, a in enumerate(cohorts) for b in cohorts[:i]), "somebody twice"
    return run, cohorts


def model_at(k: int, x: Tensors) -> SplitModel:
    """Client k's model with its layers of x."""
    model = zoo.build(NESTED[k], reference.dataset().task, WIDTH)
    model.double().load_state_dict({name: x[name] for name in model.state_dict()})
    return model


def batches(k: int) -> list[tuple[Tensor, Tensor]]:
    return [(x.double(), y) for x, y in reference.batches(k)] * EPOCHS


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    picked = torch.stack([z[c] for z, c in zip(logits, y.tolist(), strict=True)])
    return (logits.exp().sum(dim=1).log() - picked).mean()


def gradient(loss: Tensor, model: nn.Module) -> Tensors:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def copied(weights: Any) -> Tensors:
    return {
        name: tensor.detach().double().clone() if tensor.is_floating_point() else tensor.clone()
        for name, tensor in dict(weights).items()
    }


def averaged(x: Tensors, sent: dict[int, Tensors], n: list[int]) -> Tensors:
    """Of each layer, the mean over those who sent it; a counter from the first of them."""
    new = dict(x)
    for name in x:
        owners = [k for k in sent if name in sent[k]]
        if owners and x[name].is_floating_point():
            new[name] = sum(n[k] * sent[k][name] for k in owners) / sum(n[k] for k in owners)  # type: ignore[assignment]
        elif owners:
            new[name] = sent[owners[0]][name]
    return new


def assert_weights(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_close(
            found[name], tensor.to(found[name].dtype), atol=1e-6, rtol=0,
            msg=lambda text, n=name: f"{n} {text}",
        )  # fmt: skip


def assert_learned(run: Played) -> None:
    born, now = run.server_born["weights"], run.server["weights"]
    moved = [k for k in born if k.endswith("weight") and (born[k] - now[k]).abs().max() > 1e-3]
    assert len(moved) >= len([k for k in born if k.endswith("weight")]) - 1, moved


@pytest.mark.parametrize("participation", [ALL, HALF])
def test_rounds_of_fedprox(participation: float, tmp_path: Path) -> None:
    mu = 0.8
    run, cohorts = play("fedprox", tmp_path / "run", participation, mu=mu)
    x = copied(run.server_born["weights"])
    for cohort in cohorts:
        sent = {}
        for k in cohort:
            model = model_at(k, x)
            for image, label in batches(k):
                g = gradient(cross_entropy(model(image), label), model)
                with torch.no_grad():
                    for name, y in model.named_parameters():
                        y -= LR * (g[name] + mu * (y - x[name]))
            sent[k] = copied(model.state_dict())
        x = averaged(x, sent, N)
    assert_weights(run.server["weights"], x)
    assert_learned(run)


@pytest.mark.parametrize("participation", [ALL, HALF])
@pytest.mark.parametrize("correct", ["gradient", "update"])
def test_rounds_of_scaffold(correct: str, participation: float, tmp_path: Path) -> None:
    """Option II of the paper, as written."""
    run, cohorts = play("scaffold", tmp_path / "run", participation, correct=correct)
    x = copied(run.server_born["weights"])
    largest = model_at(1, x)
    c = {name: torch.zeros_like(p) for name, p in largest.named_parameters()}
    c_k = {k: {name: torch.zeros_like(tensor) for name, tensor in c.items()} for k in (0, 1)}
    for cohort in cohorts:
        sent, changes = {}, {}
        for k in cohort:
            model = model_at(k, x)
            for image, label in batches(k):
                g = gradient(cross_entropy(model(image), label), model)
                with torch.no_grad():
                    for name, y in model.named_parameters():
                        y -= LR * (g[name] - c_k[k][name] + c[name])
            steps = len(batches(k))
            changes[k] = {
                name: -c[name] + (x[name] - y.detach()) / (steps * LR)
                for name, y in model.named_parameters()
            }
            for name, change in changes[k].items():
                c_k[k][name] = c_k[k][name] + change
            sent[k] = copied(model.state_dict())
        x = averaged(x, sent, [1, 1])
        for name in c:
            clients = 2 if name in dict(model_at(0, x).named_parameters()) else 1
            for change in changes.values():
                c[name] = c[name] + change.get(name, torch.zeros(())) / clients
    assert_weights(run.server["weights"], x)
    assert_weights(run.server["control"], c)
    for k in (0, 1):
        assert_weights(
            run.clients[k]["control"], {name: c_k[k][name] for name in run.clients[k]["control"]}
        )
    assert_learned(run)
    assert max(float(tensor.abs().max()) for tensor in c.values()) > 0.1


@pytest.mark.parametrize("participation", [ALL, HALF])
@pytest.mark.parametrize(("momentum", "mu"), [(0.0, 0.0), (0.5, 0.0), (0.0, 0.8)])
def test_rounds_of_fednova(
    momentum: float, mu: float, participation: float, tmp_path: Path
) -> None:
    """The vector a of the paper written out: a_s says how often the gradient of step s is in
    x - y. Client 0 takes four steps, client 1 two."""
    run, cohorts = play(
        "fednova", tmp_path / "run", participation, train={"momentum": momentum}, mu=mu
    )
    x = copied(run.server_born["weights"])
    for cohort in cohorts:
        directions, statistics, distance = {}, {}, {}
        for k in cohort:
            model = model_at(k, x)
            velocity = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
            for image, label in batches(k):
                g = gradient(cross_entropy(model(image), label), model)
                with torch.no_grad():
                    for name, y in model.named_parameters():
                        velocity[name] = momentum * velocity[name] + g[name] + mu * (y - x[name])
                        y -= LR * velocity[name]
            tau = len(batches(k))
            if momentum:
                a = [(1 - momentum ** (tau - s)) / (1 - momentum) for s in range(tau)]
            else:
                a = [(1 - LR * mu) ** (tau - 1 - s) for s in range(tau)]
            distance[k] = sum(a)
            directions[k] = {
                name: (x[name] - y.detach()) / distance[k] for name, y in model.named_parameters()
            }
            statistics[k] = copied(model.named_buffers())
        new = averaged(x, statistics, N)
        for name in x:
            owners = [k for k in cohort if name in directions[k]]
            n = sum(N[k] for k in owners)
            if owners:
                effective = sum(N[k] / n * distance[k] for k in owners)
                new[name] = x[name] - effective * sum(
                    N[k] / n * directions[k][name] for k in owners
                )
        x = new
    assert_weights(run.server["weights"], x)
    assert_learned(run)


@pytest.mark.parametrize("participation", [ALL, HALF])
def test_rounds_of_moon(participation: float, tmp_path: Path) -> None:
    mu, temperature = 2.0, 0.3
    run, cohorts = play("moon", tmp_path / "run", participation, mu=mu, temperature=temperature)
    x = copied(run.server_born["weights"])
    last: dict[int, Tensors] = {}

    def similarity(a: Tensor, b: Tensor) -> Tensor:
        cosine = (a * b).sum(dim=1) / (a.norm(dim=1) * b.norm(dim=1))
        return (cosine / temperature).exp()

    for cohort in cohorts:
        sent = {}
        for k in cohort:
            model, w_g = model_at(k, x), model_at(k, x).eval()
            for image, label in batches(k):
                z = model.features(image)
                loss = cross_entropy(model.head(z), label)
                if k in last:
                    w_p = model_at(k, last[k]).eval()
                    near = similarity(z, w_g.features(image).detach())
                    far = similarity(z, w_p.features(image).detach())
                    loss = loss + mu * (-(near / (near + far)).log()).mean()
                g = gradient(loss, model)
                with torch.no_grad():
                    for name, y in model.named_parameters():
                        y -= LR * g[name]
            sent[k] = last[k] = copied(model.state_dict())
        x = averaged(x, sent, N)
    assert_weights(run.server["weights"], x)
    for k in (0, 1):
        assert_weights(run.clients[k]["model"], last[k])
    assert_learned(run)
