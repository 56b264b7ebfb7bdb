"""A zoo of one model that a test can work by hand, in place of the real one."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import zoo
from raysim import Task, channels, exits, fleet
from zoo import SplitModel

_CACHES = (fleet._like, channels.layout, exits.exit_layout, exits.part_at)


@contextmanager
def zoo_of(make: Callable[[Task], SplitModel]) -> Iterator[None]:
    """Whatever name is asked for, `make(task)` is what is built."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zoo, "build", lambda name, task, feature_dim, mapping: make(task))
        for cache in _CACHES:
            cache.cache_clear()
        yield
    for cache in _CACHES:
        cache.cache_clear()
