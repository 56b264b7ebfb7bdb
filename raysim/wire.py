"""What may cross between client and server: check, copy, encode, measure. Checkpoints use the same
codec.

A *tree* is made of tensors, numbers, text, None, lists, tuples, dicts and NamedTuples. `pack` turns
one into a JSON header and one contiguous buffer; `unpack` builds it again with fresh memory, so
nothing is shared between sender and receiver. Decoding runs no code: a NamedTuple is rebuilt only
from the classes the reader passes in.
"""

import ctypes
import hashlib
import json
import math
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from raysim.errors import WireError

T = TypeVar("T")
Weights = dict[str, Tensor]

_UNCOUNTED = "the papers do not count this field"
Uncounted = Annotated[T, _UNCOUNTED]
"""Marks a message field (a label, an id) that the papers leave out of their communication counts.
It still appears in the ledger as `numbers` and `bytes`."""

ALIGNMENT = 64  # torch's own; kernels may round differently on memory that is aligned otherwise
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32, torch.float64, torch.float16, torch.bfloat16,
        torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
    )
}  # fmt: skip
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class Packed(NamedTuple):
    """An encoded tree: its structure as JSON, its tensors in one buffer."""

    header: bytes
    buffer: np.ndarray[Any, np.dtype[np.uint8]]

    @property
    def nbytes(self) -> int:
        return len(self.header) + self.buffer.nbytes

    def digest(self) -> str:
        """SHA-256 over header and buffer."""
        sha = hashlib.sha256(self.header)
        sha.update(self.buffer.data)
        return sha.hexdigest()


class Like(NamedTuple):
    """What a tensor of a payload must be; None in a shape is any size."""

    shape: tuple[int | None, ...]
    dtype: torch.dtype = torch.float32


def like(*shape: int | None, dtype: torch.dtype = torch.float32) -> Any:
    """A Like where a tensor is declared; typed Any because it stands in for one."""
    return Like(shape, dtype)


class Size(NamedTuple):
    """What one field of a message weighs."""

    field: str
    scalars: int
    """Floating-point numbers, as the papers count: without Uncounted fields and batch-norm
    statistics."""
    numbers: int
    """All numbers."""
    bytes: int
    """Bytes as encoded."""


