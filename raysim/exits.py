"""Models with early exits, and models that end at one of them, as in ScaleFL."""

import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from raysim import ops
from raysim.channels import Layout, trace
from raysim.fleet import Fleet
from raysim.norms import Norm
from raysim.seeding import seeded
from raysim.slicing import Part, part
from raysim.task import Task
from zoo import SplitModel
from zoo.split import Backbone


class Exit(nn.Module):
    """A classifier of its own: convolutions with batch norm on maps, then pooling; on vectors
    neither."""

    def __init__(self, shape: torch.Size, width: int, layers: int, num_classes: int) -> None:
        super().__init__()
        inputs = shape[1]
        modules: list[nn.Module] = []
        if len(shape) == 4:
            for _ in range(layers):
                conv = nn.Conv2d(inputs, width, 3, padding=1, bias=False)
                modules += [conv, nn.BatchNorm2d(width), nn.ReLU()]
                inputs = width
            modules += [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.neck = nn.Sequential(*modules)
        self.head = nn.Linear(inputs, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.neck(x))
        return logits


class ExitModel(SplitModel):
    """A model with exits behind shares of its trunk's blocks; its own head is the last exit."""

    def __init__(self, model: SplitModel, task: Task, depths: Sequence[float], layers: int) -> None:
        backbone = Backbone(model.stem, model.trunk, model.neck)
        super().__init__(model.name, backbone, model.feature_dim, task.num_classes)
        self.head = model.head
        self.blocks = _blocks(model.trunk)
        self.places = [place(depth, len(self.blocks)) for depth in depths]
        """Behind how many blocks each of the depths ends."""
        self.early = sorted({p for p in self.places if p < len(self.blocks)})
        device = next(model.parameters()).device
        x = torch.zeros(1, task.channels, task.image_size, task.image_size, device=device)
        exits = []
        with ops.evaluating(self):
            for i, r in enumerate(self._maps(x), start=1):
                if i in self.early:
                    narrowed = getattr(self.blocks[i - 1][-1], "expansion", 1)  # of bottlenecks
                    exits.append(Exit(r.shape, r.shape[1] // narrowed, layers, task.num_classes))
        self.exits = nn.ModuleList(exits).to(device)

    def answers(self, x: Tensor) -> list[Tensor]:
        """The logits of every exit that there is, the deepest last."""
        found = []
        for i, r in enumerate(self._maps(x), start=1):
            if i in self.early:
                found.append(self.exits[self.early.index(i)](r))
        if isinstance(self.head, nn.Linear):
            found.append(self.head(self.neck(r)))
        return found

    def forward(self, x: Tensor) -> Tensor:
        return self.answers(x)[-1]

    def end(self, level: int) -> None:
        """Leave out what is behind the exit at the depth of this level."""
        last = self.places[level]
        if last == len(self.blocks):
            return
        self.blocks = self.blocks[:last]
        _prune(self.trunk, {id(module) for block in self.blocks for module in block})
        self.early = [p for p in self.early if p <= last]
        self.exits = self.exits[: len(self.early)]
        self.neck = nn.Identity()
        self.head = nn.Identity()  # type: ignore[assignment]

    def _maps(self, x: Tensor) -> Iterator[Tensor]:
        """What each block of the trunk gives."""
        x = self.stem(x)
        for block in self.blocks:
            for module in block:
                x = module(x)
            yield x


def place(depth: float, blocks: int) -> int:
    """The number of blocks nearest to a share of them, at least one."""
    return max(1, int(depth * blocks + 0.5))


@functools.lru_cache(maxsize=16)
def exit_layout(fleet: Fleet, task: Task, depths: tuple[float, ...], layers: int) -> Layout:
    """The axes of the weights of the fleet's one model with its exits."""
    model = _without_memory(fleet, task, depths, layers)
    return trace(model, task, model.answers)


@functools.lru_cache(maxsize=64)
def part_at(
    fleet: Fleet, task: Task, depths: tuple[float, ...], layers: int, level: int, width: float
) -> Part:
    """What a model has of that one which ends at the level's exit and has a share of the width."""
    model = _without_memory(fleet, task, depths, layers)
    model.end(level)
    every = part(exit_layout(fleet, task, depths, layers), width)
    return {name: every[name] for name in model.state_dict()}


def _without_memory(fleet: Fleet, task: Task, depths: tuple[float, ...], layers: int) -> ExitModel:
    with torch.device("meta"), seeded(0, "layout"):
        return ExitModel(fleet.build(fleet.models[0], task), task, depths, layers)


def _blocks(trunk: nn.Module) -> list[list[nn.Module]]:
    """The modules of a trunk in the order they run, each with weights together with the norms,
    activations and pools that follow it."""
    blocks: list[list[nn.Module]] = []
    for module in _leaves(trunk):
        learns = any(True for _ in module.parameters()) and not isinstance(module, Norm)
        if not blocks or (learns and any(True for m in blocks[-1] for _ in m.parameters())):
            blocks.append([])
        blocks[-1].append(module)
    return blocks


def _leaves(module: nn.Module) -> Iterator[nn.Module]:
    """What is inside nested sequences, in order."""
    if _is_sequence(module):
        for child in module.children():
            yield from _leaves(child)
    else:
        yield module


def _prune(sequence: nn.Module, kept: set[int]) -> None:
    """Take what is not kept out of nested sequences; what is left keeps its names."""
    for name, child in list(sequence.named_children()):
        if _is_sequence(child):
            _prune(child, kept)
        if id(child) not in kept and not (_is_sequence(child) and len(list(child.children()))):
            delattr(sequence, name)


def _is_sequence(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
