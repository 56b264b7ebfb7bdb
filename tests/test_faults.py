"""Faults on Ray: whatever dies, the result is that of a run nothing happened to."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import faults
import psutil
import pytest
import torch
from test_contract import Once, simulate

import methods
from raysim import ClientError, Result
from raysim.events import RoundFinished, Started

pytestmark = pytest.mark.ray

FAULTY = '''
"""A method whose clients misbehave."""
import os, signal, time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from raysim import ClientState, Method, like


class Upload(NamedTuple):
    value: torch.Tensor


@dataclass
class Server:
    total: torch.Tensor


@dataclass(frozen=True)
class Faulty(Method[ClientState, Server]):
    def init_server(self, ctx):
        return Server(torch.zeros(3))

    def client_update(self, client, message, ctx):
        value = torch.full((3,), float(ctx.client_id))
        flag = Path({flag!r})
        {before}
        ctx.fit(lambda x, y: F.cross_entropy(client.model(x), y), client.model)
        {after}
        return Upload(value)

    def expected(self, client_id, ctx):
        return Upload(like(3))

    def server_update(self, server, replies, ctx):
        server.total += sum(reply.payload.value for reply in replies)
'''
SMALL: dict[str, Any] = {"clients": 4, "participation": 1.0, "rounds": 2, "data": {"samples": 160}}


def faulty(folder: Path, before: str = "pass", after: str = "pass") -> str:
    """A method file; `before` and `after` run around the training of a client."""
    path = folder / "faulty.py"
    path.write_text(
        FAULTY.replace("{flag!r}", repr(str(folder / "flag")))
        .replace("{before}", before)
        .replace("{after}", after)
    )
    return str(path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Each method once, in-process; and the faulty one when it is well."""
    folder = tmp_path_factory.mktemp("undisturbed")
    results = Once(folder)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    results["faulty"] = simulate(faulty(folder), folder / "faulty", **SMALL)
    torch.set_num_threads(threads)
    return results


# Actors


class KillInEveryRound:
    """Kills a random client actor at a random moment of every round: idle, loading, training or
    returning."""

    def __init__(self, seed: int) -> None:
        self.killer = faults.Killer(os.getpid(), lambda rng: 1e9)
        self._rng = random.Random(seed)
        self._timers: list[threading.Timer] = []

    def __call__(self, event: Any) -> None:
        if isinstance(event, Started | RoundFinished):
            delay = self._rng.choice([0.0, 0.01, 0.03, 0.1, 0.3])
            self._timers.append(threading.Timer(delay, self.killer.kill_one))
            self._timers[-1].start()

    def finish(self) -> int:
        for timer in self._timers:
            timer.join()
        return self.killer.kills


@pytest.mark.parametrize("method", faults.short_form(methods.names(), "fedmrl", "fedre"))
def test_an_actor_killed_in_every_round_changes_nothing(
    method: str, undisturbed: dict[str, Result], tmp_path: Path, cluster: None
) -> None:
    kill = KillInEveryRound(methods.names().index(method))
    config = undisturbed[method].config.replace(
        {"out": str(tmp_path / "run"), "backend": "ray", "actors": "3"}
    )
    from raysim import run

    found = run(config, faults.Listener(kill))
    assert kill.finish() >= 2
    faults.assert_same_run(found, undisturbed[method])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("method", ["fedkd", "fedre"])  # two kinds of state
def test_actors_killed_at_many_moments_change_nothing(
    method: str, seed: int, undisturbed: dict[str, Result], tmp_path: Path, cluster: None
) -> None:
    from raysim import run

    kill = KillInEveryRound(100 + seed)
    changes = {"out": str(tmp_path / "run"), "backend": "ray", "actors": "123"[seed % 3]}
    found = run(undisturbed[method].config.replace(changes), faults.Listener(kill))
    kill.finish()
    faults.assert_same_run(found, undisturbed[method])


@pytest.mark.slow
def test_a_killed_actor_is_replaced(tmp_path: Path, cluster: None) -> None:
    """All of them, more than once; a run has as many at its end as at its start."""
    waits = faulty(tmp_path, "time.sleep(0.5)")
    counts: list[int] = []

    def hear(event: Any) -> None:
        if isinstance(event, RoundFinished) and event.round in (1, 3):
            for actor in faults.client_actors(os.getpid()):
                faults.kill(actor)
        if isinstance(event, RoundFinished):
            counts.append(len(faults.client_actors(os.getpid())))

    from raysim import Config, run

    tree = {**SMALL, "rounds": 5, "method": waits, "fleet": {"models": ["cnn4"]}, "actors": "2"}
    result = run(Config.from_tree({**tree, "out": str(tmp_path / "run")}), faults.Listener(hear))
    assert counts[-1] == 2
    assert result.summary["actors"] == 2
    assert result.summary["selected"] == {"done": 20, "dropped": 0, "failed": 0}


