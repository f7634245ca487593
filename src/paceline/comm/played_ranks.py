"""What ranks of one axis hand to each other inside a forward: to the next in a ring, each to each, or to all.

`ProcessExchange` does it over processes. `ThreadExchange` does it between threads of one process: it is how a layout is
checked before any process is started, and how a mistake in it shows without a network.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.process_group import World
from paceline.torch_internals.rng import get_states, preserve_rng, seed_all, set_states

Shape = tuple[int, ...]


class AxisExchange(Protocol):
    """Every method is called by all ranks, in the same order."""

    rank: int
    size: int
    is_imagined: bool
    """Whether the other ranks are not there, as in a replay."""

    def shift(self, tensors: Sequence[Tensor], *, shapes: Sequence[Shape]) -> Callable[[], list[Tensor]]:
        """Start sending to the next rank; what is returned waits for the previous rank's, of `shapes`."""

    def gather(self, tensor: Tensor, *, shapes: Sequence[Shape]) -> list[Tensor]:
        """Everybody's tensor, in the order of ranks; rank r's has `shapes[r]`."""

    def swap(self, rows: Tensor, *, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send the next `send[r]` rows to rank r; the rows received, `receive[r]` from rank r, one after another."""

    def add(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, as a new tensor."""


class ProcessExchange:
    """Over the processes of a `World`."""

    def __init__(self, *, world: World) -> None:
        self._world, self.rank, self.size = world, world.rank, world.world_size
        self.is_imagined = world.is_imagined

    def shift(self, tensors: Sequence[Tensor], *, shapes: Sequence[Shape]) -> Callable[[], list[Tensor]]:
        """Start sending to the next rank; what is returned waits for the previous rank's."""
        group = self._world.group
        if group is None:
            return lambda: list(tensors)
        kept = [tensor.contiguous() for tensor in tensors]
        got = [tensor.new_empty(shape) for tensor, shape in zip(tensors, shapes, strict=True)]
        following, previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        sends = [dist.P2POp(dist.isend, tensor, group=group, group_peer=following) for tensor in kept]
        receives = [dist.P2POp(dist.irecv, tensor, group=group, group_peer=previous) for tensor in got]
        for tensor in kept:
            self._world.sends("send", tensor)
        works = dist.batch_isend_irecv([*sends, *receives])

        def wait() -> list[Tensor]:
            for work in works:
                work.wait()
            kept.clear()
            return got

        return wait

    def gather(self, tensor: Tensor, *, shapes: Sequence[Shape]) -> list[Tensor]:
        """Everybody's tensor: parts of different sizes travel padded to the largest."""
        group = self._world.group
        if group is None:
            return [tensor]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        flat = tensor.new_zeros(max(sizes))
        flat[: tensor.numel()] = tensor.reshape(-1)
        parts = [torch.empty_like(flat) for _ in sizes]
        self._world.sends("all_gather", flat)
        dist.all_gather(parts, flat, group=group)
        return [part[:size].view(shape) for part, size, shape in zip(parts, sizes, shapes, strict=True)]

    def swap(self, rows: Tensor, *, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Each to each, with uneven counts."""
        group = self._world.group
        if group is None:
            return rows.clone()
        got = rows.new_empty(sum(receive), *rows.shape[1:])
        self._world.sends("all_to_all", rows)
        dist.all_to_all_single(got, rows.contiguous(), list(receive), list(send), group=group)
        return got

    def add(self, tensor: Tensor) -> Tensor:
        """The sum over ranks."""
        return self._world.all_reduce(tensor.clone(memory_format=torch.contiguous_format))


class ThreadBarrier:
    """What the threads of one process lay things on for each other."""

    def __init__(self, *, size: int) -> None:
        self.size = size
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)

    def begin(self, rank: int) -> None:
        """Rank's thread starts."""

    def end(self, rank: int) -> None:
        """Rank's thread is done."""

    def trade(self, rank: int, value: Any) -> list[Any]:
        """Everybody's value, once everybody has laid down one."""
        self.slots[rank] = value
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found


class SerializedThreadBarrier(ThreadBarrier):
    """One thread at a time, each with the random generators of a process of its own; all begin from one seed."""

    def __init__(self, *, size: int, seed: int) -> None:
        super().__init__(size=size)
        seed_all(seed)
        self._states = [get_states()] * size
        self._turn = threading.Lock()

    def begin(self, rank: int) -> None:
        """Wait for the turn, and take the generators over."""
        self._turn.acquire()
        set_states(self._states[rank])

    def end(self, rank: int) -> None:
        """It is another's turn."""
        self._states[rank] = get_states()
        self._turn.release()

    def trade(self, rank: int, value: Any) -> list[Any]:
        """Others go on meanwhile."""
        self.end(rank)
        try:
            return super().trade(rank, value)
        finally:
            self.begin(rank)


class ThreadExchange:
    """Between threads. What is received is a copy, as it is between processes."""

    def __init__(self, *, table: ThreadBarrier, rank: int) -> None:
        self._table, self.rank, self.size = table, rank, table.size
        self.is_imagined = False

    def shift(self, tensors: Sequence[Tensor], *, shapes: Sequence[Shape]) -> Callable[[], list[Tensor]]:
        """The previous rank's tensors."""
        got = self._table.trade(self.rank, list(tensors))[(self.rank - 1) % self.size]
        assert [tuple(tensor.shape) for tensor in got] == [tuple(shape) for shape in shapes]
        return lambda: [tensor.clone() for tensor in got]

    def gather(self, tensor: Tensor, *, shapes: Sequence[Shape]) -> list[Tensor]:
        """Everybody's tensor."""
        found = self._table.trade(self.rank, tensor)
        assert [tuple(part.shape) for part in found] == [tuple(shape) for shape in shapes]
        return [part.clone() for part in found]

    def swap(self, rows: Tensor, *, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Each to each."""
        found = self._table.trade(self.rank, rows.split(list(send)))
        got = [parts[self.rank] for parts in found]
        assert [len(part) for part in got] == list(receive), "other rows came than this rank's route says"
        return torch.cat(got)

    def add(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in their order."""
        found = self._table.trade(self.rank, tensor)
        total: Tensor = found[0].clone()
        for part in found[1:]:
            total = total + part
        return total


def run_simulated_ranks(act: Callable[[AxisExchange], Any], *, size: int, seed: int | None = None) -> list[Any]:
    """Run `act` once a rank, each in a thread of its own, and give what each returned.

    With a `seed` each has random generators of its own, seeded alike; else all share the process's.

    Raises:
        Exception: the first one that a rank raised of itself.
    """
    if seed is None:
        return _play(act, ThreadBarrier(size=size))
    with preserve_rng():
        return _play(act, SerializedThreadBarrier(size=size, seed=seed))


def _play(act: Callable[[AxisExchange], Any], table: ThreadBarrier) -> list[Any]:
    size = table.size
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def run(rank: int) -> None:
        table.begin(rank)
        try:
            results[rank] = act(ThreadExchange(table=table, rank=rank))
        except BaseException as error:  # told to the caller below
            errors[rank] = error
            table.barrier.abort()
        finally:
            table.end(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    own = [error for error in errors if error is not None and not isinstance(error, threading.BrokenBarrierError)]
    for error in own or [error for error in errors if error is not None]:
        raise error
    return results
