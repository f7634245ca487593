"""What one rank can't do, no rank does: its words are raised on every rank, and nobody waits for one that is gone."""

import os
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

from paceline.comm.process_group import World
from paceline.errors import CheckpointError, SaveError

T = TypeVar("T")


def on_all_ranks(world: World, work: Callable[[], T]) -> T:
    """Do it on every rank, and go on once all have.

    Raises:
        CheckpointError: of this rank, or of the first that met one.
    """
    problem: CheckpointError | None = None
    try:
        found = work()
    except CheckpointError as error:
        problem = error
    raise_for_all(world, problem)
    return found


def raise_for_all(world: World, problem: CheckpointError | None) -> None:
    """Raise what any rank has met; every rank calls this.

    Raises:
        CheckpointError: of this rank, or of the first that met one.
    """
    told = world.gather_json(None if problem is None else problem.as_json())
    if problem is not None:
        raise problem
    for rank, said in enumerate(told):
        if said is not None:
            kind = SaveError if said["error"] == SaveError.__name__ else CheckpointError
            where = said["where"] if rank == 0 else f"{said['where']} (rank {rank})"
            raise kind(said["what"], where=where, cause=said["cause"], hint=said["hint"])


def all_arrived_within(world: World, what: str, *, seconds: float = 5.0) -> bool:
    """Whether every rank has met this within so many seconds: then none of them waits for one that has given up.

    Ranks that have not call nothing. Where it can't be known it is not so.
    """
    if world.group is None:
        return True
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")  # the same store then, with the words of the one before
    keys = [f"met/{attempt}/{what}/{rank}" for rank in range(world.world_size)]
    try:
        words = world.words()
        words.set(keys[world.rank], "")
        words.wait(keys, timedelta(seconds=seconds))
    except RuntimeError:  # torch's own of a store is one
        return False
    return True


def first_value_per_key(told: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What the ranks say, by name; the first to name something is believed."""
    found: dict[str, Any] = {}
    for said in told:
        for name, value in said.items():
            found.setdefault(name, value)
    return found
