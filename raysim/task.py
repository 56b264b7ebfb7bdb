"""What the clients learn: the shape of an input and of an answer."""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["single", "multilabel", "segment", "text"]


@dataclass(frozen=True)
class Task:
    """Single-label image classification, unless `kind` says otherwise."""

    num_classes: int
    channels: int = 3
    image_size: int = 32
    kind: Kind = "single"
    """single: a class for an image; multilabel: any number of them; segment: a class for each
    pixel; text: a class for a sentence."""
    words: int = 0
    """How many different token numbers a sentence may have."""
    length: int = 0
    """Tokens in a sentence, padded with 0."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """What it is judged by; the first is its score."""
        return {"multilabel": ("map", "f1"), "segment": ("miou",)}.get(self.kind, ("accuracy",))
