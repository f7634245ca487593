"""Sharding of one tensor dimension over the ranks, and its propagation through reshapes and slices.

A dimension may have several sections, such as q, k and v in the weight of a fused projection. Each section is sharded
separately, and a rank's shard is the concatenation of its slices of all sections. Shardings depend only on shapes, not
on values, so every rank computes the same ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

SectionBounds = tuple[int, ...]
"""The positions in a section at which the ranks' slices start, and its size as the last element."""


@dataclass(frozen=True, kw_only=True)
class DimSharding:
    """The sharding of dimension `dim`. `sections` has the bounds of each section.

    Rank r holds the range `[bounds[r], bounds[r + 1])` of a section, counted from the section's start.
    """

    dim: int
    sections: tuple[SectionBounds, ...]

    @cached_property
    def size(self) -> int:
        """Return the full size of the dimension."""
        return sum(bounds[-1] for bounds in self.sections)

    @property
    def ranks(self) -> int:
        """Return the number of ranks over which the dimension is sharded."""
        return len(self.sections[0]) - 1

    def local_size(self, rank: int) -> int:
        """Return the number of elements along the dimension that a rank holds."""
        return sum(bounds[rank + 1] - bounds[rank] for bounds in self.sections)

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """Return the `[start, stop)` ranges of the full dimension that a rank holds, one per section."""
        ranges, offset = [], 0
        for bounds in self.sections:
            ranges.append((offset + bounds[rank], offset + bounds[rank + 1]))
            offset += bounds[-1]
        return ranges

    def merge_ranks(self, count: int) -> "DimSharding":
        """Return the sharding over fewer ranks, each of which holds the slices of `count` consecutive ranks."""
        return DimSharding(dim=self.dim, sections=tuple(bounds[::count] for bounds in self.sections))

    def select_ranks(self, ranks: range) -> "DimSharding":
        """Return the sharding, over consecutive ranks, of the tensor that consists of their slices."""
        sections = (bounds[ranks.start : ranks.stop + 1] for bounds in self.sections)
        return DimSharding(dim=self.dim, sections=tuple(tuple(b - bounds[0] for b in bounds) for bounds in sections))

    def with_dim(self, dim: int) -> "DimSharding":
        """Return the same sharding for another dimension."""
        return self if dim == self.dim else DimSharding(dim=dim, sections=self.sections)

    def repeat_interleave(self, repeats: int) -> "DimSharding":
        """Return the sharding of the result of `repeat_interleave` along the dimension."""
        sections = tuple(tuple(bound * repeats for bound in bounds) for bounds in self.sections)
        return DimSharding(dim=self.dim, sections=sections)

    def find_sections(self, start: int, stop: int) -> "tuple[int, int] | None":
        """Return the sections `[first, last)` that make up `[start, stop)` exactly, or None."""
        ends = [0]
        for bounds in self.sections:
            ends.append(ends[-1] + bounds[-1])
        if start not in ends or stop not in ends or stop <= start:
            return None
        return ends.index(start), ends.index(stop)


