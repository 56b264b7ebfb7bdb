"""Many rounds, many faults, no growth: `pytest tests/test_soak.py -m slow -s`."""

import gc
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import faults
import psutil
import pytest
from test_contract import simulate

from raysim import Result

pytestmark = pytest.mark.ray


# Object store


def store_free() -> float:
    import ray

    return float(ray.available_resources().get("object_store_memory", 0.0))


@pytest.mark.slow
def test_the_object_store_returns_to_its_baseline_after_each_round(
    tmp_path: Path, cluster: None
) -> None:
    """Memory in use is that of the clients' states, whose number stops growing; not of rounds."""
    from raysim import Config, run

    used: list[float] = []
    before = store_free()

    def hear(event: Any) -> None:
        if getattr(event, "cohort", 0):
            used.append(before - store_free())

    tree = {"clients": 4, "participation": 1.0, "rounds": 40, "actors": "2", "method": "fedre",
            "data": {"samples": 80}, "fleet": {"models": ["cnn4"]}, "eval": {"every": 5},
            "checkpoint_every": 10}  # fmt: skip
    run(Config.from_tree({**tree, "out": str(tmp_path / "run")}), faults.Listener(hear))
    state = 4.3e6
    assert max(used[20:]) <= max(used[5:20]) + 4 * state, used
    assert max(used) < 40 * state, used  # old states of 40 rounds would be 160
    assert faults.eventually(lambda: abs(before - store_free()) < 1e5, 30), before - store_free()


# Runs one after the other


def _left_over() -> dict[str, int]:
    gc.collect()
    me = psutil.Process()
    return {
        "actors": len(faults.client_actors(me.pid)),
        "threads": threading.active_count(),
        "files": me.num_fds(),
    }


def _repeat(times: int, tmp_path: Path, backend: str) -> None:
    def once(number: int) -> str:
        return simulate(
            "fedre", tmp_path / str(number), rounds=2, clients=4, backend=backend, actors="2",
            checkpoint_every=1, data={"samples": 80},
        ).digest  # fmt: skip

    first = once(0)
    faults.eventually(lambda: _left_over()["actors"] == 0)
    time.sleep(1.5)
    before = _left_over()
    assert {once(1 + number) for number in range(times)} == {first}
    same = faults.eventually(lambda: all(_left_over()[k] <= before[k] for k in before), 30)
    assert same, (before, _left_over())


@pytest.mark.parametrize("backend", faults.short_form(["local", "ray"], "local"))
def test_runs_in_one_process_leave_nothing_behind(
    backend: str, tmp_path: Path, cluster: None
) -> None:
    _repeat(5 if backend == "local" else 2, tmp_path, backend)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", ["local", "ray"])
def test_twenty_runs_in_one_process_leave_nothing_behind(
    backend: str, tmp_path: Path, cluster: None
) -> None:
    _repeat(20, tmp_path, backend)


def test_a_run_leaves_no_files_outside_its_folder(tmp_path: Path, cluster: None) -> None:
    import tempfile

    from raysim import Config, run

    actors: set[int] = set()

    def hear(event: Any) -> None:
        actors.update(actor.pid for actor in faults.client_actors(os.getpid()))

    tree = {"clients": 2, "rounds": 2, "actors": "1", "data": {"samples": 80}}
    run(Config.from_tree({**tree, "out": str(tmp_path / "run")}), faults.Listener(hear))
    assert actors
    faults.eventually(lambda: not any(map(psutil.pid_exists, actors)))
    left = [path for path in Path(tempfile.gettempdir()).glob("raysim-*")
            if actors & set(map(int, re.findall(r"\d+", path.name)))]  # fmt: skip
    assert left == []


# The soak


SOAK = [
    *("--clients", "8", "--participation", "0.5", "--rounds", "300", "--data.samples", "320"),
    *("--fleet.models", "cnn4", "cnn5", "--train.batch-size", "16", "--eval.every", "10"),
    *("--checkpoint-every", "20", "--method", "fedre", "--out", "run"),
]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_300_rounds_with_a_kill_every_second_end_the_same(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("local", "calm", "stormy")]
    for folder in folders:
        folder.mkdir()
    local, calm, stormy = folders
    private = ["--backend", "ray", "--actors", "4", "--cpus", "0.5", "--dashboard", "False"]
    code, _, said = faults.launch(*SOAK, "--backend", "local", cwd=local, timeout=600)
    assert code == 0, said
    code, _, said = faults.launch(*SOAK, *private, cwd=calm, timeout=600)
    assert code == 0, said

    memory: dict[int, int] = {}
    printed = ""
    with faults.launched(*SOAK, *private, cwd=stormy) as process:
        printed += faults.wait_for_round(process, 1)
        with faults.Killer(process.pid, lambda rng: rng.uniform(0.5, 1.5), spare=1) as killer:
            for number in (100, 200, 290):
                printed += faults.wait_for_round(process, number)
                memory[number] = faults.driver_actor(process.pid).memory_full_info().uss
            rest, said = process.communicate(timeout=900)
            printed += rest
        assert process.returncode == 0, said

    expected, found = Result.load(local / "run"), Result.load(stormy / "run")
    faults.assert_same_run(found, expected)
    lost = (
        found.summary["seconds"]["rounds"] - Result.load(calm / "run").summary["seconds"]["rounds"]
    )
    replayed = [
        int(old) - int(new)
        for old, new in re.findall(r"back from round (\d+) to round (\d+)", printed)
    ]
    print(
        f"\nfaults injected {killer.kills}, survived {killer.kills}, rounds replayed "
        f"{sum(replayed)} in {len(replayed)} replays, time lost {lost:.1f} s "
        f"({found.summary['seconds']['rounds']:.1f} s instead of "
        f"{Result.load(calm / 'run').summary['seconds']['rounds']:.1f} s)"
    )
    print("memory of the driver alone:", {n: f"{uss / 2**20:.0f} MiB" for n, uss in memory.items()})
    assert killer.kills >= 20
    assert memory[290] < memory[100] * 1.15 + 16 * 2**20
    assert os.path.exists(stormy / "run" / "summary.json")
