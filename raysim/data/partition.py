"""Which samples each client holds: the data protocols of FedRE and FedMRL, and the plain iid one.

`iid`           every sample to a random client, all clients the same size.
`dirichlet`     FedRE's PRA. The draws of the PFLlib generator in their order, so that a seed gives
                the very clients of the papers that used it.
`pathological`  FedRE's PAT, also PFLlib's: consecutive clients share consecutive classes.
`classes`       FedMRL's: every client picks classes among those with the most free slots.

Three things differ from the generators on purpose: every sample lands exactly once (they drop
rounding leftovers and classes without a taker), no client stays empty, and nothing loops forever.
`rules` deals the samples; here the shares are repaired and split into training and test parts.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from raysim.config import DataConfig
from raysim.data import rules
from raysim.data.rules import Ints
from raysim.errors import ConfigError, DataError
from raysim.seeding import numpy_rng


@dataclass(frozen=True, eq=False)
class Split:
    """Which samples each client holds; flat, so that 100,000 clients are one zero-copy object."""

    indices: Ints
    """Client 0's training samples, client 0's test samples, client 1's training samples, ..."""
    offsets: Ints
    """Where each of these runs starts, and the end: 2 * num_clients + 1 numbers."""
    repaired: int = 0
    """Samples that were moved from the largest clients to those the rule left too small."""
    public: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Samples that no client has, ascending."""

    @property
    def num_clients(self) -> int:
        return len(self.offsets) // 2

    def train(self, client: int) -> Ints:
        return self.indices[self.offsets[2 * client] : self.offsets[2 * client + 1]]

    def test(self, client: int) -> Ints:
        return self.indices[self.offsets[2 * client + 1] : self.offsets[2 * client + 2]]

    def digest(self) -> str:
        """SHA-256 of the whole split: equal digests, equal clients."""
        parts = (
            np.ascontiguousarray(part, dtype="<i8")
            for part in (self.offsets, self.indices, self.public)
        )
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()

    def class_table(self, labels: npt.ArrayLike, num_classes: int) -> Ints:
        """Samples of each class that each client trains on and is tested on."""
        runs = len(self.offsets) - 1
        run = np.repeat(np.arange(runs), np.diff(self.offsets))
        cells = run * num_classes + np.asarray(labels)[self.indices]
        counts = np.bincount(cells, minlength=runs * num_classes)
        return counts.reshape(-1, 2, num_classes)  # (num_clients, 2, num_classes)


def validate(config: DataConfig) -> None:
    """What can be said of the partition's settings before the data are there."""
    if not config.alpha > 0 or not np.isfinite(config.alpha):
        raise ConfigError(f"--data.alpha must be a positive number, got {config.alpha}")
    if config.classes_per_client < 1:
        raise ConfigError(
            f"--data.classes-per-client must be at least 1, got {config.classes_per_client}"
        )
    if not 0 <= config.low_weight <= 0.5:
        raise ConfigError(f"--data.low-weight must lie in [0, 0.5], got {config.low_weight}")
    if not 0 < config.test_fraction < 1:
        raise ConfigError(f"--data.test-fraction must lie in (0, 1), got {config.test_fraction}")
    if config.public < 0:
        raise ConfigError(f"--data.public must be at least 0, got {config.public}")


def split(
    labels: npt.ArrayLike,
    num_train: int,
    num_classes: int,
    num_clients: int,
    config: DataConfig,
    seed: int,
) -> Split:
    """Deal samples 0 .. len(labels) - 1, the first `num_train` of them the official training part.

    Every sample lands exactly once, and every client trains on at least one. With
    `--data.test split` a client of two samples or more has a test sample; with
    `--data.test official` a client whose classes are rare may have none. `--data.public` samples
    are set aside first, and the others dealt as if they were all.
    """
    labels = np.asarray(labels, dtype=np.int64)
    official = config.test == "official"
    pool = labels[:num_train] if official else labels
    if config.public > 0:
        public, rest = set_aside(config, len(pool), len(labels), num_clients)
        left, config = int((rest < num_train).sum()), replace(config, public=0)
        dealt = split(labels[rest], left, num_classes, num_clients, config, seed)
        indices = rest[dealt.indices]
        indices.setflags(write=False)
        return replace(dealt, indices=indices, public=public)
    _check(config, len(pool), len(labels) - num_train, num_classes, num_clients)
    rng = np.random.RandomState(seed % 2**32)
    deal = rules.deal(pool, num_classes, num_clients, config, rng)
    samples, sizes, repaired = _repair(deal.samples, deal.sizes, deal.least)
    if official:
        weights = deal.weights or rules.held(samples, sizes, labels, num_classes)
        tests = rules.group(labels[num_train:], num_classes)
        test_samples, test_sizes = rules.deal_like(tests, weights, num_clients)
        indices, offsets = _interleave(samples, sizes, test_samples + num_train, test_sizes)
    else:
        indices, offsets = _hold_out(samples, sizes, config.test_fraction, rng)
    indices.setflags(write=False)
    offsets.setflags(write=False)
    return Split(indices, offsets, repaired)


