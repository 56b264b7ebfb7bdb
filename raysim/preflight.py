"""What a cluster must have before anything starts on it: a token in common with us, the same
versions on every node, and the data where the driver reads them. Whether the actors fit is
`make_plan`'s question.

Imports no more than every node has: a node that lacks torch must be able to say so.
"""

import importlib.metadata
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raysim.config import Config, DataConfig
from raysim.errors import ClusterError, DataError, RaysimError

PACKAGES = ("ray", "torch", "numpy", "pyarrow")
"""What must be the same everywhere, beside Python: results depend on it, or pickles do."""
SECONDS = 60.0
"""How long a node may take to answer; it may have to fetch our code first."""

_GCS = "/ray.rpc.NodeInfoGcsService/GetClusterId"
_CLIENT = "/ray.rpc.RayletDriver/ClusterInfo"
_LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")
_TOKEN_FILE = "~/.ray/auth_token"


class Answer(NamedTuple):
    """What a node says of itself."""

    versions: dict[str, str]
    data_error: str = ""
    """Why the data cannot be read there; empty if they can, or if nobody asked."""
    asks_for_token: bool | None = None


# The token


def knock(address: str) -> None:
    """Refuse at once a cluster that asks for a token when we would show none; Ray would try for
    half a minute, and over ray:// would not say why it failed."""
    if not _presents_token() and _asks_for_token(address):
        raise ClusterError(_token_advice(address, asks=True))


