"""Messages between ranks by hand: point-to-point and collectives, with each rank's numbers before and after.

    python examples/by_hand/send.py

Each parallel layout uses some of these operations. Rank r begins with the numbers 10r, 10r + 1, 10r + 2, one for each
rank. `OPERATIONS` lists each operation next to the same computation in one process, on the numbers of all ranks. The
program compares the two results.

A collective is called by all ranks of a group, in the same order. If one rank does not call it, the others wait until
the timeout. Most hangs begin this way.
"""

import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from harness import choose_device, compare, flatten, run_ranks
from torch import Tensor

RANKS = 3
ROOT = 0


def send_recv(mine: Tensor, rank: int, ranks: int) -> Tensor:
    """A chain: `recv` waits for the message; `send` waits until the tensor may be changed again."""
    if rank > 0:
        dist.recv(mine, rank - 1)
    if rank < ranks - 1:
        dist.send(mine, rank + 1)
    return mine


def isend_irecv(mine: Tensor, rank: int, ranks: int) -> Tensor:
    """A ring. If every rank called `send` first, all could wait forever, so each starts both and then waits."""
    received = torch.empty_like(mine)
    operations = [
        dist.P2POp(dist.isend, mine, (rank + 1) % ranks),
        dist.P2POp(dist.irecv, received, (rank - 1) % ranks),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return received


def broadcast(mine: Tensor, rank: int, ranks: int) -> Tensor:
    dist.broadcast(mine, ROOT)
    return mine


def scatter(mine: Tensor, rank: int, ranks: int) -> Tensor:
    part = torch.empty_like(mine[:1])
    dist.scatter(part, list(mine.chunk(ranks)) if rank == ROOT else None, ROOT)
    return part


def gather(mine: Tensor, rank: int, ranks: int) -> Tensor:
    parts = [torch.empty_like(mine[:1]) for _ in range(ranks)] if rank == ROOT else None
    dist.gather(mine[:1].clone(), parts, ROOT)
    return torch.cat(parts) if parts else mine


def all_gather(mine: Tensor, rank: int, ranks: int) -> Tensor:
    parts = [torch.empty_like(mine[:1]) for _ in range(ranks)]
    dist.all_gather(parts, mine[:1].clone())
    return torch.cat(parts)


def reduce(mine: Tensor, rank: int, ranks: int) -> Tensor:
    total = mine.clone()  # on the other ranks its content is undefined afterwards
    dist.reduce(total, ROOT)
    return total if rank == ROOT else mine


def all_reduce(mine: Tensor, rank: int, ranks: int) -> Tensor:
    dist.all_reduce(mine)
    return mine


def reduce_scatter(mine: Tensor, rank: int, ranks: int) -> Tensor:
    part = torch.empty_like(mine[:1])
    dist.reduce_scatter(part, list(mine.chunk(ranks)))
    return part


def all_to_all(mine: Tensor, rank: int, ranks: int) -> Tensor:
    received = torch.empty_like(mine)
    dist.all_to_all_single(received, mine)  # part j goes to rank j
    return received


class Operation(NamedTuple):
    """An operation, its use, and the expected numbers of rank r, computed in one process from `all`."""

    run: Callable[[Tensor, int, int], Tensor]
    use: str
    expect: Callable[[Tensor, int], Tensor]  # `all[i, j]` is number j of rank i


OPERATIONS = [
    Operation(send_recv, "rank 0's numbers, from rank to rank", lambda all, r: all[0]),
    Operation(isend_irecv, "a ring; pipeline stages and ring attention", lambda all, r: all[r - 1]),
    Operation(broadcast, "one rank's numbers on all; the same start weights", lambda all, r: all[ROOT]),
    Operation(scatter, "one rank deals its parts out", lambda all, r: all[ROOT, r : r + 1]),
    Operation(gather, "one rank gets the first number of each", lambda all, r: all[:, 0] if r == ROOT else all[r]),
    Operation(all_gather, "all ranks get them; sharded weights before use", lambda all, r: all[:, 0]),
    Operation(reduce, "one rank gets the sum", lambda all, r: all.sum(0) if r == ROOT else all[r]),
    Operation(all_reduce, "all ranks get the sum; gradients of data parallelism", lambda all, r: all.sum(0)),
    Operation(reduce_scatter, "each rank gets its part of the sum; fsdp", lambda all, r: all.sum(0)[r : r + 1]),
    Operation(all_to_all, "number j of rank i becomes number i of rank j; experts", lambda all, r: all[:, r]),
]


def make_numbers(rank: int, ranks: int) -> Tensor:
    return torch.arange(ranks, dtype=torch.float32) + 10 * rank


def run_all(rank: int, ranks: int) -> list[Tensor]:
    device = choose_device(rank, ranks)
    return [operation.run(make_numbers(rank, ranks).to(device), rank, ranks).cpu() for operation in OPERATIONS]


def show(numbers: Tensor) -> str:
    return "[" + " ".join(f"{number:2.0f}" for number in numbers.tolist()) + "]"


if __name__ == "__main__":
    found = run_ranks(run_all, RANKS)
    before = torch.stack([make_numbers(rank, RANKS) for rank in range(RANKS)])
    rows = {}
    for number, (run, use, expect) in enumerate(OPERATIONS):
        print(f"{run.__name__}: {use}")
        for rank in range(RANKS):
            print(f"  rank {rank}  {show(before[rank])} -> {show(found[rank][number])}")
        ours = [found[rank][number] for rank in range(RANKS)]
        rows[run.__name__] = flatten(expect(before, rank) for rank in range(RANKS)), flatten(ours)
    sys.exit(compare(rows))
