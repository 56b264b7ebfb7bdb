"""The wire: what may cross, that it is copied, and what it weighs."""

import math
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from raysim import get_weights, wire
from raysim.errors import WireError
from raysim.wire import Packed, Size, Uncounted, Weights

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


class Pair(NamedTuple):
    first: Any
    second: Any


class Upload(NamedTuple):
    representation: Tensor
    label: Uncounted[Tensor]
    count: int = 0


TYPES: dict[str, type] = {"Pair": Pair, "Upload": Upload}


def bits(tensor: Tensor) -> bytes:
    """The numbers as they lie in memory, so that a NaN equals itself and -0 is not 0."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return (a.dtype, a.shape, bits(a)) == (b.dtype, b.shape, bits(b))
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)  # NaN equals itself here, and -0.0 is not 0.0


def tensors_in(tree: Any) -> Iterator[Tensor]:
    return (leaf for _, leaf in wire.leaves(tree) if isinstance(leaf, Tensor))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any bit pattern in any type and shape: infinities, NaNs; empty, 0-d, transposed."""
    dtype = draw(st.sampled_from(FLOATS + INTEGERS))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    if dtype == torch.bool:
        values = draw(st.lists(st.booleans(), min_size=size, max_size=size))
        tensor = torch.tensor(values, dtype=torch.bool)
    else:
        content = draw(st.binary(min_size=size, max_size=size))
        tensor = torch.tensor(list(content), dtype=torch.uint8).view(dtype)
    tensor = tensor.reshape(shape)
    return tensor.transpose(0, -1) if len(shape) > 1 and draw(st.booleans()) else tensor


KEYS = st.text(max_size=5) | st.integers()
LEAVES = tensors() | st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
TREES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=8,
)


# Round trips


@settings(deadline=None, max_examples=150)
@given(TREES)
def test_any_tree_comes_back_as_it_was(tree: Any) -> None:
    assert same(tree, wire.unpack(wire.pack(tree), TYPES))


@settings(deadline=None, max_examples=60)
@given(TREES)
def test_every_decoded_tensor_is_aligned_as_torch_aligns_its_own(tree: Any) -> None:
    back = wire.unpack(wire.pack(tree), TYPES)
    assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors_in(back) if tensor.numel())


