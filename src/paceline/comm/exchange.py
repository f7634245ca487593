"""Exchanges: computations that send values between ranks, written so that several of them share one collective."""

from collections.abc import Generator, Sequence
from typing import Any, TypeAlias, TypeVar, cast

from paceline.comm.collective_errors import gather_on_all_ranks
from paceline.comm.process_group import World

T = TypeVar("T")
Exchange: TypeAlias = Generator[Any, list[Any], T]
"""A generator in which `yield value` sends a JSON value of this rank, and returns the values of all ranks.

It yields equally often on every rank. After its last `yield`, it raises an error on all ranks or on none.
"""


def run_exchange(world: World, exchange: Exchange[T]) -> T:
    """Run an exchange, and return its result. Every rank calls this."""
    return cast(T, _finish(world, exchange, received=None))


def run_exchanges(world: World, exchanges: Sequence[Exchange[Any]]) -> list[Any]:
    """Run several exchanges, with one collective for what all of them yield. Return their results.

    Every rank calls this.

    Raises:
        CheckpointError: an error before the first `yield`, of this rank or of the first rank that has one.
    """
    joined = _join(exchanges)
    _, values_by_rank = gather_on_all_ranks(world, lambda: (None, next(joined)))
    return list(_finish(world, joined, received=values_by_rank))


def _join(exchanges: Sequence[Exchange[Any]]) -> Exchange[list[Any]]:
    """Return an exchange that yields the values of several as one list. It yields at least once."""
    results: dict[int, Any] = {}
    received: dict[int, Any] = dict.fromkeys(range(len(exchanges)))
    is_first_round = True
    while received or is_first_round:
        values: dict[int, Any] = {}
        for number, values_by_rank in received.items():
            try:
                values[number] = exchanges[number].send(values_by_rank)
            except StopIteration as end:
                results[number] = end.value
        if values or is_first_round:
            lists = yield list(values.values())
            received = {number: [values[place] for values in lists] for place, number in enumerate(values)}
            is_first_round = False
        else:
            received = {}
    return [results[number] for number in range(len(exchanges))]


def _finish(world: World, exchange: Exchange[Any], *, received: list[Any] | None) -> Any:
    """Run an exchange until it returns. If it has yielded before, it gets what it `received`."""
    try:
        while True:
            value = exchange.send(cast(list[Any], received))
            received = world.gather_json(value)
    except StopIteration as end:
        return end.value
