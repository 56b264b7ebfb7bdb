"""Class prototypes, worked by hand."""

from math import inf

import torch
from torch import Tensor
from torch.testing import assert_close

from raysim.prototypes import distances, mean_by_class, nearest, pull

KNOWN = torch.tensor([True, False])


def rows(*values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_mean_of_each_class_that_occurs_in_ascending_order() -> None:
    """Class 7: ((2, 0) + (4, 6)) / 2 = (3, 3). Class 1: (5, 5). By weights 1 and 3, class 7 is
    ((2, 0) + 3 (4, 6)) / 4 = (3.5, 4.5)."""
    sent, classes = rows((2, 0), (5, 5), (4, 6)), torch.tensor([7, 1, 7])
    mean, present = mean_by_class(sent, classes)
    assert present.tolist() == [1, 7]
    assert_close(mean, rows((5, 5), (3, 3)))
    mean, _ = mean_by_class(sent, classes, torch.tensor([1, 9, 3]))
    assert_close(mean, rows((5, 5), (3.5, 4.5)))


def test_pull_is_the_mean_over_batch_and_width_and_nothing_where_there_is_no_prototype() -> None:
    """(3, 1) is (2, -1) from (1, 2): 5 of the four numbers of the batch; the other row's class is
    unknown. Gradient: 2 (2, -1) / 4 for the first row."""
    r = rows((3, 1), (8, 8)).requires_grad_()
    loss = pull(r, torch.tensor([0, 1]), rows((1, 2), (0, 0)), KNOWN)
    assert float(loss.detach()) == 5 / 4
    (grad,) = torch.autograd.grad(loss, r)
    assert_close(grad, rows((1, -0.5), (0, 0)))


def test_nearest_scores_are_mean_squared_distances_and_never_an_unknown_class() -> None:
    scores = nearest(rows((3, 1)), rows((1, 2), (3, 1)), KNOWN)
    assert scores.tolist() == [[-2.5, -inf]]


def test_distances_by_hand() -> None:
    assert_close(distances(rows((0, 0), (3, 5)), rows((3, 4))), rows((5,), (1,)))


def test_distance_of_what_is_nearly_or_exactly_the_same_has_a_finite_gradient() -> None:
    """As expanded squares, p^2 - 2 p t + t^2, half of these round to less than zero; and a root has
    no slope at zero."""
    torch.manual_seed(0)
    p = 100 * torch.randn(64, 32)
    t = (p + 1e-5 * torch.randn(64, 32)).requires_grad_()
    expanded = p.square().sum(1) - 2 * (p * t).sum(1) + t.square().sum(1)
    assert (expanded < 0).any(), "else this test shows nothing"
    for near in (t, p.clone().requires_grad_()):
        found = distances(p, near)
        (grad,) = torch.autograd.grad(found.sum(), near)
        assert found.isfinite().all()
        assert grad.isfinite().all()
    assert (distances(p, p).diagonal() == 0).all()
