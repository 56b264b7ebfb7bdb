"""How far this machine is from the bare loop: `python -m raysim.bench`.

Side by side, in turns, the engine and a bare PyTorch loop do the same work: 100 clients x 600
images, cnn1..cnn5 in rotation, 10 of them a round, 1 epoch, batches of 32, SGD 0.01, FedProto;
Fashion-MNIST if it is there, else shapes. The bare loop is what one would write by hand: as many
single-threaded processes as there are cores, models in shared memory, the longest clients first,
nothing checked, counted, copied or recorded. Both use the same models and kernels.

Ratios are of medians over the turns; below 1 means faster than the bare loop.
"""

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import psutil
import torch
import tyro

from raysim import data
from raysim.bare_loop import WARM, bare_loop
from raysim.bench_muscle import bench as muscle
from raysim.config import Config, DataConfig, EvalConfig, FleetConfig, TrainConfig
from raysim.errors import DataError
from raysim.result import Result

MIB = 2**20
Kind = tuple[Literal["fp32", "bf16"], Literal["contiguous", "channels_last"]]
Part = Literal[
    "rounds", "evaluation", "precision", "checkpoint", "memory", "start", "scale", "fedin",
    "muscle",
]  # fmt: skip


@dataclass(frozen=True)
class Options:
    """How far this machine is from the bare loop."""

    only: tuple[Part, ...] = get_args(Part)
    """Which measurements to make."""
    rounds: int = 20
    """Rounds in a turn; the first two warm up and do not count."""
    turns: int = 3
    """How often bare loop and engine take turns."""


def main() -> int:
    torch.set_num_threads(1)  # before anything runs in threads: the bare loop forks
    options = tyro.cli(Options, prog="python -m raysim.bench", description=__doc__)
    config = workload(options.rounds)
    machine = f"{os.cpu_count()} cores, torch {torch.__version__}, {config.data.name}"
    print(f"{machine}, {options.rounds} rounds, {options.turns} turns")
    with tempfile.TemporaryDirectory(prefix="raysim-bench-") as folder:
        for part in options.only:
            for line in globals()[f"bench_{part}"](config, options, Path(folder)):
                print(line, flush=True)
    return 0


def workload(rounds: int) -> Config:
    """The work that both do."""
    name = "fashion_mnist"
    settings = DataConfig(name, partition="iid", test="official")
    try:
        data.check(settings)
    except DataError:
        settings = replace(settings, name="shapes", samples=72000)
    return Config(
        method="fedproto",
        clients=100,
        participation=0.1,
        rounds=rounds,
        dashboard=False,
        data=settings,
        train=TrainConfig(epochs=1, batch_size=32, lr=0.01),
        eval=EvalConfig(every=rounds, clients="cohort"),
    )


def bench_rounds(config: Config, options: Options, folder: Path) -> Iterator[str]:
    yield "\nround time (seconds a round, steady)"
    yield from _compare("no evaluation", config, options, folder)


def bench_evaluation(config: Config, options: Options, folder: Path) -> Iterator[str]:
    everyone = replace(config, eval=EvalConfig(every=1, clients="all"))
    yield "\nround time with all 100 clients evaluated in every round"
    yield from _compare("all evaluated", everyone, options, folder)


def bench_precision(config: Config, options: Options, folder: Path) -> Iterator[str]:
    yield "\nwhat precision and memory format bring (engine, against its own fp32 contiguous)"
    kinds: list[Kind] = [
        ("fp32", "contiguous"),
        ("fp32", "channels_last"),
        ("bf16", "contiguous"),
        ("bf16", "channels_last"),
    ]
    seconds: dict[Kind, list[float]] = {kind: [] for kind in kinds}
    bare: dict[Kind, list[float]] = {kind: [] for kind in kinds}
    for _ in range(max(1, options.turns - 1)):
        for kind in kinds:
            train = replace(config.train, precision=kind[0], memory_format=kind[1])
            variant = replace(config, train=train)
            seconds[kind].append(engine(variant, folder).seconds)
            bare[kind].append(bare_loop(variant))
    base, bare_base = (statistics.median(times[kinds[0]]) for times in (seconds, bare))
    for kind in kinds:
        ours, theirs = statistics.median(seconds[kind]), statistics.median(bare[kind])
        yield (
            f"  {' '.join(kind):20} engine {ours:6.3f} s ({base / ours:4.2f}x)   "
            f"bare {theirs:6.3f} s ({bare_base / theirs:4.2f}x)   ratio {ours / theirs:5.3f}"
        )


def bench_checkpoint(config: Config, options: Options, folder: Path) -> Iterator[str]:
    """Three intervals, so that two checkpoints are written while the rounds go on."""
    every = Config().checkpoint_every
    rounds = 3 * every
    yield f"\nwhat a checkpoint after every {every} rounds costs ({rounds} rounds)"
    long = replace(config, rounds=rounds, eval=EvalConfig(every=rounds, clients="cohort"))
    without, saved = [], []
    for _ in range(options.turns):
        without.append(engine(replace(long, checkpoint_every=0), folder).seconds)
        saved.append(engine(replace(long, checkpoint_every=every), folder).seconds)
    ratio = statistics.median(saved) / statistics.median(without)
    yield f"  without {_list(without)}   with {_list(saved)}"
    yield f"  with / without {ratio:5.3f}"


def bench_memory(config: Config, options: Options, folder: Path) -> Iterator[str]:
    yield "\npeak memory (summed PSS of all processes, Ray included)"
    for dashboard in (False, True):
        run = engine(replace(config, dashboard=dashboard), folder, memory=True)
        yield f"  dashboard {'on ' if dashboard else 'off'}  {run.peak / 1024:5.2f} GiB"


