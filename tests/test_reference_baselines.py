"""Whole rounds of FedProto, FedGH, FedTGP and LG-FedAvg, computed a second time from the papers.

The scripts below know nothing of raysim but the architectures, the data, who takes part and the
weights that a run began with. In the runs of one participant a round, one client is first chosen
late.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from reference import CLASSES, WIDTH, Played
from torch import Tensor, nn
from torch.testing import assert_close

from raysim import schedule
from zoo import SplitModel

EPOCHS = 2
ALL, HALF = 1.0, 0.5
Prototypes = dict[int, Tensor]


def play(
    method: str, out: Path, participation: float, rounds: int, **hp: Any
) -> tuple[Played, list[SplitModel], list[list[int]]]:
    """A run, the models it began with, and who took part in each round."""
    config = reference.config(method, out, rounds=rounds, epochs=EPOCHS, **hp)
    run = reference.play(replace(config, participation=participation))
    cohorts = [sorted(schedule.cohort(0, t + 1, 2, participation)) for t in range(rounds)]
    if participation == HALF:
        assert all(len(cohort) == 1 for cohort in cohorts)
        assert cohorts[0] != cohorts[-1], "somebody comes late"
    return run, [reference.module(k, run.born[k]["model"]) for k in reference.CLIENTS], cohorts


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    picked = torch.stack([z[c] for z, c in zip(logits, y.tolist(), strict=True)])
    return (logits.exp().sum(dim=1).log() - picked).mean()


def train(k: int, model: SplitModel) -> None:
    for _ in range(EPOCHS):
        for x, y in reference.batches(k):
            reference.descend(cross_entropy(model(x), y), model)


def class_means(r: Tensor, y: Tensor) -> Prototypes:
    return {c: r[y == c].mean(dim=0).detach() for c in sorted(set(y.tolist()))}


def assert_models(run: Played, models: list[SplitModel], cohorts: list[list[int]]) -> None:
    for k, model in enumerate(models):
        assert any(k in cohort for cohort in cohorts)
        reference.assert_same(model, run.clients[k]["model"])
        reference.assert_moved(run.born[k]["model"], run.clients[k]["model"])


def rounds_of(participation: float) -> int:
    """With one participant a round, enough of them that both have been one."""
    for rounds in range(2, 20):
        first, last = (schedule.cohort(0, t, 2, participation) for t in (1, rounds))
        if participation == ALL or list(first) != list(last):
            return rounds
    raise AssertionError("the same client every time")


@pytest.mark.parametrize("participation", [ALL, HALF])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_rounds_of_lg_fedavg(weighting: str, participation: float, tmp_path: Path) -> None:
    run, models, cohorts = play(
        "lg_fedavg", tmp_path / "run", participation, rounds_of(participation), weighting=weighting
    )
    head = reference.linear(run.server_born["head"])
    n = [9, 6] if weighting == "samples" else [1, 1]
    for cohort in cohorts:
        for k in cohort:
            model = models[k]
            model.head.load_state_dict(head.state_dict())
            train(k, model)
        total = sum(n[k] for k in cohort)
        with torch.no_grad():
            head.weight.copy_(sum(n[k] * models[k].head.weight for k in cohort) / total)
            head.bias.copy_(sum(n[k] * models[k].head.bias for k in cohort) / total)
    assert_models(run, models, cohorts)
    reference.assert_same(head, run.server["head"])
    reference.assert_moved(run.server_born["head"], run.server["head"])


@pytest.mark.parametrize("participation", [ALL, HALF])
@pytest.mark.parametrize("server_epochs", [1, 3])
def test_rounds_of_fedgh(server_epochs: int, participation: float, tmp_path: Path) -> None:
    """At most five pairs, fewer than a batch: each epoch of the server is one step."""
    run, models, cohorts = play(
        "fedgh", tmp_path / "run", participation, rounds_of(participation),
        server_epochs=server_epochs, server_lr=0.2,
    )  # fmt: skip
    head = reference.linear(run.server_born["head"])
    for cohort in cohorts:
        pairs = []
        for k in cohort:
            model = models[k]
            model.head.load_state_dict(head.state_dict())
            train(k, model)
            x, y = reference.samples(k)
            pairs += list(class_means(model.features(x), y).items())
        p, c = torch.stack([p for _, p in pairs]), torch.tensor([c for c, _ in pairs])
        for _ in range(server_epochs):
            reference.descend(cross_entropy(head(p), c), head, lr=0.2)
    assert_models(run, models, cohorts)
    reference.assert_same(head, run.server["head"])
    reference.assert_moved(run.server_born["head"], run.server["head"])


def distance(r: Tensor, y: Tensor, known: Prototypes) -> Tensor:
    """Squared distances to the prototypes that exist, over batch size and width."""
    total = torch.zeros(())
    for one, c in zip(r, y.tolist(), strict=True):
        if c in known:
            total = total + (one - known[c]).square().sum()
    return total / r.numel()


@pytest.mark.parametrize("participation", [ALL, HALF])
@pytest.mark.parametrize("gather", ["after", "during", "last_epoch"])
def test_rounds_of_fedproto(gather: str, participation: float, tmp_path: Path) -> None:
    run, models, cohorts = play(
        "fedproto", tmp_path / "run", participation, rounds_of(participation), gather=gather,
        pull=2.0,
    )  # fmt: skip
    known: Prototypes = {}
    for cohort in cohorts:
        sent: list[Prototypes] = []
        for k in cohort:
            model, seen = models[k], []
            for _ in range(EPOCHS):
                for x, y in reference.batches(k):
                    r = model.features(x)
                    seen.append((r.detach(), y))
                    loss = cross_entropy(model.head(r), y) + 2 * distance(r, y, known)
                    reference.descend(loss, model)
            if gather == "after":
                x, y = reference.samples(k)
                seen = [(model.features(x), y)]
            elif gather == "last_epoch":
                seen = seen[len(reference.batches(k)) :]
            sent.append(
                class_means(torch.cat([r for r, _ in seen]), torch.cat([y for _, y in seen]))
            )
        known = {
            c: torch.stack([own[c] for own in sent if c in own]).mean(dim=0)
            for c in range(CLASSES)
            if any(c in own for own in sent)
        }
    assert_models(run, models, cohorts)
    assert run.server["classes"].tolist() == list(known)
    assert_close(run.server["prototypes"], torch.stack(list(known.values())), atol=1e-6, rtol=0)


@pytest.mark.parametrize("participation", [ALL, HALF])
@pytest.mark.parametrize("gather", ["after", "before"])
def test_rounds_of_fedtgp(gather: str, participation: float, tmp_path: Path) -> None:
    run, models, cohorts = play(
        "fedtgp", tmp_path / "run", participation, rounds_of(participation), gather=gather,
        server_epochs=3, server_lr=0.1,
    )  # fmt: skip
    layers = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    weights = run.server_born["generator"]
    layers[0].load_state_dict({"weight": weights["0.weight"]})
    for layer, place in ((layers[1], 1), (layers[2], 3)):
        names = ("weight", "bias")
        layer.load_state_dict({name: weights[f"{place}.{name}"] for name in names})

    def values() -> Tensor:
        return layers[2](layers[1](layers[0].weight).clamp(min=0))

    known: Prototypes = {}
    for cohort in cohorts:
        sent = []
        for k in cohort:
            model, (every_x, every_y) = models[k], reference.samples(k)
            before = class_means(model.features(every_x), every_y)

            for _ in range(EPOCHS):
                for x, y in reference.batches(k):
                    r = model.features(x)
                    loss = cross_entropy(model.head(r), y) + distance(r, y, known)
                    reference.descend(loss, model)
            after = class_means(model.features(every_x), every_y)
            sent.append(after if gather == "after" else before)
        pairs = [pair for own in sent for pair in own.items()]
        present = sorted({c for c, _ in pairs})
        means = {
            c: sum(p for o, p in pairs if o == c) / sum(o == c for o, _ in pairs) for c in present
        }
        gaps = [
            min(float((means[c] - means[other]).norm()) for other in present if other != c)
            for c in present
        ]
        delta = max(gaps)
        assert 0.01 < delta < 100, "between nothing and tau"
        for _ in range(3):
            t = values()
            losses = []
            for c, p in pairs:
                z = torch.stack(
                    [-((p - t[o]).square().sum().sqrt() + delta * (o == c)) for o in range(CLASSES)]
                )
                losses.append(cross_entropy(z.unsqueeze(0), torch.tensor([c])))
            reference.descend(torch.stack(losses).mean(), *layers, lr=0.1)
        known = dict(enumerate(values().detach()))
    assert_models(run, models, cohorts)
    for place, layer in zip((0, 1, 3), layers, strict=True):
        own = {name: run.server["generator"][f"{place}.{name}"] for name in layer.state_dict()}
        reference.assert_same(layer, own)
    assert_close(run.server["prototypes"], values().detach(), atol=1e-6, rtol=0)
