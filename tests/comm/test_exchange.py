"""Exchanges share collectives, keep their own results, and report an error of one rank on all."""

import json
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from paceline.comm.exchange import Exchange, run_exchange, run_exchanges
from paceline.comm.process_group import World
from paceline.errors import CheckpointError

RANKS = 3


class ThreadWorld:
    """The ranks are threads; each of them has one such object."""

    def __init__(self, rank: int, values: dict[int, str], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.num_gathers = 0
        self._values, self._barrier = values, barrier

    def gather_json(self, value: Any) -> list[Any]:
        self.num_gathers += 1
        self._values[self.rank] = json.dumps(value)
        self._barrier.wait(timeout=10)
        found = [json.loads(self._values[rank]) for rank in range(RANKS)]
        self._barrier.wait(timeout=10)
        return found


def on_all_ranks(run: Callable[[World], Any]) -> list[tuple[Any, int]]:
    """The result, or the error, and the number of collectives of each rank."""
    values: dict[int, str] = {}
    barrier = threading.Barrier(RANKS)
    worlds = [ThreadWorld(rank, values, barrier) for rank in range(RANKS)]
    results: dict[int, Any] = {}

    def work(world: ThreadWorld) -> None:
        try:
            results[world.rank] = run(cast(World, world))
        except CheckpointError as error:
            results[world.rank] = error

    threads = [threading.Thread(target=work, args=(world,)) for world in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    return [(results[world.rank], world.num_gathers) for world in worlds]


def ranks_of(rank: int) -> Exchange[list[int]]:
    return (yield rank)


def twice(rank: int) -> Exchange[tuple[list[int], list[int]]]:
    first = yield rank * 10
    second = yield sum(first) + rank
    return first, second


def nothing(rank: int) -> Exchange[str]:
    yield from ()
    return f"rank {rank}"


def broken(rank: int) -> Exchange[list[int]]:
    if rank == 1:
        raise CheckpointError("this rank can't.", where="here")
    return (yield rank)


def test_several_exchanges_take_as_many_collectives_as_the_longest_of_them() -> None:
    def run(world: World) -> list[Any]:
        return run_exchanges(world, [make(world.rank) for make in (nothing, ranks_of, twice, ranks_of)])

    for rank, (result, num_gathers) in enumerate(on_all_ranks(run)):
        assert result == [f"rank {rank}", [0, 1, 2], ([0, 10, 20], [30, 31, 32]), [0, 1, 2]]
        assert num_gathers == 2


def test_one_exchange_takes_only_its_own_collectives() -> None:
    for make, expected, num_expected in ((nothing, None, 0), (ranks_of, [0, 1, 2], 1)):
        for rank, (result, num_gathers) in enumerate(on_all_ranks(lambda world: run_exchange(world, make(world.rank)))):  # noqa: B023
            assert result == (expected or f"rank {rank}") and num_gathers == num_expected


@pytest.mark.parametrize("others", [(), (nothing,), (ranks_of, twice)])
def test_an_error_of_one_rank_is_raised_on_all(others: tuple[Callable[[int], Exchange[Any]], ...]) -> None:
    def run(world: World) -> list[Any]:
        return run_exchanges(world, [make(world.rank) for make in (*others, broken, *others)])

    for rank, (error, num_gathers) in enumerate(on_all_ranks(run)):
        assert isinstance(error, CheckpointError) and error.what == "this rank can't." and num_gathers == 1
        assert error.where == ("here" if rank == 1 else "here (rank 1)")
