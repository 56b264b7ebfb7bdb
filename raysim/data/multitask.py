"""The data of a fleet whose clients have different tasks: --data.tasks.

A task is known by its data set. Every set is dealt, by the rule of --data.partition, to the clients
whose task it is. What they share is the public set, of --data.name, which some see as images and
others as captions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from raysim.config import DataConfig
from raysim.data import dataset as single
from raysim.data import partition, scenes, task_files, words
from raysim.data.dataset import Dataset
from raysim.data.partition import Split
from raysim.data.rules import Ints
from raysim.errors import ConfigError, unknown
from raysim.seeding import numpy_rng
from raysim.task import Kind, Task

SCENES: dict[str, Kind] = {
    "scenes_single": "single",
    "scenes_multilabel": "multilabel",
    "scenes_segment": "segment",
    "scenes_text": "text",
}
PAIRED = ("scenes", "coco_multilabel")
"""Sets that can be seen as images and as captions."""
SIZE = 32


@dataclass(frozen=True, eq=False)
class Mixed:
    """Several data sets as one: their samples are numbered through."""

    name: str
    names: tuple[str, ...]
    """Of the tasks, as they are dealt: client i has `names[i % len(names)]`."""
    parts: dict[str, Dataset]
    images: Dataset | None
    """The public set as images, and as captions; None where it cannot be seen so."""
    captions: Dataset | None

    @cached_property
    def labels(self) -> Ints:
        return np.concatenate([part.labels for part in self.parts.values()])

    @property
    def num_classes(self) -> int:
        return max(int(part.labels.max()) + 1 for part in self.parts.values())

    @property
    def task(self) -> Task:
        """The first one."""
        return self.parts[self.names[0]].task

    @property
    def tasks(self) -> tuple[tuple[str, Task], ...]:
        return tuple((name, self.parts[name].task) for name in self.names)

    def of(self, client: int) -> Dataset:
        return self.parts[self.names[client % len(self.names)]]

    def first(self, name: str) -> int:
        """The number of a task's first sample."""
        before = list(self.parts).index(name)
        return sum(len(part.labels) for part in list(self.parts.values())[:before])

    def own(self, client: int, rows: Ints) -> Ints:
        """Samples by their number in the client's own set."""
        return rows - self.first(self.names[client % len(self.names)])

    def public_of(self, client: int) -> Dataset | None:
        """The public set as the client sees it."""
        return self.captions if self.of(client).kind == "text" else self.images


def task_names() -> list[str]:
    """Known tasks; beside them, parquet:PATH is one of single labels."""
    return sorted([*SCENES, *task_files.FILES, *single.names()])


def check(config: DataConfig) -> None:
    """Raise what `load` would, as far as it can be known without reading a file."""
    tasks, config = config.tasks, replace(config, tasks=())
    for name in dict.fromkeys(tasks):
        if name in task_files.FILES:
            task_files.find(name, config.root)
        elif name not in SCENES:
            if name not in single.names() and not name.startswith(single.PARQUET):
                raise unknown("task", name, [*task_names(), "parquet:PATH"], "--data.tasks")
            single.check(replace(config, name=name))
    if config.name == "coco_multilabel":
        task_files.find(config.name, config.root)
    elif config.name != "scenes":
        single.check(config)


def load(config: DataConfig) -> Mixed:
    """The data of every task and the public set, all images of one size."""
    check(config)
    tasks = config.tasks
    config = replace(config, image_size=config.image_size or SIZE, tasks=())
    parts = {name: _load(name, config) for name in tasks}
    images, captions = _public(config, parts)
    for name, part in [*parts.items(), *([(config.name, images)] if images else [])]:
        if part.kind != "text" and part.images.shape[1] != 3:
            raise ConfigError(f"--data.tasks: {name} has gray images; mixed tasks need color")
    if captions is None and config.public and any(p.kind == "text" for p in parts.values()):
        raise ConfigError(
            f"--data.public of {config.name} has images only, and some --data.tasks are of text. "
            f"Try --data.name {' or '.join(PAIRED)}"
        )
    return Mixed(config.name, tuple(tasks), parts, images, captions)


