"""README's recipe for a cluster of several nodes, line by line, on nodes with their own networks.

Each node is a network namespace; the second also has disks of its own, so that it sees neither the
data nor the files of the first. Where namespaces are not allowed, both nodes share this host.
Everything that is started here carries a mark in its environment, and is ended by that.
"""

import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from test_readme import section

from raysim.data import shapes

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

BIN = Path(sys.executable).parent
MARK = "RAYSIM_RECIPE"

TINY = [
    *("--clients", "6", "--participation", "0.5", "--rounds", "2"),
    *("--data.alpha", "0.5", "--train.batch-size", "16"),
]
SCP = """#!/bin/sh
exec cp "$HEAD_HOME/${1#*:}" "$2"
"""
RAY = """#!/bin/sh
[ "$1" = start ] && set -- "$@" $START
exec {ray} "$@"
"""


def recipe() -> dict[str, str]:
    """The commands of README by where they are to be typed."""
    (text,) = re.findall(r"^```sh\n(.*?)^```$", section("Clusters"), re.MULTILINE | re.DOTALL)
    parts = [part.partition("\n") for part in text.strip().split("\n\n")]
    return {title.removeprefix("# "): commands for title, _, commands in parts}


@dataclass
class Node:
    """A place to type commands at."""

    home: Path
    environment: dict[str, str]
    before: list[str] = field(default_factory=list)
    """What puts a command into the node's namespace, if it has one."""
    hidden: list[Path] = field(default_factory=list)
    """Folders that are empty when seen from here."""

    def run(self, script: str, timeout: float = 200) -> "subprocess.CompletedProcess[str]":
        for folder in self.hidden:
            script = f"mount -t tmpfs none {folder}\n{script}"
        with tempfile.TemporaryFile("w+") as out:
            # A file, not a pipe: what `ray start` leaves running would keep a pipe open.
            done = subprocess.run(
                [*self.before, "sh", "-ec", script],
                cwd=self.home,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=timeout,
            )
            out.seek(0)
            return subprocess.CompletedProcess(script, done.returncode, out.read(), "")


