"""The command as a user types it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from raysim.launch import main

TINY = [
    *("--clients", "6", "--rounds", "2", "--participation", "0.5"),
    *("--data.samples", "240", "--data.alpha", "0.5"),
    *("--fleet.models", "cnn4", "cnn5", "--train.batch-size", "16"),
]
LOCAL = [*TINY, "--backend", "local"]
RAY = [*TINY, "--backend", "ray", "--actors", "2", "--dashboard", "False"]
TABLES = ["clients.parquet", "messages.parquet", "rounds.parquet", "split.parquet"]
FILES = sorted(["checkpoints", "config.yaml", "summary.json", *TABLES])

MY_METHOD = '''\
"""A user's own method: the server keeps a running mean of the clients' heads."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from raysim import ClientState, Method, get_weights, set_weights, weighted_mean


class Head(NamedTuple):
    weights: dict[str, torch.Tensor]


@dataclass
class Client(ClientState):
    seen: int = 0


@dataclass
class Server:
    head: torch.nn.Linear


@dataclass(frozen=True)
class Mine(Method[Client, Server]):
    keep: float = 0.5
    """How much of the old head stays."""

    def init_server(self, ctx):
        return Server(ctx.build_head())

    def init_client(self, model, ctx):
        return Client(model)

    def broadcast(self, server, cohort, ctx):
        return Head(get_weights(server.head))

    def receive(self, client, message, ctx):
        set_weights(client.model.head, message.weights)

    def client_update(self, client, message, ctx):
        client.seen += 1
        ctx.fit(lambda x, y: F.cross_entropy(client.model(x), y), client.model)
        return Head(get_weights(client.model.head))

    def server_update(self, server, replies, ctx):
        new = weighted_mean([reply.payload.weights for reply in replies], [1] * len(replies))
        old = get_weights(server.head)
        set_weights(server.head, {k: self.keep * old[k] + (1 - self.keep) * new[k] for k in new})
