"""A whole round of FML, computed a second time from the specification.

The script below knows nothing of raysim but the architectures, the data and the weights that a run
began with.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import reference
import torch
from torch import Tensor, nn


def log_softmax(logits: Tensor) -> Tensor:
    shifted = logits - logits.max(dim=1, keepdim=True).values
    return shifted - shifted.exp().sum(dim=1, keepdim=True).log()


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """The mean over samples of -log softmax(z)_y."""
    answers = log_softmax(logits)
    return -torch.stack([answers[i, int(c)] for i, c in enumerate(y)]).mean()


def distance(teacher: Tensor, student: Tensor) -> Tensor:
    """The mean over samples of sum_c q_c (ln q_c - ln p_c), q the teacher's answers, as given."""
    q = log_softmax(teacher.detach())
    return (q.exp() * (q - log_softmax(student))).sum(dim=1).mean()


def descend(loss: Tensor, model: nn.Module, clip: float) -> bool:
    """A step of SGD; a gradient longer than `clip` is shortened to it. Says whether it was."""
    parameters = list(model.parameters())
    grads = torch.autograd.grad(loss, parameters)
    norm = torch.cat([grad.flatten() for grad in grads]).norm()
    with torch.no_grad():
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.sub_(reference.LR * grad * min(1.0, clip / float(norm + 1e-6)))
    return bool(norm > clip)


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize(
    ("shared_model", "alpha", "beta", "clip"),
    [("mlp", 0.5, 0.5, None), ("cnn5", 0.3, 0.8, None), ("mlp", 0.2, 0.6, 0.3)],
)
def test_a_round_is_the_papers(
    shared_model: str, alpha: float, beta: float, clip: float | None, rounds: int, tmp_path: Path
) -> None:
    config = reference.config(
        "fml", tmp_path / "run", rounds, shared_model=shared_model, alpha=alpha, beta=beta
    )
    config = replace(config, train=replace(config.train, clip=clip))
    run = reference.play(config)

    own = [reference.module(k, run.born[k]["model"]) for k in reference.CLIENTS]
    g = {name: tensor.clone() for name, tensor in run.server_born["shared"].items()}
    longest = clip or 10.0  # the norm to which each model's gradient is clipped
    clipped: list[bool] = []
    for _ in range(rounds):
        trained = []
        for k, h in enumerate(own):
            # 1. The client's copy of the shared model becomes the server's.
            copy = reference.built(shared_model, g)
            # 2. Two epochs in which each model learns from the labels and from the other.
            for _ in range(2):
                for x, y in reference.batches(k):
                    z_h, z_g = h(x), copy(x)
                    loss_h = alpha * cross_entropy(z_h, y) + (1 - alpha) * distance(z_g, z_h)
                    loss_g = beta * cross_entropy(z_g, y) + (1 - beta) * distance(z_h, z_g)
                    clipped.append(descend(loss_h, h, longest))
                    clipped.append(descend(loss_g, copy, longest))
            # 3. It uploads its copy.
            trained.append(copy.state_dict())
        # 4. The server's becomes their mean, whatever the clients' sizes.
        g = {name: (trained[0][name] + trained[1][name]) / 2 for name in g}

    assert any(clipped) == (clip is not None)
    for k, h in enumerate(own):
        reference.assert_same(h, run.clients[k]["model"])
        reference.assert_moved(run.born[k]["model"], run.clients[k]["model"])
    reference.assert_same(reference.built(shared_model, g), run.server["shared"])
    reference.assert_moved(run.server_born["shared"], run.server["shared"])
