"""Flat buffer layout: the rows of several parameters, packed for one reduce-scatter or all-gather.

The buffer has one chunk for each rank of the shard group, all of one size. Parameters that are split by rows have the
same offset in every chunk, so that a full tensor is copied in or out at once; a rank with fewer rows leaves the end of
its space unused. Parameters that one rank owns follow, in that rank's chunk only.
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
    """The layout of the parameters of one bucket in a flat buffer. `chunk_numel` is the size of one rank's chunk."""

    def __init__(self, members: Sequence[NamedParameter], *, cut: Mapping[str, RowSplit], places: int) -> None:
        self.members = list(members)
        self.cuts = [cut[member.name] for member in members]
        self.places = places
        by_rows = [each.numel(0) if each.owner is None else 0 for each in self.cuts]
        shared = list(accumulate(by_rows, initial=0))
        ends = [shared[-1]] * places
        self._offsets = shared[:-1]
        for position, each in enumerate(self.cuts):
            if each.owner is not None:
                self._offsets[position] = ends[each.owner]
                ends[each.owner] += each.numel(each.owner)
        self.chunk = max(ends)

    def empty(self, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a zero-filled buffer of shape (num_shards, chunk_numel)."""
        return torch.zeros(self.places, self.chunk, dtype=dtype, device=device)

    def pieces(self, chunk: Tensor, *, place: int) -> list[Tensor]:
        """Return flat views of a rank's rows in its chunk, one per parameter."""
        sizes = [each.numel(place) for each in self.cuts]
        return [chunk.narrow(0, o if n else 0, n) for o, n in zip(self._offsets, sizes, strict=True)]

    def pairs(self, position: int, buffer: Tensor, tensor: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return pairs of matching views of the buffer and of a parameter's contiguous tensor, as few as possible."""
        cut, offset, flat = self.cuts[position], self._offsets[position], tensor.view(-1)
        if cut.owner is not None:
            return [(buffer[cut.owner].narrow(0, offset, flat.numel()), flat)] if flat.numel() else []
        each = cut.numel(0)
        full = flat.numel() // each if each else 0
        found = [(buffer[:full, offset : offset + each], flat[: full * each].view(full, each))] if full else []
        rest = flat[full * each :]
        return [*found, (buffer[full].narrow(0, offset, rest.numel()), rest)] if rest.numel() else found

    def by_place(self, position: int, buffer: Tensor, tensor: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield flat (buffer, tensor) views of a parameter's elements, rank by rank; strided rows are copied first."""
        for place, cut in enumerate([self.cuts[position]] * self.places):
            if cut.numel(place):
                room = buffer[place].narrow(0, self._offsets[position], cut.numel(place))
                yield room, cut.rows(tensor, place).reshape(-1)

    def put(self, chunk: Tensor, locals_: Sequence[Tensor], *, place: int) -> None:
        """Copy a rank's local tensors into its chunk."""
        pairs = [(p, t) for p, t in zip(self.pieces(chunk, place=place), locals_, strict=True) if t.numel()]
        copy_all([piece.view(tensor.shape) for piece, tensor in pairs], [tensor for _, tensor in pairs])

    def spread(self, buffer: Tensor, holders: Sequence[Tensor]) -> None:
        """Copy all ranks' rows from the buffer into the full tensors."""
        pairs = []
        for position, holder in enumerate(holders):
            if holder.is_contiguous():
                pairs += self.pairs(position, buffer, holder)
            else:
                self._spread_strided(position, buffer, holder)
        copy_all([target for _, target in pairs], [source for source, _ in pairs])

    def _spread_strided(self, position: int, buffer: Tensor, holder: Tensor) -> None:
        cut = self.cuts[position]
        for place in range(self.places):
            rows = cut.rows(holder, place)
            if rows.numel():
                rows.copy_(self.pieces(buffer[place], place=place)[position].view(rows.shape))


def start_reduce_scatter(buffer: Tensor, *, out: Tensor, world: World) -> Callable[[], object]:
    """Start the reduce-scatter of `buffer`, of shape (num_shards, chunk_numel), to `out`; return the wait function."""
    if world.group is None:
        out.copy_(buffer.view(-1))
        return _nothing
    world.sends("reduce_scatter", buffer)
    work = REDUCE_SCATTER(out, buffer.view(-1), group=world.group, async_op=True)
    wait: Callable[[], object] = work.wait
    return wait


def start_all_gather(chunk: Tensor, *, out: Tensor, world: World) -> Callable[[], object]:
    """Start the all-gather of all chunks to `out`, of shape (num_shards, chunk_numel); return the wait function."""
    if world.group is None:
        out.view(-1).copy_(chunk)
        return _nothing
    world.sends("all_gather", chunk)
    work = ALL_GATHER(out.view(-1), chunk, group=world.group, async_op=True)
    wait: Callable[[], object] = work.wait
    return wait


def _nothing() -> None:
    return None
