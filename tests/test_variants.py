"""Several inference models of one method, tested side by side.

The data have 3 classes. Client 0 is tested on labels 0, 0, 1; client 1 on 1, 2; client 2 on none.
After round r the clients have heard the number r, so right are

    variant                          round 1: client 0, client 1    round 2
    heard   answers r                         1/3       1/2         0    1/2
    zero    answers 0                         2/3       0           2/3  0
    mute    gives no class a score            0         0           0    0

by samples  heard 2/5 then 1/5,   zero 2/5 and 2/5
their mean  heard 5/12 then 1/4,  zero 1/3 and 1/3
"""

from pathlib import Path
from typing import Any

import faults
import numpy as np
import pyarrow.parquet as pq
import pytest
import tiny
from test_console import summary
from test_contract import simulate

from raysim import ClientError, Config, FleetConfig, Result, run, wire
from raysim.console import summary_table
from raysim.data import Split
from raysim.record import FILES, VARIANTS
from raysim.summary import digest
from zoo import SplitModel

ECHO = '''\
"""A method that answers in three ways, besides `predict`, which always says 1."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from raysim import ClientState, Method


class Word(NamedTuple):
    number: int


@dataclass
class Client(ClientState):
    heard: int = 0


@dataclass
class Server:
    rounds: int = 0


@dataclass(frozen=True)
class Echo(Method[Client, Server]):
    shown: str = ""

    def init_server(self, ctx):
        return Server()

    def init_client(self, model, ctx):
        return Client(model)

    def broadcast(self, server, cohort, ctx):
        return Word(server.rounds)

    def receive(self, client, message, ctx):
        client.heard = message.number

    def client_update(self, client, message, ctx):
        return Word(0)

    def server_update(self, server, replies, ctx):
        server.rounds += 1

    def predict(self, client, x):
        assert not self.headline, "the scores of the headline are used as they are"
        return self.say(1, x)

    def variants(self, client, x):
        zero = self.say(0, x)
        return {"heard": self.say(client.heard, x), "zero": zero, "mute": zero - torch.inf}

    @property
    def headline(self):
        return self.shown

    def say(self, answer, x):
        return F.one_hot(torch.full((len(x),), answer % 3), 3).float()
'''

DATA = tiny.points([(1, 0), (2, 0), (3, 0), (4, 0), (5, 0), (6, 0)], [0, 0, 1, 1, 2, 0], 3)
SPLIT = Split(np.array([0, 1, 2, 0, 1, 2, 3, 4, 3, 4, 5]), np.array([0, 3, 6, 8, 10, 11, 11]))


@pytest.fixture
def echo(tmp_path: Path) -> str:
    file = tmp_path / "echo.py"
    file.write_text(ECHO)
    return str(file)


def run_by_hand(method: str, out: Path, **hp: Any) -> Result:
    config = Config(
        method=method, clients=3, participation=1.0, rounds=2, backend="local", out=out,
        fleet=FleetConfig(("mlp",), 2), hp=hp or None,
    )  # fmt: skip
    tiny.simulate(config, DATA, SPLIT)
    return Result.load(out)


# What is written


def test_every_variant_of_every_tested_client_has_a_row_in_every_round(
    echo: str, tmp_path: Path
) -> None:
    """Client 2 has no test data, so no answers."""
    table = run_by_hand(echo, tmp_path / "run").variants
    assert table.schema.equals(VARIANTS)
    found = [tuple(row.values()) for row in table.to_pylist()]
    right = {1: {0: (1 / 3, 2 / 3, 0), 1: (1 / 2, 0, 0)}, 2: {0: (0, 2 / 3, 0), 1: (1 / 2, 0, 0)}}
    assert found == [
        (number, client, "mlp", variant, (3, 2)[client], accuracy)
        for number, clients in right.items()
        for client, accuracies in clients.items()
        for variant, accuracy in zip(("heard", "zero", "mute"), accuracies, strict=True)
    ]


def test_the_summary_has_each_variants_final_and_best_accuracy(echo: str, tmp_path: Path) -> None:
    found = run_by_hand(echo, tmp_path / "run").summary["variants"]
    assert list(found) == ["heard", "zero", "mute"]

    def scores(number: int, accuracy: float, mean: float) -> dict[str, Any]:
        return {"round": number, "accuracy": accuracy, "accuracy_mean": pytest.approx(mean)}

    assert found["heard"] == {"final": scores(2, 1 / 5, 1 / 4), "best": scores(1, 2 / 5, 5 / 12)}
    assert found["zero"] == {"final": scores(2, 2 / 5, 1 / 3), "best": scores(1, 2 / 5, 1 / 3)}
    assert found["mute"] == {"final": scores(2, 0, 0), "best": scores(1, 0, 0)}


