"""Objects of Ray's store that may be gone."""

from typing import cast

import ray
from ray.exceptions import ObjectLostError, RayError

from raysim.backends.tasks import Ref
from raysim.errors import StatesLost
from raysim.wire import Packed


def fetch(ref: Ref, client: int) -> Packed:
    try:
        return cast(Packed, ray.get(ref))
    except RayError as error:
        if not lost(error):
            raise
        raise StatesLost(f"the state of client {client} was lost") from error


def lost(error: RayError) -> bool:
    """Whether an object is gone from the store, now or for a task that needed it."""
    cause = getattr(error, "cause", None)
    return isinstance(error, ObjectLostError) or isinstance(cause, ObjectLostError)
