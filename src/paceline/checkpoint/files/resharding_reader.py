"""Resharding reads: tensors are stored as shards in several files, and a rank reads the shards that it needs.

A rank copies the boxes that it needs from these shards. A box is a rectangular part of a tensor: an offset and a size
in each dimension.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path

from typing_extensions import override

from paceline.checkpoint.files.safetensors_io import (
    ITEM_BYTES,
    Shape,
    TensorBytes,
    TensorEntry,
    check_tensors,
    read_tensors,
)
from paceline.errors import CheckpointError

BoxRead = tuple[Shape, Shape, Shape]  # offset in the full tensor, offset in the result, size


def _do_nothing() -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class StoredShard:
    """One tensor in a file: a full tensor, or a box of a larger tensor.

    `obtain` is called before the file is read. It gets the file, if that is on another machine.
    """

    file: Path
    entry: TensorEntry
    obtain: Callable[[], None] = _do_nothing

    @property
    def offset(self) -> Shape:
        """The offset of the box in the full tensor."""
        return self.entry.at or (0,) * len(self.entry.shape)

    @property
    def full_shape(self) -> Shape:
        """The full tensor's shape."""
        return self.entry.shape if self.entry.whole is None else self.entry.whole

    def read(self) -> TensorBytes:
        """Return the shard's bytes, compared with their digest.

        Raises:
            CheckpointError: the bytes do not match their digest.
        """
        self.obtain()
        return next(read_tensors(self.file, [self.entry]))


def check_digests(shards: Iterable[StoredShard]) -> None:
    """Compare the bytes of shards with their digests, a block at a time; each file is opened once.

    Raises:
        CheckpointError: the bytes do not match their digest.
    """
    by_file: dict[Path, list[TensorEntry]] = {}
    for shard in shards:
        by_file.setdefault(shard.file, []).append(shard.entry)
    for file, entries in by_file.items():
        check_tensors(file, sorted(entries, key=lambda entry: entry.start))


class StoredTensors(Mapping[str, TensorBytes]):
    """A mapping from name to the stored tensors of one kind. Tensors are read on access and not cached."""

    def __init__(self, shards: Sequence[StoredShard]) -> None:
        self._shards: dict[str, list[StoredShard]] = {}
        for shard in shards:
            self._shards.setdefault(shard.entry.name, []).append(shard)
        for name, tensor_shards in self._shards.items():
            check_coverage(name, [shard.entry for shard in tensor_shards])

    @override
    def __getitem__(self, name: str) -> TensorBytes:
        """Return the full tensor.

        Raises:
            CheckpointError: the bytes do not match their digest.
        """
        start = (0,) * len(self.shape(name))
        return self.read_boxes(name, shape=self.shape(name), boxes=[(start, start, self.shape(name))])

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._shards)

    @override
    def __len__(self) -> int:
        return len(self._shards)

    @override
    def __contains__(self, name: object) -> bool:
        return name in self._shards  # `Mapping.__contains__` would read the tensor

    def shape(self, name: str) -> Shape:
        """Return the full tensor's shape."""
        return self._shards[name][0].full_shape

    def dtype(self, name: str) -> str:
        """Return the tensor's type as safetensors names it, such as `BF16`."""
        return self._shards[name][0].entry.dtype

    def shards(self, name: str) -> Sequence[StoredShard]:
        """Return the stored shards of a tensor."""
        return self._shards[name]

    def all_shards(self) -> Iterator[StoredShard]:
        """Return the stored shards of all tensors."""
        return chain.from_iterable(self._shards.values())

    def read_boxes(self, name: str, *, shape: Shape, boxes: Sequence[BoxRead]) -> TensorBytes:
        """Return a tensor of `shape`, assembled from boxes of the full tensor. Only shards that overlap a box are read.

        Raises:
            CheckpointError: a shard's bytes do not match their digest.
        """
        shards = self._shards[name]
        if len(shards) == 1 and len(boxes) == 1 and boxes[0][2] == shape == self.shape(name):
            return replace(shards[0].read(), at=None, whole=None)
        item_bytes = ITEM_BYTES[self.dtype(name)]
        data = bytearray(math.prod(shape) * item_bytes)
        for shard in shards:
            overlaps = [overlap for box in boxes if (overlap := _intersect_box(shard, box)) is not None]
            if overlaps:
                source = shard.read().data
                for source_offset, target_offset, size in overlaps:
                    copy_box(
                        source,
                        data,
                        size=size,
                        item_bytes=item_bytes,
                        source_box=(shard.entry.shape, source_offset),
                        target_box=(shape, target_offset),
                    )
        return TensorBytes(name=name, dtype=self.dtype(name), shape=shape, data=memoryview(data))