def test_accuracy_is_that_of_predict_unless_a_variant_is_the_headline(
    echo: str, tmp_path: Path
) -> None:
    """Saying 1 is right for one sample of each client in every round: 2/5."""
    apart = run_by_hand(echo, tmp_path / "apart")
    assert apart.rounds["accuracy"].to_pylist() == [2 / 5, 2 / 5]
    heard = run_by_hand(echo, tmp_path / "heard", shown="heard")
    assert heard.rounds["accuracy"].to_pylist() == [2 / 5, 1 / 5]
    assert heard.variants.equals(apart.variants)
    clients = [row for row in heard.clients.to_pylist() if row["phase"] == "eval"]
    assert [row["accuracy"] for row in clients] == [1 / 3, 1 / 2, None, 0, 1 / 2, None]


def test_a_headline_that_is_no_variant_ends_the_run(echo: str, tmp_path: Path) -> None:
    with pytest.raises(ClientError, match="'loud'"):
        run_by_hand(echo, tmp_path / "run", shown="loud")


def test_variants_are_part_of_the_digest() -> None:
    server, rows = wire.pack(None), [{"round": 1, "accuracy": 0.5}]
    one = [{"round": 1, "variant": "a", "accuracy": 0.5, "accuracy_mean": 0.5}]
    other = [{**one[0], "accuracy": 0.25}]
    found = {digest(server, [], rows, variants) for variants in ([], one, other)}
    assert len(found) == 3
    assert digest(server, [], rows) in found


# Without variants nothing changes


def test_a_method_without_variants_leaves_no_trace_of_them(tmp_path: Path) -> None:
    result = run_by_hand("local", tmp_path / "run")
    assert not (tmp_path / "run" / "variants.parquet").exists()
    assert "variants" not in result.summary
    assert result.variants.num_rows == 0
    assert result.variants.schema.equals(VARIANTS)
    assert "variants" not in str(summary_table(result.summary, "out"))


