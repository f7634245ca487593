"""Collectives of a tensor-parallel group, plain and as autograd functions.

Every function keeps one invariant: the gradient of a whole value is whole and equal on all ranks, and the gradient of
a sharded value is the rank's own shard. (They are Megatron-LM's f and g, and their relatives.)
"""

from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.comm.process_group import World
from paceline.parallel.tensor_parallel.once_differentiable import once
from paceline.parallel.tensor_parallel.sharding import DimSharding
from paceline.torch_internals.private_api import tensor_version


class TensorParallelGroup(Protocol):
    """The collectives of one tensor-parallel group; with `sequence`, sums return as shards of the sequence."""

    rank: int
    size: int
    sequence: bool

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum over all ranks; the argument may be overwritten."""

    def largest(self, tensor: Tensor) -> Tensor:
        """Return the maximum over all ranks."""

    def join(self, tensor: Tensor, cut: DimSharding) -> Tensor:
        """Return the whole tensor, joined from every rank's piece."""

    def total_piece(self, tensor: Tensor, cut: DimSharding) -> Tensor:
        """Return this rank's piece of the sum over all ranks."""

    def tell(self, what: str) -> None:
        """Note once that a whole tensor was gathered unnecessarily."""


class WorldWire:
    """A tensor-parallel group whose ranks are those of a `World`: processes, or threads of this one."""

    def __init__(self, world: World, *, sequence: bool = False) -> None:
        self._world = world
        self.sequence = sequence
        self.rank, self.size = world.rank, world.world_size
        self.told: dict[str, None] = {}

    def total(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks with an all-reduce."""
        return self._world.all_reduce(tensor.contiguous())

    def largest(self, tensor: Tensor) -> Tensor:
        """Return the maximum over all ranks with an all-reduce."""
        return self._world.all_reduce(tensor.contiguous(), op="max")

    def join(self, tensor: Tensor, cut: DimSharding) -> Tensor:
        """Return the whole tensor with an all-gather; pieces of unequal size are padded for the transfer."""
        if self.size == 1:
            return tensor
        sizes = [cut.held(rank) for rank in range(self.size)]
        own = tensor.movedim(cut.dim, 0).contiguous()
        pieces = self._world.all_gather(own, shapes=[(size, *own.shape[1:]) for size in sizes])
        return join_pieces([piece.movedim(0, cut.dim) for piece in pieces], cut)

    def total_piece(self, tensor: Tensor, cut: DimSharding) -> Tensor:
        """Reduce-scatter the tensor; use an all-reduce if the pieces are unequal or in several sections."""
        if self.size == 1:
            return tensor
        sizes = {cut.held(rank) for rank in range(self.size)}
        if len(sizes) > 1 or len(cut.sections) > 1:
            return piece_of(self.total(tensor.clone()), cut, self.rank).contiguous()
        own = self._world.reduce_scatter(tensor.movedim(cut.dim, 0).contiguous())
        return own.movedim(0, cut.dim).contiguous()

    def tell(self, what: str) -> None:
        """Record a message for the notes."""
        self.told[what] = None


def piece_of(whole: Tensor, cut: DimSharding, rank: int) -> Tensor:
    """Return a rank's piece of a whole tensor."""
    parts = [whole.narrow(cut.dim, start, stop - start) for start, stop in cut.ranges(rank)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, cut.dim)


def join_pieces(pieces: list[Tensor], cut: DimSharding) -> Tensor:
    """Return the whole tensor, joined from all ranks' pieces."""
    if len(cut.sections) == 1:
        return torch.cat(pieces, cut.dim)
    found, offsets = [], [0] * len(pieces)
    for fences in cut.sections:
        for rank, own in enumerate(pieces):
            length = fences[rank + 1] - fences[rank]
            found.append(own.narrow(cut.dim, offsets[rank], length))
            offsets[rank] += length
    return torch.cat(found, cut.dim)


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, wire: TensorParallelGroup) -> Tensor:
        ctx.wire = wire
        return whole.detach()  # not a view: it would reference `whole`, which caches it, so neither would ever be freed

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.wire.total(grad.clone()), None


class _ReduceOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, wire: TensorParallelGroup) -> Tensor:
        return wire.total(partial.clone())

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _TakeOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, cut: DimSharding, wire: TensorParallelGroup) -> Tensor:
        ctx.cut, ctx.wire = cut, wire
        return piece_of(whole, cut, wire.rank).contiguous()

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.wire.join(grad, ctx.cut), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, cut: DimSharding, wire: TensorParallelGroup, partial: bool) -> Tensor:
        ctx.cut, ctx.wire, ctx.partial = cut, wire, partial
        return wire.join(local, cut)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.partial:
            return ctx.wire.total_piece(grad, ctx.cut), None, None, None
        return piece_of(grad, ctx.cut, ctx.wire.rank).contiguous(), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, cut: DimSharding, wire: TensorParallelGroup) -> Tensor:
        ctx.cut, ctx.wire = cut, wire
        return wire.total_piece(partial, cut)

    @staticmethod
    @once
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.wire.join(grad, ctx.cut), None, None


def copy_in(whole: Tensor, wire: TensorParallelGroup) -> Tensor:
    """Return a whole value for sharded work to read: identity in forward, all-reduce in backward.

    The gradient is summed once, however often the value is read.
    """
    if not (whole.requires_grad and torch.is_grad_enabled()):
        return whole
    if whole.is_leaf:
        return _CopyIn.apply(whole, wire)  # type: ignore[no-any-return, no-untyped-call]
    known = getattr(whole, "_paceline_copied", None)
    if known is not None and known[0] is wire and known[1] == tensor_version(whole):
        copied: Tensor = known[2]
        return copied
    copied = _CopyIn.apply(whole, wire)  # type: ignore[no-untyped-call]
    whole._paceline_copied = (wire, tensor_version(whole), copied)  # type: ignore[attr-defined]
    return copied


def reduce_out(partial: Tensor, wire: TensorParallelGroup) -> Tensor:
    """Sum the partial values of all ranks: all-reduce in forward, identity in backward."""
    found: Tensor = _ReduceOut.apply(partial, wire)  # type: ignore[no-untyped-call]
    return found


def take_own(whole: Tensor, cut: DimSharding, wire: TensorParallelGroup) -> Tensor:
    """Return this rank's piece of a whole value; backward all-gathers the pieces' gradients."""
    found: Tensor = _TakeOwn.apply(whole, cut, wire)  # type: ignore[no-untyped-call]
    return found


def gather(local: Tensor, cut: DimSharding, wire: TensorParallelGroup, *, partial: bool = False) -> Tensor:
    """Return the whole of a sharded value.

    Set `partial` if sharded work reads it, so that backward sums its gradients over the ranks.
    """
    found: Tensor = _Gather.apply(local, cut, wire, partial)  # type: ignore[no-untyped-call]
    return found


def scatter(partial: Tensor, cut: DimSharding, wire: TensorParallelGroup) -> Tensor:
    """Return this rank's piece of the sum of all ranks' partial values; backward all-gathers."""
    found: Tensor = _Scatter.apply(partial, cut, wire)  # type: ignore[no-untyped-call]
    return found