class _Encoder:
    def __init__(self) -> None:
        self.tensors: list[tuple[int, Tensor]] = []
        self.size = 0

    def encode(self, value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if value is None or isinstance(value, bool | int | float | str):
            return ["v", value]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            items = [
                self.encode(v, f"{path}.{k}") for k, v in zip(value._fields, value, strict=True)
            ]
            return ["n", type(value).__name__, items]
        if isinstance(value, list | tuple):
            kind = "l" if isinstance(value, list) else "t"
            return [kind, [self.encode(v, f"{path}[{i}]") for i, v in enumerate(value)]]
        if isinstance(value, Mapping):
            for key in value:
                if isinstance(key, bool) or not isinstance(key, int | str):
                    raise WireError(f"{path} has the key {key!r}; keys must be text or int")
            return ["d", [[key, self.encode(v, f"{path}.{key}")] for key, v in value.items()]]
        raise WireError(_refusal(value, path))

    def _tensor(self, value: Tensor, path: str) -> Any:
        name = str(value.dtype).removeprefix("torch.")
        if name not in _DTYPES:
            raise WireError(
                f"{path} is a tensor of type {name}; expected one of {', '.join(_DTYPES)}"
            )
        offset = -(-self.size // ALIGNMENT) * ALIGNMENT
        self.tensors.append((offset, value))
        self.size = offset + value.numel() * value.element_size()
        return ["x", name, list(value.shape), offset]


def _refusal(value: Any, path: str) -> str:
    if isinstance(value, nn.Module):
        return f"{path} is a {type(value).__name__}; send get_weights(module), not the module"
    if isinstance(value, np.ndarray):
        return f"{path} is a numpy array; send torch.as_tensor(array)"
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return f"{path} is a {kind}; expected tensors, numbers, text, None and containers of them"


def pack(tree: Any, name: str = "state") -> Packed:
    """Encode a tree into memory of its own; `name` opens the path in error messages."""
    encoder = _Encoder()
    header = json.dumps(encoder.encode(tree, name), separators=(",", ":")).encode()
    storage = torch.empty(encoder.size, dtype=torch.uint8)
    end = 0
    for offset, tensor in encoder.tensors:
        storage[end:offset] = 0  # what lies between is part of the digest
        end = offset + tensor.numel() * tensor.element_size()
        if tensor.numel():
            storage[offset:end].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    return Packed(header, storage.numpy())


def unpack(packed: Packed, types: Mapping[str, type] | None = None) -> Any:
    """Decode into fresh, writable memory. `types` are the NamedTuple classes that may be rebuilt,
    by name."""
    storage = torch.empty(packed.buffer.nbytes, dtype=torch.uint8)
    storage.numpy()[:] = packed.buffer
    return _decode(packed, storage, types or {})


def peek(packed: Packed, types: Mapping[str, type] | None = None) -> Any:
    """Decode without copying: the tensors are the packed memory itself, to be copied elsewhere at
    once and never written to."""
    # By address, because torch warns about read-only arrays, and Ray's are.
    size = packed.buffer.nbytes
    alias = (ctypes.c_uint8 * size).from_address(packed.buffer.ctypes.data)
    storage = (
        torch.frombuffer(alias, dtype=torch.uint8) if size else torch.empty(0, dtype=torch.uint8)
    )
    return _decode(packed, storage, types or {})


def _decode(packed: Packed, storage: Tensor, known: Mapping[str, type]) -> Any:

    def decode(node: Any) -> Any:
        match node:
            case ["v", value]:
                return value
            case ["x", dtype, shape, offset]:
                kind = _DTYPES[dtype]
                end = offset + math.prod(shape) * kind.itemsize
                return storage[offset:end].view(kind).view(shape)
            case ["l", items]:
                return [decode(item) for item in items]
            case ["t", items]:
                return tuple(decode(item) for item in items)
            case ["d", items]:
                return {key: decode(item) for key, item in items}
            case ["n", cls, items]:
                if cls not in known:
                    raise WireError(
                        f"unknown message type {cls!r}; known: {', '.join(known) or 'none'}"
                    )
                return known[cls](*[decode(item) for item in items])
        raise WireError(f"not a packed tree: {str(node)[:60]}")

    return decode(json.loads(packed.header))


def check_finite(tree: Any, name: str) -> None:
    """Raise a WireError that names the first field holding a NaN or an infinity."""
    for path, value in leaves(tree, name):
        if isinstance(value, Tensor):
            # A sum is finite only if all terms are; only a sum that is not costs a second look.
            finite = (
                not value.is_floating_point()
                or bool(value.sum().isfinite())
                or bool(value.isfinite().all())
            )
        else:
            finite = not isinstance(value, float) or math.isfinite(value)
        if not finite:
            raise WireError(f"{path} holds a number that is not finite")


def check_like(tree: Any, expected: Any, name: str) -> None:
    """Raise a WireError that names the first field which is not as declared. `expected` is a tree
    with a Like in place of each tensor; None in it accepts anything."""
    if expected is None:
        return
    if isinstance(expected, Like):
        if not isinstance(tree, Tensor):
            raise WireError(f"{name} is a {type(tree).__name__}; expected a tensor")
        same = len(tree.shape) == len(expected.shape) and all(
            size in (found, None) for found, size in zip(tree.shape, expected.shape, strict=True)
        )
        if not same or tree.dtype != expected.dtype:
            found = f"{tree.dtype} {list(tree.shape)}"
            raise WireError(f"{name} is {found}; expected {expected.dtype} {list(expected.shape)}")
    elif isinstance(expected, Mapping):
        if not isinstance(tree, Mapping) or list(tree) != list(expected):
            keys = ", ".join(map(str, list(expected)[:4]))
            raise WireError(f"{name} does not have the keys that were expected ({keys}, ...)")
        for key, value in expected.items():
            check_like(tree[key], value, f"{name}.{key}")
    elif type(tree) is not type(expected):
        raise WireError(f"{name} is a {type(tree).__name__}; expected {type(expected).__name__}")
    elif isinstance(expected, tuple) and hasattr(expected, "_fields"):
        for field, value, like in zip(expected._fields, tree, expected, strict=True):
            check_like(value, like, f"{name}.{field}")


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of a tree with its path."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        for field, value in zip(tree._fields, tree, strict=True):
            yield from leaves(value, f"{path}.{field}")
    elif isinstance(tree, list | tuple):
        for i, value in enumerate(tree):
            yield from leaves(value, f"{path}[{i}]")
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}")
    else:
        yield path, tree


def map_tensors(tree: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The same tree with every tensor replaced."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(value, function) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(value, function) for value in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(map_tensors(value, function) for value in tree)
    return tree


def measure(tree: Any, name: str) -> list[Size]:
    """What a message weighs, field by field; a message that is not a NamedTuple is one field called
    `name`."""
    if tree is None:
        return []
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        uncounted = _uncounted_fields(type(tree))
        parts = zip(tree._fields, tree, strict=True)
        return [_size(field, value, field not in uncounted) for field, value in parts]
    return [_size(name, tree, True)]


def _size(field: str, value: Any, counted: bool) -> Size:
    scalars = numbers = 0
    for path, leaf in leaves(value):
        if isinstance(leaf, Tensor):
            numbers += leaf.numel()
            statistic = path.rsplit(".", 1)[-1] in _BUFFERS
            if counted and leaf.is_floating_point() and not statistic:
                scalars += leaf.numel()
        elif isinstance(leaf, int | float):
            numbers += 1
            scalars += counted and isinstance(leaf, float)
    encoder = _Encoder()
    header = json.dumps(encoder.encode(value, field), separators=(",", ":"))
    tensors = sum(tensor.numel() * tensor.element_size() for _, tensor in encoder.tensors)
    return Size(field, scalars, numbers, len(header) + tensors)


def _uncounted_fields(cls: type) -> set[str]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {k for k, hint in hints.items() if _UNCOUNTED in getattr(hint, "__metadata__", ())}