class Network:
    """Two nodes, and what is to be typed in place of README's names."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self.root = root
        self.mark = secrets.token_hex(8)
        self.apart = os.environ.get("RAYSIM_RECIPE_ONE_HOST") != "1" and may_have_namespaces()
        stack.callback(self._end_processes)
        names = [f"rs{self.mark[:6]}{end}" for end in "ab"]
        ports = {"6379": "6379", "8265": "8265"}
        if self.apart:
            make_namespaces(names, stack)
            self.head = "10.77.0.1"
        else:
            self.head = "127.0.0.1"
            ports = dict(zip(ports, map(str, free_ports(2)), strict=True))
        self.words = {"HEAD": self.head, **ports}
        shims = root / "bin"
        shims.mkdir()
        for name, text in {"scp": SCP, "ray": RAY.format(ray=BIN / "ray")}.items():
            (shims / name).write_text(text)
            (shims / name).chmod(0o755)
        self.nodes = [
            self._node(name, first) for name, first in zip(names, (True, False), strict=True)
        ]

    def _node(self, name: str, first: bool) -> Node:
        home = self.root / name
        home.mkdir()
        start = "--num-cpus=2 --num-gpus=2 --object-store-memory=100000000"
        if first:
            start += f" --node-ip-address={self.head} --temp-dir={self.root / 'ray'}"
            start += f" --dashboard-port={self.words['8265']}"
        kept = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        environment = {
            **kept,
            "HOME": str(home),
            "PATH": f"{self.root / 'bin'}:{BIN}:{os.environ['PATH']}",
            "HEAD_HOME": str(self.root / name[:-1]) + "a",
            "START": start,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAYSIM_CACHE": str(home / "cache"),
            "NO_COLOR": "1",
            MARK: self.mark,
        }
        if not self.apart:
            return Node(home, environment)
        hidden = [] if first else [self.root / "data", self.root / "ray", self.root / "out"]
        return Node(home, environment, ["ip", "netns", "exec", name], hidden)

    def say(self, commands: str) -> str:
        """README's commands with this network's names."""
        for word, ours in self.words.items():
            commands = re.sub(rf"\b{word}\b", ours, commands)
        return commands

    def _end_processes(self) -> None:
        """Ours, and nobody else's: they carry the mark."""
        for how in (signal.SIGTERM, signal.SIGKILL):
            ours = list(self.processes())
            for process in ours:
                with suppress(psutil.Error):
                    process.send_signal(how)
            psutil.wait_procs(ours, timeout=20)

    def processes(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark:
                    yield process
            except psutil.Error:
                continue


def may_have_namespaces() -> bool:
    name = f"rs{secrets.token_hex(3)}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    except FileNotFoundError:
        return False
    if made:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return made


def make_namespaces(names: list[str], stack: ExitStack) -> None:
    """Two, joined by a cable, with the addresses 10.77.0.1 and 10.77.0.2."""

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    for name in names:
        ip("netns", "add", name)
        stack.callback(ip, "netns", "del", name)
    one, two = names
    ip(*f"link add cable netns {one} type veth peer name cable netns {two}".split())
    for last, name in enumerate(names, start=1):
        ip("-n", name, *f"addr add 10.77.0.{last}/24 dev cable".split())
        for device in ("lo", "cable"):
            ip("-n", name, "link", "set", device, "up")


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def write_pictures(folder: Path) -> None:
    arrays = shapes.load(240, 10, 32)
    encoded = []
    for image in arrays["images"]:
        stream = BytesIO()
        Image.fromarray(np.moveaxis(image, 0, 2)).save(stream, "PNG")
        encoded.append(stream.getvalue())
    folder.mkdir()
    table = pa.table({"image": encoded, "label": arrays["labels"]})
    pq.write_table(table.slice(0, 200), folder / "train.parquet")
    pq.write_table(table.slice(200), folder / "test.parquet")


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """The cluster of the recipe."""
    root = Path(tempfile.mkdtemp(prefix="rs-", dir="/tmp"))  # sockets must have short names
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        network = Network(root, stack)
        (root / "ray").mkdir()
        (root / "out").mkdir()
        write_pictures(root / "data")
        lines = recipe()
        for node, title in zip(
            network.nodes, ("on the head node", "on every other node"), strict=True
        ):
            done = node.run(network.say(lines[title]))
            assert done.returncode == 0, done.stdout
        yield network
    left = [name for name in ("a", "b") if Path(f"/run/netns/rs{network.mark[:6]}{name}").exists()]
    assert left == []
    assert list(network.processes()) == []


@pytest.fixture(scope="module")
def flags(network: Network) -> list[str]:
    return [*TINY, "--data.name", f"parquet:{network.root / 'data'}"]


def digest(out: Path) -> str:
    return str(json.loads((out / "summary.json").read_text())["digest"])


def launch_line(network: Network) -> str:
    (line,) = recipe()["on the head node, which has the data"].splitlines()
    return f"export RAY_AUTH_MODE=token; {network.say(line)}"


@pytest.fixture(scope="module")
def reference(network: Network, flags: list[str]) -> str:
    """The digest of the same run in one process."""
    out = network.root / "out" / "local"
    line = launch_line(network)
    fleet = line[line.index("--fleet.models") : line.index("--fleet.gpus")]
    command = f"python -m raysim.launch {fleet} {' '.join(flags)} --backend local --out {out}"
    done = network.nodes[0].run(command)
    assert done.returncode == 0, done.stdout
    return digest(out)


def test_the_recipe_says_where_to_type_what() -> None:
    assert list(recipe()) == [
        "on the head node",
        "on every other node",
        "on the head node, which has the data",
        "or as a job, which goes on when you log out",
    ]


def test_the_token_is_the_same_and_nobody_elses_to_read(network: Network) -> None:
    files = [node.home / ".ray" / "auth_token" for node in network.nodes]
    assert files[0].read_text() == files[1].read_text()
    assert [file.stat().st_mode & 0o077 for file in files] == [0, 0]


def test_a_launcher_on_the_head_uses_both_nodes(
    network: Network, flags: list[str], reference: str
) -> None:
    """With fractions of GPUs, and a pool for an architecture with its own share."""
    out = network.root / "out" / "launched"
    done = network.nodes[0].run(f"{launch_line(network)} {' '.join(flags)} --out {out}")
    assert done.returncode == 0, done.stdout
    assert "4 client actors on cpu of 2 nodes" in done.stdout
    assert re.search(r"pool-resnet18 +\d x \(1 CPU, 0\.5 GPU\) plays resnet18", done.stdout)
    assert re.search(r"pool-cnn1-\S+ +\d x \(1 CPU, 0\.25 GPU\) plays cnn1", done.stdout)
    assert "asks for no token" not in done.stdout
    assert digest(out) == reference
    assert (network.nodes[0].home / ".ray" / "auth_token").read_text() not in done.stdout


def test_a_job_does_the_same(network: Network, flags: list[str], reference: str) -> None:
    out = network.root / "out" / "job"
    (line,) = recipe()["or as a job, which goes on when you log out"].splitlines()
    line = network.say(line).replace("--no-wait ", "").replace("~/runs/job", str(out))
    shares = launch_line(network).partition("--gpus")[2]
    done = network.nodes[0].run(
        f"export RAY_AUTH_MODE=token; {line} --gpus {shares} {' '.join(flags)}"
    )
    assert done.returncode == 0, done.stdout
    assert "4 client actors on cpu of 2 nodes" in done.stdout
    assert digest(out) == reference
    assert (network.nodes[0].home / ".ray" / "auth_token").read_text() not in done.stdout


def test_without_the_token_it_is_refused_at_once_and_says_what_to_type(network: Network) -> None:
    out = network.root / "out" / "refused"
    started = time.monotonic()
    line = launch_line(network).replace("export RAY_AUTH_MODE=token; ", "")
    done = network.nodes[0].run(f"{line} --out {out}")
    assert done.returncode == 2
    assert "asks for a token" in done.stdout
    assert "export RAY_AUTH_MODE=token" in done.stdout
    assert len(done.stdout.splitlines()) == 1
    assert time.monotonic() - started < 15
    assert not out.exists()


def test_with_another_token_it_is_refused(network: Network) -> None:
    out = network.root / "out" / "refused"
    other = network.root / "another_token"
    other.write_text("0" * 64)
    done = network.nodes[0].run(
        f"export RAY_AUTH_TOKEN_PATH={other}; {launch_line(network)} --out {out}"
    )
    assert done.returncode == 2
    last = done.stdout.splitlines()[-1]
    assert last.startswith("error: ")
    assert "not the one that is here" in last
    assert "Traceback" not in done.stdout
    assert not out.exists()


def test_data_that_are_not_where_the_driver_runs_are_missed(network: Network) -> None:
    if not network.apart:
        pytest.skip("both nodes share this host's disks")
    done = network.nodes[1].run(
        f"{launch_line(network)} {' '.join(TINY)} --out {network.root / 'out' / 'refused'} "
        f"--data.name parquet:{network.root / 'data'}"
    )
    assert done.returncode == 2
    assert str(network.root / "data") in done.stdout
    assert "Traceback" not in done.stdout


def test_a_node_with_another_torch_is_refused(network: Network, flags: list[str]) -> None:
    """The last test: it spoils the cluster."""
    fake = network.nodes[1].home / "packages"
    (fake / "torch-0.0.1.dist-info").mkdir(parents=True)
    (fake / "torch-0.0.1.dist-info" / "METADATA").write_text("Name: torch\nVersion: 0.0.1\n")
    join = network.say(recipe()["on every other node"])
    done = network.nodes[1].run(f"export PYTHONPATH={fake}\n{join}")
    assert done.returncode == 0, done.stdout
    out = network.root / "out" / "refused"
    done = network.nodes[0].run(f"{launch_line(network)} {' '.join(flags)} --out {out}")
    assert done.returncode == 2
    assert "torch 0.0.1 instead of " in done.stdout
    assert "pip install 'torch==" in done.stdout
    assert not out.exists()