def shard_evenly(size: int, *, ranks: int, sections: Sequence[int] = (), dim: int = 0, unit: int = 1) -> DimSharding:
    """Return a sharding of each section that is as even as possible, in multiples of `unit`.

    Without `sections` the dimension is one section.
    """
    sizes = tuple(sections) or (size,)
    assert sum(sizes) == size
    return DimSharding(
        dim=dim, sections=tuple(tuple(n // unit * r // ranks * unit for r in range(ranks + 1)) for n in sizes)
    )


def slice_shard(full_tensor: Tensor, sharding: DimSharding, rank: int) -> Tensor:
    """Return a rank's shard of a full tensor."""
    slices = [full_tensor.narrow(sharding.dim, start, stop - start) for start, stop in sharding.ranges(rank)]
    return slices[0] if len(slices) == 1 else torch.cat(slices, sharding.dim)


def concat_shards(shards: list[Tensor], sharding: DimSharding) -> Tensor:
    """Return the full tensor from the shards of all ranks."""
    if len(sharding.sections) == 1:
        return torch.cat(shards, sharding.dim)
    slices, offsets = [], [0] * len(shards)
    for bounds in sharding.sections:
        for rank, shard in enumerate(shards):
            length = bounds[rank + 1] - bounds[rank]
            slices.append(shard.narrow(sharding.dim, offsets[rank], length))
            offsets[rank] += length
    return torch.cat(slices, sharding.dim)


@dataclass(frozen=True, kw_only=True)
class IncompatibleReshape:
    """A reshape or slice whose result cannot be described as a sharding.

    `sections` and `heads` suggest another sharding of the input, with which the operation may be possible. `sections`
    are the sizes of its sections. `heads` is the number of attention heads; the sharding must not split a head.
    """

    description: str
    sections: tuple[int, ...] = ()
    heads: int | None = None


@lru_cache(maxsize=4096)
def reshape_sharding(
    sharding: DimSharding, old_shape: tuple[int, ...], new_shape: tuple[int, ...]
) -> DimSharding | IncompatibleReshape:
    """Return the sharding after a tensor of full shape `old_shape` is reshaped (row-major) to `new_shape`."""
    for old_dims, new_dims in _equal_product_groups(old_shape, new_shape):
        if sharding.dim in old_dims:
            return _reshape_group(
                sharding,
                [old_shape[d] for d in old_dims],
                sharding.dim - old_dims[0],
                [new_shape[d] for d in new_dims],
                new_dims,
            )
    return IncompatibleReshape(description=f"a reshape of {list(old_shape)} to {list(new_shape)}")


def _equal_product_groups(old_shape: Sequence[int], new_shape: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return pairs (old dimensions, new dimensions) whose sizes have equal products; each pair is as small as possible.

    Return an empty list if the shapes have different numbers of elements.
    """
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old_shape) or j < len(new_shape):
        old_dims, new_dims, old_size, new_size = [], [], 1, 1
        if i < len(old_shape):
            old_dims, old_size, i = [i], old_shape[i], i + 1
        if j < len(new_shape):
            new_dims, new_size, j = [j], new_shape[j], j + 1
        while old_size != new_size:
            if (old_size < new_size and i < len(old_shape)) or j >= len(new_shape):
                if i >= len(old_shape):
                    return []
                old_dims, old_size, i = [*old_dims, i], old_size * old_shape[i], i + 1
            else:
                new_dims, new_size, j = [*new_dims, j], new_size * new_shape[j], j + 1
        groups.append((old_dims, new_dims))
    return groups


def _reshape_group(
    sharding: DimSharding, old_shape: list[int], position: int, new_shape: list[int], dims: list[int]
) -> DimSharding | IncompatibleReshape:
    """Return the sharding after one group of dimensions is reshaped.

    `old_shape` and `new_shape` are the sizes of the group's dimensions before and after the reshape. `position` is the
    index of the sharded dimension in `old_shape`. `dims[i]` is the index of the dimension of size `new_shape[i]` in the
    full result.
    """
    inner = math.prod(old_shape[position + 1 :])
    flat_sections = [tuple(bound * inner for bound in bounds) for bounds in sharding.sections]
    flat_sections *= math.prod(old_shape[:position])
    for new_position, size in enumerate(new_shape):
        outer, inner = math.prod(new_shape[:new_position]), math.prod(new_shape[new_position + 1 :])
        sections = _unflatten_sections(flat_sections, outer=outer, inner=inner, size=size)
        if sections is not None:
            return DimSharding(dim=dims[new_position], sections=sections)
    return _suggest_sharding(sharding, old_shape, new_shape)


def _unflatten_sections(
    flat_sections: list[SectionBounds], *, outer: int, inner: int, size: int
) -> tuple[SectionBounds, ...] | None:
    """Return the sections of the middle dimension after a reshape to (outer, size, inner).

    Return None if this dimension cannot be the sharded one.
    """
    if size == 0 or outer == 0 or inner == 0 or len(flat_sections) % outer:
        return None
    period = len(flat_sections) // outer
    pattern = flat_sections[:period]
    if sum(bounds[-1] for bounds in pattern) != size * inner or flat_sections != pattern * outer:
        return None
    if any(bound % inner for bounds in pattern for bound in bounds):
        return None
    return tuple(tuple(bound // inner for bound in bounds) for bounds in pattern)


def _suggest_sharding(sharding: DimSharding, old_shape: list[int], new_shape: list[int]) -> IncompatibleReshape:
    """Return the incompatible reshape with suggested sections or heads.

    A small first dimension (3 for q, k and v) indicates a fused projection. The last dimension is the width of a head,
    so the one before it is the number of heads.
    """
    description = f"a reshape of {'×'.join(map(str, old_shape))} to {'×'.join(map(str, new_shape))}"
    nontrivial_sizes = [n for n in new_shape if n > 1]
    if (
        len(old_shape) == 1
        and len(sharding.sections) == 1
        and len(nontrivial_sizes) == 3
        and nontrivial_sizes[0] <= 4
        and old_shape[0] % nontrivial_sizes[0] == 0
    ):
        return IncompatibleReshape(
            description=description,
            sections=(old_shape[0] // nontrivial_sizes[0],) * nontrivial_sizes[0],
            heads=nontrivial_sizes[1],
        )
    heads = nontrivial_sizes[-2] if len(nontrivial_sizes) > 1 and old_shape[-1] % nontrivial_sizes[-1] == 0 else 1
    return IncompatibleReshape(description=description, heads=heads)
