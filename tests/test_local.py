"""Local training: nobody sends, nobody hears, and only the chosen train."""

from itertools import pairwise
from pathlib import Path

import tiny
import torch
from torch.testing import assert_close

from methods.local import Local
from raysim import ClientState, Config, FleetConfig, TrainConfig, schedule, wire
from raysim.backends.local import LocalBackend
from raysim.events import Event, RoundFinished

DATA = tiny.points(
    [(1, 5), (3, 1), (2, 2), (9, 4), (5, 5), (0, 7), (4, 4), (6, 2)], [0, 1, 0, 1, 1, 0, 0, 1], 2
)
SPLIT = tiny.deal([0, 1], [2, 3], [4, 5], [6, 7])
FLEET = FleetConfig(("mlp",), 16)


def config(out: Path | None = None, participation: float = 0.5) -> Config:
    return Config(
        method="local", clients=4, participation=participation, rounds=4, out=out, fleet=FLEET,
        train=TrainConfig(lr=0.1),
    )  # fmt: skip


def test_client_takes_a_step_of_cross_entropy() -> None:
    """A head of zeros on r = x: softmax = (1/2, 1/2). For (1, 2) of class 0 dz = (-1/2, 1/2), for
    (3, 0) of class 1 dz = (1/2, -1/2); half their sum is

    dW = 1/2 [[-1/2 + 3/2, -1], [1/2 - 3/2, 1]] = [[1/2, -1/2], [-1/2, 1/2]],  db = (0, 0)
    """
    data = tiny.points([(1, 2), (3, 0)], [0, 1], num_classes=2)
    client = ClientState(tiny.model(head=[[0, 0], [0, 0]]))
    assert tiny.update(Local(), client, None, tiny.client_context(data, lr=0.1)) is None
    head = client.model.head
    assert_close(head.weight.detach(), torch.tensor([[-0.05, 0.05], [0.05, -0.05]]))
    assert_close(head.bias.detach(), torch.zeros(2))


def test_nothing_is_sent(tmp_path: Path) -> None:
    run = tiny.simulate(config(tmp_path, participation=1.0), DATA, SPLIT)
    assert run.messages == []
    traffic = ("scalars_up", "scalars_down", "bytes_up", "bytes_down")
    assert len(run.rounds) == 4
    assert all(row[key] == 0 for row in run.rounds for key in traffic)
    assert all(row["train_loss"] > 0 for row in run.rounds), "though everybody trained"


def test_models_change_when_their_clients_are_chosen_and_only_then(tmp_path: Path) -> None:
    """Evaluations of all four clients run between the rounds, and must not count as training."""
    history: list[dict[int, str]] = [{}]

    def watch(event: Event, backend: LocalBackend) -> None:
        if isinstance(event, RoundFinished):
            history.append({client: state.digest() for client, state in backend.states()})

    run = tiny.simulate(config(tmp_path), DATA, SPLIT, watch)
    cohorts = [set(schedule.cohort(0, number, 4, 0.5)) for number in range(1, 5)]
    changed = [
        {client for client in new if new[client] != old.get(client)}
        for old, new in pairwise(history)
    ]
    assert changed == cohorts
    assert any(a & b for a, b in pairwise(cohorts)), "some train twice in a row"
    assert any(a != b for a, b in pairwise(cohorts)), "some pause"
    assert set(run.states) == set().union(*cohorts)


def test_training_moves_the_whole_model_from_where_it_was() -> None:
    worker = tiny.make_worker(config(), DATA, SPLIT)
    models = []
    state = None
    for number in (1, 2):
        state, _ = tiny.play(worker, None, client=0, round=number, state=state)
        models.append(wire.unpack(state)["model"])
    assert all(not torch.equal(models[0][layer], models[1][layer]) for layer in models[0])


def test_no_client_hears_of_another() -> None:
    """One worker plays them all with one built model; a client's result is as if it were alone."""
    alone, crowded = (tiny.make_worker(config(), DATA, SPLIT) for _ in range(2))
    first, _ = tiny.play(alone, None, client=2, round=1)
    expected, _ = tiny.play(alone, None, client=2, round=2, state=first)

    tiny.play(crowded, None, client=0, round=1)
    state, _ = tiny.play(crowded, None, client=2, round=1)
    tiny.play(crowded, None, client=1, round=1)
    found, _ = tiny.play(crowded, None, client=2, round=2, state=state)
    assert state.digest() == first.digest()
    assert found.digest() == expected.digest()