@settings(deadline=None, max_examples=60)
@given(TREES)
def test_packing_what_was_unpacked_gives_the_same_digest(tree: Any) -> None:
    packed = wire.pack(tree)
    assert wire.pack(wire.unpack(packed, TYPES)).digest() == packed.digest()


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5,), (2, 3, 4)], ids=str)
def test_every_dtype_and_shape_crosses(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    back = wire.unpack(wire.pack({"a": tensor, "b": [tensor, tensor]}))
    assert all(same(tensor, copy) for copy in tensors_in(back))


def test_an_empty_tensor_at_the_end_crosses() -> None:
    tree = [torch.ones(3), torch.ones(0, 7), torch.ones(0)]
    assert same(tree, wire.unpack(wire.pack(tree)))


@pytest.mark.parametrize("tree", [None, 0, "", [], (), {}, torch.tensor(1.5), [[], {}, ((),)]])
def test_small_trees_cross(tree: Any) -> None:
    assert same(tree, wire.unpack(wire.pack(tree)))


def test_int_and_text_keys_stay_what_they_are_in_order() -> None:
    tree = {2: "b", "2": "text", 1: "a", -1: "c", "": "empty", "a.b": "dotted"}
    back = wire.unpack(wire.pack(tree))
    assert list(back.items()) == list(tree.items())


def test_numbers_beyond_64_bits_infinities_and_minus_zero_cross() -> None:
    tree = [2**80, -(2**80), math.inf, -math.inf, math.nan, -0.0, 5e-324]
    assert same(tree, wire.unpack(wire.pack(tree)))


def test_a_mapping_of_another_class_arrives_as_a_dict() -> None:
    back = wire.unpack(wire.pack(OrderedDict(a=1)))
    assert type(back) is dict
    assert back == {"a": 1}


def test_a_numpy_float64_arrives_as_a_float() -> None:
    back = wire.unpack(wire.pack({"loss": np.float64(0.1)}))
    assert type(back["loss"]) is float
    assert back["loss"] == 0.1


def test_a_named_tuple_keeps_its_class() -> None:
    sent = Pair(Upload(torch.ones(2), torch.zeros(3), 4), {"deep": [Pair(1, 2)]})
    back = wire.unpack(wire.pack(sent), TYPES)
    assert type(back) is Pair
    assert type(back.first) is Upload
    assert back.first.count == 4
    assert back.second == {"deep": [Pair(1, 2)]}


def test_weights_of_a_module_cross_with_their_buffers() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    back = wire.unpack(wire.pack(get_weights(module)))
    assert same(dict(module.state_dict()), back)


def test_a_parameter_that_needs_gradients_arrives_without_them() -> None:
    back = wire.unpack(wire.pack(nn.Parameter(torch.ones(2))))
    assert type(back) is Tensor
    assert not back.requires_grad


# Copies: nothing is shared


def test_changing_the_original_after_packing_changes_nothing() -> None:
    original = {"w": torch.ones(3), "n": [1, 2]}
    packed = wire.pack(original)
    original["w"].zero_()
    original["n"].append(3)
    assert same({"w": torch.ones(3), "n": [1, 2]}, wire.unpack(packed))


def test_changing_the_copy_changes_neither_the_original_nor_a_second_copy() -> None:
    original = torch.ones(3)
    packed = wire.pack(original)
    digest = packed.digest()
    first, second = wire.unpack(packed), wire.unpack(packed)
    first.fill_(7)
    assert original.tolist() == second.tolist() == [1, 1, 1]
    assert packed.digest() == digest


def test_one_tensor_sent_twice_arrives_as_two() -> None:
    tensor = torch.ones(3)
    first, second = wire.unpack(wire.pack([tensor, tensor]))
    first.zero_()
    assert second.tolist() == [1, 1, 1]


def test_neighbors_in_the_buffer_do_not_overlap() -> None:
    tree = [torch.full((n,), n, dtype=torch.uint8) for n in (1, 63, 64, 65, 2)]
    back = wire.unpack(wire.pack(tree))
    for i, tensor in enumerate(back):
        tensor.fill_(200 + i)
    assert all((tensor == 200 + i).all() for i, tensor in enumerate(back))


def test_a_read_only_buffer_decodes_to_memory_that_can_be_written() -> None:
    """As Ray hands it over: mapped from the object store, where nobody may write."""
    packed = wire.pack({"w": torch.ones(3)})
    packed.buffer.setflags(write=False)
    back = wire.unpack(packed)
    back["w"].zero_()
    assert wire.unpack(packed)["w"].tolist() == [1, 1, 1]
    assert len(packed.digest()) == 64


# What is refused, and in which words


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"head": nn.Linear(2, 2)}, "payload.head is a Linear; send get_weights"),
        ([1, {"x": np.ones(2)}], r"payload\[1\].x is a numpy array; send torch.as_tensor"),
        (Pair(1, len), "payload.second is a builtins.builtin_function_or_method; expected tensors"),
        (Pair([lambda: 0], 1), r"payload.first\[0\] is a builtins.function; expected tensors"),
        ((0, {1, 2}), r"payload\[1\] is a builtins.set; expected tensors"),
        ({"a": b"bytes"}, "payload.a is a builtins.bytes; expected tensors"),
        ({"a": np.float32(1)}, "payload.a is a numpy.float32; expected tensors"),
        ({"a": torch.float32}, "payload.a is a torch.dtype; expected tensors"),
        ({"a": torch.ones(1, dtype=torch.complex64)}, "payload.a is a tensor of type complex64"),
        (nn.ReLU(), "payload is a ReLU; send get_weights"),
    ],
)
def test_what_may_not_cross_is_refused_by_its_path(tree: Any, message: str) -> None:
    with pytest.raises(WireError, match=f"^{message}"):
        wire.pack(tree, "payload")


@pytest.mark.parametrize("key", [True, None, 1.5, (1, 2), b"a"])
def test_a_key_that_is_neither_text_nor_int_is_refused_by_its_path(key: Any) -> None:
    with pytest.raises(WireError, match=r"^message\.a has the key .*; keys must be text or int"):
        wire.pack({"a": {key: 1}}, "message")