def explain(error: BaseException, address: str) -> str:
    """Why `ray.init(address)` failed, in a sentence with what to type."""
    chain = list(_chain(error))
    for each in chain:
        _, mismatch, versions = str(each).partition("Version mismatch: ")
        if mismatch:
            return (
                f"cannot attach to the Ray cluster at --address {address}. "
                f"{' '.join(versions.split())}. Install the same on both sides"
            )
    asks = _asks_for_token(address)
    text = "\n".join(f"{type(each).__name__}: {each}" for each in chain)
    # Ray Client only says that it waited in vain.
    if "AuthenticationError" in text or (asks and "timeout" in text):
        return _token_advice(address, asks)
    reason = next(iter(str(error).splitlines()), "") or type(error).__name__
    return (
        f"cannot reach a Ray cluster at --address {address}: {reason}. "
        "Start one with 'ray start --head', or leave --address out to run on this machine alone"
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _token_advice(address: str, asks: bool | None) -> str:
    host = address.removeprefix("ray://").rpartition(":")[0] or "HEAD"
    local = host in _LOOPBACK or address == "auto"
    copy = (
        "export RAY_AUTH_TOKEN_PATH=FILE, the token file that the cluster was started with"
        if local
        else f"mkdir -p ~/.ray && scp {host}:.ray/auth_token {_TOKEN_FILE}"
    )
    if asks is False and _presents_token() and not _has_token():
        return (
            f"RAY_AUTH_MODE is token but there is no token here, and the Ray cluster at --address "
            f"{address} asks for none. Type: unset RAY_AUTH_MODE"
        )
    where = f"the Ray cluster at --address {address} asks for a token"
    if not _has_token():
        return f"{where} and there is none here. Type: export RAY_AUTH_MODE=token && {copy}"
    if not _presents_token():
        return f"{where}, which Ray does not show it unless you type: export RAY_AUTH_MODE=token"
    return f"{where}, and it is not the one that is here. Type: {copy}"


def _presents_token() -> bool:
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def _has_token() -> bool:
    """Whether Ray would find a token. It is not read."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return True
    path = os.environ.get("RAY_AUTH_TOKEN_PATH") or _TOKEN_FILE
    return Path(path).expanduser().is_file()


def _asks_for_token(address: str) -> bool | None:
    """Whether the cluster turns away who comes without a token; None if that cannot be known."""
    target = address.removeprefix("ray://")
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0") or ":" not in target:
        return None
    import grpc  # type: ignore[import-untyped]

    method = _CLIENT if address.startswith("ray://") else _GCS
    with grpc.insecure_channel(target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(method)(b"", timeout=5)
        except grpc.RpcError as error:
            refused: bool = error.code() == grpc.StatusCode.UNAUTHENTICATED
            known = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.NOT_FOUND)
            return refused if error.code() in known else None
    return False


# The nodes


def examine(config: Config) -> list[str]:
    """Ask every node of the cluster that this process has joined. Returns what the user should
    know; raises with the fix if the run could not end well."""
    nodes = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]
    names = _names(nodes)
    home = driver_node()
    readers = _readers(config, nodes, home)
    answers = _ask(names, dict.fromkeys(readers, config.data))
    _require_versions(answers, names, home)
    for node in readers:
        if answers[node].data_error:
            raise DataError(
                f"on node {names[node]}, where the driver runs: {answers[node].data_error}"
            )
    if any(answers[node].asks_for_token is False for node in readers):
        return [
            "the cluster asks for no token: whoever can reach it can run code on it. Start its "
            "nodes with RAY_AUTH_MODE=token, or keep it off the network"
        ]
    return []


def driver_node() -> str:
    """The node the driver belongs on: the launcher's own or, over ray://, the head."""
    return str(ray.get_runtime_context().get_node_id())


def _readers(config: Config, nodes: Mapping[str, Mapping[str, Any]], home: str) -> list[str]:
    """Where the driver may come to run: at home, unless it asks for GPUs that home has not."""
    wanted = config.driver.gpus
    able = [node for node in nodes if nodes[node]["Resources"].get("GPU", 0.0) >= wanted]
    return able if wanted and able and home not in able else [home]


def _names(nodes: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """What to call each node: its address, with its id where several share one."""
    addresses = {node: str(nodes[node]["NodeManagerAddress"]) for node in nodes}
    shared = list(addresses.values())
    return {
        node: address if shared.count(address) == 1 else f"{address} ({node[:8]})"
        for node, address in addresses.items()
    }


def _ask(names: Mapping[str, str], data: Mapping[str, DataConfig]) -> dict[str, Answer]:
    """The answers of all nodes, asked at the same time."""
    refs = {node: _question(node, data.get(node)) for node in names}
    _, late = ray.wait(list(refs.values()), num_returns=len(refs), timeout=SECONDS)
    answers, silent = {}, []
    for node, ref in refs.items():
        if ref in late:
            ray.cancel(ref, force=True)
            silent.append(f"node {names[node]} did not answer within {SECONDS:g} s")
            continue
        try:
            answers[node] = ray.get(ref)
        except RayError as error:
            cause = getattr(error, "cause", None) or error
            said = " ".join([f"{type(cause).__name__}:", *str(cause).strip().splitlines()[:1]])
            silent.append(f"node {names[node]} cannot run raysim ({said})")
    if silent:
        raise ClusterError(
            f"{'; '.join(silent)}. See 'ray status' and the logs of the node; to go on without it, "
            "type 'ray stop' there"
        )
    return answers


def _question(node: str, data: DataConfig | None) -> Any:
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    look: Any = ray.remote(_look).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    return look.remote(data)


def _look(data: DataConfig | None) -> Answer:
    """Runs on a node; `data` is for the driver's."""
    versions = {"python": ".".join(platform.python_version_tuple()[:2])}
    versions |= {package: _version(package) for package in PACKAGES}
    if data is None:
        return Answer(versions)
    asks = _asks_for_token(ray.get_runtime_context().gcs_address)
    return Answer(versions, _data_error(data), asks)


def _version(package: str) -> str:
    """Without what follows a plus: the same torch for CPUs and for GPUs is no mismatch."""
    try:
        return importlib.metadata.version(package).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _data_error(config: DataConfig) -> str:
    try:
        from raysim import data

        data.check(config)
    except (RaysimError, ImportError) as error:
        return str(error)
    return ""


def _require_versions(answers: Mapping[str, Answer], names: Mapping[str, str], home: str) -> None:
    wanted = answers[home].versions
    lines: list[str] = []
    fixes: dict[str, None] = {}
    for node, answer in answers.items():
        wrong = {name: old for name, old in answer.versions.items() if old != wanted[name]}
        if wrong:
            found = ", ".join(
                f"{name} {old} instead of {wanted[name]}" for name, old in wrong.items()
            )
            lines.append(f"  node {names[node]}: {found}")
            fixes |= dict.fromkeys(wrong)
    if not lines:
        return
    pins = " ".join(f"'{name}=={wanted[name]}'" for name in fixes if name != "python")
    fix = f"pip install {pins}" if pins else ""
    if "python" in fixes:
        fix = f"make an environment with Python {wanted['python']}" + (f", {fix}" if fix else "")
    raise ClusterError(
        "\n".join(
            [
                f"nodes have other versions than the driver's node {names[home]}:",
                *lines,
                f"On each of them: {fix}, and start Ray again",
            ]
        )
    )