def bench_start(config: Config, options: Options, folder: Path) -> Iterator[str]:
    yield "\nfrom the command to the first round (seconds)"
    short = replace(config, rounds=1, eval=EvalConfig(clients="cohort"))
    for backend in ("ray", "local"):
        runs = [engine(replace(short, backend=backend), folder) for _ in range(options.turns)]
        yield f"  {backend:6} {statistics.median(run.start for run in runs):5.2f}"


def bench_scale(config: Config, options: Options, folder: Path) -> Iterator[str]:
    """Six images a client, so that nothing but the engine could grow, and as many steps a client as
    in the workload above. With 10,000 nearly every participant comes to life in its round; with 100
    only at first. Memory over five rounds: about as many clients come to life."""
    yield "\ncost grows with participants, not with clients (6 images, 19 steps each)"
    runs: dict[int, list[Run]] = {100: [], 10_000: []}
    sizes = {clients: 6 * clients * 3 * 32 * 32 / MIB for clients in runs}
    for _ in range(options.turns):
        for clients in runs:
            runs[clients].append(engine(_scaled(config, clients, rounds=20), folder))
    seconds = {
        clients: statistics.median(run.seconds for run in of) for clients, of in runs.items()
    }
    peaks = {c: engine(_scaled(config, c, rounds=5), folder, memory=True).peak for c in runs}
    for clients in runs:
        yield (
            f"  {clients:6} clients  {seconds[clients]:6.3f} s a round, {peaks[clients]:6.0f} MiB "
            f"of which the images {sizes[clients]:4.0f} MiB"
        )
    extra = peaks[10_000] - peaks[100]
    images = sizes[10_000] - sizes[100]
    yield (
        f"  ratio of round times {seconds[10_000] / seconds[100]:5.3f}, memory +{extra:.0f} MiB "
        f"(+{extra - images:.0f} MiB without the images)"
    )
    many = engine(_scaled(config, 100_000, rounds=2), folder)
    yield f"  100000 clients: first round after {many.start:.1f} s, {many.seconds:.3f} s a round"


def bench_fedin(config: Config, options: Options, folder: Path) -> Iterator[str]:
    """With an IN loss in every step, the intermediate layers see 16 samples more in each."""
    exact = {"alleviation": "exact"}
    kinds: dict[str, tuple[str, dict[str, str]]] = {
        "fedprox": ("fedprox", {}),
        "fedin, lambda": ("fedin", {}),
        "fedin, exact": ("fedin", exact),
        "fedin, exact, once an epoch": ("fedin", {**exact, "in_schedule": "once_per_epoch"}),
    }
    yield f"\nFedIN against FedProx (slim_resnet, batches of {config.train.batch_size})"
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(options.turns):
        for name, (method, hp) in kinds.items():
            fleet = FleetConfig(("slim_resnet",))
            variant = replace(config, method=method, hp=hp, fleet=fleet)
            times[name].append(engine(variant, folder).seconds)
    base = statistics.median(times["fedprox"])
    for name, found in times.items():
        yield f"  {name:28} {_list(found)}   {statistics.median(found) / base:4.2f}x"


def bench_muscle(config: Config, options: Options, folder: Path) -> Iterator[str]:
    return muscle(options.turns)


def _scaled(config: Config, clients: int, rounds: int) -> Config:
    samples = (2 if clients > 10_000 else 6) * clients
    return replace(
        config,
        clients=clients,
        participation=10 / clients,
        rounds=rounds,
        data=DataConfig("shapes", samples=samples, partition="iid"),
        train=replace(config.train, epochs=19),
        eval=EvalConfig(every=rounds, clients="cohort"),
    )


def _compare(what: str, config: Config, options: Options, folder: Path) -> Iterator[str]:
    bare, ours = [], []
    for _ in range(options.turns):
        bare.append(bare_loop(config))
        ours.append(engine(config, folder).seconds)
    ratio = statistics.median(ours) / statistics.median(bare)
    yield f"  bare loop {_list(bare)}   engine {_list(ours)}"
    yield f"  {what}: engine / bare {ratio:5.3f}"


def _list(times: Sequence[float]) -> str:
    return " ".join(f"{seconds:.3f}" for seconds in times)


@dataclass(frozen=True)
class Run:
    seconds: float
    """A steady round."""
    start: float
    """From the command to the first round."""
    peak: float
    """MiB, if memory was watched."""


def engine(config: Config, folder: Path, memory: bool = False) -> Run:
    """One run of the engine, by the command a user types."""
    out = Path(tempfile.mkdtemp(dir=folder)) / "run"
    path = out.parent / "config.yaml"
    from raysim.record import config_yaml

    path.write_text(config_yaml(config))
    command = [sys.executable, "-m", "raysim.launch", "--config", str(path), "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        peak = _watch_memory(process) if memory else 0.0
        if process.wait():
            raise SystemExit(f"{' '.join(command)} failed")
    result = Result.load(out)
    elapsed = result.rounds["elapsed"].to_pylist()
    warm = min(WARM, len(elapsed) - 1)
    steady = (elapsed[-1] - elapsed[warm - 1 if warm else 0]) / max(1, len(elapsed) - warm)
    return Run(steady, float(result.summary["seconds"]["start"]), peak)


def _watch_memory(process: "subprocess.Popen[bytes]") -> float:
    """Highest sum of proportional set sizes over a process and all its descendants, in MiB."""
    peak = 0.0
    while process.poll() is None:
        total = 0
        with contextlib.suppress(psutil.NoSuchProcess):
            family = [psutil.Process(process.pid)]
            family += family[0].children(recursive=True)
            for member in family:
                with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    total += member.memory_full_info().pss
        peak = max(peak, total / MIB)
        time.sleep(0.2)
    return peak


if __name__ == "__main__":
    sys.exit(main())