# Clients that kill their actors


KILLER = "if ctx.client_id == 2 and ctx.round == 2: os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.slow
def test_a_client_that_kills_every_actor_is_named(tmp_path: Path, cluster: None) -> None:
    method = faulty(tmp_path, after=KILLER)
    with pytest.raises(ClientError, match=r"client_update failed on client 2 \(cnn4\) in round 2"):
        simulate(method, tmp_path / "run", **SMALL, backend="ray", actors="2")


def test_a_client_that_kills_every_actor_can_be_dropped(tmp_path: Path, cluster: None) -> None:
    method = faulty(tmp_path, after=KILLER)
    result = simulate(
        method, tmp_path / "run", **SMALL, backend="ray", actors="2", on_client_error="drop"
    )
    assert_only_dropped(result, client=2, round=2)


def assert_only_dropped(result: Result, client: int, round: int) -> None:
    """Every selected client is accounted for, in the tables and in the summary."""
    rows = [row for row in result.clients.to_pylist() if row["phase"] == "train"]
    status = {(row["round"], row["client"]): row["status"] for row in rows}
    everyone = {(r, c) for r in (1, 2) for c in range(4)}
    assert len(rows) == len(everyone)
    assert status == {key: "dropped" if key == (round, client) else "done" for key in everyone}
    assert result.summary["selected"] == {"done": 7, "dropped": 1, "failed": 0}
    rounds = result.rounds.to_pylist()
    assert [row["dropped"] for row in rounds] == [int(row["round"] == round) for row in rounds]
    assert all(row["cohort"] == 4 for row in rounds)
    up = {(r["round"], r["client"]) for r in result.messages.to_pylist() if r["direction"] == "up"}
    assert up == everyone - {(round, client)}


# Clients that fail, lie or hang


ONCE = "if ctx.client_id == 2 and ctx.round == 2 and not flag.exists(): flag.touch(); "


@pytest.mark.parametrize("backend", faults.short_form(["local", "ray"], "local"))
@pytest.mark.parametrize(
    "fault",
    [
        "raise RuntimeError('once')",
        "value *= float('nan')",
        "value = torch.zeros(4)",
    ],
)
def test_a_client_that_fails_once_is_tried_again_from_where_it_was(
    fault: str, backend: str, undisturbed: dict[str, Result], tmp_path: Path, cluster: None
) -> None:
    method = faulty(tmp_path, after=ONCE + fault)
    result = simulate(
        method, tmp_path / "run", **SMALL, backend=backend, actors="2", on_client_error="retry"
    )
    assert (tmp_path / "flag").exists()
    assert result.summary["faults"]["retries"] == 1
    assert result.summary["selected"] == {"done": 8, "dropped": 0, "failed": 0}
    assert result.digest == undisturbed["faulty"].digest


@pytest.mark.parametrize("backend", faults.short_form(["local", "ray"], "local"))
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("raise RuntimeError('broken')", "RuntimeError: broken"),
        ("value *= float('nan')", "payload.value holds a number that is not finite"),
        ("value /= 0", "payload.value holds a number that is not finite"),
        ("value = torch.zeros(4)", "payload.value is torch.float32 [4]; expected"),
        ("value = torch.zeros(3, dtype=torch.int64)", "payload.value is torch.int64 [3]; expected"),
        ("return None", "Upload"),
        ("return {'value': value}", "Upload"),
    ],
    ids=lambda text: text if "value" not in text or "=" in text else "",
)
def test_a_client_that_fails_is_named_or_dropped(
    fault: str, told: str, backend: str, tmp_path: Path, cluster: None
) -> None:
    method = faulty(tmp_path, after=f"if ctx.client_id == 2 and ctx.round == 2: {fault}")
    settings = {**SMALL, "backend": backend, "actors": "2"}
    result = simulate(method, tmp_path / "dropped", **settings, on_client_error="drop")
    assert_only_dropped(result, client=2, round=2)
    if backend == "local" or "Error" in fault:  # one of them on Ray is enough
        with pytest.raises(ClientError, match=r"client 2 \(cnn4\) in round 2") as error:
            simulate(method, tmp_path / "named", **settings)
        assert told in str(error.value)


