"""What a run writes down, against arithmetic of our own."""

import hashlib
import io
import json
import math
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from raysim import Config, Result, data, run, schedule
from raysim.console import PlainConsole

CLIENTS, COHORT, ROUNDS, SAMPLES = 7, 3, 4, 280
MODELS = ["cnn4", "cnn5"]
TREE: dict[str, Any] = {
    "clients": CLIENTS,
    "participation": 0.45,
    "rounds": ROUNDS,
    "backend": "local",
    "data": {"samples": SAMPLES, "alpha": 0.5},
    "fleet": {"models": MODELS},
    "train": {"batch_size": 16, "lr": 0.05},
}

PARROT = '''\
"""A method that can be worked out by hand: a client always answers what it last heard."""

from dataclasses import dataclass
from typing import NamedTuple

import torch.nn.functional as F
import torch

from raysim import ClientState, Method


class Word(NamedTuple):
    number: int


@dataclass
class Client(ClientState):
    answer: int = 9


@dataclass
class Server:
    rounds: int = 0


@dataclass(frozen=True)
class Parrot(Method[Client, Server]):
    def init_server(self, ctx):
        return Server()

    def init_client(self, model, ctx):
        return Client(model)

    def broadcast(self, server, cohort, ctx):
        return Word(server.rounds)

    def receive(self, client, message, ctx):
        client.answer = message.number

    def client_update(self, client, message, ctx):
        return Word(ctx.client_id)

    def server_update(self, server, replies, ctx):
        assert [reply.payload.number for reply in replies] == [r.client_id for r in replies]
        server.rounds += 1

    def predict(self, client, x):
        answers = torch.full((len(x),), client.answer)
        return F.one_hot(answers, 10).float()
'''


def simulate(out: Path, **changes: Any) -> Result:
    tree = {**TREE, "out": str(out)}
    for key, value in changes.items():
        tree[key] = {**tree.get(key, {}), **value} if isinstance(value, dict) else value
    return run(Config.from_tree(tree), PlainConsole(io.StringIO()))


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    torch.set_num_threads(1)
    return simulate(tmp_path_factory.mktemp("records") / "run")


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("parrot") / "parrot.py"
    file.write_text(PARROT)
    return str(file)


def rows(result: Result, phase: str) -> list[dict[str, Any]]:
    return [row for row in result.clients.to_pylist() if row["phase"] == phase]


