"""What is said before anything starts on a cluster."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import ray
from ray.exceptions import AuthenticationError, WorkerCrashedError

from raysim import preflight
from raysim.config import Config, DataConfig, DriverConfig
from raysim.errors import ClusterError, DataError, RaysimError
from raysim.preflight import Answer, examine, explain, knock

HERE, THERE = "a" * 56, "b" * 56
VERSIONS = {
    "python": "3.11", "ray": "2.60.0", "torch": "2.9.0", "numpy": "2.3.0", "pyarrow": "22.0.0",
}  # fmt: skip
SECRET = "5ec2e7" * 10


# Nodes


class Cluster:
    """Two nodes that answer what the test says: an Answer, an exception, or nothing (None)."""

    def __init__(self) -> None:
        self.nodes = [node(HERE, "10.0.0.1"), node(THERE, "10.0.0.2", gpus=2)]
        self.says: dict[str, Any] = {
            HERE: Answer(VERSIONS, "", True),
            THERE: Answer(VERSIONS),
        }
        self.asked: dict[str, DataConfig | None] = {}
        self.cancelled: list[str] = []

    def question(self, node: str, data: DataConfig | None) -> str:
        self.asked[node] = data
        return node

    def wait(self, refs: list[str], num_returns: int, timeout: float) -> tuple[list[str], ...]:
        assert num_returns == len(refs)
        assert 0 < timeout <= 120
        late = [ref for ref in refs if self.says[ref] is None]
        return [ref for ref in refs if ref not in late], late

    def get(self, ref: str) -> Answer:
        answer = self.says[ref]
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, Answer)
        return answer

    def cancel(self, ref: str, force: bool) -> None:
        self.cancelled.append(ref)


def node(key: str, address: str, gpus: float = 0, alive: bool = True) -> dict[str, Any]:
    resources = {"CPU": 4.0, "GPU": gpus}
    return {"NodeID": key, "Alive": alive, "NodeManagerAddress": address, "Resources": resources}


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    monkeypatch.setattr(preflight, "_question", cluster.question)
    monkeypatch.setattr(preflight, "driver_node", lambda: HERE)
    monkeypatch.setattr(ray, "nodes", lambda: cluster.nodes)
    for name in ("wait", "get", "cancel"):
        monkeypatch.setattr(ray, name, getattr(cluster, name))
    return cluster


def test_a_good_cluster_needs_no_word(two: Cluster) -> None:
    assert examine(Config()) == []
    assert two.asked == {HERE: Config().data, THERE: None}


def test_a_dead_node_is_not_asked(two: Cluster) -> None:
    two.nodes.append(node("c" * 56, "10.0.0.3", alive=False))
    examine(Config())
    assert set(two.asked) == {HERE, THERE}


def test_other_versions_are_named_with_what_to_type(two: Cluster) -> None:
    two.says[THERE] = Answer({**VERSIONS, "torch": "2.8.0", "pyarrow": "missing"})
    with pytest.raises(ClusterError) as found:
        examine(Config())
    assert str(found.value).splitlines() == [
        "nodes have other versions than the driver's node 10.0.0.1:",
        "  node 10.0.0.2: torch 2.8.0 instead of 2.9.0, pyarrow missing instead of 22.0.0",
        "On each of them: pip install 'torch==2.9.0' 'pyarrow==22.0.0', and start Ray again",
    ]


@pytest.mark.parametrize(
    ("others", "fix"),
    [
        ({}, "make an environment with Python 3.11, and"),
        ({"ray": "2.59.0"}, "make an environment with Python 3.11, pip install 'ray==2.60.0', and"),
    ],
)
def test_another_python_is_named(two: Cluster, others: dict[str, str], fix: str) -> None:
    two.says[THERE] = Answer({**VERSIONS, "python": "3.12", **others})
    with pytest.raises(ClusterError, match="python 3.12 instead of 3.11") as found:
        examine(Config())
    assert fix in str(found.value)


def test_a_silent_node_is_named_and_its_question_withdrawn(two: Cluster) -> None:
    two.says[THERE] = None
    with pytest.raises(ClusterError, match=r"node 10\.0\.0\.2 did not answer within") as found:
        examine(Config())
    assert "ray stop" in str(found.value)
    assert two.cancelled == [THERE]


def test_a_node_that_cannot_run_us_is_named(two: Cluster) -> None:
    two.says[THERE] = WorkerCrashedError()
    with pytest.raises(ClusterError, match=r"node 10\.0\.0\.2 cannot run raysim \(WorkerCrashed"):
        examine(Config())


def test_nodes_of_one_address_are_told_apart(two: Cluster) -> None:
    two.nodes[1]["NodeManagerAddress"] = "10.0.0.1"
    two.says[THERE] = None
    with pytest.raises(ClusterError, match=r"node 10\.0\.0\.1 \(bbbbbbbb\)"):
        examine(Config())


def test_missing_data_are_named_with_the_node(two: Cluster) -> None:
    two.says[HERE] = Answer(VERSIONS, "no cifar10 under /data", True)
    with pytest.raises(DataError, match=r"on node 10\.0\.0\.1, where the driver runs: no cifar10"):
        examine(Config())


def test_a_driver_that_needs_gpus_reads_where_they_are(two: Cluster) -> None:
    config = Config(driver=DriverConfig(gpus=1))
    assert examine(config) == []
    assert two.asked == {HERE: None, THERE: config.data}


def test_a_cluster_without_a_token_is_told(two: Cluster) -> None:
    two.says[HERE] = Answer(VERSIONS, "", False)
    (note,) = examine(Config())
    assert "asks for no token" in note
    assert "RAY_AUTH_MODE=token" in note


def test_a_node_says_what_it_has() -> None:
    answer = preflight._look(None)
    assert set(answer.versions) == set(VERSIONS)
    assert answer.versions["ray"] == ray.__version__
    assert answer.versions["python"] == f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert not any("+" in version for version in answer.versions.values())
    assert (answer.data_error, answer.asks_for_token) == ("", None)


def test_a_package_may_be_missing() -> None:
    assert preflight._version("no-such-package") == "missing"


def test_the_reason_why_data_cannot_be_read_is_passed_on(tmp_path: Path) -> None:
    assert preflight._data_error(DataConfig()) == ""
    gone = str(tmp_path / "gone")
    assert gone in preflight._data_error(DataConfig(name=f"parquet:{gone}"))


def test_a_node_without_torch_can_say_so() -> None:
    """The task is imported there before it can answer."""
    heavy = ("torch", "numpy", "pyarrow", "grpc", "tyro")
    script = f"""
