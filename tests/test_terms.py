"""Proximal term and control-variate correction, worked by hand."""

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from raysim import TrainConfig, get_weights
from raysim.ops import train
from raysim.terms import MeanGradient, correct, proximal, shift, trainable


def layer(weight: float, bias: float) -> nn.Linear:
    module = nn.Linear(1, 1)
    with torch.no_grad():
        module.weight.fill_(weight)
        module.bias.fill_(bias)
    return module


def at(weight: float, bias: float) -> dict[str, Tensor]:
    return {"weight": torch.tensor([[float(weight)]]), "bias": torch.tensor([float(bias)])}


def gradients(module: nn.Linear) -> list[float]:
    assert module.weight.grad is not None
    assert module.bias.grad is not None
    return [module.weight.grad.item(), module.bias.grad.item()]


# The proximal term


def test_the_proximal_term_is_half_of_mu_times_the_squared_distance() -> None:
    """(3, -1) is (2, -4) from (1, 3): 0.2 / 2 * (4 + 16) = 2. Its gradient: 0.2 * (2, -4)."""
    module = layer(3, -1)
    value = proximal(module, at(1, 3), mu=0.2)
    assert value.item() == pytest.approx(2)
    value.backward()  # type: ignore[no-untyped-call]
    assert gradients(module) == pytest.approx([0.4, -0.8])


def test_at_the_anchor_itself_the_term_is_nothing() -> None:
    """Also when the anchor is the very memory of the module, which would otherwise follow it."""
    module = layer(3, -1)
    value = proximal(module, get_weights(module), mu=7)
    assert value.item() == 0
    value.backward()  # type: ignore[no-untyped-call]
    assert gradients(module) == [0, 0]


def test_an_anchor_is_a_constant() -> None:
    anchor = layer(1, 1)
    value = proximal(layer(3, -1), dict(anchor.named_parameters()), mu=1)
    value.backward()  # type: ignore[no-untyped-call]
    assert anchor.weight.grad is None


def test_statistics_and_what_is_frozen_have_no_part_in_it() -> None:
    """A batch norm of weight 1 and bias 0 against 3 and (frozen) 5: 1/2 * 4, whatever the rest."""
    module = nn.BatchNorm1d(1)
    module.bias.requires_grad_(False)
    anchor = {name: torch.full_like(t, 100) for name, t in module.state_dict().items()}
    anchor |= {"weight": torch.tensor([3.0]), "bias": torch.tensor([5.0])}
    assert list(trainable(module)) == ["weight"]
    assert proximal(module, anchor, mu=1).item() == 2


def test_training_with_the_term_goes_where_its_equation_says() -> None:
    """Nothing but mu/2 (w - 1)^2 at mu = 0.5 and lr = 1: w - 1 halves in each of three steps."""
    module = layer(9, 2)
    train(
        lambda x, y: proximal(module, at(1, 2), mu=0.5),
        [module], lambda: [(torch.zeros(2, 1), torch.zeros(2))], TrainConfig(lr=1, epochs=3), "cpu",
    )  # fmt: skip
    assert [module.weight.item(), module.bias.item()] == [2, 2]


# Control variates


def test_a_correction_is_added_to_the_gradient() -> None:
    """The gradient of 5 w is (5, none): with (2, 3) added, (7, 3)."""
    module = layer(1, 1)
    (5 * module.weight).sum().backward()
    correction = at(2, 3)
    correct(module, correction)
    assert gradients(module) == [7, 3]
    assert module.bias.grad is not None
    module.bias.grad.zero_()
    assert correction["bias"].item() == 3, "the correction is used again in the next step"


def test_a_correction_leaves_out_what_is_frozen() -> None:
    module = layer(1, 1)
    module.bias.requires_grad_(False)
    correct(module, {"weight": torch.tensor([[2.0]])})
    assert module.bias.grad is None


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_shift_before_the_step_is_one_after_it(optimizer: str) -> None:
    """With momentum and weight decay, which must not see the shifted weights."""
    config = TrainConfig(optimizer=optimizer, lr=0.1, momentum=0.9, weight_decay=0.5, epochs=1)  # type: ignore[arg-type]
    batch = [(torch.ones(2, 1), torch.zeros(2))]
    direction = at(3, -2)

    def one(module: nn.Linear, shifting: bool) -> None:
        def adjust() -> None:
            if shifting:
                shift(module, direction, lr=0.1, weight_decay=0.5)

        train(
            lambda x, y: module(x).square().mean(), [module], lambda: batch, config, "cpu",
            adjust=adjust,
        )  # fmt: skip

    before, after = layer(2, 1), layer(2, 1)
    one(before, True)
    one(after, False)
    with torch.no_grad():
        after.weight -= 0.1 * 3
        after.bias -= 0.1 * -2
    assert_close(before.state_dict(), after.state_dict())


def test_the_mean_gradient_is_over_steps_and_has_the_weight_decay_in_it() -> None:
    """Gradients 5 at w = 1 and 5 at w = 3, decay 0.5: (5 + 0.5 + 5 + 1.5) / 2 = 6. The bias has no
    gradient and stays at 4: 2."""
    module = layer(1, 4)
    mean = MeanGradient(module, weight_decay=0.5)
    for weight in (1.0, 3.0):
        module.zero_grad()
        with torch.no_grad():
            module.weight.fill_(weight)
        (5 * module.weight).sum().backward()
        mean.add()
    assert mean.steps == 2
    assert_close(mean.mean(), at(6, 2))


def test_the_mean_of_no_steps_is_zero() -> None:
    assert_close(MeanGradient(layer(1, 1), 0.5).mean(), at(0, 0))
