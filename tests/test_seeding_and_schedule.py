"""Where random draws come from, and who takes part in a round."""

import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raysim import schedule
from raysim.seeding import derive, numpy_rng, seeded

# Seeds


@pytest.mark.parametrize("other", [(1, "a", 2, 3), (0, "b", 2, 3), (0, "a", 1, 3), (0, "a", 2, 4)])
def test_a_derived_seed_depends_on_each_of_its_parts(other: tuple[int, str, int, int]) -> None:
    assert derive(0, "a", 2, 3) == derive(0, "a", 2, 3)
    assert derive(0, "a", 2, 3) != derive(*other)


def test_parts_cannot_be_mistaken_for_each_other() -> None:
    parts = [(s, "a", r, c) for s in range(13) for r in range(13) for c in range(-1, 13)]
    assert len({derive(*part) for part in parts}) == len(parts)


def test_a_derived_seed_never_changes() -> None:
    """`printf 0/cohort/1/-1 | b2sum -l 64`, without its lowest bit. Another number here means that
    every published result changes."""
    assert derive(0, "cohort", 1) == 2_982_511_045_433_155_672


@settings(deadline=None)
@given(st.integers(), st.text(), st.integers(), st.integers())
def test_a_derived_seed_suits_torch_and_numpy(
    seed: int, purpose: str, round: int, client: int
) -> None:
    value = derive(seed, purpose, round, client)
    assert 0 <= value < 2**63
    torch.Generator().manual_seed(value)
    numpy_rng(seed, purpose, round, client)


def test_numpy_streams_repeat_and_differ_by_client() -> None:
    def draws(client: int) -> list[float]:
        return numpy_rng(0, "split", 0, client).random(4).tolist()

    assert draws(1) == draws(1) != draws(2)


def draw() -> tuple[float, float, float]:
    return float(torch.rand(())), float(np.random.random()), random.random()


def test_a_seeded_block_draws_the_same_whatever_came_before() -> None:
    with seeded(0, "train", 1, 2):
        first = draw()
    draw()
    with seeded(0, "train", 1, 2):
        assert draw() == first
    with seeded(0, "train", 1, 3):
        assert all(a != b for a, b in zip(draw(), first, strict=True))


def test_the_streams_of_the_caller_return_after_a_seeded_block() -> None:
    with seeded(9, "outer"):
        expected = [draw(), draw()]
    with seeded(9, "outer"):
        found = [draw()]
        with seeded(0, "inner"):
            draw()
        found.append(draw())
    assert found == expected


def test_the_streams_of_the_caller_return_after_a_failure_too() -> None:
    with seeded(9, "outer"):
        expected = draw()
    with seeded(9, "outer"):
        with pytest.raises(ZeroDivisionError), seeded(0, "inner"):
            assert draw()[0] / 0
        assert draw() == expected


# Cohorts


@pytest.mark.parametrize(
    ("clients", "participation", "size"),
    [
        (100, 0.1, 10),
        (100, 1.0, 100),
        (100, 0.29, 29),  # 28.999999999999996 in floating point
        (10, 0.7, 7),
        (10, 0.29, 2),
        (10, 0.01, 1),
        (1, 0.1, 1),
        (3, 1.0, 3),
        (100_000, 0.0001, 10),
    ],
)
def test_a_cohort_has_its_share_of_the_clients(
    clients: int, participation: float, size: int
) -> None:
    assert len(schedule.cohort(0, 1, clients, participation)) == size


@settings(deadline=None)
@given(
    st.integers(0, 2**40),
    st.integers(1, 1000),
    st.integers(1, 500),
    st.floats(0, 1, exclude_min=True),
)
def test_a_cohort_is_ascending_unique_and_never_empty(
    seed: int, round: int, clients: int, participation: float
) -> None:
    cohort = schedule.cohort(seed, round, clients, participation)
    assert all(a < b for a, b in pairwise(cohort))
    assert all(type(client) is int and 0 <= client < clients for client in cohort)
    assert max(1, clients * participation - 1) <= len(cohort) <= clients
    assert cohort == schedule.cohort(seed, round, clients, participation)


def test_every_round_and_every_seed_has_its_own_cohort() -> None:
    cohorts = {tuple(schedule.cohort(0, round, 100, 0.1)) for round in range(1, 51)}
    assert len(cohorts) == 50
    assert schedule.cohort(0, 1, 100, 0.1) != schedule.cohort(1, 1, 100, 0.1)


def test_drawing_a_cohort_leaves_the_streams_of_the_caller_alone() -> None:
    with seeded(9, "outer"):
        expected = draw()
    with seeded(9, "outer"):
        schedule.cohort(0, 1, 100, 0.1)
        assert draw() == expected


def test_all_clients_are_drawn_equally_often() -> None:
    """1000 rounds of 3 out of 10: 300 each, give or take 5 standard deviations of 14.5."""
    drawn = [client for round in range(1000) for client in schedule.cohort(0, round, 10, 0.3)]
    counts = np.bincount(drawn, minlength=10)
    assert abs(counts - 300).max() < 5 * 14.5


# Who is evaluated


def model_of(client: int) -> str:
    return f"cnn{client % 3 + 1}"


def evaluated(who: str, per: str = "client", clients: int = 10, seed: int = 0) -> list[int]:
    return schedule.evaluated(seed, who, per, clients, model_of, [3, 4, 7, 8])


def test_all_evaluates_every_client() -> None:
    assert evaluated("all") == list(range(10))


def test_cohort_evaluates_who_took_part() -> None:
    assert evaluated("cohort") == [3, 4, 7, 8]


def test_a_number_evaluates_a_sample_of_that_size_which_depends_on_the_seed_only() -> None:
    sample = evaluated("4")
    assert len(set(sample)) == 4
    assert sample == sorted(sample)
    assert sample == schedule.evaluated(0, "4", "client", 10, model_of, [0])
    assert len({tuple(evaluated("4", seed=seed)) for seed in range(10)}) > 1


def test_a_number_beyond_the_clients_evaluates_them_all() -> None:
    assert evaluated("50") == list(range(10))


def test_per_architecture_evaluates_the_first_client_of_each_model() -> None:
    assert evaluated("all", "architecture") == [0, 1, 2]


def test_per_architecture_of_a_cohort_takes_the_first_who_took_part() -> None:
    """Clients 3, 4, 7, 8 have cnn1, cnn2, cnn2, cnn3."""
    assert evaluated("cohort", "architecture") == [3, 4, 8]


def test_per_architecture_of_fewer_clients_than_models_takes_what_there_is() -> None:
    assert evaluated("all", "architecture", clients=2) == [0, 1]