def _check(
    config: DataConfig, num_samples: int, num_tests: int, num_classes: int, num_clients: int
) -> None:
    validate(config)
    by_class = config.partition in ("pathological", "classes")
    if by_class and config.classes_per_client > num_classes:
        raise ConfigError(
            f"--data.classes-per-client is {config.classes_per_client}, "
            f"but {config.name} has {num_classes} classes"
        )
    if config.test == "official" and not num_tests:
        raise DataError(
            f"--data.test official needs an official test part, which {config.name} does not have; "
            "try --data.test split"
        )
    if num_clients < 1:
        raise ConfigError(f"--clients must be at least 1, got {num_clients}")
    if num_samples < num_clients:
        part = " training" if config.test == "official" else ""
        more = f"--data.samples {2 * num_clients} or " if config.name == "shapes" else ""
        raise DataError(
            f"--clients {num_clients} needs at least {num_clients}{part} samples, "
            f"{config.name} has {num_samples}; try {more}fewer --clients"
        )


def set_aside(
    config: DataConfig, pool: int, num_samples: int, num_clients: int
) -> tuple[Ints, Ints]:
    """The public samples, of the first `pool`, and the others, both ascending."""
    if (left := pool - config.public) < num_clients:
        raise DataError(
            f"--data.public {config.public} leaves {max(left, 0)} samples of {config.name} for "
            f"--clients {num_clients}; try a smaller --data.public"
        )
    drawn = numpy_rng(config.public_seed, "public").permutation(pool)[: config.public]
    aside = np.zeros(num_samples, dtype=bool)
    aside[drawn] = True
    public = np.flatnonzero(aside)
    public.setflags(write=False)
    return public, np.flatnonzero(~aside)


def _repair(samples: Ints, sizes: Ints, least: int) -> tuple[Ints, Ints, int]:
    """Bring every client to `least` samples, taking the last ones of the largest clients."""
    lacks = np.maximum(least - sizes, 0)
    need = int(lacks.sum())
    if not need:
        return samples, sizes, 0
    low, high = least, int(sizes.max())  # the highest level that, cut off, frees enough
    while low < high:
        level = (low + high + 1) // 2
        if np.maximum(sizes - level, 0).sum() >= need:
            low = level
        else:
            high = level - 1
    gives = np.maximum(sizes - low, 0)
    spare = np.flatnonzero(gives)[: gives.sum() - need]  # fewer than there are donors
    gives[spare] -= 1
    owners = np.repeat(np.arange(len(sizes)), sizes)
    ends = np.cumsum(sizes)
    moved = np.arange(len(samples)) >= (ends - gives)[owners]
    owners[moved] = np.repeat(np.arange(len(sizes)), lacks)
    return samples[np.argsort(owners, kind="stable")], sizes - gives + lacks, need


def _hold_out(
    samples: Ints, sizes: Ints, fraction: float, rng: np.random.RandomState
) -> tuple[Ints, Ints]:
    """Split every client's share: one permutation each, of which the first part is the test.

    These are the draws of scikit-learn's `train_test_split`, as PFLlib calls it.
    """
    trains = np.floor((1 - fraction) * sizes + 1e-9).astype(np.int64)
    trains = np.maximum(np.minimum(trains, sizes - 1), 1)
    indices = np.empty_like(samples)
    ends = np.cumsum(sizes)
    for size, train, end in zip(sizes.tolist(), trains.tolist(), ends.tolist(), strict=True):
        order = rng.permutation(size)
        share = samples[end - size : end]
        indices[end - size : end - size + train] = share[order[size - train :]]
        indices[end - size + train : end] = share[order[: size - train]]
    offsets = np.zeros(2 * len(sizes) + 1, dtype=np.int64)
    offsets[2::2] = ends
    offsets[1::2] = ends - sizes + trains
    return indices, offsets


def _interleave(
    trains: Ints, train_sizes: Ints, tests: Ints, test_sizes: Ints
) -> tuple[Ints, Ints]:
    runs = np.stack([train_sizes, test_sizes], axis=1).ravel()
    offsets = np.concatenate([[0], np.cumsum(runs)])
    of_train = np.repeat(np.tile([True, False], len(train_sizes)), runs)
    indices = np.empty(len(trains) + len(tests), dtype=np.int64)
    indices[of_train] = trains
    indices[~of_train] = tests
    return indices, offsets