def test_the_client_that_failed_is_named_while_others_still_work(
    tmp_path: Path, cluster: None
) -> None:
    """The last of the cohort fails at once, the first ones are not done."""
    slow = "time.sleep(1.0 if ctx.client_id < 3 else 0.0)"
    method = faulty(tmp_path, slow, "if ctx.client_id == 3: raise RuntimeError('at once')")
    with pytest.raises(ClientError, match=r"client 3 .* RuntimeError: at once"):
        simulate(method, tmp_path / "run", **SMALL, backend="ray", actors="4")


@pytest.mark.slow
def test_all_clients_of_a_round_may_be_dropped(tmp_path: Path, cluster: None) -> None:
    method = faulty(tmp_path, "if ctx.round == 1: raise RuntimeError('all')")
    result = simulate(
        method, tmp_path / "run", **SMALL, backend="ray", actors="2", on_client_error="drop"
    )
    assert result.summary["selected"] == {"done": 4, "dropped": 4, "failed": 0}


COMMAND = [
    *("--clients", "4", "--participation", "1.0", "--data.samples", "160"),
    *("--fleet.models", "cnn4", "cnn5", "--train.batch-size", "16", "--out", "run"),
]
PRIVATE = [*COMMAND, "--backend", "ray", "--actors", "2", "--dashboard", "False"]


@pytest.mark.parametrize("backend", faults.short_form(["local", "ray"], "local"))
def test_a_client_that_hangs_ends_the_run_and_is_told(backend: str, tmp_path: Path) -> None:
    method = faulty(tmp_path, "if ctx.client_id == 2 and ctx.round == 2: time.sleep(1000)")
    words = ["--method", method, "--rounds", "3", "--watchdog", "3"]
    where = ["--backend", "local"] if backend == "local" else PRIVATE[len(COMMAND) :]
    code, _, said = faults.launch(*COMMAND, *where, *words, cwd=tmp_path, timeout=90)
    assert code == 1
    assert "no progress for 3 s (--watchdog)" in said
    assert "client_update of client 2" in said
    assert "in round 2" in said
    line = next(n for n, text in enumerate(Path(method).read_text().splitlines(), 1)
                if "sleep(1000)" in text)  # fmt: skip
    assert f"line {line} in client_update" in said
    if backend == "ray":
        assert "on pool-" in said
        assert "node " in said


# Drivers, launchers, everything


LONG = ["--rounds", "40", "--checkpoint-every", "5", "--eval.every", "4"]


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Result:
    folder = tmp_path_factory.mktemp("long")
    code, _, said = faults.launch(*COMMAND, *LONG, "--backend", "local", cwd=folder)
    assert code == 0, said
    return Result.load(folder / "run")


def test_a_killed_driver_starts_again_and_ends_the_same(long_run: Result, tmp_path: Path) -> None:
    with faults.launched(*PRIVATE, *LONG, cwd=tmp_path) as process:
        read = faults.wait_for_round(process, 12)
        faults.kill(faults.driver_actor(process.pid))
        printed, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
    told = (read + printed).count("the driver died")
    assert 1 <= told <= 3
    faults.assert_same_run(Result.load(tmp_path / "run"), long_run)


@pytest.mark.slow
def test_a_driver_killed_before_its_first_round_starts_over(
    long_run: Result, tmp_path: Path
) -> None:
    with faults.launched(*PRIVATE, *LONG, cwd=tmp_path) as process:
        faults.eventually(lambda: (tmp_path / "run" / "config.yaml").exists(), 60)
        faults.kill(faults.driver_actor(process.pid))
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
    faults.assert_same_run(Result.load(tmp_path / "run"), long_run)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["launcher", "everything"])
def test_after_a_kill_of_the_launcher_or_of_everything_the_run_can_be_resumed(
    what: str, long_run: Result, tmp_path: Path
) -> None:
    with faults.launched(*PRIVATE, *LONG, cwd=tmp_path) as process:
        faults.wait_for_round(process, 12)
        processes = faults.family(process.pid)
        ours = [faults.driver_actor(process.pid), *faults.client_actors(process.pid)]
        if what == "everything":
            faults.end_all(process.pid)
        else:
            process.kill()
        _, alive = psutil.wait_procs(ours, timeout=20)
        for each in processes:  # Ray's own agents notice late
            faults.kill(each)
        assert alive == [], "the actors of a private cluster end with its launcher"
    code, printed, said = faults.launch("--resume", "run", "--backend", "local", cwd=tmp_path)
    assert code == 0, said
    assert "round   1/40" not in printed
    faults.assert_same_run(Result.load(tmp_path / "run"), long_run)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_on_ray_that_is_asked_to_stop_saves_and_can_be_resumed(
    number: signal.Signals, long_run: Result, tmp_path: Path
) -> None:
    with faults.launched(*PRIVATE, *LONG, cwd=tmp_path) as process:
        faults.wait_for_round(process, 6)
        code, said = faults.interrupt(process, number)
    assert code == 130
    assert "stopped after round" in said
    assert "Traceback" not in said
    code, printed, said = faults.launch("--resume", "run", "--backend", "local", cwd=tmp_path)
    assert code == 0, said
    assert "round   6/40" not in printed
    faults.assert_same_run(Result.load(tmp_path / "run"), long_run)


