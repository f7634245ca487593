"""Resharding reads: tensors stored in pieces over several files are read box by box where they are needed."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path

from paceline.checkpoint.files.safetensors_io import (
    ITEM_BYTES,
    Shape,
    TensorBytes,
    TensorEntry,
    check_tensors,
    read_tensors,
)
from paceline.errors import CheckpointError

Place = tuple[Shape, Shape, Shape]  # where it begins in the whole tensor, where in what is asked for, its size


@dataclass(frozen=True, kw_only=True)
class StoredShard:
    """An entry of one file: a whole tensor, or a box of it."""

    file: Path
    entry: TensorEntry

    @property
    def at(self) -> Shape:
        """The offset of the box in the whole tensor."""
        return self.entry.at or (0,) * len(self.entry.shape)

    @property
    def whole(self) -> Shape:
        """The whole tensor's shape."""
        return self.entry.shape if self.entry.whole is None else self.entry.whole

    def read(self) -> TensorBytes:
        """Return the shard's bytes, compared with their digest.

        Raises:
            CheckpointError: they are not those that were written.
        """
        return next(read_tensors(self.file, [self.entry]))


def check_pieces(pieces: Iterable[StoredShard]) -> None:
    """Compare the bytes of pieces with their digests, a block at a time; each file is opened once.

    Raises:
        CheckpointError: they are not those that were written.
    """
    by_file: dict[Path, list[TensorEntry]] = {}
    for piece in pieces:
        by_file.setdefault(piece.file, []).append(piece.entry)
    for file, entries in by_file.items():
        check_tensors(file, sorted(entries, key=lambda entry: entry.start))


class StoredTensors(Mapping[str, TensorBytes]):
    """A mapping from name to the stored tensors of one kind. Nothing is read before it is requested, nor cached."""

    def __init__(self, pieces: Sequence[StoredShard]) -> None:
        self._pieces: dict[str, list[StoredShard]] = {}
        for piece in pieces:
            self._pieces.setdefault(piece.entry.name, []).append(piece)
        for name, found in self._pieces.items():
            check_cover(name, [piece.entry for piece in found])

    def __getitem__(self, name: str) -> TensorBytes:
        """Return the whole tensor.

        Raises:
            CheckpointError: its bytes are not those that were written.
        """
        start = (0,) * len(self.shape(name))
        return self.part(name, shape=self.shape(name), boxes=[(start, start, self.shape(name))])

    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)

    def __contains__(self, name: object) -> bool:
        return name in self._pieces  # without reading it, as the mapping's own way would

    def shape(self, name: str) -> Shape:
        """Return the whole tensor's shape."""
        return self._pieces[name][0].whole

    def dtype(self, name: str) -> str:
        """Return the tensor's type as the file names it."""
        return self._pieces[name][0].entry.dtype

    def pieces(self, name: str) -> Sequence[StoredShard]:
        """Return the stored pieces of a tensor."""
        return self._pieces[name]

    def every_piece(self) -> Iterator[StoredShard]:
        """Return the stored pieces of all tensors."""
        return chain.from_iterable(self._pieces.values())

    def part(self, name: str, *, shape: Shape, boxes: Sequence[Place]) -> TensorBytes:
        """Return a tensor of `shape`, assembled from `boxes` of the whole one; only pieces that overlap them are read.

        Raises:
            CheckpointError: a piece's bytes are not those that were written.
        """
        pieces = self._pieces[name]
        if len(pieces) == 1 and len(boxes) == 1 and boxes[0][2] == shape == self.shape(name):
            return replace(pieces[0].read(), at=None, whole=None)
        item = ITEM_BYTES[self.dtype(name)]
        data = bytearray(math.prod(shape) * item)
        for piece in pieces:
            met = [found for box in boxes if (found := _met(piece, box)) is not None]
            if met:
                source = piece.read().data
                for at, to, size in met:
                    copy_box(source, data, size=size, item=item, at=(piece.entry.shape, at), to=(shape, to))
        return TensorBytes(name=name, dtype=self.dtype(name), shape=shape, data=memoryview(data))


