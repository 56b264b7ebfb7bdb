"""Whole rounds of HeteroFL, computed a second time from the specification.

The script below knows nothing of raysim but the data and the weights that a run began with: the
network, a small ResNet, is a function of named tensors, and a sub-model is what `w[:m, :n]` leaves
of them.
"""

from dataclasses import replace
from math import ceil
from pathlib import Path

import pytest
import reference
import torch
import torch.nn.functional as F
from small_zoo import zoo_of
from torch import Tensor, nn
from torch.testing import assert_close

from raysim import FleetConfig, Task, Weights
from zoo import SplitModel
from zoo.resnet import Block
from zoo.split import Backbone

RATES = (1.0, 0.3)


def first(name: str, w: Tensor, rate: float) -> Tensor:
    """The part of a weight at a rate."""
    if name.endswith("num_batches_tracked") or name == "head.bias":
        return w
    outputs = ceil(rate * w.shape[0])
    if name == "head.weight":
        return w[:, : ceil(rate * w.shape[1])]
    if name == "stem.0.weight" or w.dim() == 1:
        return w[:outputs]
    return w[:outputs, : ceil(rate * w.shape[1])]


def network(w: Weights, x: Tensor, rate: float) -> Tensor:
    """In training; what a convolution gives is divided by the rate."""

    def norm(name: str, x: Tensor) -> Tensor:
        w[f"{name}.num_batches_tracked"] += 1
        mean, var = w[f"{name}.running_mean"], w[f"{name}.running_var"]
        gain, shift = w[f"{name}.weight"], w[f"{name}.bias"]
        return F.batch_norm(x / rate, mean, var, gain, shift, training=True, momentum=0.1)

    x = F.relu(norm("stem.1", F.conv2d(x, w["stem.0.weight"], padding=1)))
    out = F.relu(norm("trunk.0.bn1", F.conv2d(x, w["trunk.0.conv1.weight"], stride=2, padding=1)))
    out = norm("trunk.0.bn2", F.conv2d(out, w["trunk.0.conv2.weight"], padding=1))
    shortcut = F.conv2d(x, w["trunk.0.shortcut.0.weight"], stride=2)
    x = F.relu(out + norm("trunk.0.shortcut.1", shortcut))
    return x.mean(dim=(2, 3)) @ w["head.weight"].T + w["head.bias"]


def small_resnet(task: Task) -> SplitModel:
    stem = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU())
    neck = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    backbone = Backbone(stem, nn.Sequential(Block(6, 9, stride=2)), neck)
    return SplitModel("small", backbone, 9, task.num_classes)


def learned(name: str) -> bool:
    return "running" not in name and "num_batches" not in name


@pytest.mark.parametrize(("rounds", "clip"), [(1, None), (2, None), (1, 0.5)])
def test_a_round_is_the_papers(rounds: int, clip: float | None, tmp_path: Path) -> None:
    config = reference.config("heterofl", tmp_path / "run", rounds, rates=RATES)
    config = replace(
        config, fleet=FleetConfig(("slim_resnet10",)), train=replace(config.train, clip=clip)
    )
    with zoo_of(small_resnet):
        run = reference.play(config)
    longest = clip or 1.0

    w = {name: tensor.clone() for name, tensor in run.server_born["weights"].items()}
    lengths: list[float] = []
    measured: list[Weights] = [{}, {}]  # batch-norm statistics of each rate, whose client is alone
    for _ in range(rounds):
        trained = []
        for k, rate in enumerate(RATES):
            # 1. The client's model becomes the first channels of the server's.
            own = {name: first(name, tensor, rate).clone() for name, tensor in w.items()}
            own |= measured[k]
            for name in own:
                own[name].requires_grad_(learned(name))
            names = [name for name in own if learned(name)]
            # 2. Two epochs; the scores of classes that it has not are 0.
            has = sorted(set(reference.samples(k)[1].tolist()))
            for _ in range(2):
                for x, y in reference.batches(k):
                    z = network(own, x, rate)
                    kept = torch.tensor([float(c in has) for c in range(reference.CLASSES)])
                    loss = F.cross_entropy(z * kept, y)
                    grads = torch.autograd.grad(loss, [own[name] for name in names])
                    length = float(torch.cat([grad.flatten() for grad in grads]).norm())
                    lengths.append(length)
                    with torch.no_grad():
                        for name, grad in zip(names, grads, strict=True):
                            own[name] -= reference.LR * grad * min(1.0, longest / (length + 1e-6))
            # 3. It uploads its model.
            trained.append(({name: tensor.detach() for name, tensor in own.items()}, has))
            measured[k] = {
                name: tensor.clone() for name, tensor in own.items() if not learned(name)
            }
        # 4. Every entry becomes the mean of what was sent for it.
        for name, old in w.items():
            if not learned(name):
                continue
            sums, counts = torch.zeros_like(old), torch.zeros_like(old)
            for (own, has), rate in zip(trained, RATES, strict=True):
                sent = torch.zeros_like(old)
                here = torch.zeros_like(old)
                first(name, sent, rate).copy_(own[name])
                first(name, here, rate).fill_(1.0)
                if name.startswith("head."):
                    for c in range(reference.CLASSES):
                        here[c] *= float(c in has)
                sums += sent * here
                counts += here
            w[name] = torch.where(counts > 0, sums / counts.clamp(min=1), old)

    assert max(lengths) > longest, "some gradients are clipped"
    for name, tensor in w.items():
        pairs = [(run.clients[k]["model"][name], trained[k][0][name]) for k in reference.CLIENTS]
        if learned(name):
            pairs.append((run.server["weights"][name], tensor))
        else:
            pairs += [
                (first(name, run.server["statistics"][f"{rate:g}"][name], rate), measured[k][name])
                for k, rate in enumerate(RATES)
            ]
        for found, wanted in pairs:
            assert_close(found, wanted, atol=1e-6, rtol=0, msg=lambda text, n=name: f"{n} {text}")
    for name in w:
        if learned(name):
            before, after = run.server_born["weights"][name], run.server["weights"][name]
            assert (after - before).abs().max() > 1e-4, f"{name}: or nothing is compared"
    head = run.server["weights"]["head.weight"]
    assert torch.equal(head[3], run.server_born["weights"]["head.weight"][3]), "nobody has class 3"
