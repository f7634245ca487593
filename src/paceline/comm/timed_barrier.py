"""A barrier with a time limit, which does not hang if a rank never arrives."""

import os
from datetime import timedelta

from paceline.comm.process_group import World


def all_ranks_arrive(world: World, label: str, *, seconds: float = 5.0) -> bool:
    """Return whether every rank calls this function with the same `label` within `seconds`.

    Unlike a barrier, this does not hang if a rank never calls it. If the store can't be reached, return False.
    """
    if world.group is None:
        return True
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")  # a restart uses the same store, with old keys
    keys = [f"met/{attempt}/{label}/{rank}" for rank in range(world.world_size)]
    try:
        store = world.connect_store()
        store.set(keys[world.rank], "")
        store.wait(keys, timedelta(seconds=seconds))
    except RuntimeError:  # torch's store errors are subclasses
        return False
    return True
