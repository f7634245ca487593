"""Shard ownership: which bytes of a tensor this rank writes, and how it reads its shard from any pieces."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.checkpoint.files.resharding_reader import StoredTensors
from paceline.checkpoint.files.safetensors_io import Writable
from paceline.checkpoint.tensor_bytes import from_bytes, lazy_tensor
from paceline.parallel.module_access.shard_spec import Box, ShardSpec


def own_boxes(parts: Sequence[ShardSpec], rank: int) -> list[Box]:
    """Return the boxes that this rank writes: a box that several ranks hold belongs to the first one."""
    seen: set[tuple[object, object]] = set()
    mine: list[Box] = []
    for part in parts[: rank + 1]:
        mine = [box for box in part.boxes if (box.whole, box.size) not in seen]
        seen |= {(box.whole, box.size) for box in part.boxes}
    return mine


def writer_rank(parts: Sequence[ShardSpec]) -> int:
    """Return the first rank that holds a part of the tensor; 0 for a tensor without elements."""
    return next((rank for rank, part in enumerate(parts) if part.boxes), 0)


def owned_shards(
    name: str, *, dtype: torch.dtype, find: Callable[[], Tensor], parts: Sequence[ShardSpec], rank: int
) -> list[Writable]:
    """Return the shards that this rank writes of a tensor; `find` returns its local part at write time.

    Every element belongs to exactly one rank: the first one that holds it.
    """
    shape = parts[rank].shape
    if not math.prod(shape):
        return (
            [lazy_tensor(name, dtype=dtype, shape=shape, find=lambda: torch.empty(shape, dtype=dtype))]
            if not rank
            else []
        )
    return [
        lazy_tensor(
            name,
            dtype=dtype,
            shape=box.size,
            find=lambda box=box: box.of_local(find()),  # type: ignore[misc]
            at=None if box.size == shape else box.whole,
            whole=None if box.size == shape else shape,
        )
        for box in own_boxes(parts, rank)
    ]


def read_part(stored: StoredTensors, name: str, *, part: ShardSpec) -> Tensor:
    """Return this rank's shard of a stored tensor.

    Raises:
        CheckpointError: a piece of it is not what was written.
    """
    assert part.local is not None
    boxes = [(box.whole, box.local, box.size) for box in part.boxes]
    return from_bytes(stored.part(name, shape=part.local, boxes=boxes))
