"""The classifier that a server trains on uploaded representations.

The methods that have one give it the same settings under the same flags, `--hp.server-*`.
"""

from typing import Any, Literal, Protocol

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
    found: dict[str, tuple[bool, str, float]] = {
        "lr": (settings.server_lr > 0, "more than 0", settings.server_lr),
        "momentum": (0 <= settings.server_momentum < 1, "in [0, 1)", settings.server_momentum),
        "epochs": (settings.server_epochs >= 1, "at least 1", settings.server_epochs),
        "batch-size": (settings.server_batch_size >= 1, "at least 1", settings.server_batch_size),
    }
    for flag, (holds, rule, value) in found.items():
        if not holds:
            raise ConfigError(f"--hp.server-{flag} must be {rule}, got {value}")
    if settings.server_momentum and settings.server_optimizer != "sgd":
        raise ConfigError(
            f"--hp.server-momentum {settings.server_momentum} is for sgd; "
            "try --hp.server-optimizer sgd, or leave it out"
        )


def train(head: nn.Module, r: Tensor, y: Tensor, settings: Settings) -> float:
    """Cross-entropy of head(r) and labels y, which are classes or soft labels. The optimizer is
    born anew at every call, as the clients' are."""
    optimizer: dict[str, Any] = (
        {"optimizer": torch.optim.Adam}
        if settings.server_optimizer == "adam"
        else {"momentum": settings.server_momentum}
    )
    return ops.fit(
        lambda r, y: F.cross_entropy(head(r), y, reduction=settings.server_reduction),
        head,
        data=(r, y),
        lr=settings.server_lr,
        epochs=settings.server_epochs,
        batch_size=settings.server_batch_size,
        **optimizer,
    )
