"""Time every collective in groups of several sizes, with all groups busy at the same time."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist

from paceline.comm.process_group import ALL_GATHER, REDUCE_SCATTER, World
from paceline.planner.hardware.benchmark_results import CollectiveTimings
from paceline.profiling.machine_benchmarks.interleaved_timer import BenchmarkFamily, BenchmarkSize, Call, time_families

_MAX_CALL_SECONDS = 0.3  # sizes that take longer are skipped
_CALLS_IN_BUDGET = 20  # how often the slowest size of each kind can be called within the time
_FLOAT_BYTES = 4
_PAYLOAD_BYTES = (2**8, 2**12, 2**16, 2**18, 2**20, 2**22, 2**25)
_PAYLOAD_BYTES_GPU = (*_PAYLOAD_BYTES, 2**28)


def measure_links(world: World, *, seconds: float, shares_cores: bool = False) -> tuple[CollectiveTimings, ...]:
    """Return the timings of all collectives; empty for one process. Every rank calls this.

    `shares_cores` says that there are more ranks than cores.
    """
    sizes = group_sizes(world.world_size)
    limit = min(_MAX_CALL_SECONDS, seconds / (max(len(sizes), 1) * len(_COLLECTIVES) * _CALLS_IN_BUDGET))
    collectives: list[CollectiveTimings] = []
    for size in sizes:
        subgroup = world.subgroup(neighbor_groups(world.world_size, size=size))
        families = list(_benchmarks(subgroup, size=size))
        seconds_per_size = seconds / len(sizes)
        curves = time_families(
            families,
            world=world,
            seconds=seconds_per_size,
            max_call_seconds=limit,
            combine_ranks=max,
            has_untimed_call=True,
            shares_cores=shares_cores,
        )
        collectives += [CollectiveTimings(kind=key[0], ranks=size, curve=curve) for key, curve in curves.items()]
    return tuple(collectives)


def group_sizes(ranks: int) -> tuple[int, ...]:
    """Return the group sizes to measure: the powers of two from 2 to `ranks`, and `ranks` itself if it is not 1."""
    return tuple(sorted({2**power for power in range(1, ranks.bit_length()) if 2**power <= ranks} | {ranks} - {1}))


def neighbor_groups(ranks: int, *, size: int) -> list[list[int]]:
    """Divide the ranks into groups of `size` adjacent ranks. Each remaining rank is a group of one."""
    num_grouped = ranks // size * size
    groups = [list(range(start, start + size)) for start in range(0, num_grouped, size)]
    return groups + [[rank] for rank in range(num_grouped, ranks)]


def _benchmarks(subgroup: World, *, size: int) -> Iterator[BenchmarkFamily]:
    """Yield the benchmarks of groups of `size` ranks. A rank outside these groups gets calls that do nothing."""
    amounts = _PAYLOAD_BYTES_GPU if subgroup.device.type == "cuda" else _PAYLOAD_BYTES
    for kind, make in _COLLECTIVES.items():
        element_counts = [_num_input_elements(kind, amount, size) for amount in amounts]
        sizes = [
            BenchmarkSize(
                amount=_FLOAT_BYTES * number,
                make_call=partial(make, subgroup, number)
                if subgroup.world_size == size
                else partial(_idle, subgroup, number),
                times=2 if kind == "send" else 1,
            )
            for number in dict.fromkeys(element_counts)
        ]
        yield BenchmarkFamily(key=(kind,), sizes=sizes)


def _num_input_elements(kind: str, amount: int, size: int) -> int:
    """Return how many elements a rank passes to a collective whose input has about `amount` bytes.

    In an all-gather, the result has this amount instead.
    """
    return max(1, amount // _FLOAT_BYTES // size) * (1 if kind == "all_gather" else size)


def _zeros(subgroup: World, num_elements: int) -> torch.Tensor:
    return torch.zeros(num_elements, device=subgroup.device)


def _all_reduce(subgroup: World, num_elements: int) -> Call:
    return partial(dist.all_reduce, _zeros(subgroup, num_elements), group=subgroup.group)


def _all_gather(subgroup: World, num_elements: int) -> Call:
    gathered = _zeros(subgroup, num_elements * subgroup.world_size)
    return partial(ALL_GATHER, gathered, _zeros(subgroup, num_elements), group=subgroup.group)


def _reduce_scatter(subgroup: World, num_elements: int) -> Call:
    shard = _zeros(subgroup, num_elements // subgroup.world_size)
    return partial(REDUCE_SCATTER, shard, _zeros(subgroup, num_elements), group=subgroup.group)


def _all_to_all(subgroup: World, num_elements: int) -> Call:
    return partial(
        dist.all_to_all_single, _zeros(subgroup, num_elements), _zeros(subgroup, num_elements), group=subgroup.group
    )


def _broadcast(subgroup: World, num_elements: int) -> Call:
    """Return a broadcast whose source is another rank in each call. A constant source would run ahead of the others."""
    tensor, sources = _zeros(subgroup, num_elements), iter(_cycle_ranks(subgroup.world_size))
    return lambda: dist.broadcast(tensor, group_src=next(sources), group=subgroup.group)


def _send(subgroup: World, num_elements: int) -> Call:
    """Return a call in which two adjacent ranks send to each other, one after the other. All pairs do so at once."""
    tensor, peer = _zeros(subgroup, num_elements), subgroup.rank ^ 1
    if peer >= subgroup.world_size:
        return _idle(subgroup, num_elements)
    send = partial(dist.send, tensor, group=subgroup.group, group_dst=peer)
    receive = partial(dist.recv, tensor, group=subgroup.group, group_src=peer)
    first, second = (send, receive) if subgroup.rank < peer else (receive, send)

    def call() -> None:
        first()
        second()

    return call


def _idle(subgroup: World, num_elements: int) -> Call:
    return lambda: None


def _cycle_ranks(size: int) -> Iterator[int]:
    while True:
        yield from range(size)


_COLLECTIVES: dict[str, Callable[[World, int], Call]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "send": _send,
}
KINDS: Sequence[str] = tuple(_COLLECTIVES)
