"""All ranks of a tensor-parallel group as threads of one process: for trying a plan, and for tests."""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.parallel.tensor_parallel.collectives import join_pieces, piece_of
from paceline.parallel.tensor_parallel.sharding import DimSharding


class Meeting:
    """Where the threads put what they say and read what the others said."""

    def __init__(self, size: int) -> None:
        self._slots: list[Any] = [None] * size
        self._gate = threading.Barrier(size, timeout=60.0)

    def exchange(self, rank: int, value: Tensor) -> list[Tensor]:
        """Everybody's value, in the order of ranks."""
        self._slots[rank] = value.clone()  # who said it may write to it before everybody has read it
        self._gate.wait()
        found = list(self._slots)
        self._gate.wait()
        return found

    def leave(self) -> None:
        """A rank failed: nobody waits for it."""
        self._gate.abort()


class ThreadWire:
    """One thread's end."""

    def __init__(self, *, rank: int, size: int, meeting: Meeting, sequence: bool = False) -> None:
        self.rank, self.size, self.sequence, self._meeting = rank, size, sequence, meeting
        self.told: dict[str, None] = {}

    def total(self, tensor: Tensor) -> Tensor:
        """Added in the order of ranks, the same on every rank."""
        return torch.stack(self._meeting.exchange(self.rank, tensor.detach())).sum(0)

    def largest(self, tensor: Tensor) -> Tensor:
        """The maximum."""
        return torch.stack(self._meeting.exchange(self.rank, tensor.detach())).amax(0)

    def join(self, tensor: Tensor, cut: DimSharding) -> Tensor:
        """The whole."""
        return join_pieces(self._meeting.exchange(self.rank, tensor.detach()), cut)

    def total_piece(self, tensor: Tensor, cut: DimSharding) -> Tensor:
        """A piece of the sum."""
        return piece_of(self.total(tensor), cut, self.rank).contiguous()

    def tell(self, what: str) -> None:
        """Kept."""
        self.told[what] = None


def run_simulated_ranks(work: Callable[[ThreadWire], Any], *, ranks: int, sequence: bool = False) -> list[Any]:
    """Every rank's result. Threads share torch's generators, so what draws random numbers does not belong here.

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
