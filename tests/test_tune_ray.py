"""Sweeps on Ray: what comes out, what fails, what is killed and goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from raysim.config import Config
from raysim.result import Result
from raysim.result import run as simulate
from raysim.tune.__main__ import main

pytestmark = pytest.mark.ray

FLAKY = '''
import os
from dataclasses import dataclass

from methods.local import Local


@dataclass(frozen=True)
class Flaky(Local):
    way: str = "well"
    """How it ends."""

    def client_update(self, client, message, ctx):
        if self.way == "badly" and ctx.round == 2:
            raise ValueError("on demand")
        if self.way == "dead" and ctx.round == 2:
            os._exit(7)
        return super().client_update(client, message, ctx)
'''
TINY = """
clients: 2
participation: 1.0
rounds: 2
checkpoint_every: 1
data: {samples: 80, alpha: 1.0}
fleet.models: [cnn5]
dashboard: false
"""


def sweep_file(folder: Path, text: str) -> str:
    path = folder / "tiny.yaml"
    path.write_text(TINY + text)
    return str(path)


def rows(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return found


def stamps(folder: Path) -> dict[str, int]:
    """When each finished trial was written."""
    return {
        path.parent.name: path.stat().st_mtime_ns
        for path in sorted(folder.glob("trials/*/summary.json"))
    }


@pytest.mark.usefixtures("cluster")
def test_a_sweep_ranks_its_trials_names_the_failed_and_grows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "flaky.py").write_text(FLAKY)
    path = sweep_file(tmp_path, f"method: {tmp_path}/flaky.py\nhp.way: {{grid: [well, badly]}}\n")
    out = tmp_path / "s"
    assert main([path, "--out", str(out)]) == 1
    told = capsys.readouterr().out
    assert "failed    0002-seed0: client_update failed on client 0 (cnn5) in round 2" in told
    assert "on demand" in (out / "trials" / "0002-seed0.error.txt").read_text()
    trials = {row["trial"]: row for row in rows(out / "trials.parquet")}
    assert [trials[name]["status"] for name in sorted(trials)] == ["finished", "failed"]
    assert [(r["trial"], r["round"]) for r in rows(out / "rounds.parquet")][:2] == [
        ("0001-seed0", 1),
        ("0001-seed0", 2),
    ]
    assert not (out / "trials" / "0001-seed0" / "checkpoints").exists()
    assert not (out / "tune").exists()

    best = Config.load(out / "best.yaml").replace({"out": str(tmp_path / "alone")})
    assert simulate(best).digest == Result.load(out / "trials" / "0001-seed0").digest

    before = stamps(out)
    assert main(["--resume", str(out), "--sweep.repeat", "2", "--quiet"]) == 1
    after = stamps(out)
    assert sorted(after) == ["0001-seed0", "0001-seed1"]
    assert after["0001-seed0"] == before["0001-seed0"]
    ranking = rows(out / "ranking.parquet")
    assert [(row["hp.way"], row["seeds"]) for row in ranking] == [("well", 2), ("badly", 2)]
    assert [row["rounds_done"] for row in ranking] == [2, 1]


# Slow ones


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_trial_whose_process_dies_is_tried_again_then_failed(tmp_path: Path) -> None:
    (tmp_path / "flaky.py").write_text(FLAKY)
    path = sweep_file(tmp_path, f"method: {tmp_path}/flaky.py\nhp.way: {{grid: [well, dead]}}\n")
    assert main([path, "--out", str(tmp_path / "s"), "--sweep.retries", "1"]) == 1
    end = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert list(end["failed"]) == ["0002-seed0"]
    assert "died 2 times" in end["failed"]["0002-seed0"]


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_a_trial_with_actors_of_its_own_gives_the_same_bits(tmp_path: Path) -> None:
    path = sweep_file(tmp_path, "method: fedre\nhp.server_lr: {grid: [0.1]}\n")
    assert main([path, "--out", str(tmp_path / "here")]) == 0
    actors = ["--backend", "ray", "--actors", "2", "--cpus", "0.5"]
    assert main([path, "--out", str(tmp_path / "there"), *actors]) == 0
    runs = [Result.load(tmp_path / name / "trials" / "0001-seed0") for name in ("here", "there")]
    assert runs[0].digest == runs[1].digest
    assert runs[1].summary["actors"] == 2


LEARN = "method: local\nrounds: 6\ntrain.lr: {grid: [0.1, 0.000001, 0.05, 0.0000001]}\n"


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("scheduler", ["asha", "median"])
def test_what_falls_behind_is_stopped_and_stays_so(tmp_path: Path, scheduler: str) -> None:
    out = tmp_path / "s"
    path = sweep_file(tmp_path, LEARN)
    words = ["--sweep.scheduler", scheduler, "--sweep.grace", "1", "--sweep.reduction", "2"]
    one = ["--sweep.concurrent", "1", "--sweep.metric", "train_loss"]
    assert main([path, "--out", str(out), *words, *one]) == 0
    status = {row["trial"]: row["status"] for row in rows(out / "trials.parquet")}
    assert status["0001-seed0"] == "finished"
    assert "stopped" in status.values()
    before = stamps(out)
    assert main(["--resume", str(out), "--sweep.repeat", "2"]) == 0
    again = {row["trial"]: row["status"] for row in rows(out / "trials.parquet")}
    assert status.items() <= again.items()
    assert len(again) == 8
    assert before.items() <= stamps(out).items()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_optuna_learns_means_over_seeds_and_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    out = tmp_path / "s"
    text = "method: local\ntrain.lr: {loguniform: [0.001, 0.1]}\ntrain.epochs: {choice: [1, 2]}\n"
    words = ["--sweep.searcher", "optuna", "--sweep.samples", "2", "--sweep.repeat", "2"]
    assert main([sweep_file(tmp_path, text), "--out", str(out), *words]) == 0
    before = stamps(out)
    assert len(before) == 4
    assert main(["--resume", str(out), "--sweep.samples", "3"]) == 0
    assert len(stamps(out)) == 6
    assert before.items() <= stamps(out).items()
    assert len({row["train.lr"] for row in rows(out / "trials.parquet")}) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_pbt_hands_a_run_on_with_other_settings(tmp_path: Path) -> None:
    """Of two that learn and two that cannot, the latter take over the former's clients: their loss
    falls though their own step size could not have done it."""
    out = tmp_path / "s"
    text = "method: local\nrounds: 4\ntrain.lr: {loguniform: [0.0000001, 0.1]}\n"
    words = ["--sweep.scheduler", "pbt", "--sweep.samples", "4", "--sweep.interval", "1"]
    metric = ["--sweep.metric", "train_loss"]
    assert main([sweep_file(tmp_path, text), "--out", str(out), *words, *metric]) == 0
    history = rows(out / "rounds.parquet")
    used: dict[str, set[float]] = {}
    for row in history:
        used.setdefault(row["trial"], set()).add(row["settings"]["train.lr"])
    assert any(len(values) > 1 for values in used.values())
    assert all(1e-7 <= lr <= 0.1 for values in used.values() for lr in values)
    assert {row["rounds_done"] for row in rows(out / "trials.parquet")} == {4}


KILLED = [sys.executable, "-m", "raysim.tune"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sweep_killed_half_way_goes_on_and_gives_the_same_bits(tmp_path: Path) -> None:
    text = "method: fedre\nrounds: 10\nhp.server_lr: {grid: [0.01, 0.1]}\nsweep.repeat: 2\n"
    path, out = sweep_file(tmp_path, text), tmp_path / "s"
    env = os.environ | {"RAY_num_cpus": "2"}
    process = subprocess.Popen([*KILLED, path, "--out", str(out)], start_new_session=True, env=env)
    try:
        deadline = time.monotonic() + 240
        while not (stamps(out) and len(list(out.glob("trials/*/checkpoints/*.json"))) > 0):
            assert process.poll() is None, "it ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    before = stamps(out)
    assert 0 < len(before) < 4
    time.sleep(3)  # Ray ends what its driver left
    subprocess.run([*KILLED, "--resume", str(out)], check=True, timeout=300)
    assert len(stamps(out)) == 4
    assert before.items() <= stamps(out).items()
    whole = tmp_path / "whole"
    subprocess.run([*KILLED, path, "--out", str(whole), "--quiet"], check=True, timeout=300)
    for name in stamps(out):
        one, other = (Result.load(folder / "trials" / name) for folder in (out, whole))
        assert one.digest == other.digest, name
    keys = ("trial", "round", "accuracy", "train_loss", "bytes", "best_accuracy")
    tables = [
        [[row[key] for key in keys] for row in rows(folder / "rounds.parquet")]
        for folder in (out, whole)
    ]
    assert tables[0] == tables[1]


TWO_NODES = """
import sys
import ray
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
cluster.add_node(num_cpus=1)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_sweep_runs_on_a_cluster_that_was_there(tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    nodes = subprocess.Popen([sys.executable, "-c", TWO_NODES], stdin=pipe, stdout=pipe, text=True)
    assert nodes.stdin is not None
    assert nodes.stdout is not None
    try:
        address = nodes.stdout.readline().strip()
        path = sweep_file(tmp_path, "method: local\ntrain.lr: {grid: [0.01, 0.1]}\n")
        words = ["--address", address, "--out", str(tmp_path / "s")]
        command = [*KILLED, path, *words]
        refused = subprocess.run(
            [*command, "--cpus", "2"], capture_output=True, text=True, timeout=120
        )
        assert refused.returncode == 2
        assert "could never start" in refused.stderr
        subprocess.run(command, check=True, timeout=200)
        assert len(stamps(tmp_path / "s")) == 2
    finally:
        nodes.stdin.close()
        nodes.wait(60)
        nodes.stdout.close()