@pytest.mark.parametrize("method", ["local", "fedmrl"])
def test_a_sample_passes_each_model_once(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedMRL's clients have two models, and four inference models made of them."""
    passed: list[int] = []
    features = SplitModel.features

    def count(self: SplitModel, x: Any) -> Any:
        passed.append(len(x))
        return features(self, x)

    hp = {"shared_model": "mlp", "d1": 1} if method == "fedmrl" else None
    config = Config(method=method, clients=3, out=tmp_path, fleet=FleetConfig(("mlp",), 2), hp=hp)
    worker = tiny.make_worker(config, DATA, SPLIT)
    message = config.hp.broadcast(
        config.hp.init_server(tiny.server_context(worker.fleet, DATA.task)), [0],
        tiny.server_context(worker.fleet, DATA.task),
    )  # fmt: skip
    monkeypatch.setattr(SplitModel, "features", count)
    found = tiny.evaluate(worker, message)
    assert found.samples == 3
    assert passed == ([3, 3] if method == "fedmrl" else [3])


# After a crash and on resume


def settings(method: str, out: Path, **changes: Any) -> Config:
    tree = {
        "method": method, "clients": 4, "participation": 1.0, "rounds": 5, "backend": "local",
        "out": str(out), "checkpoint_every": 2, "eval": {"every": 2},
        "data": {"samples": 60, "classes": 3}, "fleet": {"models": ["mlp"]},
    }  # fmt: skip
    return Config.from_tree({**tree, **changes})


def run_whole(config: Config) -> Result:
    return run(config, faults.Listener())


def assert_same(found: Result, expected: Result) -> None:
    faults.assert_same_run(found, expected)
    assert found.variants.equals(expected.variants)
    assert found.summary["variants"] == expected.summary["variants"]


def test_a_run_that_died_left_a_table_that_can_be_read(echo: str, tmp_path: Path) -> None:
    faults.die_after(settings(echo, tmp_path / "run", eval={"every": 1}), 4)
    rounds = pq.read_table(tmp_path / "run" / "variants.parquet")["round"].to_pylist()
    assert {1} <= set(rounds) <= {1, 2, 3}


@pytest.mark.parametrize("checkpoint_every", [0, 2])
def test_a_run_that_died_and_was_resumed_has_every_row_once(
    checkpoint_every: int, echo: str, tmp_path: Path
) -> None:
    """Without a checkpoint it starts over; rows of rounds that are done again do not stay."""
    changes = {"checkpoint_every": checkpoint_every, "eval": {"every": 1}}
    expected = run_whole(settings(echo, tmp_path / "whole", **changes))
    assert set(expected.variants["round"].to_pylist()) == {1, 2, 3, 4, 5}
    faults.die_after(settings(echo, tmp_path / "run", **changes), 4)
    assert_same(faults.resume(tmp_path / "run"), expected)


def test_rows_of_an_unfinished_run_are_gone_when_it_starts_over(echo: str, tmp_path: Path) -> None:
    """Dead once more before the first evaluation: the file must not tell of the first attempt."""
    out = tmp_path / "run"
    faults.die_after(settings(echo, out, checkpoint_every=0, eval={"every": 1}), 4)

    def die(event: Any) -> None:
        if getattr(event, "round", 0) == 1:
            raise faults.Dead

    with pytest.raises(faults.Dead):
        faults.resume(out, die)
    assert pq.read_table(out / "variants.parquet").num_rows == 0


def test_a_finished_run_that_is_extended_loses_its_extra_evaluation(
    echo: str, tmp_path: Path
) -> None:
    """Round 3 was evaluated only because it was the last."""
    expected = run_whole(settings(echo, tmp_path / "whole"))
    shorter = run_whole(settings(echo, tmp_path / "run", rounds=3))
    assert set(shorter.variants["round"].to_pylist()) == {2, 3}
    assert_same(faults.resume(tmp_path / "run", rounds=5), expected)
    assert set(expected.variants["round"].to_pylist()) == {2, 4, 5}


def test_fedmrl_resumed_equals_fedmrl_undisturbed(tmp_path: Path) -> None:
    """Its four variants, and the headline's rows are those of the run."""
    changes: dict[str, Any] = {"rounds": 3, "checkpoint_every": 1, "fleet": {"models": ["cnn5"]}}
    expected = simulate("fedmrl", tmp_path / "whole", **changes)
    faults.stop_after(expected.config.replace({"out": str(tmp_path / "run")}), 2)
    assert_same(faults.resume(tmp_path / "run"), expected)
    table, rows = expected.variants.to_pylist(), expected.clients.to_pylist()
    own = [(row["round"], row["client"], row["accuracy"]) for row in rows if row["phase"] == "eval"]
    for variant in ("mix-small", "mix-large", "single-small", "single-large"):
        chosen = [row for row in table if row["variant"] == variant]
        found = [(row["round"], row["client"], row["accuracy"]) for row in chosen]
        assert (found == own) == (variant == "mix-large")
        assert len(found) == len(own)
    final = expected.summary["final"]
    assert expected.summary["variants"]["mix-large"]["final"] == {
        key: final[key] for key in ("round", "accuracy", "accuracy_mean")
    }


def test_a_launcher_elsewhere_fetches_the_table_and_no_run_writes_over_it() -> None:
    assert "variants.parquet" in FILES


# On screen


def test_the_summary_shows_each_variant() -> None:
    def row(number: int, accuracy: float, mean: float) -> dict[str, Any]:
        return {"round": number, "accuracy": accuracy, "accuracy_mean": mean}

    variants = {
        "mix-large": {"final": row(40, 0.632, 0.618), "best": row(38, 0.64, 0.62)},
        "single-small": {"final": row(40, 0.5, 0.4), "best": row(7, 1.0, 0.955)},
    }
    lines = str(summary_table(summary(variants=variants), "/tmp/out")).splitlines()
    start = lines.index("variants        final     mean     best     mean  round")
    assert lines[start - 1 : start + 4] == [
        "",
        "variants        final     mean     best     mean  round",
        "mix-large      63.2 %   61.8 %   64.0 %   62.0 %     38",
        "single-small   50.0 %   40.0 %  100.0 %   95.5 %      7",
        "",
    ]
    assert "          messages.parquet split.parquet variants.parquet" in lines
    prose = ("digest", "Python", "run again")
    assert max(len(line) for line in lines if not line.startswith(prose)) <= 60
