"""A whole round of FedRE, computed a second time from the paper's text.

The script below knows nothing of raysim but the architectures, the data and the weights that a run
began with. Its random weights come from the documented stream: whatever a client draws in its step
of round t is drawn after seeding torch with (seed, "client_update", t, client).
"""

import hashlib
from pathlib import Path

import pytest
import reference
import torch
from torch import Tensor


def stream(seed: int, round: int, client: int) -> int:
    key = f"{seed}/client_update/{round}/{client}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def weights_of(mechanism: str, classes: list[int], round: int, client: int) -> list[float]:
    if mechanism == "vap":
        return [1 / len(classes)] * len(classes)
    # Fixed batches and no augmentation: the weights are the first thing a client draws.
    torch.manual_seed(stream(0, round, client))
    u = torch.rand(len(classes)).tolist()
    return [one / sum(u) for one in u]


def soft_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    shifted = logits - logits.max()
    return -(target * (shifted - shifted.exp().sum().log())).sum()


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("mechanism", ["rap", "vap"])
def test_a_round_is_the_papers(mechanism: str, rounds: int, tmp_path: Path) -> None:
    settings = {} if mechanism == "rap" else {"mechanism": mechanism}
    config = reference.config("fedre", tmp_path / "run", rounds=rounds, **settings)
    run = reference.play(config)

    models = [reference.module(k, run.born[k]["model"]) for k in reference.CLIENTS]
    one_hot = torch.eye(reference.CLASSES)
    head = reference.linear(run.server_born["head"])
    for round in range(1, rounds + 1):
        pairs = []
        for k, model in enumerate(models):
            # 1. The client's head becomes the server's.
            model.head.load_state_dict(head.state_dict())
            # 2. Two epochs of SGD on cross-entropy, base and head.
            for _ in range(2):
                for x, y in reference.batches(k):
                    logits = model(x)
                    losses = [
                        soft_cross_entropy(z, one_hot[c]) for z, c in zip(logits, y, strict=True)
                    ]
                    reference.descend(torch.stack(losses).mean(), model, lr=0.1)
            # 3. The mean representation of each class it has, entangled with its label.
            x, y = reference.samples(k)
            classes = sorted(set(y.tolist()))
            p = weights_of(mechanism, classes, round, k)
            with torch.no_grad():
                features = model.features(x)
            r, label = torch.zeros(reference.WIDTH), torch.zeros(reference.CLASSES)
            for weight, c in zip(p, classes, strict=True):
                r += weight * features[y == c].mean(dim=0)
                label[c] = weight
            pairs.append((r, label))
        # 4. One step of SGD of the server's head on the sum of the pairs' soft cross-entropies.
        losses = [soft_cross_entropy(head(r), label) for r, label in pairs]
        reference.descend(torch.stack(losses).sum(), head, lr=0.01)

    for k, model in enumerate(models):
        reference.assert_same(model, run.clients[k]["model"])
        reference.assert_moved(run.born[k]["model"], run.clients[k]["model"])
    reference.assert_same(head, run.server["head"])
    reference.assert_moved(run.server_born["head"], run.server["head"])