'''


def environment() -> dict[str, str]:
    """Without what a Ray cluster of this test session may have left in ours."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


def launch(*argv: str, cwd: Path, timeout: float = 150) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "raysim.launch", *argv]
    return subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout
    )


def summary(out: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return content


def last_rounds(out: Path) -> dict[str, int]:
    """The last round that each table knows; each must be readable, and hold every round before."""
    last = {}
    for name in ("rounds", "clients", "messages"):
        found = set(pq.read_table(out / f"{name}.parquet")["round"].to_pylist())
        assert found == set(range(1, len(found) + 1))
        last[name] = len(found)
    assert pq.read_table(out / "split.parquet").num_rows == 12
    return last


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A local run and what it printed."""
    folder = tmp_path_factory.mktemp("launch")
    process = launch(*LOCAL, "--out", "run", cwd=folder)
    assert process.returncode == 0, process.stderr
    assert process.stderr == ""
    return folder / "run", process.stdout


# What a run leaves and prints


def test_a_run_leaves_its_files_and_nothing_else(done: tuple[Path, str]) -> None:
    assert sorted(path.name for path in done[0].iterdir()) == FILES
    assert sorted(path.name for path in done[0].parent.iterdir()) == ["run"]


def test_in_a_pipe_progress_is_one_plain_line_a_round(done: tuple[Path, str]) -> None:
    printed = done[1]
    assert "\x1b" not in printed
    assert "\r" not in printed
    rounds = [line for line in printed.splitlines() if line.startswith("round ")]
    assert [line.split()[1] for line in rounds] == ["1/2", "2/2"]
    for line in rounds:
        for word in ("accuracy", "loss", "up", "down"):
            assert word in line


def test_the_summary_says_where_the_run_is_and_how_to_go_on(done: tuple[Path, str]) -> None:
    out, printed = done
    assert summary(out)["digest"] in printed
    assert f"--config {out}/config.yaml" in printed
    assert f"Result.load('{out}')" in printed


def test_the_written_config_repeats_the_run(done: tuple[Path, str], tmp_path: Path) -> None:
    again = tmp_path / "again"
    process = launch("--config", f"{done[0]}/config.yaml", "--out", str(again), cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert summary(again)["digest"] == summary(done[0])["digest"]


def test_the_written_config_holds_every_setting(done: tuple[Path, str]) -> None:
    tree = yaml.safe_load((done[0] / "config.yaml").read_text())
    assert (tree["clients"], tree["rounds"], tree["method"]) == (6, 2, "fedre")
    assert tree["fleet"]["models"] == ["cnn4", "cnn5"]
    assert tree["hp"]["server_lr"] == 0.01
    assert {"data", "train", "eval", "seed", "backend", "actors", "cpus", "gpus"} <= set(tree)


def test_flags_win_over_the_written_config_and_another_seed_gives_another_digest(
    done: tuple[Path, str], tmp_path: Path
) -> None:
    out = tmp_path / "other"
    argv = ["--seed", "1", "--config", f"{done[0]}/config.yaml", "--out", str(out)]
    assert main(argv) == 0
    assert summary(out)["seed"] == 1
    assert summary(out)["digest"] != summary(done[0])["digest"]


def test_without_out_a_run_names_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*LOCAL, "--rounds", "1"]) == 0
    (out,) = (tmp_path / "runs").iterdir()
    assert out.name.startswith("fedre-")
    assert summary(out)["rounds"] == 1


def test_out_may_be_an_empty_folder_or_one_to_be_made(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "empty", tmp_path / "deep" / "er"):
        assert main([*LOCAL, "--rounds", "1", "--out", str(out)]) == 0
        assert (out / "summary.json").exists()


def test_help_names_every_flag_and_starts_nothing(tmp_path: Path) -> None:
    process = launch("--help", cwd=tmp_path)
    assert process.returncode == 0
    fixed = (
        "--clients --participation --rounds --method --seed --out --config --backend {ray,local} "
        "--address --actors --cpus --gpus --memory --data.name --data.root --fleet.models "
        "--fleet.gpus --train.lr --train.precision --train.memory-format --eval.every "
        "--hp.server-lr"
    )
    for flag in fixed.replace(" {", "_{").split():
        assert flag.replace("_{", " {") in process.stdout
    for group in ("data", "fleet", "train", "eval", "hp"):
        assert f"{group} options" in process.stdout
    assert max(map(len, process.stdout.splitlines())) <= 120
    assert not list(tmp_path.iterdir())


def test_a_reader_that_leaves_early_causes_no_traceback(tmp_path: Path) -> None:
    """As in `python -m raysim.launch | head -1`."""
    command = [sys.executable, "-m", "raysim.launch", *LOCAL, "--rounds", "20", "--out", "run"]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline()
    process.stdout.close()
    said = process.stderr.read()
    process.stderr.close()
    process.wait(60)
    assert "Traceback" not in said


# A user's own method


@pytest.mark.ray
def test_a_users_own_file_gives_equal_digests_on_both_backends(tmp_path: Path) -> None:
    (tmp_path / "my_method.py").write_text(MY_METHOD)
    mine = ["--method", "my_method.py", "--hp.keep", "0.25"]
    local = launch(*LOCAL, *mine, "--out", "local", cwd=tmp_path)
    assert local.returncode == 0, local.stderr
    ray = launch(*RAY, *mine, "--out", "ray", cwd=tmp_path)
    assert ray.returncode == 0, ray.stderr
    assert ray.stderr == ""
    assert summary(tmp_path / "ray")["actors"] == 2
    assert summary(tmp_path / "ray")["digest"] == summary(tmp_path / "local")["digest"]
    kept = (tmp_path / "ray" / "method.py").read_text()
    assert kept == MY_METHOD


def test_the_flag_of_a_users_own_file_counts(tmp_path: Path) -> None:
    file = tmp_path / "my_method.py"
    file.write_text(MY_METHOD)
    digests = []
    for keep in ("0.25", "0.75"):
        out = tmp_path / keep
        argv = [*LOCAL, "--method", str(file), "--hp.keep", keep, "--out", str(out)]
        assert main(argv) == 0
        assert yaml.safe_load((out / "config.yaml").read_text())["hp"] == {"keep": float(keep)}
        digests.append(summary(out)["digest"])
    assert digests[0] != digests[1]


def test_the_config_of_a_users_own_file_repeats_the_run_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_method.py").write_text(MY_METHOD)
    monkeypatch.chdir(tmp_path)
    assert main([*LOCAL, "--method", "my_method.py", "--out", "first"]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["--config", "../first/config.yaml", "--out", "second"]) == 0
    second = tmp_path / "elsewhere" / "second"
    assert summary(second)["digest"] == summary(tmp_path / "first")["digest"]


def test_help_of_a_users_own_file_shows_its_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_method.py").write_text(MY_METHOD)
    with pytest.raises(SystemExit) as exit:
        main(["--method", str(tmp_path / "my_method.py"), "--help"])
    assert exit.value.code == 0
    said = capsys.readouterr().out
    assert "--hp.keep FLOAT" in said
    assert "How much of the old head stays." in said


# Runs that end early


def interrupted(
    argv: list[str], stop: signal.Signals, cwd: Path, whole_group: bool = False
) -> tuple[int, str, int]:
    """Start a long run and stop it after its third line of progress; returns the exit code, what
    went to stderr and the last round told."""
    command = [sys.executable, "-m", "raysim.launch", *argv, "--rounds", "100000", "--out", "run"]
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("round ") and line.split()[1].startswith("3/"):
                break
        if whole_group:  # as a terminal does
            os.killpg(process.pid, stop)
        else:
            process.send_signal(stop)
        printed, said = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    told = [line.split()[1] for line in printed.splitlines() if line.startswith("round ")]
    return process.returncode, said, int(told[-1].partition("/")[0]) if told else 3


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_is_whole_up_to_its_last_round(
    stop: signal.Signals, tmp_path: Path
) -> None:
    returned, said, told = interrupted(LOCAL, stop, tmp_path)
    assert returned == 130
    assert "Traceback" not in said
    assert "--resume" in said
    assert not (tmp_path / "run" / "summary.json").exists()
    last = last_rounds(tmp_path / "run")
    assert last == dict.fromkeys(last, told)


def test_a_killed_run_leaves_readable_tables(tmp_path: Path) -> None:
    """At kill -9 nothing can be done any more, so every file on disk must be whole already. The two
    larger tables may lag: rounds shorter than 50 times their writing do not rewrite them."""
    returned, _, told = interrupted(LOCAL, signal.SIGKILL, tmp_path)
    assert returned == -signal.SIGKILL
    assert last_rounds(tmp_path / "run")["rounds"] >= told
    tree = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert tree["clients"] == 6


@pytest.mark.ray
def test_an_interrupted_ray_run_ends_its_cluster_and_leaves_readable_tables(tmp_path: Path) -> None:
    returned, said, told = interrupted(RAY, signal.SIGINT, tmp_path, whole_group=True)
    assert returned == 130
    assert "Traceback" not in said
    assert "--resume" in said
    last = last_rounds(tmp_path / "run")
    assert last == dict.fromkeys(last, told)
