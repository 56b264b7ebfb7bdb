"""A run's clients, brought back to life from its last checkpoint to be looked at."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

from raysim import data, ops, wire
from raysim.checkpoint import FOLDER, Checkpoint, Store, read_part
from raysim.config import Config
from raysim.errors import CheckpointError, ConfigError, RunError
from raysim.fleet import Fleet, assemble
from raysim.method import ClientContext
from raysim.result import Result
from raysim.seeding import numpy_rng, seeded
from zoo import SplitModel

CPU = torch.device("cpu")


def stages(model: SplitModel) -> Iterator[tuple[str, nn.Module]]:
    """The parts of a model in the order they run. A model that ends early has no neck and head."""
    yield "stem", model.stem
    parts = dict(model.trunk.named_children())
    staged = isinstance(model.trunk, nn.Sequential) and parts
    if staged and all(isinstance(part, nn.Sequential) for part in parts.values()):
        yield from ((f"stage{int(name) + 1}", part) for name, part in parts.items())
    else:
        yield "trunk", model.trunk
    if isinstance(model.head, nn.Linear):
        yield "neck", model.neck
        yield "head", model.head


@dataclass(frozen=True)
class Run:
    """A run, as far as it takes to bring its clients back to life."""

    config: Config
    checkpoint: Checkpoint
    fleet: Fleet
    dataset: data.Dataset
    split: data.Split
    trained: dict[int, int]
    """Client -> the last round in which it trained; of those that have a state."""

    @classmethod
    def open(cls, folder: Path) -> "Run":
        result = Result.load(folder)
        kept = folder / "method.py"  # the text of a user's own method, as the run had it
        own = ["--method", str(kept)] if kept.exists() else []
        config = Config.parse(["--config", str(folder / "config.yaml"), *own])
        checkpoint = _newest(folder)
        dataset = data.load(config.data)
        split = data.split(
            dataset.labels, dataset.num_train, dataset.num_classes, config.clients, config.data,
            config.seed,
        )  # fmt: skip
        rounds = result.clients.select(["client", "round", "phase"]).to_pylist()
        last = {row["client"]: row["round"] for row in rounds if row["phase"] != "eval"}
        states = sorted(int(name) for name in checkpoint.parts if name != "server")
        trained = {client: last.get(client, 0) for client in states}
        fleet = assemble(config.fleet, dataset.task)
        return cls(config, checkpoint, fleet, dataset, split, trained)

    def architecture(self, client: int) -> str:
        return str(self.config.hp.architecture(client, self.fleet))

    def chosen(self, wanted: Sequence[int]) -> list[int]:
        """In the order of architectures, so that equal ones are neighbors."""
        for client in wanted:
            if client not in self.trained:
                why = "never trained" if client in range(self.config.clients) else "does not exist"
                known = listed(list(self.trained))
                raise ConfigError(f"--clients {client}: that client {why}; states: {known}")
        clients = list(dict.fromkeys(wanted)) or self._typical()
        if len(clients) < 2:
            raise ConfigError(
                f"there is nothing to compare client {listed(clients) or 'none'} with; "
                f"try --clients {' '.join(map(str, list(self.trained)[:4]))}"
            )
        order = list(dict.fromkeys(self.architecture(k) for k in range(self.config.clients)))
        return sorted(clients, key=lambda k: (order.index(self.architecture(k)), k))

    def _typical(self) -> list[int]:
        found: dict[str, list[int]] = {}
        for client in sorted(self.trained, key=lambda k: (-self.trained[k], k)):
            found.setdefault(self.architecture(client), []).append(client)
        return [k for turn in range(2) for of in found.values() for k in of[turn : turn + 1]][:10]

    def draw(self, label: int, images: int, points: int, seed: int) -> tuple[Any, Any]:
        """Rows of test images: any for CKA, and those of one class for t-SNE."""
        every = np.sort(np.concatenate([self.split.test(k) for k in range(self.config.clients)]))
        classes = self.dataset.num_classes
        if not 0 <= label < classes:
            raise ConfigError(f"--label {label}: the classes are 0 to {classes - 1}")
        of_class = every[self.dataset.labels[every] == label]
        if not len(of_class):
            raise ConfigError(f"--label {label}: no test image is of that class")
        if len(every) < 4:
            raise ConfigError(f"CKA needs 4 test images or more; this run has {len(every)}")
        rng = numpy_rng(seed, "analyze")
        picked = [
            np.sort(rng.permutation(rows)[:count])
            for rows, count in ((every, images), (of_class, points))
        ]
        return picked[0], picked[1]

    def model(self, client: int) -> SplitModel:
        """A client's model as the checkpoint has it."""
        ctx = self._context(client, self.split.train(client))
        with seeded(self.config.seed, "init_client", client=client):
            state = self.config.hp.init_client(ctx.build_model(), ctx)
        file, digest = self.checkpoint.parts[str(client)]
        packed = read_part(self.checkpoint.folder / file, digest)
        for name, value in wire.unpack(packed, self.config.hp.messages()).items():
            if isinstance(module := getattr(state, name), nn.Module):
                ops.set_weights(module, value)
            else:
                setattr(state, name, value)
        model: SplitModel = state.model
        return model

    def features(
        self, client: int, model: SplitModel, rows: Any, wanted: Sequence[str]
    ) -> dict[str, Tensor]:
        """What some of its stages make of some images."""
        found: dict[str, list[Tensor]] = {name: [] for name in wanted}
        with ops.evaluating(model):
            for x, _ in self._context(client, rows).samples():
                for name, part in stages(model):
                    x = part(x)
                    if name in found:
                        found[name].append(x.float())
        return {name: torch.cat(parts) for name, parts in found.items()}

    def _context(self, client: int, rows: Any) -> ClientContext:
        train = replace(self.config.train, precision="fp32", memory_format="contiguous")
        return ClientContext(
            client, self.checkpoint.round, self.dataset.task, self.fleet, train, CPU, self.dataset,
            rows, "none", self.config.eval.batch_size, [], self.config.rounds,
        )  # fmt: skip

    def cka_table(self, matrices: dict[str, tuple[list[int], Tensor]]) -> pa.Table:
        rows = [
            {"stage": name, "client": a, "model": self.architecture(a), "last_round":
             self.trained[a], "other": b, "other_model": self.architecture(b), "cka": value}
            for name, (ids, matrix) in matrices.items()
            for a, values in zip(ids, matrix.tolist(), strict=True)
            for b, value in zip(ids, values, strict=True)
        ]  # fmt: skip
        return pa.Table.from_pylist(rows)

    def tsne_table(self, ids: list[int], images: Any, parts: Tensor, label: int) -> pa.Table:
        rows = [
            {"client": client, "model": self.architecture(client), "image": int(image),
             "label": label, "x": x, "y": y}
            for client, places in zip(ids, parts.tolist(), strict=True)
            for image, (x, y) in zip(images, places, strict=True)
        ]  # fmt: skip
        return pa.Table.from_pylist(rows)


def _newest(folder: Path) -> Checkpoint:
    broken = ""
    for found in Store(folder, keep=1).newest_first():
        if isinstance(found, CheckpointError):
            broken = broken or str(found)
        elif len(found.parts) > 1:
            return found
    if broken:
        raise CheckpointError(f"{folder} has no whole checkpoint: {broken}")
    raise RunError(
        f"{folder} keeps no states of its clients (there is nothing in {FOLDER}). Make it again "
        f"with --checkpoint-every: python -m raysim.launch --config {folder / 'config.yaml'} "
        "--checkpoint-every 20 --out ANOTHER"
    )


def listed(clients: Sequence[int]) -> str:
    shown = " ".join(map(str, clients[:20]))
    return f"{shown} ..." if len(clients) > 20 else shown
