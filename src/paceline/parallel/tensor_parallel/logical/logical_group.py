"""The tensor-parallel group of exact mode: logical ranks, of which each process computes several.

The number of logical ranks is fixed, and a power of two. Sums over them follow one binary tree: neighbouring terms are
added, then neighbouring sums, and so on. Each process adds the terms of its own logical ranks, and the processes add
their sums pairwise. So the tree is the same for any number of processes that divides the number of logical ranks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from paceline.comm.process_group import World
from paceline.errors import LayoutError, PacelineError, Problems
from paceline.parallel.tensor_parallel.logical.logical_shards import LogicalShards
from paceline.parallel.tensor_parallel.once_differentiable import once_differentiable
from paceline.parallel.tensor_parallel.sharding import DimSharding, concat_shards, slice_shard

_TAGS = (7, 8)  # two sums in turn: a rank may send the next sum before its partner has received the previous one


class LogicalGroup:
    """A group of `size` logical ranks, of which `local_ranks` are computed by this process.

    `rank` is the first of them. The tensors that the methods take and return are `LogicalShards`, or full tensors.
    """

    def __init__(self, world: World, *, size: int) -> None:
        self._world = world
        self.sequence = False
        self.size = size
        self.ranks_per_process = size // world.world_size
        self.local_ranks = range(world.rank * self.ranks_per_process, (world.rank + 1) * self.ranks_per_process)
        self.rank = self.local_ranks[0]
        self._num_sums = 0
        self.notes: dict[str, None] = {}

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over all logical ranks."""
        return self.sum_terms(_shards_of(tensor))

    def sum_terms(self, terms: Sequence[Tensor]) -> Tensor:
        """Return the sum over all logical ranks of one term each, in the order of the binary tree."""
        return self._sum_over_processes(add_pairwise(terms).contiguous())

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """Return the maximum over all logical ranks."""
        shards = _shards_of(tensor)
        maximum = shards[0].clone()
        for shard in shards[1:]:
            maximum = torch.maximum(maximum, shard)
        return self._world.all_reduce(maximum.contiguous(), op="max")

    def all_gather(self, tensor: Tensor, sharding: DimSharding) -> Tensor:
        """Return the full tensor from the shards of all logical ranks."""
        return self.gather_terms(_shards_of(tensor), sharding)

    def gather_terms(self, shards: Sequence[Tensor], sharding: DimSharding) -> Tensor:
        """Return the full tensor from the shards of all logical ranks, of which this process passes its own."""
        if len(shards) == self.size:
            return concat_shards(list(shards), sharding)
        shapes = [
            [sharding.local_size(rank) if d == sharding.dim else n for d, n in enumerate(shards[0].shape)]
            for rank in range(self.size)
        ]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        count = self.ranks_per_process
        flat = self._world.all_gather(
            torch.cat([shard.reshape(-1) for shard in shards]),
            shapes=[(sum(sizes[start : start + count]),) for start in range(0, self.size, count)],
        )
        parts = torch.cat(flat).split(sizes)
        return concat_shards([part.view(shape) for part, shape in zip(parts, shapes, strict=True)], sharding)

    def reduce_scatter(self, tensor: Tensor, sharding: DimSharding) -> Tensor:
        """Return this process's shards of the sum over all logical ranks."""
        return self.take_shards(self.all_reduce(tensor), sharding)

    def take_shards(self, full_tensor: Tensor, sharding: DimSharding) -> LogicalShards:
        """Return this process's shards of a full tensor."""
        return LogicalShards.from_shards([slice_shard(full_tensor, sharding, rank) for rank in self.local_ranks])

    def record_note(self, note: str) -> None:
        """Record a note; equal notes are recorded once."""
        self.notes[note] = None

    def _sum_over_processes(self, total: Tensor) -> Tensor:
        """Return the sum over the processes. In each round two processes exchange their sums, and both add them.

        Both get the same bits, because a + b equals b + a.
        """
        world, distance, tag = self._world, 1, _TAGS[self._num_sums % 2]
        self._num_sums += 1
        while distance < world.world_size:
            partner, received = world.rank ^ distance, torch.empty_like(total)
            sending = world.start_send(total, to=partner, tag=tag)
            world.start_receive(received, source=partner, tag=tag).wait()
            sending.wait()
            total, distance = received.add_(total), 2 * distance
        return total


@contextmanager
def explain_logical_shards(count: int | None) -> Iterator[None]:
    """Return a context in which errors about `count` tensor-parallel ranks name the setting of logical shards."""
    try:
        yield
    except Problems as error:
        raise Problems([_name_setting(problem, count) for problem in error.problems]) from error
    except LayoutError as error:
        raise _name_setting(error, count) from error


