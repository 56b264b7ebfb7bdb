"""FedIN's gradient alleviation, worked by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from raysim.gradients import Alleviation, conflict


def parameters(*values: list[float]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor(value)) for value in values]


def projected(
    local: list[list[float]], other: list[list[float]], scope: Any = "tensor"
) -> list[list[float]]:
    """Z of the exact form, of gradients given as numbers."""
    z = Alleviation(parameters(*local), lam=None, scope=scope)
    z.mix([torch.tensor(g) for g in local], [torch.tensor(h) for h in other])
    grads = [p.grad for p in z.parameters]
    return [g.tolist() for g in grads if g is not None]


def close(*values: list[float]) -> list[Any]:
    return [pytest.approx(value, abs=1e-6) for value in values]


# The exact form


def test_a_conflict_is_projected_away() -> None:
    """<(3, 4), (-1, 0)> = -3 and <(3, 4), (3, 4)> = 25: Z = (-1, 0) + 3/25 (3, 4), and
    <Z, (3, 4)> = 3 * -0.64 + 4 * 0.48 = 0."""
    (z,) = projected([[3.0, 4.0]], [[-1.0, 0.0]])
    assert z == pytest.approx([-0.64, 0.48])
    assert 3 * z[0] + 4 * z[1] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("other", [[1.0, 0.5], [4.0, -3.0]])
def test_without_a_conflict_it_is_the_other_gradient(other: list[float]) -> None:
    """<(3, 4), (1, 0.5)> = 5, and <(3, 4), (4, -3)> = 0 is none either."""
    assert projected([[3.0, 4.0]], [other]) == [other]


def test_each_tensor_has_its_own_conflict() -> None:
    """1 * -1 < 0: Z = -1 + 1 = 0. 2 * 3 > 0: Z = 3. Together -1 + 6 > 0, which is no conflict."""
    local, other = [[1.0], [2.0]], [[-1.0], [3.0]]
    assert projected(local, other, "tensor") == [[0.0], [3.0]]
    assert projected(local, other, "global") == [[-1.0], [3.0]]


def test_all_tensors_can_be_one() -> None:
    """1 * -3 + 2 * 1 = -1, and 1 + 4 = 5: Z = (-3, 1) + 1/5 (1, 2), and -2.8 + 2 * 1.4 = 0. On its
    own, the second has no conflict."""
    local, other = [[1.0], [2.0]], [[-3.0], [1.0]]
    assert projected(local, other, "global") == close([-2.8], [1.4])
    assert projected(local, other, "tensor") == close([0.0], [1.0])


def test_matrices_are_long_vectors() -> None:
    """<., .> of [[1, 2], [3, 4]] and its negative is -30, of it with itself 30."""
    matrix = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert conflict([matrix], [-2 * matrix], "tensor") == [2.0]
    assert conflict([matrix.t()], [-matrix.t()], "tensor") == [1.0]


def test_a_local_gradient_of_nothing_changes_nothing() -> None:
    assert projected([[0.0, 0.0], [1e-7, 0.0]], [[1.0, 2.0], [-1.0, 0.0]]) == [[1, 2], [-1, 0]]


@pytest.mark.parametrize("lam", [None, 1.0])
def test_a_missing_gradient_is_zero(lam: float | None) -> None:
    """Of three parameters, the first has no local gradient, the second no other one, the third
    neither: that one must stay without, for optimizers skip it then."""
    z = Alleviation(parameters([0.0], [0.0], [0.0]), lam)
    z.mix([None, torch.tensor([4.0]), None], [torch.tensor([3.0]), None, None])
    first, second, third = (p.grad for p in z.parameters)
    assert first is not None
    assert second is not None
    assert first.tolist() == [3.0]
    assert second.tolist() == [0.0 if lam is None else 2.0]
    assert third is None


def test_what_is_mixed_is_left_as_it_was() -> None:
    local, other = torch.tensor([1.0]), torch.tensor([-1.0])
    for lam in (None, 0.0, 1.0):
        Alleviation(parameters([0.0]), lam).mix([local], [other])
    assert (local.item(), other.item()) == (1, -1)


# In a training step: local = a^2 / 2 + 2 a w, other = 3 w^2 / 2 at a = 5, w = 4


def step(
    lam: float | None, other_loss: Any = lambda w: 1.5 * w.square().sum()
) -> tuple[float, float, float]:
    """The gradients of a, which is of the local loss alone, and of w; and the joint loss.

    local:  d/da = a + 2 w = 13, d/dw = 2 a = 10, value 12.5 + 40 = 52.5
    other:  d/dw = 3 w = 12, value 24
    """
    a, w = parameters([5.0], [4.0])
    z = Alleviation([w], lam)
    value = z.join((0.5 * a.square() + 2 * a * w).sum(), other_loss(w))
    value.backward()  # type: ignore[no-untyped-call]
    z.adjust()
    assert a.grad is not None
    assert w.grad is not None
    return a.grad.item(), w.grad.item(), value.item()


@pytest.mark.parametrize(
    ("lam", "expected"), [(1.0, 17.0), (2.0, 22.0), (0.5, 14.5), (0.0, 12.0), (None, 12.0)]
)
def test_the_step_of_both_losses_by_hand(lam: float | None, expected: float) -> None:
    """Z = 12 + lam/2 * 10; the exact form finds no conflict. a always steps by 13."""
    assert step(lam) == pytest.approx((13.0, expected, 52.5 + 24))


def test_the_exact_form_sees_the_conflict_in_a_step() -> None:
    """With -24 w as the other loss its gradient is -24: Z = -24 + 24/10 * 10 = 0."""
    assert step(None, lambda w: -24 * w.sum()) == pytest.approx((13.0, 0.0, 52.5 - 96), abs=1e-5)
    assert step(1.0, lambda w: -24 * w.sum()) == pytest.approx((13.0, -19.0, 52.5 - 96))


@pytest.mark.parametrize(("lam", "further"), [(1.0, 0), (2.0, 0), (None, 1)])
def test_the_lambda_form_needs_one_backward_pass(
    lam: float | None, further: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    grad = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: calls.append(a) or grad(*a, **k))
    step(lam)
    assert len(calls) == further


@pytest.mark.parametrize("lam", [None, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_other_loss_that_is_not_finite_is_left_out(lam: float | None, value: float) -> None:
    assert step(lam, lambda w: value * w.sum()) == pytest.approx((13.0, 10.0, 52.5))


@pytest.mark.parametrize("lam", [None, 1.0])
def test_a_step_after_a_joint_one_is_of_the_local_loss_alone(lam: float | None) -> None:
    (w,) = parameters([4.0])
    z = Alleviation([w], lam)

    def descend(loss: Tensor) -> float:
        w.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        z.adjust()
        assert w.grad is not None
        return w.grad.item()

    joint = descend(z.join(10 * w.sum(), 6 * w.sum()))
    assert joint == (6 if lam is None else 11)
    assert descend(10 * w.sum()) == 10


def test_the_lambda_form_is_the_gradient_of_the_weighted_sum() -> None:
    """Of layers that both losses share, and that are not linear."""
    torch.manual_seed(0)
    front, shared = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    x, s_in, s_out = torch.randn(6, 3), torch.randn(7, 4), torch.randn(7, 2)

    def losses() -> tuple[Tensor, Tensor]:
        local = shared(front(x).relu()).square().sum()
        return local, (shared(s_in) - s_out).square().mean()

    z = Alleviation(shared.parameters(), lam=0.7)
    z.join(*losses()).backward()  # type: ignore[no-untyped-call]
    z.adjust()
    local, other = losses()
    expected = torch.autograd.grad(other + 0.35 * local, list(shared.parameters()))
    for p, g in zip(shared.parameters(), expected, strict=True):
        assert_close(p.grad, g)
    for p, g in zip(
        front.parameters(),
        torch.autograd.grad(losses()[0], list(front.parameters())),
        strict=True,
    ):
        assert_close(p.grad, g)
