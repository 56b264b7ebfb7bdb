"""How far this machine is from the bare loop: `python -m raysim.bench`.

Side by side, in turns, the engine and a bare PyTorch loop do the same work: 100 clients x 600 images, cnn1..cnn5 in
rotation, 10 of them a round, 1 epoch, batches of 32, SGD 0.01, FedProto; Fashion-MNIST if it is there, else shapes.
The bare loop is what one would write by hand: as many single-threaded processes as there are cores, models in shared
memory, the longest clients first, nothing checked, counted, copied or recorded. Both use the same models and kernels.

Ratios are of medians over the turns; below 1 means faster than the bare loop.
"""

import contextlib
import multiprocessing as mp
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from raysim import data, ops, schedule
from raysim.config import Config, DataConfig, EvalConfig, TrainConfig
from raysim.data.batches import make_batch
from raysim.data.dataset import Dataset
from raysim.data.partition import Split
from raysim.errors import DataError
from raysim.fleet import Fleet, assemble
from raysim.result import Result
from zoo import SplitModel

MIB = 2**20
Part = Literal["rounds", "evaluation", "precision", "memory", "start", "scale"]


@dataclass(frozen=True)
class Options:
    """How far this machine is from the bare loop."""

    only: tuple[Part, ...] = ("rounds", "evaluation", "precision", "memory", "start", "scale")
    """Which measurements to make."""
    rounds: int = 20
    """Rounds in a turn; the first two warm up and do not count."""
    turns: int = 3
    """How often bare loop and engine take turns."""


WARM = 2


def main() -> int:
    torch.set_num_threads(1)  # before anything runs in threads: the bare loop forks
    options = tyro.cli(Options, prog="python -m raysim.bench", description=__doc__)
    config = workload(options.rounds)
    print(f"{os.cpu_count()} cores, torch {torch.__version__}, {config.data.name}, {options.rounds} rounds, "
          f"{options.turns} turns")  # fmt: skip
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
    kinds = [
        ("fp32", "contiguous"),
        ("fp32", "channels_last"),
        ("bf16", "contiguous"),
        ("bf16", "channels_last"),
    ]
    seconds: dict[tuple[str, str], list[float]] = {kind: [] for kind in kinds}
    bare: dict[tuple[str, str], list[float]] = {kind: [] for kind in kinds}
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
            f"  {' '.join(kind):20} engine {ours:6.3f} s ({base / ours:4.2f}x)   bare {theirs:6.3f} s "
            f"({bare_base / theirs:4.2f}x)   engine / bare {ours / theirs:5.3f}"
        )


def bench_memory(config: Config, options: Options, folder: Path) -> Iterator[str]:
    yield "\npeak memory (summed PSS of all processes, Ray included)"
    for dashboard in (False, True):
        run = engine(replace(config, dashboard=dashboard), folder, memory=True)
        yield f"  dashboard {'on ' if dashboard else 'off'}  {run.peak / 1024:5.2f} GiB"


def bench_start(config: Config, options: Options, folder: Path) -> Iterator[str]:
    yield "\nfrom the command to the first round (seconds)"
    short = replace(config, rounds=1, eval=EvalConfig(clients="cohort"))
    for backend in ("ray", "local"):
        runs = [engine(replace(short, backend=backend), folder) for _ in range(options.turns)]  # type: ignore[arg-type]
        yield f"  {backend:6} {statistics.median(run.start for run in runs):5.2f}"


def bench_scale(config: Config, options: Options, folder: Path) -> Iterator[str]:
    """Six images a client, so that nothing but the engine could grow. Five rounds: about as many clients come to life."""
    yield "\ncost grows with participants, not with clients (6 images a client, cohort 10)"
    runs: dict[int, list[Run]] = {100: [], 10_000: []}
    sizes = {clients: 6 * clients * 3 * 32 * 32 / MIB for clients in runs}
    for turn in range(options.turns):
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


def _scaled(config: Config, clients: int, rounds: int) -> Config:
    samples = (2 if clients > 10_000 else 6) * clients
    return replace(
        config,
        clients=clients,
        participation=10 / clients,
        rounds=rounds,
        data=DataConfig("shapes", samples=samples, partition="iid"),
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


# The bare loop


def bare_loop(config: Config) -> float:
    """Seconds of a steady round of the bare loop."""
    dataset = data.load(config.data)
    split = data.split(
        dataset.labels,
        dataset.num_train,
        dataset.num_classes,
        config.clients,
        config.data,
        config.seed,
    )
    fleet = assemble(config.fleet, dataset.task)
    models = [fleet.build(fleet.model_of(i), dataset.task) for i in range(config.clients)]
    for model in models:
        if config.train.memory_format == "channels_last":
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model.share_memory()
    context = mp.get_context("fork")
    pipes, processes = [], []
    for _ in range(os.cpu_count() or 1):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_bare_process, args=(theirs, models, dataset, split, config)
        )
        process.start()
        pipes.append(ours)
        processes.append(process)
    times = list(_bare_rounds(config, fleet, dataset, split, pipes))
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()
    return (times[-1] - times[WARM - 1]) / (len(times) - WARM)


