"""Errors that are raised on every rank if they occur on one rank, so that no rank waits for a failed rank."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from paceline.comm.process_group import World
from paceline.errors import CheckpointError, SaveError

T = TypeVar("T")


def run_on_all_ranks(world: World, work: Callable[[], T]) -> T:
    """Run `work` on every rank, and return once all ranks have run it.

    Raises:
        CheckpointError: the error of this rank, or of the first rank that has one.
    """
    problem: CheckpointError | None = None
    try:
        result = work()
    except CheckpointError as error:
        problem = error
    raise_on_all_ranks(world, problem)
    return result


def gather_on_all_ranks(world: World, work: Callable[[], tuple[T, Any]]) -> tuple[T, list[Any]]:
    """Run `work` on every rank; return its first result of this rank, and its second result, as JSON, of all ranks.

    Raises:
        CheckpointError: the error of this rank, or of the first rank that has one.
    """
    problem: CheckpointError | None = None
    shared: Any = None
    try:
        result, shared = work()
    except CheckpointError as error:
        problem = error
    answers = world.gather_json([None if problem is None else problem.as_json(), shared])
    _raise_first(problem, [error for error, _ in answers])
    return result, [value for _, value in answers]


def raise_on_all_ranks(world: World, problem: CheckpointError | None) -> None:
    """Raise an error on all ranks if any rank has one; every rank calls this.

    Raises:
        CheckpointError: the error of this rank, or of the first rank that has one.
    """
    _raise_first(problem, world.gather_json(None if problem is None else problem.as_json()))


def _raise_first(problem: CheckpointError | None, errors: Iterable[Mapping[str, Any] | None]) -> None:
    """Raise the error of this rank, or the first of all ranks' errors."""
    if problem is not None:
        raise problem
    for rank, error in enumerate(errors):
        if error is not None:
            kind = SaveError if error["error"] == SaveError.__name__ else CheckpointError
            where = error["where"] if rank == 0 else f"{error['where']} (rank {rank})"
            raise kind(error["what"], where=where, cause=error["cause"], hint=error["hint"])


def first_value_per_key(mappings: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the ranks' mappings; each key gets the value of the first rank that has it."""
    merged: dict[str, Any] = {}
    for mapping in mappings:
        for name, value in mapping.items():
            merged.setdefault(name, value)
    return merged