def test_a_complex_tensor_is_told_what_is_expected() -> None:
    with pytest.raises(WireError, match=r"expected one of float32, float64, .*bool"):
        wire.pack(torch.ones(1, dtype=torch.complex64))


def test_an_unknown_named_tuple_is_an_error_that_lists_the_known_ones() -> None:
    packed = wire.pack({"deep": [Pair(1, 2)]})
    with pytest.raises(WireError, match="unknown message type 'Pair'; known: none"):
        wire.unpack(packed)
    with pytest.raises(WireError, match="unknown message type 'Pair'; known: Upload"):
        wire.unpack(packed, {"Upload": Upload})


# Decoding runs no code


def crafted(header: str) -> Packed:
    return Packed(header.encode(), np.zeros(0, dtype=np.uint8))


@pytest.mark.parametrize(
    "name", ["eval", "os.system", "builtins.exec", "Pair.__class__", "__import__"]
)
def test_a_header_cannot_name_a_function_to_call(name: str) -> None:
    with pytest.raises(WireError, match="unknown message type"):
        wire.unpack(crafted(f'["n","{name}",[["v","1/0"]]]'), TYPES)


@pytest.mark.parametrize("header", ["{}", "[]", '["z",1]', '["v"]', '"text"', '["v",1,2]', "null"])
def test_a_header_of_another_shape_is_refused(header: str) -> None:
    with pytest.raises(WireError, match="not a packed tree"):
        wire.unpack(crafted(header))


def explode() -> None:
    raise RuntimeError("code from the wire was run")


class Bomb:
    def __reduce__(self) -> Any:
        return explode, ()


def test_a_pickle_in_place_of_a_header_is_never_loaded() -> None:
    bomb = pickle.dumps(Bomb())
    with pytest.raises(RuntimeError, match="code from the wire"):
        pickle.loads(bomb)
    with pytest.raises((WireError, ValueError)):
        wire.unpack(Packed(bomb, np.zeros(0, dtype=np.uint8)))


# Digests


def test_equal_trees_have_equal_digests_whatever_their_memory_layout() -> None:
    table = torch.arange(6.0).reshape(2, 3)
    transposed = torch.arange(6.0).reshape(2, 3).t().contiguous().t()
    assert transposed.stride() != table.stride()
    assert wire.pack({"a": table}).digest() == wire.pack({"a": transposed}).digest()


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.tensor([1.0, 2.0]), "n": 2},
        {"a": torch.tensor([1.0, 3.0]), "n": 1},
        {"a": torch.tensor([1.0, 2.0], dtype=torch.float64), "n": 1},
        {"a": torch.tensor([[1.0, 2.0]]), "n": 1},
        {"b": torch.tensor([1.0, 2.0]), "n": 1},
        {"a": torch.tensor([1.0, 2.0]), "n": 1.0},
        {"a": torch.tensor([1.0, 2.0]), "n": True},
        [torch.tensor([1.0, 2.0]), 1],
    ],
    ids=["number", "value", "dtype", "shape", "key", "float", "bool", "list"],
)
def test_any_difference_changes_the_digest(other: Any) -> None:
    one = {"a": torch.tensor([1.0, 2.0]), "n": 1}
    assert wire.pack(one).digest() != wire.pack(other).digest()


def test_the_size_of_a_packed_tree_is_its_header_and_its_buffer() -> None:
    packed = wire.pack(torch.ones(3))
    assert packed.header == b'["x","float32",[3],0]'
    assert packed.nbytes == 21 + 12


# Finite numbers


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_tensor_that_is_not_finite_is_refused_by_its_path(bad: float, dtype: torch.dtype) -> None:
    weight = torch.ones(2, 3, dtype=dtype)
    weight[1, 2] = bad
    tree = Pair({"ok": torch.ones(2)}, {"layers": [{"weight": weight}]})
    with pytest.raises(WireError, match=r"^payload\.second\.layers\[0\]\.weight holds a number"):
        wire.check_finite(tree, "payload")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_plain_number_that_is_not_finite_is_refused_by_its_path(bad: float) -> None:
    with pytest.raises(WireError, match=r"^message\.3\.scale holds a number that is not finite"):
        wire.check_finite({3: {"scale": bad}}, "message")


