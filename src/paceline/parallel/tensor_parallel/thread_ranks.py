"""Simulation of a tensor-parallel group with threads of one process, for checking a plan and for tests."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.tensor_parallel.collectives import join_pieces, piece_of
from paceline.parallel.tensor_parallel.sharding import DimSharding


class Meeting:
    """A meeting point where the threads exchange values."""

    def __init__(self, size: int) -> None:
        self._slots: list[Any] = [None] * size
        self._gate = threading.Barrier(size, timeout=60.0)

    def exchange(self, rank: int, value: Tensor) -> list[Tensor]:
        """Return every rank's value, in rank order."""
        self._slots[rank] = value.clone()  # the sender may write to it before every rank has read it
        self._gate.wait()
        found = list(self._slots)
        self._gate.wait()
        return found

    def leave(self) -> None:
        """Abort the exchange after a rank failed, so that no rank waits for it."""
        self._gate.abort()


class ThreadWire:
    """A tensor-parallel group as one thread sees it."""

    def __init__(self, *, rank: int, size: int, meeting: Meeting, sequence: bool = False) -> None:
        self.rank, self.size, self.sequence, self._meeting = rank, size, sequence, meeting
        self.told: dict[str, None] = {}

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum, added in rank order and so identical on every rank."""
        return torch.stack(self._meeting.exchange(self.rank, tensor.detach())).sum(0)

    def largest(self, tensor: Tensor) -> Tensor:
        """Return the maximum over all ranks."""
        return torch.stack(self._meeting.exchange(self.rank, tensor.detach())).amax(0)

    def join(self, tensor: Tensor, cut: DimSharding) -> Tensor:
        """Return the whole tensor, joined from every rank's piece."""
        return join_pieces(self._meeting.exchange(self.rank, tensor.detach()), cut)

    def total_piece(self, tensor: Tensor, cut: DimSharding) -> Tensor:
        """Return this rank's piece of the sum."""
        return piece_of(self.total(tensor), cut, self.rank).contiguous()

    def tell(self, what: str) -> None:
        """Record a message."""
        self.told[what] = None


def run_simulated_ranks(work: Callable[[ThreadWire], Any], *, ranks: int, sequence: bool = False) -> list[Any]:
    """Run `work` on every rank, each in a thread, and return the results.

    Threads share torch's generators, so `work` must not draw random numbers.

    Raises:
        BaseException: the first rank's error.
    """
    meeting = Meeting(ranks)
    results: list[Any] = [None] * ranks
    errors: list[BaseException | None] = [None] * ranks

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadWire(rank=rank, size=ranks, meeting=meeting, sequence=sequence))
        except BaseException as error:
            errors[rank] = error
            meeting.leave()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    own = [e for e in errors if e is not None and not isinstance(e, threading.BrokenBarrierError)]
    if own or any(errors):
        raise own[0] if own else next(e for e in errors if e is not None)
    return results