def _name_setting(error: PacelineError, count: int | None) -> PacelineError:
    if count is None or f"tp={count}" not in error.what:
        return error
    return LayoutError(
        error.what.replace(f"tp={count}", f"train.tensor_shards={count}"),
        where=error.where,
        cause=f"exact mode splits each weight into the {count} shards of train.tensor_shards, for any tp",
        hint=error.hint.replace("tp=", "--train.tensor_shards "),
    )


def add_pairwise(terms: Sequence[Tensor]) -> Tensor:
    """Return the sum of a power of two of terms: of neighbours, then of neighbouring sums, and so on."""
    sums = list(terms)
    if len(sums) == 1:
        return sums[0]
    sums = [torch.add(left, right) for left, right in zip(sums[::2], sums[1::2], strict=True)]
    while len(sums) > 1:
        sums = [left.add_(right) for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0]


def _shards_of(tensor: Tensor) -> tuple[Tensor, ...]:
    assert isinstance(tensor, LogicalShards)
    return tensor.shards


class _CopyToLogicalShards(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, full_tensor: Tensor, group: LogicalGroup) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(full_tensor.detach() for _ in group.local_ranks)

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.group.sum_terms(grads), None


class _SumLogicalShards(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, group: LogicalGroup, *terms: Tensor) -> Tensor:
        ctx.num_terms = len(terms)
        return group.sum_terms(terms)

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, *(grad for _ in range(ctx.num_terms))


class _TakeLogicalShards(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, full_tensor: Tensor, sharding: DimSharding, group: LogicalGroup) -> tuple[Tensor, ...]:
        ctx.sharding, ctx.group = sharding, group
        return tuple(slice_shard(full_tensor, sharding, rank).contiguous() for rank in group.local_ranks)

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.group.gather_terms(grads, ctx.sharding), None, None


class _GatherLogicalShards(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, group: LogicalGroup, sharding: DimSharding, *shards: Tensor) -> Tensor:
        ctx.sharding, ctx.group = sharding, group
        return group.gather_terms(shards, sharding)

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None, None, *(slice_shard(grad, ctx.sharding, rank).contiguous() for rank in ctx.group.local_ranks)


class _SplitParameter(torch.autograd.Function):
    """The split of this process's piece of a parameter into logical shards, which are contiguous."""

    @staticmethod
    @override
    def forward(ctx: Any, parameter: Tensor, sharding: DimSharding) -> tuple[Tensor, ...]:
        ctx.sharding = sharding
        return tuple(slice_shard(parameter.detach(), sharding, rank).contiguous() for rank in range(sharding.ranks))

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return concat_shards(list(grads), ctx.sharding), None


def copy_to_logical_shards(full_tensor: Tensor, group: LogicalGroup) -> LogicalShards:
    """Return a full tensor as the input of each logical shard: identity in forward, tree sum in backward."""
    return LogicalShards.from_shards(_CopyToLogicalShards.apply(full_tensor, group))  # type: ignore[no-untyped-call]


def sum_logical_shards(partial: Tensor, group: LogicalGroup) -> Tensor:
    """Sum the partial values of all logical ranks: tree sum in forward, identity in backward."""
    result: Tensor = _SumLogicalShards.apply(group, *_shards_of(partial))  # type: ignore[no-untyped-call]
    return result


def take_logical_shards(full_tensor: Tensor, sharding: DimSharding, group: LogicalGroup) -> LogicalShards:
    """Return this process's shards of a full tensor; backward all-gathers the gradients of the shards."""
    return LogicalShards.from_shards(_TakeLogicalShards.apply(full_tensor, sharding, group))  # type: ignore[no-untyped-call]


def gather_logical_shards(local: Tensor, sharding: DimSharding, group: LogicalGroup) -> Tensor:
    """Return the full tensor from the shards of all logical ranks."""
    result: Tensor = _GatherLogicalShards.apply(group, sharding, *_shards_of(local))  # type: ignore[no-untyped-call]
    return result


def split_parameter(parameter: Tensor, sharding: DimSharding, group: LogicalGroup) -> LogicalShards:
    """Return the logical shards of this process's piece of a parameter; they are split when they are first read."""
    shape = [sharding.local_size(group.rank) if d == sharding.dim else n for d, n in enumerate(parameter.shape)]
    if group.ranks_per_process == 1:
        return LogicalShards.from_shards([parameter])
    local_sharding = sharding.select_ranks(group.local_ranks)

    def split() -> Sequence[Tensor]:
        shards: Sequence[Tensor] = _SplitParameter.apply(parameter, local_sharding)  # type: ignore[no-untyped-call]
        return shards

    return LogicalShards.from_split(split, like=parameter, shape=shape)