def split(mixed: Mixed, num_clients: int, config: DataConfig, seed: int) -> Split:
    """Deal each task's samples to its clients, and set the public ones aside."""
    public = np.empty(0, dtype=np.int64)
    if config.public and mixed.images is not None:
        labels = len(mixed.images.labels)
        public = np.arange(labels)
        if config.name != "scenes":
            pool = mixed.images.num_train if config.test == "official" else labels
            public, _ = partition.set_aside(config, pool, labels, 0)
    runs: list[Ints] = [np.empty(0, dtype=np.int64)] * (2 * num_clients)
    repaired = 0
    for name, part in mixed.parts.items():
        clients = [c for c in range(num_clients) if mixed.names[c % len(mixed.names)] == name]
        if not clients:
            continue
        aside = config.public if name == config.name else 0
        dealt = partition.split(
            part.labels, part.num_train, int(part.labels.max()) + 1, len(clients),
            replace(config, name=name, public=aside, tasks=()), seed,
        )  # fmt: skip
        for place, client in enumerate(clients):
            runs[2 * client] = dealt.train(place) + mixed.first(name)
            runs[2 * client + 1] = dealt.test(place) + mixed.first(name)
        repaired += dealt.repaired
    indices, offsets = np.concatenate(runs), np.cumsum([0, *map(len, runs)])
    for array in (indices, offsets, public):
        array.setflags(write=False)
    return Split(indices, offsets, repaired, public)


def _load(name: str, config: DataConfig) -> Dataset:
    size = config.image_size or SIZE
    if name in SCENES:
        arrays = scenes.load(config.samples, size, 1 + list(SCENES).index(name))
        return _scenes(name, arrays, config)
    if name not in task_files.FILES:
        return _cut(single.load(replace(config, name=name)), config.samples)
    arrays = task_files.read(name, config.root, size)
    num_train, labels = int(arrays["num_train"]), arrays["labels"]
    if name in ("trec", "sst2"):
        texts = _text(name, arrays["captions"], labels, num_train, config)
        return _cut(texts, config.samples)
    kind: Kind = "segment" if name == "pets" else "multilabel"
    classes = 3 if name == "pets" else arrays["targets"].shape[1]
    made = _images(name, arrays["images"], labels, num_train, classes)
    return _cut(replace(made, kind=kind, targets=arrays["targets"]), config.samples)


def _public(config: DataConfig, parts: dict[str, Dataset]) -> tuple[Dataset | None, Dataset | None]:
    if not config.public:
        return None, None
    if config.name == "scenes":
        arrays = scenes.load(config.public, config.image_size or SIZE)
        nothing, captions = np.full(config.public, -1), arrays["captions"]
        images = _images("scenes", arrays["images"], nothing, 0, 1)
        return images, _text("scenes", captions, nothing, 0, config)
    images = parts.get(config.name) or _load(config.name, config)
    nothing = np.full(len(images.labels), -1)
    seen = replace(images, kind="single", targets=None, labels=nothing)
    if config.name not in PAIRED:
        return seen, None
    arrays = task_files.read(config.name, config.root, config.image_size or SIZE)
    chosen = arrays["captions"][_chosen(int(arrays["num_train"]), len(nothing), config.samples)]
    return seen, _text(config.name, chosen, nothing, images.num_train, config)


def _scenes(name: str, arrays: dict[str, Any], config: DataConfig) -> Dataset:
    num_train = config.samples * 5 // 6
    front = arrays["front"]
    if SCENES[name] == "text":
        return _text(name, arrays["captions"], front, num_train, config)
    targets = {"multilabel": arrays["seen"], "segment": arrays["masks"]}.get(SCENES[name])
    classes = scenes.CLASSES + (SCENES[name] == "segment")  # the background is one too
    made = _images(name, arrays["images"], front, num_train, classes)
    return replace(made, kind=SCENES[name], targets=targets)


def _images(name: str, images: Any, labels: Ints, num_train: int, classes: int) -> Dataset:
    half = (0.5,) * images.shape[1]
    return Dataset(name, np.ascontiguousarray(images), labels, num_train, classes, half, half)


def _text(name: str, captions: Any, labels: Ints, num_train: int, config: DataConfig) -> Dataset:
    tokens, count = words.encode(captions.tolist(), config.text_length, config.tokenizer)
    classes = int(labels.max()) + 1
    return Dataset(name, tokens, labels, num_train, classes, (), (), "text", words=count)


def _cut(dataset: Dataset, samples: int) -> Dataset:
    """At most so many samples, five sixths of them for training: the same for every seed."""
    rows = _chosen(dataset.num_train, len(dataset.labels), samples)
    if len(rows) == len(dataset.labels):
        return dataset
    targets = None if dataset.targets is None else dataset.targets[rows]
    num_train = int((rows < dataset.num_train).sum())
    return replace(
        dataset, images=dataset.images[rows], labels=dataset.labels[rows], targets=targets,
        num_train=num_train,
    )  # fmt: skip


def _chosen(num_train: int, total: int, samples: int) -> Ints:
    rng = numpy_rng(0, "cut")
    train = rng.permutation(num_train)[: samples * 5 // 6]
    test = num_train + rng.permutation(total - num_train)[: samples - samples * 5 // 6]
    return np.sort(np.concatenate([train, test]))
