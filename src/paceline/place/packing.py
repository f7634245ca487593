"""Packing: the rows of several parameters laid out for one reduce-scatter or all-gather.

The buffer has one chunk for each place, all of one size; a place's chunk holds its rows of each member one after
another. Places with fewer rows leave the end of their chunk unused.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.place.share import Cut
from paceline.place.units import Named
from paceline.torch_private import copy_all
from paceline.world import World


class Packing:
    """The layout of one unit."""

    def __init__(self, members: Sequence[Named], *, cut: Mapping[str, Cut], places: int) -> None:
        self.members = list(members)
        self.cuts = [cut[member.name] for member in members]
        self.places = places
        self._sizes = [[each.numel(place) for each in self.cuts] for place in range(places)]
        self.chunk = max(sum(sizes) for sizes in self._sizes)

    def empty(self, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for all places."""
        return torch.zeros(self.places, self.chunk, dtype=dtype, device=device)

    def pieces(self, chunk: Tensor, *, place: int) -> list[Tensor]:
        """The flat views of a place's rows in its chunk, one a member."""
        sizes = self._sizes[place]
        return list(chunk.narrow(0, 0, sum(sizes)).split(sizes))

    def targets(self, buffer: Tensor) -> list[list[Tensor]]:
        """For each member the flat views of its rows, one a place."""
        by_place = [self.pieces(buffer[place], place=place) for place in range(self.places)]
        return [list(column) for column in zip(*by_place, strict=True)]

    def rows(self, position: int, tensor: Tensor) -> list[Tensor]:
        """The rows of a member's tensor, one view a place."""
        return [self.cuts[position].rows(tensor, place) for place in range(self.places)]

    def put(self, chunk: Tensor, locals_: Sequence[Tensor], *, place: int) -> None:
        """Copy a place's own tensors into its chunk."""
        pairs = [(p, t) for p, t in zip(self.pieces(chunk, place=place), locals_, strict=True) if t.numel()]
        copy_all([piece.view(tensor.shape) for piece, tensor in pairs], [tensor for _, tensor in pairs])

    def spread(self, buffer: Tensor, holders: Sequence[Tensor], *, without: int) -> None:
        """Copy every other place's rows over the holders' own."""
        targets, sources = [], []
        for position, column in enumerate(self.targets(buffer)):
            for place, rows in enumerate(self.rows(position, holders[position])):
                if place != without and rows.numel():
                    targets.append(rows)
                    sources.append(column[place].view(rows.shape))
        copy_all(targets, sources)


def start_reduce_scatter(buffer: Tensor, *, out: Tensor, world: World) -> Callable[[], object]:
    """Add `buffer` of shape (places, chunk) over the world into each place's `out`; call the answer to wait."""
    if world.group is None:
        out.copy_(buffer.view(-1))
        return _nothing
    work = _REDUCE_SCATTER(out, buffer.view(-1), group=world.group, async_op=True)
    wait: Callable[[], object] = work.wait
    return wait


def start_all_gather(chunk: Tensor, *, out: Tensor, world: World) -> Callable[[], object]:
    """Collect every place's chunk in `out` of shape (places, chunk); call the answer to wait."""
    if world.group is None:
        out.view(-1).copy_(chunk)
        return _nothing
    work = _ALL_GATHER(out.view(-1), chunk, group=world.group, async_op=True)
    wait: Callable[[], object] = work.wait
    return wait


def _nothing() -> None:
    return None


# torch 2.13 has new names for both and warns at the old ones, which are all that 2.11 has.
_REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
