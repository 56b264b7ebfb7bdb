"""Our SGD is torch's, bit for bit, and does not bring the compiler along."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from raysim.sgd import SGD


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_the_same_bits_as_torch(momentum: float, weight_decay: float) -> None:
    torch.manual_seed(0)
    ours, theirs = (nn.Sequential(nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 3)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    ours[0].bias.requires_grad_(False)  # has no gradient, in neither
    theirs[0].bias.requires_grad_(False)
    optimizers = [
        kind(model.parameters(), lr=0.3, momentum=momentum, weight_decay=weight_decay)
        for kind, model in ((SGD, ours), (torch.optim.SGD, theirs))
    ]
    for _ in range(4):
        x = torch.randn(6, 7)
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_as_torch(to_none: bool) -> None:
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    SGD(model.parameters(), lr=0.1).zero_grad(set_to_none=to_none)
    assert (model.weight.grad is None) == to_none
    assert to_none or not model.weight.grad.any()  # type: ignore[union-attr]


def test_training_does_not_import_the_compiler() -> None:
    code = """
import sys, tempfile
from raysim import Config, DataConfig, FleetConfig, run
run(Config(method="fedre", clients=2, participation=1.0, rounds=1, backend="local",
           fleet=FleetConfig(models=("mlp",)), data=DataConfig(samples=40),
           out=tempfile.mkdtemp() + "/run"))
print([name for name in ("torch._dynamo", "sympy", "torchvision") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
