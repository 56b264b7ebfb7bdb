"""Metrics: what Prometheus reads from a run, and that Grafana's panels ask for nothing else."""

import json
import math
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from browser import CHROMIUM, WHY_NOT, browser

from raysim import monitoring
from raysim.events import Evaluated, Note, RoundFinished, Started
from raysim.monitoring import COUNTERS, GAUGES, Monitor
from raysim.monitoring.__main__ import asset, main

PROMETHEUS, PROMTOOL = shutil.which("prometheus"), shutil.which("promtool")
EXPORTED = {f"ray_raysim_{name}" for name in GAUGES} | {
    f"ray_raysim_{name}_total" for name in COUNTERS
}
"""How Ray's exporter calls them."""


class Metric:
    """As ray.util.metrics has it, but kept here."""

    found: dict[str, float]

    def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        assert description
        self.name, self.keys = name.removeprefix("raysim_"), tag_keys

    def set_default_tags(self, tags: dict[str, str]) -> None:
        assert set(tags) == set(self.keys)

    def set(self, value: float) -> None:
        assert math.isfinite(value)
        self.found[self.name] = value

    def inc(self, value: float) -> None:
        assert value > 0, "Ray refuses others"
        self.found[self.name] = self.found.get(self.name, 0.0) + value


class Actors:
    num_actors = 2
    actors_lost = 0


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The metrics by name, as they come."""
    monkeypatch.setattr(Metric, "found", {}, raising=False)
    monkeypatch.setattr("ray.util.metrics.Counter", Metric)
    monkeypatch.setattr("ray.util.metrics.Gauge", Metric)
    return Metric.found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the time."""
    now = [100.0]
    monkeypatch.setattr(monitoring.time, "monotonic", lambda: now[0])
    return lambda value: now.__setitem__(0, value)


STARTED = Started("out", "fedre", 9, [], 1.0)


def test_a_round_and_its_evaluation_become_metrics(
    found: dict[str, float], clock: Callable[[float], None]
) -> None:
    """Two actors over 10 s have 20 s; 12 of them trained, 3 evaluated, so 5 were idle."""
    sums: dict[str, float] = {}
    monitor = Monitor("run", "fedre", Actors(), lambda: sums)
    monitor.hear(STARTED)
    clock(110.0)
    sums |= {"training": 12.0, "evaluation": 3.0, "server": 1.0, "done": 4, "dropped": 1,
             "retries": 2}  # fmt: skip
    monitor.hear(RoundFinished(1, 0.5, 5, 100, 300, 9.0))
    monitor.hear(Evaluated(1, 0.75, 0.1, 0.6, 5))
    assert found == {
        "rounds": 9, "round": 1, "actors": 2, "train_loss": 0.5, "round_seconds": 9.0,
        "accuracy": 0.75, "accuracy_std": 0.1, "test_loss": 0.6, "clients_trained": 4,
        "clients_dropped": 1, "client_retries": 2, "bytes_up": 100, "bytes_down": 300,
        "train_seconds": 12.0, "eval_seconds": 3.0, "server_seconds": 1.0, "idle_seconds": 5.0,
    }  # fmt: skip


def test_work_done_again_after_a_loss_counts_again(
    found: dict[str, float], clock: Callable[[float], None]
) -> None:
    sums = {"done": 10.0, "replays": 0.0}
    actors = Actors()
    monitor = Monitor("run", "fedre", actors, lambda: sums)
    monitor.hear(STARTED)  # what a resumed run did before is not counted again
    for done in (20.0, 10.0, 20.0):  # the run went back to its checkpoint in between
        sums["done"] = done
        sums["replays"] = float(done == 10.0 or "replays" in found)
        actors.actors_lost = int(sums["replays"])
        monitor.hear(RoundFinished(1, None, 1, 0, 0, 1.0))
    assert (found["clients_trained"], found["replays"], found["actors_lost"]) == (20.0, 1.0, 1.0)


def test_idling_never_shrinks_when_work_is_told_late(
    found: dict[str, float], clock: Callable[[float], None]
) -> None:
    """After 10 s with 2 actors nothing is told yet; after 11 s, that 21 of the 22 s were work."""
    sums = {"training": 0.0}
    monitor = Monitor("run", "fedre", Actors(), lambda: sums)
    monitor.hear(STARTED)
    clock(101.0)
    sums["training"] = 8.0  # of steps that are over, and of one that began before
    monitor.hear(RoundFinished(1, None, 1, 0, 0, 1.0))
    assert "idle_seconds" not in found
    clock(105.0)
    monitor.hear(RoundFinished(2, None, 1, 0, 0, 1.0))
    assert found["idle_seconds"] == 2.0, "10 s of two actors less 8"


def test_what_is_not_a_number_is_not_told(found: dict[str, float]) -> None:
    monitor = Monitor("run", "fedre", Actors(), dict)
    monitor.hear(STARTED)
    monitor.hear(Note("something"))
    monitor.hear(RoundFinished(1, None, 1, 0, 0, 1.0))
    monitor.hear(Evaluated(1, math.nan, math.nan, math.nan, 0))
    assert not {"train_loss", "accuracy", "bytes_up"} & set(found)


# What is shipped


def panels() -> list[tuple[str, str]]:
    tree = json.loads(asset("raysim.json"))
    return [(panel["title"], each["expr"]) for panel in tree["panels"] for each in panel["targets"]]


def test_panels_show_every_metric_and_no_other() -> None:
    asked = {name for _, expr in panels() for name in re.findall(r"ray_raysim_\w+", expr)}
    assert asked == EXPORTED


