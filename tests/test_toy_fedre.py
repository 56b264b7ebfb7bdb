"""FedRE's toy experiment: four overlapping Gaussians in the plane.

The paper reports 63.50 for FedAllRep, 62.00 for FedRE and 41.50 for FedRE with fixed weights, but
not the data. In this stand-in six clients have 39 points of three of the four classes each, and are
tested on 200 points of all classes with the newest head. The order is the paper's in the mean of
any three of eight seeds (0.65, 0.61 and 0.54 in the mean of all eight). Not so for FedGH, which the
paper has at 60.50, below FedRE: here it comes out at 0.64, beside FedAllRep.

The server trains ten epochs at 0.1: at FedRE's default of one small step a round there is not yet
any difference to see. FedAllRep has many more steps, so its losses are averaged.
"""

from pathlib import Path
from typing import Any

import numpy as np
import tiny

from raysim import Config, EvalConfig, FleetConfig, TrainConfig
from raysim.data import Dataset, Split

CLIENTS, CLASSES, OWN, POINTS, TESTED = 6, 4, 3, 39, 200


def gaussians(seed: int) -> tuple[Dataset, Split]:
    rng = np.random.default_rng(seed)
    owned = [np.repeat((k + np.arange(OWN)) % CLASSES, POINTS // OWN) for k in range(CLIENTS)]
    labels = np.concatenate([*map(rng.permutation, owned), np.arange(TESTED) % CLASSES])
    angle = labels * 2 * np.pi / CLASSES
    x = np.stack([np.cos(angle), np.sin(angle)], axis=1) + rng.normal(0, 0.5, (len(labels), 2))
    images = np.clip(np.round(127.5 + 40 * x), 0, 255).astype(np.uint8)[:, :, None, None]
    train = np.split(np.arange(CLIENTS * POINTS), CLIENTS)
    test = np.array_split(np.arange(CLIENTS * POINTS, len(labels)), CLIENTS)
    runs = [run for pair in zip(train, test, strict=True) for run in pair]
    split = Split(np.concatenate(runs), np.cumsum([0, *map(len, runs)]))
    return Dataset(
        "gaussians", images, labels, CLIENTS * POINTS, CLASSES, (0.5,) * 2, (40 / 255,) * 2
    ), split


def accuracy(method: str, out: Path, seeds: int = 3, **hp: Any) -> float:
    found = []
    for seed in range(seeds):
        config = Config(
            method=method, clients=CLIENTS, participation=1.0, rounds=20, seed=seed,
            out=out / f"{method}-{len(hp)}-{seed}", backend="local", checkpoint_every=0,
            fleet=FleetConfig(("mlp",), 8), train=TrainConfig(lr=0.1, batch_size=10),
            eval=EvalConfig(data="global", every=10),
            hp={"server_lr": 0.1, "server_epochs": 10, **hp},
        )  # fmt: skip
        rounds = tiny.simulate(config, *gaussians(seed)).rounds
        found += [row["accuracy"] for row in rounds if row["accuracy"] is not None]
    return float(np.mean(found))


def test_new_weights_in_every_round_are_better_than_fixed_ones_and_all_representations_than_both(
    tmp_path: Path,
) -> None:
    everything = accuracy("fedallrep", tmp_path, server_reduction="mean")
    resampled = accuracy("fedre", tmp_path)
    fixed = accuracy("fedre", tmp_path, resample=False)
    assert everything >= resampled > fixed + 0.02
