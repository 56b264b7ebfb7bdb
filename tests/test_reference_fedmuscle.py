"""Whole rounds of FedMuscle, computed a second time from the summary of the paper.

The script below knows nothing of raysim but the architectures, the data, the weights that a run
began with and the documented stream of the server's draws: those of round t come after seeding
torch with (seed, "round", t). Its loss is the definition, tuple by tuple.
"""

import hashlib
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import reference
import torch
from torch import Tensor, nn

from zoo import SplitModel

SHARES = [[0, 2, 4, 6, 1], [3, 7, 9, 5], [8, 12, 10, 11, 13, 14]]
PUBLIC = [1, 5, 8, 10, 14]
"""Two batches of two, and one sample that is left over."""
WIDTH, TAU, TAU_PEERS = 4, 0.2, 0.15


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two peers are the fewest that alpha weighs."""
    monkeypatch.setattr(reference, "SHARES", SHARES)
    monkeypatch.setattr(reference, "CLIENTS", (0, 1, 2))
    monkeypatch.setattr(reference, "MODELS", ("mlp", "cnn5", "mlp"))


def draw_as_the_server(round: int) -> None:
    key = f"0/round/{round}/-1".encode()
    seed = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
    torch.manual_seed(seed)


def represent(model: SplitModel, projection: nn.Linear, x: Tensor) -> Tensor:
    z = projection(model.features(x))
    return z / z.square().sum(dim=1, keepdim=True).sqrt()


def muscle(z: Tensor, peers: list[Tensor]) -> Tensor:
    """-log of the positive tuple's share, the mean over anchors."""
    size, gamma, losses = len(z), 1 / TAU_PEERS - 1 / TAU, []
    for i in range(size):
        weights = {}
        for j in itertools.product(range(size), repeat=len(peers)):
            chosen = [peer[row] for peer, row in zip(peers, j, strict=True)]
            pairs = [u @ v for u, v in itertools.combinations(chosen, 2)]
            alpha = torch.exp(-gamma * sum(pairs, torch.tensor(0.0)))
            weights[j] = alpha * torch.exp(z[i] @ torch.stack(chosen).sum(dim=0) / TAU)
        losses.append(-torch.log(weights[(i,) * len(peers)] / sum(weights.values())))
    return torch.stack(losses).mean()


@pytest.mark.usefixtures("three")
@pytest.mark.parametrize(("count", "rounds"), [(2, 1), (2, 2), (1, 2)])
def test_a_round_is_the_papers(count: int, rounds: int, tmp_path: Path) -> None:
    hp = {"peers": count, "batch": 2, "width": WIDTH, "align_lr": 0.05}
    config = reference.config("fedmuscle", tmp_path / "run", rounds=rounds, **hp)
    run = reference.play(replace(config, clients=3), public=PUBLIC)

    models = [reference.module(n, run.born[n]["model"]) for n in range(3)]
    projections = [reference.linear(run.born[n]["projection"]) for n in range(3)]
    images = torch.tensor(reference.dataset().images, dtype=torch.float32)[PUBLIC]
    public = (images / 255 - 0.5) / 0.5
    for round in range(1, rounds + 1):
        # 1. Two epochs of SGD on the client's own task.
        for n, model in enumerate(models):
            for _ in range(2):
                for x, y in reference.batches(n):
                    chances = torch.softmax(model(x), dim=1)[range(len(y)), y]
                    reference.descend(-chances.log().mean(), model, lr=0.1)
        # 2. All send their representations of the public samples.
        with torch.no_grad():
            sent = [represent(models[n], projections[n], public) for n in range(3)]
        # 3. The server draws samples (here all), their order, and the peers of each client.
        draw_as_the_server(round)
        torch.randperm(len(PUBLIC))
        order = torch.randperm(len(PUBLIC)).tolist()
        others = [[m for m in range(3) if m != n] for n in range(3)]
        drawn = [[peers[i] for i in torch.randperm(2).tolist()[:count]] for peers in others]
        # 4. A step on each batch of two; the fifth sample has nothing to be told from.
        for n, (model, projection) in enumerate(zip(models, projections, strict=True)):
            for some in (order[0:2], order[2:4]):
                z = represent(model, projection, public[some])
                loss = muscle(z, [sent[m][some] for m in drawn[n]])
                reference.descend(loss, model, projection, lr=0.05)

    for n in range(3):
        reference.assert_same(models[n], run.clients[n]["model"])
        reference.assert_same(projections[n], run.clients[n]["projection"])
        reference.assert_moved(run.born[n]["model"], run.clients[n]["model"])
        reference.assert_moved(run.born[n]["projection"], run.clients[n]["projection"])
