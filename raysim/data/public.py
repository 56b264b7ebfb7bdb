"""The public set: what --data.public keeps from the clients. Nobody knows its labels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from raysim.data.batches import make_batch
from raysim.data.dataset import Dataset
from raysim.data.rules import Ints


@dataclass(frozen=True, eq=False)
class Public:
    """Images without labels, numbered from 0 in the same order for everyone."""

    dataset: Dataset
    device: torch.device
    memory_format: str = "contiguous"
    rows: Ints | None = None
    """Where they are in the data set; None: all of it is public."""

    def __len__(self) -> int:
        return len(self.dataset.labels if self.rows is None else self.rows)

    def images(self, numbers: Tensor) -> Tensor:
        """Those images, normalized and not augmented; to a client of sentences, their captions."""
        rows = numbers.cpu().numpy()
        if self.rows is not None:
            rows = self.rows[rows]
        return make_batch(self.dataset, rows, self.device, self.memory_format)[0]


def unlabelled(
    dataset: Dataset, rows: Ints, device: torch.device, memory_format: str = "contiguous"
) -> Public:
    """A copy of these images alone, so that the data set itself need not stay in memory."""
    labels = np.full(len(rows), -1, dtype=np.int64)
    copied = replace(dataset, images=dataset.images.take(rows, axis=0), labels=labels, num_train=0)
    return Public(copied, device, memory_format)
