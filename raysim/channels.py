"""Which axis of which weight runs over which channels: what a model must tell before it is sliced.

Nobody writes this down for a model. It is run once on tensors without memory, and every operation
on the way says how its output's channels (axis 1) come from its input's. An operation that mixes
channels in a way slicing does not know is refused with the name of its layer.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from raysim.errors import ConfigError
from raysim.fleet import Fleet
from raysim.seeding import seeded
from raysim.task import Task
from zoo import SplitModel


class Segment(NamedTuple):
    """Neighbors on an axis: `width` channels of `repeat` entries each, more than one behind a
    Flatten. What is never sliced is one channel of all entries."""

    width: int
    repeat: int = 1


Axis = tuple[Segment, ...]
"""Several segments are what `torch.cat` leaves."""
Layout = dict[str, tuple[Axis, ...]]
"""The axes of each weight, by the weight's name."""

_ONE_BY_ONE = {
    "relu", "relu_", "relu6", "hardtanh", "hardswish", "leaky_relu", "elu", "gelu", "silu", "tanh",
    "sigmoid", "dropout", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d",
}  # fmt: skip
"""Operations that treat each channel alone and alike."""
_TOGETHER = {"add", "add_", "__add__", "__iadd__", "mul", "mul_", "__mul__"}
"""Operations on two tensors, channel by channel."""


def whole(size: int) -> Axis:
    """An axis that is never sliced."""
    return (Segment(1, size),)


@functools.lru_cache(maxsize=16)
def layout(fleet: Fleet, task: Task) -> Layout:
    """The axes of the weights of the fleet's one model."""
    with torch.device("meta"), seeded(0, "layout"):
        model = fleet.build(fleet.models[0], task)
    return trace(model, task)


def trace(model: SplitModel, task: Task, run: Callable[[Tensor], Any] | None = None) -> Layout:
    """The axes of a model's weights. The outputs of layers called `head` are the classes, which are
    never sliced. The model is spent afterwards: it must be one without memory, of the meta device.
    """
    tracer = _Tracer(model)
    for path, module in model.named_modules():
        module.register_forward_pre_hook(functools.partial(tracer.enter, path))
        module.register_forward_hook(tracer.leave)
    model.eval()
    x = torch.zeros(2, task.channels, task.image_size, task.image_size, device="meta")
    tracer.mark(x, whole(task.channels))
    with tracer, torch.no_grad():
        (run or model)(x)
    for name, tensor in model.state_dict().items():
        if tensor.dim() and name not in tracer.found:
            raise ConfigError(_refusal(model, name, "no convolution, linear layer or batch norm"))
    return {name: tracer.found.get(name, ()) for name in model.state_dict()}


def _refusal(model: SplitModel, layer: str, why: str) -> str:
    return (
        f"{model.name} cannot be sliced: its layer {layer} is {why}. "
        "Try --fleet.models slim_resnet18, and no --fleet.feature-dim"
    )


class _Tracer(TorchFunctionMode):
    def __init__(self, model: SplitModel) -> None:
        super().__init__()
        self.model = model
        self.found: Layout = {}
        self._modules: list[tuple[str, nn.Module]] = []
        weights = [*model.named_parameters(), *model.named_buffers()]
        self._names = {id(tensor): name for name, tensor in weights}

    def enter(self, path: str, module: nn.Module, _: Any) -> None:
        self._modules.append((path, module))

    def leave(self, *_: Any) -> None:
        self._modules.pop()

    def mark(self, tensor: Tensor, axis: Axis) -> None:
        tensor.channels = axis  # type: ignore[attr-defined]

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        before = [t.shape for t in _marked(args)]
        out = func(*args, **(kwargs or {}))
        if before and isinstance(out, Tensor):
            self.mark(out, self._axis(func.__name__, args, kwargs or {}, before, out))
        return out

    def _axis(
        self, name: str, args: Sequence[Any], kwargs: Any, before: list[torch.Size], out: Tensor
    ) -> Axis:
        """The channels of what operation `name` gave."""
        inputs: list[Axis] = [t.channels for t in _marked(args)]  # type: ignore[attr-defined]
        first, shape = inputs[0], before[0]
        if name == "conv2d":
            return self._conv(args, first, out)
        if name == "linear" and len(shape) == 2:
            axis = whole(out.shape[1]) if self._at().endswith("head") else (Segment(out.shape[1]),)
            self._weights(args[1:2], axis, first)
            self._weights(args[2:], axis)
            return axis
        if name == "batch_norm":
            self._weights([*args[1:], *kwargs.values()], first)
            return first
        if name == "cat" and (args[1:] or (kwargs.get("dim"),))[0] == 1:
            return tuple(segment for axis in inputs for segment in axis)
        if name == "flatten" and len(out.shape) == 2:
            pixels = shape[2:].numel()
            return tuple(Segment(width, repeat * pixels) for width, repeat in first)
        together = name in _TOGETHER and all(axis == first for axis in inputs)
        if (name in _ONE_BY_ONE or together) and len(shape) == len(out.shape):
            return first
        raise ConfigError(_refusal(self.model, self._at(), self._kind(name)))

    def _conv(self, args: Sequence[Any], first: Axis, out: Tensor) -> Axis:
        groups = args[6] if len(args) > 6 else 1
        kernel = [whole(size) for size in args[1].shape[2:]]
        if groups == 1:
            axis: Axis = (Segment(out.shape[1]),)
            self._weights(args[1:2], axis, first, *kernel)
        elif groups == args[0].shape[1] == out.shape[1]:
            axis = first  # depthwise
            self._weights(args[1:2], axis, whole(1), *kernel)
        else:
            why = f"{self._kind('')} in {groups} groups"
            raise ConfigError(_refusal(self.model, self._at(), why))
        self._weights(args[2:3], axis)
        return axis

    def _weights(self, tensors: Sequence[Any], *axes: Axis) -> None:
        for tensor in tensors:
            name = self._names.get(id(tensor), "")
            if tensor is None or not name:
                continue
            if self.found.setdefault(name, axes) != axes:
                raise ConfigError(_refusal(self.model, name, "used twice, for other channels"))

    def _at(self) -> str:
        return self._modules[-1][0] or "forward" if self._modules else "forward"

    def _kind(self, name: str) -> str:
        kind = type(self._modules[-1][1]).__name__ if self._modules else ""
        return f"a {kind}" + (f" ({name})" if name and name != kind.lower() else "")


def _marked(args: Sequence[Any]) -> list[Tensor]:
    """The tensors among the arguments, and in their lists, whose channels are known."""
    flat = [one for arg in args for one in (arg if isinstance(arg, list | tuple) else [arg])]
    return [t for t in flat if isinstance(t, Tensor) and hasattr(t, "channels")]
