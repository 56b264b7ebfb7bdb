"""Which client gets which sample: exact protocols, and the rules that all partitions keep."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysim.config import DataConfig
from raysim.data import Split, split
from raysim.errors import ConfigError, DataError

PARTITIONS = ("iid", "dirichlet", "pathological", "classes")
CIFAR10 = np.arange(60_000) % 10
CIFAR100 = np.arange(60_000) % 100
CONFIG = DataConfig(name="a set")


def deal(
    labels: Any, num_clients: int, partition: str = "dirichlet", seed: int = 0, **changes: Any
) -> Split:
    config = replace(CONFIG, partition=partition, **changes)
    num_train = len(labels) * 5 // 6
    return split(labels, num_train, int(max(labels)) + 1, num_clients, config, seed)


def train_classes(labels: Any, dealt: Split) -> list[set[int]]:
    return [set(labels[dealt.train(c)].tolist()) for c in range(dealt.num_clients)]


def test_dirichlet_gives_the_502_class_pairs_of_fedre_on_cifar100() -> None:
    dealt = deal(CIFAR100, 10)
    train = dealt.class_table(CIFAR100, 100)[:, 0]
    assert (train > 0).sum(axis=1).tolist() == [47, 48, 40, 52, 56, 38, 47, 50, 59, 65]
    assert (train > 0).sum() == 502
    sizes = [4652, 4530, 4117, 3879, 4351, 4764, 4515, 4526, 4866, 4796]
    assert train.sum(axis=1).tolist() == sizes
    assert dealt.repaired == 0


def test_dirichlet_gives_the_61_class_pairs_of_fedre_on_cifar10() -> None:
    train = deal(CIFAR10, 10).class_table(CIFAR10, 10)[:, 0]
    assert (train > 0).sum(axis=1).tolist() == [5, 7, 6, 4, 7, 6, 4, 8, 4, 10]


def test_dirichlet_gives_the_1005_class_pairs_of_fedre_on_tiny_imagenet() -> None:
    labels = np.arange(110_000) % 200
    assert (deal(labels, 10).class_table(labels, 200)[:, 0] > 0).sum() == 1005


@pytest.mark.parametrize(("num_clients", "seed"), [(10, 3), (20, 0), (30, 7)])
def test_dirichlet_equals_the_pfllib_generator_sample_by_sample(
    num_clients: int, seed: int
) -> None:
    """The generator as PFLlib writes it, with lists, loops and NumPy's old global generator."""
    labels = np.random.RandomState(5).randint(0, 10, 6000)
    rng = np.random.RandomState(seed)
    least = int(min(10 / (1 - 0.75), len(labels) / num_clients / 2))
    smallest = 0
    attempts = 0
    while smallest < least:
        attempts += 1
        clients: list[list[int]] = [[] for _ in range(num_clients)]
        for label in range(10):
            members = np.where(labels == label)[0]
            rng.shuffle(members)
            p = rng.dirichlet(np.repeat(0.1, num_clients))
            full = len(labels) / num_clients
            p = np.array([q * (len(c) < full) for q, c in zip(p, clients, strict=True)])
            cuts = (np.cumsum(p / p.sum()) * len(members)).astype(int)[:-1]
            shares = np.split(members, cuts)
            clients = [c + s.tolist() for c, s in zip(clients, shares, strict=True)]
        smallest = min(map(len, clients))
    assert attempts < 100
    dealt = deal(labels, num_clients, seed=seed)
    for client, share in enumerate(clients):
        order = rng.permutation(len(share))
        num_test = len(share) - int(0.75 * len(share))
        assert np.array_equal(dealt.test(client), np.array(share)[order[:num_test]])
        assert np.array_equal(dealt.train(client), np.array(share)[order[num_test:]])


