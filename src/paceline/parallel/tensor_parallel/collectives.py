"""Collectives of a tensor-parallel group, plain and as autograd functions.

The autograd functions keep one invariant: the gradient of a full tensor is full and equal on all ranks, and the
gradient of a shard is the shard of the full gradient. Full tensors that sharded operations read are the exception: each
rank computes only a part of their gradient. `copy_to_parallel_region` and `gather_shards` (with `has_partial_grad`)
return such tensors, and their backward sums the parts over the ranks. `copy_to_parallel_region` and
`reduce_from_parallel_region` are the functions f and g of Megatron-LM.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from paceline.comm.process_group import World
from paceline.parallel.tensor_parallel.logical.logical_group import (
    LogicalGroup,
    copy_to_logical_shards,
    gather_logical_shards,
    split_parameter,
    sum_logical_shards,
    take_logical_shards,
)
from paceline.parallel.tensor_parallel.logical.logical_shards import LogicalShards, ShardValues
from paceline.parallel.tensor_parallel.once_differentiable import once_differentiable
from paceline.parallel.tensor_parallel.sharding import DimSharding, concat_shards, slice_shard
from paceline.torch_internals.private_api import tensor_version


class TensorParallelGroup(Protocol):
    """The collectives of one tensor-parallel group of `size` ranks, as seen by the rank `rank`.

    With `sequence`, the three-dimensional sums of linear and embedding layers are sharded along the sequence (sequence
    parallelism).
    """

    rank: int
    size: int
    sequence: bool

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks; the argument may be overwritten."""

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """Return the maximum over all ranks."""

    def all_gather(self, tensor: Tensor, sharding: DimSharding) -> Tensor:
        """Return the full tensor from the shards of all ranks."""

    def reduce_scatter(self, tensor: Tensor, sharding: DimSharding) -> Tensor:
        """Return this rank's shard of the sum over all ranks."""

    def record_note(self, note: str) -> None:
        """Record a note for the user; equal notes are recorded once."""


class WorldGroup:
    """A tensor-parallel group of the ranks of a `World`: processes, or threads of this process."""

    def __init__(self, world: World, *, sequence: bool = False) -> None:
        self._world = world
        self.sequence = sequence
        self.rank, self.size = world.rank, world.world_size
        self.notes: dict[str, None] = {}

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks with an all-reduce."""
        return self._world.all_reduce(tensor.contiguous())

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """Return the maximum over all ranks with an all-reduce."""
        return self._world.all_reduce(tensor.contiguous(), op="max")

    def all_gather(self, tensor: Tensor, sharding: DimSharding) -> Tensor:
        """Return the full tensor with an all-gather; shards of unequal size are padded for the transfer."""
        if self.size == 1:
            return tensor
        sizes = [sharding.local_size(rank) for rank in range(self.size)]
        local = tensor.movedim(sharding.dim, 0).contiguous()
        shards = self._world.all_gather(local, shapes=[(size, *local.shape[1:]) for size in sizes])
        return concat_shards([shard.movedim(0, sharding.dim) for shard in shards], sharding)

    def reduce_scatter(self, tensor: Tensor, sharding: DimSharding) -> Tensor:
        """Reduce-scatter the tensor; use an all-reduce if the shards are unequal or have several sections."""
        if self.size == 1:
            return tensor
        sizes = {sharding.local_size(rank) for rank in range(self.size)}
        if len(sizes) > 1 or len(sharding.sections) > 1:
            return slice_shard(self.all_reduce(tensor.clone()), sharding, self.rank).contiguous()
        local = self._world.reduce_scatter(tensor.movedim(sharding.dim, 0).contiguous())
        return local.movedim(0, sharding.dim).contiguous()

    def record_note(self, note: str) -> None:
        """Record a note; equal notes are recorded once."""
        self.notes[note] = None


class _CopyToParallelRegion(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, full_tensor: Tensor, group: TensorParallelGroup) -> Tensor:
        ctx.group = group
        # `view_as` would return a view, whose `_base` is the input. The input caches the result, so this would be a
        # reference cycle. The result of `detach` has no `_base`.
        return full_tensor.detach()

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.group.all_reduce(grad.clone()), None


class _ReduceFromParallelRegion(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, partial: Tensor, group: TensorParallelGroup) -> Tensor:
        return group.all_reduce(partial.clone())

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _TakeLocalShard(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, full_tensor: Tensor, sharding: DimSharding, group: TensorParallelGroup) -> Tensor:
        ctx.sharding, ctx.group = sharding, group
        return slice_shard(full_tensor, sharding, group.rank).contiguous()

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.group.all_gather(grad, ctx.sharding), None, None


class _GatherShards(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any, local: Tensor, sharding: DimSharding, group: TensorParallelGroup, has_partial_grad: bool
    ) -> Tensor:
        ctx.sharding, ctx.group, ctx.has_partial_grad = sharding, group, has_partial_grad
        return group.all_gather(local, sharding)

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.has_partial_grad:
            return ctx.group.reduce_scatter(grad, ctx.sharding), None, None, None
        return slice_shard(grad, ctx.sharding, ctx.group.rank).contiguous(), None, None, None


class _ReduceScatterPartials(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, partial: Tensor, sharding: DimSharding, group: TensorParallelGroup) -> Tensor:
        ctx.sharding, ctx.group = sharding, group
        return group.reduce_scatter(partial, sharding)

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.group.all_gather(grad, ctx.sharding), None, None


def copy_to_parallel_region(full_tensor: Tensor, group: TensorParallelGroup) -> Tensor:
    """Return a full tensor as the input of sharded operations: identity in forward, all-reduce in backward.

    The result is cached on the tensor, unless it is a leaf, so that several reads need only one all-reduce in backward.
    """
    if not (full_tensor.requires_grad and torch.is_grad_enabled()):
        return full_tensor
    if full_tensor.is_leaf:
        return _copy_to_parallel_region(full_tensor, group)
    cached = getattr(full_tensor, "_paceline_copied", None)
    if cached is not None and cached[0] is group and cached[1] == tensor_version(full_tensor):
        copied: Tensor = cached[2]
        return copied
    copied = _copy_to_parallel_region(full_tensor, group)
    full_tensor._paceline_copied = (group, tensor_version(full_tensor), copied)  # type: ignore[attr-defined]
    return copied


def _copy_to_parallel_region(full_tensor: Tensor, group: TensorParallelGroup) -> Tensor:
    if isinstance(group, LogicalGroup):
        return copy_to_logical_shards(full_tensor, group)
    return _CopyToParallelRegion.apply(full_tensor, group)  # type: ignore[no-any-return, no-untyped-call]


def reduce_from_parallel_region(partial: Tensor, group: TensorParallelGroup) -> Tensor:
    """Sum the partial values of all ranks: all-reduce in forward, identity in backward."""
    if isinstance(group, LogicalGroup):
        return sum_logical_shards(partial, group)
    result: Tensor = _ReduceFromParallelRegion.apply(partial, group)  # type: ignore[no-untyped-call]
    return result


def take_local_shard(full_tensor: Tensor, sharding: DimSharding, group: TensorParallelGroup) -> Tensor:
    """Return this rank's shard of a full tensor; backward all-gathers the gradients of the shards."""
    if isinstance(group, LogicalGroup):
        return take_logical_shards(full_tensor, sharding, group)
    result: Tensor = _TakeLocalShard.apply(full_tensor, sharding, group)  # type: ignore[no-untyped-call]
    return result