def check_coverage(name: str, entries: Sequence[TensorEntry]) -> None:
    """Check that the shards hold each element of the tensor exactly once.

    Raises:
        CheckpointError: an element is in no shard, or in two; the message names the tensor.
    """
    if len(entries) == 1 and entries[0].at is None and entries[0].whole is None:
        return  # a full tensor in one file, the most common case
    full_shapes = {entry.shape if entry.whole is None else entry.whole for entry in entries}
    if len(full_shapes) != 1 or len({entry.dtype for entry in entries}) != 1:
        raise CheckpointError(f"the shards of {name} belong to different tensors.")
    num_stored = sum(math.prod(entry.shape) for entry in entries)
    full_shape = next(iter(full_shapes))
    num_elements = math.prod(full_shape)
    if num_stored < num_elements or (num_stored != num_elements and len(entries) == 1):
        raise CheckpointError(f"the shards of {name} hold {num_stored} of its {num_elements} elements.")
    boxes = [(entry.at or (0,) * len(entry.shape), entry.shape, entry.key) for entry in entries]
    for at, size, key in boxes:
        if any(start + length > total for start, length, total in zip(at, size, full_shape, strict=True)):
            raise CheckpointError(f"the shard {key} reaches beyond the shape {list(full_shape)} of {name}.")
    overlapping = _find_overlapping([box for box in boxes if 0 not in box[1]])
    if overlapping:
        raise CheckpointError(f"{overlapping} overlaps another shard: two ranks hold the same elements of {name}.")


def _find_overlapping(boxes: Sequence[tuple[Shape, Shape, str]]) -> str:
    """Return the key of a box that overlaps another, or an empty string.

    Boxes are swept along the dimension with the most distinct offsets, so that few boxes are compared with each other:
    shards along one dimension take linear time.
    """
    dims = range(len(boxes[0][0]) if boxes else 0)
    sweep_dim = max(dims, key=lambda dim: len({at[dim] for at, _, _ in boxes}), default=None)
    if sweep_dim is None:
        return boxes[1][2] if len(boxes) > 1 else ""
    ordered = sorted(boxes, key=lambda box: box[0][sweep_dim])
    for index, (at, size, key) in enumerate(ordered):
        for other_at, other_size, _ in ordered[index + 1 :]:
            if other_at[sweep_dim] >= at[sweep_dim] + size[sweep_dim]:
                break
            if _intersect(at, size, other_at, other_size) is not None:
                return key
    return ""


def copy_box(
    source: memoryview,
    target: bytearray,
    *,
    size: Shape,
    item_bytes: int,
    source_box: tuple[Shape, Shape],
    target_box: tuple[Shape, Shape],
) -> None:
    """Copy a box of `size` elements, each of `item_bytes` bytes.

    `source_box` and `target_box` are pairs: the shape of the source or target array, and the box's offset in it.
    """
    dims = len(size)
    while dims and size[dims - 1] == source_box[0][dims - 1] == target_box[0][dims - 1]:
        dims -= 1  # full rows on both sides are contiguous
    dims = max(dims - 1, 0)
    length = math.prod(size[dims:]) * item_bytes
    for index in product(*map(range, size[:dims])):
        read_start, write_start = (_offset(box, index) * item_bytes for box in (source_box, target_box))
        target[write_start : write_start + length] = source[read_start : read_start + length]


def _offset(box: tuple[Shape, Shape], index: Shape) -> int:
    """Return the position, in the flat array, of the element at `index` in a box."""
    shape, start = box
    offset = 0
    for dim, (extent, begin) in enumerate(zip(shape, start, strict=True)):
        offset = offset * extent + begin + (index[dim] if dim < len(index) else 0)
    return offset


def _intersect_box(shard: StoredShard, box: BoxRead) -> BoxRead | None:
    """Return the overlap of a shard and a box: its offset in the shard, its offset in the result, and its size."""
    full_offset, result_offset, size = box
    overlap = _intersect(shard.offset, shard.entry.shape, full_offset, size)
    if overlap is None:
        return None
    start, length = overlap
    source_offset = tuple(a - b for a, b in zip(start, shard.offset, strict=True))
    target_offset = tuple(o + a - b for o, a, b in zip(result_offset, start, full_offset, strict=True))
    return source_offset, target_offset, length


def _intersect(at: Shape, size: Shape, other_at: Shape, other_size: Shape) -> tuple[Shape, Shape] | None:
    """Return the offset and the size of the overlap of two boxes; None if they do not overlap."""
    start = tuple(map(max, at, other_at))
    stop = tuple(min(a + s, b + n) for a, s, b, n in zip(at, size, other_at, other_size, strict=True))
    if any(end <= begin for begin, end in zip(start, stop, strict=True)):
        return None
    return start, tuple(end - begin for begin, end in zip(start, stop, strict=True))