def test_pathological_pairs_consecutive_clients_on_cifar10() -> None:
    held = train_classes(CIFAR10, deal(CIFAR10, 10, "pathological", classes_per_client=2))
    assert held == [{c // 2 * 2, c // 2 * 2 + 1} for c in range(10)]


def test_pathological_puts_each_class_on_one_client_on_cifar100() -> None:
    dealt = deal(CIFAR100, 10, "pathological", classes_per_client=10)
    table = dealt.class_table(CIFAR100, 100).sum(axis=1)
    assert ((table > 0).sum(axis=0) == 1).all()
    assert (table.sum(axis=1) == 6000).all()


def test_pathological_gives_the_last_of_a_group_most_with_100_clients() -> None:
    dealt = deal(CIFAR100, 100, "pathological", classes_per_client=10)
    table = dealt.class_table(CIFAR100, 100).sum(axis=1)
    assert ((table > 0).sum(axis=0) == 10).all()
    sizes = table.sum(axis=1).reshape(10, 10)
    assert (sizes[:, :9].mean(), sizes[:, 9].mean()) == pytest.approx((330, 3030), rel=0.05)


def test_pathological_deals_classes_that_no_quota_is_left_for() -> None:
    """7 clients of 2 classes: ceil(1.4) = 2 takers a class, so 14 quotas last for 7 classes."""
    dealt = deal(CIFAR10, 7, "pathological", classes_per_client=2)
    holders = (dealt.class_table(CIFAR10, 10).sum(axis=1) > 0).sum(axis=0)
    assert holders.tolist() == [2, 2, 2, 2, 2, 2, 1, 1, 2, 2]


def test_classes_gives_every_client_its_number_of_classes() -> None:
    for labels, num_classes, cpc, num_clients in ((CIFAR10, 10, 2, 50), (CIFAR100, 100, 10, 100)):
        dealt = deal(labels, num_clients, "classes", classes_per_client=cpc)
        table = dealt.class_table(labels, num_classes).sum(axis=1)
        assert ((table > 0).sum(axis=1) == cpc).all()
        assert ((table > 0).sum(axis=0) == cpc * num_clients // num_classes).all()


def test_classes_weighs_slots_between_low_and_one_minus_low() -> None:
    """10 clients of 2 classes: two slots a class with U(0.4, 0.6), so shares of 0.4 to 0.6."""
    table = deal(CIFAR10, 10, "classes").class_table(CIFAR10, 10).sum(axis=1)
    shares = table[table > 0] / 6000
    assert shares.min() > 0.4 - 1e-3
    assert shares.max() < 0.6 + 1e-3
    assert len(set(shares.tolist())) > 10
    even = deal(CIFAR10, 10, "classes", low_weight=0.5).class_table(CIFAR10, 10).sum(axis=1)
    assert set(even.ravel().tolist()) == {0, 3000}


def test_classes_uses_one_set_of_weights_for_both_official_parts() -> None:
    dealt = deal(CIFAR10, 10, "classes", test="official")
    table = dealt.class_table(CIFAR10, 10)
    assert np.abs(table[:, 0] / 5000 - table[:, 1] / 1000).max() <= 1e-3


def test_classes_deals_classes_that_nobody_picked() -> None:
    dealt = deal(CIFAR100, 3, "classes", classes_per_client=2)
    table = dealt.class_table(CIFAR100, 100).sum(axis=1)
    assert table.sum(axis=0).tolist() == [600] * 100
    assert (table > 0).sum(axis=1).tolist() == [34, 33, 33]


def test_iid_clients_have_one_size_and_all_classes() -> None:
    table = deal(CIFAR10, 100, "iid").class_table(CIFAR10, 10)
    assert (table.sum(axis=2) == [450, 150]).all()
    assert (table[:, 0] > 0).all()


@pytest.mark.parametrize("partition", PARTITIONS)
def test_official_test_parts_follow_the_training_parts(partition: str) -> None:
    dealt = deal(CIFAR10, 20, partition, test="official")
    train, test = dealt.class_table(CIFAR10, 10).swapaxes(0, 1)
    assert (train.sum(), test.sum()) == (50_000, 10_000)
    assert np.abs(test - train / 5).max() <= 1.2
    assert all((dealt.train(c) < 50_000).all() for c in range(20))
    assert all((dealt.test(c) >= 50_000).all() for c in range(20))


def test_official_test_samples_of_a_class_without_training_samples_go_round() -> None:
    labels = np.array([0] * 10 + [1] * 7)
    config = replace(CONFIG, partition="iid", test="official")
    table = split(labels, 10, 2, 3, config, seed=0).class_table(labels, 2)
    assert table[:, 1].tolist() == [[0, 3], [0, 2], [0, 2]]


@settings(max_examples=150, deadline=None)
@given(
    num_samples=st.integers(2, 200),
    num_classes=st.integers(1, 12),
    num_clients=st.integers(1, 60),
    seed=st.integers(0, 2**40),
    partition=st.sampled_from(PARTITIONS),
    test=st.sampled_from(["split", "official"]),
    alpha=st.sampled_from([1e-300, 1e-3, 0.1, 100.0, 1e308]),
    classes_per_client=st.integers(1, 12),
    low_weight=st.sampled_from([0.1, 0.4, 0.5]),
    test_fraction=st.sampled_from([0.01, 0.25, 0.9]),
)
def test_every_sample_lands_exactly_once_and_no_client_is_empty(
    num_samples: int,
    num_classes: int,
    num_clients: int,
    seed: int,
    partition: str,
    test: str,
    classes_per_client: int,
    **changes: Any,
) -> None:
    labels = np.random.RandomState(seed % 2**32).randint(0, num_classes, num_samples)
    num_train = max(1, num_samples * 3 // 4)
    official = test == "official"
    num_clients = min(num_clients, num_train if official else num_samples)
    config = replace(
        CONFIG,
        partition=partition,
        test=test,
        classes_per_client=min(classes_per_client, num_classes),
        **changes,
    )
    dealt = split(labels, num_train, num_classes, num_clients, config, seed)
    assert dealt.num_clients == num_clients
    assert np.array_equal(np.sort(dealt.indices), np.arange(num_samples))
    assert np.array_equal(dealt.offsets[[0, -1]], [0, num_samples])
    for client in range(num_clients):
        train, held_out = len(dealt.train(client)), len(dealt.test(client))
        assert train >= 1
        if not official:
            assert (held_out >= 1) == (train + held_out >= 2)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_a_seed_decides_the_split(partition: str) -> None:
    once, again, other = (deal(CIFAR10, 20, partition, seed=seed) for seed in (1, 1, 2))
    assert once.digest() == again.digest()
    assert once.digest() != other.digest()
    assert len(once.digest()) == 64


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("test", ["split", "official"])
def test_a_hundred_thousand_clients_take_seconds(partition: str, test: str) -> None:
    labels = np.random.RandomState(0).randint(0, 10, 200_000)
    start = time.perf_counter()
    dealt = deal(labels, 100_000, partition, test=test)
    assert time.perf_counter() - start < 10
    assert np.array_equal(np.sort(dealt.indices), np.arange(200_000))
    assert (np.diff(dealt.offsets)[::2] >= 1).all()


def test_repair_takes_from_the_largest_clients_and_says_how_much() -> None:
    labels = np.arange(4000) % 10
    dealt = deal(labels, 100, alpha=0.01)
    sizes = np.diff(dealt.offsets[::2])
    assert dealt.repaired > 0
    assert sizes.min() == 20  # half of the mean share
    assert sizes.sum() == 4000


def test_a_split_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        deal(CIFAR10, 5, "iid").train(0).sort()


def test_class_table_counts_what_clients_hold() -> None:
    dealt = Split(np.array([0, 3, 1, 2]), np.array([0, 2, 2, 3, 4]))
    table = dealt.class_table(np.array([1, 0, 0, 1]), 2)
    assert table.tolist() == [[[0, 2], [0, 0]], [[1, 0], [1, 0]]]


def test_more_clients_than_samples_names_both_numbers() -> None:
    with pytest.raises(DataError, match="--clients 500 needs at least 500 samples, a set has 400"):
        deal(np.arange(400) % 4, 500)
    shapes = replace(CONFIG, name="shapes")
    with pytest.raises(DataError, match=r"try --data.samples 1000 or fewer --clients"):
        split(np.arange(400) % 4, 333, 4, 500, shapes, 0)
    with pytest.raises(DataError, match="at least 350 training samples, a set has 333"):
        deal(np.arange(400) % 4, 350, test="official")


def test_official_needs_a_test_part() -> None:
    with pytest.raises(DataError, match=r"a set does not have; try --data.test split"):
        split(np.arange(400) % 4, 400, 4, 5, replace(CONFIG, test="official"), 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"alpha": 0.0}, "--data.alpha must be a positive number, got 0.0"),
        ({"alpha": float("nan")}, "--data.alpha"),
        ({"classes_per_client": 0}, "--data.classes-per-client must be at least 1"),
        (
            {"classes_per_client": 11, "partition": "classes"},
            "--data.classes-per-client is 11, but a set has 10 classes",
        ),
        ({"low_weight": 0.7}, r"--data.low-weight must lie in \[0, 0.5\], got 0.7"),
        ({"test_fraction": 1.0}, r"--data.test-fraction must lie in \(0, 1\), got 1.0"),
    ],
)
def test_impossible_settings_name_their_flag(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        deal(CIFAR10, 10, **changes)