def check_cover(name: str, entries: Sequence[TensorEntry]) -> None:
    """Check that the pieces hold each element of the tensor exactly once.

    Raises:
        CheckpointError: naming the tensor.
    """
    if len(entries) == 1 and entries[0].at is None and entries[0].whole is None:
        return  # nearly every tensor lies in one piece
    whole = {entry.shape if entry.whole is None else entry.whole for entry in entries}
    if len(whole) != 1 or len({entry.dtype for entry in entries}) != 1:
        raise CheckpointError(f"the pieces of {name} belong to different tensors.")
    held = sum(math.prod(entry.shape) for entry in entries)
    wanted = math.prod(next(iter(whole)))
    if held < wanted or (held != wanted and len(entries) == 1):
        raise CheckpointError(f"the pieces of {name} hold {held} of its {wanted} elements.")
    extent = next(iter(whole))
    boxes = [(entry.at or (0,) * len(entry.shape), entry.shape, entry.key) for entry in entries]
    for at, size, key in boxes:
        if any(begin + length > most for begin, length, most in zip(at, size, extent, strict=True)):
            raise CheckpointError(f"{key} reaches beyond {name}{list(extent)}.")
    twice = _held_twice([box for box in boxes if 0 not in box[1]])
    if twice:
        raise CheckpointError(f"{twice} overlaps another piece: two ranks hold the same elements of {name}.")


def _held_twice(boxes: Sequence[tuple[Shape, Shape, str]]) -> str:
    """Return the key of a box that overlaps another, or an empty string.

    Boxes are swept along the dimension in which most of them begin at different places, so that few lie next to each
    other: pieces of one row, or of one column, take linear time.
    """
    dims = range(len(boxes[0][0]) if boxes else 0)
    along = max(dims, key=lambda dim: len({at[dim] for at, _, _ in boxes}), default=None)
    if along is None:
        return boxes[1][2] if len(boxes) > 1 else ""
    ordered = sorted(boxes, key=lambda box: box[0][along])
    for index, (at, size, key) in enumerate(ordered):
        for other, length, _ in ordered[index + 1 :]:
            if other[along] >= at[along] + size[along]:
                break
            if _overlap(at, size, other, length) is not None:
                return key
    return ""


def copy_box(
    source: memoryview,
    target: bytearray,
    *,
    size: Shape,
    item: int,
    at: tuple[Shape, Shape],
    to: tuple[Shape, Shape],
) -> None:
    """Copy `size` elements of `item` bytes; `at` and `to` are each side's shape and the box's offset in it."""
    dims = len(size)
    while dims and size[dims - 1] == at[0][dims - 1] == to[0][dims - 1]:
        dims -= 1  # whole rows on both sides: one run of bytes
    dims = max(dims - 1, 0)
    length = math.prod(size[dims:]) * item
    for index in product(*map(range, size[:dims])):
        begin, end = (_offset(side, index) * item for side in (at, to))
        target[end : end + length] = source[begin : begin + length]


def _offset(side: tuple[Shape, Shape], index: Shape) -> int:
    shape, start = side
    offset = 0
    for dim, (extent, begin) in enumerate(zip(shape, start, strict=True)):
        offset = offset * extent + begin + (index[dim] if dim < len(index) else 0)
    return offset


def _met(piece: StoredShard, box: Place) -> Place | None:
    """Return the overlap of a piece and a box: its offset in the piece, its offset in the result, and its size."""
    whole, local, size = box
    found = _overlap(piece.at, piece.entry.shape, whole, size)
    if found is None:
        return None
    start, length = found
    inside = tuple(a - b for a, b in zip(start, piece.at, strict=True))
    return inside, tuple(o + a - b for o, a, b in zip(local, start, whole, strict=True)), length


def _overlap(at: Shape, size: Shape, other: Shape, length: Shape) -> tuple[Shape, Shape] | None:
    start = tuple(map(max, at, other))
    stop = tuple(min(a + s, b + n) for a, s, b, n in zip(at, size, other, length, strict=True))
    if any(end <= begin for begin, end in zip(start, stop, strict=True)):
        return None
    return start, tuple(end - begin for begin, end in zip(start, stop, strict=True))