# Nodes


NODES = """
import json, sys
import ray
from ray.cluster_utils import Cluster

fast = {
    "health_check_initial_delay_ms": 1000, "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000, "health_check_failure_threshold": 3,
}
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "_system_config": fast})
workers = [cluster.add_node(num_cpus=1)]
cluster.wait_for_nodes()
print("answer", json.dumps(cluster.address), flush=True)
ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
head = ray.get_runtime_context().get_node_id()
for line in sys.stdin:
    if line.startswith("remove"):
        cluster.remove_node(workers.pop(), allow_graceful=False)
    if line.startswith("add"):
        workers.append(cluster.add_node(num_cpus=1))
    pids = [node.all_processes["raylet"][0].process.pid for node in workers]
    print("answer", json.dumps(pids), flush=True)
ray.shutdown()
cluster.shutdown()
"""


class Nodes:
    """A cluster of a head and one more node of one CPU each, that can die and come back."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._in: IO[str] = process.stdin
        self._out: IO[str] = process.stdout
        self.address = str(self._answer())

    def ask(self, what: str) -> list[int]:
        """`add` or `remove` the other node, or just `look`: the raylets of nodes but the head."""
        self._in.write(f"{what}\n")
        self._in.flush()
        found: list[int] = self._answer()
        return found

    def actors_there(self) -> int:
        """Client actors on other nodes than the head."""
        return sum(len(faults.client_actors(pid)) for pid in self.ask("look"))

    def _answer(self) -> Any:
        for line in self._out:  # Ray prints, too
            if line.startswith("answer "):
                return json.loads(line.removeprefix("answer "))
        raise AssertionError("the cluster did not start")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    process = subprocess.Popen(
        [sys.executable, "-c", NODES],
        cwd=tmp_path,
        env=faults.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield Nodes(process)
        process.communicate(timeout=60)
    finally:
        faults.end_all(process.pid)
        process.communicate()


@pytest.mark.slow
def test_a_dead_node_sends_the_run_back_once_and_it_ends_the_same(
    nodes: Nodes, tmp_path: Path
) -> None:
    """States were on it, so the run replays from its checkpoint; tasks that were under way when it
    went back may still fail for the same loss, but that is no reason to go back again. Rounds are
    long: Ray takes seconds to notice that a node is gone."""
    slow = ["--rounds", "40", "--checkpoint-every", "15", "--eval.every", "4"]
    slow += ["--train.epochs", "8"]
    (tmp_path / "whole").mkdir()
    code, _, said = faults.launch(*COMMAND, *slow, "--backend", "local", cwd=tmp_path / "whole")
    assert code == 0, said
    words = [*COMMAND, *slow, "--address", nodes.address, "--actors", "auto"]
    with faults.launched(*words, cwd=tmp_path) as process:
        read = faults.wait_for_round(process, 18)
        assert nodes.actors_there() == 1
        nodes.ask("remove")
        printed, said = process.communicate(timeout=200)
        assert process.returncode == 0, said
    found = Result.load(tmp_path / "run")
    faults.assert_same_run(found, Result.load(tmp_path / "whole" / "run"))
    assert found.summary["faults"]["replays"] == 1, read + printed
    assert "back from round" in printed


@pytest.mark.slow
def test_a_node_that_joins_is_used(nodes: Nodes, tmp_path: Path) -> None:
    nodes.ask("remove")
    method = faulty(tmp_path, "time.sleep(0.2)")
    words = [*COMMAND, "--rounds", "100000", "--method", method, "--address", nodes.address]
    with faults.launched(*words, cwd=tmp_path) as process:
        faults.wait_for_round(process, 1)
        nodes.ask("add")
        assert faults.eventually(nodes.actors_there, 40) == 1
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
        assert process.returncode == 130


# A full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 24 MB: room for some checkpoints, not for many."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "none", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this machine does not let us mount a small disk")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("backend", faults.short_form(["local", "ray"], "local"))
def test_a_full_disk_ends_the_run_and_after_making_room_it_can_be_resumed(
    backend: str, long_run: Result, small_disk: Path, tmp_path: Path
) -> None:
    """Four states of 4 MB fit once, so the second checkpoint does not."""
    where = PRIVATE[len(COMMAND) :] if backend == "ray" else ["--backend", "local"]
    words = [*COMMAND, *LONG, *where, "--out", str(small_disk / "run")]
    code, _, said = faults.launch(*words, cwd=tmp_path)
    assert code == 1
    assert "error: " in said
    assert "No space left on device" in said
    assert not (small_disk / "run" / "summary.json").exists()
    subprocess.run(["mount", "-o", "remount,size=200m", str(small_disk)], check=True)
    words = ["--resume", str(small_disk / "run"), "--backend", "local"]
    code, printed, said = faults.launch(*words, cwd=tmp_path)
    assert code == 0, said
    assert "round   5/40" not in printed
    faults.assert_same_run(Result.load(small_disk / "run"), long_run)


# Runs that are left alone


@pytest.fixture
def standing(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """A cluster of `ray start`, which outlives the launcher: its address and its process."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    port, client = (probe.getsockname()[1] for probe in probes)
    for probe in probes:
        probe.close()
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
            *(f"--port={port}", "--num-cpus=2", "--include-dashboard=false"),
            *("--object-store-memory=200000000", f"--ray-client-server-port={client}"),
        ],
        cwd=tmp_path,
        env=faults.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        assert faults.eventually(listens, 60)
        yield f"127.0.0.1:{port}", process.pid
    finally:
        faults.end_all(process.pid)
        process.wait()


