"""Who takes part in a round, and who is evaluated."""

from collections.abc import Callable

from raysim.seeding import numpy_rng


def cohort(seed: int, round: int, num_clients: int, participation: float) -> list[int]:
    """Who takes part: uniform without replacement, at least one, in ascending order."""
    size = max(1, int(num_clients * participation + 1e-9))
    return _draw(num_clients, size, seed, "cohort", round)


def evaluated(
    seed: int,
    who: str,
    per: str,
    num_clients: int,
    model_of: Callable[[int], str],
    cohort: list[int],
) -> list[int]:
    """The clients that `--eval.clients` and `--eval.per` mean, in ascending order."""
    if who == "all":
        ids = list(range(num_clients))
    elif who == "cohort":
        ids = cohort
    else:
        ids = _draw(num_clients, min(int(who), num_clients), seed, "evaluated", 0)
    if per == "client":
        return ids
    first: dict[str, int] = {}
    for client in ids:
        first.setdefault(model_of(client), client)
    return sorted(first.values())


def _draw(population: int, size: int, seed: int, purpose: str, round: int) -> list[int]:
    rng = numpy_rng(seed, purpose, round)
    drawn = rng.choice(population, size, replace=False, shuffle=False)
    return sorted(int(client) for client in drawn)
