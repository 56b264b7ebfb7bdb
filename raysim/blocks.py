"""The residual blocks of a model, found by the names of its layers: trunk.STAGE.BLOCK.conv2.weight.

A stage is a sequence of blocks that are all alike but for the first, which may change the number of
channels and the size of the image. A model without such names has no blocks.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

import torch

from raysim.wire import Weights


def counts(layers: Iterable[str]) -> dict[str, int]:
    """How many blocks each stage has, by the name of the stage."""
    return {stage: block + 1 for _, stage, block in _convolutions(layers)}  # the last one counts


def alike(blocks: Sequence[str], weights: Weights) -> list[str]:
    """The parameters, such as conv2.weight, that mean the same in all of these blocks of a stage:
    no convolution that is of another shape in one of them, not its batch norm, no shortcut."""
    parts = [layer.removeprefix(blocks[0]) for layer in weights if layer.startswith(blocks[0])]
    number = {part: re.sub(r"\D", "", part.split(".")[0]) for part in parts}  # a shortcut has none
    changed = {""} | {
        number[part]
        for part in parts
        if number[part] and len({weights[block + part].shape for block in blocks}) > 1
    }
    return [p for p in parts if p.endswith(("weight", "bias")) and number[p] not in changed]


def cross_layers(weights: Weights) -> Iterator[tuple[str, str]]:
    """Each convolution of a block that is not its stage's first, with the last of the first block
    that has the same shape; those that have none are left out."""
    shallow: dict[tuple[str, torch.Size], str] = {}
    for layer, stage, block in _convolutions(weights):
        key = stage, weights[layer].shape
        if block == 0:
            shallow[key] = layer
        elif key in shallow:
            yield layer, shallow[key]


def _convolutions(layers: Iterable[str]) -> Iterator[tuple[str, str, int]]:
    """Each convolution of a block, with its stage and the number of the block."""
    for layer in layers:
        if found := re.fullmatch(r"(trunk\.\d+)\.(\d+)\.conv\d\.weight", layer):
            yield layer, found[1], int(found[2])
