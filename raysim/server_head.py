"""The classifier that a server trains on uploaded representations.

The methods that have one give it the same settings under the same flags, `--hp.server-*`.
"""

from functools import partial
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raysim import ops
from raysim.errors import ConfigError


class Settings(Protocol):
    """The hyper-parameters of a method that trains a head on its server."""

    @property
    def server_optimizer(self) -> Literal["sgd", "adam"]: ...
    @property
    def server_lr(self) -> float: ...
    @property
    def server_momentum(self) -> float: ...
    @property
    def server_epochs(self) -> int: ...
    @property
    def server_batch_size(self) -> int: ...
    @property
    def server_reduction(self) -> Literal["sum", "mean"]: ...


def check(settings: Settings) -> None:
    """Refuse what cannot be trained with."""
    least = {
        "--hp.server-lr": (settings.server_lr > 0, "more than 0", settings.server_lr),
        "--hp.server-epochs": (settings.server_epochs >= 1, "at least 1", settings.server_epochs),
        "--hp.server-batch-size": (
            settings.server_batch_size >= 1, "at least 1", settings.server_batch_size
        ),
        "--hp.server-momentum": (
            0 <= settings.server_momentum < 1, "in [0, 1)", settings.server_momentum
        ),
    }  # fmt: skip
    for flag, (holds, rule, found) in least.items():
        if not holds:
            raise ConfigError(f"{flag} must be {rule}, got {found}")
    if settings.server_momentum and settings.server_optimizer != "sgd":
        raise ConfigError(
            f"--hp.server-momentum {settings.server_momentum} is for sgd; "
            "try --hp.server-optimizer sgd, or leave it out"
        )


def train(head: nn.Module, r: Tensor, y: Tensor, settings: Settings) -> float:
    """Cross-entropy of head(r) and labels y, which are classes or soft labels. The optimizer is
    born anew at every call, as the clients' are."""
    sgd = partial(torch.optim.SGD, momentum=settings.server_momentum)
    return ops.fit(
        lambda r, y: F.cross_entropy(head(r), y, reduction=settings.server_reduction),
        head,
        data=(r, y),
        lr=settings.server_lr,
        epochs=settings.server_epochs,
        batch_size=settings.server_batch_size,
        optimizer=sgd if settings.server_optimizer == "sgd" else torch.optim.Adam,
    )