def test_infinities_that_cancel_are_still_refused() -> None:
    with pytest.raises(WireError, match=r"^payload holds a number"):
        wire.check_finite(torch.tensor([math.inf, -math.inf, 1.0]), "payload")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.full((4,), 3e38),
        torch.full((100,), 60_000.0, dtype=torch.float16),
        torch.full((4,), -1.7e308, dtype=torch.float64),
        torch.full((4,), 3e38, dtype=torch.bfloat16),
    ],
    ids=lambda tensor: str(tensor.dtype),
)
def test_finite_numbers_whose_sum_overflows_are_not_refused(tensor: Tensor) -> None:
    assert not tensor.sum().isfinite()
    wire.check_finite({"w": tensor}, "payload")


def test_everything_else_counts_as_finite() -> None:
    tree = [None, "nan", True, 2**2000, torch.ones(0), torch.tensor(3), torch.tensor(True), [], {}]
    wire.check_finite(tree, "payload")


# The ledger


def test_a_message_is_measured_field_by_field() -> None:
    """representation: 3 float32, header `["x","float32",[3],0]`: 21 + 12 bytes.
    label: not counted by the papers, 2 float32: 21 + 8 bytes. count: `["v",7]`: 7 bytes."""
    message = Upload(torch.ones(3), torch.tensor([0.5, 0.5]), count=7)
    assert wire.measure(message, "payload") == [
        Size("representation", scalars=3, numbers=3, bytes=33),
        Size("label", scalars=0, numbers=2, bytes=29),
        Size("count", scalars=0, numbers=1, bytes=7),
    ]


def test_a_message_that_is_not_a_named_tuple_is_one_field() -> None:
    (size,) = wire.measure({"w": torch.ones(2, 2), "b": torch.ones(2)}, "message")
    assert (size.field, size.scalars, size.numbers) == ("message", 6, 6)


def test_no_message_weighs_nothing() -> None:
    assert wire.measure(None, "message") == []


def test_an_empty_field_has_bytes_but_no_numbers() -> None:
    (first, second) = wire.measure(Pair(None, []), "message")
    assert (first.scalars, first.numbers, second.numbers) == (0, 0, 0)
    assert (first.bytes, second.bytes) == (len('["v",null]'), len('["l",[]]'))


def test_batch_norm_statistics_are_numbers_but_not_scalars() -> None:
    """BatchNorm of 4: weight and bias are 8 scalars; mean, variance and counter 9 numbers more."""
    weights: Weights = get_weights(nn.Sequential(nn.BatchNorm1d(4)))
    (size,) = wire.measure(weights, "message")
    assert (size.scalars, size.numbers) == (8, 17)
    assert size.bytes > 4 * 16 + 8


def test_integers_and_truth_values_are_numbers_but_not_scalars() -> None:
    message = Pair(torch.arange(5), [1, True, 2.5, "text", None, torch.tensor(False)])
    first, second = wire.measure(message, "message")
    assert (first.scalars, first.numbers) == (0, 5)
    assert (second.scalars, second.numbers) == (1, 4)


def test_bytes_follow_the_type_of_the_numbers() -> None:
    def weight(dtype: torch.dtype) -> int:
        return wire.measure(torch.ones(1000, dtype=dtype), "m")[0].bytes // 1000

    assert [weight(d) for d in (torch.bfloat16, torch.float32, torch.float64)] == [2, 4, 8]
    assert wire.measure(torch.ones(1000, dtype=torch.bfloat16), "m")[0].scalars == 1000


@settings(deadline=None, max_examples=60)
@given(tensors())
def test_a_tensor_weighs_what_it_packs_to(tensor: Tensor) -> None:
    (size,) = wire.measure(tensor, "message")
    assert size.bytes == wire.pack(tensor).nbytes
    assert size.numbers == tensor.numel()
    assert size.scalars == (tensor.numel() if tensor.is_floating_point() else 0)


def test_measuring_refuses_what_packing_refuses() -> None:
    with pytest.raises(WireError, match=r"^first is a Linear"):
        wire.measure(Pair(nn.Linear(1, 1), 0), "payload")


# Leaves


def test_leaves_come_with_their_paths() -> None:
    tree = Pair({"a": [1, (2,)]}, {3: None})
    expected = [("p.first.a[0]", 1), ("p.first.a[1][0]", 2), ("p.second.3", None)]
    assert list(wire.leaves(tree, "p")) == expected
