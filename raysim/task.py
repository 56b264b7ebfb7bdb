"""What the clients learn: the shape of an input and of an answer."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """Single-label image classification."""

    num_classes: int
    channels: int = 3
    image_size: int = 32