def _bare_rounds(
    config: Config, fleet: Fleet, dataset: Dataset, split: Split, pipes: list[Any]
) -> Iterator[float]:
    """The server: deals clients to processes, the longest first, and averages prototypes."""
    sizes = {name: fleet.parameter_count(name, dataset.task) for name in fleet.models}
    prototypes: dict[int, Tensor] = {}
    for number in range(1, config.rounds + 1):
        cohort = schedule.cohort(config.seed, number, config.clients, config.participation)
        everyone = range(config.clients) if config.eval.every == 1 else ()
        trained = _ask(pipes, "train", _deal(cohort, fleet, sizes, len(pipes)), prototypes)
        sums: dict[int, list[Tensor]] = {}
        for means, classes in trained:
            for mean, label in zip(means, classes.tolist(), strict=True):
                sums.setdefault(label, []).append(mean)
        prototypes = {label: torch.stack(values).mean(0) for label, values in sums.items()}
        _ask(pipes, "test", _deal(everyone, fleet, sizes, len(pipes)), prototypes)
        yield time.perf_counter()


def _deal(
    clients: Sequence[int], fleet: Fleet, sizes: dict[str, int], processes: int
) -> list[list[int]]:
    hands: list[list[int]] = [[] for _ in range(processes)]
    loads = [0] * processes
    for client in sorted(clients, key=lambda c: -sizes[fleet.model_of(c)]):
        lightest = loads.index(min(loads))
        hands[lightest].append(client)
        loads[lightest] += sizes[fleet.model_of(client)] + 1_000_000
    return hands


def _ask(
    pipes: list[Any], what: str, hands: list[list[int]], prototypes: dict[int, Tensor]
) -> list[Any]:
    if not any(hands):
        return []
    plain = {label: prototype.numpy() for label, prototype in prototypes.items()}
    for pipe, hand in zip(pipes, hands, strict=True):
        pipe.send((what, hand, plain))
    return [
        (torch.from_numpy(means), torch.from_numpy(classes))
        for pipe in pipes
        for means, classes in pipe.recv()
    ]


def _bare_process(
    pipe: "Connection[Any, Any]",
    models: list[SplitModel],
    dataset: Dataset,
    split: Split,
    config: Config,
) -> None:
    torch.set_num_threads(1)
    while (request := pipe.recv()) is not None:
        what, hand, plain = request
        known = torch.zeros(dataset.num_classes, dtype=torch.bool)
        prototypes = torch.zeros(dataset.num_classes, models[0].feature_dim)
        for label, values in plain.items():
            known[label] = True
            prototypes[label] = torch.from_numpy(values)
        step = _bare_train if what == "train" else _bare_test
        pipe.send([step(models[c], dataset, split, c, config, prototypes, known) for c in hand])


def _bare_train(
    model: SplitModel, dataset: Dataset, split: Split, client: int, config: Config,
    prototypes: Tensor, known: Tensor,
) -> tuple[Any, Any]:  # fmt: skip
    rows, device = split.train(client), torch.device("cpu")
    layout, size = config.train.memory_format, config.train.batch_size
    forward = ops.autocast(config.train.precision, "cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=config.train.lr)
    model.train()
    order = rows[torch.randperm(len(rows)).numpy()]
    for start in range(0, len(rows) - size + 1, size):
        x, y = make_batch(dataset, order[start : start + size], device, layout)
        optimizer.zero_grad()
        with forward:
            r = model.features(x)
            target = torch.where(known[y].unsqueeze(1), prototypes[y], r.detach())
            loss = F.cross_entropy(model.head(r), y) + F.mse_loss(r, target)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    model.eval()
    with torch.no_grad(), forward:
        batches = (
            make_batch(dataset, rows[start : start + 256], device, layout)
            for start in range(0, len(rows), 256)
        )
        means, classes = ops.class_means(model.features, batches)
    return means.numpy(), classes.numpy()


def _bare_test(
    model: SplitModel, dataset: Dataset, split: Split, client: int, config: Config,
    prototypes: Tensor, known: Tensor,
) -> tuple[Any, Any]:  # fmt: skip
    model.eval()
    correct = 0
    with torch.no_grad(), ops.autocast(config.train.precision, "cpu"):
        x, y = make_batch(
            dataset, split.test(client), torch.device("cpu"), config.train.memory_format
        )
        distance = torch.cdist(model.features(x).float(), prototypes).masked_fill(~known, torch.inf)
        correct += int((distance.argmin(1) == y).sum())
        F.cross_entropy(-distance, y)
    return np.zeros(1, dtype=np.float32), np.array([correct])


if __name__ == "__main__":
    sys.exit(main())
