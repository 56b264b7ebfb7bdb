"""A state read where it is stored gives what a copy of it gives, and nobody writes to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from test_contract import simulate
from torch import Tensor, nn

import methods
from raysim import wire
from raysim.states import lent, load_state, state_tree

CPU = torch.device("cpu")
LENDING = [name for name in methods.names() if methods.get(name).only_reads]


@dataclass
class State:
    model: nn.Module
    table: Tensor


def state() -> State:
    return State(nn.Sequential(nn.Linear(200, 100), nn.BatchNorm1d(100)), torch.randn(3))


def packed(of: State) -> Any:
    return wire.pack(state_tree(of))


def test_what_is_lent_is_not_copied_and_given_back() -> None:
    stored, borrower = packed(state()), state()
    own = {name: value.data_ptr() for name, value in borrower.model.named_parameters()}
    before = borrower.model[0].weight.clone()  # type: ignore[index,operator]
    tree = wire.peek(stored)
    with lent(borrower, tree, CPU):
        weights = dict(borrower.model.named_parameters())
        assert weights["0.weight"].data_ptr() == tree["model"]["0.weight"].data_ptr()
        assert weights["0.bias"].data_ptr() == own["0.bias"], "small ones are copied"
        for name, value in borrower.model.state_dict().items():
            assert torch.equal(value, tree["model"][name]), name
        assert torch.equal(borrower.table, tree["table"])
        assert borrower.table.data_ptr() != tree["table"].data_ptr()
    assert {k: v.data_ptr() for k, v in borrower.model.named_parameters()} == own
    assert torch.equal(borrower.model[0].weight, before)  # type: ignore[index]


def test_lending_gives_the_bits_of_a_copy() -> None:
    stored, one, other = packed(state()), state(), state()
    x = torch.randn(7, 200)
    load_state(one, wire.peek(stored), CPU)
    one.model.eval()
    other.model.eval()
    with lent(other, wire.peek(stored), CPU):
        assert torch.equal(one.model(x), other.model(x))


def test_what_lies_otherwise_in_memory_is_copied() -> None:
    """A kernel may round differently on it."""
    stored, borrower = packed(state()), state()
    shifted = torch.empty(stored.buffer.nbytes + 4, dtype=torch.uint8)[4:]
    shifted.numpy()[:] = stored.buffer
    tree = wire.peek(stored._replace(buffer=shifted.numpy()))
    own = borrower.model[0].weight.data_ptr()  # type: ignore[index,operator,union-attr]
    with lent(borrower, tree, CPU):
        assert borrower.model[0].weight.data_ptr() == own  # type: ignore[index,operator,union-attr]
        assert torch.equal(borrower.model[0].weight, tree["model"]["0.weight"])  # type: ignore[index]


def test_some_methods_lend() -> None:
    assert {"fedproto", "local"} <= set(LENDING)


@pytest.mark.parametrize("method", LENDING)
def test_an_evaluation_that_says_so_only_reads(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray's memory is read-only: a write would end the process, so it must be seen here."""
    lendings = []

    @contextmanager
    def watched(client: Any, tree: dict[str, Any], device: torch.device) -> Iterator[None]:
        with lent(client, tree, device):
            tensors = list(client.model.state_dict(keep_vars=True).values())
            versions = [tensor._version for tensor in tensors]
            yield
            lendings.append(versions == [tensor._version for tensor in tensors])

    monkeypatch.setattr("raysim.worker.lent", watched)
    simulate(method, tmp_path / "run")
    assert lendings
    assert all(lendings)
