"""Losses and scores of tasks, against numbers worked by hand."""

import math

import pytest
import torch

from raysim.objectives import Judge, mean_average_precision, mean_iou, micro_f1, task_loss
from raysim.task import Task

SEVERAL = Task(2, kind="multilabel")
PIXELS = Task(3, kind="segment")


def test_losses() -> None:
    scores = torch.tensor([[0.0, math.log(3)]])
    assert task_loss(Task(2), scores, torch.tensor([0])).item() == pytest.approx(math.log(4))
    # sigmoid: 1/2 and 3/4
    several = task_loss(SEVERAL, scores, torch.tensor([[1.0, 0.0]])).item()
    assert several == pytest.approx((math.log(2) + math.log(4)) / 2)
    pixels = task_loss(PIXELS, torch.zeros(1, 3, 2, 2), torch.zeros(1, 2, 2, dtype=torch.long))
    assert pixels.item() == pytest.approx(math.log(3))


def test_average_precision_by_hand() -> None:
    """Class 0: order 0, 1, 2 with truths 1, 0, 1: (1/1 + 2/3) / 2. Class 1: order 2, 1, 0 with
    truths 0, 1, 0: 1/2. Class 2 has no sample and does not count."""
    scores = torch.tensor([[3.0, 1.0, 5.0], [2.0, 2.0, 5.0], [1.0, 3.0, 5.0]])
    truth = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    assert mean_average_precision(scores, truth) == pytest.approx((5 / 6 + 1 / 2) / 2)
    assert math.isnan(mean_average_precision(scores, 0 * truth))


def test_f1_by_hand() -> None:
    given = torch.tensor([[True, True], [False, True]])
    truth = torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    assert micro_f1(given, truth) == pytest.approx(2 * 2 / (3 + 3))
    assert micro_f1(given & False, 0 * truth) == 0.0


def test_iou_by_hand() -> None:
    """Class 0: 2 of 2 + 1; class 1: 1 of 1 + 1 + 0; class 2 occurs nowhere."""
    assert mean_iou(torch.tensor([[2, 1, 0], [0, 1, 0], [0, 0, 0]])) == pytest.approx(
        (2 / 3 + 1 / 2) / 2
    )


def test_a_judge_sees_batches_as_one() -> None:
    judge = Judge(PIXELS)
    truth = torch.tensor([[[0, 1]], [[2, 2]], [[0, 0]]])
    given = torch.tensor([[[0, 0]], [[2, 1]], [[0, 0]]])
    scores = torch.nn.functional.one_hot(given, 3).permute(0, 3, 1, 2).float()
    judge.see(scores[:1], truth[:1])
    judge.see(scores[1:], truth[1:])
    assert judge.metrics() == {"miou": pytest.approx((3 / 4 + 0 / 2 + 1 / 2) / 3)}
    assert judge.samples == 3
    assert judge.loss / 3 == pytest.approx(task_loss(PIXELS, scores, truth).item(), rel=1e-6)


def test_a_judge_of_several_labels() -> None:
    judge = Judge(SEVERAL)
    assert all(math.isnan(value) for value in judge.metrics().values())
    judge.see(torch.tensor([[2.0, -1.0]]), torch.tensor([[1.0, 0.0]]))
    judge.see(torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0, 1.0]]))
    assert list(judge.metrics()) == list(SEVERAL.metrics)
    assert judge.metrics() == {"map": 1.0, "f1": pytest.approx(2 * 2 / (3 + 2))}
