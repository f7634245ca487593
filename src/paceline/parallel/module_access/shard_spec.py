"""Shard specs: the boxes that map a rank's local tensor into the full tensor.

A rank that holds the full tensor has one box; a rank that holds heads of a fused projection has several; a rank that
holds nothing has none. Each further split (by tensor parallelism, then by rows) narrows the boxes.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Place = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Box:
    """A box of shape `size`, at `full_offset` in the full tensor and at `local_offset` in this rank's local tensor."""

    whole: Place
    local: Place
    size: Place

    def of_whole(self, tensor: Tensor) -> Tensor:
        """Return the box's view of the full tensor."""
        return _view(tensor, self.whole, self.size)

    def of_local(self, tensor: Tensor) -> Tensor:
        """Return the box's view of this rank's local tensor."""
        return _view(tensor, self.local, self.size)


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """A rank's shard of a full tensor of shape `shape`. `local_shape` is None if the rank holds nothing."""

    shape: Place
    local: Place | None
    boxes: tuple[Box, ...]

    @staticmethod
    def all_of(shape: Sequence[int]) -> "ShardSpec":
        """Return the spec of a rank that holds the full tensor."""
        size = tuple(shape)
        start = (0,) * len(size)
        return ShardSpec(shape=size, local=size, boxes=(Box(whole=start, local=start, size=size),))

    @staticmethod
    def none_of(shape: Sequence[int]) -> "ShardSpec":
        """Return the spec of a rank that holds nothing, such as another pipeline stage."""
        return ShardSpec(shape=tuple(shape), local=None, boxes=())

    @staticmethod
    def of_ranges(shape: Sequence[int], *, dim: int, ranges: Sequence[tuple[int, int]]) -> "ShardSpec":
        """Return the spec of `[start, stop)` ranges along `dim`, concatenated in the local tensor."""
        whole = ShardSpec.all_of(shape)
        boxes: list[Box] = []
        offset = 0
        for start, stop in ranges:
            boxes += _moved(whole.narrowed(dim=dim, start=start, stop=stop), dim=dim, by=offset)
            offset += stop - start
        local = tuple(offset if d == dim else n for d, n in enumerate(shape))
        return ShardSpec(shape=tuple(shape), local=local, boxes=tuple(boxes))

    @property
    def is_all(self) -> bool:
        """Return whether the rank holds the full tensor."""
        return self.local is not None and self.numel == math.prod(self.shape)

    @property
    def numel(self) -> int:
        """Return the number of elements that the rank holds."""
        return 0 if self.local is None else math.prod(self.local)

    def narrowed(self, *, dim: int, start: int, stop: int) -> "ShardSpec":
        """Return the spec of the rows `[start, stop)` of the local tensor along `dim`."""
        assert self.local is not None
        boxes = [cut for box in self.boxes if (cut := _narrowed(box, dim, start, stop)) is not None]
        local = tuple(max(stop - start, 0) if d == dim else n for d, n in enumerate(self.local))
        return ShardSpec(shape=self.shape, local=local, boxes=tuple(boxes))

    def take(self, whole: Tensor) -> Tensor:
        """Return a copy of this rank's shard of the full tensor."""
        assert self.local is not None
        found = whole.new_empty(self.local)
        for box in self.boxes:
            box.of_local(found).copy_(box.of_whole(whole))
        return found

    def put(self, local: Tensor, *, into: Tensor) -> None:
        """Copy this rank's shard into the full tensor."""
        for box in self.boxes:
            box.of_whole(into).copy_(box.of_local(local))

    def as_json(self) -> list[Any]:
        """Return the spec as JSON values, for the other ranks and the manifest."""
        boxes = [[list(box.whole), list(box.local), list(box.size)] for box in self.boxes]
        return [list(self.shape), None if self.local is None else list(self.local), boxes]

    @staticmethod
    def from_json(value: Sequence[Any]) -> "ShardSpec":
        """Return the spec that `as_json` encoded."""
        shape, local, boxes = value
        return ShardSpec(
            shape=tuple(shape),
            local=None if local is None else tuple(local),
            boxes=tuple(Box(whole=tuple(w), local=tuple(o), size=tuple(s)) for w, o, s in boxes),
        )


Parts = Mapping[str, ShardSpec]


def row_range(rows: int, *, place: int, places: int) -> tuple[int, int]:
    """Return a rank's row range, as in `torch.chunk` and `fully_shard`: the last ranks may have fewer rows or none."""
    each = -(-rows // places) if rows else 0
    return min(place * each, rows), min((place + 1) * each, rows)


def shard_rows(part: ShardSpec, *, place: int, places: int) -> ShardSpec:
    """Return the spec of a rank's rows of the local tensor; a scalar counts as one row."""
    assert part.local is not None
    if not part.local:
        return part if place == 0 else ShardSpec(shape=part.shape, local=None, boxes=())
    start, stop = row_range(part.local[0], place=place, places=places)
    return part.narrowed(dim=0, start=start, stop=stop)


def _view(tensor: Tensor, start: Place, size: Place) -> Tensor:
    for dim, (begin, length) in enumerate(zip(start, size, strict=True)):
        tensor = tensor.narrow(dim, begin, length)
    return tensor


def _narrowed(box: Box, dim: int, start: int, stop: int) -> Box | None:
    begin = max(box.local[dim], start)
    end = min(box.local[dim] + box.size[dim], stop)
    if end <= begin:
        return None
    skipped = begin - box.local[dim]
    return Box(
        whole=_set(box.whole, dim, box.whole[dim] + skipped),
        local=_set(box.local, dim, begin - start),
        size=_set(box.size, dim, end - begin),
    )


def _moved(part: ShardSpec, *, dim: int, by: int) -> Iterator[Box]:
    for box in part.boxes:
        yield Box(whole=box.whole, local=_set(box.local, dim, box.local[dim] + by), size=box.size)


def _set(place: Place, dim: int, value: int) -> Place:
    return tuple(value if d == dim else n for d, n in enumerate(place))