def by_round(entries: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    groups = defaultdict(list)
    for entry in entries:
        groups[entry["round"]].append(entry)
    return dict(groups)


def correct(row: dict[str, Any]) -> int:
    """The number of right answers behind a client's accuracy, which must be a whole one."""
    count = round(row["accuracy"] * row["samples"])
    assert row["accuracy"] == pytest.approx(count / row["samples"], abs=1e-12)
    return count


# clients.parquet and rounds.parquet


def test_there_is_a_row_for_every_round_and_every_client_that_did_something(result: Result) -> None:
    assert result.rounds["round"].to_pylist() == [1, 2, 3, 4]
    assert result.rounds["cohort"].to_pylist() == [COHORT] * ROUNDS
    trained, evaluated = by_round(rows(result, "train")), by_round(rows(result, "eval"))
    assert result.clients.num_rows == ROUNDS * (COHORT + CLIENTS)
    for number in range(1, ROUNDS + 1):
        cohort = schedule.cohort(0, number, CLIENTS, 0.45)
        assert [row["client"] for row in trained[number]] == cohort
        assert [row["client"] for row in evaluated[number]] == list(range(CLIENTS))


def test_clients_are_told_with_their_model_and_their_samples(result: Result) -> None:
    sizes = {(row["client"], row["part"]): row["samples"] for row in result.split.to_pylist()}
    for phase, part in (("train", "train"), ("eval", "test")):
        for row in rows(result, phase):
            assert row["model"] == MODELS[row["client"] % 2]
            assert row["samples"] == sizes[row["client"], part]
            assert row["seconds"] > 0
            assert math.isfinite(row["loss"])


def test_accuracy_is_right_answers_over_samples(result: Result) -> None:
    evaluated = by_round(rows(result, "eval"))
    for entry in result.rounds.to_pylist():
        tested = evaluated[entry["round"]]
        total = sum(row["samples"] for row in tested)
        assert entry["accuracy"] == pytest.approx(sum(map(correct, tested)) / total, abs=1e-12)
        shares = [row["accuracy"] for row in tested]
        mean = sum(shares) / len(shares)
        spread = math.sqrt(sum((share - mean) ** 2 for share in shares) / len(shares))
        assert entry["accuracy_mean"] == pytest.approx(mean, abs=1e-12)
        assert entry["accuracy_std"] == pytest.approx(spread, abs=1e-12)
        loss = sum(row["loss"] * row["samples"] for row in tested) / total
        assert entry["test_loss"] == pytest.approx(loss)


def test_the_training_loss_is_weighted_by_samples(result: Result) -> None:
    trained = by_round(rows(result, "train"))
    for entry in result.rounds.to_pylist():
        told = trained[entry["round"]]
        total = sum(row["samples"] for row in told)
        loss = sum(row["loss"] * row["samples"] for row in told) / total
        assert entry["train_loss"] == pytest.approx(loss)


def test_times_add_up(result: Result) -> None:
    trained, evaluated = by_round(rows(result, "train")), by_round(rows(result, "eval"))
    entries = result.rounds.to_pylist()
    for entry in entries:
        number = entry["round"]
        training = sum(row["seconds"] for row in trained[number])
        assert entry["train_seconds"] == pytest.approx(training)
        evaluation = sum(row["seconds"] for row in evaluated[number])
        assert entry["eval_seconds"] == pytest.approx(evaluation)
        assert entry["seconds"] >= entry["train_seconds"]  # one process: they take turns
        assert entry["server_seconds"] >= 0
    assert sorted(e["elapsed"] for e in entries) == [e["elapsed"] for e in entries]
    seconds = result.summary["seconds"]
    for whole, part in [
        ("training", "train_seconds"),
        ("evaluation", "eval_seconds"),
        ("server", "server_seconds"),
    ]:
        assert seconds[whole] == pytest.approx(sum(entry[part] for entry in entries))
    assert seconds["total"] == pytest.approx(seconds["start"] + seconds["rounds"])
    busy = seconds["training"] + seconds["evaluation"]
    assert seconds["idle"] == pytest.approx(seconds["rounds"] - busy, abs=1e-9)


# messages.parquet


def test_the_ledger_counts_what_fedre_sends(result: Result) -> None:
    """Down: a head, 10 classes x 500 features and 10 biases. Up: 500 features and a label of 10,
    which is not counted as scalars. A number takes 4 bytes, and a field a little for its shape."""
    sent = {("down", "head"): (5010, 5010), ("up", "representation"): (500, 500)}
    sent["up", "label"] = (0, 10)
    trained = by_round(rows(result, "train"))
    messages = by_round(result.messages.to_pylist())
    assert result.messages.num_rows == ROUNDS * COHORT * 3
    for number in range(1, ROUNDS + 1):
        cohort = {row["client"] for row in trained[number]}
        for key, (scalars, numbers) in sent.items():
            found = [row for row in messages[number] if (row["direction"], row["field"]) == key]
            assert {row["client"] for row in found} == cohort
            assert len(found) == len(cohort)
            for row in found:
                assert row["step"] == "client_update"
                assert (row["scalars"], row["numbers"]) == (scalars, numbers)
                assert 4 * numbers < row["bytes"] < 4 * numbers + 200


def test_traffic_is_the_sum_of_the_ledger_by_round_and_in_total(result: Result) -> None:
    messages = by_round(result.messages.to_pylist())
    for unit in ("scalars", "bytes"):
        for way in ("up", "down"):
            total = 0
            for entry in result.rounds.to_pylist():
                listed = [row for row in messages[entry["round"]] if row["direction"] == way]
                assert entry[f"{unit}_{way}"] == sum(row[unit] for row in listed)
                total += entry[f"{unit}_{way}"]
            assert result.summary[f"{unit}_{way}"] == total
    assert result.summary["scalars_up"] == ROUNDS * COHORT * 500
    assert result.summary["scalars_down"] == ROUNDS * COHORT * 5010


def test_whole_models_are_counted_without_batch_norm_statistics(tmp_path: Path) -> None:
    """Trainable parameters are scalars; running means and variances are only numbers."""
    models = ["slim_resnet10"]
    small = simulate(
        tmp_path / "run", method="fedavg", rounds=1, participation=0.2, fleet={"models": models}
    )
    import zoo
    from raysim import Task

    model = zoo.build("slim_resnet10", Task(10))
    parameters = sum(p.numel() for p in model.parameters())
    everything = sum(t.numel() for t in model.state_dict().values())
    for row in small.messages.to_pylist():
        assert (row["scalars"], row["numbers"]) == (parameters, everything)
    assert small.messages.num_rows == 2


def test_a_method_that_sends_nothing_has_an_empty_ledger(tmp_path: Path) -> None:
    alone = simulate(tmp_path / "run", method="local", rounds=2)
    assert alone.messages.num_rows == 0
    for unit in ("scalars", "bytes"):
        for way in ("up", "down"):
            assert alone.summary[f"{unit}_{way}"] == 0


# split.parquet


def test_every_sample_lands_exactly_once(result: Result) -> None:
    table = result.split.to_pylist()
    clients = [client for client in range(CLIENTS) for _ in range(2)]
    assert [row["client"] for row in table] == clients
    assert [row["part"] for row in table] == ["train", "test"] * CLIENTS
    indices = [index for row in table for index in row["indices"]]
    assert sorted(indices) == list(range(SAMPLES))
    assert all(row["samples"] == len(row["indices"]) for row in table)


def test_the_class_table_counts_the_labels(result: Result) -> None:
    labels = data.load(result.config.data).labels
    for row in result.split.to_pylist():
        counts = np.bincount(labels[row["indices"]], minlength=10)
        assert row["classes"] == counts.tolist()
        assert row["model"] == MODELS[row["client"] % 2]


def test_the_digest_of_the_split_can_be_worked_out_from_the_table(result: Result) -> None:
    table = result.split.to_pylist()
    ends = np.cumsum([0, *(row["samples"] for row in table)]).astype("<i8")
    indices = np.array([index for row in table for index in row["indices"]], dtype="<i8")
    digest = hashlib.sha256(ends.tobytes() + indices.tobytes()).hexdigest()
    assert result.summary["split_digest"] == digest
    metadata = pq.read_schema(result.out / "split.parquet").metadata
    assert metadata[b"split_digest"].decode() == digest


def test_the_split_depends_on_the_seed(result: Result, tmp_path: Path) -> None:
    other = simulate(tmp_path / "other", seed=1, rounds=1)
    assert other.summary["split_digest"] != result.summary["split_digest"]


# summary.json


def test_the_summary_holds_what_is_promised(result: Result) -> None:
    summary = json.loads((result.out / "summary.json").read_text())
    scores = {"accuracy", "accuracy_mean", "accuracy_std", "round", "test_loss"}
    assert scores <= set(summary["final"])
    assert scores <= set(summary["best"])
    assert summary["rounds"] == ROUNDS
    assert {"scalars_up", "scalars_down", "bytes_up", "bytes_down"} <= set(summary)
    parts = {"total", "training", "evaluation", "server", "idle"}
    assert parts <= set(summary["seconds"])
    assert len(bytes.fromhex(summary["digest"])) == 32
    assert summary["versions"]["torch"] == torch.__version__
    assert {"python", "raysim", "ray", "numpy"} <= set(summary["versions"])
    assert (summary["method"], summary["clients"], summary["seed"]) == ("fedre", CLIENTS, 0)


def test_final_is_the_last_round_and_best_the_best(result: Result) -> None:
    entries = result.rounds.to_pylist()
    best = max(entries, key=lambda entry: entry["accuracy"])  # the first of equals
    for name, entry in (("final", entries[-1]), ("best", best)):
        for key, value in result.summary[name].items():
            assert entry[key] == value


# --eval.*


def test_evaluation_happens_every_so_many_rounds_and_after_the_last(tmp_path: Path) -> None:
    rare = simulate(tmp_path / "run", rounds=5, eval={"every": 2})
    known = [accuracy is not None for accuracy in rare.rounds["accuracy"].to_pylist()]
    assert known == [False, True, False, True, True]
    assert sorted(by_round(rows(rare, "eval"))) == [2, 4, 5]
    assert rare.summary["final"]["round"] == 5
    assert all(loss is not None for loss in rare.rounds["train_loss"].to_pylist())


def test_the_cohort_alone_may_be_evaluated(tmp_path: Path) -> None:
    some = simulate(tmp_path / "run", eval={"clients": "cohort"})
    trained, evaluated = by_round(rows(some, "train")), by_round(rows(some, "eval"))
    for number in range(1, ROUNDS + 1):
        ids = [row["client"] for row in evaluated[number]]
        assert ids == [row["client"] for row in trained[number]]


@pytest.mark.parametrize(("asked", "found"), [("2", 2), ("100", CLIENTS)])
def test_a_number_of_clients_is_drawn_once(asked: str, found: int, tmp_path: Path) -> None:
    some = simulate(tmp_path / "run", eval={"clients": asked})
    evaluated = by_round(rows(some, "eval"))
    drawn = {tuple(row["client"] for row in evaluated[n]) for n in range(1, ROUNDS + 1)}
    assert len(drawn) == 1
    assert len(set(drawn.pop())) == found


def test_one_client_may_stand_for_its_architecture(tmp_path: Path) -> None:
    both = simulate(tmp_path / "run", eval={"per": "architecture", "data": "global"})
    everything = sum(row["samples"] for row in both.split.to_pylist() if row["part"] == "test")
    for evaluated in by_round(rows(both, "eval")).values():
        assert [(row["client"], row["model"]) for row in evaluated] == [(0, "cnn4"), (1, "cnn5")]
        assert [row["samples"] for row in evaluated] == [everything] * 2


def answers(result: Result, fresh: bool) -> dict[tuple[int, int], int]:
    """What each client answers when evaluated after a round, by hand. A client that trains in
    round t hears t - 1; evaluated afresh after it, everyone hears t. At first all say 9."""
    heard = dict.fromkeys(range(CLIENTS), 9)
    said = {}
    for number in range(1, ROUNDS + 1):
        for client in schedule.cohort(0, number, CLIENTS, 0.45):
            heard[client] = number - 1
        for client in range(CLIENTS):
            said[number, client] = number if fresh else heard[client]
    return said


@pytest.mark.parametrize("where", ["local", "global"])
@pytest.mark.parametrize("fresh", [True, False])
def test_accuracy_is_what_the_class_tables_say(
    fresh: bool, where: str, parrot: str, tmp_path: Path
) -> None:
    talk = simulate(tmp_path / "run", method=parrot, eval={"fresh": fresh, "data": where})
    tests = [row["classes"] for row in talk.split.to_pylist() if row["part"] == "test"]
    everyone = [sum(column) for column in zip(*tests, strict=True)]
    said = answers(talk, fresh)
    evaluated = rows(talk, "eval")
    assert len(evaluated) == len(said)
    for row in evaluated:
        counts = tests[row["client"]] if where == "local" else everyone
        assert row["samples"] == sum(counts)
        assert correct(row) == counts[said[row["round"], row["client"]]]
    assert len({row["accuracy"] for row in evaluated}) > 1
    final = [row["accuracy"] for row in evaluated if row["round"] == ROUNDS]
    assert talk.summary["final"]["accuracy_std"] == pytest.approx(statistics.pstdev(final))


def test_a_users_method_is_kept_beside_its_run(parrot: str, tmp_path: Path) -> None:
    talk = simulate(tmp_path / "run", method=parrot, rounds=1)
    assert (talk.out / "method.py").read_text() == PARROT
    assert talk.rounds["train_loss"].to_pylist() == [None]  # it trains nothing