@pytest.fixture
def unhurried(tmp_path: Path) -> tuple[list[str], Result]:
    """The command of a run that takes its time, and the same run without it."""
    slow = faulty(tmp_path, "time.sleep(0.4)")
    quick = tmp_path / "quick"
    quick.mkdir()
    words = [*COMMAND, *LONG, "--backend", "local", "--method", faulty(quick)]
    code, _, said = faults.launch(*words, cwd=quick)
    assert code == 0, said
    return [*COMMAND, *LONG, "--method", slow, "--actors", "2"], Result.load(quick / "run")


def detached(words: list[str], cwd: Path) -> str:
    """Start a run, leave it alone; returns its name."""
    code, printed, said = faults.launch(*words, "--detach", cwd=cwd)
    assert code == 0, said
    return printed.rpartition("--attach ")[2].split()[0]


@pytest.mark.slow
def test_a_run_left_on_a_cluster_is_followed_stopped_and_resumed(
    standing: tuple[str, int], unhurried: tuple[list[str], Result], tmp_path: Path
) -> None:
    words, expected = unhurried
    there = ["--address", standing[0]]
    name = detached([*words, *there], tmp_path)
    with faults.launched("--attach", name, *there, cwd=tmp_path) as process:
        faults.wait_for_round(process, 3)
        process.send_signal(signal.SIGINT)  # stops following, not the run
        process.communicate(timeout=10)
    code, _, said = faults.launch("--stop", name, *there, cwd=tmp_path)
    assert code in (0, 130), said
    assert "stopped after round" in said
    assert not (tmp_path / "run" / "summary.json").exists()
    code, _, said = faults.launch("--attach", name, *there, cwd=tmp_path)
    assert code == 2
    assert f"no run {name!r}" in said
    code, printed, said = faults.launch("--resume", "run", "--backend", "local", cwd=tmp_path)
    assert code == 0, said
    assert "round   1/40" not in printed
    faults.assert_same_run(Result.load(tmp_path / "run"), expected)


@pytest.mark.slow
def test_a_run_left_on_a_cluster_survives_the_death_of_its_driver(
    standing: tuple[str, int], unhurried: tuple[list[str], Result], tmp_path: Path
) -> None:
    words, expected = unhurried
    there = ["--address", standing[0]]
    name = detached([*words, *there], tmp_path)
    faults.eventually(lambda: any((tmp_path / "run").glob("checkpoints/*.json")), 60)
    faults.kill(faults.driver_actor(standing[1]))
    code, _, said = faults.launch("--attach", name, *there, cwd=tmp_path)
    assert code == 0, said
    faults.assert_same_run(Result.load(tmp_path / "run"), expected)
