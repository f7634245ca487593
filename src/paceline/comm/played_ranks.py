"""Exchanges between the ranks of one axis within a forward: ring shift, all-gather, all-to-all, all-reduce.

`ProcessExchange` works over processes. `ThreadExchange` works between threads of one process: it is used to check a
layout before any process starts, and to reproduce an error in it without a network.
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
    """An exchange between the ranks of one axis. All ranks call every method, in the same order."""

    rank: int
    size: int
    is_imagined: bool
    """True if the other ranks are simulated, as in a replay."""

    def shift(self, tensors: Sequence[Tensor], *, shapes: Sequence[Shape]) -> Callable[[], list[Tensor]]:
        """Start sending to the next rank; the returned function waits for the previous rank's tensors, of `shapes`."""

    def gather(self, tensor: Tensor, *, shapes: Sequence[Shape]) -> list[Tensor]:
        """Return every rank's tensor, in rank order; rank r's tensor has `shapes[r]`."""

    def swap(self, rows: Tensor, *, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send the next `send[r]` rows to rank r; return the rows received, `receive[r]` from rank r, concatenated."""

    def add(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks, as a new tensor."""


class ProcessExchange:
    """An exchange over the processes of a `World`."""

    def __init__(self, *, world: World) -> None:
        self._world, self.rank, self.size = world, world.rank, world.world_size
        self.is_imagined = world.is_imagined

    def shift(self, tensors: Sequence[Tensor], *, shapes: Sequence[Shape]) -> Callable[[], list[Tensor]]:
        """Start sending to the next rank; the returned function waits for the previous rank's tensors."""
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
        """Return every rank's tensor; tensors of different sizes are sent padded to the largest."""
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
        """Send rows to every rank and return the received rows (all-to-all), with uneven counts."""
        group = self._world.group
        if group is None:
            return rows.clone()
        got = rows.new_empty(sum(receive), *rows.shape[1:])
        self._world.sends("all_to_all", rows)
        dist.all_to_all_single(got, rows.contiguous(), list(receive), list(send), group=group)
        return got

    def add(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks."""
        return self._world.all_reduce(tensor.clone(memory_format=torch.contiguous_format))


class ThreadBarrier:
    """A barrier at which the threads of one process exchange values."""

    def __init__(self, *, size: int) -> None:
        self.size = size
        self.slots: list[Any] = [None] * size
        self.barrier = threading.Barrier(size)

    def begin(self, rank: int) -> None:
        """Start the thread of this rank."""

    def end(self, rank: int) -> None:
        """End the thread of this rank."""

    def trade(self, rank: int, value: Any) -> list[Any]:
        """Return every rank's value, once all have posted one."""
        self.slots[rank] = value
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found


class SerializedThreadBarrier(ThreadBarrier):
    """A barrier that runs one thread at a time, each with its own random generator state; all start from one seed."""

    def __init__(self, *, size: int, seed: int) -> None:
        super().__init__(size=size)
        seed_all(seed)
        self._states = [get_states()] * size
        self._turn = threading.Lock()

    def begin(self, rank: int) -> None:
        """Wait for this rank's turn, and restore its generator states."""
        self._turn.acquire()
        set_states(self._states[rank])

    def end(self, rank: int) -> None:
        """Save this rank's generator states and release the turn."""
        self._states[rank] = get_states()
        self._turn.release()

    def trade(self, rank: int, value: Any) -> list[Any]:
        """Exchange values; other threads run while this one waits."""
        self.end(rank)
        try:
            return super().trade(rank, value)
        finally:
            self.begin(rank)


class ThreadExchange:
    """An exchange between threads. Received tensors are copies, as they are between processes."""

    def __init__(self, *, table: ThreadBarrier, rank: int) -> None:
        self._table, self.rank, self.size = table, rank, table.size
        self.is_imagined = False

    def shift(self, tensors: Sequence[Tensor], *, shapes: Sequence[Shape]) -> Callable[[], list[Tensor]]:
        """Return a function that gives the previous rank's tensors."""
        got = self._table.trade(self.rank, list(tensors))[(self.rank - 1) % self.size]
        assert [tuple(tensor.shape) for tensor in got] == [tuple(shape) for shape in shapes]
        return lambda: [tensor.clone() for tensor in got]

    def gather(self, tensor: Tensor, *, shapes: Sequence[Shape]) -> list[Tensor]:
        """Return every rank's tensor."""
        found = self._table.trade(self.rank, tensor)
        assert [tuple(part.shape) for part in found] == [tuple(shape) for shape in shapes]
        return [part.clone() for part in found]

    def swap(self, rows: Tensor, *, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Send rows to every rank and return the received rows (all-to-all)."""
        found = self._table.trade(self.rank, rows.split(list(send)))
        got = [parts[self.rank] for parts in found]
        assert [len(part) for part in got] == list(receive), "other rows came than this rank's route says"
        return torch.cat(got)

    def add(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks, added in rank order."""
        found = self._table.trade(self.rank, tensor)
        total: Tensor = found[0].clone()
        for part in found[1:]:
            total = total + part
        return total


def run_simulated_ranks(act: Callable[[AxisExchange], Any], *, size: int, seed: int | None = None) -> list[Any]:
    """Run `act` once per rank, each in its own thread, and return the results.

    With a `seed`, each rank has its own random generators, seeded alike; otherwise all share the process's.

    Raises:
        Exception: the first error that a rank itself raised.
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