import sys
sys.modules.update(dict.fromkeys({heavy!r}))
import raysim.preflight
print(raysim.preflight._look(None).versions["ray"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == ray.__version__, done.stderr


@pytest.mark.ray
def test_a_real_cluster_is_examined(cluster: None, tmp_path: Path) -> None:
    notes = examine(Config())
    assert notes == [] or "no token" in notes[0]
    with pytest.raises(DataError, match="where the driver runs"):
        examine(Config(data=DataConfig(name=f"parquet:{tmp_path / 'gone'}")))


# Tokens


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without a token, and nothing said about tokens."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def put_token(home: Path) -> None:
    (home / ".ray").mkdir()
    (home / ".ray" / "auth_token").write_text(SECRET)


@pytest.fixture
def serve() -> Iterator[Callable[[grpc.StatusCode | None], str]]:
    """Starts a server that answers every call with a code, or well; returns its address."""
    servers = []

    class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
        def __init__(self, code: grpc.StatusCode | None) -> None:
            self.code = code

        def service(self, details: Any) -> Any:
            assert not any("auth" in key for key, _ in details.invocation_metadata)

            def answer(request: bytes, context: Any) -> bytes:
                if self.code is not None:
                    context.abort(self.code, "as the test says")
                return b""

            return grpc.unary_unary_rpc_method_handler(answer)

    def start(code: grpc.StatusCode | None) -> str:
        server = grpc.server(ThreadPoolExecutor(1), handlers=[Handler(code)])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(None).wait()


TOKEN, NO_TOKEN = grpc.StatusCode.UNAUTHENTICATED, None
UNKNOWN = grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_whether_a_cluster_asks_for_a_token(
    scheme: str, serve: Callable[..., str], home: Path
) -> None:
    for code, asks in [(TOKEN, True), (NO_TOKEN, False), (UNKNOWN, None)]:
        assert preflight._asks_for_token(f"{scheme}{serve(code)}") is asks
    assert preflight._asks_for_token("auto") is None


def test_nobody_there_is_not_a_matter_of_tokens(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert preflight._asks_for_token(f"127.0.0.1:{port}") is None


def test_tls_is_left_to_ray(
    serve: Callable[..., str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    assert preflight._asks_for_token(serve(TOKEN)) is None


def test_without_a_token_we_need_not_try(serve: Callable[..., str], home: Path) -> None:
    with pytest.raises(ClusterError, match="asks for a token and there is none here"):
        knock(serve(TOKEN))
    put_token(home)
    with pytest.raises(ClusterError, match="unless you type: export RAY_AUTH_MODE=token"):
        knock(serve(TOKEN))
    knock(serve(NO_TOKEN))
    knock(serve(UNKNOWN))
    knock("auto")


def test_with_a_token_ray_decides(
    serve: Callable[..., str], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    knock(serve(TOKEN))


def refused() -> Exception:
    """As Ray raises it when the head does not know the token."""
    cause = RuntimeError("Failed to connect to GCS. Last: ray.exceptions.AuthenticationError: RPC")
    error = ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379")
    error.__cause__ = cause
    return error


MISSING = AuthenticationError("Token authentication is enabled but no token was found")
TIMEOUT = ConnectionError("ray client connection timeout")
SCP = "mkdir -p ~/.ray && scp head:.ray/auth_token ~/.ray/auth_token"


@pytest.mark.parametrize(
    ("error", "address", "mode", "token", "asks", "said"),
    [
        (refused(), "head:6379", None, False, True, f"export RAY_AUTH_MODE=token && {SCP}"),
        (refused(), "head:6379", None, True, True, "you type: export RAY_AUTH_MODE=token"),
        (refused(), "head:6379", "disabled", True, None, "you type: export RAY_AUTH_MODE=token"),
        (refused(), "head:6379", "token", True, True, f"not the one that is here. Type: {SCP}"),
        (refused(), "127.0.0.1:6379", "token", True, True, "Type: export RAY_AUTH_TOKEN_PATH=FILE"),
        (refused(), "auto", "token", True, None, "Type: export RAY_AUTH_TOKEN_PATH=FILE"),
        (
            TIMEOUT,
            "ray://head:10001",
            "token",
            True,
            True,
            f"not the one that is here. Type: {SCP}",
        ),
        (TIMEOUT, "ray://head:10001", None, False, True, f"export RAY_AUTH_MODE=token && {SCP}"),
        (TIMEOUT, "ray://head:10001", "token", True, False, "cannot reach a Ray cluster"),
        (MISSING, "head:6379", "token", False, True, SCP),
        (MISSING, "head:6379", "token", False, False, "asks for none. Type: unset RAY_AUTH_MODE"),
        (ConnectionError("no\nTraceback"), "head:6379", "token", True, True, ": no. Start one"),
        (ValueError("Invalid address"), "somewhere", None, True, None, "somewhere: Invalid"),
    ],
)
def test_what_ray_raises_is_explained(
    error: Exception,
    address: str,
    mode: str | None,
    token: bool,
    asks: bool | None,
    said: str,
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "_asks_for_token", lambda address: asks)
    if mode:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    if token:
        put_token(home)
    text = explain(error, address)
    assert said in text
    assert f"--address {address}" in text
    assert len(text.splitlines()) == 1
    assert SECRET not in text


def test_a_token_may_be_given_in_other_ways(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not preflight._has_token()
    monkeypatch.setenv("RAY_AUTH_TOKEN", SECRET)
    assert preflight._has_token()
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(home / "elsewhere"))
    assert not preflight._has_token()
    (home / "elsewhere").write_text(SECRET)
    assert preflight._has_token()


def test_other_versions_on_the_head_are_explained(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the head asks for a token: Ray got past that."""
    monkeypatch.setattr(preflight, "_asks_for_token", lambda address: True)
    cluster = {"ray_version": "2.1.0", "python_version": "3.9.1"}
    with pytest.raises(RuntimeError) as found:
        ray._private.utils.check_version_info(cluster, "10.0.0.9")
    text = explain(found.value, "head:6379")
    assert "The cluster was started with: Ray: 2.1.0 Python: 3.9.1" in text
    assert text.endswith("Install the same on both sides")
    assert len(text.splitlines()) == 1


def test_all_of_it_ends_without_a_traceback() -> None:
    assert issubclass(ClusterError, RaysimError)
    assert ClusterError.exit_code == DataError.exit_code == 2
