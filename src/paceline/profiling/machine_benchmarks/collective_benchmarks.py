"""Collective benchmarks: every collective in groups of several sizes, all groups at the same time."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist

from paceline.comm.process_group import ALL_GATHER, REDUCE_SCATTER, World
from paceline.planner.hardware.benchmark_results import Collective
from paceline.profiling.machine_benchmarks.interleaved_timer import Call, Family, Size, time_all

_MOST_SECONDS = 0.3  # of one call
_CALLS_IN_BUDGET = 20  # of the slowest size of each kind
_FLOAT = 4
_AMOUNTS = (2**8, 2**12, 2**16, 2**18, 2**20, 2**22, 2**25)
_AMOUNTS_GPU = (*_AMOUNTS, 2**28)


def measure_links(world: World, *, seconds: float, crowded: bool = False) -> tuple[Collective, ...]:
    """Return the timings of all collectives; empty for one process. Every rank calls this."""
    sizes = group_sizes(world.world_size)
    limit = min(_MOST_SECONDS, seconds / (max(len(sizes), 1) * len(_MAKERS) * _CALLS_IN_BUDGET))
    found: list[Collective] = []
    for size in sizes:
        part = world.part(neighbours(world.world_size, size=size))
        families = list(_families(part, size=size))
        own = seconds / len(sizes)
        curves = time_all(families, world=world, seconds=own, limit=limit, join=max, lead=True, crowded=crowded)
        found += [Collective(kind=key[0], ranks=size, curve=curve) for key, curve in curves.items()]
    return tuple(found)


def group_sizes(ranks: int) -> tuple[int, ...]:
    """Return the powers of two up to `ranks`, and `ranks` itself."""
    return tuple(sorted({2**power for power in range(1, ranks.bit_length()) if 2**power <= ranks} | {ranks} - {1}))


def neighbours(ranks: int, *, size: int) -> list[list[int]]:
    """Return as many groups of `size` adjacent ranks as possible; each remaining rank is a group of its own."""
    whole = ranks // size * size
    groups = [list(range(start, start + size)) for start in range(0, whole, size)]
    return groups + [[rank] for rank in range(whole, ranks)]


def _families(part: World, *, size: int) -> Iterator[Family]:
    """Yield the benchmarks of this group; a rank without a group of this size takes part with calls that do nothing."""
    amounts = _AMOUNTS_GPU if part.device.type == "cuda" else _AMOUNTS
    for kind, make in _MAKERS.items():
        payload = [_payload(kind, amount, size) for amount in amounts]
        sizes = [
            Size(
                amount=_FLOAT * number,
                make=partial(make, part, number) if part.world_size == size else partial(_idle, part, number),
                times=2 if kind == "send" else 1,
            )
            for number in dict.fromkeys(payload)
        ]
        yield Family(key=(kind,), sizes=sizes)


def _payload(kind: str, amount: int, size: int) -> int:
    """Return the elements that a rank passes in, a multiple of `size`; for a gather, the result has the amount."""
    return max(1, amount // _FLOAT // size) * (1 if kind == "all_gather" else size)


def _zeros(part: World, number: int) -> torch.Tensor:
    return torch.zeros(number, device=part.device)


def _all_reduce(part: World, number: int) -> Call:
    return partial(dist.all_reduce, _zeros(part, number), group=part.group)


def _all_gather(part: World, number: int) -> Call:
    whole = _zeros(part, number * part.world_size)
    return partial(ALL_GATHER, whole, _zeros(part, number), group=part.group)


def _reduce_scatter(part: World, number: int) -> Call:
    own = _zeros(part, number // part.world_size)
    return partial(REDUCE_SCATTER, own, _zeros(part, number), group=part.group)


def _all_to_all(part: World, number: int) -> Call:
    return partial(dist.all_to_all_single, _zeros(part, number), _zeros(part, number), group=part.group)


def _broadcast(part: World, number: int) -> Call:
    """Return a broadcast from each rank in turn: a constant source would run ahead of its receivers."""
    tensor, turn = _zeros(part, number), iter(_turns(part.world_size))
    return lambda: dist.broadcast(tensor, group_src=next(turn), group=part.group)


def _send(part: World, number: int) -> Call:
    """Return a send and a receive between two adjacent ranks, all pairs at once."""
    tensor, fellow = _zeros(part, number), part.rank ^ 1
    if fellow >= part.world_size:
        return _idle(part, number)
    send = partial(dist.send, tensor, group=part.group, group_dst=fellow)
    hear = partial(dist.recv, tensor, group=part.group, group_src=fellow)
    first, then = (send, hear) if part.rank < fellow else (hear, send)

    def call() -> None:
        first()
        then()

    return call


def _idle(part: World, number: int) -> Call:
    return lambda: None


def _turns(size: int) -> Iterator[int]:
    while True:
        yield from range(size)


_MAKERS: dict[str, Callable[[World, int], Call]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "send": _send,
}
KINDS: Sequence[str] = tuple(_MAKERS)
