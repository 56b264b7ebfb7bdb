"""The loop one would write by hand, for `raysim.bench` to compare the engine with.

FedProto in as many single-threaded processes as there are cores: models in shared memory, the
longest clients first, nothing checked, counted, copied or recorded.
"""

import multiprocessing as mp
import os
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from raysim import data, ops, schedule
from raysim.config import Config
from raysim.data.batches import make_batch
from raysim.data.dataset import Dataset
from raysim.data.partition import Split
from raysim.fleet import Fleet, assemble
from zoo import SplitModel

WARM = 2
"""Rounds at the start that do not count."""


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
