"""FedIN's features: what enters and leaves the intermediate layers (the trunk) of a model."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raysim.fleet import Fleet
from raysim.method import ClientContext, ServerContext
from raysim.ops import single_sample
from raysim.seeding import seeded
from raysim.task import Task
from raysim.wire import like
from zoo import SplitModel

Shape = tuple[int, ...]
NoiseScope = Literal["tensor", "channel"]


class Features(NamedTuple):
    inputs: Tensor  # s_in, of a batch
    outputs: Tensor  # s_out


class Shapes(NamedTuple):
    """Of one sample's features."""

    inputs: Shape
    outputs: Shape

    @property
    def key(self) -> str:
        return "_".join("x".join(map(str, shape)) for shape in self)


@functools.lru_cache(maxsize=64)
def shapes(fleet: Fleet, name: str, task: Task) -> Shapes:
    """The shapes of a model's features; no memory is spent on them."""
    with torch.device("meta"), seeded(0, "like"), torch.no_grad():
        model = fleet.build(name, task).eval()
        inputs = model.stem(torch.empty(1, task.channels, task.image_size, task.image_size))
        return Shapes(tuple(inputs.shape[1:]), tuple(model.trunk(inputs).shape[1:]))


def expected(client: int, ctx: ServerContext) -> Features:
    """What a client's features look like, of any number of samples."""
    own = shapes(ctx.fleet, ctx.fleet.model_of(client), ctx.task)
    return Features(like(None, *own.inputs), like(None, *own.outputs))


def draw(
    pool: Mapping[int, Features], client: int, number: int, ctx: ServerContext, project: bool
) -> list[Features]:
    """The batches of `number` others, drawn equally and each once; of all if there are fewer.
    Without `project`, only of those whose features have the shapes of the client's own."""

    def shape(k: int) -> Shapes:
        return shapes(ctx.fleet, ctx.fleet.model_of(k), ctx.task)

    others = [k for k in pool if k != client and (project or shape(k) == shape(client))]
    return [pool[others[i]] for i in torch.randperm(len(others))[:number].tolist()]


# Forward passes


def features(model: SplitModel, x: Tensor, rho: float, scope: NoiseScope) -> Features:
    """s_in and s_out of a batch, both with noise; s_out is made of the s_in that has it."""
    inputs = noised(model.stem(x), rho, scope)
    return Features(inputs, noised(model.trunk(inputs), rho, scope))


def sample(
    model: SplitModel, ctx: ClientContext, size: int, rho: float, scope: NoiseScope
) -> Features:
    """Features of `size` of the client's samples, or of all if it has fewer."""
    rows = ctx.indices[torch.randperm(ctx.num_samples)[:size].numpy()]
    x, _ = next(replace(ctx, indices=rows, eval_batch_size=size).samples())
    with torch.no_grad(), ctx.autocast(), untracked(model), single_sample([model], len(x)):
        made = features(model, x, rho, scope)
    return Features(made.inputs.float(), made.outputs.float())


def imitation(
    model: SplitModel, adapters: nn.ModuleDict, others: Features, updates_bn: bool
) -> Tensor:
    """The IN loss: how far the intermediate layers are from giving others' s_out for their s_in."""
    inputs, distance = lesson(adapters, others)
    with untracked(model.trunk, unless=updates_bn), single_sample([model.trunk], len(inputs)):
        return distance(model.trunk(inputs))


