"""What a task asks for: the loss it is learned by, and the scores it is judged by."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from raysim.task import Task


def task_loss(task: Task, scores: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of samples or pixels; of each class by itself where there may be several."""
    if task.kind == "multilabel":
        return F.binary_cross_entropy_with_logits(scores, y)
    return F.cross_entropy(scores, y)


class Judge:
    """The scores of a test part, batch by batch, for tasks whose score is no count of samples."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.loss = 0.0
        self.samples = 0
        self._pairs = torch.zeros(task.num_classes, task.num_classes, dtype=torch.int64)
        self._scores: list[Tensor] = []
        self._answers: list[Tensor] = []

    def see(self, scores: Tensor, y: Tensor) -> None:
        self.loss += float(task_loss(self.task, scores, y)) * len(y)
        self.samples += len(y)
        if self.task.kind == "multilabel":
            self._scores.append(scores.cpu())
            self._answers.append(y.cpu())
        else:
            classes = self.task.num_classes
            cells = (y * classes + scores.argmax(dim=1)).flatten().cpu()
            self._pairs += cells.bincount(minlength=classes**2).view(classes, classes)

    def metrics(self) -> dict[str, float]:
        """By name, the task's own score first; NaN if there was nothing to be judged by."""
        if self.task.kind == "segment":
            return {"miou": mean_iou(self._pairs)}
        if not self._scores:
            return {"map": float("nan"), "f1": float("nan")}
        scores, answers = torch.cat(self._scores), torch.cat(self._answers)
        return {"map": mean_average_precision(scores, answers), "f1": micro_f1(scores > 0, answers)}


def mean_iou(pairs: Tensor) -> float:
    """Mean intersection over union from counts by (true class, given class), over the classes that
    occur in either."""
    both = pairs.diagonal()
    either = pairs.sum(dim=0) + pairs.sum(dim=1) - both
    present = either > 0
    return float((both[present].double() / either[present]).mean())


def mean_average_precision(scores: Tensor, answers: Tensor) -> float:
    """Over the classes that some sample has: the mean, over these samples, of the share of right
    ones among those scored as high or higher. Of equal scores the earlier sample counts as the
    higher."""
    found = []
    for column, truth in zip(scores.T, answers.T, strict=True):
        if truth.any():
            hits = truth[column.sort(descending=True, stable=True).indices].double()
            precision = hits.cumsum(0) / torch.arange(1, len(hits) + 1)
            found.append(float((precision * hits).sum() / hits.sum()))
    return sum(found) / len(found) if found else float("nan")


def micro_f1(given: Tensor, answers: Tensor) -> float:
    """2 * right / (given + true), over all samples and classes; 0 if there are none."""
    right = float((given & (answers > 0)).sum())
    total = float(given.sum() + answers.sum())
    return 2 * right / total if total else 0.0
