"""Pack the rows of several parameters into a flat buffer, for one reduce-scatter or all-gather.

The buffer has one chunk for each rank of the shard group, all of one size. A parameter that is split by rows has the
same offset in every chunk, so that its full tensor is copied in or out at once. If a rank has fewer rows, the rest of
the parameter's space in its chunk stays unused. After these parameters, each chunk has the parameters that its rank
alone owns.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from paceline.comm.process_group import ALL_GATHER, REDUCE_SCATTER, World
from paceline.parallel.module_access.parameters import NamedParameter
from paceline.parallel.sharding.row_shards import RowSplit
from paceline.torch_internals.private_api import copy_all


class FlatBufferLayout:
    """The layout of the parameters of one bucket, `members`, in a flat buffer.

    `chunk_numel` is the number of elements in one rank's chunk. A `position` is the index of a parameter in `members`.
    """

    def __init__(
        self, members: Sequence[NamedParameter], *, row_splits: Mapping[str, RowSplit], num_shards: int
    ) -> None:
        self.members = list(members)
        self.row_splits = [row_splits[member.name] for member in members]
        self.num_shards = num_shards
        shared_sizes = [split.numel(0) if split.owner is None else 0 for split in self.row_splits]
        shared_offsets = list(accumulate(shared_sizes, initial=0))
        ends = [shared_offsets[-1]] * num_shards
        self._offsets = shared_offsets[:-1]
        for position, split in enumerate(self.row_splits):
            if split.owner is not None:
                self._offsets[position] = ends[split.owner]
                ends[split.owner] += split.numel(split.owner)
        self.chunk_numel = max(ends)

    def allocate(self, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a zero-filled buffer of shape (num_shards, chunk_numel)."""
        return torch.zeros(self.num_shards, self.chunk_numel, dtype=dtype, device=device)

    def member_views(self, chunk: Tensor, *, shard_rank: int) -> list[Tensor]:
        """Return flat views of a rank's rows in its chunk, one per parameter."""
        sizes = [split.numel(shard_rank) for split in self.row_splits]
        return [chunk.narrow(0, start if size else 0, size) for start, size in zip(self._offsets, sizes, strict=True)]

    def matching_views(self, position: int, buffer: Tensor, tensor: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return as few pairs of equal-shaped views as possible, of the buffer and of a parameter's contiguous tensor.

        Together the views cover all elements of the parameter.
        """
        row_split, offset, flat = self.row_splits[position], self._offsets[position], tensor.view(-1)
        if row_split.owner is not None:
            return [(buffer[row_split.owner].narrow(0, offset, flat.numel()), flat)] if flat.numel() else []
        shard_numel = row_split.numel(0)
        num_full_shards = flat.numel() // shard_numel if shard_numel else 0
        pairs = (
            [
                (
                    buffer[:num_full_shards, offset : offset + shard_numel],
                    flat[: num_full_shards * shard_numel].view(num_full_shards, shard_numel),
                )
            ]
            if num_full_shards
            else []
        )
        remainder = flat[num_full_shards * shard_numel :]  # the rows of the last rank, if it has fewer
        if not remainder.numel():
            return pairs
        return [*pairs, (buffer[num_full_shards].narrow(0, offset, remainder.numel()), remainder)]

    def views_by_rank(self, position: int, buffer: Tensor, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pairs of flat views of the buffer and of a parameter's tensor, by rank; strided rows are copied."""
        for shard_rank, row_split in enumerate([self.row_splits[position]] * self.num_shards):
            if row_split.numel(shard_rank):
                buffer_view = buffer[shard_rank].narrow(0, self._offsets[position], row_split.numel(shard_rank))
                yield buffer_view, row_split.shard_view(tensor, shard_rank).reshape(-1)

    def pack_chunk(self, chunk: Tensor, local_tensors: Sequence[Tensor], *, shard_rank: int) -> None:
        """Copy a rank's local tensors into its chunk."""
        pairs = [
            (view, tensor)
            for view, tensor in zip(self.member_views(chunk, shard_rank=shard_rank), local_tensors, strict=True)
            if tensor.numel()
        ]
        copy_all([view.view(tensor.shape) for view, tensor in pairs], [tensor for _, tensor in pairs])

    def unpack_into(self, buffer: Tensor, full_tensors: Sequence[Tensor]) -> None:
        """Copy all ranks' rows from the buffer into the full tensors."""
        pairs = []
        for position, full_tensor in enumerate(full_tensors):
            if full_tensor.is_contiguous():
                pairs += self.matching_views(position, buffer, full_tensor)
            else:
                self._unpack_strided(position, buffer, full_tensor)
        copy_all([target for _, target in pairs], [source for source, _ in pairs])

    def _unpack_strided(self, position: int, buffer: Tensor, full_tensor: Tensor) -> None:
        row_split = self.row_splits[position]
        for shard_rank in range(self.num_shards):
            rows = row_split.shard_view(full_tensor, shard_rank)
            if rows.numel():
                rows.copy_(self.member_views(buffer[shard_rank], shard_rank=shard_rank)[position].view(rows.shape))


def start_reduce_scatter(buffer: Tensor, *, out: Tensor, world: World) -> Callable[[], object]:
    """Start the reduce-scatter of `buffer`, of shape (num_shards, chunk_numel), to `out`; return the wait function."""
    if world.group is None:
        out.copy_(buffer.view(-1))
        return _no_wait
    world.record_operation("reduce_scatter", buffer)
    work = REDUCE_SCATTER(out, buffer.view(-1), group=world.group, async_op=True)
    wait: Callable[[], object] = work.wait
    return wait


def start_all_gather(chunk: Tensor, *, out: Tensor, world: World) -> Callable[[], object]:
    """Start the all-gather of all chunks to `out`, of shape (num_shards, chunk_numel); return the wait function."""
    if world.group is None:
        out.view(-1).copy_(chunk)
        return _no_wait
    world.record_operation("all_gather", chunk)
    work = ALL_GATHER(out.view(-1), chunk, group=world.group, async_op=True)
    wait: Callable[[], object] = work.wait
    return wait


def _no_wait() -> None:
    return None
