"""Every random draw comes from (seed, purpose, round, client), so no schedule changes a result."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


def derive(seed: int, purpose: str, round: int = 0, client: int = -1) -> int:
    """A 63-bit seed that depends on all four and on nothing else."""
    key = f"{seed}/{purpose}/{round}/{client}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1


def numpy_rng(seed: int, purpose: str, round: int = 0, client: int = -1) -> np.random.Generator:
    return np.random.default_rng(derive(seed, purpose, round, client))


@contextmanager
def seeded(seed: int, purpose: str, round: int = 0, client: int = -1) -> Iterator[None]:
    """Seed torch, numpy and random for a block, so that method code draws as it likes; the caller's
    streams return afterwards untouched."""
    import torch  # here, because the launcher draws without it

    state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    value = derive(seed, purpose, round, client)
    # Not torch.manual_seed: without CUDA that queues a call, with a stack trace, for ever.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(value)
    np.random.seed(value % 2**32)
    random.seed(value)
    try:
        yield
    finally:
        torch.set_rng_state(state[0])
        np.random.set_state(state[1])
        random.setstate(state[2])
