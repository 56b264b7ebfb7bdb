"""Delta % over local training, from two folders made by hand."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raysim.delta import delta, main
from raysim.errors import RunError
from raysim.record import CLIENTS
from raysim.result import Result


def made(out: Path, method: str, scores: dict[int, float], split: str = "a") -> Result:
    out.mkdir()
    (out / "config.yaml").write_text("")
    summary = {"method": method, "split_digest": split, "tasks": {"pets": {"miou": 0.5}}}
    (out / "summary.json").write_text(json.dumps(summary))
    rows = [
        {"round": number, "client": client, "phase": phase, "accuracy": score / number}
        for number in (2, 1)
        for client, score in scores.items()
        for phase in ("eval", "train")
    ]
    pq.write_table(pa.Table.from_pylist(rows, CLIENTS), out / "clients.parquet")
    return Result.load(out)


def test_the_mean_relative_gain_of_the_last_evaluation(tmp_path: Path) -> None:
    local = made(tmp_path / "local", "local", {0: 0.4, 1: 0.8})
    ours = made(tmp_path / "ours", "fedproto", {0: 0.6, 1: 0.7})
    assert delta(ours, local) == pytest.approx((50 - 12.5) / 2)
    assert delta(local, local) == 0


def test_runs_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    local = made(tmp_path / "local", "local", {0: 0.4})
    with pytest.raises(RunError, match="same --seed"):
        delta(made(tmp_path / "b", "fd", {0: 0.4}, split="b"), local)
    with pytest.raises(RunError, match="different clients"):
        delta(made(tmp_path / "c", "fd", {1: 0.4}), local)
    with pytest.raises(RunError, match="is a run of fd; name one of local"):
        delta(local, made(tmp_path / "d", "fd", {0: 0.4}))
    with pytest.raises(RunError, match=r"score of 0, which clients \[0\]"):
        delta(local, made(tmp_path / "e", "local", {0: 0.0}))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made(tmp_path / "local", "local", {0: 0.4})
    made(tmp_path / "ours", "fd", {0: 0.5})
    assert main([str(tmp_path / "local"), str(tmp_path / "ours")]) == 0
    assert "fd  Delta +25.00 %  pets miou 0.5000" in capsys.readouterr().out
    assert main([str(tmp_path / "local")]) == 2
    assert main([str(tmp_path / "local"), str(tmp_path / "nothing")]) == 1
