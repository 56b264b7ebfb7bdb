"""Whole rounds of FedIN, computed a second time from the paper.

Two clients of two nested models, with batch norm and small enough that rounding stays small. The
script below knows nothing of raysim but the architectures, the data, who takes part, the weights
that a run began with and, since draws cannot be computed twice, which samples were uploaded. It
computes in double precision, one loss after the other and one gradient after the other.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from reference import LR, WIDTH
from torch import Tensor, nn
from torch.testing import assert_close

import zoo
from raysim import FleetConfig, Task, fleet, intermediate, nested
from zoo import SplitModel
from zoo.split import Backbone

NESTED = ("slim_resnet10", "slim_resnet14")
EPOCHS, ROUNDS = 2, 3
MU = 0.8
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
    caches = (fleet._like, nested._trainable_like, intermediate.shapes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zoo, "build", build)
        for cache in caches:
            cache.cache_clear()
        yield
    for cache in caches:
        cache.cache_clear()


def double(weights: Any) -> Tensors:
    return {
        name: tensor.detach().double().clone() if tensor.is_floating_point() else tensor.clone()
        for name, tensor in dict(weights).items()
    }


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    picked = torch.stack([z[c] for z, c in zip(logits, y.tolist(), strict=True)])
    return (logits.exp().sum(dim=1).log() - picked).mean()


def gradient(loss: Tensor, model: nn.Module) -> Tensors:
    names, parameters = zip(*model.named_parameters(), strict=True)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return {
        name: torch.zeros_like(p) if g is None else g
        for name, p, g in zip(names, parameters, found, strict=True)
    }


def without_memory(trunk: Any, s_in: Tensor) -> Tensor:
    """The intermediate layers, with statistics of this batch, which are not kept."""
    out = s_in
    for linear, norm, _ in trunk:
        out = out @ linear.weight.t() + linear.bias
        deviation = (out - out.mean(dim=0)).square().mean(dim=0).add(0.1).sqrt()
        out = ((out - out.mean(dim=0)) / deviation * norm.weight + norm.bias).tanh()
    return out


def alleviated(form: str, g_in: Tensor, g_local: Tensor) -> Tensor:
    if form == "simplified":
        return g_in + 0.7 / 2 * g_local
    if form == "none":
        return g_in + g_local
    b, a = (g_local * g_in).sum(), (g_local * g_local).sum()
    return g_in if b >= 0 or a < 1e-12 else g_in - b / a * g_local


@pytest.mark.parametrize("schedule", ["every_step", "once_per_epoch", "after_local"])
@pytest.mark.parametrize("form", ["simplified", "exact", "none"])
def test_rounds_are_the_papers(
    form: str, schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Tensor] = []
    sample = intermediate.sample

    def watched(model: Any, ctx: Any, *settings: Any) -> Any:
        # The draw is the first thing that `sample` asks of the generator.
        state = torch.get_rng_state()
        drawn.append(torch.randperm(ctx.num_samples)[: settings[0]])
        torch.set_rng_state(state)
        return sample(model, ctx, *settings)

    monkeypatch.setattr(intermediate, "sample", watched)
    config = reference.config(
        "fedin", tmp_path / "run", rounds=ROUNDS, epochs=EPOCHS, mu=MU, lam=0.7, alleviation=form,
        in_schedule=schedule, in_steps=2, feature_batch=5,
    )  # fmt: skip
    run = reference.play(replace(config, fleet=FleetConfig(NESTED, WIDTH)))

    w = double(run.server_born["weights"])
    pool: dict[int, tuple[Tensor, Tensor]] = {}
    draws = iter(drawn)
    conflicts = 0
    for _ in range(ROUNDS):
        sent, features = {}, {}
        for k in (0, 1):
            model = zoo.build(NESTED[k], reference.dataset().task, WIDTH).double()
            model.load_state_dict({name: w[name] for name in model.state_dict()})
            start = {name: p.detach().clone() for name, p in model.named_parameters()}
            taught = pool.get(1 - k)  # of two clients, there is one other
            last: Tensors = {}

            def step(z: Tensors, model: nn.Module = model) -> None:
                with torch.no_grad():
                    for name, p in model.named_parameters():
                        p -= LR * z[name]

            def imitate(model: SplitModel = model, taught: Any = taught) -> Tensors:
                s_in, s_out = taught
                error = without_memory(model.trunk, s_in) - s_out
                return gradient((error * error).sum() / error.numel(), model)

            for _ in range(EPOCHS):
                for i, (x, y) in enumerate(reference.batches(k)):
                    distance = sum(
                        (p - start[name]).square().sum() for name, p in model.named_parameters()
                    )
                    local = cross_entropy(model(x.double()), y) + MU / 2 * distance
                    last = gradient(local, model)
                    z = dict(last)
                    joint = schedule == "every_step" or (schedule == "once_per_epoch" and i == 0)
                    if taught is not None and joint:
                        g_in = imitate()
                        for name in z:
                            if name.startswith("trunk."):
                                z[name] = alleviated(form, g_in[name], last[name])
                                conflicts += bool((g_in[name] * last[name]).sum() < 0)
                    step(z)
            for _ in range(2 if schedule == "after_local" and taught is not None else 0):
                g_in = imitate()
                step(
                    {
                        name: alleviated(form, g_in[name], g)
                        if name.startswith("trunk.")
                        else torch.zeros_like(g)
                        for name, g in last.items()
                    }
                )
                conflicts += any((g_in[n] * last[n]).sum() < 0 for n in g_in if "trunk" in n)
            x = reference.samples(k)[0].double()[next(draws)]
            with torch.no_grad():
                s_in = model.stem(x)
                features[k] = s_in, without_memory(model.trunk, s_in)
            sent[k] = double(model.state_dict())
        pool.update(features)
        for name in w:
            owners = [sent[k][name] for k in sent if name in sent[k]]
            w[name] = sum(owners) / len(owners) if w[name].is_floating_point() else owners[0]  # type: ignore[assignment,arg-type]

    assert conflicts > 0, "or the exact form had nothing to do"
    assert run.server["weights"].keys() == w.keys()
    for name, tensor in w.items():
        found = run.server["weights"][name]
        assert_close(
            found, tensor.to(found.dtype), atol=1e-6, rtol=0,
            msg=lambda text, n=name: f"{n} {text}",
        )  # fmt: skip
    for k, (s_in, s_out) in pool.items():
        assert_close(run.server["pool"][k].inputs, s_in.float(), atol=1e-6, rtol=0)
        assert_close(run.server["pool"][k].outputs, s_out.float(), atol=1e-6, rtol=0)
    born = run.server_born["weights"]
    weights = [name for name in born if name.endswith("weight")]
    assert all((born[name] - w[name]).abs().max() > 1e-3 for name in weights)