def lesson(adapters: nn.ModuleDict, others: Features) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Others' s_in in the client's own shape, and the distance of what its layers make of them from
    their s_out."""
    key = Shapes(tuple(others.inputs.shape[1:]), tuple(others.outputs.shape[1:])).key
    adapter = cast(Adapter, adapters[key]) if key in adapters else None

    def distance(outputs: Tensor) -> Tensor:
        outputs = adapter.outputs(outputs) if adapter else outputs
        return F.mse_loss(outputs.float(), others.outputs)

    return adapter.inputs(others.inputs) if adapter else others.inputs, distance


def together(
    trunk: nn.Module, own: Tensor, others: Tensor, updates_bn: bool
) -> tuple[Tensor, Tensor]:
    """`trunk` of two batches, in one pass: with few samples most of a pass does not depend on how
    many there are. Batch norm takes the two apart."""
    norms = _norms(trunk)

    def forward(norm: nn.Module, both: Tensor) -> Tensor:
        first = type(norm).forward(norm, both[: len(own)])
        with untracked(norm, unless=updates_bn):
            return torch.cat([first, type(norm).forward(norm, both[len(own) :])])

    try:
        for norm in norms:
            norm.forward = functools.partial(forward, norm)  # type: ignore[method-assign]
        made = trunk(torch.cat([own, others]))
    finally:
        for norm in norms:
            norm.__dict__.pop("forward", None)
    return made[: len(own)], made[len(own) :]


def noised(made: Tensor, rho: float, scope: NoiseScope = "tensor") -> Tensor:
    """With Gaussian noise of rho times the standard deviation: one for all features, or one for
    each channel. The deviation is a constant of the gradient."""
    if not rho:
        return made
    if scope == "tensor":
        sigma = made.detach().std(correction=0)
    else:
        channel = 2 if made.dim() == 3 else 1  # tokens have their channels last
        others = [axis for axis in range(made.dim()) if axis != channel]
        sigma = made.detach().std(dim=others, correction=0, keepdim=True)
    return made + rho * sigma * torch.randn_like(made)


@contextmanager
def untracked(module: nn.Module, unless: bool = False) -> Iterator[None]:
    """Batch norm uses the statistics of the batch, and its running ones do not learn from it."""
    norms = [norm for norm in _norms(module) if norm.track_running_stats and not unless]
    for norm in norms:
        norm.track_running_stats = False
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True


def _norms(module: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    kind = nn.modules.batchnorm._BatchNorm
    return [child for child in module.modules() if isinstance(child, kind)]


# Features of other shapes


class Resize(nn.Module):
    """Features of one shape as those of another: their grid is averaged or repeated, and a linear
    layer changes the channels. Equal shapes need nothing."""

    def __init__(self, source: Shape, target: Shape) -> None:
        super().__init__()
        self.target = target
        self.linear = None if source == target else nn.Conv2d(_grid(source)[0], _grid(target)[0], 1)

    def forward(self, made: Tensor) -> Tensor:
        if self.linear is None:
            return made
        if made.dim() == 3:
            made = made.transpose(1, 2)
        grid = made.reshape(*made.shape, *(1,) * (4 - made.dim()))
        grid = self.linear(F.adaptive_avg_pool2d(grid, _grid(self.target)[1:]))
        if len(self.target) == 2:
            grid = grid.transpose(1, 2)
        resized: Tensor = grid.reshape(len(made), *self.target)
        return resized


def _grid(shape: Shape) -> tuple[int, int, int]:
    """Channels, height, width. A vector has one place, a transformer's tokens are a column."""
    match shape:
        case (channels,):
            return channels, 1, 1
        case (tokens, channels):
            return channels, tokens, 1
        case (channels, height, width):
            return channels, height, width
    raise ValueError(f"features of shape {shape} are neither vectors nor tokens nor maps")


class Adapter(nn.Module):
    """Brings features of another shape to the one that a client's intermediate layers take, and
    what these make of them to the one that they are compared with."""

    def __init__(self, own: Shapes, other: Shapes) -> None:
        super().__init__()
        self.inputs = Resize(other.inputs, own.inputs)
        self.outputs = Resize(own.outputs, other.outputs)


def adapters(ctx: ClientContext) -> nn.ModuleDict:
    """One for each shape of features in the fleet that is not the client's own."""
    own = shapes(ctx.fleet, ctx.model_name, ctx.task)
    others = {shapes(ctx.fleet, name, ctx.task) for name in ctx.fleet.models} - {own}
    return nn.ModuleDict({other.key: Adapter(own, other) for other in sorted(others)})