def test_panels_do_not_lie_on_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(asset("raysim.json"))["panels"]:
        x, y, w, h = (panel["gridPos"][key] for key in "xywh")
        cells = {(x + i, y + j) for i in range(w) for j in range(h)}
        assert not cells & taken
        assert x + w <= 24
        taken |= cells


def test_the_command_writes_what_both_programs_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a folder"
    assert main(["--out", str(out), "--temp-dir", str(tmp_path / "ray")]) == 0
    told = capsys.readouterr().out
    assert f"--config.file={out}/prometheus.yml" in told
    (job,) = yaml.safe_load((out / "prometheus.yml").read_text())["scrape_configs"]
    (files,) = job["file_sd_configs"]
    assert files["files"] == [str(tmp_path / "ray" / "prom_metrics_service_discovery.json")]
    provisioning = out / "grafana" / "provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards/raysim.yml").read_text())["providers"]
    assert (Path(provider["options"]["path"]) / "raysim.json").is_file()
    assert (provisioning / "datasources/prometheus.yml").is_file()
    if PROMTOOL:
        command = [PROMTOOL, "check", "config", str(out / "prometheus.yml")]
        assert "SUCCESS" in subprocess.run(command, capture_output=True, text=True).stdout


def test_the_command_prints_the_dashboard(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "raysim"


def test_a_folder_that_cannot_be_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["--out", str(tmp_path / "file")]) == 2
    assert "name another folder" in capsys.readouterr().err


# A real run, a real Prometheus, a real browser


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[tuple[str, str, int]]:
    """A run with a dashboard of its own: its address, its token and the port of a Prometheus."""
    if not PROMETHEUS:
        pytest.skip("no Prometheus here; apt-get install prometheus")
    temp = Path("/tmp") / f"raysim-{secrets.token_hex(3)}"  # sockets need a short path
    temp.mkdir()
    token = secrets.token_hex(32)
    environment = os.environ | {
        "RAY_TMPDIR": str(temp), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token,
        "RAY_metrics_report_interval_ms": "1000",
    }  # fmt: skip
    assert main(["--out", str(tmp_path / "mon"), "--temp-dir", str(temp / "ray")]) == 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    typed = "--method fedproto --clients 6 --rounds 100000 --participation 1 --data.samples 600 "
    typed += "--fleet.models cnn4 cnn5 --actors 2 --checkpoint-every 0 --out run"
    prometheus = [PROMETHEUS, f"--config.file={tmp_path}/mon/prometheus.yml",
                  f"--storage.tsdb.path={tmp_path}/tsdb", f"--web.listen-address=127.0.0.1:{port}",
                  "--log.level=error"]  # fmt: skip
    launch = [sys.executable, "-m", "raysim.launch", *typed.split()]
    with (tmp_path / "log").open("w") as log:
        run = subprocess.Popen(launch, cwd=tmp_path, env=environment, stdout=log, stderr=log)
        scraper = subprocess.Popen(prometheus)
    try:
        address = ""
        deadline = time.monotonic() + 120
        while not re.search(r"round +2/", text := (tmp_path / "log").read_text()):
            assert run.poll() is None, text
            assert time.monotonic() < deadline, text
            time.sleep(0.5)
        address = re.findall(r"dashboard: (http://\S+)", text)[0]
        yield address, token, port
    finally:
        run.send_signal(signal.SIGINT)
        assert run.wait(60) == 130
        scraper.terminate()
        scraper.wait()
        shutil.rmtree(temp, ignore_errors=True)


def ask(port: int, query: str) -> list[dict[str, Any]]:
    address = f"http://127.0.0.1:{port}/api/v1/query?query={urllib.parse.quote(query)}"
    with urllib.request.urlopen(address, timeout=10) as answer:
        told = json.load(answer)
    assert told["status"] == "success"
    rows: list[dict[str, Any]] = told["data"]["result"]
    return rows


@pytest.mark.ray
@pytest.mark.slow
def test_prometheus_and_the_dashboard_show_a_real_run(
    watched: tuple[str, str, int], tmp_path: Path
) -> None:
    address, token, port = watched
    never = {f"ray_raysim_{name}_total" for name in
             ("clients_dropped", "client_retries", "actors_lost", "replays")}  # fmt: skip
    deadline = time.monotonic() + 90
    wanted, known = EXPORTED - never, {}
    while not wanted <= set(known) or float(known["ray_raysim_round"]) < 20:
        assert time.monotonic() < deadline, wanted - set(known)
        time.sleep(1)
        rows = ask(port, '{__name__=~"ray_raysim_.*"}')
        known = {row["metric"]["__name__"]: row["value"][1] for row in rows}
        assert all(row["metric"]["run"] == "run" for row in rows)
    assert not never & set(known), "nothing went wrong"
    assert float(known["ray_raysim_actors"]) == 2
    assert float(known["ray_raysim_clients_trained_total"]) % 6 == 0
    time.sleep(8)  # two readings make a rate
    for title, expr in panels():
        rows = ask(port, expr.replace("$run", ".*"))
        assert rows or any(name in expr for name in never), title
    if not CHROMIUM:
        pytest.skip(WHY_NOT)
    with browser() as tab:
        tab.view(1500)
        tab.open(address, "document.body.innerText.includes('Authentication Token Required')")
        tab.call("Network.setCookie", name="ray-authentication-token", value=token, url=address)
        tab.open(f"{address}/#/actors")
        tab.call("Page.reload")
        tab.wait("document.body.innerText.includes('DriverActor')")
        text = tab.evaluate("document.body.innerText")
        assert re.search(r"DriverActor\s+raysim-run-\w+\s+driver", text)
        for number in (0, 1):
            assert re.search(rf"ClientActor\s+raysim-run-[\w-]+pool-{number}\s+pool-{number}", text)
        tab.picture(tmp_path / "actors.png", whole=False)
