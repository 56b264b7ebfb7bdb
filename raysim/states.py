"""A state as a tree for the wire, and back."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from raysim import ops, wire

_LARGE = 2**16
"""Bytes from which lending a parameter is cheaper than copying it."""


def state_tree(state: Any) -> dict[str, Any]:
    """A state dataclass as a tree for the wire: modules become their weights."""
    values = {field.name: getattr(state, field.name) for field in fields(state)}
    return {
        name: ops.get_weights(value) if isinstance(value, nn.Module) else value
        for name, value in values.items()
    }


def load_state(state: Any, tree: dict[str, Any], device: torch.device) -> None:
    """The inverse of `state_tree`, into a state of the same structure, in place. Copies: the tree
    may be borrowed memory."""
    for field in fields(state):
        current = getattr(state, field.name)
        if isinstance(current, nn.Module):
            ops.set_weights(current, tree[field.name])
        else:
            setattr(
                state, field.name, wire.map_tensors(tree[field.name], lambda t: _own(t, device))
            )


@contextmanager
def lent(state: Any, tree: dict[str, Any], device: torch.device) -> Iterator[None]:
    """`load_state` for a block that never writes to a module: its large parameters are the tree's
    own memory meanwhile."""
    taken: list[tuple[nn.Parameter, Tensor]] = []
    rest = dict(tree)
    for field in fields(state):
        module = getattr(state, field.name)
        if not isinstance(module, nn.Module):
            continue
        weights = rest[field.name] = dict(tree[field.name])
        for name, parameter in module.named_parameters():
            given = weights.get(name)
            if given is not None and _alike(parameter, given):
                taken.append((parameter, parameter.data))
                parameter.data = weights[name] = given
    load_state(state, rest, device)
    yield
    for parameter, own in taken:
        parameter.data = own


def _alike(parameter: Tensor, given: Tensor) -> bool:
    """Whether the kernels will do the very same with either."""
    return (
        given.nbytes >= _LARGE
        and parameter.shape == given.shape
        and parameter.dtype == given.dtype
        and parameter.device == given.device
        and parameter.is_contiguous()
        and given.data_ptr() % wire.ALIGNMENT == 0
    )


def _own(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.clone() if device.type == "cpu" else tensor.to(device)
