"""Clusters that were there before: two nodes with logical GPUs, and one behind ray://.

Each lives in processes of its own, which end when the test that started them closes their input.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from raysim.launch import main

pytestmark = pytest.mark.ray

TINY = [
    *("--clients", "4", "--rounds", "2", "--participation", "0.5"),
    *("--data.samples", "160", "--data.alpha", "0.5"),
    *("--fleet.models", "cnn4", "cnn5", "--train.batch-size", "16"),
]

WHERE = """
from dataclasses import dataclass

import methods
import raysim
import zoo
from raysim import ClientState, Method


@dataclass(frozen=True)
class Where(Method[ClientState, None]):
    def init_server(self, ctx):
        return None

    def client_update(self, client, message, ctx):
        raise RuntimeError(" ".join(m.__file__ for m in (methods, raysim, zoo)))
"""

TWO_NODES = """
import json, sys
import ray
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "num_gpus": 2})
cluster.add_node(num_cpus=2, num_gpus=2)
cluster.wait_for_nodes()
ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
print("address", cluster.address, flush=True)
for line in sys.stdin:  # whoever asks gets the names of the actors
    print(json.dumps(ray.util.list_named_actors(all_namespaces=True)), flush=True)
ray.shutdown()
cluster.shutdown()
"""


def environment() -> dict[str, str]:
    """Without what another cluster of this session may have left in ours, and without tokens."""
    rest = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**rest, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


def launch(*argv: str, cwd: Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "raysim.launch", *TINY, *argv]
    return subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout
    )


def digest(out: Path) -> str:
    return str(json.loads((out / "summary.json").read_text())["digest"])


class Nodes:
    """The cluster of two nodes, each with 2 CPUs and 2 GPUs."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._in: IO[str] = process.stdin
        self._out: IO[str] = process.stdout
        self.address = self._answer("address ").split()[1]

    def names(self) -> list[dict[str, str]]:
        """The actors that have a name."""
        self._in.write("names\n")
        self._in.flush()
        found: list[dict[str, str]] = json.loads(self._answer("["))
        return found

    def _answer(self, start: str) -> str:
        for line in self._out:  # Ray prints, too
            if line.startswith(start):
                return line
        raise AssertionError("the cluster did not start")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    process = subprocess.Popen(
        [sys.executable, "-c", TWO_NODES],
        cwd=tmp_path_factory.mktemp("nodes"),  # not where our code is
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield Nodes(process)
    finally:
        process.communicate(timeout=60)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the same run in one process."""
    out = tmp_path_factory.mktemp("clusters") / "local"
    assert main([*TINY, "--backend", "local", "--out", str(out)]) == 0
    return digest(out)


# Two nodes


def test_fractions_of_gpus_are_shared_out(nodes: Nodes, reference: str, tmp_path: Path) -> None:
    share = ["--gpus", "0.5", "--cpus", "0.5", "--actors", "3", "--memory", "0.25"]
    process = launch("--address", nodes.address, *share, "--out", "run", cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert "ray: 3 client actors on" in process.stdout
    assert "3 x (0.5 CPU, 0.5 GPU, 0.25 GiB) plays cnn4, cnn5" in process.stdout
    assert digest(tmp_path / "run") == reference


def test_architectures_with_their_own_share_become_pools(
    nodes: Nodes, reference: str, tmp_path: Path
) -> None:
    shares = ["--fleet.gpus", "cnn4=0.25", "cnn5=0.5", "--actors", "2"]
    process = launch("--address", nodes.address, *shares, "--out", "run", cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    lines = [" ".join(line.split()) for line in process.stdout.splitlines()]
    assert "pool-cnn4 1 x (1 CPU, 0.25 GPU) plays cnn4" in lines
    assert "pool-cnn5 1 x (1 CPU, 0.5 GPU) plays cnn5" in lines
    assert digest(tmp_path / "run") == reference


def test_every_client_may_have_a_named_actor_of_its_own(
    nodes: Nodes, reference: str, tmp_path: Path
) -> None:
    """On both nodes: none has room for four actors of one CPU."""
    argv = ["--address", nodes.address, "--actors", "clients", "--out", "run"]
    process = subprocess.Popen(
        [sys.executable, "-m", "raysim.launch", *TINY, *argv],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    printed, names = "", set()
    for line in process.stdout:
        printed += line
        if line.startswith("started"):
            found = nodes.names()
            names = {actor["name"] for actor in found if actor["namespace"] == "raysim"}
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 0, said
    assert "one for each client (1 CPU), named client-000" in printed
    assert digest(tmp_path / "run") == reference
    driver = min(names, key=len)
    assert driver.startswith("raysim-run-")
    actors = sorted(names - {driver})
    assert all(name.startswith(f"{driver}-") for name in actors)
    assert [name[-10:] for name in actors] == [f"client-{client:03d}" for client in range(4)]


def test_our_code_travels_to_the_nodes(nodes: Nodes, tmp_path: Path) -> None:
    """Whatever is installed there; and what fails there is told here."""
    (tmp_path / "mine.py").write_text(WHERE)
    argv = ["--address", nodes.address, "--actors", "1", "--method", "mine.py", "--out", "run"]
    process = launch(*argv, cwd=tmp_path)
    assert process.returncode == 1
    assert process.stderr.startswith("Traceback")
    message = process.stderr.rpartition("error: ")[2]
    assert "client_update failed on client" in message
    assert message.count("runtime_resources") == 3


def test_a_run_leaves_nothing_on_the_cluster(nodes: Nodes) -> None:
    deadline = time.monotonic() + 20
    while nodes.names() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert nodes.names() == []


@pytest.mark.parametrize(
    ("argv", "found", "fix"),
    [
        (["--actors", "9"], "9 actors of 1 CPU do not fit", "Try --actors 4"),
        (["--gpus", "3"], "no node has more than", "Try --gpus 2"),
        (["--cpus", "3"], "no node has more than", "Try --cpus 2"),
        (["--gpus", "0.75", "--actors", "5", "--cpus", "0"], "5 actors", "Try --actors 4"),
        (["--fleet.gpus", "cnn4=2", "cnn5=3"], "3 GPU", "--fleet.gpus"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_with_the_nearest_that_does(
    argv: list[str], found: str, fix: str, nodes: Nodes, tmp_path: Path
) -> None:
    process = launch("--address", nodes.address, *argv, "--out", "run", cwd=tmp_path, timeout=60)
    assert process.returncode == 2
    assert process.stderr.startswith("error: ")
    assert found in process.stderr
    assert fix in process.stderr
    assert process.stdout == ""
    assert not (tmp_path / "run").exists()


# No cluster


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nobody_listens_is_refused_soon(scheme: str, tmp_path: Path) -> None:
    address = f"{scheme}127.0.0.1:{free_ports(1)[0]}"
    process = launch("--address", address, "--out", "run", cwd=tmp_path, timeout=45)
    assert process.returncode == 2
    assert process.stderr.startswith(f"error: cannot reach a Ray cluster at --address {address}")
    assert "ray start --head" in process.stderr
    assert "Traceback" not in process.stderr
    assert not (tmp_path / "run").exists()


def test_an_address_that_is_none_is_refused(tmp_path: Path) -> None:
    process = launch("--address", "somewhere", "--out", "run", cwd=tmp_path, timeout=45)
    assert process.returncode == 2
    assert process.stderr.startswith("error: cannot reach a Ray cluster at --address somewhere")
    assert "Traceback" not in process.stderr


# ray://


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def may_unshare() -> bool:
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[str]:
    """A cluster that does not see the launcher's disk: its `far` is a file system of its own.

    `ray start --block` stays in the foreground and takes its processes along when it ends."""
    if not may_unshare():
        pytest.skip("this machine does not let us hide a folder from a process")
    gcs, client = free_ports(2)
    (tmp_path / "far").mkdir()
    ray = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        *(f"--port={gcs}", f"--ray-client-server-port={client}", "--num-cpus=2"),
        *("--include-dashboard=false", "--object-store-memory=100000000"),
    ]
    script = f'mount -t tmpfs none {tmp_path / "far"} && exec "$@"'
    process = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", script, "sh", *ray],
        cwd=tmp_path,
        # Ray's proxy forks while gRPC works; with gRPC's own fork handlers the child dies at times.
        env={**environment(), "GRPC_ENABLE_FORK_SUPPORT": "0"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", client)) == 0:
                    break
            time.sleep(0.2)
        yield f"ray://127.0.0.1:{client}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_files_arrive_from_a_cluster_that_does_not_share_the_disk(
    remote: str, reference: str, tmp_path: Path
) -> None:
    out = tmp_path / "far" / "run"
    process = launch("--address", remote, "--actors", "1", "--out", str(out), cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert digest(out) == reference
    files = ["config.yaml", "summary.json"]
    files += ["clients.parquet", "messages.parquet", "rounds.parquet", "split.parquet"]
    assert sorted(path.name for path in out.iterdir()) == sorted(files)
    assert str(out) in process.stdout