def gather_shards(
    local: Tensor, sharding: DimSharding, group: TensorParallelGroup, *, has_partial_grad: bool = False
) -> Tensor:
    """Return the full tensor from the shards of all ranks.

    Set `has_partial_grad` if sharded operations read the result: each rank then computes only a part of its gradient,
    and backward sums these parts over the ranks.
    """
    if isinstance(group, LogicalGroup):
        full_tensor = gather_logical_shards(local, sharding, group)
        return copy_to_parallel_region(full_tensor, group) if has_partial_grad else full_tensor
    result: Tensor = _GatherShards.apply(local, sharding, group, has_partial_grad)  # type: ignore[no-untyped-call]
    return result


def reduce_scatter_partials(partial: Tensor, sharding: DimSharding, group: TensorParallelGroup) -> Tensor:
    """Return this rank's shard of the sum of all ranks' partial values; backward all-gathers."""
    result: Tensor = _ReduceScatterPartials.apply(partial, sharding, group)  # type: ignore[no-untyped-call]
    return result


def slice_local(full_tensor: Tensor, sharding: DimSharding, group: TensorParallelGroup) -> Tensor:
    """Return this rank's shard of a full tensor, without a gradient."""
    if isinstance(group, LogicalGroup):
        return group.take_shards(full_tensor, sharding)
    return slice_shard(full_tensor, sharding, group.rank)


def local_piece(parameter: Tensor, sharding: DimSharding, group: TensorParallelGroup) -> Tensor:
    """Return the piece of a parameter that this rank stores, as sharded operations read it."""
    return split_parameter(parameter, sharding, group) if isinstance(group, LogicalGroup) else parameter


def map_ranks(function: Callable[[int], Any], group: TensorParallelGroup) -> Any:
    """Return an argument of a function on shards, which is `function(rank)` on each rank."""
    if isinstance(group, LogicalGroup):
        return ShardValues([function(rank) for rank in group.local_ranks])
    return function(group.rank)


def map_ranks_to_index(function: Callable[[int], int], group: TensorParallelGroup) -> Any:
    """Return an integer that is `function(rank)` on each rank, for arithmetic with tensors."""
    if isinstance(group, LogicalGroup):
        return LogicalShards.from_shards([torch.tensor(function(rank)) for rank in group.local_ranks])
    return function(group.rank)
