"""A shard spec maps a rank's local tensor into the full tensor, box by box.

A rank that holds the full tensor has one box; a rank that holds heads of a fused projection has several; a rank that
holds no elements has none. Each further split (by tensor parallelism, then by rows) narrows the boxes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Dims = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Box:
    """A box of shape `size`, at `full_offset` in the full tensor and at `local_offset` in this rank's local tensor."""

    full_offset: Dims
    local_offset: Dims
    size: Dims

    def view_full(self, full_tensor: Tensor) -> Tensor:
        """Return the box's view of the full tensor."""
        return _view(full_tensor, self.full_offset, self.size)

    def view_local(self, local_tensor: Tensor) -> Tensor:
        """Return the box's view of this rank's local tensor."""
        return _view(local_tensor, self.local_offset, self.size)


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """A rank's shard of a full tensor of shape `shape`.

    `local_shape` is the shape of the rank's local tensor, which may have no rows. It is None if the rank has no
    local tensor.
    """

    shape: Dims
    local_shape: Dims | None
    boxes: tuple[Box, ...]

    @staticmethod
    def full(shape: Sequence[int]) -> "ShardSpec":
        """Return the spec of a rank that holds the full tensor."""
        size = tuple(shape)
        start = (0,) * len(size)
        return ShardSpec(shape=size, local_shape=size, boxes=(Box(full_offset=start, local_offset=start, size=size),))

    @staticmethod
    def empty(shape: Sequence[int]) -> "ShardSpec":
        """Return the spec of a rank without a local tensor, such as a rank of another pipeline stage."""
        return ShardSpec(shape=tuple(shape), local_shape=None, boxes=())

    @staticmethod
    def from_ranges(shape: Sequence[int], *, dim: int, ranges: Sequence[tuple[int, int]]) -> "ShardSpec":
        """Return the spec of `[start, stop)` ranges along `dim`, concatenated in the local tensor."""
        full = ShardSpec.full(shape)
        boxes: list[Box] = []
        offset = 0
        for start, stop in ranges:
            boxes += _shift_boxes(full.narrow(dim=dim, start=start, stop=stop), dim=dim, by=offset)
            offset += stop - start
        local_shape = tuple(offset if d == dim else n for d, n in enumerate(shape))
        return ShardSpec(shape=tuple(shape), local_shape=local_shape, boxes=tuple(boxes))

    @property
    def is_full(self) -> bool:
        """Return whether the rank holds the full tensor."""
        return self.local_shape is not None and self.numel == math.prod(self.shape)

    @property
    def numel(self) -> int:
        """Return the number of elements that the rank holds."""
        return 0 if self.local_shape is None else math.prod(self.local_shape)

    def narrow(self, *, dim: int, start: int, stop: int) -> "ShardSpec":
        """Return the spec of the rows `[start, stop)` of the local tensor along `dim`."""
        assert self.local_shape is not None
        boxes = [narrow for box in self.boxes if (narrow := _narrow_box(box, dim, start, stop)) is not None]
        local_shape = tuple(max(stop - start, 0) if d == dim else n for d, n in enumerate(self.local_shape))
        return ShardSpec(shape=self.shape, local_shape=local_shape, boxes=tuple(boxes))

    def extract(self, full_tensor: Tensor) -> Tensor:
        """Return a copy of this rank's shard of the full tensor."""
        assert self.local_shape is not None
        local_tensor = full_tensor.new_empty(self.local_shape)
        for box in self.boxes:
            box.view_local(local_tensor).copy_(box.view_full(full_tensor))
        return local_tensor

    def write_into(self, local_tensor: Tensor, *, full_tensor: Tensor) -> None:
        """Copy this rank's shard into the full tensor."""
        for box in self.boxes:
            box.view_full(full_tensor).copy_(box.view_local(local_tensor))

    def as_json(self) -> list[Any]:
        """Return the spec as JSON values, for the other ranks and the manifest."""
        boxes = [[list(box.full_offset), list(box.local_offset), list(box.size)] for box in self.boxes]
        return [list(self.shape), None if self.local_shape is None else list(self.local_shape), boxes]

    @staticmethod
    def from_json(value: Sequence[Any]) -> "ShardSpec":
        """Return the spec that `as_json` encoded."""
        shape, local_shape, boxes = value
        return ShardSpec(
            shape=tuple(shape),
            local_shape=None if local_shape is None else tuple(local_shape),
            boxes=tuple(
                Box(full_offset=tuple(full_offset), local_offset=tuple(local_offset), size=tuple(size))
                for full_offset, local_offset, size in boxes
            ),
        )


ShardSpecs = Mapping[str, ShardSpec]


def row_range(num_rows: int, *, shard_rank: int, num_shards: int) -> tuple[int, int]:
    """Return a rank's row range, as in `torch.chunk` and `fully_shard`: the last ranks may have fewer rows or none."""
    rows_per_shard = -(-num_rows // num_shards) if num_rows else 0
    return min(shard_rank * rows_per_shard, num_rows), min((shard_rank + 1) * rows_per_shard, num_rows)


def shard_rows(shard_spec: ShardSpec, *, shard_rank: int, num_shards: int) -> ShardSpec:
    """Return the spec of a rank's rows of the local tensor; a scalar counts as one row."""
    assert shard_spec.local_shape is not None
    if not shard_spec.local_shape:
        return shard_spec if shard_rank == 0 else ShardSpec(shape=shard_spec.shape, local_shape=None, boxes=())
    start, stop = row_range(shard_spec.local_shape[0], shard_rank=shard_rank, num_shards=num_shards)
    return shard_spec.narrow(dim=0, start=start, stop=stop)


def _view(tensor: Tensor, start: Dims, size: Dims) -> Tensor:
    for dim, (begin, length) in enumerate(zip(start, size, strict=True)):
        tensor = tensor.narrow(dim, begin, length)
    return tensor


def _narrow_box(box: Box, dim: int, start: int, stop: int) -> Box | None:
    """Return the part of a box in `[start, stop)` of the local tensor along `dim`; None if there is none."""
    overlap_start = max(box.local_offset[dim], start)
    overlap_stop = min(box.local_offset[dim] + box.size[dim], stop)
    if overlap_stop <= overlap_start:
        return None
    skipped = overlap_start - box.local_offset[dim]
    return Box(
        full_offset=_set(box.full_offset, dim, box.full_offset[dim] + skipped),
        local_offset=_set(box.local_offset, dim, overlap_start - start),
        size=_set(box.size, dim, overlap_stop - overlap_start),
    )


def _shift_boxes(shard_spec: ShardSpec, *, dim: int, by: int) -> Iterator[Box]:
    for box in shard_spec.boxes:
        yield Box(
            full_offset=box.full_offset,
            local_offset=_set(box.local_offset, dim, box.local_offset[dim] + by),
            size=box.size,
        )


def _set(dims: Dims, dim: int, value: int) -> Dims:
    return tuple(value if d == dim else n for d, n in enumerate(dims))
